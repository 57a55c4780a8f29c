// One level of a load: so many users at once (closed loop), or so many new conversations a second (open loop).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/load/client.h"
#include "coordinator/load/options.h"
#include "coordinator/load/samples.h"

namespace tensorfold {

/// One kind of failure, with what the first of them said.
struct LoadError {
  uint64_t count = 0;
  std::string example;
};

/// What one level measured. Rates are over `window_s`: from the start until the load began to fade, because a user had
/// nothing more to begin; what ends later counts in the percentiles and the totals.
struct LevelFigures {
  int users = 0;    // closed loop, else 0
  double rate = 0;  // open loop: conversations a second, else 0
  double window_s = 0;
  double wall_s = 0;
  uint64_t conversations = 0;
  uint64_t requests = 0;  // malformed ones apart
  uint64_t completed = 0;
  uint64_t left = 0;        // dropped by us
  uint64_t refused = 0;     // malformed ones, refused as they must be
  uint64_t background = 0;  // of the completed ones, background work
  uint64_t good = 0;        // completed within both limits; of users who wait, not of background work
  std::map<std::string, LoadError> errors;
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;
  uint64_t reply_tokens = 0;
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  double reply_tokens_per_s = 0;
  double total_tokens_per_s = 0;  // prompts read count when their first token comes, cached ones too
  double requests_per_s = 0;      // completed
  double goodput = 0;             // good requests a second
  SampleSummary ttft_s;           // from when the request was due to the first event that shows something
  SampleSummary gap_s;            // between two such events
  SampleSummary per_token_s;      // of each request: from its first event to its last, over the tokens after the first
  SampleSummary total_s;          // to the end of the reply
  SampleSummary background_ttft_s;  // of background work, which is in none of the four above
  SampleSummary late_s;             // open loop: from when a conversation was due to when it was begun

  uint64_t error_count() const;
};

/// The hashes of a conversation's replies, as far as it went.
struct HashedConversation {
  uint64_t index = 0;
  std::vector<std::string> shas;  // [turn]
};

struct LevelPlan {
  int users = 0;    // or
  double rate = 0;  // one of both is 0
  uint64_t first_conversation = 0;
};

struct LevelResult {
  LevelFigures figures;
  std::vector<HashedConversation> hashes;  // those that check_load() shall repeat
  uint64_t next_conversation = 0;
};

/// Runs the level to its end. Unavailable when the server went away in the middle, saying so.
absl::StatusOr<LevelResult> run_level(const LoadOptions& options, const ClientSettings& client, const LevelPlan& plan);

}  // namespace tensorfold
