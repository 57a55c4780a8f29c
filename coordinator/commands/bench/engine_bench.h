// Times replies through the scheduler that serves.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/report.h"
#include "coordinator/draft/drafter.h"
#include "transport/pass/executor.h"
#include "worker/model/model.h"

namespace tensorfold {

struct EngineBenchOptions {
  std::vector<uint32_t> prompt;
  std::vector<uint32_t> end_ids;
  uint32_t tokens = 128;      // of a reply at most
  int64_t pages = 0;          // of every rank
  uint32_t block_drafts = 0;  // most of the block drafter; 0: there is none
  int width = 8;
  double seconds = 1;  // about, for all repeats of one drafter; at least two
};

/// Greedy replies with one drafter; the fastest counts. Errors: the pass's, or two replies that differ.
absl::StatusOr<DecodeFigure> bench_decode(PassExecutor& executor, const ModelShape& shape, DraftKind draft,
                                          const EngineBenchOptions& options);

/// `text` as the model's chat template and tokenizer make it a prompt; pseudo-random ids when the folder has no
/// tokenizer.
absl::StatusOr<std::vector<uint32_t>> bench_prompt(const std::string& model, const std::string& text,
                                                   int64_t vocabulary);

}  // namespace tensorfold
