#include "coordinator/draft/draft_trials.h"

#include <algorithm>
#include <bit>

namespace tensorfold {
namespace {

constexpr int kPhaseRounds = 8;  // counted ones
constexpr int kSoonest = 8;
constexpr int kLatest = 64;
constexpr double kClearly = 0.9;  // of the better rate: below, the other kind is tried half as often
constexpr double kWeight = 0.3;   // of a phase in its kind's average

}  // namespace

void DraftTrials::Arm::record(double measured) { rate = rate == 0 ? measured : rate + kWeight * (measured - rate); }

size_t DraftTrials::index(size_t streams) {
  return std::min(static_cast<size_t>(std::bit_width(std::max<size_t>(streams, 1) - 1)), kSizes - 1);
}

bool DraftTrials::may_draft(size_t streams) const { return streams <= kFewStreams || sizes_[index(streams)].drafting; }

void DraftTrials::record(size_t streams, bool drafted, size_t tokens, double ms, double plain_ms) {
  if (streams <= kFewStreams || ms <= 0) {
    last_ = 0;
    return;
  }
  const size_t at = index(streams);
  Size& size = sizes_[at];
  // A phase's first round, and one that comes after another number of streams, pays for what went before.
  const bool begins = size.rounds == 0 || last_ != at;
  last_ = at;
  ++size.rounds;
  if (begins) return;
  size.any_drafts = size.any_drafts || drafted;
  size.plain_ms += static_cast<double>(tokens) * plain_ms / static_cast<double>(streams);
  size.ms += ms;
  if (size.rounds > kPhaseRounds) end_phase(size);
}

void DraftTrials::end_phase(Size& size) {
  // A phase in which the policy wanted no drafts is one without.
  const bool with = size.drafting && size.any_drafts;
  if (size.ms > 0) (with ? size.with : size.without).record(size.plain_ms / size.ms);
  const bool both = size.with.rate > 0 && size.without.rate > 0;
  const bool better = size.with.rate >= size.without.rate;  // with drafts
  if (both && size.drafting != better) {
    // It was a trial, and it lost.
    const double share = std::min(size.with.rate, size.without.rate) / std::max(size.with.rate, size.without.rate);
    size.interval = share < kClearly ? std::min(2 * size.interval, kLatest) : kSoonest;
  }
  if (!both) {
    size.drafting = size.with.rate == 0;
    size.phases = 0;
  } else if (size.drafting == better && ++size.phases >= size.interval) {
    size.drafting = !better;
    size.phases = 0;
  } else {
    size.drafting = better;
  }
  size.rounds = 0;
  size.any_drafts = false;
  size.plain_ms = 0;
  size.ms = 0;
}

}  // namespace tensorfold
