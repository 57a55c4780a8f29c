// The world of commands that run inside one process: it is there or the command has failed.
#pragma once

#include "coordinator/schedule/engine.h"

namespace tensorfold {

class StillLink : public ClusterLink {
 public:
  explicit StillLink(PassExecutor& executor) : executor_(executor) {}
  PassExecutor& executor() override { return executor_; }
  absl::Status try_regroup() override { return absl::UnavailableError("an in-process world does not regroup"); }

 private:
  PassExecutor& executor_;
};

}  // namespace tensorfold
