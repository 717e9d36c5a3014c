// cuda_copy.cpp against a stand-in for the CUDA runtime (fake_cuda.hpp says what that is worth). Needs CUDA's headers,
// no GPU.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../cuda_api.hpp"
#include "../memory.hpp"
#include "check.hpp"
#include "fake_cuda.hpp"

using namespace deadpool;

namespace {

constexpr double kPatience_s = 20;
constexpr int kDevice = 0;

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

struct Scene {  // "device" tensors, a page-locked slot, a training stream and a queue
  Scene() {
    fake_cuda::reset();
    fake_cuda::make_device_memory(tensors.data(), tensors.size());
    cuda_api().host_register(address(slot.data()), slot.size(), kDevice);
    training = fake_cuda::new_stream();
    queue = std::make_unique<CopyQueue>(cuda_api().make_backend(kDevice));
  }
  ~Scene() {
    queue.reset();
    fake_cuda::delete_stream(training);
    CHECK(fake_cuda::live_streams == 0);
    CHECK(fake_cuda::live_events == 0);
  }

  std::uint64_t submit(std::uint64_t value) {
    std::vector<std::uint64_t> sources, destinations, lengths;
    for (std::size_t at = 0; at < tensors.size(); at += 100) {
      sources.push_back(address(&tensors[at]));
      destinations.push_back(address(&slot[at]));
      lengths.push_back(100);
      sources.push_back(0);
      destinations.push_back(0);
      lengths.push_back(0);
    }
    return queue->submit(sources.data(), destinations.data(), lengths.data(), lengths.size(), address(&flag), value,
                         address(training));
  }

  std::vector<unsigned char> tensors = std::vector<unsigned char>(5000, 1), slot = std::vector<unsigned char>(5000, 0);
  std::uint64_t flag = 0;
  cudaStream_t training;
  std::unique_ptr<CopyQueue> queue;
};

void test_copies_follow_the_training_stream(bool batch) {
  Scene scene;
  fake_cuda::batch_supported = batch;
  std::atomic<bool> step_done{false};
  fake_cuda::launch(scene.training, [&] {  // an optimizer step still under way at submit
    while (!step_done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::fill(scene.tensors.begin(), scene.tensors.end(), 2);
  });
  const auto ticket = scene.submit(1);
  CHECK(!scene.queue->wait(ticket, 0.05));
  CHECK(load_u64(&scene.flag) == 0);
  step_done = true;
  CHECK(wait_u64_at_least(&scene.flag, 1, kPatience_s) == WaitResult::reached);
  CHECK(scene.slot == std::vector<unsigned char>(5000, 2));
  CHECK(scene.queue->wait(ticket, kPatience_s));
  CHECK(scene.queue->bytes_copied() == 5000);
  CHECK(scene.queue->wait(scene.submit(2), kPatience_s));
  CHECK(fake_cuda::batches == (batch ? 2 : 0) && fake_cuda::single_copies == (batch ? 0 : 100));
}

void test_a_lost_device_fails_the_ticket_and_leaves_the_flag() {
  Scene scene;
  CHECK(scene.queue->wait(scene.submit(1), kPatience_s));
  fake_cuda::device_fails = true;
  const auto ticket = scene.submit(2);
  CHECK_THROWS(std::runtime_error, "cudaEventSynchronize", scene.queue->wait(ticket, kPatience_s));
  CHECK(load_u64(&scene.flag) == 1);
}

void test_pageable_memory_is_refused() {
  Scene scene;
  cuda_api().host_unregister(address(scene.slot.data()), kDevice);
  CHECK_THROWS(std::runtime_error, "host_register", scene.queue->wait(scene.submit(1), kPatience_s));
  CHECK_THROWS(std::runtime_error, "cudaHostUnregister",
               cuda_api().host_unregister(address(scene.slot.data()), std::nullopt));
  CHECK_THROWS(std::invalid_argument, "length", cuda_api().host_register(address(scene.slot.data()), 0, std::nullopt));
}

void test_the_callers_device_is_checked_and_kept() {
  Scene scene;
  cudaSetDevice(1);
  CHECK_THROWS(std::runtime_error, "set_device(0)", scene.submit(1));
  std::vector<unsigned char> more(100);
  cuda_api().host_register(address(more.data()), more.size(), 0);
  int current = -1;
  cudaGetDevice(&current);
  CHECK(current == 1);
  cudaSetDevice(kDevice);
  CHECK_THROWS(std::runtime_error, "cudaSetDevice", CopyQueue(cuda_api().make_backend(7)));
  const std::uint64_t none = 0;
  CHECK_THROWS(std::invalid_argument, "current_stream()",
               scene.queue->submit(&none, &none, &none, 1, address(&scene.flag), 1));
}

void test_progress_follows_the_batches(bool batch) {
  fake_cuda::reset();
  fake_cuda::batch_supported = batch;
  constexpr std::size_t mib = std::size_t{1} << 20;
  const std::vector<unsigned char> tensors(150 * mib, 3);
  std::vector<unsigned char> slot(tensors.size() + 64, 0);
  fake_cuda::make_device_memory(tensors.data(), tensors.size());
  cuda_api().host_register(address(slot.data()), slot.size(), kDevice);
  const std::uint64_t lengths[] = {10 * mib, 139 * mib, mib};  // the second is cut, twice
  const std::uint64_t sources[] = {address(&tensors[0]), address(&tensors[10 * mib]), address(&tensors[149 * mib])};
  const std::uint64_t targets[] = {address(&slot[0]), address(&slot[10 * mib]), address(&slot[149 * mib + 64])};
  std::uint64_t flag = 0, progress = 0;
  cudaStream_t training = fake_cuda::new_stream();
  {
    CopyQueue queue(cuda_api().make_backend(kDevice));
    const auto ticket =
        queue.submit(sources, targets, lengths, 3, address(&flag), 1, address(training), address(&progress));
    std::uint64_t seen = 0;
    while (seen < 150 * mib + 64) {
      const std::uint64_t now = load_u64(&progress);
      if (now == seen) continue;
      CHECK(now == 64 * mib || now == 128 * mib || now == 150 * mib + 64);
      for (std::uint64_t i = seen; i < now; i += 4099) CHECK(slot[i] == 3 || (i >= 149 * mib && i < 149 * mib + 64));
      CHECK(slot[now - 1] == 3);
      seen = now;
    }
    CHECK(queue.wait(ticket, kPatience_s));
    CHECK(load_u64(&flag) == 1);
    CHECK(queue.bytes_copied() == 150 * mib);
  }
  fake_cuda::delete_stream(training);
  CHECK(fake_cuda::batches == (batch ? 3 : 0) && fake_cuda::single_copies == (batch ? 0 : 5));
  CHECK(fake_cuda::live_streams == 0 && fake_cuda::live_events == 0);
}

void test_no_entries_still_set_the_flag() {
  Scene scene;
  const auto ticket =
      scene.queue->submit(nullptr, nullptr, nullptr, 0, address(&scene.flag), 9, address(scene.training));
  CHECK(scene.queue->wait(ticket, kPatience_s));
  CHECK(load_u64(&scene.flag) == 9);
}

}  // namespace

// On a lost device the driver may still hold the pointer, so cuda_copy.cpp does not free it.
extern "C" const char* __lsan_default_suppressions() { return "leak:make_flag_stores"; }

int main() {
  CHECK(!cuda_api().unavailable_reason());
  test_copies_follow_the_training_stream(CUDART_VERSION >= 12080);
  test_copies_follow_the_training_stream(false);
  test_a_lost_device_fails_the_ticket_and_leaves_the_flag();
  test_pageable_memory_is_refused();
  test_the_callers_device_is_checked_and_kept();
  test_progress_follows_the_batches(CUDART_VERSION >= 12080);
  test_progress_follows_the_batches(false);
  test_no_entries_still_set_the_flag();
  std::puts("all passed");
  return 0;
}
