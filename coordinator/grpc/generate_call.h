// Internal to the server: one Generate call.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/grpc/convert.h"
#include "coordinator/service/event_queue.h"
#include "coordinator/service/metrics.h"
#include "coordinator/service/model_service.h"
#include "coordinator/service/worker_pool.h"

namespace tensorfold {

/// What all calls of a server share. Outlives them.
struct GenerateHost {
  ModelService& service;
  ServiceMetrics& metrics;
  size_t write_buffer_bytes;
  WorkerPool& writers;  // turns the engine's events into messages
};

/// Begins a call; gRPC owns what is returned.
grpc::ServerWriteReactor<pb::GenerateEvent>* begin_generate(GenerateHost& host, grpc::CallbackServerContext* context,
                                                            const pb::GenerateRequest* request);

}  // namespace tensorfold
