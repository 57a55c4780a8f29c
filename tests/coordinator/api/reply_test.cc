#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <string>

#include "coordinator/api/chat_reply.h"
#include "coordinator/api/completion_reply.h"

namespace tensorfold {
namespace {

namespace js = boost::json;

ReplyHead head_of(bool usage = false, bool ids = false) {
  return {.id = "chatcmpl-1",
          .created = 1700000000,
          .model = "sprout",
          .fingerprint = "0123456789abcdef",
          .include_usage = usage,
          .return_token_ids = ids};
}

GenerationStats stats_of(uint32_t completion) {
  GenerationStats stats;
  stats.prompt_tokens = 7;
  stats.completion_tokens = completion;
  stats.cached_tokens = 4;
  stats.token_sha = "0123456789ab";
  stats.min_rows = 3;
  stats.prefill_s = 0.25;
  stats.decode_s = 1.5;
  stats.rounds = 5;
  stats.drafted = 20;
  stats.accepted = 11;
  stats.token_ids = {1, 2};
  return stats;
}

js::value event_of(const std::string& event) {
  EXPECT_EQ(event.rfind("data: ", 0), 0u);
  EXPECT_EQ(event.substr(event.size() - 2), "\n\n");
  EXPECT_EQ(event.find('\n'), event.size() - 2);  // one line: anything else would end the event early
  return js::parse(event.substr(6));
}

std::string text(const js::value& value) { return std::string(value.as_string().c_str(), value.as_string().size()); }

void expect_tensorfold(const js::value& reply, bool ids) {
  const js::object& t = reply.at("tensorfold").as_object();
  for (const char* name :
       {"token_sha", "min_rows", "prefill_s", "decode_s", "rounds", "drafted", "accepted", "cached", "fingerprint"}) {
    EXPECT_TRUE(t.contains(name)) << name;
  }
  EXPECT_EQ(t.contains("token_ids"), ids);
  EXPECT_EQ(text(t.at("token_sha")), "0123456789ab");
  EXPECT_EQ(t.at("cached").as_int64(), 4);
  EXPECT_EQ(t.at("accepted").as_int64(), 11);
}

// Protects the whole chat reply: the fields that clients read, and the contract's section 6.
TEST(ChatReply, Whole) {
  ChatChoice choice;
  choice.content = "a\xff";  // never leaves as it is
  choice.reasoning_content = "think";
  choice.reason = FinishReason::kLength;
  choice.stats = stats_of(9);
  choice.logprobs = std::vector<TokenLogprob>{{"\xe2\x82", -0.5, {{"\xe2\x82", -0.5}, {"b", -1.5}}}};
  const std::vector<ChatChoice> one = {choice};
  const js::value reply = js::parse(chat_reply_body(head_of(false, true), one));
  EXPECT_EQ(text(reply.at("object")), "chat.completion");
  EXPECT_EQ(text(reply.at("system_fingerprint")), "0123456789abcdef");
  const js::value& c = reply.at("choices").at(0);
  EXPECT_EQ(text(c.at("message").at("content")), "a\xef\xbf\xbd");
  EXPECT_EQ(text(c.at("message").at("reasoning_content")), "think");
  EXPECT_EQ(text(c.at("finish_reason")), "length");
  EXPECT_FALSE(c.as_object().contains("tensorfold"));
  const js::value& token = c.at("logprobs").at("content").at(0);
  EXPECT_EQ(text(token.at("token")), "bytes:\\xe2\\x82");
  EXPECT_EQ(token.at("bytes").at(0).as_int64(), 0xe2);
  EXPECT_EQ(token.at("logprob").as_double(), -0.5);
  EXPECT_EQ(text(token.at("top_logprobs").at(1).at("token")), "b");
  const js::value& usage = reply.at("usage");
  EXPECT_EQ(usage.at("prompt_tokens").as_int64(), 7);
  EXPECT_EQ(usage.at("total_tokens").as_int64(), 16);
  EXPECT_EQ(usage.at("prompt_tokens_details").at("cached_tokens").as_int64(), 4);
  expect_tensorfold(reply, true);
}

// Protects tool calls and several choices.
TEST(ChatReply, ToolCallsAndChoices) {
  ChatChoice call;
  call.tool_calls = {{"call_1", "get weather", R"({"city":"Z"})"}};
  call.reason = FinishReason::kToolCalls;
  call.stats = stats_of(3);
  ChatChoice plain;
  plain.content = "x";
  plain.stats = stats_of(5);
  const std::vector<ChatChoice> two = {call, plain};
  const js::value reply = js::parse(chat_reply_body(head_of(), two));
  const js::value& message = reply.at("choices").at(0).at("message");
  EXPECT_TRUE(message.at("content").is_null());
  EXPECT_EQ(text(message.at("tool_calls").at(0).at("function").at("name")), "get weather");
  EXPECT_EQ(text(message.at("tool_calls").at(0).at("function").at("arguments")), R"({"city":"Z"})");
  EXPECT_EQ(text(reply.at("choices").at(0).at("finish_reason")), "tool_calls");
  expect_tensorfold(reply.at("choices").at(1), false);
  expect_tensorfold(reply, false);
  EXPECT_EQ(reply.at("usage").at("prompt_tokens").as_int64(), 7);
  EXPECT_EQ(reply.at("usage").at("completion_tokens").as_int64(), 8);
}

// Protects a stream's shape: role first, then deltas, the finish with the tensorfold object, usage when asked, [DONE].
TEST(ChatReply, Stream) {
  const js::value role = event_of(chat_role_event(head_of(), 1));
  EXPECT_EQ(text(role.at("object")), "chat.completion.chunk");
  EXPECT_EQ(role.at("choices").at(0).at("index").as_int64(), 1);
  EXPECT_EQ(text(role.at("choices").at(0).at("delta").at("role")), "assistant");
  EXPECT_TRUE(role.at("choices").at(0).at("finish_reason").is_null());
  EXPECT_FALSE(role.as_object().contains("usage"));

  ChatDelta delta;
  delta.content = "line\nbreak \xf0\x9f";
  delta.tool_calls = {{0, "id", "f", ""}, {0, std::nullopt, std::nullopt, "{\"a\""}};
  delta.logprobs = {{"x", -1.0, {}}};
  const js::value part = event_of(chat_delta_event(head_of(true), 0, delta));
  EXPECT_TRUE(part.at("usage").is_null());
  const js::value& calls = part.at("choices").at(0).at("delta").at("tool_calls");
  EXPECT_EQ(text(calls.at(0).at("function").at("name")), "f");
  EXPECT_FALSE(calls.at(1).as_object().contains("id"));
  EXPECT_EQ(text(calls.at(1).at("function").at("arguments")), "{\"a\"");
  EXPECT_EQ(part.at("choices").at(0).at("logprobs").at("content").as_array().size(), 1u);

  const js::value finish = event_of(chat_finish_event(head_of(false, true), 0, FinishReason::kStop, stats_of(2)));
  EXPECT_EQ(text(finish.at("choices").at(0).at("finish_reason")), "stop");
  expect_tensorfold(finish, true);

  const std::vector<GenerationStats> stats = {stats_of(2)};
  const js::value usage = event_of(chat_usage_event(head_of(true), stats));
  EXPECT_TRUE(usage.at("choices").as_array().empty());
  EXPECT_EQ(usage.at("usage").at("completion_tokens").as_int64(), 2);
  expect_tensorfold(usage, false);
  EXPECT_EQ(sse_done(), "data: [DONE]\n\n");
}

// Protects the completions dialect, whole and streamed.
TEST(CompletionReply, BothWays) {
  CompletionChoice choice;
  choice.text = "añ";
  choice.stats = stats_of(2);
  choice.logprobs = std::vector<TokenLogprob>{{"añ", -0.1, {{"añ", -0.1}, {"añ", -3.0}, {"z", -4.0}}}, {"b", -0.2, {}}};
  const std::vector<CompletionChoice> one = {choice};
  const std::vector<GenerationStats> stats = {choice.stats};
  const js::value reply = js::parse(completion_reply_body(head_of(), one, usage_of(stats)));
  EXPECT_EQ(text(reply.at("object")), "text_completion");
  EXPECT_EQ(text(reply.at("choices").at(0).at("text")), "añ");
  const js::value& logprobs = reply.at("choices").at(0).at("logprobs");
  EXPECT_EQ(logprobs.at("text_offset").at(1).as_int64(), 2);  // characters, not bytes
  EXPECT_EQ(logprobs.at("top_logprobs").at(0).as_object().size(), 2u);
  EXPECT_EQ(logprobs.at("top_logprobs").at(0).at("añ").as_double(), -0.1);
  EXPECT_EQ(logprobs.at("bytes").at(0).as_array().size(), 3u);
  expect_tensorfold(reply, false);

  const js::value part = event_of(completion_delta_event(head_of(), 2, "t", *choice.logprobs, 10));
  EXPECT_EQ(part.at("choices").at(0).at("logprobs").at("text_offset").at(1).as_int64(), 12);
  expect_tensorfold(event_of(completion_finish_event(head_of(), 0, FinishReason::kStop, stats_of(1))), false);
  const js::value usage = event_of(completion_usage_event(head_of(true), usage_of(stats), stats_of(2)));
  EXPECT_EQ(usage.at("usage").at("total_tokens").as_int64(), 9);
  expect_tensorfold(usage, false);
}

}  // namespace
}  // namespace tensorfold
