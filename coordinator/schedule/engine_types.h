// What the engine is told at its start and what it says of itself: plain data.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/cache/prefix_cache.h"
#include "coordinator/draft/drafter.h"
#include "coordinator/draft/width_policy.h"

namespace tensorfold {

class Tokenizer;

struct EngineOptions {
  int max_sequences = 8;                      // lanes
  int max_batch_rows = 512;                   // rows a pass
  int prompt_chunk = 256;                     // prompt rows of one sequence in a pass
  int queue_limit = 64;                       // sequences that wait for a lane
  int64_t queue_tokens = 0;                   // prompt tokens that wait; 0: no limit
  int64_t pages = 256;                        // KV pages of every rank
  std::chrono::microseconds round_budget{0};  // of prompt rows beside decoding sequences; 0: from measured passes
  std::chrono::microseconds park_deadline{60000000};
  std::chrono::milliseconds ping_interval{
      2000};  // an idle world runs an empty pass so often: ready means a recent step
  std::chrono::milliseconds progress_interval{1000};  // of a prompt that is read, for clients that asked
  // Of the background sequences that wait, one counts as foreground at most so often. 0: never.
  std::chrono::milliseconds background_turn{30000};
  DraftKind draft = DraftKind::kAuto;
  CopyOptions copy;
  WidthOptions width;
  int64_t seed_salt = 0;
  CacheOptions cache;  // what the model has is filled in by the engine
};

struct EngineModel {
  uint32_t context = 0;  // tokens
  uint32_t vocabulary = 0;
  bool has_mtp = false;
  uint32_t block_drafts = 0;  // most drafts of a block, of the block drafter that the ranks have loaded; 0: none
  bool has_states = true;     // recurrent states, which no page holds: prefixes want snapshots
  std::vector<uint32_t> end_ids;
  const Tokenizer* tokenizer = nullptr;  // outlives the engine; null: events carry no text
};

/// A consistent look at the engine.
struct EngineStatus {
  bool up = true;  // passes run
  bool draining = false;
  std::string down_reason;  // why not up: names the rank
  int active = 0;           // sequences with a lane
  int active_background = 0;
  int queued = 0;
  int queued_background = 0;
  double round_budget_seconds = 0;
  int64_t queued_tokens = 0;
  int64_t pages = 0;
  int64_t free_pages = 0;    // those included that only the cache holds
  int64_t cached_pages = 0;  // that the cache holds
  int64_t snapshots = 0;
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
  uint64_t preempted = 0;      // times that a background sequence gave its lane up
  uint64_t promoted = 0;       // background sequences that had waited so long that they count as foreground
  uint64_t prompt_passes = 0;  // passes with prompt rows
  uint64_t window_rows = 0;    // rows of verify windows; the other rows are prompt rows
  uint64_t parked = 0;         // sequences replayed after a rank was lost
  CacheCounters cache;
  StateCounters states;
  int64_t stored_segments = 0;     // on rank 0's disk
  int64_t unwritten_segments = 0;  // that wait to be written, or are being written
};

}  // namespace tensorfold
