#include "coordinator/cluster/membership.h"

#include <fmt/format.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <utility>

#include "coordinator/cluster/join_service.h"
#include "coordinator/cluster/roll.h"

namespace tensorfold {
namespace {

constexpr int kMaxMemberMessage = 64 << 10;  // bytes; as cluster.proto says
constexpr int kMaxCoordinatorMessage = 1 << 20;

struct HostPort {
  std::string host;
  std::string port;
};

/// "host:port" or "[v6]:port".
absl::StatusOr<HostPort> split_address(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostPort parts;
  if (colon != std::string::npos) {
    parts.host = address.substr(0, colon);
    parts.port = address.substr(colon + 1);
  }
  const bool bracketed = parts.host.size() > 2 && parts.host.front() == '[' && parts.host.back() == ']';
  const bool port_ok = !parts.port.empty() && parts.port.size() <= 5 &&
                       parts.port.find_first_not_of("0123456789") == std::string::npos &&
                       std::stoi(parts.port) <= 65535;
  if (parts.host.empty() || !port_ok || (!bracketed && parts.host.find(':') != std::string::npos)) {
    return absl::InvalidArgumentError(
        fmt::format("the cluster's address '{}' is not host:port (or [v6-address]:port) with a port of 0 to 65535",
                    printable(address, 200)));
  }
  return parts;
}

bool is_loopback(const std::string& host) {
  const bool dotted = host.find_first_not_of("0123456789.") == std::string::npos;
  return host == "localhost" || host == "[::1]" || (dotted && host.rfind("127.", 0) == 0);
}

absl::Status validate(const MembershipOptions& options) {
  if (absl::Status status = validate_identity(options.identity); !status.ok()) return status;
  if (options.identity.rank != 0) {
    return absl::InvalidArgumentError(
        fmt::format("rank {} cannot be the coordinator: rank 0 is", options.identity.rank));
  }
  return options.timings.validate();
}

}  // namespace

class Membership::Impl {
 public:
  explicit Impl(const MembershipOptions& options)
      : roll(options.identity, options.timings, callbacks(options)),
        service(options.identity, options.token, options.timings, roll) {}
  ~Impl() { shutdown("the coordinator ended", false, std::chrono::seconds(1)); }

  static Roll::Callbacks callbacks(const MembershipOptions& options) {
    auto on_notice = options.on_notice;
    if (!on_notice) on_notice = [](const std::string& text) { spdlog::info("{}", text); };
    return {std::move(on_notice), options.on_lost, options.on_epoch_over};
  }

  absl::Status listen(const std::string& where, const HostPort& parts, uint32_t world) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(where, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    builder.SetMaxReceiveMessageSize(kMaxMemberMessage);
    builder.SetMaxSendMessageSize(kMaxCoordinatorMessage);
    builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
    // A second coordinator on the same port has to fail, not to share the members.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    grpc::ResourceQuota quota("cluster");
    quota.SetMaxThreads(static_cast<int>(2 * world) + 24);
    builder.SetResourceQuota(quota);
    server = builder.BuildAndStart();
    if (server == nullptr || port == 0) {
      return absl::UnavailableError(fmt::format(
          "rank 0 cannot listen at {}: the port is taken by another process, or the address is none of this host's",
          where));
    }
    address = fmt::format("{}:{}", parts.host, port);
    return absl::OkStatus();
  }

  void shutdown(const std::string& reason, bool drain, std::chrono::milliseconds grace) {
    const std::lock_guard lock(shutdown_mutex);
    if (std::exchange(is_shut_down, true)) return;
    roll.close(reason, drain, grace);
    if (server != nullptr) server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  }

  std::string address;
  Roll roll;
  JoinService service;
  std::unique_ptr<grpc::Server> server;  // after what its threads use
  std::mutex shutdown_mutex;
  bool is_shut_down = false;
};

Membership::Membership(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Membership::~Membership() = default;

absl::StatusOr<std::unique_ptr<Membership>> Membership::start(const MembershipOptions& options) {
  if (absl::Status status = validate(options); !status.ok()) return status;
  const std::string where = options.listen;
  const uint32_t world = options.identity.world;
  HostPort parts;
  if (world > 1) {
    absl::StatusOr<HostPort> split = split_address(where);
    if (!split.ok()) return split.status();
    parts = *split;
    if (options.token.empty() && !is_loopback(parts.host)) {
      return absl::InvalidArgumentError(fmt::format(
          "the cluster's address {} can be reached from other hosts and no shared token is configured: anybody could "
          "join. Configure a token, or listen on 127.0.0.1",
          where));
    }
  }
  auto impl = std::make_unique<Impl>(options);
  if (world > 1) {
    if (absl::Status status = impl->listen(where, parts, world); !status.ok()) return status;
  }
  return std::unique_ptr<Membership>(new Membership(std::move(impl)));
}

const std::string& Membership::address() const { return impl_->address; }
absl::StatusOr<Roster> Membership::wait_for_all(Deadline deadline) { return impl_->roll.wait_for_all(deadline); }
absl::Status Membership::wait_ready(Deadline deadline) { return impl_->roll.wait_ready(deadline); }
void Membership::set_address(std::vector<std::byte> address) { impl_->roll.set_address(std::move(address)); }
void Membership::end_epoch(const std::string& cause) { impl_->roll.end_epoch(cause); }
void Membership::set_last_step(uint64_t sequence) { impl_->roll.set_last_step(sequence); }
void Membership::set_progress(LoadProgress progress) { impl_->roll.set_progress(std::move(progress)); }
std::vector<RankStatus> Membership::rank_status() const { return impl_->roll.rank_status(); }
uint32_t Membership::epoch() const { return impl_->roll.epoch(); }
void Membership::shutdown(const std::string& reason, bool drain, std::chrono::milliseconds grace) {
  impl_->shutdown(reason, drain, grace);
}

}  // namespace tensorfold
