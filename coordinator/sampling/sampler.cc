#include "coordinator/sampling/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "kernels/numerics/gumbel.h"
#include "kernels/numerics/math64.h"

namespace tensorfold {
namespace {

__extension__ typedef unsigned __int128 Uint128;

constexpr double kMassUnit = 0x1p40;
// exp(-29) * 2^40 < 1: the mass is 0 without calling exp.
constexpr double kMasslessBelow = -29.0;
// exp64 is within a few units of the last place but not proven monotone: two close arguments may give masses the wrong
// way round by one. Bounds on tokens that were not sent allow for it.
constexpr uint64_t kMassSlack = 2;

struct Entry {
  double logit;
  uint32_t id;
};

bool before(const Entry& a, const Entry& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

absl::Status non_finite(double logit, uint32_t id, uint64_t position) {
  return absl::InternalError(
      fmt::format("the logit of token {} at position {} is {}: the model's output is broken", id, position, logit));
}

uint64_t nucleus_mass(double scaled, double max) {
  const double x = scaled - max;
  if (x < kMasslessBelow) return 0;
  return static_cast<uint64_t>(exp64(x) * kMassUnit);
}

// Whether a token is in the nucleus, given the mass of the tokens before it.
class Nucleus {
 public:
  Nucleus(double top_p, uint64_t total)
      : target_(static_cast<Uint128>(static_cast<uint64_t>(top_p * 0x1p52)) * static_cast<Uint128>(total)) {}
  bool keeps(uint64_t mass_before, uint64_t mass) const {
    if (mass_before == 0) return true;  // the top token, whatever top_p
    return mass > 0 && (static_cast<Uint128>(mass_before) << 52) < target_;
  }

 private:
  Uint128 target_;  // top_p * total, in units of 2^-52: at most 2^112
};

bool uses_top_p(const SamplingParams& params) { return params.top_p < 1.0; }

class Draw {
 public:
  Draw(const SamplingParams& params, uint64_t position) : row_key_(row_key(params.seed, position)) {}

  void offer(double scaled, const Entry& entry) { draw_.offer(row_key_, scaled, entry.logit, entry.id); }
  double score() const { return draw_.score; }
  Sampled result() const { return {draw_.id, draw_.logit}; }

 private:
  uint64_t row_key_;
  KeyedDraw draw_;
};

// Offers what min-p keeps of `kept`.
template <typename Entries>
void offer_min_p(const SamplingParams& params, double max, const Entries& kept, Draw& draw) {
  const double bar = params.min_p * kMassUnit;
  // Well under the bar no exp is needed: a mass is at most exp(x) * 2^40.
  const double far_below = params.min_p > 0.0 ? log64(params.min_p) - 1e-6 : 0.0;
  for (const Entry& entry : kept) {
    const double scaled = entry.logit / params.temperature;
    if (params.min_p > 0.0) {
      if (scaled - max < far_below || static_cast<double>(nucleus_mass(scaled, max)) < bar) continue;
    }
    draw.offer(scaled, entry);
  }
}

// exp(x) for x in [kMasslessBelow, 0], within 1e-5 of it relatively (the series' first missing term is 3e-6): cheap
// enough for every token of a vocabulary.
double rough_exp(double x) {
  const double y = x * 1.4426950408889634;
  const int32_t n = static_cast<int32_t>(y - 0.5);
  const double r = (y - n) * 0.6931471805599453;
  const double series = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120)))));
  return series * std::bit_cast<double>(static_cast<uint64_t>(n + 1023) << 52);
}

// Keeps the tokens of `set` that can have mass, and bounds the sum of their masses.
struct MassBounds {
  uint64_t least = 0;
  uint64_t most = 0;
};
MassBounds drop_massless(const SamplingParams& params, double max, std::vector<Entry>& set) {
  double sum = 0.0;
  size_t kept = 0;
  for (const Entry& entry : set) {
    const double x = entry.logit / params.temperature - max;
    if (x < kMasslessBelow) continue;
    sum += rough_exp(x);
    set[kept++] = entry;
  }
  set.resize(kept);
  // Rounding down takes less than 1 from each mass.
  const double mass = sum * kMassUnit;
  const double slack = static_cast<double>(kept) + 1.0;
  const double least = mass * (1.0 - 2e-5) - slack;
  return {least > 0.0 ? static_cast<uint64_t>(least) : 0, static_cast<uint64_t>(mass * (1.0 + 2e-5) + slack)};
}

// The nucleus, best first, if every total within `bounds` gives the same one. Takes the best from a heap one by one: a
// nucleus is mostly a few tokens of a large set. Only reorders `set`.
std::optional<std::vector<Entry>> nucleus_within(const SamplingParams& params, double max, MassBounds bounds,
                                                 std::vector<Entry>& set) {
  const auto after = [](const Entry& a, const Entry& b) { return before(b, a); };
  std::make_heap(set.begin(), set.end(), after);
  const Nucleus least(params.top_p, bounds.least);
  const Nucleus most(params.top_p, bounds.most);
  std::vector<Entry> kept;
  uint64_t mass_before = 0;
  for (auto end = set.end(); end != set.begin(); --end) {
    const Entry entry = set.front();
    const uint64_t mass = nucleus_mass(entry.logit / params.temperature, max);
    if (least.keeps(mass_before, 1) != most.keeps(mass_before, 1)) return std::nullopt;
    if (!most.keeps(mass_before, 1)) break;
    std::pop_heap(set.begin(), end, after);
    if (mass == 0) continue;  // in no nucleus
    kept.push_back(entry);
    mass_before += mass;
  }
  return kept;
}

std::vector<Entry> take_nucleus(const SamplingParams& params, double max, std::vector<Entry>& set) {
  // The exact total costs an exact exp a token; bounds on it nearly always decide.
  const MassBounds bounds = drop_massless(params, max, set);
  if (auto kept = nucleus_within(params, max, bounds, set)) return *std::move(kept);
  uint64_t total = 0;
  for (const Entry& entry : set) total += nucleus_mass(entry.logit / params.temperature, max);
  return *nucleus_within(params, max, {total, total}, set);
}

// Temperature, top-p, min-p and the draw, over a set that is complete. `set` is not empty; its order does not matter.
Sampled draw_from_set(const SamplingParams& params, uint64_t position, std::vector<Entry> set) {
  const Entry top = *std::min_element(set.begin(), set.end(), before);
  const double max = top.logit / params.temperature;
  Draw draw(params, position);
  draw.offer(max, top);  // always kept; a good score to beat makes the rest cheap
  if (uses_top_p(params)) {
    offer_min_p(params, max, take_nucleus(params, max, set), draw);
  } else {
    offer_min_p(params, max, set, draw);
  }
  return draw.result();
}

absl::Status edit_logits(const SamplingParams& params, const TokenCounts& counts, std::vector<Entry>& row) {
  if (params.uses_penalties()) {
    for (const auto& [id, count] : counts.counts()) {
      if (id >= row.size()) continue;  // the embedding may have more rows than the head
      double& logit = row[id].logit;
      logit = logit > 0.0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
      if (count.reply > 0) {
        logit -= params.presence_penalty;
        logit -= params.frequency_penalty * static_cast<double>(count.reply);
      }
    }
  }
  for (const LogitBias& bias : params.logit_bias) {
    if (bias.id >= row.size()) {
      return absl::InvalidArgumentError(
          fmt::format("logit_bias names token {}, but the vocabulary has {} tokens", bias.id, row.size()));
    }
    row[bias.id].logit += bias.bias;
  }
  return absl::OkStatus();
}

Sampled argmax(std::span<const float> logits) {
  size_t best = 0;
  for (size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[best]) best = i;
  }
  return {static_cast<uint32_t>(best), logits[best]};
}

// All ranks' candidates in one order, and how much of it is certain.
struct Merged {
  std::vector<Entry> known;  // sorted
  size_t complete = 0;       // the first so many of `known` are the row's first: no unsent token comes between
  uint64_t unsent = 0;       // tokens that were not sent
  double horizon = 0.0;      // no unsent token has a larger logit; with unsent > 0 only
};

absl::StatusOr<Merged> merge(std::span<const CandidateList> ranks, uint64_t position) {
  Merged merged;
  bool blind = false;  // a rank with tokens sent nothing
  std::vector<Entry> lasts;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const CandidateList& list = ranks[r];
    for (size_t i = 0; i < list.candidates.size(); ++i) {
      const SampleCandidate& c = list.candidates[i];
      if (!std::isfinite(c.logit)) return non_finite(c.logit, c.id, position);
      const Entry entry{c.logit, c.id};
      if (i > 0 && !before(merged.known.back(), entry)) {
        return absl::InvalidArgumentError(
            fmt::format("rank {} sent candidates out of order at position {}: token {} is not before token {}", r,
                        position, merged.known.back().id, c.id));
      }
      merged.known.push_back(entry);
    }
    if (list.exhaustive()) continue;
    merged.unsent += list.slice_rows - list.candidates.size();
    if (list.candidates.empty()) {
      blind = true;
    } else {
      lasts.push_back(merged.known.back());
    }
  }
  if (merged.known.empty()) {
    return absl::InvalidArgumentError(fmt::format("no rank sent a candidate for position {}", position));
  }
  std::sort(merged.known.begin(), merged.known.end(), before);
  if (blind) return merged;
  merged.complete = merged.known.size();
  for (const Entry& last : lasts) {
    const auto end = std::upper_bound(merged.known.begin(), merged.known.end(), last, before);
    merged.complete = std::min(merged.complete, static_cast<size_t>(end - merged.known.begin()));
  }
  if (!lasts.empty()) merged.horizon = std::min_element(lasts.begin(), lasts.end(), before)->logit;
  return merged;
}

// How many of the row's first tokens the nucleus keeps if the whole row's mass is `total`; kUndecided when it reaches
// past them.
constexpr size_t kUndecided = ~size_t{0};
size_t nucleus_size(const SamplingParams& params, std::span<const uint64_t> masses, uint64_t total) {
  const Nucleus nucleus(params.top_p, total);
  uint64_t before = 0;
  for (size_t size = 0; size < masses.size(); ++size) {
    if (!nucleus.keeps(before, 1)) return size;
    if (masses[size] == 0) return kUndecided;
    before += masses[size];
  }
  return nucleus.keeps(before, 1) ? kUndecided : masses.size();
}

// Sampling without top-k where some tokens were not sent: decided when whatever they hold cannot change the result.
CandidateSample draw_despite_unsent(const SamplingParams& params, uint64_t position, Merged& merged) {
  const CandidateSample full{.needs_full_row = true, .sampled = {}};
  const double max = merged.known.front().logit / params.temperature;
  const double horizon = merged.horizon / params.temperature;
  const uint64_t unsent_mass = horizon - max < kMasslessBelow ? 0 : nucleus_mass(horizon, max) + kMassSlack;
  Draw draw(params, position);
  if (uses_top_p(params)) {
    std::vector<uint64_t> masses;
    uint64_t known_mass = 0;
    for (const Entry& entry : merged.known) {
      masses.push_back(nucleus_mass(entry.logit / params.temperature, max));
      known_mass += masses.back();
    }
    const std::span<const uint64_t> complete(masses.data(), merged.complete);
    const size_t fewest = nucleus_size(params, complete, known_mass);
    const size_t most = nucleus_size(params, complete, known_mass + merged.unsent * unsent_mass);
    if (fewest != most || most == kUndecided) return full;
    offer_min_p(params, max, std::span<const Entry>(merged.known.data(), most), draw);
  } else if (params.min_p > 0.0) {
    if (static_cast<double>(unsent_mass) >= params.min_p * kMassUnit) return full;
    offer_min_p(params, max, merged.known, draw);
  } else {
    offer_min_p(params, max, merged.known, draw);
    if (draw.score() <= horizon + kMaxGumbel + 1e-9) return full;
  }
  return {.needs_full_row = false, .sampled = draw.result()};
}

}  // namespace

absl::StatusOr<Sampled> sample_row(const SamplingParams& params, std::span<const float> logits, uint64_t position,
                                   const TokenCounts& counts) {
  if (logits.empty() || logits.size() > kMaxVocabulary) {
    return absl::InvalidArgumentError(fmt::format("a row of {} logits at position {}; between 1 and {} can be sampled",
                                                  logits.size(), position, kMaxVocabulary));
  }
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) return non_finite(logits[i], static_cast<uint32_t>(i), position);
  }
  if (params.greedy() && !params.edits_logits()) return argmax(logits);

  std::vector<Entry> row(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) row[i] = {logits[i], static_cast<uint32_t>(i)};
  if (absl::Status status = edit_logits(params, counts, row); !status.ok()) return status;
  if (params.greedy()) {
    const Entry top = *std::min_element(row.begin(), row.end(), before);
    return Sampled{top.id, top.logit};
  }
  if (params.top_k > 0 && params.top_k < row.size()) {
    std::nth_element(row.begin(), row.begin() + params.top_k, row.end(), before);
    row.resize(params.top_k);
  }
  return draw_from_set(params, position, std::move(row));
}

absl::StatusOr<CandidateSample> sample_candidates(const SamplingParams& params, std::span<const CandidateList> ranks,
                                                  uint64_t position) {
  if (params.edits_logits()) return CandidateSample{.needs_full_row = true, .sampled = {}};
  absl::StatusOr<Merged> merged = merge(ranks, position);
  if (!merged.ok()) return merged.status();
  if (merged->complete == 0) return CandidateSample{.needs_full_row = true, .sampled = {}};
  const Entry top = merged->known.front();
  if (params.greedy()) return CandidateSample{.needs_full_row = false, .sampled = {top.id, top.logit}};
  if (params.top_k > 0 && params.top_k <= merged->complete) {
    merged->known.resize(params.top_k);
    return CandidateSample{.needs_full_row = false,
                           .sampled = draw_from_set(params, position, std::move(merged->known))};
  }
  if (merged->unsent == 0) {  // everything was sent, and top_k, if any, is wider
    return CandidateSample{.needs_full_row = false,
                           .sampled = draw_from_set(params, position, std::move(merged->known))};
  }
  const uint64_t vocabulary = merged->known.size() + merged->unsent;
  if (params.top_k > 0 && params.top_k < vocabulary) return CandidateSample{.needs_full_row = true, .sampled = {}};
  return draw_despite_unsent(params, position, *merged);
}

absl::StatusOr<Sampled> sample_drawn(const SamplingParams& params, std::span<const SampleCandidate> ranks,
                                     uint64_t position) {
  if (ranks.empty()) return absl::InvalidArgumentError(fmt::format("no rank drew a token for position {}", position));
  const SampleCandidate* broken = nullptr;
  Draw draw(params, position);
  for (const SampleCandidate& best : ranks) {
    if (!std::isfinite(best.logit)) {
      if (broken == nullptr || best.id < broken->id) broken = &best;
      continue;
    }
    draw.offer(static_cast<double>(best.logit) / params.temperature, Entry{best.logit, best.id});
  }
  if (broken != nullptr) return non_finite(broken->logit, broken->id, position);
  return draw.result();
}

}  // namespace tensorfold
