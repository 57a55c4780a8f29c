#include "coordinator/schedule/round_planner.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tensorfold {
namespace {

// A measured budget: others' tokens may come six times as slowly while a prompt is read, and prompts get at least half
// of a round. Under the shortest budget passes are so short that their fixed costs would be most of them.
constexpr double kBudgetPasses = 6.0;
constexpr double kShortestMs = 20.0;
constexpr double kLongestMs = 1000.0;
// Without anybody who waits for tokens a round may take longer, but a request that comes meanwhile waits for its end.
constexpr double kAloneBudgets = 4.0;
constexpr int64_t kLeastFill = 8;      // prompt rows of a round in which time is short: prompts are always read on
constexpr int64_t kLeastQuantum = 16;  // rows of a turn: fewer are hardly cheaper than these
constexpr double kCaution = 0.9;       // of the budget is planned: passes vary

}  // namespace

SequencePlan& Round::add(Sequence* sequence, bool use_block) {
  SequencePlan& entry = plan.sequences.emplace_back();
  entry.slot = *sequence->slot;
  entry.use_block = use_block;
  sequences.push_back(sequence);
  return entry;
}

double RoundPlanner::budget_ms(size_t window_rows) const {
  if (options_.budget.count() > 0) return static_cast<double>(options_.budget.count()) / 1000.0;
  const PassCosts& costs = policy_.costs();
  const double measured = std::max(kBudgetPasses * costs.estimate(1), 2.0 * costs.estimate(window_rows));
  return std::clamp(measured, kShortestMs, kLongestMs);
}

double RoundPlanner::row_ms(double position) const {
  // Before a prompt was measured a row is taken to cost what another row of a window does.
  const PassCosts& costs = policy_.costs();
  const double guess = std::max((costs.estimate(9) - costs.estimate(1)) / 8.0, 0.01 * costs.estimate(1));
  return costs_.row_ms(position, guess);
}

// Rows that a filling sequence gets now, at most its deficit.
int64_t RoundPlanner::grant(const Fill& part, const Room& room, bool first) const {
  const Sequence& sequence = *part.sequence;
  const int64_t least = first ? kLeastFill : 0;
  const int64_t most =
      std::min<int64_t>({std::max(turns_.at(part.sequence).deficit, least), options_.prompt_chunk - part.rows,
                         room.rows, static_cast<int64_t>(sequence.rows_to_stop()) - part.rows});
  const double each = row_ms(static_cast<double>(sequence.computed()) + static_cast<double>(most) / 2.0);
  const int64_t in_time = room.ms <= 0.0 ? 0 : static_cast<int64_t>(std::min(room.ms / each, 1e9));
  return std::min(most, std::max(in_time, least));
}

// Deficit round robin: whoever had a whole turn the longest ago is first, and comes again while there is room.
void RoundPlanner::fill(const std::vector<Sequence*>& filling, Room* room, std::vector<Fill>* fills) {
  std::vector<Fill> parts;
  for (Sequence* sequence : filling) {
    if (const auto [it, added] = turns_.try_emplace(sequence); added) it->second.served = ++clock_;
    parts.push_back({sequence, 0});
  }
  std::stable_sort(parts.begin(), parts.end(), [this](const Fill& a, const Fill& b) {
    return turns_.at(a.sequence).served < turns_.at(b.sequence).served;
  });
  int64_t least = kLeastQuantum;
  for (bool served = !parts.empty(); served;) {
    served = false;
    const double each = row_ms(static_cast<double>(parts[0].sequence->computed()));
    const double fits = std::min({room->ms / each, static_cast<double>(room->rows), 1e9});
    const int64_t quantum = std::max(least, static_cast<int64_t>(fits / static_cast<double>(parts.size())));
    least = 1;
    for (Fill& part : parts) {
      Turn& turn = turns_.at(part.sequence);
      if (turn.deficit <= 0) turn.deficit = quantum;  // else its turn goes on
      const int64_t rows = grant(part, *room, !served && part.rows == 0 && fills->empty());
      if (rows <= 0) continue;
      served = true;
      part.rows += rows;
      turn.deficit -= rows;
      if (turn.deficit <= 0) turn.served = ++clock_;
      room->rows -= rows;
      room->ms -= static_cast<double>(rows) * row_ms(static_cast<double>(part.sequence->computed()));
    }
  }
  for (const Fill& part : parts) {
    if (part.rows > 0) fills->push_back(part);
  }
}

void RoundPlanner::forget_ended(const std::vector<std::unique_ptr<Sequence>>& active) {
  std::erase_if(turns_, [&](const auto& entry) {
    return std::none_of(active.begin(), active.end(),
                        [&](const auto& sequence) { return sequence.get() == entry.first && sequence->filling(); });
  });
}

void RoundPlanner::add_windows(const std::vector<Sequence*>& decoding, size_t most_rows, Round* round) const {
  std::vector<WidthRequest> requests;
  for (Sequence* sequence : decoding) {
    requests.push_back(sequence->width_request(options_.use_mtp));
    requests.back().block_drafts = options_.block_drafts;
  }
  const size_t rows = trials_.may_draft(requests.size()) ? most_rows : requests.size();
  const std::vector<WidthChoice> choices = policy_.choose(requests, rows);
  round->windows = requests.size();
  uint32_t mtp_steps = 0;  // chained once for all sequences
  bool blocks = false;     // likewise
  for (size_t i = 0; i < decoding.size(); ++i) {
    SequencePlan& plan = round->add(decoding[i], options_.block_drafts > 0);
    decoding[i]->plan_window(choices[i], options_.use_mtp, &plan);
    round->window_rows += plan.tokens.size() + plan.drafted();
    mtp_steps = std::max(mtp_steps, plan.mtp_steps);
    blocks = blocks || plan.block_drafts > 0;
  }
  if (round->window_rows > 0) round->window_ms = policy_.pass_ms(round->window_rows, mtp_steps, blocks);
}

Round RoundPlanner::plan(const std::vector<std::unique_ptr<Sequence>>& active) {
  Round round;
  forget_ended(active);
  std::vector<Sequence*> decoding;
  std::vector<Sequence*> filling;
  std::vector<Sequence*> background;
  for (const std::unique_ptr<Sequence>& sequence : active) {
    (!sequence->filling() ? decoding : sequence->background() ? background : filling).push_back(sequence.get());
  }
  // Windows come first: they are what the budget protects. Prompts always have a few rows.
  const int64_t all_rows = options_.max_batch_rows;
  const int64_t kept = filling.empty() && background.empty() ? 0 : std::min(kLeastFill, all_rows / 2);
  add_windows(decoding, static_cast<size_t>(all_rows - kept), &round);
  Room room;
  round.budget_ms = budget_ms(round.window_rows) * (decoding.empty() ? kAloneBudgets : 1.0);
  room.rows = std::min(all_rows - static_cast<int64_t>(round.window_rows), trusted_rows_);
  room.ms = round.budget_ms * kCaution - round.window_ms;
  std::vector<Fill> fills;
  fill(filling, &room, &fills);
  fill(background, &room, &fills);
  for (const Fill& part : fills) {
    const double middle = static_cast<double>(part.sequence->computed()) + static_cast<double>(part.rows) / 2.0;
    round.prompt_rows += part.rows;
    round.prompt_position += middle * static_cast<double>(part.rows);
    part.sequence->plan_prompt(static_cast<uint64_t>(part.rows), options_.use_mtp,
                               &round.add(part.sequence, options_.block_drafts > 0));
  }
  if (round.prompt_rows > 0) round.prompt_position /= static_cast<double>(round.prompt_rows);
  round.expected_ms = round.window_ms + static_cast<double>(round.prompt_rows) * row_ms(round.prompt_position);
  return round;
}

void RoundPlanner::record(const Round& round, double ms) {
  if (round.prompt_rows == 0) return;
  if (ms <= round.budget_ms) {
    trusted_rows_ = std::max(trusted_rows_, 2 * round.prompt_rows);
  } else {
    const double kept = static_cast<double>(round.prompt_rows) * round.budget_ms / ms;
    trusted_rows_ = std::max(kLeastFill, static_cast<int64_t>(kept));
  }
  // A pass is never taken to be cheaper than a tenth of itself for its prompt rows: the windows' estimate may be off.
  costs_.record(round.prompt_rows, round.prompt_position, std::max(ms - round.window_ms, 0.1 * ms));
}

}  // namespace tensorfold
