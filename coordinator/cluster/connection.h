// One member's stream, as rank 0 sees it. The gRPC handler's thread makes it, reads from it and ends it; other threads
// post messages and may cancel it at any time, also after its end.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "tensorfold/v1/cluster.grpc.pb.h"
#include "transport/join/outbox.h"

namespace tensorfold {

class MemberConnection {
 public:
  using Stream = grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>;

  /// Both outlive finish().
  MemberConnection(grpc::ServerContext* context, Stream* stream) : context_(context), stream_(stream) {}

  /// Handler's thread only. False: the stream has ended.
  bool read(v1::MemberMessage* message) { return stream_->Read(message); }

  /// Handler's thread only, and only before start_sending().
  bool write(const v1::CoordinatorMessage& message) { return stream_->Write(message); }

  /// Starts the writer thread. Before any post().
  void start_sending(std::function<std::optional<v1::CoordinatorMessage>()> heartbeat,
                     std::chrono::milliseconds interval);

  /// Queues a message. Never blocks; dropped when the stream is dead.
  void post(v1::CoordinatorMessage message);

  /// Any thread: makes read and write return false soon.
  void cancel();

  /// Handler's thread, last of all: cancels the stream and ends the writer thread.
  void finish();

 private:
  std::mutex mutex_;
  grpc::ServerContext* context_;  // by mutex_; null once finished
  Stream* const stream_;
  std::unique_ptr<Outbox<v1::CoordinatorMessage>> outbox_;  // set before the connection is shared
};

}  // namespace tensorfold
