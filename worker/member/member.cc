#include "worker/member/member.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "transport/join/token.h"
#include "worker/member/coordinator_stream.h"
#include "worker/member/wire.h"

namespace tensorfold {
namespace {

using Clock = Deadline::Clock;
using std::chrono::milliseconds;

constexpr milliseconds kConnectSlice{100};  // how soon leave() is noticed while connecting
constexpr milliseconds kRetryPause{100};    // between two streams
constexpr milliseconds kLeaveWait{500};     // for the coordinator to read Leave

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

class Member::Impl {
 public:
  explicit Impl(MemberOptions options) : options_(std::move(options)), identity_(options_.identity) {
    if (!options_.on_notice) options_.on_notice = [](const std::string& text) { spdlog::info("{}", text); };
    watchdog_ = std::thread([this] { watch(); });
  }
  ~Impl();

  absl::StatusOr<Roster> join(Deadline deadline);
  absl::Status wait_go(uint32_t epoch, Deadline deadline);
  absl::StatusOr<Roster> wait_regroup(uint32_t after, Deadline deadline);
  void leave(const std::string& reason);
  void report_progress(LoadProgress progress);
  void set_last_step(uint64_t sequence);
  void renew_address(std::vector<std::byte> address);

  /// Posts `message` if `epoch` is the current one.
  void post_for_epoch(uint32_t epoch, v1::MemberMessage message);

 private:
  /// What is known of one stream; starts anew with each.
  struct Session {
    Clock::time_point opened;
    Clock::time_point heard;
    std::string coordinator_nonce;
    std::string own_nonce;
    RankIdentity said;  // the identity that Hello carried
    bool accepted = false;
    bool ended = false;
    std::string ended_why;
    absl::Status refused;  // not OK: trying again will not help
    std::string waiting;   // whom the cluster waits for
    std::optional<Roster> roster;
    bool epoch_over = false;  // of roster
    std::string epoch_cause;
    uint32_t go_epoch = 0;
    bool shutting_down = false;
    std::string shutdown_reason;
  };

  // Notices: a line at most once a notice interval, while a wait goes on.
  class Notices {
   public:
    explicit Notices(const Impl& impl) : impl_(impl) {}
    Clock::time_point next() const { return next_; }
    void say(const std::string& whom) {
      next_ = Clock::now() + impl_.options_.timings.notice_interval;
      impl_.options_.on_notice(fmt::format("rank {} waits for {}", impl_.options_.identity.rank, whom));
    }
    double waited() const { return seconds(Clock::now() - begun_); }

   private:
    const Impl& impl_;
    const Clock::time_point begun_ = Clock::now();
    Clock::time_point next_ = begun_;
  };

  absl::StatusOr<std::shared_ptr<grpc::Channel>> connect(Deadline deadline, Notices& notices);
  absl::Status open(const std::shared_ptr<grpc::Channel>& channel);
  void close_stream();
  absl::StatusOr<Roster> first_roster(Deadline deadline, Notices& notices);
  absl::Status timed_out(const Notices& notices, const std::string& whom) const;

  /// Waits until `done` returns a value, saying whom it waits for. mutex_ held by `lock`.
  template <typename Done>
  auto wait(std::unique_lock<std::mutex>& lock, Deadline deadline, Notices& notices, Done done)
      -> std::decay_t<decltype(*done())>;

  // mutex_ held.
  std::optional<absl::Status> over() const;
  std::string whom() const;
  std::string coordinator() const { return fmt::format("the coordinator at {}", printable(options_.coordinator, 200)); }

  // Reader thread.
  void on_message(CoordinatorStream& stream, const v1::CoordinatorMessage& message);
  bool handle(CoordinatorStream& stream, const v1::CoordinatorMessage& message);  // mutex_ held
  bool answer(CoordinatorStream& stream, const v1::Challenge& challenge);         // mutex_ held
  void check_accepted(const v1::Accepted& accepted);                              // mutex_ held
  bool take_roster(const v1::Roster& wire, bool regroup);                         // mutex_ held
  void on_end();
  void end_session(const std::string& why);  // mutex_ held

  std::optional<v1::MemberMessage> heartbeat();
  void watch();
  Clock::time_point check_silence(Clock::time_point now);  // mutex_ held

  MemberOptions options_;

  std::mutex mutex_;
  std::condition_variable changed_;
  RankIdentity identity_;                      // by mutex_: the address changes
  Session session_;                            // by mutex_
  std::shared_ptr<CoordinatorStream> stream_;  // by mutex_
  std::deque<std::function<void()>> events_;   // by mutex_; callbacks to make, in order
  LoadProgress progress_;                      // by mutex_
  uint32_t last_epoch_ = 0;                    // by mutex_; of all sessions
  bool left_ = false;                          // by mutex_
  bool stop_watching_ = false;                 // by mutex_

  std::atomic<uint64_t> last_step_{0};
  std::atomic<Clock::rep> last_step_at_{0};  // ticks of Clock

  std::thread watchdog_;
};

Member::Impl::~Impl() {
  leave("the process ended its membership");
  {
    const std::lock_guard lock(mutex_);
    stop_watching_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
  close_stream();
}

// ---- waits ----

template <typename Done>
auto Member::Impl::wait(std::unique_lock<std::mutex>& lock, Deadline deadline, Notices& notices, Done done)
    -> std::decay_t<decltype(*done())> {
  while (true) {
    if (left_) return absl::CancelledError("this rank leaves the cluster");
    if (auto result = done()) return *std::move(result);
    const Clock::time_point now = Clock::now();
    const std::string others = whom();
    if (deadline.passed(now)) return timed_out(notices, others);
    if (now >= notices.next()) {
      lock.unlock();
      notices.say(others);
      lock.lock();
      continue;
    }
    changed_.wait_until(lock, std::min(deadline.time(), notices.next()));
  }
}

absl::Status Member::Impl::timed_out(const Notices& notices, const std::string& whom) const {
  return absl::DeadlineExceededError(
      fmt::format("rank {} waited {:.1f} s for {}", options_.identity.rank, notices.waited(), whom));
}

std::string Member::Impl::whom() const {
  if (!session_.accepted || session_.waiting.empty()) return coordinator();
  return fmt::format("{}: {}", coordinator(), session_.waiting);
}

std::optional<absl::Status> Member::Impl::over() const {
  if (session_.shutting_down) {
    return absl::CancelledError(fmt::format("{} is shutting down: {}", coordinator(), session_.shutdown_reason));
  }
  if (session_.ended) {
    return absl::UnavailableError(fmt::format("{} is lost: {}", coordinator(), session_.ended_why));
  }
  return std::nullopt;
}

absl::StatusOr<Roster> Member::Impl::join(Deadline deadline) {
  Notices notices(*this);
  while (true) {
    close_stream();
    const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = connect(deadline, notices);
    if (!channel.ok()) return channel.status();
    if (absl::Status status = open(*channel); !status.ok()) return status;
    absl::StatusOr<Roster> roster = first_roster(deadline, notices);
    if (roster.ok()) return roster;
    if (!absl::IsUnavailable(roster.status())) {
      close_stream();
      return roster;
    }
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, Deadline::after(kRetryPause).time(), [this] { return left_; });
  }
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Member::Impl::connect(Deadline deadline, Notices& notices) {
  std::shared_ptr<grpc::Channel> channel = make_coordinator_channel(options_.coordinator);
  while (true) {
    if (channel->WaitForConnected(std::chrono::system_clock::now() + kConnectSlice)) return channel;
    // A channel that was refused tries again at a pace of its own; a new one tries at once.
    if (channel->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      channel = make_coordinator_channel(options_.coordinator);
    }
    {
      const std::lock_guard lock(mutex_);
      if (left_) return absl::CancelledError("this rank leaves the cluster");
    }
    if (deadline.passed()) return timed_out(notices, coordinator() + " (it does not answer)");
    if (Clock::now() >= notices.next()) notices.say(coordinator());
  }
}

absl::Status Member::Impl::open(const std::shared_ptr<grpc::Channel>& channel) {
  const absl::StatusOr<std::string> nonce = make_nonce();
  if (!nonce.ok()) return nonce.status();
  const std::lock_guard lock(mutex_);
  if (left_) return absl::CancelledError("this rank leaves the cluster");
  session_ = Session{};
  session_.opened = session_.heard = Clock::now();
  session_.own_nonce = *nonce;
  stream_ = std::make_shared<CoordinatorStream>(
      channel,
      CoordinatorStream::Handlers{
          [this](CoordinatorStream& stream, const v1::CoordinatorMessage& message) { on_message(stream, message); },
          [this] { on_end(); }, [this] { return heartbeat(); }},
      options_.timings.heartbeat_interval);
  return absl::OkStatus();
}

void Member::Impl::close_stream() {
  std::shared_ptr<CoordinatorStream> stream;
  {
    const std::lock_guard lock(mutex_);
    stream = std::exchange(stream_, nullptr);
  }
  if (stream != nullptr) stream->end();
}

absl::StatusOr<Roster> Member::Impl::first_roster(Deadline deadline, Notices& notices) {
  std::unique_lock lock(mutex_);
  return wait(lock, deadline, notices, [this]() -> std::optional<absl::StatusOr<Roster>> {
    if (!session_.refused.ok()) return session_.refused;
    if (session_.roster) return *session_.roster;
    if (const std::optional<absl::Status> status = over()) return *status;
    return std::nullopt;
  });
}

absl::Status Member::Impl::wait_go(uint32_t epoch, Deadline deadline) {
  Notices notices(*this);
  std::unique_lock lock(mutex_);
  return wait(lock, deadline, notices, [this, epoch]() -> std::optional<absl::Status> {
    if (std::optional<absl::Status> status = over()) return status;
    if (!session_.roster || session_.roster->epoch < epoch) {
      return absl::FailedPreconditionError(fmt::format("epoch {} has not begun here", epoch));
    }
    if (session_.roster->epoch > epoch) {
      return absl::AbortedError(fmt::format("epoch {} is over; epoch {} has begun", epoch, session_.roster->epoch));
    }
    if (session_.epoch_over) {
      return absl::UnavailableError(fmt::format("epoch {} is over: {}", epoch, session_.epoch_cause));
    }
    if (session_.go_epoch == epoch) return absl::OkStatus();
    return std::nullopt;
  });
}

absl::StatusOr<Roster> Member::Impl::wait_regroup(uint32_t after, Deadline deadline) {
  Notices notices(*this);
  std::unique_lock lock(mutex_);
  return wait(lock, deadline, notices, [this, after]() -> std::optional<absl::StatusOr<Roster>> {
    if (const std::optional<absl::Status> status = over()) return *status;
    if (!session_.roster || session_.roster->epoch <= after) return std::nullopt;
    if (session_.epoch_over) {
      return absl::AbortedError(
          fmt::format("epoch {} began and is over already: {}", session_.roster->epoch, session_.epoch_cause));
    }
    return *session_.roster;
  });
}

// ---- what comes in ----

void Member::Impl::on_message(CoordinatorStream& stream, const v1::CoordinatorMessage& message) {
  {
    const std::lock_guard lock(mutex_);
    session_.heard = Clock::now();
    if (!handle(stream, message)) {
      end_session("it sent a message that this rank cannot read or that is out of turn");
      stream.cancel();
    }
  }
  changed_.notify_all();
}

bool Member::Impl::handle(CoordinatorStream& stream, const v1::CoordinatorMessage& message) {
  using Wire = v1::CoordinatorMessage;
  switch (message.message_case()) {
    case Wire::kChallenge:
      return answer(stream, message.challenge());
    case Wire::kRefused:
      session_.refused = absl::FailedPreconditionError(fmt::format(
          "{} refused this rank: {}", coordinator(), printable(message.refused().reason(), 8 * kMaxReason)));
      return true;
    case Wire::kAccepted:
      check_accepted(message.accepted());
      return true;
    default:
      break;
  }
  if (!session_.accepted) return false;
  switch (message.message_case()) {
    case Wire::kHeartbeat:
      return true;
    case Wire::kWaiting:
      session_.waiting = printable(message.waiting().text(), kMaxReason);
      return true;
    case Wire::kWelcome:
      return take_roster(message.welcome().roster(), false);
    case Wire::kRegroup:
      return take_roster(message.regroup().roster(), true);
    case Wire::kGo:
      session_.go_epoch = message.go().epoch();
      session_.waiting.clear();
      return true;
    case Wire::kEpochOver: {
      if (!session_.roster || session_.epoch_over || session_.roster->epoch != message.epoch_over().epoch())
        return true;
      session_.epoch_over = true;
      session_.epoch_cause = printable(message.epoch_over().cause(), kMaxReason);
      if (options_.on_epoch_over) {
        events_.push_back([this, epoch = session_.roster->epoch, cause = session_.epoch_cause] {
          options_.on_epoch_over(epoch, cause);
        });
      }
      return true;
    }
    case Wire::kShutdown: {
      session_.shutting_down = true;
      session_.shutdown_reason = printable(message.shutdown().reason(), kMaxReason);
      if (options_.on_shutdown) {
        events_.push_back([this, reason = session_.shutdown_reason, drain = message.shutdown().drain()] {
          options_.on_shutdown(reason, drain);
        });
      }
      return true;
    }
    default:
      return false;
  }
}

bool Member::Impl::answer(CoordinatorStream& stream, const v1::Challenge& challenge) {
  if (!session_.coordinator_nonce.empty() || challenge.nonce().size() != kNonceBytes) return false;
  session_.coordinator_nonce = challenge.nonce();
  session_.said = identity_;
  v1::MemberMessage message;
  v1::Hello* hello = message.mutable_hello();
  identity_to_wire(identity_, hello->mutable_identity());
  hello->set_nonce(session_.own_nonce);
  hello->set_proof(
      token_proof(options_.token, Prover::kMember, session_.coordinator_nonce, session_.own_nonce, identity_));
  hello->set_last_epoch(last_epoch_);
  stream.post(std::move(message));
  return true;
}

void Member::Impl::check_accepted(const v1::Accepted& accepted) {
  const std::string expected =
      token_proof(options_.token, Prover::kCoordinator, session_.coordinator_nonce, session_.own_nonce, session_.said);
  if (session_.coordinator_nonce.empty() || !proofs_equal(accepted.proof(), expected)) {
    session_.refused = absl::FailedPreconditionError(
        fmt::format("{} did not prove that it knows the shared token of rank {}; it may not be this cluster's",
                    coordinator(), options_.identity.rank));
    return;
  }
  session_.accepted = true;
}

bool Member::Impl::take_roster(const v1::Roster& wire, bool regroup) {
  absl::StatusOr<Roster> roster = roster_from_wire(wire, options_.identity.world);
  if (!roster.ok() || roster->epoch <= last_epoch_) return false;
  last_epoch_ = roster->epoch;
  session_.roster = *std::move(roster);
  session_.epoch_over = false;
  session_.waiting.clear();
  progress_ = {};
  if (regroup && options_.on_regroup) {
    events_.push_back([this, roster = *session_.roster] { options_.on_regroup(roster); });
  }
  return true;
}

void Member::Impl::on_end() {
  {
    const std::lock_guard lock(mutex_);
    end_session("its connection broke");
  }
  changed_.notify_all();
}

void Member::Impl::end_session(const std::string& why) {
  if (std::exchange(session_.ended, true)) return;
  session_.ended_why = why;
  const bool expected = left_ || session_.shutting_down || !session_.roster;
  if (!expected && options_.on_coordinator_lost) {
    events_.push_back([this, why] { options_.on_coordinator_lost(fmt::format("{} is lost: {}", coordinator(), why)); });
  }
}

// ---- the watchdog ----

void Member::Impl::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_watching_) {
    if (!events_.empty()) {
      std::deque<std::function<void()>> events;
      events.swap(events_);
      lock.unlock();
      for (const auto& event : events) event();
      lock.lock();
      continue;
    }
    const Clock::time_point next = check_silence(Clock::now());
    if (events_.empty()) changed_.wait_until(lock, next);
  }
}

Clock::time_point Member::Impl::check_silence(Clock::time_point now) {
  const ClusterTimings& timings = options_.timings;
  if (stream_ == nullptr || session_.ended) return now + timings.heartbeat_timeout;
  const Clock::time_point silent_at =
      session_.accepted ? session_.heard + timings.heartbeat_timeout : session_.opened + timings.handshake_timeout;
  if (silent_at > now) return silent_at;
  end_session(session_.accepted ? fmt::format("no heartbeat for {:.1f} s", seconds(now - session_.heard))
                                : fmt::format("no handshake within {:.1f} s", seconds(now - session_.opened)));
  stream_->cancel();
  changed_.notify_all();
  return now + timings.heartbeat_timeout;
}

// ---- what goes out ----

std::optional<v1::MemberMessage> Member::Impl::heartbeat() {
  v1::MemberMessage message;
  v1::Heartbeat* heartbeat = message.mutable_heartbeat();
  heartbeat->set_last_step(last_step_.load(std::memory_order_relaxed));
  if (heartbeat->last_step() > 0) {
    const Clock::duration at(last_step_at_.load(std::memory_order_relaxed));
    const auto age = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch() - at);
    heartbeat->set_last_step_age_us(static_cast<uint64_t>(std::max<int64_t>(0, age.count())));
  }
  const std::lock_guard lock(mutex_);
  if (!session_.accepted) return std::nullopt;
  if (!progress_.phase.empty()) {
    v1::LoadProgress* progress = heartbeat->mutable_progress();
    progress->set_phase(progress_.phase);
    progress->set_done(progress_.done);
    progress->set_total(progress_.total);
  }
  return message;
}

void Member::Impl::report_progress(LoadProgress progress) {
  progress.phase = printable(progress.phase, kMaxPhase - 3);  // 3: the dots of a cut phase
  const std::lock_guard lock(mutex_);
  progress_ = std::move(progress);
}

void Member::Impl::set_last_step(uint64_t sequence) {
  last_step_at_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  last_step_.store(sequence, std::memory_order_relaxed);
}

void Member::Impl::post_for_epoch(uint32_t epoch, v1::MemberMessage message) {
  const std::lock_guard lock(mutex_);
  if (stream_ == nullptr || session_.ended || !session_.roster || session_.epoch_over) return;
  if (session_.roster->epoch == epoch) stream_->post(std::move(message));
}

void Member::Impl::renew_address(std::vector<std::byte> address) {
  v1::MemberMessage message;
  message.mutable_new_address()->set_transport_address(address.data(), address.size());
  const std::lock_guard lock(mutex_);
  identity_.address = std::move(address);
  if (stream_ != nullptr && session_.accepted && !session_.ended) stream_->post(std::move(message));
}

void Member::Impl::leave(const std::string& reason) {
  std::shared_ptr<CoordinatorStream> stream;
  {
    std::unique_lock lock(mutex_);
    if (std::exchange(left_, true)) return;
    stream = stream_;
    changed_.notify_all();
    if (stream != nullptr && session_.accepted && !session_.ended) {
      v1::MemberMessage message;
      message.mutable_leave()->set_reason(printable(reason, kMaxReason));
      stream->post(std::move(message));
      // The coordinator ends the stream when it has read this. Ending it from here could overtake the message.
      changed_.wait_until(lock, Deadline::after(kLeaveWait).time(), [this] { return session_.ended; });
    }
  }
  if (stream != nullptr) stream->end();
}

// ---- Member ----

Member::Member(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Member::~Member() = default;

absl::StatusOr<std::unique_ptr<Member>> Member::create(MemberOptions options) {
  if (absl::Status status = validate_identity(options.identity); !status.ok()) return status;
  if (absl::Status status = options.timings.validate(); !status.ok()) return status;
  if (options.identity.rank == 0) {
    return absl::InvalidArgumentError("rank 0 is the coordinator and does not join; members are ranks 1 and up");
  }
  if (options.coordinator.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("rank {} has no address of the coordinator to join", options.identity.rank));
  }
  return std::unique_ptr<Member>(new Member(std::make_unique<Impl>(std::move(options))));
}

absl::StatusOr<Roster> Member::join(Deadline deadline) { return impl_->join(deadline); }
void Member::report_progress(LoadProgress progress) { impl_->report_progress(std::move(progress)); }

void Member::ready(uint32_t epoch) {
  v1::MemberMessage message;
  message.mutable_ready()->set_epoch(epoch);
  impl_->post_for_epoch(epoch, std::move(message));
}

absl::Status Member::wait_go(uint32_t epoch, Deadline deadline) { return impl_->wait_go(epoch, deadline); }
void Member::set_last_step(uint64_t sequence) { impl_->set_last_step(sequence); }

void Member::fail_epoch(uint32_t epoch, const std::string& cause) {
  v1::MemberMessage message;
  message.mutable_epoch_failed()->set_epoch(epoch);
  message.mutable_epoch_failed()->set_cause(printable(cause, kMaxReason));
  impl_->post_for_epoch(epoch, std::move(message));
}

void Member::renew_address(std::vector<std::byte> address) { impl_->renew_address(std::move(address)); }

absl::StatusOr<Roster> Member::wait_regroup(uint32_t after, Deadline deadline) {
  return impl_->wait_regroup(after, deadline);
}

void Member::leave(const std::string& reason) { impl_->leave(reason); }

}  // namespace tensorfold
