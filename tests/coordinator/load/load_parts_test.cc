// The arithmetic and the reading behind a load: percentiles, arrivals, events, conversations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "coordinator/load/arrivals.h"
#include "coordinator/load/conversation.h"
#include "coordinator/load/malformed.h"
#include "coordinator/load/samples.h"
#include "coordinator/load/sse_reader.h"
#include "coordinator/load/streamed_reply.h"

namespace tensorfold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Percentiles are nearest ranks: one of the values, and not the one beside it.
TEST(Samples, NearestRank) {
  std::vector<double> values(100);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>((i * 37) % 100 + 1);  // 1 to 100, mixed
  EXPECT_EQ(percentile(values, 0.5), 50);
  EXPECT_EQ(percentile(values, 0.9), 90);
  EXPECT_EQ(percentile(values, 0.99), 99);
  EXPECT_EQ(percentile(values, 0.991), 100);
  EXPECT_EQ(percentile(values, 1), 100);
  EXPECT_EQ(percentile(values, 0.001), 1);
  std::vector<double> ten = {5, 3, 1, 9, 7, 2, 4, 6, 8, 10};
  EXPECT_EQ(percentile(ten, 0.5), 5);
  EXPECT_EQ(percentile(ten, 0.99), 10);
  std::vector<double> one = {4};
  EXPECT_EQ(percentile(one, 0.01), 4);
}

// A summary has count, mean, percentiles and the largest; of nothing all is zero.
TEST(Samples, Summary) {
  Samples samples;
  EXPECT_EQ(samples.summary().count, 0u);
  EXPECT_EQ(samples.summary().p99, 0);
  for (const double value : {4.0, 1.0, 3.0, 2.0}) samples.add(value);
  const SampleSummary summary = samples.summary();
  EXPECT_EQ(summary.count, 4u);
  EXPECT_EQ(summary.mean, 2.5);
  EXPECT_EQ(summary.p50, 2);
  EXPECT_EQ(summary.p90, 4);
  EXPECT_EQ(summary.max, 4);
}

// Past its memory a summary stays exact in count, mean and largest, and its percentiles are of a fair sample: the first
// values are not preferred.
TEST(Samples, BoundedMemory) {
  Samples samples(2000);
  for (int i = 1; i <= 100000; ++i) samples.add(i);
  const SampleSummary summary = samples.summary();
  EXPECT_EQ(summary.count, 100000u);
  EXPECT_EQ(summary.mean, 50000.5);
  EXPECT_EQ(summary.max, 100000);
  EXPECT_NEAR(summary.p50, 50000, 4000);
  EXPECT_NEAR(summary.p90, 90000, 3000);
}

// The same seed gives the same arrivals; another seed others.
TEST(Arrivals, Repeat) {
  PoissonArrivals first(3, 7), again(3, 7), other(3, 8);
  for (int i = 0; i < 100; ++i) {
    const double at = first.next();
    EXPECT_EQ(at, again.next());
    EXPECT_NE(at, other.next());
  }
}

// Arrivals come at the rate asked for, and their waiting times are exponential, not even: that is what makes bursts.
TEST(Arrivals, Poisson) {
  constexpr int kCount = 200000;
  constexpr double kRate = 5;
  PoissonArrivals arrivals(kRate, 1);
  double last = 0, squares = 0;
  int longer = 0;
  for (int i = 0; i < kCount; ++i) {
    const double at = arrivals.next();
    const double gap = at - last;
    ASSERT_GE(gap, 0);
    squares += gap * gap;
    longer += gap > 1 / kRate ? 1 : 0;
    last = at;
  }
  EXPECT_NEAR(kCount / last, kRate, 0.05);
  EXPECT_NEAR(squares / kCount, 2 / (kRate * kRate), 0.002);               // E[X²] of an exponential
  EXPECT_NEAR(static_cast<double>(longer) / kCount, std::exp(-1), 0.005);  // P[X > mean]
}

std::vector<std::string> events_of(const std::vector<std::string_view>& pieces, SseReader* reader) {
  std::vector<std::string> out;
  for (const std::string_view piece : pieces) EXPECT_TRUE(reader->feed(piece, &out).ok());
  return out;
}

const std::string kStream =
    "\xEF\xBB\xBF"
    ": waiting\n\nevent: x\r\ndata: one\r\n\r\ndata:two\ndata:  three\n\nid: 7\n\ndata\n\rdata: \xFF\x01" +
    std::string(1, '\0') + "\r\r: end\n\n";

// Events come out the same wherever the bytes are cut, with every kind of line end, comments and other fields, a byte
// order mark, bytes that are no text.
TEST(SseReader, AnyCut) {
  const std::vector<std::string> expected = {"one", "two\n three", "", "\xFF\x01" + std::string(1, '\0')};
  for (size_t cut = 0; cut <= kStream.size(); ++cut) {
    SseReader reader;
    const std::string_view all = kStream;
    EXPECT_EQ(events_of({all.substr(0, cut), all.substr(cut)}, &reader), expected) << cut;
    EXPECT_TRUE(reader.between_events());
  }
  SseReader reader;
  std::vector<std::string_view> bytes;
  for (size_t i = 0; i < kStream.size(); ++i) bytes.push_back(std::string_view(kStream).substr(i, 1));
  EXPECT_EQ(events_of(bytes, &reader), expected);
}

// A stream that ends inside an event is not taken for whole.
TEST(SseReader, Unfinished) {
  for (const char* text : {"data: x\n", "data", ": c"}) {
    SseReader reader;
    EXPECT_TRUE(events_of({text}, &reader).empty());
    EXPECT_FALSE(reader.between_events()) << text;
  }
}

// A server cannot make the client hold more than the limit, in one line or in many, and what follows is not read.
TEST(SseReader, Limit) {
  std::vector<std::string> out;
  SseReader line(100);
  EXPECT_FALSE(line.feed("data: " + std::string(100, 'x'), &out).ok());
  EXPECT_FALSE(line.feed("\n\ndata: y\n\n", &out).ok());
  SseReader lines(100);
  absl::Status status;
  int fed = 0;
  while (status.ok() && fed < 1000) {
    status = lines.feed("data: 0123456789\n", &out);
    ++fed;
  }
  EXPECT_LT(fed, 12);
  EXPECT_TRUE(out.empty());
  SseReader comments(100);  // which are dropped at once
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(comments.feed(": 0123456789\n\n", &out).ok());
}

// A reply is put together from its events, and only those that show something say so.
TEST(StreamedReply, Whole) {
  StreamedReply reply;
  const auto take = [&](std::string_view event) { return take_event(event, &reply).value(); };
  EXPECT_FALSE(take(R"({"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]})"));
  EXPECT_TRUE(take(R"({"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]})"));
  EXPECT_TRUE(take(R"({"choices":[{"index":0,"delta":{"reasoning_content":"b"}}]})"));
  EXPECT_TRUE(
      take(R"({"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{"}}]}}]})"));
  EXPECT_TRUE(take(R"({"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}}]})"));
  EXPECT_FALSE(take(
      R"({"choices":[{"delta":{},"finish_reason":"stop"}],"tensorfold":{"token_sha":"ab","drafted":9,"accepted":4,"cached":2,"rounds":3}})"));
  EXPECT_FALSE(take(R"({"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}})"));
  EXPECT_FALSE(reply.complete());
  EXPECT_FALSE(take("[DONE]"));
  EXPECT_TRUE(reply.complete());
  EXPECT_EQ(reply.content + reply.reasoning, "ab");
  ASSERT_EQ(reply.calls.size(), 1u);
  EXPECT_EQ(reply.calls[0].name + reply.calls[0].arguments, "f{}");
  EXPECT_EQ(reply.token_sha, "ab");
  EXPECT_EQ(reply.drafted * 1000 + reply.accepted * 100 + reply.cached * 10 + reply.rounds, 9423u);
  EXPECT_EQ(reply.prompt_tokens * 10 + reply.completion_tokens, 75u);
  EXPECT_FALSE(take_event("{}", &reply).ok());  // after the end
}

// Whatever a server sends is an error or a reply, never a crash: no JSON, wrong types, indexes out of range, depth.
TEST(StreamedReply, Hostile) {
  for (const std::string& event :
       {std::string(""), std::string("\xFF\xFE"), std::string("[]"), std::string("7"), std::string("{\"choices\":7}"),
        std::string("{\"choices\":[7]}"), std::string("{\"choices\":[{\"delta\":[]}]}"),
        std::string("{\"choices\":[{\"delta\":{\"content\":{}}}]}"),
        std::string("{\"choices\":[{\"delta\":{\"tool_calls\":[3]}}]}"),
        std::string("{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":1}]}}]}"),
        std::string("{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":-1}]}}]}"),
        std::string("{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":1e300}]}}]}"),
        std::string("{\"usage\":{\"prompt_tokens\":-1}}"), std::string("{\"usage\":{\"prompt_tokens\":0.5}}"),
        std::string("{\"tensorfold\":{\"token_sha\":5}}"), std::string(100, '[')}) {
    StreamedReply reply;
    EXPECT_FALSE(take_event(event, &reply).ok()) << event;
  }
  StreamedReply reply;
  const std::string piece = R"({"choices":[{"delta":{"content":")" + std::string(1 << 20, 'x') + R"("}}]})";
  absl::Status status;
  for (int i = 0; i < 20 && status.ok(); ++i) status = take_event(piece, &reply).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("longer than"));
  EXPECT_LE(reply.content.size(), kMaxReplyBytes);
}

// Errors are shown by code and message, whatever their body is.
TEST(StreamedReply, ErrorText) {
  EXPECT_EQ(error_text(R"({"error":{"message":"too\nlong","code":"x"}})"), "x: too long");
  EXPECT_EQ(error_text("<html>"), "<html>");
  EXPECT_EQ(error_code_of("{\"error\":5}"), "");
  EXPECT_LE(error_text(std::string(1 << 20, 'y')).size(), 300u);
}

ConversationOptions options_of(LoadMix mix) {
  ConversationOptions options;
  options.mix = mix;
  options.prompt_tokens = 200;
  options.prefix_tokens = 100;
  return options;
}

// A conversation depends on seed and index alone, and no two prompts of a run are equal: equal ones would be answered
// from a cache.
TEST(Conversation, DistinctAndRepeated) {
  for (const LoadMix mix : {LoadMix::kChat, LoadMix::kLongPrompt, LoadMix::kSharedPrefix, LoadMix::kAgent}) {
    const ConversationOptions options = options_of(mix);
    std::map<std::string, int> seen;
    for (uint64_t i = 0; i < 300; ++i) {
      const std::string body = Conversation(options, i).body();
      EXPECT_EQ(body, Conversation(options, i).body());
      ++seen[body];
    }
    // Short questions of a chat may meet by chance; long ones never.
    EXPECT_GE(seen.size(), mix == LoadMix::kChat || mix == LoadMix::kSharedPrefix ? 295u : 300u) << load_mix_name(mix);
    ConversationOptions other = options;
    other.seed = 2;
    EXPECT_NE(Conversation(options, 0).body(), Conversation(other, 0).body());
  }
}

// A shared prefix is shared by groups, and what follows it is not.
TEST(Conversation, SharedPrefix) {
  const ConversationOptions options = options_of(LoadMix::kSharedPrefix);
  std::set<std::string> prefixes;
  for (uint64_t i = 0; i < 100; ++i) {
    const boost::json::value body = boost::json::parse(Conversation(options, i).body());
    prefixes.insert(body.at("messages").at(0).at("content").as_string().c_str());
  }
  EXPECT_EQ(prefixes.size(), 4u);
}

// A mixed load has all sorts.
TEST(Conversation, Mixed) {
  const ConversationOptions options = options_of(LoadMix::kMixed);
  std::set<LoadMix> kinds;
  for (uint64_t i = 0; i < 100; ++i) kinds.insert(Conversation(options, i).kind());
  EXPECT_EQ(kinds.size(), 4u);
}

// A share of the conversations is background work, and says so in every request.
TEST(Conversation, Background) {
  ConversationOptions options = options_of(LoadMix::kChat);
  options.background = 0.3;
  int background = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    const Conversation talk(options, i);
    background += talk.background() ? 1 : 0;
    EXPECT_EQ(talk.background(), talk.body().find("\"priority\":\"background\"") != std::string::npos);
  }
  EXPECT_NEAR(background, 300, 60);
}

// An agent resends its history with the reply and a result for each call, under ids of its own: the server's differ
// from run to run.
TEST(Conversation, AgentLoop) {
  const ConversationOptions options = options_of(LoadMix::kAgent);
  Conversation talk(options, 3);
  StreamedReply reply;
  reply.content = "looking";
  reply.calls = {{"find_file", "{\"word\":\"x\"}"}, {"read_file", "{}"}};
  talk.take(reply);
  boost::json::value body = boost::json::parse(talk.body());
  ASSERT_EQ(body.at("messages").as_array().size(), 5u);
  EXPECT_EQ(body.at("messages").at(2).at("tool_calls").at(1).at("id"), "call_0_1");
  EXPECT_EQ(body.at("messages").at(3).at("role"), "tool");
  EXPECT_EQ(body.at("messages").at(4).at("tool_call_id"), "call_0_1");
  EXPECT_EQ(body.at("tools").as_array().size(), 3u);
  reply.calls.clear();
  talk.take(reply);
  body = boost::json::parse(talk.body(/*serial=*/true));
  EXPECT_EQ(body.at("messages").as_array().back().at("role"), "user");
  EXPECT_EQ(body.at("draft"), false);
  EXPECT_EQ(body.at("cache"), false);
  while (!talk.done()) talk.take(reply);
  EXPECT_GE(talk.turn(), 3);
}

// Every kind of malformed request comes, the same for the same seed.
TEST(Malformed, AllKinds) {
  LoadOptions options;
  options.conversation.overlong_tokens = 100;
  std::set<MalformedKind> kinds;
  for (uint64_t i = 0; i < 200; ++i) {
    const MalformedRequest made = malformed_request(options, i);
    EXPECT_EQ(made.bytes, malformed_request(options, i).bytes);
    kinds.insert(made.kind);
  }
  EXPECT_EQ(kinds.size(), kMalformedKinds);
}

// What a user may get wrong is named by its option.
TEST(LoadOptions, Validate) {
  const auto message = [](auto change) {
    LoadOptions options;
    change(options);
    return std::string(options.validate().message());
  };
  EXPECT_EQ(message([](LoadOptions&) {}), "");
  EXPECT_THAT(message([](LoadOptions& o) { o.concurrency = {0}; }), HasSubstr("--concurrency"));
  EXPECT_THAT(message([](LoadOptions& o) { o.rates = {-1}; }), HasSubstr("--rate"));
  EXPECT_THAT(message([](LoadOptions& o) { o.rates = {std::nan("")}; }), HasSubstr("--rate"));
  EXPECT_THAT(message([](LoadOptions& o) { o.disconnect = 1.5; }), HasSubstr("--disconnect"));
  EXPECT_THAT(message([](LoadOptions& o) { o.url.tls = true; }), HasSubstr("https"));
  EXPECT_FALSE(parse_load_mix("chats").ok());
}

}  // namespace
}  // namespace tensorfold
