#include "fake_cuda.hpp"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

struct Ranges {
  std::mutex mutex;
  std::map<std::uint64_t, std::size_t> lengths;

  bool add(const void* begin, std::size_t length) {
    const std::lock_guard lock(mutex);
    return lengths.emplace(reinterpret_cast<std::uint64_t>(begin), length).second;
  }
  bool remove(const void* begin) {
    const std::lock_guard lock(mutex);
    return lengths.erase(reinterpret_cast<std::uint64_t>(begin)) == 1;
  }
  bool hold(const void* pointer) {
    const std::lock_guard lock(mutex);
    const auto at = reinterpret_cast<std::uint64_t>(pointer);
    const auto next = lengths.upper_bound(at);
    return next != lengths.begin() && at < std::prev(next)->first + std::prev(next)->second;
  }
  void clear() {
    const std::lock_guard lock(mutex);
    lengths.clear();
  }
};

Ranges device_memory, registered;

struct Mark {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool passed = false;
  void pass() {
    const std::lock_guard lock(mutex);
    passed = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return passed; });
  }
};

thread_local int current_device = 0;

}  // namespace

struct CUevent_st {
  std::shared_ptr<Mark> mark;
};

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> operations;
  bool ending = false;
  std::thread thread{[this] { work(); }};

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return ending || !operations.empty(); });
      if (operations.empty()) return;
      auto operation = std::move(operations.front());
      operations.pop_front();
      lock.unlock();
      operation();
      lock.lock();
    }
  }
  void push(std::function<void()> operation) {
    const std::lock_guard lock(mutex);
    operations.push_back(std::move(operation));
    changed.notify_all();
  }
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex);
      ending = true;
      changed.notify_all();
    }
    thread.join();
  }
};

namespace fake_cuda {

void make_device_memory(const void* begin, std::size_t length) { device_memory.add(begin, length); }

void reset() {
  device_memory.clear();
  registered.clear();
  batch_supported = true;
  device_fails = false;
  batches = single_copies = 0;
}

cudaStream_t new_stream() {
  ++live_streams;
  return new CUstream_st;
}
void launch(cudaStream_t stream, std::function<void()> work) { stream->push(std::move(work)); }
void delete_stream(cudaStream_t stream) {
  delete stream;
  --live_streams;
}

}  // namespace fake_cuda

extern "C" {

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheFake"; }
const char* cudaGetErrorString(cudaError_t) { return "said by the stand-in"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = fake_cuda::new_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const auto mark = std::make_shared<Mark>();
  stream->push([mark] { mark->pass(); });
  mark->wait();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  fake_cuda::delete_stream(stream);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  ++fake_cuda::live_events;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  --fake_cuda::live_events;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->mark = std::make_shared<Mark>();
  stream->push([mark = event->mark] { mark->pass(); });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->mark->wait();
  return fake_cuda::device_fails ? cudaErrorIllegalAddress : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream->push([mark = event->mark] { mark->wait(); });
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  attributes->type = device_memory.hold(pointer) ? cudaMemoryTypeDevice
                     : registered.hold(pointer)  ? cudaMemoryTypeHost
                                                 : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, std::size_t length, unsigned) {
  return registered.add(pointer, length) ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}
cudaError_t cudaHostUnregister(void* pointer) {
  return registered.remove(pointer) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaMemcpyAsync(void* destination, const void* source, std::size_t length, cudaMemcpyKind,
                            cudaStream_t stream) {
  ++fake_cuda::single_copies;
  stream->push([=] {
    if (!fake_cuda::device_fails) std::memcpy(destination, source, length);
  });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  stream->push([=] {
    if (!fake_cuda::device_fails) function(argument);
  });
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* destinations, const void* const* sources, const std::size_t* lengths,
                                 std::size_t count, cudaMemcpyAttributes*, std::size_t*, std::size_t,
                                 cudaStream_t stream) {
#elif CUDART_VERSION >= 12080
cudaError_t cudaMemcpyBatchAsync(void** destinations, void** sources, std::size_t* lengths, std::size_t count,
                                 cudaMemcpyAttributes*, std::size_t*, std::size_t, std::size_t*, cudaStream_t stream) {
#endif
#if CUDART_VERSION >= 12080
  if (!fake_cuda::batch_supported) return cudaErrorNotSupported;
  ++fake_cuda::batches;
  for (std::size_t i = 0; i < count; ++i)
    stream->push([destination = destinations[i], source = sources[i], length = lengths[i]] {
      if (!fake_cuda::device_fails) std::memcpy(destination, source, length);
    });
  return cudaSuccess;
}
#endif

}  // extern "C"
