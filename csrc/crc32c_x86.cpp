#include "crc32c.hpp"

#if defined(__x86_64__)

#include <nmmintrin.h>
#include <wmmintrin.h>
#include <cstring>

#include "crc32c_field.hpp"

// An attribute on each function, not a compiler flag for the file: the rest of the file must run on any x86-64.
#define CRC_TARGET __attribute__((target("sse4.2,pclmul")))

namespace deadpool::detail {
namespace {

CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}

CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }

CRC_TARGET inline std::uint32_t shift(std::uint32_t crc, std::uint32_t k) {
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(crc)), _mm_cvtsi32_si128(static_cast<int>(k)), 0);
  return step8(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}

#include "crc32c_interleaved.inl"

}  // namespace

Crc32cFunction crc32c_x86() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") ? &crc_interleaved : nullptr;
}

}  // namespace deadpool::detail

#else

deadpool::detail::Crc32cFunction deadpool::detail::crc32c_x86() { return nullptr; }

#endif
