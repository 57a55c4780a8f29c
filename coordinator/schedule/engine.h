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
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "coordinator/api/generation.h"
#include "coordinator/draft/width_policy.h"
#include "coordinator/schedule/page_pool.h"
#include "coordinator/schedule/sequence.h"
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

struct EngineOptions {
  int max_sequences = 8;                           // lanes
  int max_batch_rows = 512;                        // rows a pass
  int prompt_chunk = 256;                          // prompt rows of one sequence in a pass
  int queue_limit = 64;                            // sequences that wait for a lane
  int64_t queue_tokens = 0;                        // prompt tokens that wait; 0: no limit
  int64_t pages = 256;                             // KV pages of every rank
  std::chrono::microseconds round_budget{100000};  // prompt rows that fit beside decoding sequences
  std::chrono::microseconds park_deadline{60000000};
  std::chrono::milliseconds ping_interval{
      2000};  // an idle world runs an empty pass so often: ready means a recent step
  DraftKind draft = DraftKind::kAuto;
  CopyOptions copy;
  WidthOptions width;
  int64_t seed_salt = 0;
};

struct EngineModel {
  uint32_t context = 0;  // tokens
  uint32_t vocabulary = 0;
  bool has_mtp = false;
  std::vector<uint32_t> end_ids;
  const Tokenizer* tokenizer = nullptr;  // outlives the engine; null: events carry no text
};

/// A consistent look at the engine.
struct EngineStatus {
  bool up = true;  // passes run
  bool draining = false;
  std::string down_reason;  // why not up: names the rank
  int active = 0;           // sequences with a lane
  int queued = 0;
  int64_t queued_tokens = 0;
  int64_t pages = 0;
  int64_t free_pages = 0;
  double seconds_since_step = 0;
  // Counters since the start.
  uint64_t passes = 0;
  uint64_t pass_rows = 0;
  double pass_seconds = 0;
  uint64_t requests = 0;
  uint64_t rejected = 0;
  uint64_t finished = 0;
  uint64_t cancelled = 0;
  uint64_t failed = 0;
  uint64_t prompt_tokens = 0;
  uint64_t reply_tokens = 0;
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  uint64_t parked = 0;  // sequences replayed after a rank was lost
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
  /// Starts the scheduler's thread.
  void start();
  /// Admits the request or says why not: queue full, cluster down, draining, more cache than there is. Returns its id.
  /// The sink is called from the scheduler's thread, possibly before submit() returns.
  ApiOr<uint64_t> submit(GenerationRequest request, GenerationSink sink);
  /// The request's choices finish with kCancelled in the next round, running or queued; unknown ids are ignored.
  void cancel(uint64_t id);
  /// No new requests; returns true once all have finished, false after `timeout` (what is left is then cancelled).
  bool drain(std::chrono::milliseconds timeout);
  /// Ends the thread; requests in flight finish with an error.
  void stop();

  EngineStatus status() const;
  const EngineModel& model() const { return model_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Round;

  void run();
  void take_commands(bool wait);
  void start_sequences();
  void drop_ended();
  void build_round(Round* round);
  void run_round();
  absl::StatusOr<double> timed_window(uint32_t width, uint32_t mtp_steps, uint64_t* position);
  void ping_if_idle();
  void release(Sequence& sequence);
  void fail_round(const absl::Status& why);
  void wait_for_ranks();
  void finish_active(const ApiError& error);  // what has a lane
  void finish_all(const ApiError& error);     // and what waits for one
  bool mtp_in_use() const;
  int64_t pages_for(const GenerationRequest& request) const;
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
  EngineStatus status_;
  Clock::time_point last_step_;
  bool stopping_ = false;
  uint64_t next_id_ = 1;
  int waiting_ = 0;  // sequences admitted and without a lane
  int64_t waiting_tokens_ = 0;

  // The scheduler thread's own.
  std::deque<std::unique_ptr<Sequence>> queue_;
  std::vector<std::unique_ptr<Sequence>> active_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> to_release_;
  PagePool pool_;
  WidthPolicy policy_;
  double mtp_step_ms_ = 0;  // measured by warm_up()
  size_t next_fill_ = 0;    // whose prompt goes first, in turn
  int failures_ = 0;        // passes that failed in a row
  absl::Status down_;       // not OK while ranks are missing
  Clock::time_point down_since_;
  std::thread thread_;
};

}  // namespace tensorfold
