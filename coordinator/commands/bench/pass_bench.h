// Times passes: verify windows of given widths, and prompts.
#pragma once

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/report.h"
#include "transport/pass/executor.h"
#include "worker/model/model.h"

namespace tensorfold {

/// Positions that measured windows may take beyond the context before the context is filled again.
inline constexpr int kWindowPositions = 1024;

/// Drives slot 0 of a world. Not thread-safe.
class PassBench {
 public:
  /// `vocabulary` bounds the token ids used. The executor outlives this.
  PassBench(PassExecutor& executor, int64_t vocabulary, int context)
      : executor_(executor), vocabulary_(vocabulary), context_(context) {}

  /// Windows of `rows` rows for about `seconds`, at least a few; their first row counts, the others do not.
  absl::Status measure_window(int rows, double seconds, WidthFigure* figure);
  /// Prompts of `tokens` tokens in passes of `chunk` rows for about `seconds`, at least one.
  absl::Status measure_prompt(int chunk, int tokens, double seconds, PromptFigure* figure);
  /// Frees the slot.
  absl::Status release();

 private:
  absl::Status fill(int tokens, int chunk);
  absl::Status window(int rows, double* ms);

  PassExecutor& executor_;
  int64_t vocabulary_;
  int context_;
  int64_t position_ = -1;  // of the slot; negative: not filled
  std::vector<double> times_;
};

}  // namespace tensorfold
