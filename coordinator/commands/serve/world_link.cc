#include "coordinator/commands/serve/world_link.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <thread>

namespace tensorfold {
namespace {

constexpr std::chrono::milliseconds kSlice{100};
constexpr std::chrono::milliseconds kBackOff{500};

struct LastNotice {
  std::mutex mutex;
  std::string line;
  std::chrono::steady_clock::time_point at;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WorldLink>> WorldLink::start(RankSetup& setup) {
  std::unique_ptr<WorldLink> link(new WorldLink(setup));
  MembershipOptions options;
  Profile::HostPort listen = setup.profile.cluster.coordinator;
  if (!setup.profile.cluster.bind.empty()) listen.host = setup.profile.cluster.bind;
  options.listen = host_port_text(listen);
  options.identity = setup.identity;
  options.token = setup.token;
  options.timings = setup.timings();
  // While the world is down the wait is begun anew every tenth of a second: the same line is worth saying once a
  // second.
  options.on_notice = [last = std::make_shared<LastNotice>()](const std::string& line) {
    const std::lock_guard lock(last->mutex);
    const auto now = std::chrono::steady_clock::now();
    if (line == last->line && now - last->at < std::chrono::seconds(1)) return;
    last->line = line;
    last->at = now;
    spdlog::info("{}", line);
  };
  options.on_lost = [](const LostRank& lost) { spdlog::error("{}", lost.text()); };
  options.on_epoch_over = [raw = link.get()](uint32_t, const std::string& cause) { raw->epoch_over(cause); };
  absl::StatusOr<std::unique_ptr<Membership>> membership = Membership::start(options);
  if (!membership.ok()) return membership.status();
  link->membership_ = *std::move(membership);
  return link;
}

WorldLink::~WorldLink() {
  // Its callbacks use this object, so it ends first.
  membership_.reset();
}

void WorldLink::epoch_over(const std::string& cause) {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return;
  broken_ = absl::UnavailableError(cause);
  communicator_->abort(broken_);
}

// A new transport endpoint for the next epoch.
absl::Status WorldLink::renew() {
  executor_.reset();
  {
    const std::lock_guard lock(mutex_);
    communicator_.reset();
    broken_ = absl::OkStatus();
  }
  if (setup_.profile.cluster.world == 1) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<UcxEndpoint>> endpoint = UcxEndpoint::create(setup_.ucx_options());
  if (!endpoint.ok()) return endpoint.status();
  endpoint_ = *std::move(endpoint);
  membership_->set_address(endpoint_->address());
  return absl::OkStatus();
}

absl::Status WorldLink::gather_ranks(Deadline deadline) {
  const absl::StatusOr<Roster> roster = membership_->wait_for_all(deadline);
  if (!roster.ok()) return roster.status();
  membership_->set_progress({.phase = "connecting", .done = 0, .total = 0});
  std::unique_ptr<Communicator> connected;
  if (roster->world > 1) {
    absl::StatusOr<std::unique_ptr<Communicator>> communicator =
        connect_rank(setup_, std::move(endpoint_), *roster, connect_deadline(setup_));
    if (!communicator.ok()) {
      spdlog::error("epoch {}: {}", roster->epoch, std::string(communicator.status().message()));
      not_before_ = Deadline::Clock::now() + kBackOff;
      membership_->end_epoch(std::string(communicator.status().message()));
      stage_ = Stage::kRenew;
      return communicator.status();
    }
    connected = *std::move(communicator);
  }
  if (setup_.runner == nullptr) {
    membership_->set_progress({.phase = "loading", .done = 0, .total = 0});
    if (absl::Status status = load_rank(setup_); !status.ok()) return status;
  }
  setup_.runner->use(connected.get());
  setup_.runner->reset();
  executor_ = std::make_unique<WorldExecutor>(*setup_.runner, connected.get());
  const std::lock_guard lock(mutex_);
  communicator_ = std::move(connected);
  return absl::OkStatus();
}

absl::Status WorldLink::advance(Deadline deadline) {
  if (stage_ == Stage::kRenew) {
    // An epoch that failed at once would fail again at once.
    if (const auto now = Deadline::Clock::now(); now < not_before_) {
      std::this_thread::sleep_until(std::min(not_before_, deadline.time()));
      if (Deadline::Clock::now() < not_before_) return absl::UnavailableError("waiting before the next epoch");
    }
    if (absl::Status status = renew(); !status.ok()) return status;
    stage_ = Stage::kWaitAll;
  }
  if (stage_ == Stage::kWaitAll) {
    if (absl::Status status = gather_ranks(deadline); !status.ok()) return status;
    stage_ = Stage::kWaitReady;
  }
  if (stage_ == Stage::kWaitReady) {
    const absl::Status status = membership_->wait_ready(deadline);
    if (absl::IsUnavailable(status)) {  // lost again meanwhile
      stage_ = Stage::kRenew;
      not_before_ = Deadline::Clock::now() + kBackOff;
    }
    if (!status.ok()) return status;
    membership_->set_progress({.phase = "serving", .done = 0, .total = 0});
    stage_ = Stage::kUp;
  }
  return absl::OkStatus();
}

absl::Status WorldLink::form(const std::atomic<bool>& stop) {
  const Deadline deadline = Deadline::after(setup_.profile.cluster.join_timeout);
  while (true) {
    const absl::Status status =
        advance(Deadline::at(std::min(deadline.time(), Deadline::Clock::now() + std::chrono::seconds(1))));
    if (status.ok() || stop) return status;
    if (!absl::IsDeadlineExceeded(status) && !absl::IsUnavailable(status)) return status;
    if (deadline.passed()) {
      const double seconds = std::chrono::duration<double>(setup_.profile.cluster.join_timeout).count();
      return absl::DeadlineExceededError(fmt::format("no cluster within cluster.join_timeout of {:.0f} s: {}", seconds,
                                                     std::string(status.message())));
    }
  }
}

absl::Status WorldLink::health() {
  const std::lock_guard lock(mutex_);
  return broken_;
}

Readiness WorldLink::readiness() const {
  Readiness out;
  out.epoch = membership_->epoch();
  out.ranks = membership_->rank_status();
  // Ranks that are away come first; others wait for them and are not the reason.
  const auto away = [](const RankStatus& rank) {
    return rank.state == RankState::kMissing || rank.state == RankState::kLost;
  };
  const bool any_away = std::any_of(out.ranks.begin(), out.ranks.end(), away);
  for (const RankStatus& rank : out.ranks) {
    if (rank.state == RankState::kServing || (any_away && !away(rank))) continue;
    out.reason += fmt::format("{} {} ({}{})", out.ready ? "waiting for" : ",",
                              setup_.profile.cluster.rank_name(static_cast<int>(rank.rank)),
                              rank_state_name(rank.state), rank.cause.empty() ? "" : ": " + rank.cause);
    out.ready = false;
  }
  if (out.ready && stage_ != Stage::kUp) {
    out.ready = false;
    out.reason = "the ranks are forming a new epoch";
  }
  return out;
}

absl::Status WorldLink::try_regroup() {
  if (stage_ == Stage::kUp) {
    membership_->end_epoch("a pass failed on rank 0");
    stage_ = Stage::kRenew;
  }
  return advance(Deadline::after(kSlice));
}

absl::StatusOr<PassResult> WorldLink::RecordingExecutor::execute(PassPlan plan) {
  absl::StatusOr<PassResult> result = link_.executor_->execute(std::move(plan));
  if (result.ok()) {
    link_.membership_->set_last_step(result->reports[0].sequence);
    return result;
  }
  // What the control plane knows (rank, host, cause) says more than a broken wait.
  const absl::Status known = link_.health();
  return known.ok() ? result.status() : known;
}

void WorldLink::shutdown(const std::string& reason) {
  membership_->shutdown(reason, /*drain=*/true, std::chrono::seconds(2));
}

}  // namespace tensorfold
