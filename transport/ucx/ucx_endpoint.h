// Ranks in different processes, on one host or several, over UCX (https://openucx.org): shared memory, TCP, or RDMA
// where the hardware is; which of them is UCX's choice within `UcxOptions`.
//
// An endpoint is made first and its address() given to all ranks by the caller (the control plane); with everybody's
// addresses it then becomes a Communicator. A new membership epoch needs a new endpoint.
//
// Peers that die are noticed at once where the connection breaks (TCP, RDMA), within about a second on shared memory;
// whatever is not noticed runs into the deadline of the wait.
//
// Thread-safety: none; the Communicator has its own rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/communicator.h"

namespace tensorfold {

class UcxWorker;

struct UcxOptions {
  // UCX's transports, comma-separated ("posix,cma,self", "tcp", "rc,self"); empty: all that UCX finds.
  std::string tls;
  // Network devices, comma-separated ("mlx5_0:1,mlx5_1:1", "eth0"); empty: all.
  std::string net_devices;
  // Notice peers that die; off: only deadlines tell.
  bool detect_peer_failure = true;
  // Further UCX settings by their name without "UCX_", applied in this order.
  std::vector<std::pair<std::string, std::string>> settings;
};

struct UcxMembers {
  int rank = 0;
  int world = 1;
  uint32_t epoch = 0;
  std::vector<std::vector<std::byte>> addresses;  // one a rank; the own one is ignored
  std::vector<std::string> labels;                // one a rank: what a person calls its host
};

class UcxEndpoint {
 public:
  // InvalidArgument: an option UCX does not know. Unavailable: no transport fits the options.
  static absl::StatusOr<std::unique_ptr<UcxEndpoint>> create(const UcxOptions& options);
  ~UcxEndpoint();
  UcxEndpoint(const UcxEndpoint&) = delete;
  UcxEndpoint& operator=(const UcxEndpoint&) = delete;

  // What the other ranks need to reach this one: some hundreds of bytes, with a checksum and the UCX release.
  const std::vector<std::byte>& address() const { return address_; }

  // Called on all ranks at the same time; returns when every link has carried a message both ways. Spends this
  // endpoint, also on error. Addresses are checked (checksum, UCX release) before UCX sees them.
  absl::StatusOr<std::unique_ptr<Communicator>> connect(const UcxMembers& members, Deadline deadline);

 private:
  explicit UcxEndpoint(std::unique_ptr<UcxWorker> worker);

  std::unique_ptr<UcxWorker> worker_;
  std::vector<std::byte> address_;
};

}  // namespace tensorfold
