// The gRPC API: the same replies as HTTP, errors as statuses, cancellation, keys, limits.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <thread>

#include "coordinator/grpc/server.h"
#include "coordinator/http/server.h"
#include "tensorfold/v1/inference.grpc.pb.h"
#include "tests/coordinator/http/raw_client.h"
#include "tests/coordinator/http/serving_fixture.h"

namespace tensorfold {
namespace {

namespace pb = ::tensorfold::v1;
using ::testing::HasSubstr;

constexpr const char* kKeyHash = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683";  // "key"

ServingOptions small_engine() {
  ServingOptions options;
  options.engine.max_sequences = 1;
  options.engine.queue_limit = 1;
  options.engine.draft = DraftKind::kNone;
  return options;
}

struct Reply {
  grpc::Status status;
  std::string retry_after;
  pb::Started started;
  std::map<uint32_t, std::string> text;
  std::map<uint32_t, std::string> reasoning;
  std::vector<pb::ToolCallDelta> calls;
  std::vector<pb::TokenLogprob> logprobs;
  std::map<uint32_t, pb::Finish> finishes;
  std::vector<pb::Progress> progress;
};

struct Server {
  explicit Server(ServingOptions serving_options = small_engine(), GrpcOptions options = {})
      : serving(std::move(serving_options)) {
    auto started = InferenceServer::start(std::move(options), *serving.service, serving.metrics);
    if (!started.ok()) throw std::runtime_error(std::string(started.status().message()));
    server = *std::move(started);
    channel = grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials());
    stub = pb::Inference::NewStub(channel);
  }

  Reply generate(const pb::GenerateRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    Reply out;
    auto reader = stub->Generate(&context, request);
    pb::GenerateEvent event;
    while (reader->Read(&event)) {
      if (event.has_started()) out.started = event.started();
      if (event.has_finish()) out.finishes[event.finish().choice()] = event.finish();
      if (event.has_progress()) out.progress.push_back(event.progress());
      if (!event.has_delta()) continue;
      const pb::Delta& delta = event.delta();
      out.text[delta.choice()] += delta.text();
      out.reasoning[delta.choice()] += delta.reasoning();
      out.calls.insert(out.calls.end(), delta.tool_calls().begin(), delta.tool_calls().end());
      out.logprobs.insert(out.logprobs.end(), delta.logprobs().begin(), delta.logprobs().end());
    }
    out.status = reader->Finish();
    const auto& trailing = context.GetServerTrailingMetadata();
    if (auto found = trailing.find("retry-after"); found != trailing.end()) {
      out.retry_after.assign(found->second.data(), found->second.size());
    }
    return out;
  }

  Serving serving;
  std::unique_ptr<InferenceServer> server;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<pb::Inference::Stub> stub;
};

pb::GenerateRequest chat(const std::string& content) {
  pb::GenerateRequest request;
  pb::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(content);
  return request;
}

pb::GenerateRequest endless() {
  pb::GenerateRequest request;
  request.set_prompt("go");
  request.mutable_sampling()->set_max_tokens(2000);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

// Protects: the priority arrives over gRPC, too, and an unknown one is refused.
TEST(Grpc, Priority) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(2));
  pb::GenerateRequest request = endless();
  request.set_priority(pb::PRIORITY_BACKGROUND);
  std::thread client([&] {
    request.mutable_sampling()->set_max_tokens(200);
    EXPECT_TRUE(server.generate(request).status.ok());
  });
  int background = 0;
  for (int i = 0; i < 2000 && background == 0; ++i) {
    background = server.serving.engine->status().active_background;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  client.join();
  EXPECT_EQ(background, 1);
  request.set_priority(static_cast<pb::Priority>(7));
  const Reply refused = server.generate(request);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(refused.status.error_message().find("priority"), std::string::npos);
}

// A chat over gRPC gives the tokens, the text and the block of the same chat over HTTP.
TEST(Grpc, SameAsHttp) {
  Server server;
  auto http = HttpServer::start({}, *server.serving.service, server.serving.metrics);
  ASSERT_TRUE(http.ok());
  pb::GenerateRequest request = chat("hello");
  request.mutable_sampling()->set_max_tokens(20);
  request.mutable_sampling()->set_temperature(0.7);
  request.mutable_sampling()->set_seed(77);
  request.set_request_id("my-id");
  request.set_return_token_ids(true);
  const Reply reply = server.generate(request);
  ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
  const RawReply other =
      post((*http)->port(), "/v1/chat/completions",
           R"({"messages":[{"role":"user","content":"hello"}],"max_tokens":20,"temperature":0.7,"seed":77})");
  const auto json = boost::json::parse(other.body);
  EXPECT_EQ(reply.started.request_id(), "my-id");
  EXPECT_EQ(reply.started.model(), "sprout");
  const pb::Finish& finish = reply.finishes.at(0);
  EXPECT_EQ(finish.reason(), pb::FINISH_REASON_LENGTH);
  EXPECT_EQ(finish.tensorfold().token_sha(), std::string(json.at("tensorfold").at("token_sha").as_string()));
  EXPECT_EQ(finish.tensorfold().token_ids_size(), 20);
  EXPECT_EQ(finish.tensorfold().fingerprint(), "0123456789abcdef");
  EXPECT_EQ(finish.usage().prompt_tokens(), json.at("usage").at("prompt_tokens").to_number<uint32_t>());
  EXPECT_EQ(reply.text.at(0), std::string(json.at("choices").at(0).at("message").at("content").as_string()));
}

// Reasoning, tool calls, choices, log-probabilities and stops come typed.
TEST(Grpc, TypedReplies) {
  Server server{ServingOptions()};
  server.serving.script(
      "Hm.\n</think>\n\nAdding.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>");
  pb::GenerateRequest request = chat("hello");
  request.mutable_chat()->set_enable_thinking(true);
  request.mutable_chat()->set_tools_json(R"([{"type":"function","function":{"name":"add"}}])");
  Reply reply = server.generate(request);
  ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
  EXPECT_EQ(reply.reasoning.at(0), "Hm.");
  EXPECT_EQ(reply.text.at(0), "Adding.");
  ASSERT_EQ(reply.calls.size(), 1u);
  EXPECT_EQ(reply.calls[0].name(), "add");
  EXPECT_EQ(reply.finishes.at(0).reason(), pb::FINISH_REASON_TOOL_CALLS);

  server.serving.script("alpha beta gamma");
  pb::GenerateRequest plain;
  plain.set_prompt("x");
  plain.mutable_sampling()->set_n(2);
  plain.mutable_sampling()->set_logprobs(1);
  plain.mutable_sampling()->add_stop("ta gam");
  reply = server.generate(plain);
  ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
  EXPECT_EQ(reply.text.at(0), "alpha be");
  EXPECT_EQ(reply.text.at(1), "alpha be");
  EXPECT_EQ(reply.finishes.at(1).matched_stop(), "ta gam");
  ASSERT_FALSE(reply.logprobs.empty());
  EXPECT_EQ(reply.logprobs[0].top_size(), 1);
  EXPECT_EQ(reply.logprobs[0].top(0).token(), reply.logprobs[0].token());
}

// Bad requests are INVALID_ARGUMENT with the field, before any work.
TEST(Grpc, Validation) {
  Server server;
  const uint64_t rows = server.serving.model->rows();
  const auto message_of = [&](const pb::GenerateRequest& request, grpc::StatusCode code) {
    const Reply reply = server.generate(request);
    EXPECT_EQ(reply.status.error_code(), code) << reply.status.error_message();
    EXPECT_FALSE(reply.started.created_unix_s() > 0);
    return reply.status.error_message();
  };
  pb::GenerateRequest request = chat("x");
  request.mutable_sampling()->set_temperature(9);
  EXPECT_THAT(message_of(request, grpc::StatusCode::INVALID_ARGUMENT), HasSubstr("temperature"));
  EXPECT_THAT(message_of({}, grpc::StatusCode::INVALID_ARGUMENT), HasSubstr("prompt"));
  request = chat("x");
  request.set_model("other");
  message_of(request, grpc::StatusCode::NOT_FOUND);
  request = chat("x");
  request.mutable_chat()->set_tools_json("[{");
  EXPECT_THAT(message_of(request, grpc::StatusCode::INVALID_ARGUMENT), HasSubstr("tools_json"));
  request = chat("x");
  request.mutable_sampling()->set_max_tokens(5000);
  EXPECT_THAT(message_of(request, grpc::StatusCode::INVALID_ARGUMENT), HasSubstr("2048"));
  request = {};
  request.mutable_prompt_ids()->add_ids(-1);
  EXPECT_THAT(message_of(request, grpc::StatusCode::INVALID_ARGUMENT), HasSubstr("prompt_ids"));
  request = chat("x");
  request.set_request_id("two words");
  message_of(request, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(server.serving.model->rows(), rows);
}

// A client that cancels frees its place, running or queued.
TEST(Grpc, CancelFreesTheSlot) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  grpc::ClientContext first, second;
  auto running = server.stub->Generate(&first, endless());
  pb::GenerateEvent event;
  ASSERT_TRUE(running->Read(&event));
  ASSERT_TRUE(event.has_started());
  ASSERT_TRUE(server.serving.wait_for_load(1, 0));
  auto queued = server.stub->Generate(&second, endless());
  ASSERT_TRUE(queued->Read(&event));
  ASSERT_TRUE(server.serving.wait_for_load(1, 1));
  // A third has no place: the status says so, and when to try again.
  const Reply third = server.generate(endless());
  EXPECT_EQ(third.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(third.retry_after, "1");
  second.TryCancel();
  EXPECT_TRUE(server.serving.wait_for_load(1, 0));
  first.TryCancel();
  EXPECT_TRUE(server.serving.wait_for_load(0, 0));
  while (running->Read(&event)) {
  }
  EXPECT_EQ(running->Finish().error_code(), grpc::StatusCode::CANCELLED);
  while (queued->Read(&event)) {
  }
  queued->Finish();
}

// A client's deadline frees the place too.
TEST(Grpc, Deadline) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  auto reader = server.stub->Generate(&context, endless());
  pb::GenerateEvent event;
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(server.serving.wait_for_load(0, 0));
}

// A client that does not read loses its stream; the engine goes on.
TEST(Grpc, SlowReader) {
  ServingOptions serving = small_engine();
  serving.context = 60000;
  serving.engine.pages = 4096;
  GrpcOptions options;
  options.write_buffer_bytes = 4096;
  Server server(serving, options);
  pb::GenerateRequest request = endless();
  request.mutable_sampling()->set_max_tokens(50000);
  request.mutable_sampling()->set_logprobs(20);  // much to send for each token
  // A client whose own window does not grow to hold everything.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65535);
  const auto stub = pb::Inference::NewStub(
      grpc::CreateCustomChannel(server.server->address(), grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  auto reader = stub->Generate(&context, request);
  for (int i = 0; i < 2000 && server.serving.engine->status().cancelled == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(server.serving.engine->status().cancelled, 1u);
  pb::GenerateEvent event;
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

// Keys guard everything but Status, which then names no host.
TEST(Grpc, ApiKeys) {
  ServingOptions serving = small_engine();
  serving.service.api_key_hashes = {kKeyHash};
  Server server(serving);
  server.serving.script("hi");
  EXPECT_EQ(server.generate(chat("x")).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  grpc::ClientContext with_key, without_key, for_status;
  pb::ModelsReply models;
  EXPECT_EQ(server.stub->Models(&without_key, {}, &models).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  with_key.AddMetadata("authorization", "Bearer key");
  EXPECT_TRUE(server.stub->Models(&with_key, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 2);
  EXPECT_EQ(models.models(0).family(), "qwen3_5");
  pb::StatusReply status;
  EXPECT_TRUE(server.stub->Status(&for_status, {}, &status).ok());
  EXPECT_TRUE(status.ready());
  EXPECT_EQ(status.ranks_size(), 0);
}

// Tokenize and Detokenize are inverse, and text never becomes a control token.
TEST(Grpc, Tokenize) {
  Server server;
  pb::TokenizeRequest request;
  request.set_text("<|im_start|>héllo 😀");
  request.set_return_tokens(true);
  pb::TokenizeReply tokens;
  grpc::ClientContext first, second, third;
  ASSERT_TRUE(server.stub->Tokenize(&first, request, &tokens).ok());
  EXPECT_EQ(tokens.tokens_size(), tokens.token_ids_size());
  EXPECT_EQ(tokens.max_model_len(), 2048u);
  const int32_t control = *server.serving.tokenizer->token_to_id("<|im_start|>");
  EXPECT_THAT(tokens.token_ids(), ::testing::Not(::testing::Contains(control)));
  pb::DetokenizeRequest back;
  *back.mutable_token_ids() = tokens.token_ids();
  pb::DetokenizeReply text;
  ASSERT_TRUE(server.stub->Detokenize(&second, back, &text).ok());
  EXPECT_EQ(text.text(), "<|im_start|>héllo 😀");
  back.add_token_ids(99999);
  EXPECT_EQ(server.stub->Detokenize(&third, back, &text).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

// A message over the limit is refused; the server goes on.
TEST(Grpc, LargeMessages) {
  GrpcOptions options;
  options.max_message_bytes = 10000;
  Server server(small_engine(), options);
  server.serving.script("hi");
  EXPECT_EQ(server.generate(chat(std::string(20000, 'x'))).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(server.generate(chat("x")).status.ok());
}

// Stopping cancels what is under way after its grace, and a port that is taken is an error.
TEST(Grpc, StopAndAddress) {
  Server server;
  server.serving.model->set_pass_time(std::chrono::milliseconds(5));
  GrpcOptions taken;
  taken.port = server.server->port();
  EXPECT_EQ(InferenceServer::start(taken, *server.serving.service, server.serving.metrics).status().code(),
            absl::StatusCode::kUnavailable);
  grpc::ClientContext context;
  auto reader = server.stub->Generate(&context, endless());
  pb::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  server.server->stop(std::chrono::milliseconds(100));
  while (reader->Read(&event)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
  EXPECT_TRUE(server.serving.wait_for_load(0, 0));
}

// While a long prompt is read, a client that asked is told how far.
TEST(Grpc, Progress) {
  ServingOptions options = small_engine();
  options.engine.progress_interval = std::chrono::milliseconds(0);
  options.engine.prompt_chunk = 64;
  options.engine.max_batch_rows = 64;
  Server server(options);
  server.serving.model->set_pass_time(std::chrono::milliseconds(1));
  pb::GenerateRequest request;
  for (int i = 0; i < 300; ++i) request.mutable_prompt_ids()->add_ids(300 + i);
  request.mutable_sampling()->set_max_tokens(2);
  EXPECT_TRUE(server.generate(request).progress.empty());
  request.mutable_prompt_ids()->set_ids(0, 299);  // another prompt, which no cache has
  request.set_progress(true);
  const Reply reply = server.generate(request);
  EXPECT_TRUE(reply.status.ok()) << reply.status.error_message();
  ASSERT_GE(reply.progress.size(), 2u);
  EXPECT_GT(reply.progress[1].read(), reply.progress[0].read());
  EXPECT_EQ(reply.progress[0].total(), 300u);
  EXPECT_GT(reply.progress[0].tokens_per_s(), 0);
}

}  // namespace
}  // namespace tensorfold
