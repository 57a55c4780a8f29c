#include "coordinator/commands/bench/pass_bench.h"

#include <algorithm>
#include <chrono>

namespace tensorfold {
namespace {

constexpr int kFillChunk = 256;
// Passes of one measurement: that many, but when they take long, fewer.
constexpr size_t kFewestPasses = 5;
constexpr size_t kFewestLongPasses = 2;

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

void PassBench::use_context(int64_t tokens) {
  context_ = tokens;
  position_ = -1;
}

// Sees to it that a window of `rows` rows can follow.
absl::Status PassBench::begin(int rows) {
  if (!assume_) {
    if (position_ >= context_ && position_ < context_ + kWindowPositions) return absl::OkStatus();
    return fill(static_cast<int>(context_), kFillChunk);
  }
  if (position_ >= 0 && position_ + rows <= context_) return absl::OkStatus();
  // One token into the last page: the windows up to the context need no page that is not there already.
  position_ = context_ - kPageTokens + 1;
  return assume_(position_);
}

absl::Status PassBench::window(int rows, double* ms) {
  if (absl::Status status = begin(rows); !status.ok()) return status;
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
  const double long_end = end + 2 * seconds;
  while (seconds_now() < end || times_.size() < kFewestLongPasses ||
         (times_.size() < kFewestPasses && seconds_now() < long_end)) {
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

absl::Status PassBench::chunk_at(int64_t start, int rows, double* seconds) {
  PassPlan plan;
  SequencePlan& sequence = plan.sequences.emplace_back();
  if (start == 0) {
    sequence.fresh = true;
  } else if (absl::Status status = assume_(start); !status.ok()) {
    return status;
  }
  // None that the slot may have been given with its position: no two positions share a place.
  const int64_t first_page = start == 0 ? 0 : start / kPageTokens + kSparePages;
  for (int64_t page = 0; page < (rows + kPageTokens - 1) / kPageTokens; ++page) {
    sequence.new_pages.push_back(static_cast<int32_t>(first_page + page));
  }
  sequence.first_position = static_cast<uint64_t>(start);
  for (int row = 0; row < rows; ++row) {
    sequence.tokens.push_back(static_cast<int32_t>((start + row) * 2654435761 % vocabulary_));
  }
  sequence.certain = static_cast<uint32_t>(rows);
  sequence.wants.push_back({static_cast<uint32_t>(rows) - 1, 1});
  const double begin = seconds_now();
  absl::Status status = executor_.execute(std::move(plan)).status();
  *seconds = seconds_now() - begin;
  return status;
}

absl::Status PassBench::measure_chunk(int chunk, int64_t context, double seconds, ChunkFigure* figure) {
  const int64_t start = std::max<int64_t>(0, context - chunk) / kPageTokens * kPageTokens;
  times_.clear();
  double spent = 0;
  const double end = seconds_now() + seconds;
  do {
    if (absl::Status status = chunk_at(start, chunk, &spent); !status.ok()) return status;
    times_.push_back(spent);
  } while (seconds_now() < end);
  position_ = -1;
  std::sort(times_.begin(), times_.end());
  const double median = times_[times_.size() / 2];
  const bool first = figure->passes == 0;
  figure->chunk = chunk;
  figure->start = start;
  figure->passes += static_cast<int>(times_.size());
  figure->best_s = first ? times_[0] : std::min(figure->best_s, times_[0]);
  figure->median_s = first ? median : std::min(figure->median_s, median);
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
