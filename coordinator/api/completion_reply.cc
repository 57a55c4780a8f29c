#include "coordinator/api/completion_reply.h"

namespace tensorfold {
namespace {

JsonWriter begin_reply(const ReplyHead& head) {
  JsonWriter json;
  json.begin_object().field("id", head.id).field("object", "text_completion").field("created", head.created);
  json.field("model", head.model).field("system_fingerprint", head.fingerprint);
  json.key("choices").begin_array();
  return json;
}

std::string end_chunk(JsonWriter& json, const ReplyHead& head) {
  if (head.include_usage) json.key("usage").null();
  return sse_event(json.end_object().take());
}

}  // namespace

std::string completion_reply_body(const ReplyHead& head, std::span<const CompletionChoice> choices,
                                  const Usage& usage) {
  JsonWriter json = begin_reply(head);
  for (uint32_t i = 0; i < choices.size(); ++i) {
    const CompletionChoice& choice = choices[i];
    json.begin_object().field("index", i).field("text", choice.text).key("logprobs");
    if (choice.logprobs) {
      write_completion_logprobs(json, *choice.logprobs, 0);
    } else {
      json.null();
    }
    json.field("finish_reason", finish_reason_name(choice.reason));
    if (choices.size() > 1) write_tensorfold(json, head, choice.stats);
    json.end_object();
  }
  json.end_array();
  write_usage(json, usage);
  if (!choices.empty()) write_tensorfold(json, head, choices[0].stats);
  return json.end_object().take();
}

std::string completion_delta_event(const ReplyHead& head, uint32_t choice, std::string_view text,
                                   std::span<const TokenLogprob> logprobs, uint64_t text_offset) {
  JsonWriter json = begin_reply(head);
  json.begin_object().field("index", choice).field("text", text).key("logprobs");
  if (logprobs.empty()) {
    json.null();
  } else {
    write_completion_logprobs(json, logprobs, text_offset);
  }
  json.key("finish_reason").null().end_object().end_array();
  return end_chunk(json, head);
}

std::string completion_finish_event(const ReplyHead& head, uint32_t choice, FinishReason reason,
                                    const GenerationStats& stats) {
  JsonWriter json = begin_reply(head);
  json.begin_object().field("index", choice).field("text", "").key("logprobs").null();
  json.field("finish_reason", finish_reason_name(reason)).end_object().end_array();
  write_tensorfold(json, head, stats);
  return end_chunk(json, head);
}

std::string completion_progress_event(const ReplyHead& head, uint32_t choice, const ProgressEvent& progress) {
  JsonWriter json = begin_reply(head);
  json.end_array();
  write_progress(json, choice, progress);
  return end_chunk(json, head);
}

std::string completion_usage_event(const ReplyHead& head, const Usage& usage, const GenerationStats& first) {
  JsonWriter json = begin_reply(head);
  json.end_array();
  write_usage(json, usage);
  write_tensorfold(json, head, first);
  return sse_event(json.end_object().take());
}

}  // namespace tensorfold
