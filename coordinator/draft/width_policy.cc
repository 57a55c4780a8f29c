#include "coordinator/draft/width_policy.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

namespace tensorfold {

struct WidthPolicy::Plan {
  DraftKind kind = DraftKind::kNone;
  std::vector<double> gains;  // gains[d - 1]: tokens that the d-th draft is expected to add; not rising
};

WidthPolicy::WidthPolicy(WidthOptions options) : options_(options) {
  options_.max_width = std::clamp<uint32_t>(options_.max_width, 1, kMaxDraftDepth + 1);
  options_.probe_interval = std::max<uint32_t>(options_.probe_interval, 1);
}

void WidthPolicy::record_mtp_step(double ms) {
  if (!std::isfinite(ms) || ms <= 0.0) return;
  mtp_step_ms_ = mtp_step_ms_ == 0.0 ? ms : mtp_step_ms_ + 0.1 * (ms - mtp_step_ms_);
}

void WidthPolicy::record_block(double ms) {
  if (!std::isfinite(ms) || ms <= 0.0) return;
  block_ms_ = block_ms_ == 0.0 ? ms : block_ms_ + 0.1 * (ms - block_ms_);
}

void WidthPolicy::record_window(const WidthChoice& choice, uint32_t copy_match, size_t accepted,
                                Acceptance* acceptance) {
  if (choice.drafts == 0) return;
  const DraftSource source = choice.kind == DraftKind::kMtp     ? DraftSource::kMtp
                             : choice.kind == DraftKind::kBlock ? DraftSource::kBlock
                                                                : copy_source(copy_match);
  global_.record(source, choice.drafts, accepted);
  if (acceptance != nullptr) acceptance->record(source, choice.drafts, accepted);
}

double WidthPolicy::pass_ms(size_t rows, size_t mtp_depth, bool blocks) const {
  // Before a step is measured it is taken as a tenth of a row's pass: an MTP layer is one of tens.
  const double step = mtp_step_ms_ > 0.0 ? mtp_step_ms_ : 0.1 * costs_.estimate(1);
  // A block drafter has a few layers and reads them once.
  const double block = block_ms_ > 0.0 ? block_ms_ : 0.15 * costs_.estimate(1);
  return costs_.estimate(rows) + step * static_cast<double>(mtp_depth) + (blocks ? block : 0.0);
}

WidthPolicy::Plan WidthPolicy::plan_for(const WidthRequest& request, DraftKind kind, DraftSource source,
                                        size_t available) const {
  Plan plan;
  const size_t depth = std::min({available, static_cast<size_t>(options_.max_width - 1), size_t{request.room}});
  double chance = 1.0;
  for (size_t d = 1; d <= depth; ++d) {
    chance *= request.acceptance != nullptr ? request.acceptance->rate(source, d, &global_)
                                            : global_.rate(source, d, nullptr);
    plan.gains.push_back(chance);
  }
  plan.kind = plan.gains.empty() ? DraftKind::kNone : kind;
  return plan;
}

// The best tokens a millisecond that `plan` gives the sequence alone in a pass.
double WidthPolicy::best_value(const Plan& plan, size_t base_rows) const {
  double tokens = 1.0;
  double best = tokens / pass_ms(base_rows, 0);
  for (size_t d = 1; d <= plan.gains.size(); ++d) {
    tokens += plan.gains[d - 1];
    best = std::max(
        best, tokens / pass_ms(base_rows + d, plan.kind == DraftKind::kMtp ? d : 0, plan.kind == DraftKind::kBlock));
  }
  return best;
}

WidthPolicy::Plan WidthPolicy::plan_of(const WidthRequest& request, size_t base_rows) const {
  Plan mtp;
  Plan copy;
  const bool may_mtp = request.kind == DraftKind::kMtp || request.kind == DraftKind::kAuto;
  const bool may_copy = request.kind == DraftKind::kCopy || request.kind == DraftKind::kAuto;
  if (may_mtp && request.mtp_available) mtp = plan_for(request, DraftKind::kMtp, DraftSource::kMtp, kMaxDraftDepth);
  if (may_copy && request.copy_match > 0) {
    copy = plan_for(request, DraftKind::kCopy, copy_source(request.copy_match), request.copy_ids);
  }
  const bool may_block = request.kind == DraftKind::kBlock || request.kind == DraftKind::kAuto;
  Plan block;
  if (may_block && request.block_drafts > 0) {
    block = plan_for(request, DraftKind::kBlock, DraftSource::kBlock, request.block_drafts);
  }
  // Among equals what costs rank 0 alone, then what is chained, so that a short window stays cheap.
  const Plan* best = nullptr;
  double value = 0.0;
  for (const Plan* plan : {&copy, &mtp, &block}) {
    if (plan->gains.empty()) continue;
    const double own = best_value(*plan, base_rows);
    if (best == nullptr || own > value) {
      best = plan;
      value = own;
    }
  }
  return best != nullptr ? *best : Plan();
}

// Rows are handed out one after the other, each to the sequence whose next draft is the most likely to be kept; of all
// the sets on the way the one with the most tokens a millisecond is taken.
std::vector<uint32_t> WidthPolicy::best_depths(const std::vector<Plan>& plans, size_t most_rows) const {
  std::vector<uint32_t> depths(plans.size(), 0);
  std::vector<uint32_t> best_set = depths;
  size_t total = 0;
  // By gain, among equals the earlier sequence: (gain, plans.size() - index).
  std::priority_queue<std::pair<double, size_t>> next_drafts;
  for (size_t i = 0; i < plans.size(); ++i) {
    total += plans[i].gains.size();
    if (!plans[i].gains.empty()) next_drafts.emplace(plans[i].gains[0], plans.size() - i);
  }
  double tokens = static_cast<double>(plans.size());
  double best = tokens / pass_ms(plans.size(), 0);
  size_t mtp_depth = 0;
  bool blocks = false;
  const size_t last = std::min(plans.size() + total, std::max(most_rows, plans.size()));
  for (size_t rows = plans.size() + 1; rows <= last; ++rows) {
    const size_t next = plans.size() - next_drafts.top().second;
    next_drafts.pop();
    tokens += plans[next].gains[depths[next]++];
    if (depths[next] < plans[next].gains.size()) {
      next_drafts.emplace(plans[next].gains[depths[next]], plans.size() - next);
    }
    if (plans[next].kind == DraftKind::kMtp) mtp_depth = std::max<size_t>(mtp_depth, depths[next]);
    blocks = blocks || plans[next].kind == DraftKind::kBlock;
    const double value = tokens / pass_ms(rows, mtp_depth, blocks);
    if (value > best) {
      best = value;
      best_set = depths;
    }
  }
  return best_set;
}

std::vector<WidthChoice> WidthPolicy::choose(std::span<const WidthRequest> requests, size_t most_rows) const {
  std::vector<Plan> plans;
  for (const WidthRequest& request : requests) plans.push_back(plan_of(request, requests.size()));
  std::vector<uint32_t> depths(requests.size(), 0);
  if (options_.adaptive) {
    depths = best_depths(plans, most_rows);
  } else {
    for (size_t i = 0; i < plans.size(); ++i) depths[i] = static_cast<uint32_t>(plans[i].gains.size());
  }
  size_t left = most_rows > requests.size() ? most_rows - requests.size() : 0;
  std::vector<WidthChoice> choices(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    uint32_t drafts = depths[i];
    if (drafts == 0 && !plans[i].gains.empty() && requests[i].idle_rounds >= options_.probe_interval) drafts = 1;
    drafts = static_cast<uint32_t>(std::min<size_t>(drafts, left));
    left -= drafts;
    if (drafts > 0) choices[i] = {plans[i].kind, drafts};
  }
  return choices;
}

}  // namespace tensorfold
