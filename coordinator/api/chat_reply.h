// Replies of /v1/chat/completions: whole, and as the events of a stream. Everything returned is valid UTF-8. Pure
// functions.
//
// A stream is, for each choice: chat_role_event, any number of chat_delta_event, chat_finish_event (chat_progress_event
// may come before the first delta); then, when asked for, chat_usage_event; then sse_done().
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/api/reply_parts.h"

namespace tensorfold {

struct ToolCallReply {
  std::string id;
  std::string name;
  std::string arguments;  // JSON text
};

struct ChatChoice {
  std::string content;
  std::optional<std::string> reasoning_content;
  std::vector<ToolCallReply> tool_calls;
  FinishReason reason = FinishReason::kStop;
  std::optional<std::vector<TokenLogprob>> logprobs;
  GenerationStats stats;
};

// With several choices each carries its own `tensorfold` object; the reply's own is always that of choice 0.
std::string chat_reply_body(const ReplyHead& head, std::span<const ChatChoice> choices);

// A part of a tool call: id and name come with the first part, arguments in pieces.
struct ToolCallDelta {
  uint32_t index = 0;
  std::optional<std::string> id;
  std::optional<std::string> name;
  std::string arguments;
};

struct ChatDelta {
  std::optional<std::string> content;
  std::optional<std::string> reasoning_content;
  std::vector<ToolCallDelta> tool_calls;
  std::vector<TokenLogprob> logprobs;
};

std::string chat_role_event(const ReplyHead& head, uint32_t choice);
std::string chat_delta_event(const ReplyHead& head, uint32_t choice, const ChatDelta& delta);
// Carries the choice's `tensorfold` object.
std::string chat_finish_event(const ReplyHead& head, uint32_t choice, FinishReason reason,
                              const GenerationStats& stats);
// No choices; how far the prompt of `choice` has been read.
std::string chat_progress_event(const ReplyHead& head, uint32_t choice, const ProgressEvent& progress);
// No choices; the usage, and choice 0's `tensorfold` object again, since this is then the last chunk.
std::string chat_usage_event(const ReplyHead& head, std::span<const GenerationStats> choices);

}  // namespace tensorfold
