#include "transport/ucx/ucx_endpoint.h"

#include <fmt/format.h>

#include <array>
#include <span>

#include "transport/base/collective_checks.h"
#include "transport/base/message_communicator.h"
#include "transport/ucx/ucx_address.h"
#include "transport/ucx/ucx_engine.h"
#include "transport/ucx/ucx_worker.h"

namespace tensorfold {

UcxEndpoint::UcxEndpoint(std::unique_ptr<UcxWorker> worker) : worker_(std::move(worker)) {}
UcxEndpoint::~UcxEndpoint() = default;

absl::StatusOr<std::unique_ptr<UcxEndpoint>> UcxEndpoint::create(const UcxOptions& options) {
  absl::StatusOr<std::unique_ptr<UcxWorker>> worker = UcxWorker::create(options);
  if (!worker.ok()) return worker.status();
  absl::StatusOr<std::vector<std::byte>> address = (*worker)->address();
  if (!address.ok()) return address.status();
  std::unique_ptr<UcxEndpoint> endpoint(new UcxEndpoint(*std::move(worker)));
  endpoint->address_ = wrap_ucx_address(*address);
  return endpoint;
}

absl::StatusOr<std::unique_ptr<Communicator>> UcxEndpoint::connect(const UcxMembers& members, Deadline deadline) {
  if (worker_ == nullptr) {
    return absl::FailedPreconditionError("connect: this endpoint was used before; a new epoch needs a new one");
  }
  std::unique_ptr<UcxWorker> worker = std::move(worker_);
  absl::Status status = check_membership(members.rank, members.world, members.labels);
  if (!status.ok()) return status;
  if (members.addresses.size() != static_cast<size_t>(members.world)) {
    return absl::InvalidArgumentError(
        fmt::format("connect: {} addresses for a world of {}", members.addresses.size(), members.world));
  }
  std::array<std::span<const std::byte>, kMaxWorld> addresses;
  for (int rank = 0; rank < members.world; ++rank) {
    if (rank == members.rank) continue;
    absl::StatusOr<std::span<const std::byte>> bytes =
        unwrap_ucx_address(members.addresses[rank], fmt::format("rank {} ({})", rank, members.labels[rank]));
    if (!bytes.ok()) return bytes.status();
    addresses[rank] = *bytes;
  }
  const WorldMembership membership{members.rank, members.world, members.epoch, members.labels};
  auto engine = std::make_unique<UcxEngine>(std::move(worker), membership);
  status = engine->open(addresses);
  if (!status.ok()) return status;
  auto communicator = std::make_unique<MessageCommunicator>("ucx", membership, std::move(engine));
  status = communicator->connect(deadline);
  if (!status.ok()) return status;
  return communicator;
}

}  // namespace tensorfold
