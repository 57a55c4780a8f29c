// Times passes: verify windows of given widths, and prompts.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/report.h"
#include "transport/pass/executor.h"
#include "worker/model/model.h"

namespace tensorfold {

/// Positions that measured windows may take beyond the context before the context is filled again.
inline constexpr int kWindowPositions = 1024;

/// KV pages beyond the positions in use: a slot that was put at a position holds up to two pages after it.
inline constexpr int64_t kSparePages = 2;

/// Drives slot 0 of a world. Not thread-safe.
class PassBench {
 public:
  /// Puts slot 0 of every rank at a position without computing what comes before it.
  using Assume = std::function<absl::Status(int64_t tokens)>;

  /// `vocabulary` bounds the token ids used. The executor outlives this.
  PassBench(PassExecutor& executor, int64_t vocabulary, int context)
      : executor_(executor), vocabulary_(vocabulary), context_(context) {}
  /// Contexts are assumed, not filled: windows then run over the last kPageTokens positions *before* a context, which
  /// is a multiple of kPageTokens.
  PassBench(PassExecutor& executor, int64_t vocabulary, Assume assume)
      : executor_(executor), vocabulary_(vocabulary), assume_(std::move(assume)) {}

  /// The context of the next windows; with `assume` only.
  void use_context(int64_t tokens);
  /// Windows of `rows` rows for about `seconds`, at least a few; their first row counts, the others do not.
  absl::Status measure_window(int rows, double seconds, WidthFigure* figure);
  /// Prompts of `tokens` tokens in passes of `chunk` rows for about `seconds`, at least one.
  absl::Status measure_prompt(int chunk, int tokens, double seconds, PromptFigure* figure);
  /// Single passes of `chunk` prompt rows that end at `context` (the first rows of an empty cache when the chunk is
  /// longer), for about `seconds`, at least one; with `assume` only.
  absl::Status measure_chunk(int chunk, int64_t context, double seconds, ChunkFigure* figure);
  /// Frees the slot.
  absl::Status release();

 private:
  absl::Status begin(int rows);
  absl::Status fill(int tokens, int chunk);
  absl::Status window(int rows, double* ms);
  absl::Status chunk_at(int64_t start, int rows, double* seconds);

  PassExecutor& executor_;
  int64_t vocabulary_;
  int64_t context_ = 0;
  Assume assume_;
  int64_t position_ = -1;  // of the slot; negative: not filled
  std::vector<double> times_;
};

}  // namespace tensorfold
