#include "coordinator/api/reply_parts.h"

#include <algorithm>
#include <iterator>

#include "fmt/format.h"

namespace tensorfold {
namespace {

void write_chat_token(JsonWriter& json, std::string_view bytes, double logprob) {
  json.field("token", token_text(bytes)).field("logprob", logprob).key("bytes").bytes(bytes);
}

// Characters that begin in `bytes`: a character spread over several tokens counts with its first byte.
uint64_t characters(std::string_view bytes) {
  return static_cast<uint64_t>(
      std::count_if(bytes.begin(), bytes.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

Usage usage_of(std::span<const GenerationStats> choices) {
  Usage usage;
  for (const GenerationStats& stats : choices) {
    usage.prompt_tokens = std::max<uint64_t>(usage.prompt_tokens, stats.prompt_tokens);
    usage.cached_tokens = std::max<uint64_t>(usage.cached_tokens, stats.cached_tokens);
    usage.completion_tokens += stats.completion_tokens;
  }
  return usage;
}

std::string token_text(std::string_view bytes) {
  if (json_is_utf8(bytes)) return std::string(bytes);
  std::string out = "bytes:";
  for (char c : bytes) fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(c));
  return out;
}

void write_usage(JsonWriter& json, const Usage& usage) {
  json.key("usage").begin_object();
  json.field("prompt_tokens", usage.prompt_tokens).field("completion_tokens", usage.completion_tokens);
  json.field("total_tokens", usage.prompt_tokens + usage.completion_tokens);
  json.key("prompt_tokens_details").begin_object().field("cached_tokens", usage.cached_tokens).end_object();
  json.end_object();
}

void write_tensorfold(JsonWriter& json, const ReplyHead& head, const GenerationStats& stats) {
  json.key("tensorfold").begin_object();
  json.field("token_sha", stats.token_sha).field("min_rows", stats.min_rows);
  json.field("prefill_s", stats.prefill_s).field("decode_s", stats.decode_s);
  json.field("rounds", stats.rounds).field("drafted", stats.drafted).field("accepted", stats.accepted);
  json.field("cached", stats.cached_tokens).field("fingerprint", head.fingerprint);
  if (head.return_token_ids) json.key("token_ids").ids(stats.token_ids);
  json.end_object();
}

void write_progress(JsonWriter& json, uint32_t choice, const ProgressEvent& progress) {
  json.key("progress").begin_object().field("choice", choice);
  json.field("read", progress.read).field("total", progress.total);
  json.field("tokens_per_s", progress.tokens_per_s).field("seconds_left", progress.seconds_left).end_object();
}

void write_chat_logprobs(JsonWriter& json, std::span<const TokenLogprob> tokens) {
  json.begin_object().key("content").begin_array();
  for (const TokenLogprob& token : tokens) {
    json.begin_object();
    write_chat_token(json, token.bytes, token.logprob);
    json.key("top_logprobs").begin_array();
    for (const auto& [bytes, logprob] : token.top) {
      json.begin_object();
      write_chat_token(json, bytes, logprob);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array().key("refusal").null().end_object();
}

void write_completion_logprobs(JsonWriter& json, std::span<const TokenLogprob> tokens, uint64_t text_offset) {
  json.begin_object().key("tokens").begin_array();
  for (const TokenLogprob& token : tokens) json.string(token_text(token.bytes));
  json.end_array().key("token_logprobs").begin_array();
  for (const TokenLogprob& token : tokens) json.number(token.logprob);
  json.end_array().key("top_logprobs").begin_array();
  for (const TokenLogprob& token : tokens) {
    json.begin_object();
    for (size_t i = 0; i < token.top.size(); ++i) {
      // Two ids may have the same bytes; an object has a name once, and the better one comes first.
      const auto same = [&](const auto& other) { return other.first == token.top[i].first; };
      const auto end = token.top.begin() + static_cast<std::ptrdiff_t>(i);
      if (std::any_of(token.top.begin(), end, same)) continue;
      json.field(token_text(token.top[i].first), token.top[i].second);
    }
    json.end_object();
  }
  json.end_array().key("text_offset").begin_array();
  for (const TokenLogprob& token : tokens) {
    json.unsigned_integer(text_offset);
    text_offset += characters(token.bytes);
  }
  json.end_array().key("bytes").begin_array();
  for (const TokenLogprob& token : tokens) json.bytes(token.bytes);
  json.end_array().end_object();
}

std::string cut_reply_event(const ReplyHead& head, const ApiError& error, const GenerationStats& stats,
                            uint64_t reply_tokens) {
  JsonWriter json;
  json.begin_object();
  write_error(json, error);
  write_usage(
      json,
      {.prompt_tokens = stats.prompt_tokens, .completion_tokens = reply_tokens, .cached_tokens = stats.cached_tokens});
  write_tensorfold(json, head, stats);
  return sse_event(json.end_object().take());
}

std::string sse_event(std::string_view json) { return fmt::format("data: {}\n\n", json); }

std::string sse_done() { return "data: [DONE]\n\n"; }

}  // namespace tensorfold
