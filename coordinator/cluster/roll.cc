#include "coordinator/cluster/roll.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coordinator/cluster/wire.h"

namespace tensorfold {
namespace {

// Streams that have not said who they are. A cluster has few ranks; more than this is no cluster.
constexpr size_t kMaxHandshakes = 16;

double seconds(Roll::Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

const char* rank_state_name(RankState state) {
  switch (state) {
    case RankState::kMissing:
      return "missing";
    case RankState::kJoined:
      return "joined";
    case RankState::kLoading:
      return "loading";
    case RankState::kReady:
      return "ready";
    case RankState::kServing:
      return "serving";
    case RankState::kLost:
      return "lost";
  }
  return "unknown";
}

std::string LostRank::text() const {
  return fmt::format("rank {} (host {}, pid {}) was lost: {}", rank, printable(host, kMaxHostLabel), pid, cause);
}

Roll::Roll(RankIdentity self, ClusterTimings timings, Callbacks callbacks)
    : self_(std::move(self)), timings_(timings), callbacks_(std::move(callbacks)), places_(self_.world) {
  for (uint32_t rank = 0; rank < self_.world; ++rank) places_[rank].identity.rank = rank;
  watchdog_ = std::thread([this] { watch(); });
}

Roll::~Roll() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    stop_watching_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
}

// ---- the service's side ----

bool Roll::begin_handshake(const std::shared_ptr<MemberConnection>& connection) {
  {
    const std::lock_guard lock(mutex_);
    if (closing_ || handshakes_.size() >= kMaxHandshakes) return false;
    handshakes_.emplace(connection, Clock::now() + timings_.handshake_timeout);
  }
  changed_.notify_all();
  return true;
}

void Roll::end_handshake(const std::shared_ptr<MemberConnection>& connection) {
  const std::lock_guard lock(mutex_);
  handshakes_.erase(connection);
}

absl::Status Roll::claim(const RankIdentity& identity, uint32_t last_epoch,
                         const std::shared_ptr<MemberConnection>& connection, v1::CoordinatorMessage accepted) {
  std::string notice_text;
  {
    std::unique_lock lock(mutex_);
    Place& place = places_[identity.rank];
    const std::shared_ptr<MemberConnection> holder = place.connection;
    if (holder != nullptr) {
      const uint64_t messages = place.messages;
      // A little longer than the watchdog takes to lose a silent holder.
      const Deadline alive_by = Deadline::after(timings_.heartbeat_timeout + std::chrono::milliseconds(100));
      changed_.wait_until(lock, alive_by.time(),
                          [&] { return closing_ || place.connection == nullptr || place.messages != messages; });
    }
    if (closing_) return absl::UnavailableError("the coordinator is shutting down");
    if (place.connection != nullptr) {
      return absl::AlreadyExistsError(fmt::format(
          "{} may not join: the rank is held by another process, {}. Give each process its own rank, or stop "
          "the other one first",
          identity.label(), place.identity.label()));
    }
    highest_epoch_seen_ = std::max(highest_epoch_seen_, last_epoch);
    take_place(place, identity, connection);
    connection->start_sending([this] { return heartbeat(); }, timings_.heartbeat_interval);
    connection->post(std::move(accepted));
    const std::vector<uint32_t> others = missing();
    notice_text = fmt::format("{} has joined", identity.label());
    if (!others.empty()) send_waiting(others, fmt::format("the cluster waits for {}", describe(others)));
  }
  changed_.notify_all();
  notice(notice_text);
  return absl::OkStatus();
}

void Roll::take_place(Place& place, const RankIdentity& identity, const std::shared_ptr<MemberConnection>& connection) {
  place = Place{};
  place.state = RankState::kJoined;
  place.identity = identity;
  place.connection = connection;
  place.heard = Clock::now();
  place.fresh_address = true;
}

bool Roll::receive(uint32_t rank, const std::shared_ptr<MemberConnection>& connection,
                   const v1::MemberMessage& message) {
  {
    const std::lock_guard lock(mutex_);
    Place& place = places_[rank];
    if (place.connection != connection) return false;
    place.heard = Clock::now();
    ++place.messages;
    switch (message.message_case()) {
      case v1::MemberMessage::kHeartbeat:
        receive_heartbeat(place, message.heartbeat());
        break;
      case v1::MemberMessage::kReady:
        // Of an earlier epoch: it crossed the news that it is over.
        if (epoch_live_ && message.ready().epoch() == epoch_ && place.state == RankState::kLoading) {
          place.state = RankState::kReady;
        }
        break;
      case v1::MemberMessage::kNewAddress:
        if (message.new_address().transport_address().size() > kMaxTransportAddress) return false;
        place.identity.address = bytes_from_wire(message.new_address().transport_address());
        place.fresh_address = true;
        break;
      case v1::MemberMessage::kEpochFailed:
        if (epoch_live_ && message.epoch_failed().epoch() == epoch_) {
          end_epoch_locked(fmt::format("the transport of {} failed: {}", place.identity.label(),
                                       printable(message.epoch_failed().cause(), kMaxReason)));
        }
        break;
      default:
        return false;
    }
  }
  changed_.notify_all();
  return true;
}

void Roll::receive_heartbeat(Place& place, const v1::Heartbeat& heartbeat) {
  place.last_step = heartbeat.last_step();
  // An age beyond a day is as good as any other and cannot overflow the clock.
  constexpr uint64_t kDayUs = 24ull * 3600 * 1000000;
  place.last_step_at = place.heard - std::chrono::microseconds(std::min(heartbeat.last_step_age_us(), kDayUs));
  if (heartbeat.has_progress()) place.progress = progress_from_wire(heartbeat.progress());
}

void Roll::lose(uint32_t rank, const std::shared_ptr<MemberConnection>& connection, const std::string& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (places_[rank].connection != connection) return;
    lose_locked(rank, cause);
  }
  changed_.notify_all();
}

void Roll::lose_locked(uint32_t rank, const std::string& cause) {
  Place& place = places_[rank];
  const bool in_epoch = epoch_live_ && place.state != RankState::kJoined;
  place.connection = nullptr;
  place.state = RankState::kLost;
  place.cause = cause;
  if (closing_) return;
  const LostRank lost{rank, place.identity.host, place.identity.pid, epoch_, cause};
  events_.push_back([this, text = lost.text()] { notice(text); });
  if (!in_epoch) return;
  if (callbacks_.on_lost) events_.push_back([this, lost] { callbacks_.on_lost(lost); });
  end_epoch_locked(lost.text());
}

void Roll::end_epoch_locked(const std::string& cause) {
  if (!epoch_live_) return;
  epoch_live_ = false;
  serving_ = false;
  epoch_cause_ = cause;
  for (Place& place : places_) {
    if (place.connection != nullptr) place.state = RankState::kJoined;
  }
  v1::CoordinatorMessage message;
  message.mutable_epoch_over()->set_epoch(epoch_);
  message.mutable_epoch_over()->set_cause(printable(cause, kMaxReason));
  send_all(message);
  if (callbacks_.on_epoch_over) {
    events_.push_back([this, epoch = epoch_, cause] { callbacks_.on_epoch_over(epoch, cause); });
  }
}

void Roll::send_all(const v1::CoordinatorMessage& message) {
  for (const Place& place : places_) {
    if (place.connection != nullptr) place.connection->post(message);
  }
}

void Roll::send_waiting(const std::vector<uint32_t>& ranks, const std::string& text) {
  v1::CoordinatorMessage message;
  for (const uint32_t rank : ranks) message.mutable_waiting()->add_ranks(rank);
  message.mutable_waiting()->set_text(printable(text, kMaxReason));
  send_all(message);
}

v1::CoordinatorMessage Roll::heartbeat() const {
  v1::CoordinatorMessage message;
  v1::Heartbeat* heartbeat = message.mutable_heartbeat();
  heartbeat->set_last_step(own_step_.load(std::memory_order_relaxed));
  if (heartbeat->last_step() > 0) {
    const Clock::duration at(own_step_at_.load(std::memory_order_relaxed));
    const auto age = Clock::now().time_since_epoch() - at;
    heartbeat->set_last_step_age_us(
        std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::microseconds>(age).count()));
  }
  return message;
}

// ---- the watchdog ----

void Roll::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_watching_) {
    if (run_events(lock)) continue;
    const Clock::time_point next = check_silence(Clock::now());
    if (events_.empty()) changed_.wait_until(lock, next);
  }
}

bool Roll::run_events(std::unique_lock<std::mutex>& lock) {
  if (events_.empty()) return false;
  std::deque<std::function<void()>> events;
  events.swap(events_);
  lock.unlock();
  for (const auto& event : events) event();
  lock.lock();
  return true;
}

// Loses ranks that have been silent for too long and ends late handshakes; returns when to look again.
Roll::Clock::time_point Roll::check_silence(Clock::time_point now) {
  Clock::time_point next = now + timings_.heartbeat_timeout;
  for (uint32_t rank = 1; rank < places_.size(); ++rank) {
    const std::shared_ptr<MemberConnection> connection = places_[rank].connection;
    if (connection == nullptr) continue;
    const Clock::time_point silent_at = places_[rank].heard + timings_.heartbeat_timeout;
    if (silent_at > now) {
      next = std::min(next, silent_at);
      continue;
    }
    lose_locked(rank, fmt::format("no heartbeat for {:.1f} s", seconds(now - places_[rank].heard)));
    connection->cancel();
    changed_.notify_all();
  }
  for (auto& [connection, late_at] : handshakes_) {
    if (late_at <= now) {
      connection->cancel();
    } else {
      next = std::min(next, late_at);
    }
  }
  return next;
}

// ---- the coordinator's side ----

std::vector<uint32_t> Roll::missing() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 1; rank < places_.size(); ++rank) {
    if (places_[rank].connection == nullptr || !places_[rank].fresh_address) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<uint32_t> Roll::not_ready() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 1; rank < places_.size(); ++rank) {
    if (places_[rank].state != RankState::kReady) ranks.push_back(rank);
  }
  return ranks;
}

std::string Roll::describe(uint32_t rank) const {
  const Place& place = places_[rank];
  switch (place.state) {
    case RankState::kMissing:
      return fmt::format("rank {} (has not joined)", rank);
    case RankState::kLost:
      return fmt::format("{} (lost: {})", place.identity.label(), place.cause);
    case RankState::kJoined:
      return place.fresh_address ? place.identity.label()
                                 : fmt::format("{} (opens a new transport endpoint)", place.identity.label());
    case RankState::kLoading: {
      const LoadProgress& progress = place.progress;
      if (progress.phase.empty()) return fmt::format("{} (loading)", place.identity.label());
      if (progress.total == 0) return fmt::format("{} ({})", place.identity.label(), progress.phase);
      return fmt::format(
          "{} ({}, {:.0f} %)", place.identity.label(), progress.phase,
          100.0 * static_cast<double>(std::min(progress.done, progress.total)) / static_cast<double>(progress.total));
    }
    case RankState::kReady:
    case RankState::kServing:
      break;
  }
  return place.identity.label();
}

std::string Roll::describe(const std::vector<uint32_t>& ranks) const {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += describe(ranks[i]);
  }
  return text;
}

absl::Status Roll::wait_for_ranks(std::unique_lock<std::mutex>& lock, Deadline deadline, const char* purpose,
                                  const std::function<std::vector<uint32_t>()>& waited_for,
                                  const std::function<absl::Status()>& over) {
  const Clock::time_point begun = Clock::now();
  Clock::time_point next_notice = begun;
  while (true) {
    if (closing_) return absl::CancelledError("the coordinator is shutting down");
    if (absl::Status status = over(); !status.ok()) return status;
    const std::vector<uint32_t> ranks = waited_for();
    if (ranks.empty()) return absl::OkStatus();
    const Clock::time_point now = Clock::now();
    if (deadline.passed(now)) {
      return absl::DeadlineExceededError(
          fmt::format("rank 0 waited {:.1f} s {} {}", seconds(now - begun), purpose, describe(ranks)));
    }
    if (now >= next_notice) {
      next_notice = now + timings_.notice_interval;
      const std::string others = describe(ranks);
      send_waiting(ranks, fmt::format("the cluster waits {} {}", purpose, others));
      lock.unlock();
      notice(fmt::format("rank 0 waits {} {}", purpose, others));
      lock.lock();
      continue;
    }
    changed_.wait_until(lock, std::min(deadline.time(), next_notice));
  }
}

absl::StatusOr<Roster> Roll::wait_for_all(Deadline deadline) {
  std::unique_lock lock(mutex_);
  end_epoch_locked("the coordinator begins a new epoch");
  changed_.notify_all();
  const absl::Status status = wait_for_ranks(
      lock, deadline, "for", [this] { return missing(); }, [] { return absl::OkStatus(); });
  if (!status.ok()) return status;
  return begin_epoch();
}

Roster Roll::begin_epoch() {
  epoch_ = std::max(epoch_, highest_epoch_seen_) + 1;
  epoch_live_ = true;
  serving_ = false;
  Roster roster{epoch_, self_.world, {}};
  roster.ranks.push_back({0, self_.host, self_.pid, self_.address});
  for (uint32_t rank = 1; rank < places_.size(); ++rank) {
    const RankIdentity& identity = places_[rank].identity;
    roster.ranks.push_back({rank, identity.host, identity.pid, identity.address});
  }
  v1::CoordinatorMessage welcome;
  roster_to_wire(roster, welcome.mutable_welcome()->mutable_roster());
  v1::CoordinatorMessage regroup;
  *regroup.mutable_regroup()->mutable_roster() = welcome.welcome().roster();
  regroup.mutable_regroup()->set_cause(printable(epoch_cause_, kMaxReason));
  for (uint32_t rank = 1; rank < places_.size(); ++rank) {
    Place& place = places_[rank];
    place.connection->post(place.welcomed ? regroup : welcome);
    place.welcomed = true;
    place.fresh_address = false;
    place.state = RankState::kLoading;
  }
  return roster;
}

absl::Status Roll::wait_ready(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const uint32_t epoch = epoch_;
  if (epoch == 0) return absl::FailedPreconditionError("no epoch has begun: wait_for_all comes before wait_ready");
  const absl::Status status = wait_for_ranks(
      lock, deadline, "until ready for", [this] { return serving_ ? std::vector<uint32_t>() : not_ready(); },
      [this, epoch] {
        if (epoch_live_ && epoch_ == epoch) return absl::OkStatus();
        return absl::UnavailableError(fmt::format("epoch {} is over: {}", epoch, epoch_cause_));
      });
  if (!status.ok()) return status;
  if (serving_) return absl::OkStatus();
  serving_ = true;
  v1::CoordinatorMessage go;
  go.mutable_go()->set_epoch(epoch);
  send_all(go);
  for (Place& place : places_) place.state = RankState::kServing;
  return absl::OkStatus();
}

void Roll::set_address(std::vector<std::byte> address) {
  const std::lock_guard lock(mutex_);
  self_.address = std::move(address);
}

void Roll::end_epoch(const std::string& cause) {
  {
    const std::lock_guard lock(mutex_);
    end_epoch_locked(cause);
  }
  changed_.notify_all();
}

void Roll::set_last_step(uint64_t sequence) {
  own_step_at_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  own_step_.store(sequence, std::memory_order_relaxed);
}

void Roll::set_progress(LoadProgress progress) {
  const std::lock_guard lock(mutex_);
  own_progress_ = std::move(progress);
}

RankStatus Roll::status_of(uint32_t rank, Clock::time_point now) const {
  const Place& place = places_[rank];
  RankStatus status;
  status.rank = rank;
  status.host = place.identity.host;
  status.pid = place.identity.pid;
  status.state = place.state;
  status.cause = place.cause;
  status.last_step = place.last_step;
  status.progress = place.progress;
  if (place.messages > 0 || place.connection != nullptr) status.seconds_since_heartbeat = seconds(now - place.heard);
  if (place.last_step > 0) status.seconds_since_step = seconds(now - place.last_step_at);
  return status;
}

std::vector<RankStatus> Roll::rank_status() const {
  const std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  RankStatus own;
  own.host = self_.host;
  own.pid = self_.pid;
  own.state = serving_ ? RankState::kServing : epoch_live_ ? RankState::kLoading : RankState::kJoined;
  own.seconds_since_heartbeat = 0;
  own.last_step = own_step_.load(std::memory_order_relaxed);
  if (own.last_step > 0) {
    const Clock::time_point at{Clock::duration(own_step_at_.load(std::memory_order_relaxed))};
    own.seconds_since_step = std::max(0.0, seconds(now - at));
  }
  own.progress = own_progress_;
  std::vector<RankStatus> all{own};
  for (uint32_t rank = 1; rank < places_.size(); ++rank) all.push_back(status_of(rank, now));
  return all;
}

uint32_t Roll::epoch() const {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

void Roll::close(const std::string& reason, bool drain, std::chrono::milliseconds grace) {
  std::unique_lock lock(mutex_);
  closing_ = true;
  epoch_live_ = false;
  serving_ = false;
  changed_.notify_all();
  v1::CoordinatorMessage message;
  message.mutable_shutdown()->set_reason(printable(reason, kMaxReason));
  message.mutable_shutdown()->set_drain(drain);
  send_all(message);
  changed_.wait_until(lock, Deadline::after(grace).time(), [this] {
    return std::all_of(places_.begin(), places_.end(), [](const Place& place) { return place.connection == nullptr; });
  });
}

}  // namespace tensorfold
