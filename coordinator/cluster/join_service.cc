#include "coordinator/cluster/join_service.h"

#include <fmt/format.h>

#include <utility>

#include "coordinator/cluster/wire.h"
#include "transport/join/token.h"

namespace tensorfold {
namespace {

std::string text_of(const absl::Status& status) { return std::string(status.message()); }

}  // namespace

JoinService::JoinService(RankIdentity self, std::string token, ClusterTimings timings, Roll& roll)
    : self_(std::move(self)), token_(std::move(token)), timings_(timings), roll_(roll) {}

grpc::Status JoinService::Join(grpc::ServerContext* context, MemberConnection::Stream* stream) {
  const auto connection = std::make_shared<MemberConnection>(context, stream);
  if (!roll_.begin_handshake(connection)) {
    connection->finish();
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, "too many ranks are joining at once, or the coordinator is ending"};
  }
  const std::string peer = printable(context->peer(), 128);
  const absl::StatusOr<RankIdentity> member = handshake(connection, peer);
  roll_.end_handshake(connection);
  if (member.ok()) {
    serve(*member, connection);
  } else if (!absl::IsUnavailable(member.status())) {
    roll_.notice(fmt::format("refused a rank from {}: {}", peer, text_of(member.status())));
    v1::CoordinatorMessage refused;
    refused.mutable_refused()->set_reason(text_of(member.status()));
    connection->write(refused);
  }
  connection->finish();
  return grpc::Status::OK;
}

absl::StatusOr<RankIdentity> JoinService::handshake(const std::shared_ptr<MemberConnection>& connection,
                                                    const std::string& peer) {
  const absl::StatusOr<std::string> nonce = make_nonce();
  if (!nonce.ok()) return nonce.status();
  v1::CoordinatorMessage challenge;
  challenge.mutable_challenge()->set_protocol(self_.protocol);
  challenge.mutable_challenge()->set_nonce(*nonce);
  v1::MemberMessage message;
  if (!connection->write(challenge) || !connection->read(&message)) {
    return absl::UnavailableError("the member went away before it said who it is");
  }
  if (!message.has_hello()) return absl::InvalidArgumentError("the first message of a rank has to be Hello");
  const v1::Hello& hello = message.hello();
  absl::StatusOr<RankIdentity> joining = identity_from_wire(hello.identity());
  if (!joining.ok()) return joining.status();
  if (hello.nonce().size() != kNonceBytes) {
    return absl::InvalidArgumentError(fmt::format("{} from {} sent a nonce of {} bytes instead of {}", joining->label(),
                                                  peer, hello.nonce().size(), kNonceBytes));
  }
  // The token first: what this cluster consists of is for those who know it.
  const std::string expected = token_proof(token_, Prover::kMember, *nonce, hello.nonce(), *joining);
  if (absl::Status status = check_token(*joining, hello.proof(), expected); !status.ok()) return status;
  if (absl::Status status = check_join(self_, *joining); !status.ok()) return status;

  v1::CoordinatorMessage accepted;
  accepted.mutable_accepted()->set_proof(token_proof(token_, Prover::kCoordinator, *nonce, hello.nonce(), *joining));
  if (absl::Status status = roll_.claim(*joining, hello.last_epoch(), connection, std::move(accepted)); !status.ok()) {
    return status;
  }
  return joining;
}

absl::Status JoinService::check_token(const RankIdentity& joining, const std::string& proof,
                                      const std::string& expected) const {
  if (proofs_equal(proof, expected)) return absl::OkStatus();
  if (proof.empty()) {
    return absl::UnauthenticatedError(fmt::format(
        "{} may not join: shared token: the coordinator has one, rank {} has none", joining.label(), joining.rank));
  }
  if (expected.empty()) {
    return absl::UnauthenticatedError(fmt::format(
        "{} may not join: shared token: the coordinator has none, rank {} has one", joining.label(), joining.rank));
  }
  return absl::UnauthenticatedError(
      fmt::format("{} may not join: shared token: rank {} has another one than the coordinator (tokens are not shown)",
                  joining.label(), joining.rank));
}

void JoinService::serve(const RankIdentity& member, const std::shared_ptr<MemberConnection>& connection) {
  std::string cause = "its connection broke";
  v1::MemberMessage message;
  while (connection->read(&message)) {
    if (message.has_leave()) {
      cause = fmt::format("it left: {}", printable(message.leave().reason(), kMaxReason));
      break;
    }
    if (!roll_.receive(member.rank, connection, message)) {
      cause = "it sent a message out of turn";
      break;
    }
  }
  roll_.lose(member.rank, connection, cause);
}

}  // namespace tensorfold
