// CRC32C with a processor's own instruction, three lanes at a time. Included by crc32c_x86.cpp and crc32c_arm.cpp, each
// of which defines, before the include, CRC_TARGET (the function attribute that enables the instructions) and
//   step8(crc, word), step1(crc, byte): the checksum instruction;
//   shift(crc, k): crc·k·x^33, by a carry-less product whose 64 bits step8 then reduces (the 33 comes from there: 32 by
//   the instruction, 1 because the product of two reflected numbers stands one bit low).
//
// Why lanes: the instruction has a latency of 2 to 3 cycles and can start every cycle, so one dependent chain runs at a
// third of its speed. Three chains over neighbouring stretches fill the gap; joining them costs two products per block.

template <std::size_t kLane>
CRC_TARGET inline std::uint32_t crc_lanes(std::uint32_t crc, const unsigned char*& p, std::size_t& length) {
  static_assert(kLane % 8 == 0, "lanes are read in words");
  constexpr std::uint32_t past_one_lane = power(kX, 8 * kLane - 33);
  constexpr std::uint32_t past_two_lanes = power(kX, 16 * kLane - 33);
  for (; length >= 3 * kLane; p += 3 * kLane, length -= 3 * kLane) {
    std::uint32_t first = crc, second = 0, third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      std::uint64_t words[3];
      std::memcpy(&words[0], p + i, 8);
      std::memcpy(&words[1], p + i + kLane, 8);
      std::memcpy(&words[2], p + i + 2 * kLane, 8);
      first = step8(first, words[0]);
      second = step8(second, words[1]);
      third = step8(third, words[2]);
    }
    crc = shift(first, past_two_lanes) ^ shift(second, past_one_lane) ^ third;
  }
  return crc;
}

CRC_TARGET std::uint32_t crc_interleaved(const void* data, std::size_t length, std::uint32_t seed) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  for (; length > 0 && reinterpret_cast<std::uintptr_t>(p) % 8 != 0; ++p, --length) crc = step1(crc, *p);
  // Long lanes make the joins rare; short ones serve what is left. A lane of 4096 - 64 bytes and not 4096: lanes a page
  // apart would share a cache set.
  crc = crc_lanes<4096 - 64>(crc, p, length);
  crc = crc_lanes<256>(crc, p, length);
  for (; length >= 8; p += 8, length -= 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    crc = step8(crc, word);
  }
  for (; length > 0; ++p, --length) crc = step1(crc, *p);
  return ~crc;
}
