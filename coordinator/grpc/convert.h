// Messages of inference.proto ↔ the types that both front ends share. Protobuf stops here. Pure functions.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <optional>
#include <string>

#include "coordinator/api/chat_request.h"
#include "coordinator/api/completion_request.h"
#include "coordinator/api/generation.h"
#include "coordinator/service/choice_reader.h"
#include "coordinator/service/model_service.h"
#include "tensorfold/v1/inference.pb.h"

namespace tensorfold {

namespace pb = ::tensorfold::v1;

/// A chat as the HTTP API would read it: the same checks, the same error messages. `options` is left at the defaults.
ApiOr<ChatRequest> chat_from_proto(const std::string& model, const pb::Chat& chat, const RequestDefaults& defaults);

ApiOr<RequestOptions> options_from_proto(const pb::GenerateRequest& request, const RequestDefaults& defaults);

/// Token ids of a message; negative ones are refused, the vocabulary is checked later.
ApiOr<std::vector<uint32_t>> ids_from_proto(const google::protobuf::RepeatedField<int32_t>& ids, const char* field);

/// A piece of a choice; nothing if there is nothing to send of it.
std::optional<pb::GenerateEvent> delta_to_proto(const Tokenizer& tokenizer, uint32_t choice, const ReplyPiece& piece,
                                                bool token_ids, bool logprobs);
pb::GenerateEvent progress_to_proto(const ProgressEvent& event);
void stats_to_proto(const GenerationStats& stats, const std::string& fingerprint, pb::Finish* out);
pb::FinishReason reason_to_proto(FinishReason reason);

void readiness_to_proto(const ModelService& service, bool trusted, pb::StatusReply* out);
void models_to_proto(const ModelService& service, pb::ModelsReply* out);

/// The catalogue's code and message; "retry-after" (seconds) and "tensorfold-code" go into the trailing metadata.
grpc::Status error_to_status(const ApiError& error, grpc::ServerContextBase* context);

/// Whether the call's metadata holds a key, or none is needed.
bool call_authorized(const ModelService& service, const grpc::ServerContextBase& context);
/// Whether the call's key makes its requests background.
bool call_background(const ModelService& service, const grpc::ServerContextBase& context);

}  // namespace tensorfold
