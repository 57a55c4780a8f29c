// Loads on servers: the real one over a scripted model, and servers that do everything wrong.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <sstream>

#include "coordinator/http/server.h"
#include "coordinator/load/check.h"
#include "coordinator/load/load.h"
#include "coordinator/load/report.h"
#include "tests/coordinator/http/serving_fixture.h"
#include "tests/coordinator/load/scripted_server.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

LoadOptions options_for(uint16_t port) {
  LoadOptions options;
  options.url.host = "127.0.0.1";
  options.url.port = port;
  options.concurrency = {3};
  options.conversations = 12;
  options.conversation.prompt_tokens = 100;
  options.conversation.prefix_tokens = 60;
  options.conversation.reply_tokens = 20;
  return options;
}

absl::StatusOr<LoadReport> load(const LoadOptions& options) {
  const absl::StatusOr<LoadServer> server = find_server(options);
  if (!server.ok()) return server.status();
  return run_load(options, *server, nullptr);
}

class RealServer {
 public:
  explicit RealServer(ServingOptions options = {}) : serving(std::move(options)) {
    auto started = HttpServer::start({}, *serving.service, serving.metrics);
    if (!started.ok()) throw std::runtime_error(std::string(started.status().message()));
    http = *std::move(started);
  }
  Serving serving;
  std::unique_ptr<HttpServer> http;
};

// Closed loop, all sorts of conversations: every request is answered and counted, and a serial run gives the same
// hashes.
TEST(LoadServer, ClosedLoop) {
  RealServer server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(1));  // rates want a run that takes a while
  LoadOptions options = options_for(server.http->port());
  options.conversation.mix = LoadMix::kMixed;
  options.concurrency = {1, 4};
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->levels.size(), 2u);
  for (const LevelFigures& level : report->levels) {
    EXPECT_EQ(level.conversations, 12u);
    EXPECT_GE(level.requests, 12u);
    EXPECT_EQ(level.completed, level.requests);
    EXPECT_EQ(level.error_count(), 0u);
    EXPECT_EQ(level.ttft_s.count, level.completed);
    EXPECT_EQ(level.reply_tokens, 20 * level.completed);  // this model never ends
    EXPECT_GT(level.reply_tokens_per_s, 0);
    EXPECT_GT(level.total_tokens_per_s, level.reply_tokens_per_s);
  }
  const auto check = check_load(*report, nullptr);
  ASSERT_TRUE(check.ok()) << check.status();
  EXPECT_EQ(check->compared, report->levels[0].completed + report->levels[1].completed);
  EXPECT_EQ(check->different, 0u);
}

// Background work is counted apart: nobody waits for it.
TEST(LoadServer, Background) {
  RealServer server;
  LoadOptions options = options_for(server.http->port());
  options.conversations = 40;
  options.conversation.background = 0.5;
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  const LevelFigures& level = report->levels[0];
  EXPECT_EQ(level.error_count(), 0u);
  EXPECT_GT(level.background, 5u);
  EXPECT_EQ(level.background_ttft_s.count, level.background);
  EXPECT_EQ(level.ttft_s.count + level.background, level.completed);
  EXPECT_LE(level.good, level.ttft_s.count);
}

// Open loop: so many conversations begin whatever the server does, and their lateness is told.
TEST(LoadServer, OpenLoop) {
  RealServer server;
  LoadOptions options = options_for(server.http->port());
  options.rates = {200};
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->levels[0].conversations, 12u);
  EXPECT_EQ(report->levels[0].late_s.count, 12u);
  EXPECT_EQ(report->levels[0].completed, report->levels[0].requests);
}

// By time: it begins, goes on for as long as asked, and ends.
TEST(LoadServer, Duration) {
  RealServer server;
  LoadOptions options = options_for(server.http->port());
  options.conversations = 0;
  options.duration = std::chrono::milliseconds(300);
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->levels[0].completed, 3u);
  EXPECT_GE(report->levels[0].wall_s, 0.3);
}

// The negative control: a server whose model changes one token of one reply after the load is caught.
TEST(LoadServer, CheckCatchesOneToken) {
  RealServer server;
  server.serving.script("The answer is forty two.");
  LoadOptions options = options_for(server.http->port());
  options.concurrency = {1};
  options.conversations = 2;
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  auto check = check_load(*report, nullptr);
  ASSERT_TRUE(check.ok()) << check.status();
  EXPECT_EQ(check->different, 0u);
  server.serving.script("The answer is forty six.");
  check = check_load(*report, nullptr);
  ASSERT_TRUE(check.ok()) << check.status();
  EXPECT_EQ(check->different, 2u);
  ASSERT_EQ(check->first.size(), 2u);
  EXPECT_NE(check->first[0].loaded, check->first[0].serial);
}

// The same with a server that is wrong only under load, in one of its replies: that one is named.
TEST(LoadServer, CheckNamesTheReply) {
  ScriptedServer server([](const std::string& body, int number) -> ScriptedServer::Answer {
    const bool serial = body.find("\"draft\":false") != std::string::npos;
    std::vector<uint32_t> ids = {1, 2, 3, 4, 5};
    if (!serial && number == 7) ids[3] = 9;
    return {streamed_response(ids)};
  });
  LoadOptions options = options_for(server.port());
  options.conversation.mix = LoadMix::kLongPrompt;
  options.concurrency = {1};
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  const auto check = check_load(*report, nullptr);
  ASSERT_TRUE(check.ok()) << check.status();
  EXPECT_EQ(check->compared, 12u);
  ASSERT_EQ(check->different, 1u);
  EXPECT_EQ(check->first[0].conversation, 7u);
  std::ostringstream table;
  print_load(*report, *check, table);
  EXPECT_THAT(table.str(), HasSubstr("DIFFERENT: conversation 7, turn 0"));
  const boost::json::value json = boost::json::parse(load_json(*report, *check));
  EXPECT_EQ(json.at("check").at("different").to_number<int>(), 1);
  EXPECT_EQ(json.at("levels").at(0).at("completed").to_number<int>(), 12);
  EXPECT_GT(json.at("levels").at(0).at("ttft_s").at("p99").to_number<double>(), 0);
}

// Replies without hashes are not taken for equal ones.
TEST(LoadServer, CheckNeedsHashes) {
  ScriptedServer server([](const std::string&, int) -> ScriptedServer::Answer {
    return {stream_head_text() + R"(data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]})" +
                "\n\ndata: [DONE]\n\n",
            true};
  });
  const auto report = load(options_for(server.port()));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->levels[0].error_count(), 0u);
  EXPECT_EQ(std::string(check_load(*report, nullptr).status().message()).find("the server's replies have no"), 0u);
}

// Clients that leave, queued, reading or decoding, are counted apart, and the server has nothing left afterwards.
TEST(LoadServer, Disconnects) {
  ServingOptions serving;
  serving.engine.max_sequences = 2;
  RealServer server(serving);
  server.serving.model->set_pass_time(std::chrono::milliseconds(2));
  LoadOptions options = options_for(server.http->port());
  options.conversations = 40;
  options.concurrency = {8};
  options.disconnect = 0.6;
  options.conversation.reply_tokens = 60;
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  const LevelFigures& level = report->levels[0];
  EXPECT_GT(level.left, 5u);
  EXPECT_GT(level.completed, 5u);
  EXPECT_EQ(level.left + level.completed, level.requests);
  EXPECT_TRUE(server.serving.wait_for_load(0, 0));
}

// The real server refuses every malformed request; the connection limit and the engine see nothing of them.
TEST(LoadServer, MalformedAreRefused) {
  RealServer server;
  LoadOptions options = options_for(server.http->port());
  options.conversations = 60;
  options.malformed = 1;
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  for (const auto& [kind, error] : report->levels[0].errors) ADD_FAILURE() << kind << ": " << error.example;
  EXPECT_EQ(report->levels[0].refused, 60u);
  EXPECT_EQ(server.serving.engine->status().requests, 0u);
}

// A server that takes them is told of.
TEST(LoadServer, MalformedThatAreTaken) {
  ScriptedServer server([](const std::string&, int) -> ScriptedServer::Answer {
    return {streamed_response({1, 2}), true};
  });
  LoadOptions options = options_for(server.port());
  options.malformed = 1;
  const auto report = load(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->levels[0].error_count(), 0u);
  EXPECT_THAT(report->levels[0].errors.begin()->first, HasSubstr("malformed request not refused"));
}

struct Wrong {
  const char* kind;
  ScriptedServer::Answer answer;
};

std::vector<Wrong> wrong_answers() {
  const std::string event = R"(data: {"choices":[{"index":0,"delta":{"content":"x"}}]})";
  const std::string end = R"(data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]})";
  const std::string chunked =
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
  return {
      {"status 429 queue_full", {plain_response(429, R"({"error":{"code":"queue_full","message":"full"}})")}},
      {"status 500", {plain_response(500, "oops")}},
      {"disconnected", {"", true}},
      {"disconnected", {chunked + "5\r\ndat", true}},
      {"disconnected", {"HTTP/1.1 200 OK\r\nContent-", true}},
      {"broken reply", {"220 mail.example\r\n\r\n", true}},
      {"broken reply", {chunked + "zz\r\n", true}},
      {"broken reply", {stream_head_text() + event + "\n\n", true}},
      {"broken reply", {stream_head_text() + event + "\n\n" + end, true}},
      {"broken reply", {stream_head_text() + "data: {\"choices\":\n\n", true}},
      {"broken reply", {stream_head_text() + "data: \xFF\xFF\n\n", true}},
      {"broken reply", {stream_head_text() + event + "\n\ndata: [DONE]\n\n", true}},
      {"broken reply", {stream_head_text() + std::string(5 << 20, 'x'), true}},
      {"broken reply", {plain_response(400, std::string(2 << 20, 'x')), true}},
      {"error in the stream: timeout",
       {stream_head_text() + "data: {\"error\":{\"code\":\"timeout\",\"message\":\"m\"}}\n\ndata: [DONE]\n\n", true}},
      {"timeout", {"", false, true}},
      {"timeout", {stream_head_text() + event + "\n\n", false, true}},
  };
}

// Whatever a server answers, the request ends, and is counted under what happened.
TEST(LoadServer, ErrorsByKind) {
  for (const Wrong& wrong : wrong_answers()) {
    ScriptedServer server([&](const std::string&, int) { return wrong.answer; });
    LoadOptions options = options_for(server.port());
    options.concurrency = {2};
    options.conversations = 2;
    options.idle_timeout = std::chrono::milliseconds(300);
    const auto report = load(options);
    ASSERT_TRUE(report.ok()) << report.status();
    const LevelFigures& level = report->levels[0];
    ASSERT_EQ(level.errors.size(), 1u) << wrong.kind;
    EXPECT_EQ(level.errors.begin()->first, wrong.kind) << level.errors.begin()->second.example;
    EXPECT_EQ(level.error_count(), 2u);
    EXPECT_EQ(level.completed, 0u);
  }
}

// A kept connection that the server has closed meanwhile is no error: the request goes over another one.
TEST(LoadServer, KeptConnectionGoesStale) {
  ScriptedServer server([](const std::string&, int) -> ScriptedServer::Answer {
    return {streamed_response({1, 2, 3}), true};  // says keep-alive by its version, and closes all the same
  });
  const auto report = load(options_for(server.port()));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->levels[0].error_count(), 0u);
  EXPECT_EQ(report->levels[0].completed, report->levels[0].requests);
}

// A server that goes away in the middle ends the load with an error that says so, in finite time.
TEST(LoadServer, GoesAway) {
  ScriptedServer* running = nullptr;
  ScriptedServer server([&running](const std::string&, int number) -> ScriptedServer::Answer {
    if (number == 20) running->go_away();
    return {streamed_response({1, 2, 3})};
  });
  running = &server;
  LoadOptions options = options_for(server.port());
  options.conversations = 0;
  options.concurrency = {32};
  options.duration = std::chrono::seconds(60);
  const auto report = load(options);
  ASSERT_FALSE(report.ok());
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("the server went away"));
}

// What can be wrong before a load begins is said in the user's terms.
TEST(LoadServer, NotFound) {
  const auto message = [](const LoadOptions& options) { return std::string(find_server(options).status().message()); };
  {
    ScriptedServer gone([](const std::string&, int) -> ScriptedServer::Answer { return {}; });
    LoadOptions options = options_for(gone.port());
    EXPECT_EQ(message(options), "");
    options.conversation.model = "other";
    EXPECT_THAT(message(options), HasSubstr("serves no model other; it serves scripted"));
    options.conversation.model = "scripted";
    options.conversation.mix = LoadMix::kLongPrompt;
    options.conversation.prompt_tokens = 8190;
    EXPECT_THAT(message(options), HasSubstr("--prompt-tokens 8190 does not fit the context of 8192"));
    gone.go_away();
    EXPECT_THAT(message(options), HasSubstr("is the server running"));
  }
  ServingOptions starting;
  starting.service.readiness = [] {
    Readiness readiness;
    readiness.ready = false;
    readiness.reason = "waiting for rank 1 (missing)";
    return readiness;
  };
  RealServer server(starting);
  EXPECT_THAT(message(options_for(server.http->port())), HasSubstr("is not ready: waiting for rank 1 (missing)"));
  ServingOptions keys;
  keys.service.api_key_hashes = {std::string(64, 'a')};
  RealServer closed(keys);
  EXPECT_THAT(message(options_for(closed.http->port())), HasSubstr("--api-key-file"));
}

}  // namespace
}  // namespace tensorfold
