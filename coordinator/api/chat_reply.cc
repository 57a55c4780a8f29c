#include "coordinator/api/chat_reply.h"

namespace tensorfold {
namespace {

void begin_reply(JsonWriter& json, const ReplyHead& head, std::string_view object) {
  json.begin_object().field("id", head.id).field("object", object).field("created", head.created);
  json.field("model", head.model).field("system_fingerprint", head.fingerprint);
}

JsonWriter begin_chunk(const ReplyHead& head) {
  JsonWriter json;
  begin_reply(json, head, "chat.completion.chunk");
  json.key("choices").begin_array();
  return json;
}

// Ends the choices array and the chunk; with include_usage every chunk but the last says that its usage is null.
std::string end_chunk(JsonWriter& json, const ReplyHead& head) {
  if (head.include_usage) json.key("usage").null();
  return sse_event(json.end_object().take());
}

void write_message(JsonWriter& json, const ChatChoice& choice) {
  json.key("message").begin_object().field("role", "assistant").key("content");
  // As OpenAI: a reply that is only calls has no content.
  if (choice.content.empty() && !choice.tool_calls.empty()) {
    json.null();
  } else {
    json.string(choice.content);
  }
  if (choice.reasoning_content) json.field("reasoning_content", *choice.reasoning_content);
  if (!choice.tool_calls.empty()) {
    json.key("tool_calls").begin_array();
    for (const ToolCallReply& call : choice.tool_calls) {
      json.begin_object().field("id", call.id).field("type", "function").key("function").begin_object();
      json.field("name", call.name).field("arguments", call.arguments).end_object().end_object();
    }
    json.end_array();
  }
  json.key("refusal").null().end_object();
}

void write_call_deltas(JsonWriter& json, const std::vector<ToolCallDelta>& calls) {
  json.key("tool_calls").begin_array();
  for (const ToolCallDelta& call : calls) {
    json.begin_object().field("index", call.index);
    if (call.id) json.field("id", *call.id).field("type", "function");
    json.key("function").begin_object();
    if (call.name) json.field("name", *call.name);
    json.field("arguments", call.arguments).end_object().end_object();
  }
  json.end_array();
}

}  // namespace

std::string chat_reply_body(const ReplyHead& head, std::span<const ChatChoice> choices) {
  JsonWriter json;
  begin_reply(json, head, "chat.completion");
  json.key("choices").begin_array();
  std::vector<GenerationStats> stats;
  for (uint32_t i = 0; i < choices.size(); ++i) {
    const ChatChoice& choice = choices[i];
    json.begin_object().field("index", i);
    write_message(json, choice);
    json.key("logprobs");
    if (choice.logprobs) {
      write_chat_logprobs(json, *choice.logprobs);
    } else {
      json.null();
    }
    json.field("finish_reason", finish_reason_name(choice.reason));
    if (choices.size() > 1) write_tensorfold(json, head, choice.stats);
    json.end_object();
    stats.push_back(choice.stats);
  }
  json.end_array();
  write_usage(json, usage_of(stats));
  if (!choices.empty()) write_tensorfold(json, head, choices[0].stats);
  return json.end_object().take();
}

std::string chat_role_event(const ReplyHead& head, uint32_t choice) {
  JsonWriter json = begin_chunk(head);
  json.begin_object().field("index", choice).key("delta").begin_object();
  json.field("role", "assistant").field("content", "").end_object();
  json.key("logprobs").null().key("finish_reason").null().end_object().end_array();
  return end_chunk(json, head);
}

std::string chat_delta_event(const ReplyHead& head, uint32_t choice, const ChatDelta& delta) {
  JsonWriter json = begin_chunk(head);
  json.begin_object().field("index", choice).key("delta").begin_object();
  if (delta.content) json.field("content", *delta.content);
  if (delta.reasoning_content) json.field("reasoning_content", *delta.reasoning_content);
  if (!delta.tool_calls.empty()) write_call_deltas(json, delta.tool_calls);
  json.end_object().key("logprobs");
  if (delta.logprobs.empty()) {
    json.null();
  } else {
    write_chat_logprobs(json, delta.logprobs);
  }
  json.key("finish_reason").null().end_object().end_array();
  return end_chunk(json, head);
}

std::string chat_finish_event(const ReplyHead& head, uint32_t choice, FinishReason reason,
                              const GenerationStats& stats) {
  JsonWriter json = begin_chunk(head);
  json.begin_object().field("index", choice).key("delta").begin_object().end_object().key("logprobs").null();
  json.field("finish_reason", finish_reason_name(reason)).end_object().end_array();
  write_tensorfold(json, head, stats);
  return end_chunk(json, head);
}

std::string chat_progress_event(const ReplyHead& head, uint32_t choice, const ProgressEvent& progress) {
  JsonWriter json = begin_chunk(head);
  json.end_array();
  write_progress(json, choice, progress);
  return end_chunk(json, head);
}

std::string chat_usage_event(const ReplyHead& head, std::span<const GenerationStats> choices) {
  JsonWriter json = begin_chunk(head);
  json.end_array();
  write_usage(json, usage_of(choices));
  if (!choices.empty()) write_tensorfold(json, head, choices[0]);
  return sse_event(json.end_object().take());
}

}  // namespace tensorfold
