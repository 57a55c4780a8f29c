// Which row of a table an n-gram of tokens takes; the same on hosts and GPUs.
#pragma once

#include <cstdint>

#include "kernels/numerics/host_device.h"

namespace tensorfold {

/// Most tokens of an n-gram.
inline constexpr int kMostNgramTokens = 8;

/// The row, of `table_rows`, for the (backs + 1)-gram that ends with `token`. before(i): the token i places before it,
/// negative before the sequence's start. The products of tokens and their odd factors (newest first) are mixed by
/// exclusive or. An end token, and the sequence's start, hide what was before: end tokens are seen in its place.
template <typename Before>
TF_HOST_DEVICE inline int32_t ngram_row(int32_t token, int backs, const int64_t* multipliers, int32_t end_token,
                                        int64_t table_rows, const Before& before) {
  uint64_t mixed = static_cast<uint64_t>(token) * static_cast<uint64_t>(multipliers[0]);
  bool ended = false;
  for (int back = 1; back <= backs; ++back) {
    const int32_t id = before(back);
    ended = ended || id < 0 || id == end_token;
    mixed ^= static_cast<uint64_t>(ended ? end_token : id) * static_cast<uint64_t>(multipliers[back]);
  }
  return static_cast<int32_t>(mixed % static_cast<uint64_t>(table_rows));
}

}  // namespace tensorfold
