// Communicator: how one rank exchanges bytes with the other ranks of its world (1 to 8 ranks).
//
// It moves bytes and nothing else: no operation adds, converts or reorders what it carries, because sums have one fixed
// order that only the kernels know. All ranks of a world call the same operations in the same order.
//
// Errors. Every operation has a deadline. A message names the operation, the rank and host waited for and how long:
//   DeadlineExceeded    a peer did not come in time
//   Unavailable         a peer's process or connection is gone
//   FailedPrecondition  a message of another membership epoch
//   DataLoss            a message out of step: wrong operation, sequence number or size; both values are named
//   ResourceExhausted   a message longer than the receiver allows; nothing was allocated for it
//   InvalidArgument     this call's own arguments; nothing was sent and the communicator goes on
//   any                 what abort() was given
// An operation that failed half-way leaves ranks out of step, so a failure is final: later operations return it again,
// and the cluster connects anew under the next epoch. Two errors are not final: InvalidArgument, and DeadlineExceeded
// of a receiver in broadcast(), which may call again and still gets a message that arrived meanwhile.
//
// What was received counts only when the pass it belongs to is complete on every rank (its last gather succeeded): a
// sender that fails while a long message is being read from its memory may leave the reader with torn bytes.
//
// Ownership. Buffers belong to the caller and are not touched after the call returns. `send` and `receive` buffers must
// not overlap, except that all_gather's `mine` may be this rank's own place in `out`.
//
// Thread-safety. One thread at a time calls the operations. abort() may be called from any thread at any time before
// destruction. Waiting spins for some microseconds and then sleeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/deadline.h"

namespace tensorfold {

inline constexpr int kMaxWorld = 8;

// Medians of a ping-pong between two ranks.
struct LinkMeasure {
  double latency_us = 0;      // one way, 8 bytes
  double latency_64k_us = 0;  // one way, 64 KiB
  double bandwidth_gb_s = 0;  // 1 MiB messages, 10^9 bytes a second
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;
  // The transport's name: "local", "ucx".
  virtual const std::string& name() const = 0;
  // The membership epoch that every message of this communicator carries.
  virtual uint32_t epoch() const = 0;
  // What a person calls the host of `rank`.
  virtual const std::string& label(int rank) const = 0;

  // Every rank gives sizes[rank] bytes and gets all ranks' bytes in rank order. `sizes` (world entries, zeros allowed)
  // is the same on all ranks; out.size() is their sum.
  virtual absl::Status all_gather(std::span<const std::byte> mine, std::span<const size_t> sizes,
                                  std::span<std::byte> out, Deadline deadline) = 0;

  // `send` is one piece for each rank, in rank order, of send_sizes[r] bytes; `receive` likewise from each rank. Rank
  // a's send_sizes[b] equals rank b's receive_sizes[a].
  virtual absl::Status all_to_all(std::span<const std::byte> send, std::span<const size_t> send_sizes,
                                  std::span<std::byte> receive, std::span<const size_t> receive_sizes,
                                  Deadline deadline) = 0;

  // The root's `message` becomes everybody's. Receivers learn its length, which may not exceed max_bytes.
  virtual absl::Status broadcast(int root, std::vector<std::byte>& message, size_t max_bytes, Deadline deadline) = 0;

  // Each rank's bytes, of any length up to max_bytes_each, to the root: (*all)[r] is rank r's. `all` is untouched (and
  // may be null) on other ranks.
  virtual absl::Status gather(int root, std::span<const std::byte> mine, std::vector<std::vector<std::byte>>* all,
                              size_t max_bytes_each, Deadline deadline) = 0;

  virtual absl::Status barrier(Deadline deadline) = 0;

  // Ends every present and future wait on this communicator with `why` (not OK). Thread-safe; the first call counts.
  virtual void abort(absl::Status why) = 0;

  // Which ways lead to each peer (transports, devices), one line a peer, to be logged at connect.
  virtual std::string describe() = 0;

  // Measures the link to `peer`, which calls measure() with this rank at the same time. About ten milliseconds.
  virtual absl::StatusOr<LinkMeasure> measure(int peer, Deadline deadline) = 0;
};

}  // namespace tensorfold
