// Endpoints that do not generate. health, ready, models and metrics take microseconds and run on the connection's own
// thread; tokenize and detokenize run on a worker.
#pragma once

#include <string>
#include <string_view>

#include "coordinator/http/http_reply.h"
#include "coordinator/http/route.h"
#include "coordinator/service/metrics.h"
#include "coordinator/service/model_service.h"

namespace tensorfold {

/// `trusted`: the client has shown a key, or none is required; /ready names hosts only then.
HttpReply quick_reply(const Route& route, bool trusted, const ModelService& service, const ServiceMetrics& metrics);
HttpReply tokenize_reply(std::string_view body, const ModelService& service);
HttpReply detokenize_reply(std::string_view body, const ModelService& service);
/// The answer to OPTIONS.
HttpReply options_reply(Endpoint endpoint, bool cors);

}  // namespace tensorfold
