#include "transport/base/link_measure.h"

#include <fmt/format.h>

namespace tensorfold {

absl::StatusOr<std::vector<PeerLink>> measure_links(Communicator& communicator, Deadline deadline) {
  std::vector<PeerLink> links;
  const int rank = communicator.rank();
  for (int low = 0; low < communicator.world(); ++low) {
    for (int high = low + 1; high < communicator.world(); ++high) {
      if (rank == low || rank == high) {
        const int peer = rank == low ? high : low;
        absl::StatusOr<LinkMeasure> measure = communicator.measure(peer, deadline);
        if (!measure.ok()) return measure.status();
        links.push_back({peer, *measure});
      }
      absl::Status status = communicator.barrier(deadline);
      if (!status.ok()) return status;
    }
  }
  return links;
}

std::string format_link(const Communicator& communicator, const PeerLink& link) {
  return fmt::format("rank {} ({}): {:.1f} us, 64 KiB in {:.1f} us, 1 MiB at {:.1f} GB/s", link.peer,
                     communicator.label(link.peer), link.measure.latency_us, link.measure.latency_64k_us,
                     link.measure.bandwidth_gb_s);
}

}  // namespace tensorfold
