// Nodes between device memories. Three families of kernels, all of them capturable and of the same bits as a plain
// copy:
//
//   cuda_peer_move  long messages between GPUs of one host: each block writes its part into the peers' memory, raises
//                   its flag there, waits for the peers' flags of the same block and copies what came to its place.
//   cuda_peer_sum   short nodes, the sum included: fold own slices, write the nodes to every rank, wait for all nodes,
//                   finish the tree, add to the residual. One kernel, no flag, no fence: see below.
//   cuda_pinned_*   the device's half of the exchange through pinned host memory.
//
// cuda_peer_move: the receive slots [2][world][slot_bytes] are double-buffered by the parity of a sequence number n
// that lives in device memory and that the kernel itself advances, so that a graph may be replayed. Every block of
// every rank raises its flag to n in every exchange, whether it has bytes or not.
//   Claim: no slot is overwritten before it was read. A rank writes slots of parity n & 1 again in its kernel n + 2.
//   That starts after its kernel n + 1 ended (stream order), which saw the flags n + 1 of all blocks of all peers. A
//   peer's block raises flag n + 1 in the peer's kernel n + 1, which starts after the peer's kernel n ended and with it
//   all reads of slots n. Nobody is ever more than one exchange ahead, so flags compare by their signed difference and
//   wrap safely.
//
// cuda_peer_sum: each float travels as one 64-bit word {value, n}, which the memory model does not tear, so that the
// word itself says that it has come (n is never 0). Slots are zero at rest: whoever has read a word writes 0 to it.
// Areas are double-buffered by the parity of n (a counter of its own).
//   Claim: a word is never overwritten before it was read and cleared. A rank writes area n & 1 again in its kernel n +
//   2, after its kernel n + 1 had received at least one word of every peer's kernel n + 1 (every rank has a node and
//   there is at least one row), and that kernel began after the peer's kernel n ended, with its reads and its zeros.
//   And a stale word is never taken for a new one, however often n wraps, because there are none: at rest all are zero.
//
// Waiting. Polls spin; every 128 polls the block looks at the failure word, at PeerHost::aborted and at its time. The
// wait is bounded by PeerHost::wait_ns, counted from the first such look of this kernel. The first block whose time is
// up writes the peer's rank into PeerHost::error and the failure word; from then on the kernels of this rank leave at
// once and send nothing, so a peer never gets numbers made of missing ones without this rank having failed. The caller
// must not launch these kernels for two ranks on one GPU: waiting blocks of one could keep out the other's.
//
// Arithmetic of cuda_peer_sum: for each element, part[dst] = part[dst] + part[src] for the fold steps in order, then
// the same over all nodes for the finish steps in order, then residual = residual + node[0], each one fp32 addition. An
// element's additions are done by one thread; nothing reads the number of rows, the grid or the rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/rowwise.h"
#include "kernels/numerics/host_device.h"
#include "kernels/numerics/tree.h"

namespace tensorfold {

inline constexpr int kMaxPeers = 8;
inline constexpr int kPeerBlocks = 64;  // of cuda_peer_move, always; they must all be resident at once
inline constexpr int kPeerThreads = 512;
inline constexpr int kPeerSumThreads = 128;
inline constexpr int kPeerSumNodes = 8;  // nodes of a tree of at most 8 slices
inline constexpr int kPeerSumOwn = 8;    // nodes of one rank

/// In the device memory of the rank whose kernels use it; zero at first. A counter holds the number of the last
/// exchange in its upper half and, in its lower, the blocks of the present one that have begun: one atomic addition
/// gives a block the number, and the last block to begin sets the counter on.
struct PeerControl {
  unsigned long long move_counter = 0;
  unsigned long long sum_counter = 0;
  uint32_t failed = 0;  // 1 + the rank waited for in vain
};

/// In pinned host memory mapped into the device.
struct PeerHost {
  uint64_t wait_ns = 0;  // host to device: the longest wait of one kernel
  uint32_t aborted = 0;  // host to device: not 0 ends every wait
  uint32_t error = 0;    // device to host: 1 + the rank waited for in vain; 0: none
};

/// What the kernels of one rank need. Pointers of index r are rank r's memory as this rank's GPU addresses it.
struct PeerView {
  int rank = 0;
  int world = 0;
  PeerControl* control = nullptr;
  PeerHost* host = nullptr;                  // device address of the pinned block
  std::byte* slots[kMaxPeers] = {};          // [2][world][slot_bytes], 16-byte aligned; zeros not needed
  uint32_t* flags[kMaxPeers] = {};           // [world][kPeerBlocks], zero at first
  unsigned long long* sums[kMaxPeers] = {};  // [2][sum_floats], 16-byte aligned, zero at first
  size_t slot_bytes = 0;                     // longest message; a multiple of 16
  int64_t sum_floats = 0;                    // most floats of all nodes together; a multiple of 4
};

/// Loads all kernels of this file onto the current device: a kernel that is loaded at its first launch may make that
/// launch wait for the kernels of other ranks on the device, which may wait for this rank. False with cuda_failure()
/// set.
bool cuda_exchange_load();

/// send_bytes[r] bytes at send[r] go to rank r, receive_bytes[r] come from rank r to out[r]. The own message is copied
/// unless send[rank] == out[rank]. All sizes at most slot_bytes. Fast if all pointers are 16-byte aligned.
struct PeerMove {
  const std::byte* send[kMaxPeers] = {};
  size_t send_bytes[kMaxPeers] = {};
  std::byte* out[kMaxPeers] = {};
  size_t receive_bytes[kMaxPeers] = {};
};
void cuda_peer_move(cudaStream_t stream, const PeerView& view, const PeerMove& move);
/// True if all blocks of cuda_peer_move fit on the current device at once.
bool cuda_peer_move_fits();

/// The whole of one SliceSum: see above. All ranks call it with the same shape.
struct PeerSum {
  CudaTreeSum mine;             // own slices (at most 8) and the fold steps
  int roots[kPeerSumOwn] = {};  // parts that are nodes after the fold
  int root_count = 0;
  int first_node = 0;             // place of the first own node among all ranks' nodes
  int node_count = 0;             // of all ranks, at most kPeerSumNodes
  int owner[kPeerSumNodes] = {};  // the rank of each node
  AddStep finish[kPeerSumNodes];
  int finish_count = 0;
};
/// The steps of rank `rank` of a tree over `slices` slices; parts are left for the caller to set.
PeerSum peer_sum_plan(int64_t slices, int64_t world, int64_t rank);
/// True if the nodes fit into the view and the shape into the kernel: cols, strides multiples of 4, at least one row.
bool cuda_peer_sum_fits(const PeerView& view, const PeerSum& sum, DeviceMatrix residual);
/// residual += tree over all ranks' slices. Requires cuda_peer_sum_fits().
void cuda_peer_sum(cudaStream_t stream, const PeerView& view, const PeerSum& sum, DeviceMatrix residual);

/// Words through which the device and the thread of a pinned exchange talk; pinned and mapped.
struct PinnedControl {
  uint32_t request = 0;  // device to host: the operation whose bytes are in the send area; the thread writes 0
  uint32_t release = 0;  // host to device: 1 when the received bytes are there; cuda_pinned_in writes 0
};
/// Copies bytes from the device to `host` (device address of pinned memory), then writes request = operation. `ticket`
/// is a word of device memory, zero at first.
void cuda_pinned_out(cudaStream_t stream, PinnedControl* control, uint32_t* ticket, uint32_t operation,
                     const void* from, void* host, size_t bytes);
/// Spins with one thread until release is 1; for devices without waits of streams. Gives up after `limit_ns`.
void cuda_pinned_wait(cudaStream_t stream, PinnedControl* control, uint64_t limit_ns);
/// Writes release = 0 and copies bytes from `host` to the device.
void cuda_pinned_in(cudaStream_t stream, PinnedControl* control, const void* host, void* to, size_t bytes);

namespace peer_layout {

/// Where block `block` of kPeerBlocks begins in a message of `bytes` bytes: 16-byte units, whatever the pointers'
/// alignment, because sender and receiver must cut alike.
TF_HOST_DEVICE constexpr size_t block_begin(size_t bytes, int block) {
  const size_t units = (bytes + 15) / 16;
  const size_t begin = units * static_cast<size_t>(block) / kPeerBlocks * 16;
  return begin < bytes ? begin : bytes;
}
/// Offset of rank `from`'s message in a slots area.
TF_HOST_DEVICE constexpr size_t slot_offset(uint32_t sequence, int world, int from, size_t slot_bytes) {
  return ((sequence & 1) * static_cast<size_t>(world) + static_cast<size_t>(from)) * slot_bytes;
}
/// Offset in words of half `half` (2 of 4 floats) of item `item` of node `node`; nodes have 4 * items floats. Halves
/// lie apart so that the 16-byte accesses of a warp are contiguous.
TF_HOST_DEVICE constexpr int64_t sum_offset(uint32_t sequence, int64_t sum_floats, int node, int half, int64_t items,
                                            int64_t item) {
  return static_cast<int64_t>(sequence & 1) * sum_floats + (static_cast<int64_t>(node) * 2 + half) * items * 2 +
         item * 2;
}

}  // namespace peer_layout

}  // namespace tensorfold
