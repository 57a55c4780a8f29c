// The roll of the cluster: which rank is held by whom, in which state, and the epochs. All of it under one mutex; it is
// never held while a callback runs or the network is waited for.
//
// Thread-safety: everything may be called from any thread, but only one at a time may be in
// wait_for_all()/wait_ready(). Callbacks: see membership.h.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/cluster/connection.h"
#include "coordinator/cluster/membership.h"

namespace tensorfold {

class Roll {
 public:
  using Clock = Deadline::Clock;

  struct Callbacks {
    std::function<void(const std::string&)> on_notice;
    std::function<void(const LostRank&)> on_lost;
    std::function<void(uint32_t, const std::string&)> on_epoch_over;
  };

  Roll(RankIdentity self, ClusterTimings timings, Callbacks callbacks);
  ~Roll();
  Roll(const Roll&) = delete;
  Roll& operator=(const Roll&) = delete;

  // The service's side.

  /// From now until end_handshake(), cancels `connection` if the handshake takes too long. False: too many at once.
  bool begin_handshake(const std::shared_ptr<MemberConnection>& connection);
  void end_handshake(const std::shared_ptr<MemberConnection>& connection);

  /// Gives the rank of a checked `identity` to `connection`, whose first message becomes `accepted`. AlreadyExists,
  /// naming the holder, if another process holds it. A holder that has been silent is given the heartbeat timeout to
  /// show that it lives: a process that died without a word does not keep its successor out.
  absl::Status claim(const RankIdentity& identity, uint32_t last_epoch,
                     const std::shared_ptr<MemberConnection>& connection, v1::CoordinatorMessage accepted);

  /// A message from the holder of `rank`. False: the message is out of turn, and the stream is to end.
  bool receive(uint32_t rank, const std::shared_ptr<MemberConnection>& connection, const v1::MemberMessage& message);

  /// The stream of `rank` has ended. Nothing happens if `connection` does not hold the rank any more.
  void lose(uint32_t rank, const std::shared_ptr<MemberConnection>& connection, const std::string& cause);

  void notice(const std::string& text) const { callbacks_.on_notice(text); }

  // The coordinator's side: as in membership.h.

  absl::StatusOr<Roster> wait_for_all(Deadline deadline);
  absl::Status wait_ready(Deadline deadline);
  void set_address(std::vector<std::byte> address);
  void end_epoch(const std::string& cause);
  void set_last_step(uint64_t sequence);
  void set_progress(LoadProgress progress);
  std::vector<RankStatus> rank_status() const;
  uint32_t epoch() const;

  /// Tells all members to stop and waits up to `grace` until their streams have ended.
  void close(const std::string& reason, bool drain, std::chrono::milliseconds grace);

 private:
  struct Place {  // of one rank
    RankState state = RankState::kMissing;
    RankIdentity identity;                         // of the last holder
    std::shared_ptr<MemberConnection> connection;  // null: nobody holds the rank
    Clock::time_point heard;                       // the last message
    uint64_t messages = 0;
    bool welcomed = false;       // this holder has had a roster
    bool fresh_address = false;  // identity.address has not been used in an epoch
    uint64_t last_step = 0;
    Clock::time_point last_step_at;  // if last_step > 0
    LoadProgress progress;
    std::string cause;  // why it was lost
  };

  // All of these: mutex_ held.
  void take_place(Place& place, const RankIdentity& identity, const std::shared_ptr<MemberConnection>& connection);
  void lose_locked(uint32_t rank, const std::string& cause);
  void end_epoch_locked(const std::string& cause);
  Roster begin_epoch();
  void send_all(const v1::CoordinatorMessage& message);
  void send_waiting(const std::vector<uint32_t>& ranks, const std::string& text);
  std::vector<uint32_t> missing() const;
  std::vector<uint32_t> not_ready() const;
  std::string describe(const std::vector<uint32_t>& ranks) const;
  std::string describe(uint32_t rank) const;
  void receive_heartbeat(Place& place, const v1::Heartbeat& heartbeat);
  RankStatus status_of(uint32_t rank, Clock::time_point now) const;
  Clock::time_point check_silence(Clock::time_point now);
  bool run_events(std::unique_lock<std::mutex>& lock);

  /// Waits until `waited_for` gives no rank, saying once a notice interval whom it waits for. `over` ends the wait
  /// early.
  absl::Status wait_for_ranks(std::unique_lock<std::mutex>& lock, Deadline deadline, const char* purpose,
                              const std::function<std::vector<uint32_t>()>& waited_for,
                              const std::function<absl::Status()>& over);
  void watch();
  v1::CoordinatorMessage heartbeat() const;

  RankIdentity self_;  // address by mutex_, the rest constant
  const ClusterTimings timings_;
  const Callbacks callbacks_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Place> places_;                                                  // [world]; place 0 is not used
  std::map<std::shared_ptr<MemberConnection>, Clock::time_point> handshakes_;  // and when they are too late
  std::deque<std::function<void()>> events_;                                   // callbacks to make, in order
  uint32_t epoch_ = 0;
  uint32_t highest_epoch_seen_ = 0;  // by any member, also under an earlier coordinator
  bool epoch_live_ = false;
  bool serving_ = false;     // Go was sent in this epoch
  std::string epoch_cause_;  // why the last epoch ended
  LoadProgress own_progress_;
  bool closing_ = false;
  bool stop_watching_ = false;

  std::atomic<uint64_t> own_step_{0};
  std::atomic<Clock::rep> own_step_at_{0};  // ticks of Clock

  std::thread watchdog_;
};

}  // namespace tensorfold
