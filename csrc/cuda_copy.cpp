// The CUDA half of the copy queue. Host code only: any C++ compiler with CUDA's headers builds it, nvcc included.
//
// Linked with the static CUDA runtime, which loads the driver when first called. So the module is imported on a machine
// without one, and it does not depend on which libcudart PyTorch brought along: streams and page-locked memory belong
// to the driver's context, which both runtimes share.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_api.hpp"
#include "memory.hpp"
#include "text.hpp"

namespace deadpool {
namespace {

static_assert(sizeof(void*) == sizeof(std::uint64_t) && sizeof(std::size_t) == sizeof(std::uint64_t),
              "arrays of 64-bit addresses and lengths are handed to CUDA as they are");

void check(cudaError_t status, const char* call, const char* next) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next unrelated call of this thread would report it again
  if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice)
    next = "This machine has no CUDA device, or a driver older than the toolkit that deadpool was built with.";
  throw std::runtime_error(text(call, ": ", cudaGetErrorName(status), " (", cudaGetErrorString(status), "). ", next));
}

constexpr const char* kDeviceLost =
    "If the device is healthy, this is a fault in the addresses given; else restart the worker.";

class Event {
 public:
  explicit Event(unsigned flags) {
    check(cudaEventCreateWithFlags(&event_, flags | cudaEventDisableTiming), "cudaEventCreateWithFlags", kDeviceLost);
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Stream {
 public:
  Stream() {
    // `least` is the priority of ordinary streams, so this yields only to streams made with a higher one. Copy engines
    // work beside the kernels either way.
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange", kDeviceLost);
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, least), "cudaStreamCreateWithPriority",
          kDeviceLost);
  }
  ~Stream() {
    cudaStreamSynchronize(
        stream_);  // after a job that failed half-way: whoever closes may unmap or reuse the memory next
    cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Between two batches the stream runs a host function, which stops the copies for some ten microseconds. 64 MiB take
// 2.6 ms at the 25 GB/s of a PCIe 4 link: progress is fine enough to send behind, and costs under a percent.
constexpr std::uint64_t kBatchBytes = std::uint64_t{64} << 20;

struct FlagStore {
  std::uint64_t* flag;
  std::uint64_t value;
};

// Those of one job. A function of its own, so that a leak on a lost device has this name in its trace.
std::vector<FlagStore>* make_flag_stores(std::size_t count) {
  auto* stores = new std::vector<FlagStore>;
  stores->reserve(count);  // never grows after: the driver has pointers into it
  return stores;
}

struct Batch {
  std::vector<std::uint64_t> sources, destinations, lengths;
  std::uint64_t end = 0;  // address behind the last byte
};

// The job's entries in batches of at most kBatchBytes, entries cut where needed; in one batch if nobody asks for
// progress.
std::vector<Batch> divide(const CopyJob& job) {
  if (job.progress == nullptr) return {Batch{job.sources, job.destinations, job.lengths, 0}};
  std::vector<Batch> batches(1);
  std::uint64_t room = kBatchBytes;
  for (std::size_t i = 0; i < job.lengths.size(); ++i)
    for (std::uint64_t done = 0; done < job.lengths[i];) {
      if (room == 0) {
        batches.emplace_back();
        room = kBatchBytes;
      }
      const std::uint64_t step = std::min(room, job.lengths[i] - done);
      Batch& batch = batches.back();
      batch.sources.push_back(job.sources[i] + done);
      batch.destinations.push_back(job.destinations[i] + done);
      batch.lengths.push_back(step);
      done += step;
      batch.end = job.destinations[i] + done;
      room -= step;
    }
  return batches;
}

void CUDART_CB store_flag(void* argument) {  // on a thread of the driver; must make no CUDA call
  const auto* store = static_cast<const FlagStore*>(argument);
  store_u64(store->flag, store->value);
}

// CUDA would copy from pageable memory too, silently, through a bounce buffer and in step with the host.
void check_page_locked(std::uint64_t address, const char* name) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address)), "cudaPointerGetAttributes",
        kDeviceLost);
  if (attributes.type == cudaMemoryTypeUnregistered)
    throw std::runtime_error(text("the ", name, " 0x", std::hex, address,
                                  " must be device memory or page-locked host memory, and is "
                                  "neither. Call host_register on its mapping first."));
}

class CudaBackend : public CopyBackend {
 public:
  explicit CudaBackend(int device) : device_(device) {}

  void start() override {
    // The device is set on the queue's own thread only: setting it on the caller's would change what PyTorch works on.
    check(cudaSetDevice(device_), "cudaSetDevice", "Check the device index against CUDA_VISIBLE_DEVICES.");
    stream_.emplace();
    finished_.emplace(cudaEventBlockingSync);
  }

  void stop() noexcept override {
    finished_.reset();
    stream_.reset();
  }

  std::shared_ptr<void> order_after(std::optional<std::uint64_t> stream) override {
    if (!stream)
      throw std::invalid_argument(text("stream must be given to a queue of CUDA device ", device_,
                                       ": the copies have to follow the "
                                       "work queued there. Pass torch.cuda.current_stream().cuda_stream."));
    int current = -1;
    check(cudaGetDevice(&current), "cudaGetDevice", kDeviceLost);
    if (current != device_)
      throw std::runtime_error(text("the queue is of CUDA device ", device_,
                                    ", the calling thread's current device is ", current,
                                    ". Call torch.cuda.set_device(", device_, ") on this thread first."));
    auto event = std::make_shared<Event>(0);
    check(cudaEventRecord(event->get(), reinterpret_cast<cudaStream_t>(*stream)), "cudaEventRecord",
          "Check that stream is the cuda_stream of a live stream of the queue's device.");
    return event;
  }

  void run(const CopyJob& job, std::atomic<std::uint64_t>& bytes_copied) override {
    if (!job.lengths.empty()) {
      // All entries of a snapshot lie in one slot: first and last stand for the rest.
      for (const std::uint64_t source : {job.sources.front(), job.sources.back()}) check_page_locked(source, "source");
      for (const std::uint64_t target : {job.destinations.front(), job.destinations.back()})
        check_page_locked(target, "destination");
    }
    check(cudaStreamWaitEvent(stream_->get(), static_cast<const Event*>(job.after.get())->get(), 0),
          "cudaStreamWaitEvent", kDeviceLost);
    // Each store's pointer is the driver's once launched. All are freed below, once the stream has passed them, and not
    // at all if the device fails: whether the driver still uses them cannot be known then.
    const std::vector<Batch> batches = divide(job);
    auto* stores = make_flag_stores(batches.size() + 1);
    for (const Batch& batch : batches) {
      if (!batch.lengths.empty() && !copy_batch(batch)) copy_one_by_one(batch);
      if (job.progress != nullptr && !batch.lengths.empty())
        store_after_copies(stores->emplace_back(FlagStore{job.progress, batch.end - job.progress_base}));
    }
    store_after_copies(stores->emplace_back(FlagStore{job.flag, job.flag_value}));
    check(cudaEventRecord(finished_->get(), stream_->get()), "cudaEventRecord", kDeviceLost);
    check(cudaEventSynchronize(finished_->get()), "cudaEventSynchronize", kDeviceLost);
    delete stores;
    for (const std::uint64_t length : job.lengths) bytes_copied.fetch_add(length, std::memory_order_relaxed);
  }

 private:
  void store_after_copies(FlagStore& store) {
    check(cudaLaunchHostFunc(stream_->get(), store_flag, &store), "cudaLaunchHostFunc", kDeviceLost);
  }

  // One call for all entries: a call each costs microseconds, milliseconds for a snapshot of thousands. False where the
  // toolkit or the driver does not have it.
  bool copy_batch(const Batch& job) {
#if CUDART_VERSION >= 12080
    if (!batch_supported_) return false;
    auto** destinations = reinterpret_cast<void**>(const_cast<std::uint64_t*>(job.destinations.data()));
    auto** sources = reinterpret_cast<void**>(const_cast<std::uint64_t*>(job.sources.data()));
    auto* lengths = reinterpret_cast<std::size_t*>(const_cast<std::uint64_t*>(job.lengths.data()));
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t status = cudaMemcpyBatchAsync(destinations, const_cast<const void**>(sources), lengths,
                                                    job.lengths.size(), &attributes, &first, 1, stream_->get());
#else
    std::size_t failed = 0;
    const cudaError_t status = cudaMemcpyBatchAsync(destinations, sources, lengths, job.lengths.size(), &attributes,
                                                    &first, 1, &failed, stream_->get());
#endif
    if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver) {
      check(status, "cudaMemcpyBatchAsync", kDeviceLost);
      return true;
    }
    cudaGetLastError();
    batch_supported_ = false;
#else
    (void)job;
#endif
    return false;
  }

  void copy_one_by_one(const Batch& job) {
    for (std::size_t i = 0; i < job.lengths.size(); ++i)
      check(cudaMemcpyAsync(reinterpret_cast<void*>(job.destinations[i]), reinterpret_cast<const void*>(job.sources[i]),
                            job.lengths[i], cudaMemcpyDefault, stream_->get()),
            "cudaMemcpyAsync", kDeviceLost);
  }

  const int device_;
  std::optional<Stream> stream_;
  std::optional<Event> finished_;
  bool batch_supported_ = true;
};

// On a thread of its own when a device is named: the calling thread's current device must stay, and putting it back by
// cudaSetDevice would create a context, with its hundreds of megabytes, on a device that the process never used.
template <class Call>
void with_device(std::optional<int> device, Call call) {
  if (!device) return call();
  std::exception_ptr error;
  std::thread([&] {
    try {
      check(cudaSetDevice(*device), "cudaSetDevice", "Check the device index against CUDA_VISIBLE_DEVICES.");
      call();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

void host_register(std::uint64_t address, std::uint64_t length, std::optional<int> device) {
  check_range(address, length, "address");
  if (length == 0)
    throw std::invalid_argument("length must be more than 0 to page-lock memory. Pass the mapping's length.");
  with_device(device, [&] {
    // Portable: page-locked for every context, not only the one that is current now.
    check(cudaHostRegister(reinterpret_cast<void*>(address), length, cudaHostRegisterPortable), "cudaHostRegister",
          "Check that the range is mapped, not registered before, and within the limit on locked memory (ulimit -l).");
  });
}

void host_unregister(std::uint64_t address, std::optional<int> device) {
  if (address == 0) throw std::invalid_argument("address is null. Pass the address given to host_register.");
  with_device(device, [&] {
    check(cudaHostUnregister(reinterpret_cast<void*>(address)), "cudaHostUnregister",
          "Pass the address given to host_register, once.");
  });
}

std::optional<std::string> unavailable_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cudaGetLastError();
  if (status != cudaSuccess)
    return text("no CUDA device can be used: ", cudaGetErrorName(status), " (", cudaGetErrorString(status), ")");
  if (count == 0) return "no CUDA device is visible";
  return std::nullopt;
}

std::unique_ptr<CopyBackend> make_backend(int device) { return std::make_unique<CudaBackend>(device); }

}  // namespace

const CudaApi& cuda_api() {
  static const CudaApi api{&make_backend, &host_register, &host_unregister, &unavailable_reason};
  return api;
}

}  // namespace deadpool
