#include "memory.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "deadline.hpp"
#include "text.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; the C library's headers may be older than the kernel
#endif

namespace deadpool {
namespace {

// A holder's acknowledgement takes tens of microseconds at best: spin about that long, then give the core away. The
// longest sleep bounds what a wait adds to a training step.
constexpr int kSpins = 400;
constexpr std::chrono::microseconds kShortestSleep{1};
constexpr std::chrono::microseconds kLongestSleep{200};

// Each call of madvise holds the address space's lock: other threads' page faults wait for it.
constexpr std::uint64_t kPopulateStep = std::uint64_t{64} << 20;

#if defined(__x86_64__)
constexpr std::uint64_t kShortestPastCaches = 4096;  // for less, the fence costs more than the caches give
#endif

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores; isb costs about what x86's pause does
#endif
}

void populate_by_touch(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
  // Adding nothing, atomically: a write fault that changes no byte, even while others write there.
  for (std::uint64_t at = begin; at < end; at += page)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(at), static_cast<unsigned char>(0), __ATOMIC_RELAXED);
}

}  // namespace

std::uint64_t* shared_word(std::uint64_t address, const char* name) {
  if (address == 0)
    throw std::invalid_argument(
        text(name, " is null. Pass the address of 8 bytes that stay mapped as long as they are used."));
  if (address % 8 != 0)
    throw std::invalid_argument(text(name, " must be a multiple of 8, got 0x", std::hex, address, " (", std::dec,
                                     address % 8,
                                     " past one). Place the word at an aligned offset of its control block."));
  return reinterpret_cast<std::uint64_t*>(address);
}

void check_range(std::uint64_t address, std::uint64_t length, const char* name) {
  if (length == 0) return;
  if (address == 0)
    throw std::invalid_argument(
        text(name, " is null with a length of ", length, " bytes. Pass the address of mapped memory, or length 0."));
  if (address + length < address)
    throw std::invalid_argument(
        text(name, " 0x", std::hex, address, std::dec, " plus ", length,
             " bytes runs past the end of the address space. Check the order of address and length."));
}

void check_copy(std::uint64_t source, std::uint64_t destination, std::uint64_t length) {
  check_range(source, length, "source");
  check_range(destination, length, "destination");
  const std::uint64_t distance = source > destination ? source - destination : destination - source;
  if (distance < length)
    throw std::invalid_argument(text("source and destination must not overlap: 0x", std::hex, source, " and 0x",
                                     destination, std::dec, " are ", distance, " bytes apart, the length is ", length,
                                     ". Copy to memory of its own."));
}

void copy_past_caches(void* destination, const void* source, std::uint64_t length) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not see these stores
  auto* to = static_cast<unsigned char*>(destination);
  const auto* from = static_cast<const unsigned char*>(source);
  if (length >= kShortestPastCaches) {
    constexpr std::uint64_t line = 64;  // whole cache lines, else the processor reads the rest of each from memory
    const std::uint64_t head = -reinterpret_cast<std::uint64_t>(to) % line;
    std::memcpy(to, from, head);
    to += head, from += head, length -= head;
    for (; length >= line; to += line, from += line, length -= line) {
      __m128i part[4];
      for (int i = 0; i < 4; ++i) part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, part[i]);
    }
    _mm_sfence();  // these stores are not ordered by a release store: without the fence a flag could overtake them
  }
  std::memcpy(to, from, length);
#else
  std::memcpy(destination, source, length);
#endif
}

std::uint64_t load_u64(const std::uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

void store_u64(std::uint64_t* word, std::uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

std::uint64_t add_u64(std::uint64_t* word, std::uint64_t value) {
  return __atomic_add_fetch(word, value, __ATOMIC_ACQ_REL);
}

WaitResult wait_u64_at_least(const std::uint64_t* word, std::uint64_t value, double timeout_s,
                             const std::uint64_t* stop, std::uint64_t stop_value) {
  const auto deadline = deadline_after(timeout_s);
  std::chrono::nanoseconds sleep = kShortestSleep;
  for (int tries = 0;; ++tries) {
    if (load_u64(word) >= value) return WaitResult::reached;
    if (stop != nullptr && load_u64(stop) >= stop_value) return WaitResult::stopped;
    const auto now = Clock::now();
    if (now >= deadline) return WaitResult::timed_out;
    if (tries < kSpins) {
      pause_core();
      continue;
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(sleep, deadline - now));
    sleep = std::min<std::chrono::nanoseconds>(2 * sleep, kLongestSleep);
  }
}

void prefault(std::uint64_t address, std::uint64_t length) {
  check_range(address, length, "address");
  if (length == 0) return;
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t end = address + length;
  for (std::uint64_t at = address / page * page; at < end; at += kPopulateStep) {
    const std::uint64_t stop = std::min(end, at + kPopulateStep);
    if (madvise(reinterpret_cast<void*>(at), stop - at, MADV_POPULATE_WRITE) == 0) continue;
    const int why = errno;
    if (why == EINVAL) return populate_by_touch(std::max(at, address), end, page);  // a kernel before 5.14
    throw std::runtime_error(
        text("could not make 0x", std::hex, at, std::dec, " + ", stop - at, " bytes present (part of 0x", std::hex,
             address, std::dec, " + ", length, "): ", std::strerror(why),
             why == EFAULT   ? ". Shared memory is full or its file shorter than the mapping: free or enlarge "
                               "/dev/shm, or ask for smaller slots."
             : why == ENOMEM ? ". The range is not all mapped, or memory is exhausted: check the length "
                               "against the mapping's."
                             : ". Check that the range is mapped for writing."));
  }
}

}  // namespace deadpool
