// HTTP itself: framing, limits, time-outs, keep-alive, methods, keys, and malformed requests on a raw socket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <thread>

#include "coordinator/http/route.h"
#include "coordinator/http/server.h"
#include "tests/coordinator/http/raw_client.h"
#include "tests/coordinator/http/serving_fixture.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kPrompt = R"({"prompt":"hello","max_tokens":4})";

struct Server {
  explicit Server(HttpOptions options = {}, ServingOptions serving_options = {}) : serving(std::move(serving_options)) {
    serving.script("hi there");
    auto started = HttpServer::start(std::move(options), *serving.service, serving.metrics);
    if (!started.ok()) throw std::runtime_error(std::string(started.status().message()));
    http = *std::move(started);
    port = http->port();
  }
  Serving serving;
  std::unique_ptr<HttpServer> http;
  uint16_t port = 0;
};

std::string error_code(const RawReply& reply) {
  boost::system::error_code ec;
  const boost::json::value json = boost::json::parse(reply.body, ec);
  if (ec || !json.is_object() || !json.as_object().contains("error")) return "no error body: " + reply.body;
  const auto& error = json.at("error").as_object();
  EXPECT_TRUE(error.contains("message") && error.contains("type") && error.contains("param"));
  return std::string(error.at("code").as_string());
}

// A chunked body is read whole, whatever its chunks, extensions and trailers.
TEST(HttpProtocol, ChunkedBody) {
  Server server;
  RawClient client(server.port);
  client.send(
      "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
      "Transfer-Encoding: chunked\r\n\r\n");
  const std::string body = kPrompt;
  for (size_t i = 0; i < body.size(); i += 7) {
    const std::string piece = body.substr(i, 7);
    char size[16];
    snprintf(size, sizeof size, "%zx", piece.size());
    client.send(std::string(size) + ";ext=1\r\n" + piece + "\r\n");
  }
  client.send("0\r\nTrailer: x\r\n\r\n");
  const RawReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 200) << reply.body;
  EXPECT_THAT(reply.body, HasSubstr("hi there"));
  // The connection is at the right place for the next request.
  client.send(get_text("/health"));
  EXPECT_EQ(client.read_reply().status, 200);
}

// A refused POST leaves a connection that the next request can use: its body was drained.
TEST(HttpProtocol, KeepAliveAfterRefusal) {
  Server server;
  RawClient client(server.port);
  client.send(post_text("/no/such", kPrompt));
  RawReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(error_code(reply), "unknown_url");
  EXPECT_EQ(reply.headers["connection"], "keep-alive");
  client.send(post_text("/health", kPrompt));
  reply = client.read_reply();
  EXPECT_EQ(reply.status, 405);
  EXPECT_EQ(reply.headers["allow"], "GET, HEAD, OPTIONS");
  client.send(post_text("/v1/completions", "<xml/>", "Content-Type: text/xml\r\n"));
  EXPECT_EQ(client.read_reply().status, 415);
  client.send(post_text("/v1/completions", R"({"prompt":"x","nonsense":1})"));
  reply = client.read_reply();
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(error_code(reply), "unknown_parameter");
  client.send(post_text("/v1/completions", kPrompt));
  EXPECT_EQ(client.read_reply().status, 200);
}

// Requests sent before the answers have come are answered in order, plain and streamed.
TEST(HttpProtocol, Pipelining) {
  Server server;
  RawClient client(server.port);
  client.send(get_text("/v1/models") + post_text("/v1/completions", kPrompt) +
              post_text("/v1/completions", R"({"prompt":"hello","max_tokens":4,"stream":true})") + get_text("/health") +
              post_text("/tokenize", R"({"prompt":"a b"})") + get_text("/v1/models/demo"));
  EXPECT_THAT(client.read_reply().body, HasSubstr("\"list\""));
  EXPECT_THAT(client.read_reply().body, HasSubstr("text_completion"));
  const RawReply stream = client.read_reply();
  EXPECT_TRUE(stream.well_formed);
  EXPECT_THAT(stream.body, HasSubstr("[DONE]"));
  EXPECT_EQ(client.read_reply().body, R"({"status":"ok"})");
  EXPECT_THAT(client.read_reply().body, HasSubstr("max_model_len"));
  EXPECT_THAT(client.read_reply().body, HasSubstr("\"demo\""));
}

// A body over the limit is refused from its Content-Length alone, and a chunked one when it passes the limit.
TEST(HttpProtocol, BodyTooLarge) {
  HttpOptions options;
  options.max_body_bytes = 10000;
  Server server(options);
  {
    RawClient client(server.port);
    client.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10001\r\n\r\n");
    const RawReply reply = client.read_reply();
    EXPECT_EQ(reply.status, 413);
    EXPECT_EQ(error_code(reply), "body_too_large");
    EXPECT_TRUE(client.ends());
  }
  RawClient client(server.port);
  client.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  client.send("2711\r\n" + std::string(10001, 'x') + "\r\n");
  EXPECT_EQ(client.read_reply().status, 413);
  EXPECT_TRUE(client.ends());
  EXPECT_EQ(post(server.port, "/v1/completions", kPrompt).status, 200);
}

// Headers over the limit get 431, and nothing is kept of them.
TEST(HttpProtocol, HeadersTooLarge) {
  HttpOptions options;
  options.max_header_bytes = 2048;
  Server server(options);
  RawClient client(server.port);
  client.send("GET /health HTTP/1.1\r\nX-Big: " + std::string(100000, 'a') + "\r\n\r\n");
  const RawReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 431);
  EXPECT_EQ(error_code(reply), "headers_too_large");
}

// Malformed requests get 400 and the end of the connection; nothing crashes and others are served.
TEST(HttpProtocol, Malformed) {
  Server server;
  const std::vector<std::string> bad = {
      "GARBAGE\r\n\r\n",
      "GET /health\r\n\r\n",
      "GET /health HTTP/9.9\r\n\r\n",
      "GET  /health HTTP/1.1\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 15),
      "GET /health HTTP/1.1\r\nNo colon here\r\n\r\n",
      "GET /health HTTP/1.1\r\nBad Name: x\r\n\r\n",
      "POST /tokenize HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
      "POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
      "POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
      "POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      "POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
      "POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
  };
  for (const std::string& text : bad) {
    RawClient client(server.port);
    client.send(text);
    const RawReply reply = client.read_reply();
    EXPECT_THAT(reply.status, ::testing::AnyOf(400, 413)) << text << reply.body;
    EXPECT_TRUE(client.ends()) << text;
  }
  {
    RawClient client(server.port);  // leaves in the middle of a body
    client.send("POST /tokenize HTTP/1.1\r\nContent-Length: 500\r\n\r\nhalf");
  }
  EXPECT_EQ(get(server.port, "/health").status, 200);
}

// Bytes that trickle in do not hold a connection for longer than the time-outs.
TEST(HttpProtocol, SlowRequests) {
  HttpOptions options;
  options.header_timeout = std::chrono::milliseconds(300);
  options.body_timeout = std::chrono::milliseconds(300);
  options.idle_timeout = std::chrono::milliseconds(400);
  Server server(options);
  {
    RawClient client(server.port);
    const std::string text = "GET /health HTTP/1.1\r\nX: y\r\n";
    for (char c : text) {
      if (!client.send(std::string(1, c))) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
    const RawReply reply = client.read_reply();
    EXPECT_EQ(reply.status, 408);
    EXPECT_EQ(error_code(reply), "request_timeout");
    EXPECT_TRUE(client.ends());
  }
  {
    RawClient client(server.port);
    client.send("POST /tokenize HTTP/1.1\r\nContent-Length: 500\r\n\r\nhalf");
    EXPECT_EQ(client.read_reply().status, 408);
    EXPECT_TRUE(client.ends());
  }
  RawClient silent(server.port);
  EXPECT_TRUE(silent.ends());
  EXPECT_EQ(silent.buffered(), "");
  RawClient kept(server.port);
  kept.send(get_text("/health"));
  EXPECT_EQ(kept.read_reply().status, 200);
  EXPECT_TRUE(kept.ends());
}

// "Expect: 100-continue": the body is asked for, or refused before it is sent.
TEST(HttpProtocol, ExpectContinue) {
  Server server;
  {
    RawClient client(server.port);
    const std::string body = kPrompt;
    client.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n\r\n");
    EXPECT_EQ(client.read_reply().status, 100);
    client.send(body);
    EXPECT_EQ(client.read_reply().status, 200);
    client.send(get_text("/health"));
    EXPECT_EQ(client.read_reply().status, 200);
  }
  {
    RawClient client(server.port);
    client.send("POST /nowhere HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n");
    EXPECT_EQ(client.read_reply().status, 404);
    EXPECT_TRUE(client.ends());
  }
  RawClient client(server.port);
  client.send("POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 10\r\n\r\n");
  EXPECT_EQ(client.read_reply().status, 417);
}

// HTTP/1.0 and "Connection: close" end the connection after the reply; a 1.0 stream has no chunks.
TEST(HttpProtocol, ClosingClients) {
  Server server;
  {
    RawClient client(server.port);
    client.send("GET /health HTTP/1.0\r\n\r\n");
    RawReply reply = client.read_reply();
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.headers["connection"], "close");
    EXPECT_TRUE(client.ends());
  }
  {
    RawClient client(server.port);
    const std::string body = R"({"prompt":"x","max_tokens":4,"stream":true})";
    client.send("POST /v1/completions HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    const RawReply reply = client.read_reply();
    EXPECT_EQ(reply.headers.count("transfer-encoding"), 0u);
    const auto events = sse_data(reply.body);
    ASSERT_TRUE(events.has_value()) << reply.body;
    EXPECT_EQ(events->back(), "[DONE]");
  }
  RawClient client(server.port);
  client.send(get_text("/v1/models", "Connection: close\r\n"));
  EXPECT_EQ(client.read_reply().status, 200);
  EXPECT_TRUE(client.ends());
}

// HEAD has the headers of GET and no body.
TEST(HttpProtocol, Head) {
  Server server;
  RawClient client(server.port);
  client.send("HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n");
  RawReply reply = client.read_reply(/*head_only=*/true);
  EXPECT_EQ(reply.status, 200);
  EXPECT_GT(std::stoi(reply.headers["content-length"]), 10);
  client.send("HEAD /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(client.read_reply(true).status, 405);
  client.send(get_text("/health"));
  EXPECT_EQ(client.read_reply().status, 200);
}

// A browser's preflight is answered, without a key, and replies carry the origin.
TEST(HttpProtocol, Cors) {
  HttpOptions options;
  options.cors_origin = "https://chat.example";
  ServingOptions serving;
  serving.service.api_key_hashes = {"2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"};  // "key"
  Server server(options, serving);
  RawClient client(server.port);
  client.send(
      "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: https://chat.example\r\n"
      "Access-Control-Request-Method: POST\r\n\r\n");
  RawReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 204);
  EXPECT_EQ(reply.headers["access-control-allow-origin"], "https://chat.example");
  EXPECT_THAT(reply.headers["access-control-allow-headers"], HasSubstr("Authorization"));
  EXPECT_THAT(reply.headers["access-control-allow-methods"], HasSubstr("POST"));
  client.send(get_text("/health"));
  EXPECT_EQ(client.read_reply().headers["access-control-allow-origin"], "https://chat.example");
}

// With keys configured, only /health and /ready answer without one, and /ready then names no host.
TEST(HttpProtocol, ApiKeys) {
  ServingOptions serving;
  serving.service.api_key_hashes = {"2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"};  // "key"
  Server server({}, serving);
  for (const char* path : {"/v1/models", "/metrics", "/v1/models/sprout", "/elsewhere"}) {
    RawReply reply = get(server.port, path);
    EXPECT_EQ(reply.status, 401) << path;
    EXPECT_EQ(error_code(reply), "invalid_api_key");
    EXPECT_EQ(reply.headers["www-authenticate"], "Bearer");
  }
  EXPECT_EQ(post(server.port, "/v1/completions", kPrompt).status, 401);
  EXPECT_EQ(post(server.port, "/v1/completions", kPrompt, "Authorization: Bearer kex\r\n").status, 401);
  EXPECT_EQ(post(server.port, "/v1/completions", kPrompt, "Authorization: Basic key\r\n").status, 401);
  EXPECT_EQ(post(server.port, "/v1/completions", kPrompt, "Authorization: Bearer key\r\n").status, 200);
  EXPECT_EQ(get(server.port, "/health").status, 200);
  EXPECT_THAT(get(server.port, "/ready").body, ::testing::Not(HasSubstr("ranks")));
  EXPECT_THAT(get(server.port, "/ready", "Authorization: bearer key\r\n").body, HasSubstr("ranks"));
}

// The address in use, or of another host, is an error that says so.
TEST(HttpProtocol, AddressTaken) {
  Server server;
  HttpOptions options;
  options.port = server.port;
  const auto second = HttpServer::start(options, *server.serving.service, server.serving.metrics);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("http.listen"));
}

// Routes ignore queries, decode names, and keep logs printable.
TEST(HttpProtocol, Routes) {
  EXPECT_EQ(find_route("/v1/models?limit=2", true).endpoint, Endpoint::kModels);
  EXPECT_EQ(find_route("/v1/models/a%2Fb%20c", true).argument, "a/b c");
  EXPECT_EQ(find_route("/metrics", false).endpoint, Endpoint::kUnknown);
  EXPECT_EQ(find_route("", true).endpoint, Endpoint::kUnknown);
  EXPECT_EQ(loggable_path("/a\x01\xff b?secret=1"), "/a???b");
}

}  // namespace
}  // namespace tensorfold
