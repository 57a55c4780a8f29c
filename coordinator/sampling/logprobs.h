// Log-probabilities of a row: log-softmax in float64 of the model's RAW logits, before penalties, bias, temperature and
// every truncation, so that they describe the model and not the request. The sum runs in ascending token id: the same
// bits everywhere. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

struct IdLogprob {
  uint32_t id = 0;
  double logprob = 0.0;  // natural logarithm
};

struct RowLogprobs {
  IdLogprob chosen;
  std::vector<IdLogprob> top;  // best first, ties to the lowest id
};

// `logits`: [vocabulary]. `top_n` at most kMaxTopLogprobs. Errors: `chosen` outside the row, too large a top_n, and a
// non-finite logit (Internal, naming position and token).
absl::StatusOr<RowLogprobs> compute_logprobs(std::span<const float> logits, uint32_t chosen, uint32_t top_n,
                                             uint64_t position);

}  // namespace tensorfold
