// What deadpool_ext._cuda gives to deadpool_ext._engine: one table of functions, handed over in a Python capsule.
//
// A module of its own, so that the engine is built and imported where there is no CUDA, and so that the agents, which
// copy only host memory, never load it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "copy_queue.hpp"

namespace deadpool {

struct CudaApi {
  // Copies between a device and page-locked host memory (either way), after the work of a given stream.
  std::unique_ptr<CopyBackend> (*make_backend)(int device);

  // Page-locks host memory that someone else mapped. With a device, that device's context does it and the calling
  // thread's current device stays as it is; without one, the calling thread's current device is used.
  void (*host_register)(std::uint64_t address, std::uint64_t length, std::optional<int> device);
  void (*host_unregister)(std::uint64_t address, std::optional<int> device);

  // Nothing where a device can be used, else why not.
  std::optional<std::string> (*unavailable_reason)();
};

constexpr const char* kCudaCapsule = "deadpool_ext._cuda.api";

const CudaApi& cuda_api();  // defined in cuda_copy.cpp

}  // namespace deadpool
