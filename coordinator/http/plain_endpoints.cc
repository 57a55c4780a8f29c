#include "coordinator/http/plain_endpoints.h"

#include "coordinator/api/json_writer.h"
#include "coordinator/api/service_bodies.h"

namespace tensorfold {
namespace {

void write_rank(JsonWriter& json, const RankStatus& rank) {
  json.begin_object().field("rank", rank.rank).field("host", rank.host).field("pid", rank.pid);
  json.field("state", rank_state_name(rank.state));
  json.field("seconds_since_heartbeat", rank.seconds_since_heartbeat);
  json.field("last_step", rank.last_step).field("seconds_since_step", rank.seconds_since_step);
  if (!rank.cause.empty()) json.field("cause", rank.cause);
  if (!rank.progress.phase.empty()) {
    json.key("progress").begin_object().field("phase", rank.progress.phase);
    json.field("done", rank.progress.done).field("total", rank.progress.total).end_object();
  }
  json.end_object();
}

HttpReply ready_reply(bool trusted, const ModelService& service) {
  const Readiness readiness = service.readiness();
  const EngineStatus status = service.engine().status();
  JsonWriter json;
  json.begin_object().field("ready", readiness.ready).key("reason");
  if (readiness.ready) {
    json.null();
  } else {
    json.string(trusted ? readiness.reason : "not ready; the reason is shown to clients with a key");
  }
  if (trusted) {
    json.field("epoch", readiness.epoch).field("seconds_since_step", status.seconds_since_step);
    json.field("running", static_cast<int64_t>(status.active)).field("queued", static_cast<int64_t>(status.queued));
    json.key("ranks").begin_array();
    for (const RankStatus& rank : readiness.ranks) write_rank(json, rank);
    json.end_array();
  }
  HttpReply reply;
  reply.status = readiness.ready ? 200 : 503;
  reply.body = json.end_object().take();
  if (!readiness.ready) reply.headers.emplace_back("Retry-After", "1");
  return reply;
}

HttpReply model_reply(const std::string& name, const ModelService& service) {
  const ServedModel* model = service.find_model(name);
  if (model == nullptr) return error_reply(model_not_found_error(name, service.options().names));
  HttpReply reply;
  reply.body = model_body(*model);
  return reply;
}

}  // namespace

HttpReply quick_reply(const Route& route, bool trusted, const ModelService& service, const ServiceMetrics& metrics) {
  HttpReply reply;
  switch (route.endpoint) {
    case Endpoint::kHealth:
      reply.body = "{\"status\":\"ok\"}";
      return reply;
    case Endpoint::kReady:
      return ready_reply(trusted, service);
    case Endpoint::kModels:
      reply.body = models_body(service.models());
      return reply;
    case Endpoint::kModel:
      return model_reply(route.argument, service);
    case Endpoint::kMetrics:
      reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
      reply.body = metrics.scrape(service);
      return reply;
    default:
      return error_reply(internal_error("an endpoint without an answer"));
  }
}

HttpReply tokenize_reply(std::string_view body, const ModelService& service) {
  ApiOr<TokenizeRequest> request = parse_tokenize_request(body);
  if (!request.ok()) return error_reply(request.error());
  ApiOr<std::vector<uint32_t>> ids = service.tokenize(*request);
  if (!ids.ok()) return error_reply(ids.error());
  HttpReply reply;
  reply.body = tokenize_body(*ids, service.context());
  return reply;
}

HttpReply detokenize_reply(std::string_view body, const ModelService& service) {
  ApiOr<DetokenizeRequest> request = parse_detokenize_request(body);
  if (!request.ok()) return error_reply(request.error());
  ApiOr<std::string> text = service.detokenize(*request);
  if (!text.ok()) return error_reply(text.error());
  HttpReply reply;
  reply.body = detokenize_body(*text);
  return reply;
}

HttpReply options_reply(Endpoint endpoint, bool cors) {
  HttpReply reply;
  reply.status = 204;
  const std::string allowed(allowed_methods(endpoint));
  reply.headers.emplace_back("Allow", allowed);
  if (cors) {
    reply.headers.emplace_back("Access-Control-Allow-Methods", allowed);
    reply.headers.emplace_back("Access-Control-Allow-Headers", "Authorization, Content-Type, X-Request-Id");
    reply.headers.emplace_back("Access-Control-Max-Age", "600");
  }
  return reply;
}

}  // namespace tensorfold
