// Arithmetic behind CRC32C: polynomials over GF(2) modulo P, bit-reflected, so that bit 31 is x^0 and bit 0 is x^31.
// All of it is constexpr: the constants of the fast versions are computed by the compiler from the polynomial alone.
#pragma once

#include <cstdint>

namespace deadpool::detail {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // P without its x^32
constexpr std::uint32_t kOne = 0x80000000u;         // x^0

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1u) ? kPolynomial : 0u); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^exponent, given x^unit = base: power(times_x(kOne), n) is x^n.
constexpr std::uint32_t power(std::uint32_t base, std::uint64_t exponent) {
  std::uint32_t result = kOne;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result = multiply(result, base);
    base = multiply(base, base);
  }
  return result;
}

constexpr std::uint32_t kX = times_x(kOne);
constexpr std::uint32_t kX8 = power(kX, 8);

static_assert(multiply(power(kX, 40), power(kX, 2)) == power(kX, 42), "exponents add");

}  // namespace deadpool::detail
