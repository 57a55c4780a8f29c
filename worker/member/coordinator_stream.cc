#include "worker/member/coordinator_stream.h"

#include <utility>

#include "transport/join/identity.h"

namespace tensorfold {
namespace {

constexpr int kMaxCoordinatorMessage = 1 << 20;  // bytes; as cluster.proto says
constexpr int kMaxMemberMessage = 64 << 10;

}  // namespace

std::shared_ptr<grpc::Channel> make_coordinator_channel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxCoordinatorMessage);
  arguments.SetMaxSendMessageSize(kMaxMemberMessage);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);          // the environment's proxy is for other traffic
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // no state shared with an earlier attempt
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);             // a stream is a membership: never repeated behind our back
  arguments.SetServiceConfigJSON("{}");
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

CoordinatorStream::CoordinatorStream(std::shared_ptr<grpc::Channel> channel, Handlers handlers,
                                     std::chrono::milliseconds heartbeat_interval)
    : channel_(std::move(channel)), stub_(v1::Cluster::NewStub(channel_)), handlers_(std::move(handlers)) {
  outbox_ = std::make_unique<Outbox<v1::MemberMessage>>(
      [this](const v1::MemberMessage& message) {
        if (stream_->Write(message)) return true;
        cancel();  // the reader has to notice, too
        return false;
      },
      handlers_.heartbeat, heartbeat_interval);
  reader_ = std::thread([this] {
    stream_ = stub_->Join(&context_);
    v1::CoordinatorMessage message;
    while (stream_->Read(&message)) handlers_.on_message(*this, message);
    handlers_.on_end();
  });
}

void CoordinatorStream::post(v1::MemberMessage message) {
  if (!outbox_->post(std::move(message))) cancel();
}

std::string CoordinatorStream::end() {
  const std::lock_guard lock(end_mutex_);
  if (std::exchange(ended_, true)) return ended_why_;
  cancel();
  reader_.join();
  outbox_->close();
  const grpc::Status status = stream_->Finish();
  if (!status.ok() && status.error_code() != grpc::StatusCode::CANCELLED) {
    ended_why_ = printable(status.error_message(), 300);
  }
  return ended_why_;
}

}  // namespace tensorfold
