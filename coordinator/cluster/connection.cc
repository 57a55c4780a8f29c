#include "coordinator/cluster/connection.h"

#include <utility>

namespace tensorfold {

void MemberConnection::start_sending(std::function<std::optional<v1::CoordinatorMessage>()> heartbeat,
                                     std::chrono::milliseconds interval) {
  outbox_ = std::make_unique<Outbox<v1::CoordinatorMessage>>(
      [this](const v1::CoordinatorMessage& message) {
        if (stream_->Write(message)) return true;
        cancel();  // the reader has to notice, too
        return false;
      },
      std::move(heartbeat), interval);
}

void MemberConnection::post(v1::CoordinatorMessage message) {
  if (!outbox_->post(std::move(message))) cancel();
}

void MemberConnection::cancel() {
  const std::lock_guard lock(mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void MemberConnection::finish() {
  if (outbox_ != nullptr) {
    cancel();
    outbox_->close();
  }
  const std::lock_guard lock(mutex_);
  context_ = nullptr;
}

}  // namespace tensorfold
