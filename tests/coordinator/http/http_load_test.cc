// Under load: clients that leave, full queues, lost ranks, slow readers, many connections, shutting down.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <boost/json.hpp>
#include <future>
#include <thread>

#include "coordinator/http/server.h"
#include "tests/coordinator/http/raw_client.h"
#include "tests/coordinator/http/serving_fixture.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

ServingOptions small_engine() {
  ServingOptions options;
  options.engine.max_sequences = 1;
  options.engine.queue_limit = 1;
  options.engine.draft = DraftKind::kNone;
  return options;
}

struct Server {
  explicit Server(ServingOptions serving_options = small_engine(), HttpOptions options = {})
      : serving(std::move(serving_options)) {
    auto started = HttpServer::start(std::move(options), *serving.service, serving.metrics);
    if (!started.ok()) throw std::runtime_error(std::string(started.status().message()));
    http = *std::move(started);
    port = http->port();
  }
  Serving serving;
  std::unique_ptr<HttpServer> http;
  uint16_t port = 0;
};

const std::string kEndless = R"({"prompt":"go","max_tokens":2000,"ignore_eos":true})";
const std::string kEndlessStream = R"({"prompt":"go","max_tokens":2000,"ignore_eos":true,"stream":true})";

bool wait_for_background(const Serving& serving, int sequences) {
  for (int i = 0; i < 500; ++i) {
    if (serving.engine->status().active_background == sequences) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

// Protects: a request is background by its own field, by its key or by the name it asks for, and nothing else is;
// another word is refused.
TEST(HttpLoad, PriorityByFieldKeyAndName) {
  ServingOptions options = small_engine();
  options.service.names = {"sprout", "batch"};
  options.service.background_names = {"batch"};
  options.service.background_key_hashes = {
      "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"};  // of "key"
  Server server(std::move(options));
  server.serving.model->set_pass_time(std::chrono::milliseconds(2));
  const std::string rest = R"("prompt":"go","max_tokens":2000,"ignore_eos":true})";
  const std::vector<std::pair<std::string, int>> cases = {
      {post_text("/v1/completions", "{" + rest), 0},
      {post_text("/v1/completions", R"({"priority":"foreground",)" + rest), 0},
      {post_text("/v1/completions", R"({"priority":"background",)" + rest), 1},
      {post_text("/v1/completions", R"({"model":"batch","priority":"foreground",)" + rest), 1},
      {post_text("/v1/completions", "{" + rest, "Authorization: Bearer key\r\n"), 1},
      {post_text("/v1/completions", "{" + rest, "Authorization: Bearer other\r\n"), 0},
  };
  for (const auto& [text, background] : cases) {
    RawClient client(server.port);
    client.send(text);
    ASSERT_TRUE(server.serving.wait_for_load(1, 0)) << text;
    EXPECT_TRUE(wait_for_background(server.serving, background)) << text;
    client.close();
    ASSERT_TRUE(server.serving.wait_for_load(0, 0));
  }
  const RawReply refused = post(server.port, "/v1/completions", R"({"prompt":"go","priority":"urgent"})");
  EXPECT_EQ(refused.status, 400);
  EXPECT_THAT(refused.body, HasSubstr("priority"));
}

// Protects: a background stream that gives its lane up stays open, and goes on and ends whole once there is room.
TEST(HttpLoad, BackgroundStreamsGoOn) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(2));
  RawClient background(server.port);
  background.send(post_text(
      "/v1/completions", R"({"prompt":"go","max_tokens":60,"ignore_eos":true,"stream":true,"priority":"background"})"));
  ASSERT_TRUE(wait_for_background(server.serving, 1));
  const RawReply foreground =
      post(server.port, "/v1/completions", R"({"prompt":"go","max_tokens":5,"ignore_eos":true})");
  EXPECT_EQ(foreground.status, 200);
  EXPECT_EQ(server.serving.engine->status().preempted, 1u);
  const RawReply whole = background.read_reply();
  EXPECT_EQ(whole.status, 200);
  EXPECT_THAT(whole.body, HasSubstr("[DONE]"));
  EXPECT_THAT(whole.body, HasSubstr("\"finish_reason\":\"length\""));
}

// A client that leaves frees its place at once: running or queued, streaming or not, by FIN or by reset.
TEST(HttpLoad, DisconnectFreesTheSlot) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  for (const std::string& body : {kEndless, kEndlessStream}) {
    for (const bool hard : {false, true}) {
      RawClient running(server.port);
      running.send(post_text("/v1/completions", body));
      ASSERT_TRUE(server.serving.wait_for_load(1, 0));
      RawClient queued(server.port);
      queued.send(post_text("/v1/completions", body));
      ASSERT_TRUE(server.serving.wait_for_load(1, 1));
      hard ? queued.reset() : queued.close();
      ASSERT_TRUE(server.serving.wait_for_load(1, 0));
      hard ? running.reset() : running.close();
      ASSERT_TRUE(server.serving.wait_for_load(0, 0));
    }
  }
  EXPECT_EQ(server.serving.engine->status().cancelled, 8u);
}

// Clients that leave as soon as they have their reply are gone for the server at once. The end of a client's half is
// told only once: where it comes before the reply's write is seen to have ended, forgetting it held the connection for
// the idle time. Which comes first is chance, hence the number of clients.
TEST(HttpLoad, LeavingWithTheReplyHoldsNothing) {
  Server server;
  std::vector<std::thread> users;
  for (int user = 0; user < 8; ++user) {
    users.emplace_back([port = server.port] {
      for (int i = 0; i < 300; ++i) {
        EXPECT_EQ(post(port, "/v1/completions", R"({"prompt":"go","max_tokens":"many"})").status, 400);
      }
    });
  }
  for (std::thread& user : users) user.join();
  int open = -1;
  for (int i = 0; i < 200 && open != 1; ++i) {  // this connection
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::string text = get(server.port, "/metrics").body;
    const std::string name = "\ntensorfold_http_connections ";
    open = std::atoi(text.c_str() + text.find(name) + name.size());
  }
  EXPECT_EQ(open, 1);
}

// A full queue is 429 with Retry-After before any header of a stream; the connection goes on.
TEST(HttpLoad, FullQueue) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  RawClient first(server.port), second(server.port), third(server.port);
  first.send(post_text("/v1/completions", kEndlessStream));
  ASSERT_TRUE(server.serving.wait_for_load(1, 0));
  second.send(post_text("/v1/completions", kEndlessStream));
  ASSERT_TRUE(server.serving.wait_for_load(1, 1));
  for (int i = 0; i < 2; ++i) {
    third.send(post_text("/v1/completions", kEndlessStream));
    RawReply reply = third.read_reply();
    EXPECT_EQ(reply.status, 429);
    EXPECT_EQ(reply.headers["retry-after"], "1");
    EXPECT_EQ(reply.headers["content-type"], "application/json");
    EXPECT_THAT(reply.body, HasSubstr("queue_full"));
  }
  // Several prompts are admitted together or not at all.
  third.send(post_text("/v1/completions", R"({"prompt":["a","b","c"],"max_tokens":2})"));
  EXPECT_EQ(third.read_reply().status, 429);
  first.close();
  second.close();
  ASSERT_TRUE(server.serving.wait_for_load(0, 0));
  third.send(post_text("/v1/completions", R"({"prompt":["a","b"],"max_tokens":2})"));
  EXPECT_EQ(third.read_reply().status, 200);
}

// With a rank away new requests get 503 at once, naming it; those under way wait and go on where they stopped.
TEST(HttpLoad, LostRank) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(2));
  RawClient parked(server.port);
  parked.send(post_text("/v1/completions", R"({"prompt":"go","max_tokens":300,"ignore_eos":true,"stream":true})"));
  ASSERT_TRUE(parked.read_until("data: "));
  server.serving.model->set_broken(true);
  for (int i = 0; i < 500 && server.serving.engine->status().up; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  RawReply reply = post(server.port, "/v1/completions", kEndlessStream);
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.headers["retry-after"], "1");
  EXPECT_THAT(reply.body, HasSubstr("rank 1"));
  reply = get(server.port, "/ready");
  EXPECT_EQ(reply.status, 503);
  EXPECT_THAT(reply.body, HasSubstr("rank 1 (host b"));
  EXPECT_EQ(get(server.port, "/health").status, 200);
  server.serving.model->set_broken(false);
  reply = parked.read_reply();
  EXPECT_TRUE(reply.well_formed);
  EXPECT_THAT(reply.body, HasSubstr("\"length\""));
  EXPECT_EQ(get(server.port, "/ready").status, 200);
}

// While ranks are missing at the start, requests get 503 naming them, before headers; /health is live all along.
TEST(HttpLoad, Starting) {
  ServingOptions options = small_engine();
  std::atomic<bool> formed{false};
  options.service.readiness = [&formed] {
    Readiness readiness;
    readiness.ready = formed;
    if (!formed) readiness.reason = "waiting for rank 1 (missing)";
    readiness.ranks.resize(2);
    readiness.ranks[1].rank = 1;
    return readiness;
  };
  Server server(options);
  server.serving.script("hi");
  const RawReply reply = post(server.port, "/v1/completions", kEndlessStream);
  EXPECT_EQ(reply.status, 503);
  EXPECT_THAT(reply.body, HasSubstr("\"starting\""));
  EXPECT_THAT(reply.body, HasSubstr("waiting for rank 1 (missing)"));
  EXPECT_EQ(get(server.port, "/health").status, 200);
  EXPECT_THAT(get(server.port, "/ready").body, HasSubstr("\"state\":\"missing\""));
  formed = true;
  EXPECT_EQ(post(server.port, "/v1/completions", R"({"prompt":"x"})").status, 200);
  EXPECT_EQ(get(server.port, "/ready").status, 200);
}

// A stream that fails after its headers ends with an error event, well framed, which counts what the client has.
TEST(HttpLoad, ErrorInsideAStream) {
  ServingOptions options = small_engine();
  options.service.request_timeout = std::chrono::milliseconds(200);
  Server server(options);
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  const RawReply reply = post(server.port, "/v1/completions", kEndlessStream);
  EXPECT_EQ(reply.status, 200);
  EXPECT_TRUE(reply.well_formed);
  const auto events = sse_data(reply.body);
  ASSERT_TRUE(events.has_value() && events->size() > 2);
  EXPECT_EQ(events->back(), "[DONE]");
  const boost::json::value cut = boost::json::parse((*events)[events->size() - 2]);
  EXPECT_EQ(cut.at("error").at("code").as_string(), "timeout");
  const boost::json::value& usage = cut.at("usage");
  EXPECT_GT(usage.at("prompt_tokens").as_int64(), 0);
  EXPECT_GT(usage.at("completion_tokens").as_int64(), 0);
  EXPECT_EQ(usage.at("total_tokens").as_int64(),
            usage.at("prompt_tokens").as_int64() + usage.at("completion_tokens").as_int64());
  EXPECT_EQ(cut.at("tensorfold").at("token_sha").as_string().size(), 12u);
  EXPECT_GT(cut.at("tensorfold").at("rounds").as_int64(), 0);
  EXPECT_EQ(post(server.port, "/v1/completions", kEndless).status, 504);
}

// A stream that waits sends comments, so that proxies keep it open.
TEST(HttpLoad, CommentsWhileWaiting) {
  HttpOptions options;
  options.stream_comment_interval = std::chrono::milliseconds(50);
  Server server(small_engine(), options);
  server.serving.script("late");
  server.serving.model->hold(true);
  RawClient client(server.port);
  client.send(post_text("/v1/completions", R"({"prompt":"go","stream":true})"));
  EXPECT_TRUE(client.read_until(": waiting\n\n"));
  server.serving.model->hold(false);
  const RawReply reply = client.read_reply();
  const auto events = sse_data(reply.body);
  ASSERT_TRUE(events.has_value()) << reply.body;
  EXPECT_EQ(events->back(), "[DONE]");
}

// A client that does not read loses its stream when its buffer is full; the engine never waits for it.
TEST(HttpLoad, SlowReader) {
  ServingOptions serving = small_engine();
  serving.context = 60000;
  serving.engine.pages = 4096;
  serving.engine.max_sequences = 2;
  HttpOptions options;
  options.write_buffer_bytes = 64 << 10;
  Server server(serving, options);
  server.serving.model->set_pass_time(std::chrono::milliseconds(1));  // so that it is seen while it runs
  RawClient slow(server.port, /*receive_buffer=*/4096);
  slow.send(post_text("/v1/completions", R"({"prompt":"go","max_tokens":50000,"ignore_eos":true,"stream":true})"));
  ASSERT_TRUE(server.serving.wait_for_load(1, 0));
  EXPECT_EQ(post(server.port, "/v1/completions", R"({"prompt":"x","max_tokens":5})").status, 200);
  for (int i = 0; i < 3000 && server.serving.engine->status().active > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const EngineStatus status = server.serving.engine->status();
  EXPECT_EQ(status.active, 0);
  EXPECT_EQ(status.cancelled, 1u);
  EXPECT_LT(status.reply_tokens, 40000u);
  EXPECT_THAT(get(server.port, "/metrics").body, HasSubstr("tensorfold_slow_readers_total 1"));
}

// A megabyte of text is tokenised on a worker: it is admitted while the scheduler is stuck in a pass, and while all
// workers are busy the scheduler goes on with its rounds.
TEST(HttpLoad, LongTextsDelayNoRound) {
  ServingOptions serving = small_engine();
  serving.context = 1 << 20;
  serving.engine.pages = 1 << 15;
  serving.service.workers = 1;
  Server server(serving);
  std::string text;
  while (text.size() < (1 << 20)) text += "some words that are not the same " + std::to_string(text.size()) + " ";
  const std::string body = R"({"prompt":")" + text + R"(","max_tokens":2})";
  server.serving.model->set_pass_time(std::chrono::milliseconds(1));
  RawClient running(server.port);
  running.send(post_text("/v1/completions", R"({"prompt":"go","max_tokens":20000,"ignore_eos":true,"stream":true})"));
  ASSERT_TRUE(running.read_until("data: "));

  server.serving.model->hold(true);
  RawClient waiting(server.port);
  waiting.send(post_text("/v1/completions", body));
  EXPECT_TRUE(server.serving.wait_for_load(1, 1));  // tokenised and admitted while no round can end
  server.serving.model->hold(false);

  std::promise<void> free;
  std::shared_future<void> freed = free.get_future().share();
  server.serving.service->workers().post([freed] { freed.wait(); });
  RawClient tokenizing(server.port);
  tokenizing.send(post_text("/tokenize", R"({"prompt":")" + text + "\"}"));
  const uint64_t before = server.serving.engine->status().passes;
  for (int i = 0; i < 1000 && server.serving.engine->status().passes < before + 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_GE(server.serving.engine->status().passes, before + 20);
  free.set_value();
  EXPECT_EQ(tokenizing.read_reply().status, 200);
}

// /health answers while every worker tokenises a long text and the engine is stuck in a pass.
TEST(HttpLoad, HealthIsNeverBehind) {
  ServingOptions serving = small_engine();
  serving.service.workers = 1;
  Server server(serving);
  server.serving.model->hold(true);
  RawClient busy(server.port);
  busy.send(post_text("/v1/completions", kEndless));
  ASSERT_TRUE(server.serving.wait_for_load(0, 1));  // as of before the pass that hangs
  std::string text;
  while (text.size() < (1 << 20)) text += "some words that are not the same " + std::to_string(text.size()) + " ";
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 4; ++i) {
    clients.push_back(std::make_unique<RawClient>(server.port));
    clients.back()->send(post_text("/tokenize", R"({"prompt":")" + text + "\"}"));
  }
  for (int i = 0; i < 10; ++i) {
    const auto start = Clock::now();
    EXPECT_EQ(get(server.port, "/health").status, 200);
    EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(500));
  }
  for (auto& client : clients) EXPECT_EQ(client->read_reply().status, 200);
  server.serving.model->hold(false);
}

// Disconnects are seen and requests served past file descriptor 1023.
TEST(HttpLoad, ManyConnections) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 4000) GTEST_SKIP() << "the limit of open files is " << limit.rlim_cur << ", 4000 are needed";
  HttpOptions options;
  options.max_connections = 1400;
  Server server(small_engine(), options);
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  std::vector<std::unique_ptr<RawClient>> idle;
  for (int i = 0; i < 1300; ++i) {
    idle.push_back(std::make_unique<RawClient>(server.port));
    ASSERT_TRUE(idle.back()->connected());
  }
  RawClient client(server.port);
  ASSERT_GT(client.fd(), 1023);
  client.send(post_text("/v1/completions", kEndlessStream));
  ASSERT_TRUE(server.serving.wait_for_load(1, 0));
  client.close();
  ASSERT_TRUE(server.serving.wait_for_load(0, 0));
  idle.back()->send(get_text("/health"));
  EXPECT_EQ(idle.back()->read_reply().status, 200);
}

// One connection too many is told so, and there is room again when one ends.
TEST(HttpLoad, ConnectionLimit) {
  HttpOptions options;
  options.max_connections = 2;
  Server server(small_engine(), options);
  auto first = std::make_unique<RawClient>(server.port);
  first->send(get_text("/health"));
  EXPECT_EQ(first->read_reply().status, 200);
  RawClient second(server.port);
  second.send(get_text("/health"));
  EXPECT_EQ(second.read_reply().status, 200);
  RawClient third(server.port);
  RawReply reply = third.read_reply();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.headers["retry-after"], "1");
  EXPECT_TRUE(third.ends());
  third.close();
  first.reset();
  int status = 0;
  for (int i = 0; i < 100 && status != 200; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    status = get(server.port, "/health").status;
  }
  EXPECT_EQ(status, 200);
}

// Stopping lets replies under way finish, closes idle connections and takes no new ones.
TEST(HttpLoad, StopDrains) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  RawClient idle(server.port), running(server.port);
  idle.send(get_text("/health"));
  EXPECT_EQ(idle.read_reply().status, 200);
  running.send(post_text("/v1/completions", R"({"prompt":"go","max_tokens":60,"ignore_eos":true,"stream":true})"));
  ASSERT_TRUE(running.read_until("data: "));
  EXPECT_TRUE(server.http->stop(std::chrono::seconds(20)));
  const RawReply reply = running.read_reply();
  EXPECT_TRUE(reply.well_formed);
  EXPECT_THAT(reply.body, HasSubstr("[DONE]"));
  EXPECT_TRUE(idle.ends());
  RawClient late(server.port);
  EXPECT_FALSE(late.connected());
}

// Past the grace, what is left is cut and its slot freed; the engine outlives its front end.
TEST(HttpLoad, StopCuts) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  RawClient running(server.port);
  running.send(post_text("/v1/completions", kEndlessStream));
  ASSERT_TRUE(server.serving.wait_for_load(1, 0));
  EXPECT_FALSE(server.http->stop(std::chrono::milliseconds(50)));
  EXPECT_TRUE(server.serving.wait_for_load(0, 0));
  EXPECT_TRUE(running.ends());
}

}  // namespace
}  // namespace tensorfold
