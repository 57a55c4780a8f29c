// The gRPC service of cluster.proto: the handshake of one stream, then its messages into the Roll.
//
// Thread-safety: gRPC calls Join from one thread a stream.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/cluster/connection.h"
#include "coordinator/cluster/roll.h"
#include "tensorfold/v1/cluster.grpc.pb.h"

namespace tensorfold {

class JoinService : public v1::Cluster::Service {
 public:
  /// `self` is rank 0's identity; the roll outlives the service.
  JoinService(RankIdentity self, std::string token, ClusterTimings timings, Roll& roll);

  grpc::Status Join(grpc::ServerContext* context, MemberConnection::Stream* stream) override;

 private:
  /// The rank that the stream holds from now on. Unavailable: the member went away. Else the reason of the refusal.
  absl::StatusOr<RankIdentity> handshake(const std::shared_ptr<MemberConnection>& connection, const std::string& peer);
  absl::Status check_token(const RankIdentity& joining, const std::string& proof, const std::string& expected) const;
  void serve(const RankIdentity& member, const std::shared_ptr<MemberConnection>& connection);

  const RankIdentity self_;
  const std::string token_;
  const ClusterTimings timings_;
  Roll& roll_;
};

}  // namespace tensorfold
