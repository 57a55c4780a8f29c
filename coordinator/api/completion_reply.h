// Replies of /v1/completions: whole, and as the events of a stream. Everything returned is valid UTF-8. Pure functions.
//
// A stream is, for each choice: any number of completion_delta_event, completion_finish_event; then, when asked for,
// completion_usage_event; then sse_done().
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/api/reply_parts.h"

namespace tensorfold {

struct CompletionChoice {
  std::string text;
  FinishReason reason = FinishReason::kStop;
  std::optional<std::vector<TokenLogprob>> logprobs;
  GenerationStats stats;
};

// With several choices each carries its own `tensorfold` object; the reply's own is always that of choice 0. `usage`:
// usage_of() for one prompt; with several prompts the sum over them.
std::string completion_reply_body(const ReplyHead& head, std::span<const CompletionChoice> choices, const Usage& usage);

// `text_offset`: characters of the choice's text before this piece; only logprobs show it.
std::string completion_delta_event(const ReplyHead& head, uint32_t choice, std::string_view text,
                                   std::span<const TokenLogprob> logprobs, uint64_t text_offset);
// Carries the choice's `tensorfold` object.
std::string completion_finish_event(const ReplyHead& head, uint32_t choice, FinishReason reason,
                                    const GenerationStats& stats);
// No choices; how far the prompt of `choice` has been read.
std::string completion_progress_event(const ReplyHead& head, uint32_t choice, const ProgressEvent& progress);
// No choices; the usage, and `first`, choice 0's `tensorfold` object, again, since this is then the last chunk.
std::string completion_usage_event(const ReplyHead& head, const Usage& usage, const GenerationStats& first);

}  // namespace tensorfold
