// The schedule axis of the differential tester: the scheduler itself, not a script of passes, runs one request alone,
// among fifteen others, with its lane taken from it in the middle, and in the background of others; its tokens and the
// log-probabilities of every one must be the same to the bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/verify/cell_run.h"
#include "kernels/ops/ops.h"
#include "worker/runtime/shards.h"

namespace tensorfold {

enum class CellSchedule : uint8_t {
  kAlone,
  kMixed,      // sixteen streams: other lengths, sampling, drafts and priorities
  kPreempted,  // its lane goes to others twice: while its prompt is read and in the middle of its reply
  kBackground  // behind the prompts of others that keep coming
};
std::string schedule_name(CellSchedule schedule);

struct ScheduleOptions {
  std::string model_dir;
  DrafterChoice drafter;
  std::string backend = "cpu";
  std::string kv_format = "bf16";  // cuda
  std::string precision = "checkpoint";
  std::string transport = "local";
  std::vector<int> worlds = {1, 2, 3};
};

struct ScheduleOutcome {
  CellSchedule schedule = CellSchedule::kAlone;
  int world = 1;
  bool draft = false;
  bool sampled = false;
  std::string hash;  // of the ids and all log-probabilities
  bool same = false;
  uint64_t preempted = 0;  // times that its lane was taken
  std::string name() const;
};

/// All combinations against the request alone on one rank without drafts. Errors are those of loading and of a cluster,
/// and a schedule that did not come about.
absl::StatusOr<std::vector<ScheduleOutcome>> run_schedules(const ScheduleOptions& options, const CellInputs& inputs);

}  // namespace tensorfold
