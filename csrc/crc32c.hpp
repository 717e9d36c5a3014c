// CRC32C (Castagnoli), the checksum of snapshots and of everything that travels between agents.
//
// Values are those of RFC 3720 (iSCSI): crc32c("123456789") = 0xE3069283. `seed` is the checksum of the bytes before:
// crc32c(b, nb, crc32c(a, na)) is the checksum of a followed by b.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deadpool {

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t seed = 0);

// The same without special instructions: for processors that lack them, and to test against.
std::uint32_t crc32c_portable(const void* data, std::size_t length, std::uint32_t seed = 0);

// Checksum of a followed by b, from crc1 = crc32c(a), crc2 = crc32c(b) and the length of b alone.
std::uint32_t crc32c_combine(std::uint32_t crc1, std::uint32_t crc2, std::uint64_t length2);

// "sse4.2+pclmul", "armv8+pmull" or "portable": what crc32c() runs on this processor.
const char* crc32c_implementation();

namespace detail {

using Crc32cFunction = std::uint32_t (*)(const void*, std::size_t, std::uint32_t);

// Defined in crc32c_x86.cpp and crc32c_arm.cpp; null where the file's processor is not the one we run on, or where that
// lacks the instructions.
Crc32cFunction crc32c_x86();
Crc32cFunction crc32c_arm();

}  // namespace detail
}  // namespace deadpool
