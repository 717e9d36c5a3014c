#include "crc32c.hpp"

#include <array>
#include <cstring>

#include "crc32c_field.hpp"

namespace deadpool {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the table walk below reads words as little endian");

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: byte b followed by k zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = detail::times_x(crc);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xffu];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

struct Implementation {
  detail::Crc32cFunction function;
  const char* name;
};

Implementation choose() {
  if (auto function = detail::crc32c_x86()) return {function, "sse4.2+pclmul"};
  if (auto function = detail::crc32c_arm()) return {function, "armv8+pmull"};
  return {&crc32c_portable, "portable"};
}

const Implementation& implementation() {
  static const Implementation chosen = choose();
  return chosen;
}

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t length, std::uint32_t seed) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  for (; length >= 8; p += 8, length -= 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 0xffu];
  }
  for (; length > 0; ++p, --length) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xffu];
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t seed) {
  return implementation().function(data, length, seed);
}

std::uint32_t crc32c_combine(std::uint32_t crc1, std::uint32_t crc2, std::uint64_t length2) {
  // The inversions at start and end cancel: a followed by b is a·x^(8·length2) + b in the field.
  return detail::multiply(crc1, detail::power(detail::kX8, length2)) ^ crc2;
}

const char* crc32c_implementation() { return implementation().name; }

}  // namespace deadpool
