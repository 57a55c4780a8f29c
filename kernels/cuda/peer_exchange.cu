#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/peer_exchange.h"

namespace tensorfold {
namespace {

constexpr int kPollsBetweenLooks = 128;

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Two words, each of them whole: the vector is two accesses of 64 bits to the memory model.
__device__ __forceinline__ void load_words(const unsigned long long* at, unsigned long long* a, unsigned long long* b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(*a), "=l"(*b) : "l"(at) : "memory");
}

__device__ __forceinline__ void store_words(unsigned long long* at, unsigned long long a, unsigned long long b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

// The rare look of a waiting thread at whether to go on. Returns when the wait began, or 0 if it is over.
__device__ __noinline__ uint64_t look_up(const PeerView& view, int peer, uint64_t started) {
  if (load_relaxed(&view.control->failed) != 0) return 0;
  const uint64_t now = now_ns();
  if (started == 0) started = now;
  const uint64_t limit = *reinterpret_cast<const volatile uint64_t*>(&view.host->wait_ns);
  if (load_relaxed(&view.host->aborted) == 0 && now - started < limit) return started;
  if (atomicCAS(&view.control->failed, 0u, static_cast<uint32_t>(peer) + 1) == 0) {
    *reinterpret_cast<volatile uint32_t*>(&view.host->error) = static_cast<uint32_t>(peer) + 1;
    __threadfence_system();
  }
  return 0;
}

struct Wait {
  uint32_t polls = 0;
  uint64_t started = 0;

  __device__ __forceinline__ bool over(const PeerView& view, int peer) {
    if (++polls % kPollsBetweenLooks != 0) return false;
    started = look_up(view, peer, started);
    return started == 0;
  }
};

// A block's way to the number of this exchange, in two halves so that the block can work while the counter is on its
// way. `counter` is as PeerControl says: since a block learns the number by the same atomic addition that counts it as
// begun, the last one cannot set the counter on before all have read it.
struct Begin {
  unsigned long long old = 0;
  uint32_t failed = 0;
};

__device__ __forceinline__ Begin begin_exchange(unsigned long long* counter, const uint32_t* failed) {
  Begin begin;
  if (threadIdx.x == 0) {
    begin.old = atomicAdd(counter, 1ULL);
    begin.failed = load_relaxed(failed);
  }
  return begin;
}

// The number, or 0 if this rank has failed before. All threads of the block must call.
__device__ __forceinline__ uint32_t exchange_number(const Begin& begin, unsigned long long* counter) {
  __shared__ uint32_t shared_number;
  if (threadIdx.x == 0) {
    const uint32_t last = static_cast<uint32_t>(begin.old >> 32);
    uint32_t number = last + 1;
    if (number == 0) number = 2;  // 0 marks an empty word, and the parity must alternate: ..., 2^32 - 1, 2, 3, ...
    if (static_cast<uint32_t>(begin.old) == gridDim.x - 1) {
      atomicAdd(counter, (static_cast<unsigned long long>(number - last) << 32) - gridDim.x);
    }
    shared_number = begin.failed != 0 ? 0 : number;
  }
  __syncthreads();
  return shared_number;
}

// Block `block`'s part of a message.
__device__ __forceinline__ void copy_part(std::byte* to, const std::byte* from, size_t bytes, int block) {
  const size_t begin = peer_layout::block_begin(bytes, block);
  const size_t end = peer_layout::block_begin(bytes, block + 1);
  if (begin >= end) return;
  to += begin;
  from += begin;
  const size_t count = end - begin;
  size_t done = 0;
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0) {
    const size_t units = count / 16;
    uint4* const wide_to = reinterpret_cast<uint4*>(to);
    const uint4* const wide_from = reinterpret_cast<const uint4*>(from);
    size_t i = threadIdx.x;
    for (; i + 3 * kPeerThreads < units; i += 4 * kPeerThreads) {
      uint4 value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = __ldcg(wide_from + i + k * kPeerThreads);
#pragma unroll
      for (int k = 0; k < 4; ++k) wide_to[i + k * kPeerThreads] = value[k];
    }
    for (; i < units; i += kPeerThreads) wide_to[i] = __ldcg(wide_from + i);
    done = units * 16;
  }
  for (size_t i = done + threadIdx.x; i < count; i += kPeerThreads) {
    reinterpret_cast<unsigned char*>(to)[i] = __ldcg(reinterpret_cast<const unsigned char*>(from) + i);
  }
}

struct MoveArgs {
  PeerView view;
  PeerMove move;
};

__global__ void __launch_bounds__(kPeerThreads) peer_move_kernel(const __grid_constant__ MoveArgs args) {
  pdl_launch();
  pdl_wait();
  const PeerView& view = args.view;
  const PeerMove& move = args.move;
  const int block = static_cast<int>(blockIdx.x);
  const int me = view.rank;
  const Begin begin = begin_exchange(&view.control->move_counter, &view.control->failed);
  const uint32_t number = exchange_number(begin, &view.control->move_counter);
  if (number == 0) return;

  for (int k = 1; k < view.world; ++k) {  // each rank begins with another receiver
    const int peer = (me + k) % view.world;
    copy_part(view.slots[peer] + peer_layout::slot_offset(number, view.world, me, view.slot_bytes), move.send[peer],
              move.send_bytes[peer], block);
  }
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < view.world && peer != me) {
    // Releases what the whole block has written: the barrier above has ordered it before this thread.
    store_release(view.flags[peer] + me * kPeerBlocks + block, number);
  }
  if (move.send[me] != move.out[me]) copy_part(move.out[me], move.send[me], move.send_bytes[me], block);
  bool gave_up = false;
  if (peer < view.world && peer != me) {
    const uint32_t* const flag = view.flags[me] + peer * kPeerBlocks + block;
    Wait wait;
    while (static_cast<int32_t>(load_acquire(flag) - number) < 0 && !gave_up) gave_up = wait.over(view, peer);
  }
  if (__syncthreads_or(gave_up ? 1 : 0) != 0) return;
  for (int from = 0; from < view.world; ++from) {
    if (from == me) continue;
    copy_part(move.out[from], view.slots[me] + peer_layout::slot_offset(number, view.world, from, view.slot_bytes),
              move.receive_bytes[from], block);
  }
}

struct SumArgs {
  PeerView view;
  PeerSum sum;
  float* residual;
  int64_t residual_stride;
  uint32_t items;  // of a node: 4 floats each
  uint32_t items_a_row;
};

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__device__ __forceinline__ unsigned long long flagged(float value, uint32_t number) {
  return static_cast<unsigned long long>(number) << 32 | __float_as_uint(value);
}

__device__ __forceinline__ float value_of(unsigned long long word) {
  return __uint_as_float(static_cast<uint32_t>(word));
}

// Runs a plan over this thread's column of shared memory; a column belongs to one thread, so nothing has to be waited
// for.
__device__ __forceinline__ void run_steps(float4 (*tree)[kPeerSumThreads], const AddStep* steps, int count) {
#pragma unroll 1
  for (int s = 0; s < count; ++s) {
    float4* const into = &tree[steps[s].dst][threadIdx.x];
    *into = add4(*into, tree[steps[s].src][threadIdx.x]);
  }
}

// Folds the own slices' values of one item in this thread's column of `tree`.
__device__ __forceinline__ void fold_item(const SumArgs& args, uint32_t item, float4 (*tree)[kPeerSumThreads]) {
  const CudaTreeSum& mine = args.sum.mine;
  const uint32_t row = item / args.items_a_row;
  const int64_t at = static_cast<int64_t>(row) * mine.part_stride + (item - row * args.items_a_row) * 4;
  float4 part[kPeerSumNodes];
#pragma unroll
  for (int i = 0; i < kPeerSumNodes; ++i) {
    if (i < mine.part_count) part[i] = *reinterpret_cast<const float4*>(mine.parts[i] + at);
  }
#pragma unroll
  for (int i = 0; i < kPeerSumNodes; ++i) {
    if (i < mine.part_count) tree[i][threadIdx.x] = part[i];
  }
  run_steps(tree, mine.steps, mine.step_count);
}

// kNodes bounds the nodes of all ranks, so that the loads of a poll are issued together.
template <int kNodes>
__global__ void __launch_bounds__(kPeerSumThreads) peer_sum_kernel(const __grid_constant__ SumArgs args) {
  __shared__ float4 tree[kPeerSumNodes][kPeerSumThreads];
  pdl_launch();
  pdl_wait();
  const PeerView& view = args.view;
  const PeerSum& sum = args.sum;
  const Begin begin = begin_exchange(&view.control->sum_counter, &view.control->failed);
  const uint32_t stride = gridDim.x * kPeerSumThreads;
  const uint32_t first = blockIdx.x * kPeerSumThreads + threadIdx.x;
  if (first < args.items) fold_item(args, first, tree);
  const uint32_t number = exchange_number(begin, &view.control->sum_counter);
  if (number == 0) return;

  // Fold and send every item before waiting for any.
  for (uint32_t item = first; item < args.items; item += stride) {
    if (item != first) fold_item(args, item, tree);
    for (int r = 0; r < sum.root_count; ++r) {
      const float4 node = tree[sum.roots[r]][threadIdx.x];
      const int64_t low = peer_layout::sum_offset(number, view.sum_floats, sum.first_node + r, 0, args.items, item);
      const int64_t high = peer_layout::sum_offset(number, view.sum_floats, sum.first_node + r, 1, args.items, item);
      for (int k = 1; k <= view.world; ++k) {  // others first; own nodes take the same way
        int peer = view.rank + k;
        if (peer >= view.world) peer -= view.world;
        store_words(view.sums[peer] + low, flagged(node.x, number), flagged(node.y, number));
        store_words(view.sums[peer] + high, flagged(node.z, number), flagged(node.w, number));
      }
    }
  }

  Wait wait;
  unsigned long long* const mine = view.sums[view.rank];
  for (uint32_t item = first; item < args.items; item += stride) {
    const uint32_t row = item / args.items_a_row;
    float4* const target = reinterpret_cast<float4*>(args.residual + static_cast<int64_t>(row) * args.residual_stride +
                                                     (item - row * args.items_a_row) * 4);
    const float4 before = *target;
    unsigned long long word[kNodes][4];
    int missing = 0;
    do {
      missing = -1;
#pragma unroll
      for (int g = 0; g < kNodes; ++g) {
        if (g >= sum.node_count) continue;
        load_words(mine + peer_layout::sum_offset(number, view.sum_floats, g, 0, args.items, item), &word[g][0],
                   &word[g][1]);
        load_words(mine + peer_layout::sum_offset(number, view.sum_floats, g, 1, args.items, item), &word[g][2],
                   &word[g][3]);
      }
#pragma unroll
      for (int g = 0; g < kNodes; ++g) {
        if (g >= sum.node_count) continue;
        bool here = true;
#pragma unroll
        for (int w = 0; w < 4; ++w) here = here && static_cast<uint32_t>(word[g][w] >> 32) == number;
        if (!here) missing = g;
      }
      if (missing >= 0 && wait.over(view, sum.owner[missing])) return;
    } while (missing >= 0);
#pragma unroll
    for (int g = 0; g < kNodes; ++g) {
      if (g >= sum.node_count) continue;
      tree[g][threadIdx.x] =
          make_float4(value_of(word[g][0]), value_of(word[g][1]), value_of(word[g][2]), value_of(word[g][3]));
      store_words(mine + peer_layout::sum_offset(number, view.sum_floats, g, 0, args.items, item), 0, 0);
      store_words(mine + peer_layout::sum_offset(number, view.sum_floats, g, 1, args.items, item), 0, 0);
    }
    run_steps(tree, sum.finish, sum.finish_count);
    *target = add4(before, tree[0][threadIdx.x]);
  }
}

constexpr int kPinnedThreads = 256;

int pinned_blocks(size_t bytes) { return static_cast<int>(std::clamp<size_t>(bytes / (16 * kPinnedThreads), 1, 32)); }

// Copies between device and mapped host memory: reads that pass every cache, since the other side has just written.
__device__ __forceinline__ void copy_pinned(unsigned char* to, const unsigned char* from, size_t bytes) {
  const size_t first = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  const size_t stride = gridDim.x * static_cast<size_t>(blockDim.x);
  size_t done = 0;
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0) {
    const size_t units = bytes / 16;
    uint4* const wide_to = reinterpret_cast<uint4*>(to);
    const uint4* const wide_from = reinterpret_cast<const uint4*>(from);
    size_t i = first;
    for (; i + 3 * stride < units; i += 4 * stride) {
      uint4 value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = __ldcv(wide_from + i + k * stride);
#pragma unroll
      for (int k = 0; k < 4; ++k) wide_to[i + k * stride] = value[k];
    }
    for (; i < units; i += stride) wide_to[i] = __ldcv(wide_from + i);
    done = units * 16;
  }
  for (size_t i = done + first; i < bytes; i += stride) to[i] = __ldcv(from + i);
}

__global__ void __launch_bounds__(kPinnedThreads)
    pinned_out_kernel(PinnedControl* control, uint32_t* ticket, uint32_t operation, const unsigned char* from,
                      unsigned char* host, size_t bytes) {
  copy_pinned(host, from, bytes);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    if (atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1) {
      __threadfence_system();
      store_release(&control->request, operation);
    }
  }
}

__global__ void pinned_wait_kernel(PinnedControl* control, uint64_t limit_ns) {
  const uint64_t started = now_ns();
  while (load_acquire(&control->release) != 1 && now_ns() - started < limit_ns) __nanosleep(500);
}

__global__ void __launch_bounds__(kPinnedThreads)
    pinned_in_kernel(PinnedControl* control, const unsigned char* host, unsigned char* to, size_t bytes) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *reinterpret_cast<volatile uint32_t*>(&control->release) = 0;
    __threadfence_system();
  }
  copy_pinned(to, host, bytes);
}

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

int current_sm_count() {
  int device = 0;
  int count = 1;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

}  // namespace

bool cuda_exchange_load() {
  const void* const kernels[] = {
      reinterpret_cast<const void*>(peer_move_kernel),   reinterpret_cast<const void*>(peer_sum_kernel<2>),
      reinterpret_cast<const void*>(peer_sum_kernel<4>), reinterpret_cast<const void*>(peer_sum_kernel<kPeerSumNodes>),
      reinterpret_cast<const void*>(pinned_out_kernel),  reinterpret_cast<const void*>(pinned_wait_kernel),
      reinterpret_cast<const void*>(pinned_in_kernel)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (!cuda_ok(cudaFuncGetAttributes(&attributes, kernel), "loading the exchange kernels")) return false;
  }
  return true;
}

bool cuda_peer_move_fits() {
  int blocks = 0;
  if (!cuda_ok(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, peer_move_kernel, kPeerThreads, 0),
               "peer exchange: occupancy")) {
    return false;
  }
  return blocks * current_sm_count() >= kPeerBlocks;
}

void cuda_peer_move(cudaStream_t stream, const PeerView& view, const PeerMove& move) {
  launch_kernel(peer_move_kernel, dim3(kPeerBlocks), dim3(kPeerThreads), 0, stream, "peer exchange",
                MoveArgs{view, move});
}

PeerSum peer_sum_plan(int64_t slices, int64_t world, int64_t rank) {
  PeerSum sum;
  const SliceRange mine = owned_slices(slices, world, rank);
  sum.mine.part_count = static_cast<int>(mine.count);
  for (const AddStep& step : fold_plan(slices, mine)) sum.mine.steps[sum.mine.step_count++] = step;
  for (const SliceRange& node : owned_nodes(slices, mine)) {
    sum.roots[sum.root_count++] = static_cast<int>(node.first - mine.first);
  }
  const WorldNodes nodes = world_nodes(slices, world);
  sum.first_node = static_cast<int>(nodes.offsets[static_cast<size_t>(rank)]);
  sum.node_count = static_cast<int>(nodes.nodes.size());
  for (size_t r = 0; r < static_cast<size_t>(world); ++r) {
    for (int64_t g = nodes.offsets[r]; g < nodes.offsets[r + 1]; ++g) sum.owner[g] = static_cast<int>(r);
  }
  for (const AddStep& step : finish_plan(slices, world)) sum.finish[sum.finish_count++] = step;
  return sum;
}

bool cuda_peer_sum_fits(const PeerView& view, const PeerSum& sum, DeviceMatrix residual) {
  if (residual.rows < 1 || residual.cols < 4 || residual.cols % 4 != 0 || residual.stride % 4 != 0) return false;
  if (!aligned16(residual.data) || sum.mine.part_stride % 4 != 0) return false;
  if (sum.mine.part_count < 1 || sum.mine.part_count > kPeerSumNodes || sum.node_count > kPeerSumNodes) return false;
  for (int i = 0; i < sum.mine.part_count; ++i) {
    if (!aligned16(sum.mine.parts[i])) return false;
  }
  return residual.rows * residual.cols * sum.node_count <= view.sum_floats;
}

void cuda_peer_sum(cudaStream_t stream, const PeerView& view, const PeerSum& sum, DeviceMatrix residual) {
  if (!cuda_peer_sum_fits(view, sum, residual)) {
    cuda_ok(cudaErrorInvalidValue, "peer sum: a shape that does not fit");
    return;
  }
  SumArgs args{view, sum, residual.data, residual.stride, 0, 0};
  args.items_a_row = static_cast<uint32_t>(residual.cols / 4);
  args.items = static_cast<uint32_t>(residual.rows) * args.items_a_row;
  // At most one block a multiprocessor: all of them are resident at once.
  const uint32_t wanted = (args.items + kPeerSumThreads - 1) / kPeerSumThreads;
  static const uint32_t most = static_cast<uint32_t>(current_sm_count());
  const dim3 grid(std::min(wanted, most));
  const dim3 block(kPeerSumThreads);
  if (sum.node_count <= 2) {
    launch_kernel(peer_sum_kernel<2>, grid, block, 0, stream, "peer sum", args);
  } else if (sum.node_count <= 4) {
    launch_kernel(peer_sum_kernel<4>, grid, block, 0, stream, "peer sum", args);
  } else {
    launch_kernel(peer_sum_kernel<kPeerSumNodes>, grid, block, 0, stream, "peer sum", args);
  }
}

// These are launched without programmatic dependence: the one after a wait of the stream must not begin before it.
void cuda_pinned_out(cudaStream_t stream, PinnedControl* control, uint32_t* ticket, uint32_t operation,
                     const void* from, void* host, size_t bytes) {
  pinned_out_kernel<<<pinned_blocks(bytes), kPinnedThreads, 0, stream>>>(
      control, ticket, operation, static_cast<const unsigned char*>(from), static_cast<unsigned char*>(host), bytes);
  cuda_launched("pinned exchange, to the host");
}

void cuda_pinned_wait(cudaStream_t stream, PinnedControl* control, uint64_t limit_ns) {
  pinned_wait_kernel<<<1, 1, 0, stream>>>(control, limit_ns);
  cuda_launched("pinned exchange, waiting");
}

void cuda_pinned_in(cudaStream_t stream, PinnedControl* control, const void* host, void* to, size_t bytes) {
  pinned_in_kernel<<<pinned_blocks(bytes), kPinnedThreads, 0, stream>>>(
      control, static_cast<const unsigned char*>(host), static_cast<unsigned char*>(to), bytes);
  cuda_launched("pinned exchange, from the host");
}

}  // namespace tensorfold
