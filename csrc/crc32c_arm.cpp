#include "crc32c.hpp"

#if defined(__aarch64__)

#include <arm_acle.h>
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstring>

#include "crc32c_field.hpp"

#if defined(__clang__)
#define CRC_TARGET __attribute__((target("crc,aes")))
#else
#define CRC_TARGET __attribute__((target("+crc+crypto")))
#endif

namespace deadpool::detail {
namespace {

CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, std::uint64_t word) { return __crc32cd(crc, word); }

CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }

CRC_TARGET inline std::uint32_t shift(std::uint32_t crc, std::uint32_t k) {
  const poly128_t product = vmull_p64(static_cast<poly64_t>(crc), static_cast<poly64_t>(k));
  return step8(0, vgetq_lane_u64(vreinterpretq_u64_p128(product), 0));
}

#include "crc32c_interleaved.inl"

}  // namespace

Crc32cFunction crc32c_arm() {
  const unsigned long capabilities = getauxval(AT_HWCAP);
  return (capabilities & HWCAP_CRC32) && (capabilities & HWCAP_PMULL) ? &crc_interleaved : nullptr;
}

}  // namespace deadpool::detail

#else

deadpool::detail::Crc32cFunction deadpool::detail::crc32c_arm() { return nullptr; }

#endif
