// The keyed sampler (contract, section 5): which token follows a row.
//
// Order: penalties and bias (repetition, then presence and frequency, then bias; float64) -> sort by (logit descending,
// id ascending) -> top-k -> divide by the temperature in float64 -> top-p, which keeps the token that crosses -> min-p
// against the top -> argmax of logit / T + gumbel(seed, position, id), ties to the lowest id.
//
// Nucleus masses are the integers floor(exp(x - max) * 2^40), summed exactly: a vocabulary cut anywhere gives the same
// set. A token of mass 0 is in no nucleus; top_p is used as floor(top_p * 2^52) / 2^52.
//
// Everything here is a pure function of its arguments: any thread, no state, no clock. exp and log are
// kernels/numerics' own. A logit that is NaN or infinite is an Internal error which names the position and the token,
// never a crash or a guess.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "coordinator/sampling/params.h"
#include "coordinator/sampling/token_counts.h"

namespace tensorfold {

struct Sampled {
  uint32_t id = 0;
  double logit = 0.0;  // after penalties and bias, before the temperature
};

// Samples from a whole row. `logits`: [vocabulary], at most kMaxVocabulary. `position`: the absolute index of the token
// drawn. `counts`: the row's own history. Errors: empty or oversized row, a bias for an id outside it, a non-finite
// logit.
absl::StatusOr<Sampled> sample_row(const SamplingParams& params, std::span<const float> logits, uint64_t position,
                                   const TokenCounts& counts);

struct SampleCandidate {
  float logit = 0.0f;
  uint32_t id = 0;  // in the whole vocabulary
};

// The best candidates of one rank's vocabulary slices, sorted by (logit descending, id ascending), NaN last. What is
// not finite among them is reported.
struct CandidateList {
  std::span<const SampleCandidate> candidates;
  uint32_t slice_rows = 0;  // how many tokens the rank's slices hold; with as many candidates the list is exhaustive

  bool exhaustive() const { return candidates.size() >= slice_rows; }
};

struct CandidateSample {
  bool needs_full_row = false;  // the candidates do not prove what the whole row would give; `sampled` is meaningless
  Sampled sampled;
};

// Samples from the ranks' candidates, or says that they do not suffice. A token that is returned is bit for bit the one
// sample_row gives on the whole row. Requests that edit logits always need the full row. Errors: as sample_row; a list
// out of order.
absl::StatusOr<CandidateSample> sample_candidates(const SamplingParams& params, std::span<const CandidateList> ranks,
                                                  uint64_t position);

// Samples where row_needs() says `draw`, from the one token that each rank drew from its slices with the row's key
// (Ops::best_draws). What is returned is bit for bit what sample_row gives on the whole row. Errors: no rank, a
// non-finite logit.
absl::StatusOr<Sampled> sample_drawn(const SamplingParams& params, std::span<const SampleCandidate> ranks,
                                     uint64_t position);

}  // namespace tensorfold
