#include "coordinator/service/model_service.h"

#include <fmt/format.h>
#include <openssl/rand.h>

#include <algorithm>
#include <atomic>
#include <boost/json.hpp>
#include <utility>

#include "coordinator/sampling/params.h"

namespace tensorfold {
namespace {

constexpr int kRetryAfterSeconds = 1;

boost::json::string json_text(std::string_view text) { return boost::json::string(text.data(), text.size()); }

boost::json::array template_calls(const std::vector<HistoryToolCall>& calls) {
  boost::json::array out;
  for (const HistoryToolCall& call : calls) {
    boost::json::object function;
    function["name"] = json_text(call.name);
    function["arguments"] = call.arguments;
    boost::json::object item;
    if (!call.id.empty()) item["id"] = json_text(call.id);
    item["type"] = "function";
    item["function"] = std::move(function);
    out.push_back(std::move(item));
  }
  return out;
}

boost::json::array template_messages(const std::vector<ChatMessage>& messages) {
  boost::json::array out;
  for (const ChatMessage& message : messages) {
    boost::json::object item;
    item["role"] = json_text(template_role_name(message.role));
    item["content"] = json_text(message.content);
    if (message.reasoning_content) item["reasoning_content"] = json_text(*message.reasoning_content);
    if (message.name) item["name"] = json_text(*message.name);
    if (message.tool_call_id) item["tool_call_id"] = json_text(*message.tool_call_id);
    if (!message.tool_calls.empty()) item["tool_calls"] = template_calls(message.tool_calls);
    out.push_back(std::move(item));
  }
  return out;
}

// A template or a tokenizer that says no speaks of the request, whatever the status; only faults of the server's own
// stay what they are.
ApiError request_error(std::string_view param, const absl::Status& status) {
  if (absl::IsInternal(status) || absl::IsUnknown(status)) return internal_error(std::string(status.message()));
  return invalid_value_error(param, std::string(status.message()));
}

std::vector<uint32_t> unsigned_ids(const std::vector<int32_t>& ids) { return {ids.begin(), ids.end()}; }

}  // namespace

absl::StatusOr<std::unique_ptr<ModelService>> ModelService::create(Engine& engine, const Tokenizer& tokenizer,
                                                                   const ChatTemplate* chat,
                                                                   ModelServiceOptions options) {
  if (options.names.empty()) return absl::InvalidArgumentError("a served model needs a name");
  absl::StatusOr<ApiKeys> keys = ApiKeys::parse(options.api_key_hashes);
  if (!keys.ok()) return keys.status();
  absl::StatusOr<ApiKeys> background = ApiKeys::parse(options.background_key_hashes);
  if (!background.ok()) return background.status();
  absl::StatusOr<ApiKeys> admin = ApiKeys::parse(options.admin_key_hashes);
  if (!admin.ok()) return admin.status();
  std::unique_ptr<ModelService> service(
      new ModelService(engine, tokenizer, chat, std::move(options), *std::move(keys), *std::move(background)));
  service->admin_ = *std::move(admin);
  return service;
}

ModelService::ModelService(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate* chat,
                           ModelServiceOptions options, ApiKeys keys, ApiKeys background_keys)
    : engine_(engine),
      tokenizer_(tokenizer),
      chat_(chat),
      options_([&] {
        if (options.created == 0) {
          options.created =
              std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
                  .count();
        }
        options.defaults.vocabulary = engine.model().vocabulary;
        return std::move(options);
      }()),
      keys_(std::move(keys)),
      background_keys_(std::move(background_keys)),
      started_(std::chrono::steady_clock::now()),
      workers_(std::make_unique<WorkerPool>(options_.workers)) {
  for (const std::string& name : options_.names) {
    models_.push_back({name, options_.created, engine.model().context, options_.fingerprint});
  }
}

GenerationBounds ModelService::bounds() const {
  return {
      .context = engine_.model().context, .vocabulary = engine_.model().vocabulary, .max_tokens = options_.max_tokens};
}

// What the profile says of all requests, and of those for `model`.
void ModelService::apply_profile(const std::string& model, GenerationRequest* request) const {
  if (options_.request_timeout.count() > 0) {
    request->deadline = std::chrono::steady_clock::now() + options_.request_timeout;
  }
  const std::vector<std::string>& names = options_.background_names;
  if (std::find(names.begin(), names.end(), reply_model(model)) != names.end()) {
    request->priority = Priority::kBackground;
  }
}

ApiOr<Rendered> ModelService::render(const std::vector<ChatMessage>& messages, const boost::json::array& tools,
                                     const boost::json::object& variables, bool add_generation_prompt) const {
  if (chat_ == nullptr) {
    return unsupported_error("messages", "the checkpoint has no chat template; use /v1/completions");
  }
  const boost::json::value given = tools.empty() ? boost::json::value() : boost::json::value(tools);
  absl::StatusOr<Rendered> rendered =
      chat_->render(template_messages(messages), given, variables, add_generation_prompt);
  if (!rendered.ok()) return request_error("messages", rendered.status());
  return *std::move(rendered);
}

ApiOr<std::vector<uint32_t>> ModelService::encode(const Rendered& rendered) const {
  std::vector<TextSegment> segments;
  segments.reserve(rendered.segments.size());
  for (const PromptSegment& segment : rendered.segments) segments.push_back({segment.text, segment.trusted});
  absl::StatusOr<std::vector<int32_t>> ids = tokenizer_.encode_segments(segments);
  if (!ids.ok()) return request_error("messages", ids.status());
  return unsigned_ids(*ids);
}

ApiOr<std::vector<uint32_t>> ModelService::encode_text(std::string_view text, bool add_special_tokens) const {
  const TextSegment segment{text, false};
  const EncodeOptions options{.add_special_tokens = add_special_tokens};
  absl::StatusOr<std::vector<int32_t>> ids = tokenizer_.encode_segments(std::span(&segment, 1), options);
  if (!ids.ok()) return request_error("prompt", ids.status());
  return unsigned_ids(*ids);
}

ApiOr<PreparedChat> ModelService::prepare_chat(const ChatRequest& request, std::string id) const {
  if (auto error = check_model(request.model, options_.names)) return *error;
  const boost::json::array none;
  const boost::json::array& tools = request.use_tools ? request.tools : none;
  ApiOr<Rendered> rendered = render(request.messages, tools, request.chat_template_kwargs, true);
  if (!rendered.ok()) return rendered.error();
  ApiOr<std::vector<uint32_t>> ids = encode(*rendered);
  if (!ids.ok()) return ids.error();
  ApiOr<GenerationRequest> generation = make_generation(request.options, std::move(id), std::move(*ids), bounds());
  if (!generation.ok()) return generation.error();
  PreparedChat out;
  out.request = std::move(*generation);
  apply_profile(request.model, &out.request);
  out.parser.format = chat_->reply_format();
  // A client that sent no tools expects text; what looks like a call is text then.
  if (tools.empty()) out.parser.format.tools = ToolSyntax::kNone;
  out.parser.starts_in_reasoning = out.parser.format.reasoning && rendered->opens_reasoning();
  if (!tools.empty()) out.parser.tools = tools;
  return out;
}

ApiOr<std::vector<GenerationRequest>> ModelService::prepare_completion(const CompletionRequest& request,
                                                                       std::string id) const {
  if (auto error = check_model(request.model, options_.names)) return *error;
  std::vector<GenerationRequest> out;
  for (size_t i = 0; i < request.prompts.size(); ++i) {
    std::vector<uint32_t> ids;
    if (const std::string* text = std::get_if<std::string>(&request.prompts[i])) {
      ApiOr<std::vector<uint32_t>> encoded = encode_text(*text, true);
      if (!encoded.ok()) return encoded.error();
      ids = std::move(*encoded);
    } else {
      ids = std::get<std::vector<uint32_t>>(request.prompts[i]);
    }
    const std::string name = request.prompts.size() == 1 ? id : fmt::format("{}.{}", id, i);
    ApiOr<GenerationRequest> generation = make_generation(request.options, name, std::move(ids), bounds());
    if (!generation.ok()) {
      ApiError error = generation.error();
      if (error.param == "messages") error.param = "prompt";  // the context's error is made for chats
      return error;
    }
    apply_profile(request.model, &*generation);
    out.push_back(std::move(*generation));
  }
  return out;
}

ApiOr<uint64_t> ModelService::submit(GenerationRequest request, GenerationSink sink) const {
  if (options_.readiness) {
    const Readiness cluster = options_.readiness();
    if (!cluster.ready) {
      ApiError error;
      error.code = engine_.status().passes == 0 ? ErrorCode::kStarting : ErrorCode::kClusterDown;
      error.message =
          fmt::format("the cluster is not serving: {}; try again in {} s", cluster.reason, kRetryAfterSeconds);
      error.retry_after_s = kRetryAfterSeconds;
      return error;
    }
  }
  return engine_.submit(std::move(request), std::move(sink));
}

ApiOr<std::vector<uint32_t>> ModelService::tokenize(const TokenizeRequest& request) const {
  if (auto error = check_model(request.model, options_.names)) return *error;
  if (request.prompt) return encode_text(*request.prompt, request.add_special_tokens);
  ApiOr<Rendered> rendered =
      render(request.messages, request.tools, request.chat_template_kwargs, request.add_generation_prompt);
  if (!rendered.ok()) return rendered.error();
  return encode(*rendered);
}

ApiOr<std::string> ModelService::detokenize(const DetokenizeRequest& request, bool skip_special) const {
  if (auto error = check_model(request.model, options_.names)) return *error;
  const uint32_t vocabulary = engine_.model().vocabulary;
  std::vector<int32_t> ids;
  ids.reserve(request.tokens.size());
  for (size_t i = 0; i < request.tokens.size(); ++i) {
    if (request.tokens[i] >= vocabulary) {
      return invalid_value_error("tokens", fmt::format("token id {} at index {} is not in the vocabulary of {} tokens",
                                                       request.tokens[i], i, vocabulary));
    }
    ids.push_back(static_cast<int32_t>(request.tokens[i]));
  }
  return tokenizer_.decode(ids, skip_special);
}

const ServedModel* ModelService::find_model(std::string_view name) const {
  for (const ServedModel& model : models_) {
    if (model.id == name) return &model;
  }
  return nullptr;
}

Readiness ModelService::readiness() const {
  Readiness out;
  if (options_.readiness) out = options_.readiness();
  if (!out.ready) return out;
  const EngineStatus status = engine_.status();
  const double recent = std::chrono::duration<double>(options_.recent_step).count();
  if (!status.up) {
    out.ready = false;
    out.reason = status.down_reason;
  } else if (status.draining) {
    out.ready = false;
    out.reason = "the server is shutting down";
  } else if (status.seconds_since_step > recent) {
    out.ready = false;
    out.reason = fmt::format("no pass was completed for {:.0f} s; at most {:.0f} s is normal",
                             status.seconds_since_step, recent);
  }
  return out;
}

std::string ModelService::new_id(std::string_view prefix) const {
  unsigned char bytes[12] = {};
  if (RAND_bytes(bytes, sizeof bytes) != 1) {
    // Without randomness ids still differ from one another.
    static std::atomic<uint64_t> next{1};
    return fmt::format("{}{:024x}", prefix, next.fetch_add(1));
  }
  std::string out(prefix);
  for (const unsigned char byte : bytes) out += fmt::format("{:02x}", byte);
  return out;
}

double ModelService::uptime_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
}

}  // namespace tensorfold
