// What a request asks of the sampler, and what a row of a pass must bring back for it.
//
// Plain data, safe to share between threads once filled. Ranges are checked by the front ends (coordinator/api); the
// sampler itself only relies on "finite and not NaN".
#pragma once

#include <cstdint>
#include <vector>

namespace tensorfold {

// Temperatures under this are greedy: clients send 1e-8 for "no randomness", and logit / 1e-300 would leave the range
// of float64.
inline constexpr double kMinTemperature = 1e-5;
inline constexpr uint32_t kMaxCandidates = 256;  // the most candidates a rank is asked for; more means the full row
inline constexpr uint32_t kMaxTopLogprobs = 20;
inline constexpr uint32_t kMaxVocabulary = 1u << 20;  // 2^20 masses of at most 2^40 fit 64 bits

struct LogitBias {
  uint32_t id = 0;
  double bias = 0.0;
};

struct SamplingParams {
  double temperature = 1.0;  // 0 = greedy
  uint32_t top_k = 0;        // 0 = all
  double top_p = 1.0;        // [0, 1]; 1 = all; the token that crosses is kept, so 0 keeps the top token alone
  double min_p = 0.0;        // [0, 1]; a token is kept when its probability is at least min_p times the top token's
  uint64_t seed = 0;         // resolved: the client's, or default_seed(); already keyed by choice_seed() for n > 1

  // Repetition as Hugging Face: the logit of every token in the row's own history, prompt and reply, is divided by the
  // penalty when positive and multiplied by it when negative. 1 = off.
  double repetition_penalty = 1.0;
  // Presence and frequency as OpenAI: counts over the REPLY's tokens only (never the prompt's);
  // logit -= presence * (count > 0) + frequency * count. 0 = off.
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::vector<LogitBias> logit_bias;  // added last; each id at most once

  bool greedy() const { return temperature < kMinTemperature; }
  bool uses_penalties() const {
    return repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
  }
  bool edits_logits() const { return uses_penalties() || !logit_bias.empty(); }
};

// What rank 0 asks the ranks to send for one row.
struct RowNeeds {
  bool full_row = false;
  uint32_t top_n = 1;  // without full_row: each rank sends the best top_n of its slices, or all if it has fewer
  bool draw = false;   // each rank draws from its slices with the row's key and sends that token (sample_drawn)
};

// Greedy asks for the best candidate, 0 < top_k <= 256 for the best top_k. Sampling from everything (no top_k, top_p or
// min_p) is an argmax of keyed scores, of which each rank finds its own. Penalties, bias, logprobs, and top_p or min_p
// without a top_k look at the whole row.
inline RowNeeds row_needs(const SamplingParams& params, bool logprobs) {
  if (logprobs || params.edits_logits()) return {true, 0};
  if (params.greedy()) return {false, 1};
  if (params.top_k > 0 && params.top_k <= kMaxCandidates) return {false, params.top_k};
  if (params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0) return {false, 0, true};
  return {true, 0};
}

}  // namespace tensorfold
