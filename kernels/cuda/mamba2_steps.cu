// The recurrence of Mamba2, one step a row in position order, and all of the operation for few rows.
//
// S = decay S + (step x) B^T; y = S C + D x, for each head and column of x; S is [head_dim][state].
//
// Order of a step, the same for any number of rows, blocks and columns a lane:
//   a column's `state` values are cut into 8 segments j of values {32 m + 4 j + e}, a lane each; m ascending, in it e
//   ascending:
//     S = fma(step * x, B, decay * S); y[m odd] = fma(C, S, y[m odd]);
//   y = y[even] + y[odd]; segments are added by a butterfly over j ^ 4, j ^ 2, j ^ 1; y = fma(D, x, y).
//
// A step needs nothing of the step's other lanes, so the sums may come later: for prompts those of four steps and two
// columns are added together, each lane ending with one of them. A lane then holds two columns, so that an element of B
// and C that comes from shared memory is used twice.
//
// A block has 32 columns of a head. Prompts: x, B, C and time steps of chunks of steps come by asynchronous copies two
// chunks ahead; one barrier a chunk. Few rows: a block convolves its columns' x and the group's B and C for 16 steps,
// then does the steps; what is left for a group of heads (gate, norm, history) is done by the last of its blocks to
// arrive (a counter in the state, zero between passes).
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mamba2_row.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kColumns = 32;  // of a block
constexpr int kStages = 3;    // chunks in flight or in use
constexpr int kWarps = 4;     // of a block for many rows
constexpr int kLaneColumns = kColumns / (kWarps * kColumnsAWarp);
constexpr int kQuad = 4;  // steps whose sums are added together
constexpr int kFewChunk = 16;
constexpr int kFewWarps = 8;

// A lane's share of S: `Columns` neighbouring columns, of each the values of its segment.
template <int State, int Columns>
struct LaneState {
  static constexpr int kM = State / 32;
  float s[Columns][kM][4];

  // The lane's first column, of the block, if the warp is number `warp`.
  __device__ __forceinline__ static int first_column(int warp, int lane) {
    return (warp * kColumnsAWarp + lane_column(lane)) * Columns;
  }

  // `at`: S of the lane's first column.
  __device__ __forceinline__ void load(const float* at, int lane) {
#pragma unroll
    for (int u = 0; u < Columns; ++u) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float4 x = load_four(at + u * State + 32 * m + 4 * lane_segment(lane));
        s[u][m][0] = x.x;
        s[u][m][1] = x.y;
        s[u][m][2] = x.z;
        s[u][m][3] = x.w;
      }
    }
  }
  __device__ __forceinline__ void store(float* at, int lane) const {
#pragma unroll
    for (int u = 0; u < Columns; ++u) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        *reinterpret_cast<float4*>(at + u * State + 32 * m + 4 * lane_segment(lane)) =
            make_float4(s[u][m][0], s[u][m][1], s[u][m][2], s[u][m][3]);
      }
    }
  }

  // One step; y: the lane's parts. `bc`: B, then C; x: of the lane's columns.
  __device__ __forceinline__ void step(const float* bc, const float* x, Mamba2Gate gate, int lane,
                                       float (&y)[Columns]) {
    float in[Columns], sum[Columns][2];
#pragma unroll
    for (int u = 0; u < Columns; ++u) {
      in[u] = __fmul_rn(gate.step, x[u]);
      sum[u][0] = sum[u][1] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float4 b4 = load_four(bc + 32 * m + 4 * lane_segment(lane));
      const float4 c4 = load_four(bc + State + 32 * m + 4 * lane_segment(lane));
      const float b[4] = {b4.x, b4.y, b4.z, b4.w}, c[4] = {c4.x, c4.y, c4.z, c4.w};
#pragma unroll
      for (int u = 0; u < Columns; ++u) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[u][m][e] = __fmaf_rn(in[u], b[e], __fmul_rn(gate.decay, s[u][m][e]));
          sum[u][m & 1] = m < 2 && e == 0 ? __fmul_rn(c[e], s[u][m][e]) : __fmaf_rn(c[e], s[u][m][e], sum[u][m & 1]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < Columns; ++u) y[u] = kM > 1 ? __fadd_rn(sum[u][0], sum[u][1]) : sum[u][0];
  }
};

// Sums of eight parts across segments, in the order of sum_over_segments(); a lane gets that of the part with its
// segment's number.
__device__ __forceinline__ float sum_of_own_part(const float (&parts)[kSegments], int segment) {
  float four[4], two[2];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const bool high = (segment & 4) != 0;
    const float mine = high ? parts[k + 4] : parts[k], other = high ? parts[k] : parts[k + 4];
    four[k] = __fadd_rn(mine, __shfl_xor_sync(0xffffffffu, other, 8));
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const bool high = (segment & 2) != 0;
    const float mine = high ? four[k + 2] : four[k], other = high ? four[k] : four[k + 2];
    two[k] = __fadd_rn(mine, __shfl_xor_sync(0xffffffffu, other, 4));
  }
  const bool high = (segment & 1) != 0;
  const float mine = high ? two[1] : two[0], other = high ? two[0] : two[1];
  return __fadd_rn(mine, __shfl_xor_sync(0xffffffffu, other, 2));
}

template <int State>
struct alignas(16) StepsShared {
  static constexpr int kChunk = State > 128 ? 4 : 8;  // steps between two barriers
  float bc[kStages][kChunk][2 * State];
  float x[kStages][kChunk][kColumns];
  Mamba2Gate gates[kStages][kChunk];
};

// What a thread of a block for many rows copies.
template <int State>
struct Feed {
  using Shared = StepsShared<State>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kChunk = Shared::kChunk;
  static constexpr int kBcPieces = State / 2;       // of 16 bytes that B and C of a step have
  static constexpr int kXPieces = kColumns / 4;     // … x
  static constexpr int kGateThread = kThreads / 2;  // first thread that copies time steps
  static_assert(kThreads % kBcPieces == 0 && kChunk * kBcPieces % kThreads == 0, "a thread has one piece of B and C");
  static_assert(kChunk * kXPieces <= kThreads && kGateThread + kChunk <= kThreads);

  const Mamba2Params& p;
  const Mamba2Work& work;
  Shared& shared;
  int g, head, live, thread;      // live: columns that the block really has
  const float *bc_from, *x_from;  // the thread's piece in slot 0

  __device__ __forceinline__ Feed(const Mamba2Params& params, const Mamba2Work& group_work, Shared& memory, int group,
                                  int of_head, int column0, int columns, int thread_index)
      : p(params), work(group_work), shared(memory), g(group), head(of_head), live(columns), thread(thread_index) {
    const int in_group = p.wide + thread % kBcPieces * 4;  // B and C lie one after the other there
    bc_from = p.mixed + mamba2_in_pass(p, head / p.together, in_group);
    x_from = p.mixed + head * p.head_dim + column0 + thread % kXPieces * 4;
  }

  __device__ __forceinline__ int64_t slot(int i) const {
    return i < work.group.accepted ? p.rows + static_cast<int64_t>(p.window) * g + i : work.row(i);
  }

  // Chunk c; what lies beyond the rows or columns is anything.
  __device__ __forceinline__ void load(int c, int stage) const {
    const int base = c * kChunk;
    constexpr int kStepsAtOnce = kThreads / kBcPieces;
#pragma unroll
    for (int n = 0; n < kChunk / kStepsAtOnce; ++n) {
      const int s = thread / kBcPieces + n * kStepsAtOnce;
      if (base + s >= work.count) break;
      copy_async<16>(&shared.bc[stage][s][thread % kBcPieces * 4], bc_from + slot(base + s) * p.channels);
    }
    if (thread < kChunk * kXPieces) {
      const int s = thread / kXPieces, column = thread % kXPieces * 4;
      if (base + s < work.count && column < live) {
        copy_async<16>(&shared.x[stage][s][column], x_from + slot(base + s) * p.channels);
      }
    }
    const int s = thread - kGateThread;
    if (s >= 0 && s < kChunk && base + s < work.count) {
      copy_async<8>(&shared.gates[stage][s], p.gates + slot(base + s) * p.heads + head);
    }
  }
};

// blockIdx.x: head and 32 of its columns. blockIdx.y: group of rows.
template <int State>
__global__ void __launch_bounds__(32 * kWarps, 3) mamba2_steps_kernel(const __grid_constant__ Mamba2Params p) {
  using Lane = LaneState<State, kLaneColumns>;
  static_assert(kLaneColumns * kQuad == kSegments, "a lane gets one sum of four steps");
  constexpr int kChunk = StepsShared<State>::kChunk;
  __shared__ StepsShared<State> shared;
  const int thread = static_cast<int>(threadIdx.x), warp = uniform_warp(), lane = thread % 32;
  const int head = static_cast<int>(blockIdx.x) / p.parts, g = static_cast<int>(blockIdx.y);
  const int column0 = static_cast<int>(blockIdx.x) % p.parts * kColumns, live = min(kColumns, p.head_dim - column0);
  pdl_launch();
  const float d = p.d[head];
  pdl_wait();
  if (g >= *p.group_count) return;
  const Mamba2Work work(p, p.groups[g], p.states[g], head / p.together);
  const int count = uniform(work.count), commit = uniform(work.commit);
  if (count <= 0) return;

  const Feed<State> feed(p, work, shared, g, head, column0, live, thread);
  feed.load(0, 0);
  copies_commit();
  feed.load(1, 1);
  copies_commit();
  const int own = Lane::first_column(warp, lane), segment = lane_segment(lane);
  const bool here = warp * kColumnsAWarp * kLaneColumns < live;  // live is a multiple of a warp's columns
  float* state = work.memory + head % p.together * p.at.head + static_cast<int64_t>(column0 + own) * State;
  Lane columns;
  if (here) columns.load(state, lane);

  float* y_out = p.y + head * p.head_dim + column0 + own;
  int stage = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += kChunk) {
    copies_wait_all_but_one();
    __syncthreads();  // this chunk is here, and nobody reads the one before it any more
    feed.load(base / kChunk + 2, stage == 0 ? kStages - 1 : stage - 1);
    copies_commit();
    const float* bc = &shared.bc[stage][0][0];
    const float* x = &shared.x[stage][0][own];
    const Mamba2Gate* gates = shared.gates[stage];
    stage = stage == kStages - 1 ? 0 : stage + 1;
    if (!here) continue;
    const int steps = min(kChunk, count - base);
#pragma unroll 1
    for (int s = 0; s < steps;) {
      const int i = base + s;
      if (s + kQuad <= steps && (commit <= i || commit >= i + kQuad)) {
        float parts[kSegments];
#pragma unroll
        for (int t = 0; t < kQuad; ++t) {
          float y[kLaneColumns];
          columns.step(bc + (s + t) * 2 * State, x + (s + t) * kColumns, gates[s + t], lane, y);
#pragma unroll
          for (int u = 0; u < kLaneColumns; ++u) parts[t * kLaneColumns + u] = y[u];
        }
        const float sum = sum_of_own_part(parts, segment);
        const int t = segment / kLaneColumns, u = segment % kLaneColumns;
        if (i + t >= work.group.accepted) {
          y_out[work.row(i + t) * p.y_stride + u] = __fmaf_rn(d, x[(s + t) * kColumns + u], sum);
        }
        s += kQuad;
      } else {
        float y[kLaneColumns];
        columns.step(bc + s * 2 * State, x + s * kColumns, gates[s], lane, y);
#pragma unroll
        for (int u = 0; u < kLaneColumns; ++u) {
          const float sum = sum_over_segments(y[u]);
          if (segment == 0 && i >= work.group.accepted) {
            y_out[work.row(i) * p.y_stride + u] = __fmaf_rn(d, x[s * kColumns + u], sum);
          }
        }
        s += 1;
      }
      if (base + s == commit) columns.store(state, lane);
    }
  }
}

// For few rows.
template <int State>
struct alignas(16) FewShared {
  float bc[kFewChunk][2 * State];
  float x[kFewChunk][kColumns];
  Mamba2Gate gates[kFewChunk];
  int last;
};

// blockIdx.x: head and 32 of its columns. blockIdx.y: group of rows.
template <int State>
__global__ void __launch_bounds__(32 * kFewWarps, State > 128 ? 1 : 2)
    mamba2_few_kernel(const __grid_constant__ Mamba2Params p) {
  using Lane = LaneState<State, 1>;
  static_assert(kFewWarps * kColumnsAWarp == kColumns);
  constexpr int kThreads = 32 * kFewWarps;
  constexpr int kPieces = State / 2 + kColumns / 4;  // four channels each: B and C, then x
  constexpr int kStepsAtOnce = kThreads / kPieces;
  static_assert(kStepsAtOnce >= 1);
  __shared__ FewShared<State> shared;
  const int thread = static_cast<int>(threadIdx.x), warp = uniform_warp(), lane = thread % 32;
  const int head = static_cast<int>(blockIdx.x) / p.parts, part = static_cast<int>(blockIdx.x) % p.parts;
  const int column0 = part * kColumns, live = min(kColumns, p.head_dim - column0);
  const int head_group = head / p.together, g = static_cast<int>(blockIdx.y);
  pdl_launch();
  // A thread convolves the same four channels of every kStepsAtOnce-th step.
  const int piece = thread % kPieces, first_step = thread / kPieces, x_column = (piece - State / 2) * 4;
  const bool is_x = x_column >= 0, feeds = first_step < kStepsAtOnce && x_column < live;
  const int channel = is_x ? head % p.together * p.head_dim + column0 + x_column : p.wide + piece * 4;
  const int in_pass = mamba2_in_pass(p, head_group, channel);
  float* const feed_to = is_x ? &shared.x[0][x_column] : &shared.bc[0][piece * 4];
  const int feed_stride = is_x ? kColumns : 2 * State;
  Mamba2Taps taps;
  if (feeds) taps.load(p, in_pass);
  const float d = p.d[head];
  // The states too are what an earlier pass left.
  const DeviceGroup group = p.groups[g];
  float* const states = p.states[g];
  const int groups = *p.group_count;
  const Mamba2Work work(p, group, states, head_group);
  const int count = uniform(g < groups ? work.count : 0), commit = uniform(work.commit);
  const int own = Lane::first_column(warp, lane);
  const bool here = warp * kColumnsAWarp < live;  // live is a multiple of a warp's columns
  float* state = work.memory + head % p.together * p.at.head + static_cast<int64_t>(column0 + own) * State;
  Lane column;
  if (here && count > 0) column.load(state, lane);
  pdl_wait();
  if (g == 0) {
    for (int row = thread; row < p.rows; row += kThreads) {
      if (p.group_of[row] < 0) mamba2_no_output(p, row, head * p.head_dim + column0, live, 0, 1);
    }
  }
  if (count <= 0) return;

  float* y_out = p.y + head * p.head_dim + column0 + own;
#pragma unroll 1
  for (int base = 0; base < count; base += kFewChunk) {
    const int steps = min(kFewChunk, count - base);
    if (feeds) {
#pragma unroll 1
      for (int s = first_step; s < steps; s += kStepsAtOnce) {
        const float4 mixed = taps.convolve(p, in_pass, [&](int t) {
          return load_four(mamba2_raw(p, work, base + s + t - (p.taps - 1), channel, in_pass));
        });
        *reinterpret_cast<float4*>(feed_to + s * feed_stride) = mixed;
      }
    }
    // From the other end: the first threads are busy with channels.
    const int gate_step = kThreads - 1 - thread;
    if (gate_step < steps) shared.gates[gate_step] = mamba2_gate(p, work, base + gate_step, head);
    __syncthreads();
    if (here) {
#pragma unroll 1
      for (int s = 0; s < steps; ++s) {
        const int i = base + s;
        float y[1];
        column.step(shared.bc[s], &shared.x[s][own], shared.gates[s], lane, y);
        const float sum = sum_over_segments(y[0]);
        if (lane_segment(lane) == 0 && i >= work.group.accepted) {
          y_out[work.row(i) * p.y_stride] = __fmaf_rn(d, shared.x[s][own], sum);
        }
        if (i + 1 == commit) column.store(state, lane);
      }
    }
    __syncthreads();
  }

  // All of this block's y is on its way, and it reads the group's kept rows no more.
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    auto* arrivals = reinterpret_cast<int*>(work.memory + p.at.arrivals);
    shared.last = atomicAdd(arrivals, 1) == p.together * p.parts - 1 ? 1 : 0;
    if (shared.last != 0) *arrivals = 0;
  }
  __syncthreads();
  if (shared.last == 0) return;
  __threadfence();
#pragma unroll 1
  for (int r = warp; r < work.group.rows; r += kFewWarps) {
    mamba2_output(p, static_cast<int64_t>(work.group.first_row) + r, head_group, lane);
  }
  // From the other end: the first warps are busy with outputs.
  mamba2_keep(p, work, head_group, kThreads - 1 - thread, kThreads);
}

template <typename Kernel>
void launch(cudaStream_t stream, Kernel kernel, int threads, const char* what, Mamba2Params p) {
  p.parts = (p.head_dim + kColumns - 1) / kColumns;
  const dim3 grid(static_cast<unsigned>(p.heads * p.parts), static_cast<unsigned>(p.max_groups));
  launch_kernel(kernel, grid, dim3(static_cast<unsigned>(threads)), 0, stream, what, p);
}

void check_state(const Mamba2Params& p) { kernel_check(p.state == 32, "Mamba2: states of 32, 64, 128 or 256"); }

}  // namespace

void cuda_mamba2_few(cudaStream_t stream, Mamba2Params p) {
  constexpr int kThreads = 32 * kFewWarps;
  constexpr const char* kWhat = "Mamba2, few rows";
  if (p.state == 256) return launch(stream, mamba2_few_kernel<256>, kThreads, kWhat, p);
  if (p.state == 128) return launch(stream, mamba2_few_kernel<128>, kThreads, kWhat, p);
  if (p.state == 64) return launch(stream, mamba2_few_kernel<64>, kThreads, kWhat, p);
  check_state(p);
  launch(stream, mamba2_few_kernel<32>, kThreads, kWhat, p);
}

void cuda_mamba2_steps(cudaStream_t stream, Mamba2Params p) {
  constexpr int kThreads = 32 * kWarps;
  constexpr const char* kWhat = "Mamba2 steps";
  if (p.state == 256) return launch(stream, mamba2_steps_kernel<256>, kThreads, kWhat, p);
  if (p.state == 128) return launch(stream, mamba2_steps_kernel<128>, kThreads, kWhat, p);
  if (p.state == 64) return launch(stream, mamba2_steps_kernel<64>, kThreads, kWhat, p);
  check_state(p);
  launch(stream, mamba2_steps_kernel<32>, kThreads, kWhat, p);
}

}  // namespace tensorfold
