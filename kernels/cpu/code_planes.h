// How packed weights hold codes of 1 to 8 bits: planes of bits, as weights.h lays them out. For packing only: never
// included by the isa_*.cc files.
#pragma once

#include <cstdint>
#include <cstring>

namespace tensorfold {

/// Writes the lowest bits above `shift` of 16 codes as a plane of `bits` (1, 2 or 4): 2 * bits bytes.
inline void write_plane(const uint8_t* codes, int shift, int bits, uint8_t* out) {
  uint64_t word = 0;
  for (int l = 0; l < 16; ++l) {
    const uint64_t part = (codes[l] >> shift) & ((1u << bits) - 1);
    word |= part << (bits == 4 ? 32 * (l % 2) + 4 * (l / 2) : bits * l);
  }
  for (int i = 0; i < 2 * bits; ++i) out[i] = static_cast<uint8_t>(word >> (8 * i));
}

/// Writes 16 codes of `bits`: 2 * bits bytes.
inline void write_codes(const uint8_t* codes, int bits, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, codes, 16);
    return;
  }
  const int low = bits >= 4 ? 4 : 2;
  write_plane(codes, 0, low, out);
  if (bits > low) write_plane(codes, low, bits - low, out + 2 * low);
}

}  // namespace tensorfold
