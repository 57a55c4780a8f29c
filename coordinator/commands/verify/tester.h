// The differential tester: one checkpoint, every combination of what must not matter, the same bits (contract, section
// 8).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/verify/cell_run.h"
#include "coordinator/commands/verify/cells.h"
#include "coordinator/commands/verify/schedules.h"
#include "kernels/ops/ops.h"
#include "worker/runtime/shards.h"

namespace tensorfold {

struct TesterOptions {
  std::string model_dir;
  DrafterChoice drafter;
  std::string backend = "cpu";
  std::string kv_format = "bf16";  // cuda
  std::string precision = "checkpoint";
  Axes axes;          // empty variants: all that backend and machine have
  bool full = false;  // the whole product; else a sample that covers every pair of axis values
  size_t sample = 0;  // at least so many cells
  uint32_t prompt_tokens = 70;
  uint32_t reply_tokens = 12;
  uint64_t seed = 1;
  /// Wraps the Ops of every rank of every cell but the reference; the negative control.
  std::function<std::unique_ptr<Ops>(std::unique_ptr<Ops>)> decorate;
  bool schedules = true;   // also run the scheduler under its schedules (schedules.h); not with `decorate`
  size_t stop_after = 10;  // differing cells that are explained; then the run ends
  std::function<void(size_t done, size_t total)> progress;
};

struct CellOutcome {
  Cell cell;
  std::string hash;
  bool same = false;
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  std::string difference;  // "token 3: 17 instead of 9; first at position 17, layer 2, attention.o_proj"
};

struct TesterReport {
  std::vector<CellOutcome> cells;
  std::vector<ScheduleOutcome> schedules;
  size_t different = 0;     // of both
  std::string greedy_hash;  // of the serial reference: one rank, one thread, nothing drafted, all at once
  std::string sampled_hash;
  double seconds = 0;
};

/// Errors are those of loading and of a cluster; differences are in the report.
absl::StatusOr<TesterReport> run_tester(const TesterOptions& options);

/// Cells by axis value with counts and hashes, differences in full.
void print_report(const TesterReport& report, bool every_cell, std::ostream& out);

/// Prompts that differ by `seed`; ids below `vocabulary`, those that are likely control tokens avoided.
CellInputs make_inputs(uint32_t vocabulary, uint32_t prompt_tokens, uint32_t reply_tokens, uint64_t seed);

}  // namespace tensorfold
