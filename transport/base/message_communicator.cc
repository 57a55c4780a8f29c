#include "transport/base/message_communicator.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "transport/base/collective_checks.h"

namespace tensorfold {
namespace {

using std::chrono::microseconds;

// Progress calls between two looks at the clock and at the peers' health.
constexpr int kPollsPerLook = 16;
// Giving up the core costs more than a short message takes, so a wait begins without it.
constexpr microseconds kNoYield(3);

double elapsed_seconds(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

template <typename Visit>
void for_each_peer(uint32_t peers, Visit visit) {
  while (peers != 0) {
    visit(std::countr_zero(peers));
    peers &= peers - 1;
  }
}

}  // namespace

MessageCommunicator::MessageCommunicator(std::string name, WorldMembership membership,
                                         std::unique_ptr<MessageEngine> engine)
    : name_(std::move(name)),
      membership_(std::move(membership)),
      engine_(std::move(engine)),
      idle_spin_(microseconds(50), microseconds(200)),
      exchange_spin_(microseconds(200), microseconds(2000)) {}

MessageCommunicator::~MessageCommunicator() = default;

std::string MessageCommunicator::peer_name(int peer) const { return fmt::format("rank {} ({})", peer, label(peer)); }

std::string MessageCommunicator::describe() { return engine_->describe(); }

void MessageCommunicator::abort(absl::Status why) {
  if (why.ok()) why = absl::AbortedError("aborted without a reason");
  {
    std::lock_guard lock(abort_mutex_);
    if (aborted_.load(std::memory_order_relaxed)) return;
    abort_status_ = std::move(why);
    aborted_.store(true, std::memory_order_release);
  }
  engine_->wake();
}

absl::Status MessageCommunicator::abort_status() const {
  std::lock_guard lock(abort_mutex_);
  return abort_status_;
}

absl::Status MessageCommunicator::fail(absl::Status why) {
  if (failure_.ok()) {
    failure_ = why;
    engine_->fail(why);
  }
  return why;
}

absl::Status MessageCommunicator::begin(MessageKind kind) {
  if (aborted_.load(std::memory_order_acquire)) return fail(abort_status());
  if (failure_.ok()) return absl::OkStatus();
  return absl::Status(failure_.code(), fmt::format("{} not begun, the communicator had failed: {}",
                                                   message_kind_name(kind), std::string(failure_.message())));
}

void MessageCommunicator::post_send(MessageKind kind, int peer, std::span<const std::byte> data) {
  const MessageTag tag{kind, rank(), epoch(), sent_[peer]++};
  engine_->post_send(peer, tag.pack(), data);
}

void MessageCommunicator::post_receive(int peer, std::span<std::byte> out) {
  expected_[peer] = out.size();
  engine_->post_receive(peer, out);
}

absl::Status MessageCommunicator::check_arrival(MessageKind kind, int peer, const Arrival& arrival) {
  const MessageTag expected{kind, peer, epoch(), received_[peer]++};
  absl::Status status = check_message_tag(expected, MessageTag::unpack(arrival.tag), peer_name(peer));
  if (!status.ok()) return status;
  if (arrival.bytes != expected_[peer]) {
    return absl::DataLossError(fmt::format("{}: {} sent {} bytes where {} were expected", message_kind_name(kind),
                                           peer_name(peer), arrival.bytes, expected_[peer]));
  }
  return absl::OkStatus();
}

absl::Status MessageCommunicator::check_peeked(MessageKind kind, int peer, size_t max_bytes) {
  const Arrival& arrival = *peeked_[peer];
  const MessageTag expected{kind, peer, epoch(), received_[peer]};
  absl::Status status = check_message_tag(expected, MessageTag::unpack(arrival.tag), peer_name(peer));
  if (!status.ok()) return status;
  if (arrival.bytes > max_bytes) {
    return absl::ResourceExhaustedError(fmt::format("{}: {} sent {} bytes, at most {} are allowed",
                                                    message_kind_name(kind), peer_name(peer), arrival.bytes,
                                                    max_bytes));
  }
  return absl::OkStatus();
}

absl::Status MessageCommunicator::poll(MessageKind kind, Pending& pending) {
  engine_->progress();
  absl::Status status;
  for_each_peer(pending.receives, [&](int peer) {
    std::optional<Arrival> arrival = engine_->received(peer);
    if (!arrival.has_value()) return;
    pending.receives &= ~(1u << peer);
    absl::Status checked = check_arrival(kind, peer, *arrival);
    if (status.ok()) status = std::move(checked);
  });
  for_each_peer(pending.peeks, [&](int peer) {
    peeked_[peer] = engine_->peek(peer);
    if (peeked_[peer].has_value()) pending.peeks &= ~(1u << peer);
  });
  for_each_peer(pending.sends, [&](int peer) {
    if (engine_->send_done(peer)) pending.sends &= ~(1u << peer);
  });
  return status;
}

absl::Status MessageCommunicator::check_peers(MessageKind kind, const Pending& pending) {
  absl::Status status;
  for_each_peer(pending.sends | pending.receives | pending.peeks, [&](int peer) {
    if (!status.ok()) return;
    absl::Status failure = engine_->peer_failure(peer);
    if (failure.ok()) return;
    status = absl::Status(failure.code(), fmt::format("{}: lost {}: {}", message_kind_name(kind), peer_name(peer),
                                                      std::string(failure.message())));
  });
  return status;
}

absl::Status MessageCommunicator::deadline_error(MessageKind kind, const Pending& pending,
                                                 Deadline::Clock::time_point start) const {
  std::string waited_for;
  auto add = [&](uint32_t peers, std::string_view what) {
    for_each_peer(peers, [&](int peer) {
      waited_for += fmt::format("{}{} to {}", waited_for.empty() ? "" : ", ", peer_name(peer), what);
    });
  };
  const uint32_t silent = pending.receives | pending.peeks;
  add(silent, "send");
  add(pending.sends & ~silent, "receive");
  return absl::DeadlineExceededError(
      fmt::format("{}: waited {:.3f} s for {}", message_kind_name(kind), elapsed_seconds(start), waited_for));
}

absl::Status MessageCommunicator::wait(MessageKind kind, Pending& pending, SpinPolicy& spin, Deadline deadline) {
  absl::Status status = poll(kind, pending);
  if (!status.ok() || pending.empty()) return status;
  const auto start = Deadline::Clock::now();
  bool slept = false;
  for (int polls = 1;; ++polls) {
    status = poll(kind, pending);
    if (!status.ok()) return status;
    if (pending.empty()) break;
    if (aborted_.load(std::memory_order_acquire)) return abort_status();
    if (polls % kPollsPerLook != 0) continue;
    // A peer may send its last message and go: its failure counts only if nothing of it is left to take.
    status = check_peers(kind, pending);
    if (!status.ok()) {
      absl::Status last = poll(kind, pending);
      if (!last.ok()) return last;
      if (pending.empty()) break;
      if (!check_peers(kind, pending).ok()) return status;
    }
    const auto now = Deadline::Clock::now();
    if (deadline.passed(now)) return deadline_error(kind, pending, start);
    if (now - start < spin.window()) {
      if (now - start > kNoYield) sched_yield();
    } else {
      slept = true;
      engine_->block(deadline);
      polls = 0;
    }
  }
  slept ? spin.had_to_sleep() : spin.spinning_paid();
  return absl::OkStatus();
}

absl::Status MessageCommunicator::exchange(MessageKind kind, std::span<const std::span<const std::byte>> send_pieces,
                                           std::span<const std::span<std::byte>> receive_pieces, Deadline deadline) {
  Pending pending;
  // Receives first: a message that finds its receive posted goes to its place without a copy between. Then each rank
  // sends to the next one first, so that no rank gets everybody's message at once.
  for (int step = 1; step < world(); ++step) {
    const int peer = (rank() + world() - step) % world();
    post_receive(peer, receive_pieces[peer]);
    pending.receives |= 1u << peer;
  }
  for (int step = 1; step < world(); ++step) {
    const int peer = (rank() + step) % world();
    post_send(kind, peer, send_pieces[peer]);
    pending.sends |= 1u << peer;
  }
  const std::span<const std::byte> from = send_pieces[rank()];
  const std::span<std::byte> to = receive_pieces[rank()];
  if (!from.empty() && from.data() != to.data()) std::memmove(to.data(), from.data(), from.size());
  absl::Status status = wait(kind, pending, exchange_spin_, deadline);
  return status.ok() ? status : fail(std::move(status));
}

absl::Status MessageCommunicator::all_gather(std::span<const std::byte> mine, std::span<const size_t> sizes,
                                             std::span<std::byte> out, Deadline deadline) {
  absl::Status status = begin(MessageKind::kAllGather);
  if (!status.ok()) return status;
  status = check_pieces("all_gather", "out", sizes, world(), out.size());
  if (!status.ok()) return status;
  if (mine.size() != sizes[rank()]) {
    return absl::InvalidArgumentError(
        fmt::format("all_gather: {} bytes given, the sizes say {}", mine.size(), sizes[rank()]));
  }
  std::array<std::span<const std::byte>, kMaxWorld> send_pieces;
  std::array<std::span<std::byte>, kMaxWorld> receive_pieces;
  for (int r = 0; r < world(); ++r) {
    send_pieces[r] = mine;
    receive_pieces[r] = out.first(sizes[r]);
    out = out.subspan(sizes[r]);
  }
  return exchange(MessageKind::kAllGather, send_pieces, receive_pieces, deadline);
}

absl::Status MessageCommunicator::all_to_all(std::span<const std::byte> send, std::span<const size_t> send_sizes,
                                             std::span<std::byte> receive, std::span<const size_t> receive_sizes,
                                             Deadline deadline) {
  absl::Status status = begin(MessageKind::kAllToAll);
  if (status.ok()) status = check_pieces("all_to_all", "send", send_sizes, world(), send.size());
  if (status.ok()) status = check_pieces("all_to_all", "receive", receive_sizes, world(), receive.size());
  if (!status.ok()) return status;
  if (send_sizes[rank()] != receive_sizes[rank()]) {
    return absl::InvalidArgumentError(fmt::format("all_to_all: rank {} sends itself {} bytes and expects {}", rank(),
                                                  send_sizes[rank()], receive_sizes[rank()]));
  }
  std::array<std::span<const std::byte>, kMaxWorld> send_pieces;
  std::array<std::span<std::byte>, kMaxWorld> receive_pieces;
  for (int r = 0; r < world(); ++r) {
    send_pieces[r] = send.first(send_sizes[r]);
    send = send.subspan(send_sizes[r]);
    receive_pieces[r] = receive.first(receive_sizes[r]);
    receive = receive.subspan(receive_sizes[r]);
  }
  return exchange(MessageKind::kAllToAll, send_pieces, receive_pieces, deadline);
}

absl::Status MessageCommunicator::barrier(Deadline deadline) {
  absl::Status status = begin(MessageKind::kBarrier);
  if (!status.ok()) return status;
  const std::array<std::span<const std::byte>, kMaxWorld> send_pieces{};
  const std::array<std::span<std::byte>, kMaxWorld> receive_pieces{};
  return exchange(MessageKind::kBarrier, send_pieces, receive_pieces, deadline);
}

absl::Status MessageCommunicator::connect(Deadline deadline) {
  absl::Status status = begin(MessageKind::kConnect);
  if (!status.ok()) return status;
  const std::array<std::span<const std::byte>, kMaxWorld> send_pieces{};
  const std::array<std::span<std::byte>, kMaxWorld> receive_pieces{};
  return exchange(MessageKind::kConnect, send_pieces, receive_pieces, deadline);
}

absl::Status MessageCommunicator::broadcast(int root, std::vector<std::byte>& message, size_t max_bytes,
                                            Deadline deadline) {
  absl::Status status = begin(MessageKind::kBroadcast);
  if (status.ok()) status = check_root("broadcast", root, world());
  if (!status.ok()) return status;
  if (root != rank()) return broadcast_to_here(root, message, max_bytes, deadline);
  if (message.size() > max_bytes) {
    return absl::InvalidArgumentError(
        fmt::format("broadcast: a message of {} bytes, at most {} are allowed", message.size(), max_bytes));
  }
  return broadcast_from_here(message, deadline);
}

absl::Status MessageCommunicator::broadcast_from_here(std::span<const std::byte> message, Deadline deadline) {
  Pending pending;
  for (int step = 1; step < world(); ++step) {
    const int peer = (rank() + step) % world();
    post_send(MessageKind::kBroadcast, peer, message);
    pending.sends |= 1u << peer;
  }
  absl::Status status = wait(MessageKind::kBroadcast, pending, exchange_spin_, deadline);
  return status.ok() ? status : fail(std::move(status));
}

absl::Status MessageCommunicator::broadcast_to_here(int root, std::vector<std::byte>& message, size_t max_bytes,
                                                    Deadline deadline) {
  Pending pending;
  pending.peeks = 1u << root;
  absl::Status status = wait(MessageKind::kBroadcast, pending, idle_spin_, deadline);
  // Nothing was taken, so nothing is out of step: the caller may wait again.
  if (absl::IsDeadlineExceeded(status) && !aborted_.load(std::memory_order_acquire)) return status;
  if (status.ok()) status = check_peeked(MessageKind::kBroadcast, root, max_bytes);
  if (!status.ok()) return fail(std::move(status));
  message.resize(peeked_[root]->bytes);
  return receive_from(MessageKind::kBroadcast, root, message, deadline);
}

absl::Status MessageCommunicator::gather(int root, std::span<const std::byte> mine,
                                         std::vector<std::vector<std::byte>>* all, size_t max_bytes_each,
                                         Deadline deadline) {
  absl::Status status = begin(MessageKind::kGather);
  if (status.ok()) status = check_root("gather", root, world());
  if (!status.ok()) return status;
  if (mine.size() > max_bytes_each) {
    return absl::InvalidArgumentError(
        fmt::format("gather: a message of {} bytes, at most {} are allowed", mine.size(), max_bytes_each));
  }
  if (root != rank()) return send_to(MessageKind::kGather, root, mine, deadline);
  if (all == nullptr) return absl::InvalidArgumentError("gather: the root needs a place for the messages");
  status = gather_here(mine, *all, max_bytes_each, deadline);
  return status.ok() ? status : fail(std::move(status));
}

absl::Status MessageCommunicator::gather_here(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all,
                                              size_t max_bytes_each, Deadline deadline) {
  all.resize(static_cast<size_t>(world()));
  all[rank()].assign(mine.begin(), mine.end());
  Pending lengths;
  lengths.peeks = ((1u << world()) - 1) & ~(1u << rank());
  absl::Status status = wait(MessageKind::kGather, lengths, exchange_spin_, deadline);
  if (!status.ok()) return status;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    status = check_peeked(MessageKind::kGather, peer, max_bytes_each);
    if (!status.ok()) return status;
  }
  Pending bodies;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    all[peer].resize(peeked_[peer]->bytes);
    post_receive(peer, all[peer]);
    bodies.receives |= 1u << peer;
  }
  return wait(MessageKind::kGather, bodies, exchange_spin_, deadline);
}

absl::Status MessageCommunicator::send_to(MessageKind kind, int peer, std::span<const std::byte> data,
                                          Deadline deadline) {
  post_send(kind, peer, data);
  Pending pending;
  pending.sends = 1u << peer;
  absl::Status status = wait(kind, pending, exchange_spin_, deadline);
  return status.ok() ? status : fail(std::move(status));
}

absl::Status MessageCommunicator::receive_from(MessageKind kind, int peer, std::span<std::byte> out,
                                               Deadline deadline) {
  post_receive(peer, out);
  Pending pending;
  pending.receives = 1u << peer;
  absl::Status status = wait(kind, pending, exchange_spin_, deadline);
  return status.ok() ? status : fail(std::move(status));
}

absl::Status MessageCommunicator::ping_pong(int peer, size_t bytes, int rounds, std::vector<std::byte>& buffer,
                                            double& median_us, Deadline deadline) {
  const std::span<std::byte> piece(buffer.data(), bytes);
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto start = Deadline::Clock::now();
    absl::Status status = rank() < peer ? send_to(MessageKind::kMeasure, peer, piece, deadline)
                                        : receive_from(MessageKind::kMeasure, peer, piece, deadline);
    if (!status.ok()) return status;
    status = rank() < peer ? receive_from(MessageKind::kMeasure, peer, piece, deadline)
                           : send_to(MessageKind::kMeasure, peer, piece, deadline);
    if (!status.ok()) return status;
    times.push_back(elapsed_seconds(start) * 1e6 / 2);
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  median_us = times[rounds / 2];
  return absl::OkStatus();
}

absl::StatusOr<LinkMeasure> MessageCommunicator::measure(int peer, Deadline deadline) {
  absl::Status status = begin(MessageKind::kMeasure);
  if (status.ok()) status = check_root("measure", peer, world());
  if (!status.ok()) return status;
  if (peer == rank()) return absl::InvalidArgumentError("measure: a rank has no link to itself");
  constexpr size_t kLarge = size_t{1} << 20;
  std::vector<std::byte> buffer(kLarge);
  LinkMeasure result;
  double large_us = 0;
  // The first rounds of a size set the path up (registration, buffers); medians leave them out.
  status = ping_pong(peer, 8, 200, buffer, result.latency_us, deadline);
  if (status.ok()) status = ping_pong(peer, size_t{64} << 10, 50, buffer, result.latency_64k_us, deadline);
  if (status.ok()) status = ping_pong(peer, kLarge, 20, buffer, large_us, deadline);
  if (!status.ok()) return status;
  result.bandwidth_gb_s = static_cast<double>(kLarge) / (large_us * 1e3);
  return result;
}

}  // namespace tensorfold
