// A stand-in for the CUDA runtime, in host memory: each stream is a thread that works off its operations in order. It
// serves to test cuda_copy.cpp's own logic (what is ordered after what, who frees what, what an error does) where there
// is no GPU. It proves nothing about the real runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>

namespace fake_cuda {

void make_device_memory(const void* begin, std::size_t length);  // for cudaPointerGetAttributes
void reset();

// A training stream: launch() queues any work.
cudaStream_t new_stream();
void launch(cudaStream_t stream, std::function<void()> work);
void delete_stream(cudaStream_t stream);

inline std::atomic<bool> batch_supported{true};
inline std::atomic<bool> device_fails{false};  // copies are not made, host functions not run, synchronizing reports it
inline std::atomic<int> batches{0}, single_copies{0};
inline std::atomic<int> live_streams{0}, live_events{0};

}  // namespace fake_cuda
