// One gRPC stream to rank 0. A reader thread hands over what comes in; a writer thread sends what is posted, and
// heartbeats.
//
// Thread-safety: post(), cancel() and end() from any thread, end() from none of the two threads of the stream.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "tensorfold/v1/cluster.grpc.pb.h"
#include "transport/base/deadline.h"
#include "transport/join/outbox.h"

namespace tensorfold {

/// A channel with bounded messages, that goes through no proxy and shares nothing with an earlier one.
std::shared_ptr<grpc::Channel> make_coordinator_channel(const std::string& address);

class CoordinatorStream {
 public:
  struct Handlers {
    std::function<void(CoordinatorStream&, const v1::CoordinatorMessage&)> on_message;  // reader thread
    std::function<void()> on_end;                                                       // reader thread, once, last
    std::function<std::optional<v1::MemberMessage>()> heartbeat;                        // writer thread
  };

  /// Does not wait: the reader thread opens the stream. Nothing may be posted before the first message has come in.
  CoordinatorStream(std::shared_ptr<grpc::Channel> channel, Handlers handlers,
                    std::chrono::milliseconds heartbeat_interval);
  ~CoordinatorStream() { end(); }
  CoordinatorStream(const CoordinatorStream&) = delete;
  CoordinatorStream& operator=(const CoordinatorStream&) = delete;

  void post(v1::MemberMessage message);

  /// Waits until all that was posted is written, the stream is dead, or the deadline.
  void flush(Deadline deadline) { outbox_->flush(deadline); }

  /// Makes the reader and the writer stop soon; on_end follows.
  void cancel() { context_.TryCancel(); }

  /// Cancels, ends both threads and returns why the stream ended, for people. May be called again.
  std::string end();

 private:
  using Stream = grpc::ClientReaderWriter<v1::MemberMessage, v1::CoordinatorMessage>;

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Cluster::Stub> stub_;
  const Handlers handlers_;
  grpc::ClientContext context_;
  std::unique_ptr<Stream> stream_;  // set by the reader thread, before its first message
  std::unique_ptr<Outbox<v1::MemberMessage>> outbox_;
  std::thread reader_;
  std::mutex end_mutex_;
  bool ended_ = false;     // by end_mutex_
  std::string ended_why_;  // by end_mutex_
};

}  // namespace tensorfold
