// /admin/states: what lies on disk, and what is pinned. Behind keys of its own (http.admin_keys); without any there is
// no such path. Runs on a worker: it waits for the scheduler's thread, a few seconds at most.
#pragma once

#include <string_view>

#include "coordinator/http/http_reply.h"
#include "coordinator/service/model_service.h"

namespace tensorfold {

/// GET lists; POST {"action": "pin", "key", "name"}, {"action": "unpin", "name"} or {"action": "drop", "key"}.
HttpReply states_reply(std::string_view method, std::string_view body, const ModelService& service);

}  // namespace tensorfold
