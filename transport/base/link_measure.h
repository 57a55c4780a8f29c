// Measuring every link of a world at connect, so that a slow or wrong path is seen before the weights are loaded.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/communicator.h"

namespace tensorfold {

struct PeerLink {
  int peer = 0;
  LinkMeasure measure;
};

// Called by all ranks together. Pairs are measured one after the other, so that no link shares its host's bandwidth
// with another measurement. Returns this rank's links in the order of peers.
absl::StatusOr<std::vector<PeerLink>> measure_links(Communicator& communicator, Deadline deadline);

// "rank 1 (spark-b): 3.1 us, 64 KiB in 9.0 us, 1 MiB at 21.4 GB/s"
std::string format_link(const Communicator& communicator, const PeerLink& link);

}  // namespace tensorfold
