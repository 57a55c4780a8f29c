// The operations of Communicator over a MessageEngine: tags, sequence numbers, sizes, deadlines, failure and waiting
// are the same for every transport made of messages.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/communicator.h"
#include "transport/base/message_engine.h"
#include "transport/base/message_tag.h"
#include "transport/base/spin_policy.h"

namespace tensorfold {

struct WorldMembership {
  int rank = 0;
  int world = 1;
  uint32_t epoch = 0;
  std::vector<std::string> labels;  // one a rank
};

class MessageCommunicator : public Communicator {
 public:
  // `membership` has passed check_membership.
  MessageCommunicator(std::string name, WorldMembership membership, std::unique_ptr<MessageEngine> engine);
  ~MessageCommunicator() override;
  MessageCommunicator(const MessageCommunicator&) = delete;
  MessageCommunicator& operator=(const MessageCommunicator&) = delete;

  int rank() const override { return membership_.rank; }
  int world() const override { return membership_.world; }
  const std::string& name() const override { return name_; }
  uint32_t epoch() const override { return membership_.epoch; }
  const std::string& label(int rank) const override { return membership_.labels[static_cast<size_t>(rank)]; }

  absl::Status all_gather(std::span<const std::byte> mine, std::span<const size_t> sizes, std::span<std::byte> out,
                          Deadline deadline) override;
  absl::Status all_to_all(std::span<const std::byte> send, std::span<const size_t> send_sizes,
                          std::span<std::byte> receive, std::span<const size_t> receive_sizes,
                          Deadline deadline) override;
  absl::Status broadcast(int root, std::vector<std::byte>& message, size_t max_bytes, Deadline deadline) override;
  absl::Status gather(int root, std::span<const std::byte> mine, std::vector<std::vector<std::byte>>* all,
                      size_t max_bytes_each, Deadline deadline) override;
  absl::Status barrier(Deadline deadline) override;
  void abort(absl::Status why) override;
  std::string describe() override;
  absl::StatusOr<LinkMeasure> measure(int peer, Deadline deadline) override;

  // A first message to and from every peer: the links work and all are of one epoch.
  absl::Status connect(Deadline deadline);

 private:
  struct Pending {  // bit r: peer r
    uint32_t sends = 0;
    uint32_t receives = 0;
    uint32_t peeks = 0;
    bool empty() const { return (sends | receives | peeks) == 0; }
  };

  absl::Status begin(MessageKind kind);
  // One message to and one from every peer; pieces in rank order. `send_pieces`, `receive_pieces`: world entries.
  absl::Status exchange(MessageKind kind, std::span<const std::span<const std::byte>> send_pieces,
                        std::span<const std::span<std::byte>> receive_pieces, Deadline deadline);
  absl::Status broadcast_from_here(std::span<const std::byte> message, Deadline deadline);
  absl::Status broadcast_to_here(int root, std::vector<std::byte>& message, size_t max_bytes, Deadline deadline);
  absl::Status gather_here(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all,
                           size_t max_bytes_each, Deadline deadline);
  absl::Status ping_pong(int peer, size_t bytes, int rounds, std::vector<std::byte>& buffer, double& median_us,
                         Deadline deadline);
  absl::Status send_to(MessageKind kind, int peer, std::span<const std::byte> data, Deadline deadline);
  absl::Status receive_from(MessageKind kind, int peer, std::span<std::byte> out, Deadline deadline);

  void post_send(MessageKind kind, int peer, std::span<const std::byte> data);
  void post_receive(int peer, std::span<std::byte> out);
  // Waits until nothing of `pending` is left; on error `pending` says what was. Received messages are checked.
  absl::Status wait(MessageKind kind, Pending& pending, SpinPolicy& spin, Deadline deadline);
  absl::Status poll(MessageKind kind, Pending& pending);
  absl::Status check_peers(MessageKind kind, const Pending& pending);
  absl::Status deadline_error(MessageKind kind, const Pending& pending, Deadline::Clock::time_point start) const;
  absl::Status check_arrival(MessageKind kind, int peer, const Arrival& arrival);
  // Checks a peeked message, which is not consumed, against the limit.
  absl::Status check_peeked(MessageKind kind, int peer, size_t max_bytes);
  absl::Status abort_status() const;
  // Makes `why` final.
  absl::Status fail(absl::Status why);
  std::string peer_name(int peer) const;

  const std::string name_;
  const WorldMembership membership_;
  const std::unique_ptr<MessageEngine> engine_;
  std::array<uint32_t, kMaxWorld> sent_{};      // messages sent to each peer
  std::array<uint32_t, kMaxWorld> received_{};  // messages received from each peer
  std::array<size_t, kMaxWorld> expected_{};    // bytes of the receive posted for each peer
  std::array<std::optional<Arrival>, kMaxWorld> peeked_{};
  SpinPolicy idle_spin_;      // waits for work
  SpinPolicy exchange_spin_;  // waits inside a pass, where peers are at most a kernel behind
  absl::Status failure_;      // final once not OK

  std::atomic<bool> aborted_{false};
  mutable std::mutex abort_mutex_;
  absl::Status abort_status_;  // guarded by abort_mutex_
};

}  // namespace tensorfold
