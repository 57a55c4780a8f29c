// Blocks of keys and values on their way through shared memory, for the warps of a block that all walk them
// (attention_tile.cu). Two forms of one interface:
// * By the copy engine (compute capability 9 and up, bf16): a block of the cache is one piece of memory, so one
//   instruction copies it. There is room for two of keys and two of values, each with a barrier for its bytes and one
//   for the warps that are done with it. No barrier of the block: only the warp whose turn it is to ask for more waits
//   for the others, so that warps are apart and one makes weights of scores while another multiplies.
// * By cp.async, 16 bytes a thread, with the block's own barrier before each use: fp8, which all threads widen, and
//   devices with little shared memory, where keys and values take turns.
#pragma once

#include "kernels/cuda/attention_kernels.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/warp.cuh"

namespace tensorfold {

template <int kDim, bool kFp8, bool kPaired>
struct BlockRingShape {
  static constexpr int kParts = kPaired ? 2 : 1;  // blocks a stage
  static constexpr int kStages = 2;
  static constexpr int kStage = kStageBytes<kDim, kFp8, kParts>;
  static constexpr int kWide = kFp8 ? kParts * kBlockKeys * kDim * 2 : 0;
  static constexpr int kBytes = kWide + kStages * kStage;
};

/// Use, by all threads of a block: begin(), then for each block of keys in order keys(), done_with_keys(), refill(),
/// values(), done_with_values().
template <int kDim, bool kFp8, bool kPaired>
class BlockRing {
 public:
  __device__ __forceinline__ BlockRing(const AttentionParams& p, uint32_t shared)
      : p_(p), wide_(shared), ring_(shared + Shape::kWide) {}

  /// Blocks [first, end) of a head of keys and values. All threads are done with the memory when it returns.
  __device__ __forceinline__ void begin(int kv_head, const int32_t* pages, int first, int end) {
    kv_head_ = kv_head;
    pages_ = pages;
    first_ = first;
    end_ = end;
    stage_ = next_ = 0;
    next_page_ = pages[first];
    __syncthreads();
    issue();
  }
  __device__ __forceinline__ uint32_t keys(int /*block*/) { return acquire(); }
  __device__ __forceinline__ void done_with_keys() {}
  __device__ __forceinline__ void refill(int /*block*/) {}
  __device__ __forceinline__ uint32_t values() { return kPaired ? here_ + kBlockKeys * kDim * 2 : acquire(); }
  __device__ __forceinline__ void done_with_values() {}

 private:
  using Shape = BlockRingShape<kDim, kFp8, kPaired>;

  // Copies run one stage ahead; the page of the stage after that is already known.
  __device__ __forceinline__ void issue() {
    if (next_ < (end_ - first_) * (kPaired ? 1 : 2)) {
      const int part = kPaired ? 0 : next_ & 1;
      load_blocks<kDim, kFp8, Shape::kParts, 0>(p_, cache_block(next_page_, p_.kv_heads, kv_head_) + part,
                                                ring_ + (next_ & 1) * Shape::kStage);
      ++next_;
      const int block = first_ + (kPaired ? next_ : next_ >> 1);
      if (block < end_) next_page_ = pages_[block];
    }
    copy_async_commit();
  }
  // Waits for the next stage, starts the one after it, and returns where the blocks of this one are as bf16.
  __device__ __forceinline__ uint32_t acquire() {
    copy_async_wait<0>();
    __syncthreads();
    issue();
    here_ = ring_ + (stage_ & 1) * Shape::kStage;
    ++stage_;
    if constexpr (kFp8) {
      widen_blocks<kDim, Shape::kParts>(here_, wide_);
      __syncthreads();
      here_ = wide_;
    }
    return here_;
  }

  const AttentionParams& p_;
  uint32_t wide_, ring_, here_ = 0;
  const int32_t* pages_ = nullptr;
  int kv_head_ = 0, first_ = 0, end_ = 0, stage_ = 0, next_ = 0, next_page_ = 0;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int kDim>
class BlockRing<kDim, false, true> {
 public:
  __device__ __forceinline__ BlockRing(const AttentionParams& p, uint32_t shared)
      : p_(p), ring_(shared), warp_(uniform_warp()), warps_(static_cast<int>(blockDim.x >> 5)) {
    __shared__ __align__(8) uint64_t barriers[4 * kDepth];
    barriers_ = shared_address(barriers);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * kDepth; ++i) {
        mbarrier_init(barriers_ + 8 * i, 1);
        mbarrier_init(barriers_ + 8 * (2 * kDepth + i), 32 * warps_);
      }
      mbarrier_init_done();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void begin(int kv_head, const int32_t* pages, int first, int end) {
    kv_head_ = kv_head;
    pages_ = pages;
    end_ = end;
    if (warp_ == 0 && elect_lane()) {
      copy(kKeys, use_, pages[first]);
      copy(kValues, use_, pages[first]);
      if (first + 1 < end) copy(kKeys, use_ + 1, pages[first + 1]);
    }
    __syncthreads();  // all are done with the queries before
  }
  __device__ __forceinline__ uint32_t keys(int block) {
    mine_ = turn_ == warp_;
    turn_ = turn_ + 1 == warps_ ? 0 : turn_ + 1;
    if (mine_) {  // read long before they are used
      key_page_ = pages_[min(block + 2, end_ - 1)];
      value_page_ = pages_[min(block + 1, end_ - 1)];
    }
    return wait(kKeys);
  }
  __device__ __forceinline__ void done_with_keys() { done(kKeys); }
  /// What the keys of this block and the values of the one before have left is filled again. Warps take turns.
  __device__ __forceinline__ void refill(int block) {
    if (!mine_ || !elect_lane()) return;
    if (block + 2 < end_) copy(kKeys, use_ + 2, key_page_);
    if (block + 1 < end_) copy(kValues, use_ + 1, value_page_);
  }
  __device__ __forceinline__ uint32_t values() { return wait(kValues); }
  __device__ __forceinline__ void done_with_values() {
    done(kValues);
    ++use_;
  }

 private:
  static constexpr int kDepth = 2, kKeys = 0, kValues = 1;
  static constexpr uint32_t kBytes = kBlockBytes<kDim, false>;

  __device__ __forceinline__ uint32_t place(int part, uint32_t use) const {
    return ring_ + ((use % kDepth) * 2 + part) * kBytes;
  }
  __device__ __forceinline__ uint32_t full(int part, uint32_t use) const {
    return barriers_ + 8 * ((use % kDepth) * 2 + part);
  }
  __device__ __forceinline__ uint32_t empty(int part, uint32_t use) const { return full(part, use) + 8 * 2 * kDepth; }
  __device__ __forceinline__ void copy(int part, uint32_t use, int page) {
    // A place that was never used is free: its barrier passes for the phase before the first.
    mbarrier_wait(empty(part, use), (use / kDepth & 1) ^ 1);
    copy_bulk(place(part, use), p_.blocks + (cache_block(page, p_.kv_heads, kv_head_) + part) * kBytes, kBytes,
              full(part, use));
  }
  __device__ __forceinline__ uint32_t wait(int part) const {
    mbarrier_wait(full(part, use_), use_ / kDepth & 1);
    return place(part, use_);
  }
  // Each lane for itself: compute-sanitizer's racecheck does not follow one that arrives for its warp.
  __device__ __forceinline__ void done(int part) const { mbarrier_arrive(empty(part, use_)); }

  const AttentionParams& p_;
  uint32_t ring_, barriers_ = 0;
  int warp_, warps_;
  uint32_t use_ = 0;  // blocks used so far, over all tiles
  const int32_t* pages_ = nullptr;
  int kv_head_ = 0, end_ = 0, turn_ = 0, key_page_ = 0, value_page_ = 0;
  bool mine_ = false;
};

#endif

}  // namespace tensorfold
