// A world whose ranks are threads of one process: for tests, for a single host and for world 1.
//
// Short messages are copied into the receiver's inbox; long ones are copied once, by the receiver, from the sender's
// buffer, so a long send ends when the receiver has taken it. When one rank fails or is aborted, every other rank's
// wait ends with Unavailable and that rank's error; a rank that is merely destroyed ends only waits for itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/communicator.h"

namespace tensorfold {

class LocalWorld {
 public:
  // One communicator a rank; they share state and may be destroyed in any order. `labels` names the ranks in messages;
  // empty: "thread 0" …
  static absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> create(int world, uint32_t epoch = 1,
                                                                           std::vector<std::string> labels = {});
};

}  // namespace tensorfold
