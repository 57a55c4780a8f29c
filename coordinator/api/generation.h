// What front ends hand to the engine, and what the engine hands back. No JSON, no protobuf, no text formats: these are
// the types at which they stop.
//
// Ownership: a GenerationRequest is moved into the engine's queue; events are moved out through the sink that was given
// with it. The sink is called by the engine's thread and must not block; for each choice it sees TokenEvents in order
// and then exactly one FinishEvent; with GenerationRequest::progress, ProgressEvents before the first TokenEvent.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "coordinator/api/error.h"
#include "coordinator/sampling/logprobs.h"
#include "coordinator/sampling/params.h"

namespace tensorfold {

// Background requests give way: their prompts are read when no other waits, and a foreground request that needs a lane
// or pages takes theirs. They resume with the same bytes.
enum class Priority : uint8_t { kForeground, kBackground };
// "foreground", "background"; none for anything else.
std::optional<Priority> parse_priority(std::string_view name);

struct GenerationRequest {
  std::string id;                    // for logs; never the prompt
  std::vector<uint32_t> prompt;      // token ids, at least one
  uint32_t max_tokens = 0;           // resolved: prompt + max_tokens fits the context
  uint32_t min_tokens = 0;           // before so many tokens neither a stop id nor a stop string ends the reply
  SamplingParams sampling;           // its seed is not used; see seed
  std::optional<uint64_t> seed;      // none: default_seed(prompt, salt). Choice i draws with choice_seed(seed, i)
  uint32_t n = 1;                    // choices
  std::vector<std::string> stop;     // the text ends before the first of them
  std::vector<uint32_t> stop_ids;    // end the reply like the model's own end tokens
  bool ignore_eos = false;           // the model's own end tokens do not end the reply (stop_ids still do)
  bool draft = true;                 // false: one token a pass, the client's own check
  bool cache = true;                 // false: neither uses what is cached nor leaves anything there
  std::optional<uint32_t> logprobs;  // none: not asked; k: the chosen token's and the k best
  bool return_token_ids = false;
  bool progress = false;  // ProgressEvents while the prompt is read
  Priority priority = Priority::kForeground;
  std::optional<std::chrono::steady_clock::time_point> deadline;
};

enum class FinishReason : uint8_t { kStop, kLength, kToolCalls, kError, kCancelled };
// "stop", "length", "tool_calls", "error", "cancelled".
std::string_view finish_reason_name(FinishReason reason);

// The numbers of one choice: contract, section 6.
struct GenerationStats {
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;  // a final stop token included
  uint32_t cached_tokens = 0;      // of the prompt, from the prefix cache
  std::string token_sha;           // 12 hex characters
  uint32_t min_rows = 0;           // the fewest rows of any verify window; 1 for a serial reply
  double prefill_s = 0.0;
  double decode_s = 0.0;
  uint64_t rounds = 0;              // decode passes
  uint64_t drafted = 0;             // tokens
  uint64_t accepted = 0;            // tokens
  std::vector<uint32_t> token_ids;  // all, when the request asked for them
};

struct GeneratedToken {
  uint32_t id = 0;
  std::optional<RowLogprobs> logprobs;
};

// The tokens that one round kept.
struct TokenEvent {
  uint32_t choice = 0;
  std::vector<GeneratedToken> tokens;
  // What may be shown now: whole characters, nothing that may still become a stop string. Empty when decoding to text
  // is left to the receiver.
  std::string text;
};

struct FinishEvent {
  uint32_t choice = 0;
  FinishReason reason = FinishReason::kStop;
  std::string text;               // what was withheld until now
  std::optional<ApiError> error;  // exactly when the reason is kError
  GenerationStats stats;
};

// How far the prompt has been read, before the first token. Only for requests that ask.
struct ProgressEvent {
  uint32_t choice = 0;
  uint64_t read = 0;        // tokens of the prompt, those that a cache had included
  uint64_t total = 0;       // tokens of the prompt
  double tokens_per_s = 0;  // lately
  double seconds_left = 0;  // at that pace
};

using GenerationEvent = std::variant<TokenEvent, FinishEvent, ProgressEvent>;
using GenerationSink = std::function<void(GenerationEvent)>;

// What a model and a profile allow a request.
struct GenerationBounds {
  uint32_t context = 0;     // tokens of prompt and reply; 0: unknown, not checked
  uint32_t vocabulary = 0;  // tokens; 0: unknown, not checked
  uint32_t max_tokens = 0;  // of a reply that names none; 0: what the context leaves
};

// Ranges of sampling parameters, the same for every dialect. The error's param is the JSON field's name.
std::optional<ApiError> check_sampling(const SamplingParams& params, uint32_t vocabulary);

// Checks ids, counts, ranges and the context, and resolves max_tokens (`wanted`: what the client named). Every front
// end calls it last, before admission.
std::optional<ApiError> resolve_generation(const GenerationBounds& bounds, std::optional<uint32_t> wanted,
                                           GenerationRequest* request);

}  // namespace tensorfold
