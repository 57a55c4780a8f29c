#include "coordinator/commands/serve/member_process.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <mutex>

#include "worker/member/member.h"
#include "worker/runtime/rank_loop.h"

namespace tensorfold {
namespace {

// The communicator of the current epoch, so that callbacks from the control plane can end its waits.
class CurrentTransport {
 public:
  void set(Communicator* communicator) {
    const std::lock_guard lock(mutex_);
    communicator_ = communicator;
  }
  void abort(const absl::Status& why) {
    const std::lock_guard lock(mutex_);
    if (communicator_ != nullptr) communicator_->abort(why);
  }

 private:
  std::mutex mutex_;
  Communicator* communicator_ = nullptr;
};

class MemberProcess {
 public:
  MemberProcess(RankSetup& setup, const std::atomic<bool>& stop) : setup_(setup), stop_(stop) {}

  absl::Status run() {
    absl::StatusOr<std::unique_ptr<UcxEndpoint>> endpoint = UcxEndpoint::create(setup_.ucx_options());
    if (!endpoint.ok()) return endpoint.status();
    endpoint_ = *std::move(endpoint);
    if (absl::Status status = create_member(); !status.ok()) return status;
    absl::StatusOr<Roster> roster = join();
    while (roster.ok() && !ended()) {
      const absl::Status epoch = serve_epoch(*roster);
      if (ended()) break;
      if (epoch.ok()) break;
      spdlog::warn("epoch {} is over for rank {}: {}", roster->epoch, setup_.rank, std::string(epoch.message()));
      roster = next_roster(roster->epoch, epoch);
    }
    member_->leave(stop_ ? "stopped by a signal" : "end of service");
    if (!roster.ok() && !ended()) return roster.status();
    return absl::OkStatus();
  }

 private:
  bool ended() const { return stop_ || shutdown_; }
  Deadline join_deadline() const { return Deadline::after(setup_.profile.cluster.join_timeout); }

  absl::Status create_member() {
    MemberOptions options;
    options.coordinator = host_port_text(setup_.profile.cluster.coordinator);
    options.identity = setup_.identity;
    options.identity.address = endpoint_->address();
    options.token = setup_.token;
    options.timings = setup_.timings();
    options.on_notice = [](const std::string& line) { spdlog::info("{}", line); };
    options.on_shutdown = [this](const std::string& reason, bool) {
      spdlog::info("rank 0 ends the service: {}", reason);
      shutdown_ = true;
      transport_.abort(absl::CancelledError("rank 0 ends the service"));
    };
    options.on_epoch_over = [this](uint32_t, const std::string& cause) {
      transport_.abort(absl::UnavailableError(cause));
    };
    options.on_coordinator_lost = [this](const std::string& cause) {
      transport_.abort(absl::UnavailableError(fmt::format("rank 0 is lost: {}", cause)));
    };
    absl::StatusOr<std::unique_ptr<Member>> member = Member::create(std::move(options));
    if (!member.ok()) return member.status();
    member_ = *std::move(member);
    return absl::OkStatus();
  }

  // Waits in slices, so that a signal ends the wait.
  template <typename Wait>
  absl::StatusOr<Roster> in_slices(Wait wait) {
    const Deadline deadline = join_deadline();
    while (true) {
      absl::StatusOr<Roster> roster =
          wait(Deadline::at(std::min(deadline.time(), Deadline::Clock::now() + std::chrono::seconds(2))));
      if (roster.ok() || !absl::IsDeadlineExceeded(roster.status()) || deadline.passed() || ended()) return roster;
    }
  }

  absl::StatusOr<Roster> join() {
    return in_slices([this](Deadline slice) { return member_->join(slice); });
  }

  absl::Status renew_endpoint() {
    absl::StatusOr<std::unique_ptr<UcxEndpoint>> endpoint = UcxEndpoint::create(setup_.ucx_options());
    if (!endpoint.ok()) return endpoint.status();
    endpoint_ = *std::move(endpoint);
    member_->renew_address(endpoint_->address());
    return absl::OkStatus();
  }

  absl::StatusOr<Roster> next_roster(uint32_t epoch, const absl::Status& cause) {
    member_->fail_epoch(epoch, std::string(cause.message()));
    while (true) {
      if (absl::Status status = renew_endpoint(); !status.ok()) return status;
      absl::StatusOr<Roster> roster = in_slices([&](Deadline slice) { return member_->wait_regroup(epoch, slice); });
      if (roster.ok() || ended()) return roster;
      if (absl::IsUnavailable(roster.status())) {
        spdlog::warn("{}; joining again", std::string(roster.status().message()));
        return join();
      }
      // The next epoch came and went while this rank prepared for it.
      if (!absl::IsAborted(roster.status())) return roster;
    }
  }

  absl::Status serve_epoch(const Roster& roster) {
    member_->report_progress({.phase = "connecting", .done = 0, .total = 0});
    absl::StatusOr<std::unique_ptr<Communicator>> communicator =
        connect_rank(setup_, std::move(endpoint_), roster, connect_deadline(setup_));
    if (!communicator.ok()) return communicator.status();
    struct Unset {
      CurrentTransport& transport;
      ~Unset() { transport.set(nullptr); }
    };
    transport_.set(communicator->get());
    const Unset unset{transport_};
    if (setup_.runner == nullptr) {
      member_->report_progress({.phase = "loading", .done = 0, .total = 0});
      if (absl::Status status = load_rank(setup_); !status.ok()) return status;
    }
    setup_.runner->use(communicator->get());
    setup_.runner->reset();
    member_->ready(roster.epoch);
    if (absl::Status status = member_->wait_go(roster.epoch, join_deadline()); !status.ok()) return status;
    member_->report_progress({.phase = "serving", .done = 0, .total = 0});
    spdlog::info("rank {} serves in epoch {}", setup_.rank, roster.epoch);
    RankLoopHooks hooks;
    hooks.should_stop = [this] { return ended(); };
    hooks.on_step = [this](uint64_t sequence) { member_->set_last_step(sequence); };
    return run_rank(*setup_.runner, **communicator, hooks);
  }

  RankSetup& setup_;
  const std::atomic<bool>& stop_;
  std::atomic<bool> shutdown_{false};
  CurrentTransport transport_;
  std::unique_ptr<UcxEndpoint> endpoint_;
  std::unique_ptr<Member> member_;
};

}  // namespace

absl::Status run_member_process(RankSetup& setup, const std::atomic<bool>& stop) {
  return MemberProcess(setup, stop).run();
}

}  // namespace tensorfold
