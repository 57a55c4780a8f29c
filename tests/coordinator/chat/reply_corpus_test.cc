// Replies of every family's format, well-formed and damaged, against what make_reply_corpus.py says they are.
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "coordinator/chat/builtin_templates.h"
#include "coordinator/chat/chat_template.h"
#include "gtest/gtest.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

std::string str(const json::value& v) { return std::string(v.as_string().data(), v.as_string().size()); }

const json::object& corpus() {
  static const json::object value = [] {
    std::ifstream in(std::string(TENSORFOLD_SOURCE_DIR) + "/tests/coordinator/chat/corpus/replies.json",
                     std::ios::binary);
    std::stringstream text;
    text << in.rdbuf();
    return json::parse(text.str()).as_object();
  }();
  return value;
}

// A reply's events in the corpus' form: [{"reasoning": …} | {"text": …} | {"call": …, "arguments": …}].
json::array events_of(const json::object& entry, const std::vector<std::string_view>& pieces) {
  ReplyParser::Options options;
  options.format = detect_reply_format(str(entry.at("shows")));
  options.tools = corpus().at("tools");
  ReplyParser parser(options);
  json::array out;
  const auto add = [&](const std::vector<ReplyEvent>& events) {
    for (const ReplyEvent& event : events) {
      if (event.kind == ReplyEvent::Kind::kToolCall) {
        out.push_back(json::object{{"call", event.call.name}, {"arguments", json::parse(event.call.arguments)}});
        continue;
      }
      const char* kind = event.kind == ReplyEvent::Kind::kReasoning ? "reasoning" : "text";
      if (!out.empty() && out.back().as_object().contains(kind)) {
        out.back().as_object()[kind].as_string().append(event.text);
      } else {
        out.push_back(json::object{{kind, event.text}});
      }
    }
  };
  for (const std::string_view piece : pieces) add(parser.feed(piece));
  add(parser.finish());
  return out;
}

std::vector<std::string_view> cut(std::string_view reply, std::mt19937* random) {
  std::vector<std::string_view> pieces;
  for (size_t at = 0; at < reply.size();) {
    const size_t n = random == nullptr ? 1 : 1 + (*random)() % 12;
    pieces.push_back(reply.substr(at, n));
    at += n;
  }
  return pieces;
}

void check(const json::object& entry) {
  SCOPED_TRACE(str(entry.at("name")));
  const std::string reply = str(entry.at("reply"));
  const json::value& expected = entry.at("events");
  EXPECT_EQ(json::value(events_of(entry, {reply})), expected) << "whole:\n" << reply;
  EXPECT_EQ(json::value(events_of(entry, cut(reply, nullptr))), expected) << "byte by byte:\n" << reply;
  std::mt19937 random(7);
  for (int round = 0; round < 10; ++round) {
    EXPECT_EQ(json::value(events_of(entry, cut(reply, &random))), expected) << "in pieces:\n" << reply;
  }
}

// Replies as every family writes them become reasoning, text and calls with typed arguments, however they are cut.
TEST(ReplyCorpusTest, WellFormed) {
  const json::array& entries = corpus().at("well_formed").as_array();
  EXPECT_GE(entries.size(), 60u);
  for (const json::value& entry : entries) check(entry.as_object());
}

// Damaged replies lose nothing: whole calls count, what cannot be read is text.
TEST(ReplyCorpusTest, Damaged) {
  const json::array& entries = corpus().at("damaged").as_array();
  EXPECT_GE(entries.size(), 60u);
  for (const json::value& entry : entries) check(entry.as_object());
}

json::array message_of(const json::object& entry) {
  json::object message{{"role", "assistant"}, {"content", ""}};
  json::array calls;
  for (const json::value& event : entry.at("events").as_array()) {
    const json::object& e = event.as_object();
    if (e.contains("text")) message["content"] = e.at("text");
    if (!e.contains("call")) continue;
    // Arguments as an OpenAI client sends them back: JSON in a string.
    const json::object function{{"name", e.at("call")}, {"arguments", json::serialize(e.at("arguments"))}};
    calls.push_back(json::object{{"id", "1"}, {"type", "function"}, {"function", function}});
  }
  if (!calls.empty()) message["tool_calls"] = calls;
  return {message};
}

// What was parsed, sent back as history, is written as the model wrote it: the next turn continues the same tokens.
TEST(ReplyCorpusTest, RenderedBack) {
  int rendered_calls = 0;
  for (const json::value& value : corpus().at("well_formed").as_array()) {
    const json::object& entry = value.as_object();
    const std::string family = str(entry.at("family"));
    SCOPED_TRACE(str(entry.at("name")));
    const json::object& turns = corpus().at("turns").as_object();
    const std::string source =
        turns.contains(family) ? str(turns.at(family)) : std::string(builtin_chat_template(family));
    const absl::StatusOr<ChatTemplate> chat = ChatTemplate::parse(source, {}, {});
    ASSERT_TRUE(chat.ok()) << chat.status();
    EXPECT_EQ(detect_reply_format(str(entry.at("shows"))).tools, chat->reply_format().tools);
    const absl::StatusOr<Rendered> turn = chat->render(message_of(entry), nullptr, {}, false);
    ASSERT_TRUE(turn.ok()) << turn.status();
    std::string reply = str(entry.at("reply"));
    const std::string close = "</think>\n\n";
    if (const size_t end = reply.find(close); end != std::string::npos) reply.erase(0, end + close.size());
    const bool builtin = !turns.contains(family);
    const bool only_calls = builtin && reply.starts_with("<") && family == "deepseek_v41";
    if (only_calls) reply.insert(0, "\n\n");
    EXPECT_EQ(turn->text(),
              builtin ? "<｜begin▁of▁sentence｜><｜Assistant｜></think>" + reply + "<｜end▁of▁sentence｜>" : reply);
    rendered_calls += reply.find("｜DSML｜") != std::string::npos || reply.find("<tool_call>") != std::string::npos;
  }
  EXPECT_GE(rendered_calls, 40);
}

// DeepSeek's checkpoints carry no template: the built-in one writes turns, tools, results and thinking.
TEST(ReplyCorpusTest, BuiltinTemplates) {
  for (const auto& [type, invoke] : std::map<std::string, std::string>{
           {"deepseek_v4", "<｜DSML｜invoke name=\"NAME\">"}, {"deepseek_v41", "<｜DSML｜ invoke name=\"NAME\">"}}) {
    const absl::StatusOr<ChatTemplate> chat = ChatTemplate::parse(builtin_chat_template(type), {}, {});
    ASSERT_TRUE(chat.ok()) << chat.status();
    EXPECT_TRUE(chat->reply_format().reasoning);
    const json::array messages = json::parse(R"([{"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a<think>"}, {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "42"}, {"role": "user", "content": "c"}])")
                                     .as_array();
    const absl::StatusOr<Rendered> plain = chat->render(messages, nullptr, {{"enable_thinking", false}}, true);
    ASSERT_TRUE(plain.ok()) << plain.status();
    EXPECT_EQ(plain->text(),
              "<｜begin▁of▁sentence｜>Be brief.<｜User｜>a<think><｜Assistant｜></think>b<｜end▁of▁sentence｜>"
              "<｜User｜><tool_result>42</tool_result>\n\nc<｜Assistant｜></think>");
    EXPECT_FALSE(plain->opens_reasoning());
    const absl::StatusOr<Rendered> thinking = chat->render(messages, corpus().at("tools"), {}, true);
    ASSERT_TRUE(thinking.ok()) << thinking.status();
    EXPECT_TRUE(thinking->opens_reasoning());
    EXPECT_NE(thinking->text().find(invoke), std::string::npos);
    EXPECT_NE(thinking->text().find("{\"name\": \"run code\""), std::string::npos);
    EXPECT_FALSE(
        chat->render(json::parse(R"([{"role": "critic", "content": "x"}])").as_array(), nullptr, {}, true).ok());
  }
  EXPECT_TRUE(builtin_chat_template("qwen3").empty());
}

}  // namespace
}  // namespace tensorfold
