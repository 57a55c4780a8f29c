#include "coordinator/grpc/convert.h"

#include <fmt/format.h>

#include <boost/json.hpp>
#include <limits>
#include <utility>

#include "coordinator/api/request_fields.h"

namespace tensorfold {
namespace {

boost::json::string json_text(const std::string& text) { return boost::json::string(text); }

// Arguments may be any text: the chat parser takes them as the model wrote them.
boost::json::object message_json(const pb::ChatMessage& message) {
  boost::json::object out;
  out["role"] = json_text(message.role());
  out["content"] = json_text(message.content());
  if (!message.reasoning_content().empty()) out["reasoning_content"] = json_text(message.reasoning_content());
  if (!message.tool_call_id().empty()) out["tool_call_id"] = json_text(message.tool_call_id());
  if (!message.name().empty()) out["name"] = json_text(message.name());
  boost::json::array calls;
  for (const pb::ToolCall& call : message.tool_calls()) {
    boost::json::object function;
    function["name"] = json_text(call.name());
    function["arguments"] = json_text(call.arguments_json());
    boost::json::object item;
    item["id"] = json_text(call.id());
    item["type"] = "function";
    item["function"] = std::move(function);
    calls.push_back(std::move(item));
  }
  if (!calls.empty()) out["tool_calls"] = std::move(calls);
  return out;
}

// JSON inside a field, whose errors name the field.
ApiOr<boost::json::value> json_field(const std::string& text, const char* field) {
  ApiOr<boost::json::value> parsed = parse_json_body(text);
  if (parsed.ok()) return parsed;
  return invalid_value_error(field, parsed.error().message);
}

boost::json::value tool_choice_json(const std::string& choice) {
  if (choice == "auto" || choice == "none" || choice == "required") return json_text(choice);
  boost::json::object function;
  function["name"] = json_text(choice);
  boost::json::object out;
  out["type"] = "function";
  out["function"] = std::move(function);
  return out;
}

std::optional<ApiError> read_logit_bias(const pb::Sampling& sampling, SamplingParams* params) {
  if (sampling.logit_bias().empty()) return std::nullopt;
  params->logit_bias.clear();
  for (const auto& [id, bias] : sampling.logit_bias()) {
    if (id < 0) return invalid_value_error("logit_bias", fmt::format("{} is not a token id", id));
    params->logit_bias.push_back({static_cast<uint32_t>(id), bias});
  }
  return std::nullopt;
}

}  // namespace

ApiOr<ChatRequest> chat_from_proto(const std::string& model, const pb::Chat& chat, const RequestDefaults& defaults) {
  boost::json::object body;
  if (!model.empty()) body["model"] = json_text(model);
  boost::json::array messages;
  for (const pb::ChatMessage& message : chat.messages()) messages.push_back(message_json(message));
  body["messages"] = std::move(messages);
  if (!chat.tools_json().empty()) {
    ApiOr<boost::json::value> tools = json_field(chat.tools_json(), "tools_json");
    if (!tools.ok()) return tools.error();
    body["tools"] = std::move(*tools);
  }
  if (!chat.tool_choice().empty()) body["tool_choice"] = tool_choice_json(chat.tool_choice());
  if (chat.has_enable_thinking()) body["enable_thinking"] = chat.enable_thinking();
  if (!chat.template_args_json().empty()) {
    ApiOr<boost::json::value> variables = json_field(chat.template_args_json(), "template_args_json");
    if (!variables.ok()) return variables.error();
    body["chat_template_kwargs"] = std::move(*variables);
  }
  return parse_chat_request(boost::json::serialize(body), defaults);
}

ApiOr<std::vector<uint32_t>> ids_from_proto(const google::protobuf::RepeatedField<int32_t>& ids, const char* field) {
  std::vector<uint32_t> out;
  out.reserve(static_cast<size_t>(ids.size()));
  for (const int32_t id : ids) {
    if (id < 0) return invalid_value_error(field, fmt::format("{} is not a token id", id));
    out.push_back(static_cast<uint32_t>(id));
  }
  return out;
}

ApiOr<RequestOptions> options_from_proto(const pb::GenerateRequest& request, const RequestDefaults& defaults) {
  const pb::Sampling& sampling = request.sampling();
  RequestOptions out;
  out.sampling = defaults.sampling;
  if (sampling.has_temperature()) out.sampling.temperature = sampling.temperature();
  if (sampling.has_top_k()) out.sampling.top_k = sampling.top_k();
  if (sampling.has_top_p()) out.sampling.top_p = sampling.top_p();
  if (sampling.has_min_p()) out.sampling.min_p = sampling.min_p();
  if (sampling.has_repetition_penalty()) out.sampling.repetition_penalty = sampling.repetition_penalty();
  if (sampling.has_presence_penalty()) out.sampling.presence_penalty = sampling.presence_penalty();
  if (sampling.has_frequency_penalty()) out.sampling.frequency_penalty = sampling.frequency_penalty();
  if (auto error = read_logit_bias(sampling, &out.sampling)) return *error;
  if (sampling.has_seed()) out.seed = sampling.seed();
  if (sampling.has_n()) out.n = sampling.n();
  out.stop.assign(sampling.stop().begin(), sampling.stop().end());
  ApiOr<std::vector<uint32_t>> stop_ids = ids_from_proto(sampling.stop_ids(), "stop_ids");
  if (!stop_ids.ok()) return stop_ids.error();
  if (stop_ids->size() > kMaxStopIds) {
    return invalid_value_error("stop_ids", fmt::format("{} ids; at most {}", stop_ids->size(), kMaxStopIds));
  }
  out.stop_token_ids = std::move(*stop_ids);
  if (sampling.has_logprobs()) out.logprobs = sampling.logprobs();
  if (sampling.has_max_tokens()) out.max_tokens = sampling.max_tokens();
  if (sampling.has_min_tokens()) out.min_tokens = sampling.min_tokens();
  if (sampling.has_ignore_eos()) out.ignore_eos = sampling.ignore_eos();
  if (request.has_draft()) out.draft = request.draft();
  if (request.has_cache()) out.cache = request.cache();
  out.return_token_ids = request.return_token_ids();
  out.progress = request.progress();
  switch (request.priority()) {
    case pb::PRIORITY_UNSPECIFIED:
    case pb::PRIORITY_FOREGROUND:
      break;
    case pb::PRIORITY_BACKGROUND:
      out.priority = Priority::kBackground;
      break;
    default:
      return invalid_value_error("priority", "it is neither PRIORITY_FOREGROUND nor PRIORITY_BACKGROUND");
  }
  out.stream = true;
  return out;
}

pb::GenerateEvent progress_to_proto(const ProgressEvent& event) {
  pb::GenerateEvent out;
  pb::Progress* progress = out.mutable_progress();
  progress->set_choice(event.choice);
  progress->set_read(event.read);
  progress->set_total(event.total);
  progress->set_tokens_per_s(event.tokens_per_s);
  progress->set_seconds_left(event.seconds_left);
  return out;
}

std::optional<pb::GenerateEvent> delta_to_proto(const Tokenizer& tokenizer, uint32_t choice, const ReplyPiece& piece,
                                                bool token_ids, bool logprobs) {
  if (!piece.shows_something() && (piece.tokens.empty() || (!token_ids && !logprobs))) return std::nullopt;
  pb::GenerateEvent out;
  pb::Delta* delta = out.mutable_delta();
  delta->set_choice(choice);
  delta->set_text(piece.content);
  delta->set_reasoning(piece.reasoning);
  for (const ToolCallDelta& call : piece.tool_calls) {
    pb::ToolCallDelta* sent = delta->add_tool_calls();
    sent->set_index(call.index);
    sent->set_id(call.id.value_or(""));
    sent->set_name(call.name.value_or(""));
    sent->set_arguments_json(call.arguments);
  }
  for (const GeneratedToken& token : piece.tokens) {
    if (token_ids) delta->add_token_ids(static_cast<int32_t>(token.id));
    if (!logprobs || !token.logprobs) continue;
    pb::TokenLogprob* sent = delta->add_logprobs();
    sent->set_token_id(static_cast<int32_t>(token.id));
    sent->set_token(shown_bytes(tokenizer, token.id));
    sent->set_logprob(token.logprobs->chosen.logprob);
    for (const IdLogprob& other : token.logprobs->top) {
      pb::TokenLogprob::Alternative* top = sent->add_top();
      top->set_token_id(static_cast<int32_t>(other.id));
      top->set_token(shown_bytes(tokenizer, other.id));
      top->set_logprob(other.logprob);
    }
  }
  return out;
}

pb::FinishReason reason_to_proto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return pb::FINISH_REASON_STOP;
    case FinishReason::kLength:
      return pb::FINISH_REASON_LENGTH;
    case FinishReason::kToolCalls:
      return pb::FINISH_REASON_TOOL_CALLS;
    case FinishReason::kCancelled:
      return pb::FINISH_REASON_CANCELLED;
    case FinishReason::kError:
      break;
  }
  return pb::FINISH_REASON_UNSPECIFIED;
}

void stats_to_proto(const GenerationStats& stats, const std::string& fingerprint, pb::Finish* out) {
  pb::Usage* usage = out->mutable_usage();
  usage->set_prompt_tokens(stats.prompt_tokens);
  usage->set_completion_tokens(stats.completion_tokens);
  usage->set_cached_tokens(stats.cached_tokens);
  pb::TensorfoldBlock* block = out->mutable_tensorfold();
  block->set_token_sha(stats.token_sha);
  block->set_min_rows(stats.min_rows);
  block->set_prefill_s(stats.prefill_s);
  block->set_decode_s(stats.decode_s);
  block->set_rounds(static_cast<uint32_t>(stats.rounds));
  block->set_drafted(static_cast<uint32_t>(stats.drafted));
  block->set_accepted(static_cast<uint32_t>(stats.accepted));
  block->set_cached(stats.cached_tokens);
  block->set_fingerprint(fingerprint);
  for (const uint32_t id : stats.token_ids) block->add_token_ids(static_cast<int32_t>(id));
}

void readiness_to_proto(const ModelService& service, bool trusted, pb::StatusReply* out) {
  const Readiness readiness = service.readiness();
  const EngineStatus status = service.engine().status();
  out->set_ready(readiness.ready);
  out->set_uptime_s(service.uptime_s());
  if (!trusted) return;  // hosts are for clients with a key
  out->set_reason(readiness.reason);
  out->set_epoch(readiness.epoch);
  out->set_world(static_cast<uint32_t>(readiness.ranks.size()));
  out->set_running(static_cast<uint32_t>(status.active));
  out->set_queued(static_cast<uint32_t>(status.queued));
  out->set_parked(status.up ? 0 : static_cast<uint32_t>(status.active));
  for (const RankStatus& rank : readiness.ranks) {
    pb::StatusReply::Rank* sent = out->add_ranks();
    sent->set_rank(rank.rank);
    sent->set_host(rank.host);
    sent->set_pid(rank.pid);
    sent->set_state(rank_state_name(rank.state));
    sent->set_detail(rank.cause.empty() ? rank.progress.phase : rank.cause);
    sent->set_heartbeat_age_s(rank.seconds_since_heartbeat);
    sent->set_last_step(rank.last_step);
    sent->set_last_step_age_s(rank.seconds_since_step);
    sent->set_load_done(rank.progress.done);
    sent->set_load_total(rank.progress.total);
  }
}

void models_to_proto(const ModelService& service, pb::ModelsReply* out) {
  for (const ServedModel& model : service.models()) {
    pb::Model* sent = out->add_models();
    sent->set_id(model.id);
    sent->set_family(service.options().family);
    sent->set_format(service.options().format);
    sent->set_max_model_len(model.context);
    sent->set_vocabulary(service.engine().model().vocabulary);
    sent->set_fingerprint(model.fingerprint);
    for (const std::string& drafter : service.options().drafters) sent->add_drafters(drafter);
    sent->set_created_unix_s(model.created);
  }
}

grpc::Status error_to_status(const ApiError& error, grpc::ServerContextBase* context) {
  if (error.retry_after_s) context->AddTrailingMetadata("retry-after", std::to_string(*error.retry_after_s));
  context->AddTrailingMetadata("tensorfold-code", std::string(error.info().name));
  // A context that is too short is the request's fault, as the proto says.
  int code = error.info().grpc_code;
  if (code == grpc::StatusCode::OUT_OF_RANGE) code = grpc::StatusCode::INVALID_ARGUMENT;
  return {static_cast<grpc::StatusCode>(code), error.message};
}

static std::string_view authorization_of(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) return {};
  return {found->second.data(), found->second.size()};
}

bool call_authorized(const ModelService& service, const grpc::ServerContextBase& context) {
  return service.authorized(authorization_of(context));
}

bool call_background(const ModelService& service, const grpc::ServerContextBase& context) {
  return service.background_key(authorization_of(context));
}

}  // namespace tensorfold
