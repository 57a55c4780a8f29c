#include "coordinator/commands/bench/pass_bench.h"

#include <algorithm>
#include <chrono>

namespace tensorfold {
namespace {

constexpr int kFillChunk = 256;
constexpr int kFewestPasses = 5;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// A prompt of pseudo-random tokens; the last row's best candidate is wanted, as in service.
absl::Status PassBench::fill(int tokens, int chunk) {
  position_ = 0;
  while (position_ < tokens) {
    PassPlan plan;
    SequencePlan& sequence = plan.sequences.emplace_back();
    sequence.fresh = position_ == 0;
    if (sequence.fresh) {
      const int64_t pages = (tokens + kWindowPositions + kMaxWindow + kPageTokens - 1) / kPageTokens;
      for (int64_t page = 0; page < pages; ++page) sequence.new_pages.push_back(static_cast<int32_t>(page));
    }
    sequence.first_position = static_cast<uint64_t>(position_);
    const int64_t rows = std::min<int64_t>(chunk, tokens - position_);
    for (int64_t i = 0; i < rows; ++i) {
      sequence.tokens.push_back(static_cast<int32_t>((position_ + i) * 2654435761 % vocabulary_));
    }
    sequence.certain = static_cast<uint32_t>(rows);
    position_ += rows;
    if (position_ == tokens) sequence.wants.push_back({static_cast<uint32_t>(rows) - 1, 1});
    if (absl::Status status = executor_.execute(std::move(plan)).status(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PassBench::window(int rows, double* ms) {
  if (position_ < context_ || position_ >= context_ + kWindowPositions) {
    if (absl::Status status = fill(context_, kFillChunk); !status.ok()) return status;
  }
  PassPlan plan;
  SequencePlan& sequence = plan.sequences.emplace_back();
  sequence.first_position = static_cast<uint64_t>(position_);
  sequence.certain = 1;
  for (int row = 0; row < rows; ++row) {
    sequence.tokens.push_back(static_cast<int32_t>((position_ + row) % vocabulary_));
    sequence.wants.push_back({static_cast<uint32_t>(row), 1});
  }
  position_ += 1;
  const double start = seconds_now();
  absl::Status status = executor_.execute(std::move(plan)).status();
  *ms = (seconds_now() - start) * 1e3;
  return status;
}

absl::Status PassBench::measure_window(int rows, double seconds, WidthFigure* figure) {
  double ms = 0;
  if (absl::Status status = window(rows, &ms); !status.ok()) return status;  // brings the caches into their state
  times_.clear();
  const double end = seconds_now() + seconds;
  while (static_cast<int>(times_.size()) < kFewestPasses || seconds_now() < end) {
    if (absl::Status status = window(rows, &ms); !status.ok()) return status;
    times_.push_back(ms);
  }
  std::sort(times_.begin(), times_.end());
  const double median = times_[times_.size() / 2];
  const bool first = figure->passes == 0;
  figure->rows = rows;
  figure->passes += static_cast<int>(times_.size());
  figure->best_ms = first ? times_[0] : std::min(figure->best_ms, times_[0]);
  figure->median_ms = first ? median : std::min(figure->median_ms, median);
  return absl::OkStatus();
}

absl::Status PassBench::measure_prompt(int chunk, int tokens, double seconds, PromptFigure* figure) {
  const double end = seconds_now() + seconds;
  do {
    const double start = seconds_now();
    if (absl::Status status = fill(tokens, chunk); !status.ok()) return status;
    const double spent = seconds_now() - start;
    figure->best_s = figure->prompts == 0 ? spent : std::min(figure->best_s, spent);
    figure->chunk = chunk;
    figure->tokens = tokens;
    ++figure->prompts;
  } while (seconds_now() < end);
  position_ = -1;
  return absl::OkStatus();
}

absl::Status PassBench::release() {
  PassPlan plan;
  plan.kind = PlanKind::kPing;
  plan.release = {0};
  position_ = -1;
  return executor_.execute(std::move(plan)).status();
}

}  // namespace tensorfold
