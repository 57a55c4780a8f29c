// The keyed noise of sampling (contract, section 5): a function of (seed, absolute position, token id) and of nothing
// else, so that neither drafts, batch-mates, ranks nor a replay can move it. Pure functions.
#pragma once

#include <cstdint>

#include "kernels/numerics/host_device.h"
#include "kernels/numerics/log64.h"

namespace tensorfold {

// The splitmix64 finaliser.
TF_HOST_DEVICE inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  x ^= x >> 31;
  return x;
}

// The part of the key that all ids of one row share. `position` is the absolute index of the token that is drawn.
TF_HOST_DEVICE inline uint64_t row_key(uint64_t seed, uint64_t position) {
  const uint64_t h = mix64(seed + 0x9E3779B97F4A7C15ull);
  return mix64(h ^ (position * 0xD1B54A32D192ED03ull));
}

TF_HOST_DEVICE inline uint64_t token_hash(uint64_t row_key, uint32_t id) { return mix64(row_key ^ id); }

// No noise is larger: -ln(2^-54). Rounded up.
inline constexpr double kMaxGumbel = 37.4299477502371;

// -ln(-ln u), u = (h >> 11) * 2^-53 + 2^-54. The largest u is 1 - 2^-54, which rounds to 1 in float64; there -ln u is
// its exact leading term 2^-54 instead of 0, so that no token ever wins by an infinity.
TF_HOST_DEVICE inline double gumbel_of_hash(uint64_t h) {
  const double u = static_cast<double>(h >> 11) * 0x1p-53 + 0x1p-54;
  const double nlog = u < 1.0 ? -log64_inline(u) : 0x1p-54;
  return -log64_inline(nlog);
}

// At least gumbel_of_hash(h), without a logarithm: -ln(-ln u) <= -ln(1 - u), and 1 - u >= c * 2^-53 where c counts down
// from 2^53 - 1. Lets the draw skip tokens that cannot win, which is nearly all of a vocabulary.
TF_HOST_DEVICE inline double gumbel_bound(uint64_t h) {
  const uint64_t c = ((uint64_t{1} << 53) - 1) - (h >> 11);
  return static_cast<double>(54 - bit_width64(c)) * 0.6931471805599454 + 1e-9;
}

TF_HOST_DEVICE inline double gumbel(uint64_t seed, uint64_t position, uint32_t id) {
  return gumbel_of_hash(token_hash(row_key(seed, position), id));
}

// argmax of logit / T + noise over the tokens offered, in any order; ties to the lower id.
struct KeyedDraw {
  double score = 0.0;
  double logit = 0.0;
  uint32_t id = 0;
  bool any = false;

  // Takes the token over if it is better; `scaled` is logit / T.
  TF_HOST_DEVICE void offer(uint64_t key, double scaled, double token_logit, uint32_t token) {
    const uint64_t hash = token_hash(key, token);
    if (any && scaled + gumbel_bound(hash) < score) return;
    const KeyedDraw other{scaled + gumbel_of_hash(hash), token_logit, token, true};
    merge(other);
  }
  // The better of both.
  TF_HOST_DEVICE void merge(const KeyedDraw& other) {
    if (other.any && (!any || other.score > score || (other.score == score && other.id < id))) *this = other;
  }
};

}  // namespace tensorfold
