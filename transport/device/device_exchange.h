// DeviceExchange: how one rank exchanges bytes between device memories, in the order of a stream and inside CUDA
// graphs.
//
// It moves bytes and nothing else, as Communicator does: sums belong to the kernels. All ranks of a world enqueue the
// same operations in the same order. Three ways, told apart by name():
//   "peer"    GPUs of one host write into each other's memory (peer_exchange.h)
//   "nccl"    NVIDIA's library, which only moves here and never reduces (nccl_exchange.h)
//   "pinned"  through pinned host memory and any Communicator (pinned_exchange.h)
// choose_exchange() takes the fastest that all ranks can do.
//
// A pass:
//   exchange->set_deadline(deadline);   // before launching anything
//   ... launch graphs or operations, wait for the stream ...
//   absl::Status status = exchange->status();
// The stream never waits for ever: when the deadline passes, an error comes or abort() is called, what is enqueued ends
// with meaningless bytes in its outputs and status() says why. A failure is final: later operations end at once, and
// the cluster connects anew under the next epoch. After a failure of one rank the bytes of the pass count on no rank,
// as with Communicator.
//
// Errors of enqueueing are InvalidArgument (this call's own arguments), ResourceExhausted (longer than reserve()
// allows), Internal (CUDA or NCCL, named), and the final error if there is one.
//
// Ownership. Buffers belong to the caller and live until the stream has passed the operation; for a graph, as long as
// it is launched. Before destruction all streams and graphs that hold operations of this exchange are waited for, and
// the graphs are destroyed. The Communicator that the exchange was made from outlives it.
//
// Thread-safety. One thread at a time enqueues, sets deadlines and asks for the status; while operations run, that is
// from set_deadline() until status(), the exchange may use the Communicator from a thread of its own and nobody else
// may. abort() may be called from any thread. Streams are captured in thread-local mode: other threads do go on
// allocating.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/peer_exchange.h"
#include "transport/base/communicator.h"
#include "transport/base/deadline.h"

namespace tensorfold {

class DeviceExchange {
 public:
  virtual ~DeviceExchange() = default;

  /// "nccl", "peer" or "pinned".
  virtual const std::string& name() const = 0;

  /// Makes room for messages of up to `max_bytes` from one rank to one other. Called by all ranks with the same value,
  /// outside of captures and while nothing is enqueued, before graphs are captured that use the room: later calls may
  /// move it. Until `deadline`.
  virtual absl::Status reserve(size_t max_bytes, Deadline deadline) = 0;

  /// Enqueues: every rank gives sizes[rank] bytes at `mine` and gets all ranks' bytes in rank order at `out` (device
  /// memory). `mine` may be this rank's own place in `out`. `sizes` is the same on all ranks; zeros are allowed.
  virtual absl::Status all_gather(cudaStream_t stream, const void* mine, std::span<const size_t> sizes, void* out) = 0;

  /// Enqueues: as Communicator::all_to_all(), with device memory.
  virtual absl::Status all_to_all(cudaStream_t stream, const void* send, std::span<const size_t> send_sizes,
                                  void* receive, std::span<const size_t> receive_sizes) = 0;

  /// The first error of what ran so far, naming the ranks waited for; OK if there was none. Call it after the stream
  /// was waited for.
  virtual absl::Status status() = 0;

  /// The deadline of what is launched from now on, until status() is called.
  virtual void set_deadline(Deadline deadline) = 0;

  /// Ends present and future operations with `why` (not OK). The first call counts.
  virtual void abort(absl::Status why) = 0;

  /// The way to each peer, one line a peer, for the log.
  virtual std::string describe() = 0;

  /// What cuda_peer_sum() needs; null unless name() is "peer". The same pointer for the life of the exchange.
  virtual const PeerView* peer_view() const { return nullptr; }
};

}  // namespace tensorfold
