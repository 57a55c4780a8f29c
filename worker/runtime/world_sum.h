// The sum over slices for a world that comes and goes: what the pass runner holds.
#pragma once

#include <memory>

#include "transport/base/communicator.h"
#include "worker/model/slice_sum.h"

namespace tensorfold {

/// Thread-safety: used by the pass runner's thread.
class WorldSum : public SliceSum {
 public:
  /// Null for a world of one. After a regroup, the new communicator.
  virtual void use(Communicator* communicator) = 0;
  /// The deadline of the pass that runs now. The first pass of a communicator may set up device transports, together
  /// with all other ranks, which run the same pass.
  virtual absl::Status begin_pass(Deadline deadline) = 0;
  /// After Ops::finish_pass: what went wrong in exchanges that ran behind the host's back.
  virtual absl::Status finish_pass() { return absl::OkStatus(); }
  /// How nodes travel, for the log; empty for a world of one.
  virtual std::string describe() const { return {}; }
};

/// The one that fits the backend of `ops`, which outlives it.
std::unique_ptr<WorldSum> make_world_sum(Ops& ops);

}  // namespace tensorfold
