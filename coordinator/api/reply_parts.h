// What replies of every dialect are made of. Plain data and JSON fragments; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/api/error.h"
#include "coordinator/api/generation.h"
#include "coordinator/api/json_writer.h"

namespace tensorfold {

// What is the same in all parts of one reply.
struct ReplyHead {
  std::string id;                 // "chatcmpl-…" or "cmpl-…"
  int64_t created = 0;            // seconds since 1970
  std::string model;              // as served
  std::string fingerprint;        // numeric fingerprint, 16 hex characters; also system_fingerprint
  bool include_usage = false;     // stream_options.include_usage: chunks carry "usage"
  bool return_token_ids = false;  // the tensorfold object carries token_ids
};

struct Usage {
  uint64_t prompt_tokens = 0;
  uint64_t completion_tokens = 0;  // of all choices
  uint64_t cached_tokens = 0;
};
// One prompt, several choices: the prompt counts once.
Usage usage_of(std::span<const GenerationStats> choices);

// One generated token as logprobs show it. `bytes` may be a part of a character.
struct TokenLogprob {
  std::string bytes;
  double logprob = 0.0;
  std::vector<std::pair<std::string, double>> top;  // (bytes, logprob), best first
};

// How a token's bytes are shown as text: themselves, or "bytes:\xe2\x82" when they are not whole characters (as OpenAI
// does).
std::string token_text(std::string_view bytes);

// "usage": {prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details {cached_tokens}}
void write_usage(JsonWriter& json, const Usage& usage);
// "tensorfold": {…}: contract, section 6.
void write_tensorfold(JsonWriter& json, const ReplyHead& head, const GenerationStats& stats);
// "progress": {choice, read, total, tokens_per_s, seconds_left}.
void write_progress(JsonWriter& json, uint32_t choice, const ProgressEvent& progress);
// {"content":[{"token","logprob","bytes","top_logprobs":[…]}],"refusal":null}, the chat dialect. Writes a value.
void write_chat_logprobs(JsonWriter& json, std::span<const TokenLogprob> tokens);
// {"tokens","token_logprobs","top_logprobs","text_offset","bytes"}, the completions dialect; `bytes` is an extension.
// `text_offset`: characters of the reply before the first of `tokens`. Writes a value.
void write_completion_logprobs(JsonWriter& json, std::span<const TokenLogprob> tokens, uint64_t text_offset);

// The event of a stream that ends with an error: "error", and what the client has until then as "usage" and
// "tensorfold". `stats` are of the choice that failed, `reply_tokens` of all.
std::string cut_reply_event(const ReplyHead& head, const ApiError& error, const GenerationStats& stats,
                            uint64_t reply_tokens);

// One server-sent event.
std::string sse_event(std::string_view json);
// "data: [DONE]\n\n": the end of a stream.
std::string sse_done();

}  // namespace tensorfold
