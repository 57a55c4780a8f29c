#include "worker/model/numpy_generator.h"

#include <array>
#include <bit>
#include <cstddef>

#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr size_t kPool = 4;

// A seed's 32-bit words mixed into a pool of four, and the pool hashed into as many words as are wanted.
class SeedSequence {
 public:
  explicit SeedSequence(uint64_t seed) {
    const std::array<uint32_t, kPool> words = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0};
    uint32_t constant = 0x43b0d7e5u;
    for (size_t i = 0; i < kPool; ++i) pool_[i] = hashed(words[i], constant, 0x931e8875u);
    for (size_t from = 0; from < kPool; ++from) {
      for (size_t to = 0; to < kPool; ++to) {
        if (from != to) pool_[to] = mixed(pool_[to], hashed(pool_[from], constant, 0x931e8875u));
      }
    }
  }

  template <size_t N>
  std::array<uint64_t, N> words() const {
    std::array<uint64_t, N> out{};
    uint32_t constant = 0x8b51f9ddu;
    for (size_t i = 0; i < 2 * N; ++i) {
      const uint64_t word = hashed(pool_[i % kPool], constant, 0x58f38dedu);
      out[i / 2] |= i % 2 == 0 ? word : word << 32;
    }
    return out;
  }

 private:
  static uint32_t hashed(uint32_t value, uint32_t& constant, uint32_t factor) {
    value ^= constant;
    constant *= factor;
    value *= constant;
    return value ^ value >> 16;
  }
  static uint32_t mixed(uint32_t a, uint32_t b) {
    const uint32_t value = a * 0xca01f9ddu - b * 0x4973f715u;
    return value ^ value >> 16;
  }

  std::array<uint32_t, kPool> pool_{};
};

}  // namespace

NumpyGenerator::NumpyGenerator(uint64_t seed) {
  const std::array<uint64_t, 4> words = SeedSequence(seed).words<4>();
  increment_ = ((static_cast<Wide>(words[2]) << 64 | words[3]) << 1) | 1;
  next();
  state_ += static_cast<Wide>(words[0]) << 64 | words[1];
  next();
}

uint64_t NumpyGenerator::next() {
  constexpr Wide kFactor = static_cast<Wide>(0x2360ED051FC65DA4u) << 64 | 0x4385DF649FCCF645u;
  state_ = state_ * kFactor + increment_;
  return std::rotr(static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_),
                   static_cast<int>(state_ >> 122));
}

uint64_t NumpyGenerator::below(uint64_t bound) {
  kernel_check(bound > uint64_t{1} << 32, "NumpyGenerator: bounds from 2^32 + 1 on");
  Wide product = static_cast<Wide>(next()) * bound;
  // Of the low halves that are possible, the first (2^64 mod bound) would make some results likelier.
  const uint64_t least = (0 - bound) % bound;
  while (static_cast<uint64_t>(product) < least) product = static_cast<Wide>(next()) * bound;
  return static_cast<uint64_t>(product >> 64);
}

}  // namespace tensorfold
