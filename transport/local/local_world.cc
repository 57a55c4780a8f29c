#include "transport/local/local_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "transport/base/collective_checks.h"
#include "transport/base/message_communicator.h"

namespace tensorfold {
namespace {

constexpr size_t kCopiedBytes = size_t{64} << 10;  // longer messages are lent, not copied

// One message on its way. Guarded by the receiver's Inbox::mutex, except that `state` is read by the sender.
struct Message {
  enum State { kQueued, kBeingRead, kDone };

  uint64_t tag = 0;
  std::vector<std::byte> copy;       // the bytes of a short message
  std::span<const std::byte> bytes;  // of `copy`, or of the sender's buffer
  std::atomic<State> state{kQueued};
};

struct Inbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<std::deque<std::shared_ptr<Message>>, kMaxWorld> from;
  std::atomic<uint64_t> events{0};  // counts changes, raised under `mutex`

  void notify() {
    {
      std::lock_guard lock(mutex);
      events.fetch_add(1, std::memory_order_release);
    }
    changed.notify_all();
  }
};

struct World {
  std::array<Inbox, kMaxWorld> inboxes;
  std::mutex mutex;
  absl::Status failure;                      // the first rank's failure; guarded by `mutex`
  std::array<bool, kMaxWorld> left{};        // guarded by `mutex`
  std::atomic<bool> someone_is_gone{false};  // `failure` or `left` is worth a look
};

class LocalEngine : public MessageEngine {
 public:
  LocalEngine(std::shared_ptr<World> world, int rank, int size)
      : world_(std::move(world)), rank_(rank), size_(size), inbox_(world_->inboxes[rank]) {}

  ~LocalEngine() override {
    take_back_sends();
    {
      std::lock_guard lock(world_->mutex);
      world_->left[rank_] = true;
      world_->someone_is_gone.store(true, std::memory_order_release);
    }
    notify_others();
  }

  void post_send(int peer, uint64_t tag, std::span<const std::byte> data) override {
    auto message = std::make_shared<Message>();
    message->tag = tag;
    if (data.size() <= kCopiedBytes) {
      message->copy.assign(data.begin(), data.end());
      message->bytes = message->copy;
    } else {
      message->bytes = data;
      lent_[peer] = message;
    }
    Inbox& to = world_->inboxes[peer];
    {
      std::lock_guard lock(to.mutex);
      to.from[rank_].push_back(std::move(message));
      to.events.fetch_add(1, std::memory_order_release);
    }
    to.changed.notify_all();
  }

  bool send_done(int peer) override {
    if (lent_[peer] == nullptr) return true;
    if (lent_[peer]->state.load(std::memory_order_acquire) != Message::kDone) return false;
    lent_[peer] = nullptr;
    return true;
  }

  void post_receive(int peer, std::span<std::byte> out) override { wanted_[peer] = out; }

  std::optional<Arrival> received(int peer) override {
    if (!wanted_[peer].has_value()) return std::nullopt;
    std::shared_ptr<Message> message;
    {
      std::lock_guard lock(inbox_.mutex);
      if (inbox_.from[peer].empty()) return std::nullopt;
      message = std::move(inbox_.from[peer].front());
      inbox_.from[peer].pop_front();
      message->state.store(Message::kBeingRead, std::memory_order_relaxed);
    }
    const size_t bytes = std::min(message->bytes.size(), wanted_[peer]->size());
    if (bytes != 0) std::memcpy(wanted_[peer]->data(), message->bytes.data(), bytes);
    const Arrival arrival{message->tag, message->bytes.size()};
    wanted_[peer].reset();
    message->state.store(Message::kDone, std::memory_order_release);
    if (arrival.bytes > kCopiedBytes) world_->inboxes[peer].notify();
    return arrival;
  }

  std::optional<Arrival> peek(int peer) override {
    std::lock_guard lock(inbox_.mutex);
    if (inbox_.from[peer].empty()) return std::nullopt;
    const Message& message = *inbox_.from[peer].front();
    return Arrival{message.tag, message.bytes.size()};
  }

  void progress() override { seen_ = inbox_.events.load(std::memory_order_acquire); }

  absl::Status peer_failure(int peer) override {
    if (!world_->someone_is_gone.load(std::memory_order_acquire)) return absl::OkStatus();
    std::lock_guard lock(world_->mutex);
    if (!world_->failure.ok()) return world_->failure;
    if (world_->left[peer]) return absl::UnavailableError("its communicator was destroyed");
    return absl::OkStatus();
  }

  void block(Deadline until) override {
    // `seen_` is from before the last look at the messages, so a change since then ends the wait at once.
    std::unique_lock lock(inbox_.mutex);
    inbox_.changed.wait_until(lock, until.time(),
                              [&] { return inbox_.events.load(std::memory_order_relaxed) != seen_; });
  }

  void wake() override { inbox_.notify(); }

  void fail(const absl::Status& why) override {
    take_back_sends();
    for (auto& wanted : wanted_) wanted.reset();
    {
      std::lock_guard lock(world_->mutex);
      if (world_->failure.ok()) {
        world_->failure = absl::UnavailableError(fmt::format("rank {} failed: {}", rank_, std::string(why.message())));
      }
      world_->someone_is_gone.store(true, std::memory_order_release);
    }
    notify_others();
  }

  std::string describe() override { return fmt::format("rank {}: threads of one process, memory copies\n", rank_); }

 private:
  void notify_others() {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) world_->inboxes[peer].notify();
    }
  }

  // Lent buffers go back to their owner: what nobody has begun to read is withdrawn, a copy under way is waited for.
  void take_back_sends() {
    for (int peer = 0; peer < size_; ++peer) {
      if (lent_[peer] == nullptr) continue;
      Inbox& to = world_->inboxes[peer];
      {
        std::lock_guard lock(to.mutex);
        std::erase(to.from[rank_], lent_[peer]);
      }
      if (lent_[peer]->state.load(std::memory_order_acquire) == Message::kBeingRead) {
        std::unique_lock lock(inbox_.mutex);
        inbox_.changed.wait(lock, [&] { return lent_[peer]->state.load() == Message::kDone; });
      }
      lent_[peer] = nullptr;
    }
  }

  const std::shared_ptr<World> world_;
  const int rank_;
  const int size_;
  Inbox& inbox_;
  uint64_t seen_ = 0;
  std::array<std::shared_ptr<Message>, kMaxWorld> lent_{};
  std::array<std::optional<std::span<std::byte>>, kMaxWorld> wanted_{};
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> LocalWorld::create(int world, uint32_t epoch,
                                                                              std::vector<std::string> labels) {
  if (labels.empty()) {
    for (int rank = 0; rank < std::clamp(world, 0, kMaxWorld); ++rank) labels.push_back(fmt::format("thread {}", rank));
  }
  absl::Status status = check_membership(0, world, labels);
  if (!status.ok()) return status;
  auto shared = std::make_shared<World>();
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.push_back(std::make_unique<MessageCommunicator>("local", WorldMembership{rank, world, epoch, labels},
                                                          std::make_unique<LocalEngine>(shared, rank, world)));
  }
  return ranks;
}

}  // namespace tensorfold
