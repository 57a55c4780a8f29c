// The recurrence of the gated delta net for many rows: the step of delta_net_columns.cuh, one a row in position order.
//
// A block has 16 columns of a value head, a warp 4. k, q and gates of chunks of 8 steps come by asynchronous copies two
// chunks ahead; v's inputs come one more ahead, and each thread runs the convolution of one step and column. One
// barrier a chunk.
#include "kernels/cuda/delta_net_columns.cuh"
#include "kernels/cuda/delta_net_row.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kChunk = 8;   // steps between two barriers
constexpr int kStages = 3;  // chunks in flight or in use
constexpr int kWarps = 4;   // of a block
constexpr int kColumns = 4 * kWarps;

// Sums of the parts of 8 steps across segments, a lane getting that of one step, in the order of sum_over_segments().
// First, for each four steps, all but the last addition.
__device__ __forceinline__ float sum_of_four(const float (&parts)[4], int segment) {
  float two[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const bool high = (segment & 4) != 0;
    const float mine = high ? parts[t + 2] : parts[t], other = high ? parts[t] : parts[t + 2];
    two[t] = __fadd_rn(mine, __shfl_xor_sync(0xffffffffu, other, 8));
  }
  const bool high = (segment & 2) != 0;
  const float mine = high ? two[1] : two[0], other = high ? two[0] : two[1];
  return __fadd_rn(mine, __shfl_xor_sync(0xffffffffu, other, 4));
}
__device__ __forceinline__ float sum_of_eight(float first, float second, int segment) {
  const bool high = (segment & 1) != 0;
  const float mine = high ? second : first, other = high ? first : second;
  return __fadd_rn(mine, __shfl_xor_sync(0xffffffffu, other, 2));
}
// Step whose sum a lane gets.
__device__ __forceinline__ int step_of_segment(int segment) { return (segment & 1) * 4 + segment / 2; }

template <int DK, int Taps>
struct alignas(16) StepsShared {
  static constexpr int kRawRows = kChunk + (Taps > 0 ? Taps : kMostRecurrentTaps) - 1;
  float qk[kStages][kChunk][2 * DK];
  float raw[kStages][kRawRows][kColumns];
  float values[2][kChunk][kColumns];
  DeltaGate gates[kStages][kChunk];
};

// What the threads of a block know.
template <int DK, int Taps>
struct Feed {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kPieces = DK / 2;  // of 16 bytes that q and k of a step have

  const DeltaParams& p;
  const DeltaWork& work;
  StepsShared<DK, Taps>& shared;
  int g, k_head, v_head, column0, live,
      thread;  // live: columns that the block really has
  // What the thread copies in a chunk's place at step 0, if all steps are rows of the pass.
  const float* plain_qk;
  const float* plain_raw;

  __device__ __forceinline__ Feed(const DeltaParams& params, const DeltaWork& group_work, StepsShared<DK, Taps>& memory,
                                  int group, int key_head, int value_head, int column, int columns, int thread_index)
      : p(params),
        work(group_work),
        shared(memory),
        g(group),
        k_head(key_head),
        v_head(value_head),
        column0(column),
        live(columns),
        thread(thread_index) {
    const int64_t row = work.row(0);
    plain_qk = p.qk + ((row + thread / kPieces) * p.k_heads + k_head) * (2 * DK) + thread % kPieces * 4;
    plain_raw = p.qkv.data + (row + thread / (kColumns / 4) - 3) * p.qkv.stride + channel(thread % (kColumns / 4) * 4);
  }

  __device__ __forceinline__ int64_t channel(int column) const {
    return 2 * static_cast<int64_t>(p.k_heads) * DK + static_cast<int64_t>(v_head) * p.dv + column0 + column;
  }
  __device__ __forceinline__ int64_t slot(int i) const {
    return i < work.group.accepted ? p.rows + static_cast<int64_t>(p.window) * g + i : work.row(i);
  }

  // q, k and gates of chunk c.
  __device__ __forceinline__ void load_qk(int c, int stage) const {
    const int base = c * kChunk;
    float* to = &shared.qk[stage][0][0] + thread * 4;
    constexpr int kItems = kChunk * kPieces / kThreads;
    if (base >= work.group.accepted && base + kChunk <= work.count) {
      const int64_t stride = static_cast<int64_t>(p.k_heads) * (2 * DK);
      const float* from = plain_qk + base * stride;
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        copy_async<16>(to + n * kThreads * 4, from);
        from += kThreads / kPieces * stride;
      }
      if (thread < kChunk) {
        copy_async<8>(&shared.gates[stage][thread], p.gates + work.row(base + thread) * p.v_heads + v_head);
      }
      return;
    }
#pragma unroll 1
    for (int n = 0; n < kItems; ++n) {
      const int item = thread + n * kThreads, i = base + item / kPieces;
      if (i >= work.count) break;
      copy_async<16>(to + n * kThreads * 4, p.qk + (slot(i) * p.k_heads + k_head) * (2 * DK) + item % kPieces * 4);
    }
    const int i = base + thread;
    if (thread < kChunk && i < work.count) {
      copy_async<8>(&shared.gates[stage][thread], p.gates + slot(i) * p.v_heads + v_head);
    }
  }

  // v of chunk c before the convolution.
  __device__ __forceinline__ void load_raw(int c, int stage) const {
    const int base = c * kChunk;
    if (base >= work.count) return;
    float* to = &shared.raw[stage][0][0];
    if (Taps == 4 && base - 3 >= work.group.accepted && base + kChunk <= work.count) {
      if (thread < (kChunk + 3) * (kColumns / 4) && thread % (kColumns / 4) * 4 < live) {
        copy_async<16>(to + thread * 4, plain_raw + base * p.qkv.stride);
      }
      return;
    }
    const int taps = Taps > 0 ? Taps : p.taps;
#pragma unroll 1
    for (int item = thread; item < (kChunk + taps - 1) * (kColumns / 4); item += kThreads) {
      const int i = base + item / (kColumns / 4) - (taps - 1), column = item % (kColumns / 4) * 4;
      if (i >= work.count || column >= live) continue;
      copy_async<16>(to + item * 4, delta_raw(p, work, i, 2 * DK + column0 + column, channel(column)));
    }
  }

  // v of chunk c; what lies beyond the rows or columns is anything. w: the taps of the thread's column.
  __device__ __forceinline__ void convolve(int c, int stage, float4 w, const float* weights) const {
    const int s = thread / kColumns, column = thread % kColumns;
    float sum;
    if constexpr (Taps == 4) {
      sum = four_taps(w, shared.raw[stage][s][column], shared.raw[stage][s + 1][column],
                      shared.raw[stage][s + 2][column], shared.raw[stage][s + 3][column]);
    } else {
      sum = __fmul_rn(weights[0], shared.raw[stage][s][column]);
#pragma unroll 1
      for (int t = 1; t < p.taps; ++t) sum = __fmaf_rn(weights[t], shared.raw[stage][s + t][column], sum);
    }
    shared.values[c & 1][s][column] = silu(sum);
  }
};

// blockIdx.x: value head and 16 of its columns. blockIdx.y: group.
template <int DK, int Taps>
__global__ void __launch_bounds__(32 * kWarps, 3) delta_steps_kernel(const __grid_constant__ DeltaParams p) {
  static_assert(kChunk * kColumns == 32 * kWarps, "a thread convolves one step and column");
  __shared__ StepsShared<DK, Taps> shared;
  const int thread = static_cast<int>(threadIdx.x), warp = uniform_warp(), lane = thread % 32;
  const int v_head = static_cast<int>(blockIdx.x) / p.parts, g = static_cast<int>(blockIdx.y);
  const int column0 = static_cast<int>(blockIdx.x) % p.parts * kColumns, live = min(kColumns, p.dv - column0);
  pdl_launch();
  const int k_head = p.k_head_of[v_head];
  const int own = column0 + min(thread % kColumns, live - 1);
  const float* weights =
      p.conv + (2 * static_cast<int64_t>(p.k_heads) * DK + static_cast<int64_t>(v_head) * p.dv + own) * p.taps;
  float4 w = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if constexpr (Taps == 4) w = load_four(weights);
  pdl_wait();
  if (g >= *p.group_count) return;
  const DeltaWork work(p, p.groups[g], p.states[g], v_head);
  if (work.count <= 0) return;

  const Feed<DK, Taps> feed{p, work, shared, g, k_head, v_head, column0, live, thread};
  feed.load_raw(0, 0);
  feed.load_qk(0, 0);
  feed.load_raw(1, 1);
  copies_commit();
  feed.load_qk(1, 1);
  feed.load_raw(2, 2);
  copies_commit();
  Columns<DK, 1> columns;
  const int here = warp * kColumnsAWarp < live ? 1 : 0;
  float* state = work.head + (column0 + warp * kColumnsAWarp) * DK;
  columns.load(state, lane, here);
  copies_wait_all_but_one();
  __syncthreads();
  feed.convolve(0, 0, w, weights);

  const int column = warp * kColumnsAWarp + lane_column(lane), segment = lane_segment(lane);
  const int64_t width = static_cast<int64_t>(p.v_heads) * p.dv;
  float* y_out = p.y + static_cast<int64_t>(v_head) * p.dv + column0 + column;
  int stage = 0;
#pragma unroll 1
  for (int base = 0; base < work.count; base += kChunk) {
    const int c = base / kChunk;
    const int next = stage == kStages - 1 ? 0 : stage + 1, after = next == kStages - 1 ? 0 : next + 1;
    copies_wait_all_but_one();
    __syncthreads();  // q and k of this chunk are here, v convolved; inputs of the next chunk's v are here
    feed.load_qk(c + 2, after);
    feed.load_raw(c + 3, stage);
    copies_commit();
    if (base + kChunk < work.count) feed.convolve(c + 1, next, w, weights);
    const float* qk = &shared.qk[stage][0][0];
    const float* values = &shared.values[c & 1][0][column];
    const DeltaGate* gates = shared.gates[stage];
    stage = next;
    if (here == 0) continue;
    if (base + kChunk <= work.count && (work.commit <= base || work.commit >= base + kChunk)) {
      static_assert(kChunk == kSegments && kChunk == 8);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int s = 0; s < kChunk; s += 4) {
        float parts[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          float y[1];
          columns.step(qk + t * 2 * DK, qk + t * 2 * DK + DK, values + t * kColumns, gates[t], lane, y);
          parts[t] = y[0];
        }
        qk += 4 * 2 * DK;
        values += 4 * kColumns;
        gates += 4;
        sums[0] = sums[1];
        sums[1] = sum_of_four(parts, segment);
      }
      const float y = sum_of_eight(sums[0], sums[1], segment);
      const int i = base + step_of_segment(segment);
      if (i >= work.group.accepted) y_out[work.row(i) * width] = y;
      if (base + kChunk == work.commit) columns.store(state, lane, here);
      continue;
    }
    const int steps = min(kChunk, work.count - base);
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      float y[1];
      columns.step(qk + s * 2 * DK, qk + s * 2 * DK + DK, values + s * kColumns, gates[s], lane, y);
      const float sum = sum_over_segments(y[0]);
      if (segment == 0 && base + s >= work.group.accepted) y_out[work.row(base + s) * width] = sum;
      if (base + s + 1 == work.commit) columns.store(state, lane, here);
    }
  }
}

template <int DK>
void launch_steps(cudaStream_t stream, const DeltaParams& p) {
  const dim3 grid(static_cast<unsigned>(p.v_heads * p.parts), static_cast<unsigned>(p.max_groups));
  const auto kernel = p.taps == 4 ? delta_steps_kernel<DK, 4> : delta_steps_kernel<DK, 0>;
  launch_kernel(kernel, grid, dim3(32 * kWarps), 0, stream, "delta net steps", p);
}

}  // namespace

void cuda_delta_steps(cudaStream_t stream, DeltaParams p) {
  p.parts = (p.dv + kColumns - 1) / kColumns;
  if (p.dk == 128) return launch_steps<128>(stream, p);
  if (p.dk == 64) return launch_steps<64>(stream, p);
  kernel_check(p.dk == 32, "delta net: key heads must have 32, 64 or 128 dims");
  launch_steps<32>(stream, p);
}

}  // namespace tensorfold
