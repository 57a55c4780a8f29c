#include "coordinator/grpc/server.h"

#include <fmt/format.h>
#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <functional>
#include <utility>

#include "coordinator/grpc/convert.h"
#include "coordinator/grpc/generate_call.h"
#include "tensorfold/v1/inference.grpc.pb.h"

namespace tensorfold {
namespace {

// A connection that says nothing is asked after so long, and is gone when it does not answer.
constexpr int kKeepaliveMs = 20000;
constexpr int kKeepaliveTimeoutMs = 10000;
constexpr int kMaxStreamsAConnection = 256;

class InferenceService final : public pb::Inference::CallbackService {
 public:
  explicit InferenceService(GenerateHost& host) : host_(host) {}

  grpc::ServerWriteReactor<pb::GenerateEvent>* Generate(grpc::CallbackServerContext* context,
                                                        const pb::GenerateRequest* request) override {
    return begin_generate(host_, context, request);
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const pb::TokenizeRequest* request,
                                     pb::TokenizeReply* reply) override {
    return on_worker(context, "Tokenize", request->ByteSizeLong(),
                     [this, request, reply] { return tokenize(*request, reply); });
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const pb::DetokenizeRequest* request,
                                       pb::DetokenizeReply* reply) override {
    return on_worker(context, "Detokenize", request->ByteSizeLong(),
                     [this, request, reply] { return detokenize(*request, reply); });
  }

  grpc::ServerUnaryReactor* Models(grpc::CallbackServerContext* context, const pb::ModelsRequest*,
                                   pb::ModelsReply* reply) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (call_authorized(host_.service, *context)) {
      models_to_proto(host_.service, reply);
      reactor->Finish(grpc::Status::OK);
    } else {
      reactor->Finish(error_to_status(unauthorized_error(), context));
    }
    return reactor;
  }

  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context, const pb::StatusRequest*,
                                   pb::StatusReply* reply) override {
    readiness_to_proto(host_.service, call_authorized(host_.service, *context), reply);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  using Work = std::function<std::optional<ApiError>()>;

  grpc::ServerUnaryReactor* on_worker(grpc::CallbackServerContext* context, const char* name, size_t bytes, Work work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (!call_authorized(host_.service, *context)) {
      reactor->Finish(error_to_status(unauthorized_error(), context));
      return reactor;
    }
    const auto arrived = std::chrono::steady_clock::now();
    // gRPC keeps request, reply and context until Finish.
    host_.service.workers().post(
        [this, reactor, context, name, arrived, work = std::move(work)] {
          const std::optional<ApiError> error = work();
          const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - arrived).count();
          host_.metrics.request("grpc", name, error ? error->info().name : std::string_view("ok"), seconds);
          reactor->Finish(error ? error_to_status(*error, context) : grpc::Status::OK);
        },
        bytes);
    return reactor;
  }

  std::optional<ApiError> tokenize(const pb::TokenizeRequest& request, pb::TokenizeReply* reply) const {
    const ModelService& service = host_.service;
    TokenizeRequest typed;
    typed.model = request.model();
    if (request.has_chat()) {
      ApiOr<ChatRequest> chat = chat_from_proto(request.model(), request.chat(), service.options().defaults);
      if (!chat.ok()) return chat.error();
      typed.messages = std::move(chat->messages);
      if (chat->use_tools) typed.tools = std::move(chat->tools);
      typed.chat_template_kwargs = std::move(chat->chat_template_kwargs);
      typed.add_generation_prompt =
          !request.chat().has_add_generation_prompt() || request.chat().add_generation_prompt();
    } else if (request.input_case() == pb::TokenizeRequest::kText) {
      typed.prompt = request.text();
      typed.add_special_tokens = !request.has_add_special_tokens() || request.add_special_tokens();
    } else {
      return missing_field_error("text", "one of text and chat");
    }
    ApiOr<std::vector<uint32_t>> ids = service.tokenize(typed);
    if (!ids.ok()) return ids.error();
    for (const uint32_t id : *ids) {
      reply->add_token_ids(static_cast<int32_t>(id));
      if (request.return_tokens()) reply->add_tokens(shown_bytes(service.tokenizer(), id));
    }
    reply->set_max_model_len(service.context());
    return std::nullopt;
  }

  std::optional<ApiError> detokenize(const pb::DetokenizeRequest& request, pb::DetokenizeReply* reply) const {
    DetokenizeRequest typed;
    typed.model = request.model();
    ApiOr<std::vector<uint32_t>> ids = ids_from_proto(request.token_ids(), "token_ids");
    if (!ids.ok()) return ids.error();
    typed.tokens = std::move(*ids);
    ApiOr<std::string> text = host_.service.detokenize(typed, request.skip_special_tokens());
    if (!text.ok()) return text.error();
    reply->set_text(std::move(*text));
    return std::nullopt;
  }

  GenerateHost& host_;
};

std::string target_text(const std::string& host, int port) {
  return host.find(':') != std::string::npos ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

}  // namespace

GrpcOptions grpc_options(const Profile& profile) {
  GrpcOptions out;
  out.host = profile.grpc.listen.host;
  out.port = static_cast<uint16_t>(profile.grpc.listen.port);
  out.max_message_bytes = static_cast<int>(std::min<int64_t>(profile.grpc.max_message_bytes, 1 << 30));
  out.write_buffer_bytes = static_cast<size_t>(profile.http.write_buffer_bytes);
  return out;
}

class InferenceServer::Impl {
 public:
  Impl(GrpcOptions options, ModelService& service, ServiceMetrics& metrics)
      : options_(std::move(options)),
        host_{service, metrics, options_.write_buffer_bytes, writers_},
        inference_(host_) {}
  ~Impl() { stop(std::chrono::milliseconds(0)); }

  absl::Status listen() {
    grpc::ServerBuilder builder;
    const std::string target = target_text(options_.host, options_.port);
    builder.AddListeningPort(target, grpc::InsecureServerCredentials(), &port_);
    builder.SetMaxReceiveMessageSize(options_.max_message_bytes);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a port that is taken is an error
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsAConnection);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
    builder.RegisterService(&inference_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) {
      server_.reset();
      return absl::UnavailableError(
          fmt::format("grpc.listen: cannot listen on {}: the address is taken or not of this host", target));
    }
    return absl::OkStatus();
  }

  int port() const { return port_; }
  std::string address() const { return target_text(options_.host, port_); }

  void stop(std::chrono::milliseconds grace) {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now() + grace);
    server_.reset();
  }

 private:
  const GrpcOptions options_;
  WorkerPool writers_{1};
  GenerateHost host_;
  InferenceService inference_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

InferenceServer::InferenceServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
InferenceServer::~InferenceServer() = default;

absl::StatusOr<std::unique_ptr<InferenceServer>> InferenceServer::start(GrpcOptions options, ModelService& service,
                                                                        ServiceMetrics& metrics) {
  auto impl = std::make_unique<Impl>(std::move(options), service, metrics);
  if (const absl::Status status = impl->listen(); !status.ok()) return status;
  return std::unique_ptr<InferenceServer>(new InferenceServer(std::move(impl)));
}

uint16_t InferenceServer::port() const { return static_cast<uint16_t>(impl_->port()); }
std::string InferenceServer::address() const { return impl_->address(); }
void InferenceServer::stop(std::chrono::milliseconds grace) { impl_->stop(grace); }

}  // namespace tensorfold
