#include "coordinator/schedule/warm_up.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace tensorfold {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kRepeats = 3;
constexpr std::chrono::seconds kLongest{3};
constexpr uint32_t kPromptRows = 32;  // what a page has room for behind the windows

// The warm-up's only sequence, which grows by a token a pass.
class WarmSequence {
 public:
  WarmSequence(PassExecutor& executor, const WarmUpOptions& options)
      : executor_(executor), options_(options), begin_(Clock::now()) {}

  // A pass of prompt rows. Milliseconds.
  absl::StatusOr<double> prompt(uint32_t rows) {
    const absl::StatusOr<double> ms = timed(rows, 0, 0, rows);
    position_ += rows - 1;
    return ms;
  }

  // The fastest of a few verify windows, none of it kept but the certain row. Milliseconds.
  absl::StatusOr<double> best_window(uint32_t width, uint32_t mtp_steps, uint32_t block_drafts = 0) {
    double best = 0;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const absl::StatusOr<double> ms = timed(width, mtp_steps, block_drafts, 1);
      if (!ms.ok()) return ms.status();
      if (repeat == 0 || *ms < best) best = *ms;
      if (Clock::now() - begin_ > kLongest) break;
    }
    return best;
  }

 private:
  absl::StatusOr<double> timed(uint32_t width, uint32_t mtp_steps, uint32_t block_drafts, uint32_t certain) {
    PassPlan plan;
    SequencePlan& sequence = plan.sequences.emplace_back();
    sequence.fresh = position_ == 0;
    sequence.use_mtp = options_.use_mtp;
    sequence.use_block = options_.block_drafts > 0;
    sequence.first_position = position_++;
    sequence.certain = certain;
    sequence.tokens.assign(width - mtp_steps - block_drafts, 0);
    sequence.mtp_steps = mtp_steps;
    sequence.block_drafts = block_drafts;
    if (sequence.fresh) sequence.new_pages = {0};
    for (uint32_t row = certain - 1; row < width; ++row) sequence.wants.push_back({row, 1});
    const Clock::time_point start = Clock::now();
    const absl::StatusOr<PassResult> result = executor_.execute(std::move(plan));
    if (!result.ok()) return result.status();
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }

  PassExecutor& executor_;
  const WarmUpOptions& options_;
  const Clock::time_point begin_;
  uint64_t position_ = 0;
};

}  // namespace

absl::StatusOr<WarmUpResult> warm_up(PassExecutor& executor, const WarmUpOptions& options, WidthPolicy& policy) {
  WarmSequence sequence(executor, options);
  std::vector<uint32_t> widths;
  for (uint32_t width = 1; width < options.widest; width *= 2) widths.push_back(width);
  widths.push_back(options.widest);
  for (const uint32_t width : widths) {
    const absl::StatusOr<double> ms = sequence.best_window(width, 0);
    if (!ms.ok()) return ms.status();
    policy.record_pass(width, *ms);
  }
  WarmUpResult out;
  if (options.use_mtp && options.widest > 1) {
    const uint32_t steps = std::min(options.widest - 1, 3u);
    const absl::StatusOr<double> ms = sequence.best_window(steps + 1, steps);
    if (!ms.ok()) return ms.status();
    out.mtp_step_ms = std::max(0.0, *ms - policy.costs().estimate(steps + 1)) / steps;
    policy.record_mtp_step(out.mtp_step_ms);
  }
  if (options.block_drafts > 0 && options.widest > 1) {
    const uint32_t drafts = std::min(options.widest - 1, options.block_drafts);
    const absl::StatusOr<double> ms = sequence.best_window(drafts + 1, 0, drafts);
    if (!ms.ok()) return ms.status();
    out.block_ms = std::max(0.0, *ms - policy.costs().estimate(drafts + 1));
    policy.record_block(out.block_ms);
  }
  const uint32_t rows = std::min(kPromptRows, static_cast<uint32_t>(options.most_rows));
  const absl::StatusOr<double> prompt_ms = sequence.prompt(rows);
  if (!prompt_ms.ok()) return prompt_ms.status();
  out.prompt_rows = rows;
  out.prompt_ms = *prompt_ms;
  PassPlan release;
  release.kind = PlanKind::kPing;
  release.release = {0};
  const absl::StatusOr<PassResult> released = executor.execute(std::move(release));
  if (!released.ok()) return released.status();
  return out;
}

}  // namespace tensorfold
