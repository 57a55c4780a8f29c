#include "coordinator/schedule/round_planner.h"

#include <algorithm>
#include <utility>

namespace tensorfold {

Round RoundPlanner::plan(const std::vector<std::unique_ptr<Sequence>>& active, const WidthPolicy& policy) {
  const bool mtp = options_.use_mtp;
  Round round;
  std::vector<Sequence*> decoding;
  std::vector<Sequence*> filling;
  for (const std::unique_ptr<Sequence>& sequence : active) {
    (sequence->filling() ? filling : decoding).push_back(sequence.get());
  }
  const auto add = [&](Sequence* sequence) -> SequencePlan& {
    SequencePlan& plan = round.plan.sequences.emplace_back();
    plan.slot = *sequence->slot;
    round.sequences.push_back(sequence);
    return plan;
  };

  // Prompt rows get what the verify windows leave of the rows and, beside decoding sequences, of the time budget.
  int64_t budget = options_.max_batch_rows - static_cast<int64_t>(decoding.size());
  if (!decoding.empty() && !filling.empty()) {
    const double budget_ms = static_cast<double>(options_.budget.count()) / 1000.0;
    int64_t fits = options_.prompt_chunk;
    while (fits > 16 && policy.costs().estimate(static_cast<size_t>(fits) + decoding.size()) > budget_ms) fits /= 2;
    budget = std::min(budget, fits);
  }
  std::vector<std::pair<Sequence*, int64_t>> fills;
  int64_t prompt_rows = 0;
  for (size_t i = 0; i < filling.size() && budget > 0; ++i) {
    Sequence* sequence = filling[(next_fill_ + i) % filling.size()];
    const int64_t rows =
        std::min<int64_t>({budget, options_.prompt_chunk, static_cast<int64_t>(sequence->rows_to_stop())});
    fills.emplace_back(sequence, rows);
    prompt_rows += rows;
    budget -= rows;
  }
  ++next_fill_;

  std::vector<WidthRequest> requests;
  for (Sequence* sequence : decoding) requests.push_back(sequence->width_request(mtp));
  const std::vector<WidthChoice> choices = policy.choose(requests, static_cast<size_t>(prompt_rows));
  for (size_t i = 0; i < decoding.size(); ++i) decoding[i]->plan_window(choices[i], mtp, &add(decoding[i]));
  for (const auto& [sequence, rows] : fills) {
    sequence->plan_prompt(static_cast<uint64_t>(rows), mtp, &add(sequence));
  }
  return round;
}

}  // namespace tensorfold
