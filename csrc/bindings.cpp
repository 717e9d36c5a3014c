// All of the engine's Python bindings, of both modules: deadpool_ext._engine, and, compiled again with
// DEADPOOL_CUDA_MODULE, deadpool_ext._cuda.
//
// Addresses come as integers (tensor.data_ptr(), numpy's .ctypes.data), so nothing here knows torch.

#ifdef DEADPOOL_CUDA_MODULE

#include <Python.h>

#include "cuda_api.hpp"

// One capsule: Python's own C API does, and compiles in a tenth of the time.
PyMODINIT_FUNC PyInit__cuda() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_cuda",
                                   "CUDA half of the engine; used by deadpool_ext._engine alone.",
                                   -1,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject* api = PyCapsule_New(const_cast<deadpool::CudaApi*>(&deadpool::cuda_api()), deadpool::kCudaCapsule, nullptr);
  const int status = api == nullptr ? -1 : PyModule_AddObjectRef(module, "api", api);
  Py_XDECREF(api);
  if (status == 0) return module;
  Py_DECREF(module);
  return nullptr;
}

#else

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "copy_queue.hpp"
#include "crc32c.hpp"
#include "cuda_api.hpp"
#include "deadline.hpp"
#include "memory.hpp"
#include "referrers.hpp"
#include "rendezvous.hpp"
#include "socket_io.hpp"
#include "text.hpp"

namespace py = pybind11;

namespace {

using deadpool::CopyQueue;
using deadpool::text;
using std::uint32_t;
using std::uint64_t;
using Released = py::call_guard<py::gil_scoped_release>;

constexpr double kExitPatience_s = 30;

// A closing queue waits for its current job: not with Python's lock held, when it is the garbage collector that closes.
void delete_without_lock(CopyQueue* queue) {
  py::gil_scoped_release released;
  delete queue;
}

// Guarded by Python's lock. Never destroyed: queues may outlive static objects at exit.
std::vector<std::weak_ptr<CopyQueue>>& live_queues() {
  static auto* queues = new std::vector<std::weak_ptr<CopyQueue>>;
  return *queues;
}

std::shared_ptr<CopyQueue> add_live(std::shared_ptr<CopyQueue> queue) {
  auto& queues = live_queues();
  queues.erase(std::remove_if(queues.begin(), queues.end(), [](const auto& each) { return each.expired(); }),
               queues.end());
  queues.push_back(queue);
  return queue;
}

// Python's exit frees tensors and mappings in no order that we could know, so copies must have ended before. Else the
// copy thread would end the process with a fault, and hide the error that it was about to report.
void close_live_queues() {
  for (const auto& each : std::vector(live_queues())) {
    const auto queue = each.lock();
    if (!queue || queue->in_forked_child()) continue;
    py::gil_scoped_release released;
    queue->close(kExitPatience_s);
  }
}

const deadpool::CudaApi& cuda() {
  try {
    const auto capsule = py::module_::import("deadpool_ext._cuda").attr("api").cast<py::capsule>();
    return *static_cast<const deadpool::CudaApi*>(capsule.get_pointer());
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    throw std::runtime_error(
        text("CUDA copies need deadpool_ext._cuda, which is not there: ", error.what(),
             ". Build deadpool again where nvcc is on PATH (or CUDA_HOME is set); the build prints why "
             "it left the module out."));
  }
}

const uint64_t* uint64_values(const py::array& array, const char* name) {
  if (!py::isinstance<py::array_t<uint64_t>>(array))
    throw py::type_error(text(name, " must be a numpy array of dtype uint64, got ", std::string(py::str(array.dtype())),
                              ". Convert it with .astype(numpy.uint64)."));
  if (array.ndim() != 1 || !(array.flags() & py::array::c_style))
    throw py::value_error(text(name, " must have one dimension and be contiguous, got ", array.ndim(),
                               " dimension(s). Convert it with numpy.ascontiguousarray(x).ravel()."));
  return static_cast<const uint64_t*>(array.data());
}

uint64_t submit(CopyQueue& queue, const py::array& sources, const py::array& destinations, const py::array& lengths,
                uint64_t flag_address, uint64_t flag_value, std::optional<uint64_t> stream, uint64_t progress_address) {
  const uint64_t* source = uint64_values(sources, "src");
  const uint64_t* destination = uint64_values(destinations, "dst");
  const uint64_t* length = uint64_values(lengths, "lengths");
  if (sources.size() != destinations.size() || sources.size() != lengths.size())
    throw py::value_error(text("src, dst and lengths must have as many entries each, got ", sources.size(), ", ",
                               destinations.size(), " and ", lengths.size(), ". Build them from one list of tensors."));
  const auto count = static_cast<std::size_t>(sources.size());
  py::gil_scoped_release released;
  return queue.submit(source, destination, length, count, flag_address, flag_value, stream, progress_address);
}

// Runs wait(seconds) without Python's lock, in slices, so that Ctrl-C and other signals get through to Python in
// between. Ends when `over` says so of its result, or at the timeout.
template <class Wait, class Over>
auto wait_in_slices(double timeout_s, Wait wait, Over over) {
  constexpr double slice_s = 0.1;
  const auto deadline = deadpool::deadline_after(timeout_s);
  for (;;) {
    const double left_s = std::chrono::duration<double>(deadline - deadpool::Clock::now()).count();
    auto result = [&] {
      py::gil_scoped_release released;
      return wait(std::clamp(left_s, 0.0, slice_s));
    }();
    if (over(result) || left_s <= slice_s) return result;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

bool wait_ticket(CopyQueue& queue, uint64_t ticket, double timeout_s) {
  return wait_in_slices(
      timeout_s, [&](double slice_s) { return queue.wait(ticket, slice_s); }, [](bool done) { return done; });
}

bool close_queue(CopyQueue& queue, double timeout_s) {
  return wait_in_slices(
      timeout_s, [&](double slice_s) { return queue.close(slice_s); }, [](bool ended) { return ended; });
}

int wait_word(uint64_t address, uint64_t value, double timeout_s, uint64_t stop_address, uint64_t stop_value) {
  const uint64_t* word = deadpool::shared_word(address, "address");
  const uint64_t* stop = stop_address == 0 ? nullptr : deadpool::shared_word(stop_address, "stop_address");
  const auto result = wait_in_slices(
      timeout_s, [&](double slice_s) { return deadpool::wait_u64_at_least(word, value, slice_s, stop, stop_value); },
      [](deadpool::WaitResult r) { return r != deadpool::WaitResult::timed_out; });
  return static_cast<int>(result);
}

template <uint32_t (*kFunction)(const void*, std::size_t, uint32_t)>
uint32_t checksum(uint64_t address, uint64_t length, uint32_t seed) {
  deadpool::check_range(address, length, "address");
  return kFunction(reinterpret_cast<const void*>(address), length, seed);
}

CopyQueue* start_queue(std::unique_ptr<deadpool::CopyBackend> backend) {
  py::gil_scoped_release released;
  return new CopyQueue(std::move(backend));
}

void bind_copy_queue(py::module_& module) {
  py::class_<CopyQueue, std::shared_ptr<CopyQueue>>(module, "CopyQueue")
      .def(py::init([](std::optional<int> device) {
             auto backend = device ? cuda().make_backend(*device) : std::make_unique<deadpool::MemoryBackend>();
             return add_live({start_queue(std::move(backend)), &delete_without_lock});
           }),
           py::arg("device") = py::none(),
           "A queue and its thread. device None: host memory; an index: that CUDA device.")
      .def("submit", &submit, py::arg("src"), py::arg("dst"), py::arg("lengths"), py::arg("flag_address"),
           py::arg("flag_value"), py::arg("stream") = py::none(), py::arg("progress_address") = 0,
           "Queue copies of lengths[i] bytes from src[i] to dst[i]; then flag_value is stored at flag_address. Returns "
           "a ticket.")
      .def("wait", &wait_ticket, py::arg("ticket"), py::arg("timeout_s"),
           "True once the ticket's copies are done and its flag is set, False at the timeout. Raises if they failed or "
           "were dropped.")
      .def("pending", &CopyQueue::pending, "Jobs not yet done, the running one included.")
      .def("bytes_copied", &CopyQueue::bytes_copied, "Bytes copied since the queue was made.")
      .def("close", &close_queue, py::arg("timeout_s") = std::numeric_limits<double>::infinity(),
           "Finish the running job, drop the others, end the thread. False if the timeout came first.");
}

void bind_cuda(py::module_& module) {
  module.def(
      "host_register",
      [](uint64_t address, uint64_t length, std::optional<int> device) {
        const auto& api = cuda();
        py::gil_scoped_release released;
        api.host_register(address, length, device);
      },
      py::arg("address"), py::arg("length"), py::arg("device") = py::none(),
      "Page-lock mapped host memory for CUDA copies. device None: by the calling thread's current device.");
  module.def(
      "host_unregister",
      [](uint64_t address, std::optional<int> device) {
        const auto& api = cuda();
        py::gil_scoped_release released;
        api.host_unregister(address, device);
      },
      py::arg("address"), py::arg("device") = py::none(), "Undo host_register. Call it before the mapping goes.");
  module.def(
      "cuda_unavailable_reason",
      []() -> std::optional<std::string> {
        const deadpool::CudaApi* api = nullptr;
        try {
          api = &cuda();
        } catch (const std::runtime_error& error) {
          return error.what();
        }
        py::gil_scoped_release released;
        return api->unavailable_reason();
      },
      "None where CopyQueue(device) can work, else why not. Starts the CUDA driver in this process: not before a "
      "fork.");
}

void bind_memory(py::module_& module) {
  module.def(
      "memcpy",
      [](uint64_t dst, uint64_t src, uint64_t length) {
        deadpool::check_copy(src, dst, length);
        if (length != 0) std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), length);
      },
      py::arg("dst"), py::arg("src"), py::arg("length"), Released(), "Copy length bytes, without Python's lock.");
  module.def(
      "prefault", &deadpool::prefault, py::arg("address"), py::arg("length"), Released(),
      "Make every page of the range present and writable; contents stay. Raises where there is no memory for them.");
  module.def(
      "load_u64", [](uint64_t address) { return deadpool::load_u64(deadpool::shared_word(address, "address")); },
      py::arg("address"), "The word at address (acquire).");
  module.def(
      "store_u64",
      [](uint64_t address, uint64_t value) { deadpool::store_u64(deadpool::shared_word(address, "address"), value); },
      py::arg("address"), py::arg("value"), "Set the word at address (release).");
  module.def(
      "add_u64",
      [](uint64_t address, uint64_t value) {
        return deadpool::add_u64(deadpool::shared_word(address, "address"), value);
      },
      py::arg("address"), py::arg("value"), "Add to the word at address, modulo 2**64; returns its value after that.");
  module.def("wait_u64_at_least", &wait_word, py::arg("address"), py::arg("value"), py::arg("timeout_s"),
             py::arg("stop_address") = 0, py::arg("stop_value") = 0,
             "1 once *address >= value, 2 once *stop_address >= stop_value, 0 at the timeout. 1 wins where both hold.");
}

// As OSError, which Python makes ConnectionResetError, BrokenPipeError … of by the number.
template <class Call>
auto with_os_errors(Call call) {
  try {
    py::gil_scoped_release released;
    return call();
  } catch (const deadpool::SocketError& error) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.number(), error.what()).ptr());
    throw py::error_already_set();
  }
}

void bind_sockets(py::module_& module) {
  module.def(
      "send_all",
      [](int fd, uint64_t address, uint64_t length, const py::bytes& head) {
        const auto bytes = static_cast<std::string_view>(head);
        with_os_errors([&] { deadpool::send_all(fd, bytes.data(), bytes.size(), address, length); });
      },
      py::arg("fd"), py::arg("address"), py::arg("length"), py::arg("head") = py::bytes(),
      "Send head, then length bytes from address.");
  module.def(
      "send_summed",
      [](int fd, uint64_t address, uint64_t length, const py::bytes& head) {
        const auto bytes = static_cast<std::string_view>(head);
        return with_os_errors([&] { return deadpool::send_summed(fd, bytes.data(), bytes.size(), address, length); });
      },
      py::arg("fd"), py::arg("address"), py::arg("length"), py::arg("head") = py::bytes(),
      "Send head, then length bytes from address; returns the CRC32C of these.");
  module.def(
      "recv_all",
      [](int fd, uint64_t address, uint64_t length, uint32_t seed) {
        return with_os_errors([&] { return deadpool::recv_all(fd, address, length, seed); });
      },
      py::arg("fd"), py::arg("address"), py::arg("length"), py::arg("seed") = 0,
      "Receive length bytes to address; returns their CRC32C.");
  module.def(
      "open_sockets",
      [] {
        py::set found;
        for (const auto& [fd, inode] : with_os_errors(deadpool::open_sockets)) found.add(py::make_tuple(fd, inode));
        return py::reinterpret_steal<py::object>(PyFrozenSet_New(found.ptr()));
      },
      "Descriptor and inode of every socket of this process.");
}

void bind_checksum(py::module_& module) {
  module.def("crc32c", &checksum<deadpool::crc32c>, py::arg("address"), py::arg("length"), py::arg("seed") = 0,
             Released(), "CRC32C of the bytes. seed: the checksum of the bytes before these.");
  module.def("crc32c_portable", &checksum<deadpool::crc32c_portable>, py::arg("address"), py::arg("length"),
             py::arg("seed") = 0, Released(), "crc32c without the processor's instructions for it.");
  module.def("crc32c_combine", &deadpool::crc32c_combine, py::arg("crc1"), py::arg("crc2"), py::arg("len2"),
             "Checksum of a + b, from those of a and b and the length of b.");
  module.def("crc32c_implementation", &deadpool::crc32c_implementation,
             "What crc32c runs on this processor: 'sse4.2+pclmul', 'armv8+pmull' or 'portable'.");
}

void bind_rendezvous(py::module_& module) {
  py::class_<deadpool::RendezvousServer>(module, "RendezvousServer", "Serves one rendezvous until it is dropped.")
      .def(py::init<const std::string&, std::string>(), py::arg("address"), py::arg("secret"))
      .def_property_readonly("port", &deadpool::RendezvousServer::port);
}

void bind_referrers(py::module_& module) {
  module.def(
      "referrers",
      [](const py::tuple& objects) {
        const std::vector<PyObject*> found = deadpool::referrers(&PyTuple_GET_ITEM(objects.ptr(), 0), objects.size());
        py::list holders;
        for (PyObject* holder : found) {
          if (holder != objects.ptr()) holders.append(py::handle(holder));
          Py_DECREF(holder);
        }
        return holders;
      },
      py::arg("objects"),
      "The objects that refer to any of these; untracked dictionaries and tuples below tracked objects too.");
}

}  // namespace

PYBIND11_MODULE(_engine, module) {
  module.doc() = "The compiled engine: copy queues, checksum, words in shared memory.";
  bind_copy_queue(module);
  bind_cuda(module);
  bind_memory(module);
  bind_checksum(module);
  bind_sockets(module);
  bind_rendezvous(module);
  bind_referrers(module);
  py::module_::import("atexit").attr("register")(py::cpp_function(&close_live_queues));
}

#endif
