#include "coordinator/chat/reply_parser.h"

#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tensorfold {

// For gtest's messages.
void PrintTo(const ReplyEvent& e, std::ostream* out) {
  switch (e.kind) {
    case ReplyEvent::Kind::kReasoning:
      *out << "think[" << e.text << "]";
      break;
    case ReplyEvent::Kind::kContent:
      *out << "text[" << e.text << "]";
      break;
    case ReplyEvent::Kind::kToolCall:
      *out << "call[" << e.call.name << "|" << e.call.arguments << "]";
      break;
  }
}

namespace {

namespace json = boost::json;
using ::testing::ElementsAre;

ReplyEvent think(std::string s) { return {ReplyEvent::Kind::kReasoning, std::move(s), {}}; }
ReplyEvent text(std::string s) { return {ReplyEvent::Kind::kContent, std::move(s), {}}; }
ReplyEvent call(std::string name, std::string arguments) {
  return {ReplyEvent::Kind::kToolCall, {}, {std::move(name), std::move(arguments)}};
}

// Events of one kind that follow each other are one text.
void merge(std::vector<ReplyEvent>* all, std::vector<ReplyEvent> events) {
  for (ReplyEvent& e : events) {
    if (e.kind != ReplyEvent::Kind::kToolCall && !all->empty() && all->back().kind == e.kind) {
      all->back().text += e.text;
    } else {
      all->push_back(std::move(e));
    }
  }
}

ReplyParser::Options options(bool starts_in_reasoning = false, ToolSyntax syntax = ToolSyntax::kTagged) {
  ReplyParser::Options o;
  o.format = {true, syntax};
  o.starts_in_reasoning = starts_in_reasoning;
  o.tools =
      json::parse(R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
      "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "o": {"type": "object"},
      "u": {"type": ["integer", "null"]}, "any": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}}])");
  return o;
}

std::vector<ReplyEvent> parse_pieces(const ReplyParser::Options& o, const std::vector<std::string_view>& pieces) {
  ReplyParser parser(o);
  std::vector<ReplyEvent> all;
  for (const std::string_view piece : pieces) merge(&all, parser.feed(piece));
  merge(&all, parser.finish());
  return all;
}

// The events of a reply, after making sure that they do not depend on how it is cut: whole, at every place, byte by
// byte.
std::vector<ReplyEvent> parse(const std::string& reply, const ReplyParser::Options& o = options()) {
  const std::vector<ReplyEvent> whole = parse_pieces(o, {reply});
  const std::string_view view = reply;
  for (size_t i = 1; i < reply.size(); ++i) {
    EXPECT_EQ(parse_pieces(o, {view.substr(0, i), view.substr(i)}), whole) << "cut at " << i << " of " << reply;
  }
  std::vector<std::string_view> bytes;
  for (size_t i = 0; i < reply.size(); ++i) bytes.push_back(view.substr(i, 1));
  EXPECT_EQ(parse_pieces(o, bytes), whole) << reply;
  std::mt19937 random(static_cast<unsigned>(reply.size()));
  for (int round = 0; round < 20; ++round) {
    std::vector<std::string_view> pieces;
    for (size_t at = 0; at < reply.size();) {
      const size_t n = 1 + random() % 9;
      pieces.push_back(view.substr(at, n));
      at += n;
    }
    EXPECT_EQ(parse_pieces(o, pieces), whole) << reply;
  }
  return whole;
}

// Well-formed replies of each shape.
TEST(ReplyParserTest, WellFormed) {
  EXPECT_THAT(parse("Hello"), ElementsAre(text("Hello")));
  EXPECT_THAT(parse(""), ElementsAre());
  EXPECT_THAT(parse(" Hello \n"), ElementsAre(text(" Hello \n")));
  EXPECT_THAT(parse("<think>\nwhy\n</think>\n\nHello"), ElementsAre(think("why"), text("Hello")));
  EXPECT_THAT(parse("<think>\n\n</think>\n\nHello"), ElementsAre(text("Hello")));
  EXPECT_THAT(parse("why\n\nso\n</think>\n\nHello", options(true)), ElementsAre(think("why\n\nso"), text("Hello")));
  EXPECT_THAT(parse("<think>\nwhy</think>Hello", options(true)), ElementsAre(think("why"), text("Hello")));
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"x\"}}\n</tool_call>"),
              ElementsAre(call("f", "{\"s\": \"x\"}")));
  EXPECT_THAT(parse("Looking.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n"
                    "{\"name\": \"g h\", \"arguments\": {\"a\":[1,2 ]}}\n</tool_call>"),
              ElementsAre(text("Looking."), call("f", "{}"), call("g h", "{\"a\":[1,2 ]}")));
  EXPECT_THAT(parse("<think>\nneed it\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"),
              ElementsAre(think("need it"), call("f", "{}")));
}

// <function=…> calls: strings stay as they are, other types follow the tool's schema.
TEST(ReplyParserTest, XmlCalls) {
  EXPECT_THAT(
      parse("<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
            "<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{\"k\": [1]}\n</parameter>\n<parameter=u>\nnull\n"
            "</parameter>\n<parameter=any>\nline \"one\"\n\ntwo\n</parameter>\n</function>\n</tool_call>"),
      ElementsAre(call("f",
                       "{\"s\": \"12\", \"n\": 12, \"b\": true, \"o\": {\"k\": [1]}, \"u\": null, "
                       "\"any\": \"line \\\"one\\\"\\n\\ntwo\"}")));
  // Types that do not fit, and tools and parameters that are not known, are strings.
  EXPECT_THAT(
      parse(
          "<tool_call>\n<function=f>\n<parameter=n>\nmany\n</parameter>\n<parameter=zz>\n5\n</parameter>\n</function>\n"
          "</tool_call>"),
      ElementsAre(call("f", "{\"n\": \"many\", \"zz\": \"5\"}")));
  EXPECT_THAT(parse("<tool_call>\n<function=my tool>\n</function>\n</tool_call>"), ElementsAre(call("my tool", "{}")));
  // Markup inside a value is part of the value.
  EXPECT_THAT(parse("<tool_call>\n<function=f>\n<parameter=s>\na</parameter>b </tool_call> c</function>\n</parameter>\n"
                    "</function>\n</tool_call>"),
              ElementsAre(call("f", "{\"s\": \"a</parameter>b </tool_call> c</function>\"}")));
  // Closing tags of parameters are often forgotten.
  EXPECT_THAT(parse("<tool_call>\n<function=f>\n<parameter=s>\na\n<parameter=n>\n1\n</function>\n</tool_call>"),
              ElementsAre(call("f", "{\"s\": \"a\", \"n\": 1}")));
  EXPECT_THAT(parse("<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</tool_call>"),
              ElementsAre(call("f", "{\"n\": 1}")));
  EXPECT_THAT(parse("<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>"),
              ElementsAre(call("f", "{\"n\": 1}")));
  EXPECT_THAT(parse("<tool_call>\n<function=f>\n<parameter=n>\n1\n</tool_call>\n<tool_call>\n<function=g>\n</"
                    "function>\n</tool_call>"),
              ElementsAre(call("f", "{\"n\": 1}"), call("g", "{}")));
}

// JSON calls with the slips that models make.
TEST(ReplyParserTest, RepairedJsonCalls) {
  // A closing tag inside a string is no end; a raw line break in a string is escaped.
  EXPECT_THAT(parse("<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"a </tool_call> b\"}}</tool_call>"),
              ElementsAre(call("f", "{\"s\": \"a </tool_call> b\"}")));
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"a\nb\"}}\n</tool_call>"),
              ElementsAre(call("f", "{\"s\": \"a\\nb\"}")));
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"arguments\": \"{\\\"s\\\": 1}\"}\n</tool_call>"),
              ElementsAre(call("f", "{\"s\": 1}")));
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"parameters\": {\"s\": 1}}\n</tool_call>"),
              ElementsAre(call("f", "{\"s\": 1}")));
  EXPECT_THAT(parse("<tool_call>\n{\"arguments\": null, \"name\": \"f\"}\n</tool_call>"), ElementsAre(call("f", "{}")));
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"arguments\": {}}}\n</tool_call>"), ElementsAre(call("f", "{}")));
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}\n</tool_call>"),
              ElementsAre(call("f", "{\"n\": 1}")));
  // The reply ends instead of the call: complete calls count, cut ones do not.
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n"),
              ElementsAre(call("f", "{\"n\": 1}")));
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1"),
              ElementsAre(text("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1")));
  EXPECT_THAT(
      parse(
          "<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>"),
      ElementsAre(call("f", "{}"), call("g", "{}")));
}

// What cannot be parsed comes out as it is, and what follows is not lost.
TEST(ReplyParserTest, DamagedCallsAreText) {
  const std::string good = "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
  for (const std::string damaged :
       {"<tool_call>\n{\"name\": }\n</tool_call>", "<tool_call>\n{\"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"\"}\n</tool_call>", "<tool_call>\n{\"name\": 5}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"x}}\n</tool_call>", "<tool_call> is the tag",
        "<tool_call>", "<tool_call>\n{]\n</tool_call>", "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\njunk\n</function>\n</tool_call>"}) {
    SCOPED_TRACE(damaged);
    EXPECT_THAT(parse(damaged), ElementsAre(text(damaged)));
    EXPECT_THAT(parse("Before.\n" + damaged), ElementsAre(text("Before.\n" + damaged)));
    EXPECT_THAT(parse(damaged + "\n" + good), ElementsAre(text(damaged), call("g", "{}")));
    EXPECT_THAT(parse(damaged + " after"), ElementsAre(text(damaged + " after")));
  }
  EXPECT_THAT(parse("a <b </tool_call> </think> c"), ElementsAre(text("a <b </tool_call> </think> c")));
  EXPECT_THAT(parse("half a <tool_ca"), ElementsAre(text("half a <tool_ca")));
}

// A call in a think block that never closes counts; in one that does it was only thought.
TEST(ReplyParserTest, CallsInsideReasoning) {
  const std::string tool = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
  EXPECT_THAT(parse("hmm\n" + tool, options(true)), ElementsAre(think("hmm"), call("f", "{}")));
  EXPECT_THAT(parse("<think>hmm\n" + tool + "\n"), ElementsAre(think("hmm"), call("f", "{}")));
  EXPECT_THAT(parse("hmm " + tool + " more", options(true)), ElementsAre(think("hmm"), call("f", "{}"), think("more")));
  EXPECT_THAT(parse("I could " + tool + "\n</think>\n\nNo.", options(true)),
              ElementsAre(think("I could " + tool), text("No.")));
  EXPECT_THAT(parse("I could " + tool + "\n</think>\n\n" + tool, options(true)),
              ElementsAre(think("I could " + tool), call("f", "{}")));
  EXPECT_THAT(parse("the <tool_call> tag", options(true)), ElementsAre(think("the <tool_call> tag")));
  EXPECT_THAT(parse("the <tool_call> {x", options(true)), ElementsAre(think("the <tool_call> {x")));
  EXPECT_THAT(parse("the <tool_call>", options(true)), ElementsAre(think("the <tool_call>")));
  EXPECT_THAT(parse("no end </thin", options(true)), ElementsAre(think("no end </thin")));
}

// Without tools or reasoning in the format, marks are text.
TEST(ReplyParserTest, FormatsCanBeOff) {
  ReplyParser::Options none = options();
  none.format = {false, ToolSyntax::kNone};
  const std::string reply = "<think>\nx\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n";
  EXPECT_THAT(parse(reply, none), ElementsAre(text(reply)));
  ReplyParser::Options reasoning = options();
  reasoning.format = {true, ToolSyntax::kNone};
  EXPECT_THAT(parse(reply, reasoning),
              ElementsAre(think("x"), text("<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n")));
}

// Text streams: what can be no mark is given out at once, and parts of marks never are.
TEST(ReplyParserTest, StreamsWithoutLeaking) {
  ReplyParser parser(options(true));
  EXPECT_THAT(parser.feed("I think"), ElementsAre(think("I think")));
  EXPECT_THAT(parser.feed(" so</thi"), ElementsAre(think(" so")));
  EXPECT_THAT(parser.feed("nk>\n\nYes"), ElementsAre(text("Yes")));
  EXPECT_THAT(parser.feed(" and <"), ElementsAre(text(" and")));
  EXPECT_THAT(parser.feed("b> no\n\n<tool"), ElementsAre(text(" <b> no")));
  EXPECT_THAT(parser.feed("_call>\n{\"name\": \"f\","), ElementsAre());
  EXPECT_THAT(parser.feed("\"arguments\": {}}\n</tool_call>"), ElementsAre(call("f", "{}")));
  EXPECT_THAT(parser.finish(), ElementsAre());
}

// The format is read off the template.
TEST(ReplyParserTest, DetectsFormat) {
  const ReplyFormat plain = detect_reply_format("{{ messages }}");
  EXPECT_FALSE(plain.reasoning);
  EXPECT_EQ(plain.tools, ToolSyntax::kNone);
  const ReplyFormat qwen = detect_reply_format("<think>\n\n</think> <tool_call>\n{\"name\":");
  EXPECT_TRUE(qwen.reasoning);
  EXPECT_EQ(qwen.tools, ToolSyntax::kTagged);
  EXPECT_EQ(detect_reply_format("<tool_call>{{ n }}<arg_key>").tools, ToolSyntax::kArgumentKeys);
  EXPECT_EQ(detect_reply_format("<tool_call> <｜DSML｜invoke").tools, ToolSyntax::kDsml);
  EXPECT_TRUE(ends_in_reasoning("<|im_start|>assistant\n<think>\n"));
  EXPECT_FALSE(ends_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  EXPECT_FALSE(ends_in_reasoning(""));
}

// Replies made to be slow are not.
TEST(ReplyParserTest, HostileRepliesAreLinear) {
  const auto repeated = [](const std::string& s, size_t n) {
    std::string out;
    for (size_t i = 0; i < n; ++i) out += s;
    return out;
  };
  for (const std::string& unit : {std::string("<tool_call>{\""),
                                  std::string("<tool_call>{\"</tool_call>"),
                                  std::string("<tool_call><function=f></tool_call>"),
                                  std::string("</tool_call>"),
                                  std::string("<tool_call>\n<function=f><parameter=s></parameter>"),
                                  std::string("<think>"),
                                  std::string("<tool_call>{ "),
                                  std::string(" \n"),
                                  std::string("<"),
                                  std::string("["),
                                  std::string("<arg_key>k</arg_key><arg_value>v"),
                                  std::string("<arg_value></arg_value>"),
                                  std::string("<tool_call>f<arg_key>"),
                                  std::string("<tool_call>f\n</tool_call>"),
                                  std::string("<｜DSML｜calls>"),
                                  std::string("<｜DSML｜invoke name=\"f\">"),
                                  std::string("<｜DSML｜parameter name=\"k\">v"),
                                  std::string("</｜DSML｜parameter>"),
                                  std::string("</｜DSML｜invoke>"),
                                  std::string("</｜DSML｜calls>")}) {
    for (const auto& [syntax, reply] : std::vector<std::pair<ToolSyntax, std::string>>{
             {ToolSyntax::kTagged, repeated(unit, 20000)},
             {ToolSyntax::kTagged, "<tool_call>\n<function=f>\n<parameter=s>" + repeated(unit, 20000)},
             {ToolSyntax::kArgumentKeys, "<tool_call>f\n<arg_key>" + repeated(unit, 20000)},
             {ToolSyntax::kDsml, repeated(unit, 20000)},
             {ToolSyntax::kDsml, "<｜DSML｜calls>\n<｜DSML｜invoke name=\"f\">" + repeated(unit, 20000)}}) {
      SCOPED_TRACE(unit);
      const auto begin = std::chrono::steady_clock::now();
      ReplyParser parser(options(false, syntax));
      std::vector<ReplyEvent> all;
      for (size_t at = 0; at < reply.size(); at += 4096)
        merge(&all, parser.feed(std::string_view(reply).substr(at, 4096)));
      merge(&all, parser.finish());
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    }
  }
}

}  // namespace
}  // namespace tensorfold
