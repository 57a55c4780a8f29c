#include "coordinator/sampling/logprobs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/status/status.h"
#include "coordinator/sampling/params.h"
#include "fmt/format.h"
#include "kernels/numerics/math64.h"

namespace tensorfold {

absl::StatusOr<RowLogprobs> compute_logprobs(std::span<const float> logits, uint32_t chosen, uint32_t top_n,
                                             uint64_t position) {
  if (chosen >= logits.size() || logits.size() > kMaxVocabulary) {
    return absl::InvalidArgumentError(
        fmt::format("token {} at position {} is not in a row of {} logits", chosen, position, logits.size()));
  }
  if (top_n > kMaxTopLogprobs) {
    return absl::InvalidArgumentError(fmt::format("{} top logprobs asked; at most {}", top_n, kMaxTopLogprobs));
  }
  double max = logits[0];
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      return absl::InternalError(fmt::format("the logit of token {} at position {} is {}: the model's output is broken",
                                             i, position, logits[i]));
    }
    max = std::max(max, static_cast<double>(logits[i]));
  }
  double sum = 0.0;
  for (const float logit : logits) sum += exp64(static_cast<double>(logit) - max);
  const double log_sum = log64(sum);
  const auto logprob = [&](uint32_t id) { return (static_cast<double>(logits[id]) - max) - log_sum; };

  RowLogprobs result;
  result.chosen = {chosen, logprob(chosen)};
  const size_t count = std::min<size_t>(top_n, logits.size());
  if (count == 0) return result;
  std::vector<uint32_t> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i);
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count), ids.end(),
                    [&](uint32_t a, uint32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
  for (size_t i = 0; i < count; ++i) result.top.push_back({ids[i], logprob(ids[i])});
  return result;
}

}  // namespace tensorfold
