// The scheduler: takes requests, plans rounds that mix prompt rows and verify windows of many sequences, samples,
// emits.
//
// One thread owns all of its state; submit(), cancel(), status() and drain() talk to it through a queue and are
// thread-safe. Sinks are called from that thread and must not block. Admission is decided inside submit(): a request
// that is accepted will be answered, unless a rank is lost for longer than the park deadline.
//
// When a pass fails because a rank is lost, requests are parked, not failed: the link is asked to regroup, and once it
// has, every sequence is computed again from the tokens it already has, which gives the same bits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "coordinator/api/generation.h"
#include "coordinator/draft/width_policy.h"
#include "coordinator/schedule/admission.h"
#include "coordinator/schedule/background_turns.h"
#include "coordinator/schedule/engine_types.h"
#include "coordinator/schedule/lanes.h"
#include "coordinator/schedule/round_planner.h"
#include "coordinator/schedule/sequence.h"
#include "coordinator/schedule/waiting_line.h"
#include "transport/pass/executor.h"

namespace tensorfold {

/// The world that passes run on.
class ClusterLink {
 public:
  virtual ~ClusterLink() = default;
  virtual PassExecutor& executor() = 0;
  /// Not OK once the world is known to be broken, naming the rank, before a pass has failed on it. Never waits;
  /// thread-safe.
  virtual absl::Status health() { return absl::OkStatus(); }
  /// After a failed pass: OK once all ranks are back with empty state, else Unavailable naming who is missing. Returns
  /// within about a tenth of a second.
  virtual absl::Status try_regroup() = 0;
};

class Engine {
 public:
  /// `link` outlives the engine.
  Engine(ClusterLink& link, EngineModel model, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Before start(): runs passes of the widths that verify windows have, so that everything is loaded and the width
  /// policy knows what passes cost before the first request. Takes at most a few seconds. Errors are the pass's.
  absl::Status warm_up();
  /// Before start(), of a world of `world` ranks: what the ranks keep on disk, and what rank 0 has there.
  void open_states(StateOptions options, std::vector<StoredSegment> stored, int world);
  /// Before start(): brings pinned contexts back into memory. What does not come within `most` is left. Errors are a
  /// pass's.
  absl::Status restore_pinned(std::chrono::milliseconds most);
  /// Runs `call` on the scheduler's thread, soon. Never, if the engine stops first.
  void with_states(std::function<void(StateKeeper&)> call);
  /// Starts the scheduler's thread.
  void start();
  /// Admits the request or says why not: queue full, cluster down, draining, more cache than there is. Returns its id.
  /// The sink is called from the scheduler's thread, possibly before submit() returns.
  ApiOr<uint64_t> submit(GenerationRequest request, GenerationSink sink);
  /// The request's choices finish with kCancelled in the next round, running or queued; unknown ids are ignored.
  void cancel(uint64_t id);
  /// No new requests; returns true once all have finished, false after `timeout` (what is left is then cancelled).
  bool drain(std::chrono::milliseconds timeout);
  /// After drain(): passes run until what is queued for the disks is durable on all ranks. False after `timeout`.
  bool write_states(std::chrono::milliseconds timeout);
  /// Ends the thread; requests in flight finish with an error.
  void stop();

  EngineStatus status() const;
  const EngineModel& model() const { return model_; }

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void take_commands(bool wait);
  void give_background_its_turn();
  void start_sequences();
  bool waits_for_prompt(const Sequence& sequence) const;
  bool make_room(const Sequence& next);
  void drop_ended();
  void run_round();
  void ping_if_idle();
  void take_events(const PassResult& result);
  void fail_round(const absl::Status& why);
  void wait_for_ranks();
  void finish_active(const ApiError& error);  // what has a lane
  void finish_all(const ApiError& error);     // and what waits for one
  void publish();

  ClusterLink& link_;
  const EngineModel model_;
  const EngineOptions options_;

  // Shared with callers.
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<std::unique_ptr<Sequence>> incoming_;
  std::vector<uint64_t> cancels_;
  std::vector<std::function<void(StateKeeper&)>> state_calls_;
  EngineStatus status_;
  Clock::time_point last_step_;
  bool stopping_ = false;
  bool writing_ = false;  // write_states() waits
  uint64_t next_id_ = 1;
  Admission admission_;

  // The scheduler thread's own.
  WaitingLine queue_;
  std::vector<std::unique_ptr<Sequence>> active_;
  Lanes lanes_;
  WidthPolicy policy_;
  RoundPlanner planner_;
  BackgroundTurns turns_;
  bool left_out_ = false;        // the last round read nothing of some background prompt
  double mtp_step_ms_ = 0;       // measured by warm_up()
  double block_ms_ = 0;          // likewise
  Clock::time_point round_end_;  // of the last round; zero: there was none just before
  int failures_ = 0;             // passes that failed in a row
  uint64_t parked_ = 0;          // sequences that wait for the ranks
  absl::Status down_;            // not OK while ranks are missing
  Clock::time_point down_since_;
  std::thread thread_;
};

}  // namespace tensorfold
