// The recurrence of the gated delta net, one step a row in position order, and all of the operation for few rows.
//
// S' = g S; r = S'^T k; d = (v - r) beta; S = S' + k d^T; y = S^T q.
//
// Order of a step, the same for any number of rows, blocks and units a warp:
//   a column's dk rows are cut into 8 segments j of rows {32 m + 4 j + e}, a lane each; m ascending, in it e ascending:
//     p[m odd] = fma(k, S, p[m odd]);
//   p = p[even] + p[odd]; segments are added by a butterfly over j ^ 4, j ^ 2, j ^ 1;
//   d = fma(-g, p, v) * beta;
//   S = fma(k, d, g * S); y[m odd] = fma(q, S, y[m odd]); y is added up like p.
//
// (r = g (S^T k) rather than (g S)^T k: the multiplications by g then need not wait, nor be waited for.)
//
// A warp holds `Units` times 4 columns in registers. Prompts: a block has 16 columns of a value head; k, q and gates of
// chunks of 8 steps come by asynchronous copies two chunks ahead; v's inputs come one more ahead, and each thread runs
// the convolution of one step and column. One barrier a chunk. Few rows: a block has 16 warps, does the rows' own work
// for 16 steps and then the steps; what is left (norm, gate, history) is done by the head's block, or by the last to
// arrive where a head has several (a counter in the state, zero between passes).
#include "kernels/cuda/delta_net_row.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kChunk = 8;   // steps between two barriers
constexpr int kStages = 3;  // chunks in flight or in use
constexpr int kWarps = 4;   // of a block for many rows
constexpr int kColumns = 4 * kWarps;
constexpr int kFewChunk = 16;
constexpr int kFewWarps = 16;

// A lane's share of `Units` times 4 columns of S.
template <int DK, int Units>
struct Columns {
  static constexpr int kM = DK / 32;
  float s[Units][kM][4];

  // `at`: S of the first column; units from `live` on are not there.
  __device__ __forceinline__ void load(const float* at, int lane, int live) {
#pragma unroll
    for (int u = 0; u < Units; ++u) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (u < live) x = load_four(at + u * kColumnsAWarp * DK + delta_lane_offset(DK, lane, m, 0));
        s[u][m][0] = x.x;
        s[u][m][1] = x.y;
        s[u][m][2] = x.z;
        s[u][m][3] = x.w;
      }
    }
  }
  __device__ __forceinline__ void store(float* at, int lane, int live) const {
#pragma unroll
    for (int u = 0; u < Units; ++u) {
      if (u >= live) continue;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        *reinterpret_cast<float4*>(at + u * kColumnsAWarp * DK + delta_lane_offset(DK, lane, m, 0)) =
            make_float4(s[u][m][0], s[u][m][1], s[u][m][2], s[u][m][3]);
      }
    }
  }

  __device__ __forceinline__ static void load_rows(float (&to)[kM][4], const float* from, int lane) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float4 x = load_four(from + 32 * m + 4 * lane_segment(lane));
      to[m][0] = x.x;
      to[m][1] = x.y;
      to[m][2] = x.z;
      to[m][3] = x.w;
    }
  }

  // The lane's part of S^T x of a unit.
  __device__ __forceinline__ float dot(const float (&x)[kM][4], int u) const {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[m & 1] = m < 2 && e == 0 ? __fmul_rn(x[m][e], s[u][m][e]) : __fmaf_rn(x[m][e], s[u][m][e], sum[m & 1]);
      }
    }
    return kM > 1 ? __fadd_rn(sum[0], sum[1]) : sum[0];
  }

  // One step; y: the lane's parts. v: of the lane's column, units 4 apart.
  __device__ __forceinline__ void step(const float* q_from, const float* k_from, const float* v, DeltaGate gate,
                                       int lane, float (&y)[Units]) {
    float k[kM][4], q[kM][4], d[Units];
    load_rows(k, k_from, lane);
    load_rows(q, q_from, lane);
#pragma unroll
    for (int u = 0; u < Units; ++u) d[u] = dot(k, u);
#pragma unroll
    for (int u = 0; u < Units; ++u) d[u] = sum_over_segments(d[u]);
#pragma unroll
    for (int u = 0; u < Units; ++u) {
      d[u] = __fmul_rn(__fmaf_rn(-gate.decay, d[u], v[u * kColumnsAWarp]), gate.beta);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[u][m][e] = __fmaf_rn(k[m][e], d[u], __fmul_rn(gate.decay, s[u][m][e]));
      }
      y[u] = dot(q, u);
    }
  }
};

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

// What the threads of a block for many rows know.
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
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
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

// For few rows: Units times 64 columns a block.
template <int DK, int Units>
struct alignas(16) FewShared {
  static constexpr int kWidth = 64 * Units;
  float qk[kFewChunk][2 * DK];
  float values[kFewChunk][kWidth];
  float y[kFewChunk][kWidth];
  float4 weights[2 * DK + kWidth];  // of 4 taps
  DeltaGate gates[kFewChunk];
  int last;
};

// The rows' own work of a block for few rows.
template <int DK, int Units>
struct FewInputs {
  const DeltaParams& p;
  const DeltaWork& work;
  FewShared<DK, Units>& shared;
  int k_head, v_head, column0, live, warp, lane;

  // A warp takes q, k, v or the gate of one step in four.
  __device__ __forceinline__ void run(int base, int steps) const {
    const int kind = warp % 4;
    if (kind == 3) {
      const int s = warp / 4 + lane * (kFewWarps / 4);
      if (s < steps) shared.gates[s] = delta_gate(p, work, base + s, v_head);
      return;
    }
    // Lanes beyond the head read its last channels.
    const int width = kind < 2 ? DK : live;
    const int channel = min(lane * 4, width - 4);
    const int in_block = kind * DK + channel, in_state = in_block + (kind < 2 ? 0 : column0);
    const int64_t in_pass = delta_channel(p, k_head, v_head, in_state);
    const auto store = [&](int s, float4 x) {
      if (kind < 2) {
        delta_store_head(DK, x, kind == 0 ? p.q_scale : 1.0f, lane, &shared.qk[s][kind * DK]);
      } else if (lane * 4 < live) {
        *reinterpret_cast<float4*>(&shared.values[s][channel]) = x;
      }
    };
    if (p.taps != 4) {
#pragma unroll 1
      for (int s = warp / 4; s < steps; s += kFewWarps / 4) {
        store(s, delta_convolve(p.taps, p.conv + in_pass * p.taps, [&](int t) {
                return load_four(delta_raw(p, work, base + s + t - (p.taps - 1), in_state, in_pass));
              }));
      }
      return;
    }
    // Several steps' loads at once, where that leaves enough registers for S.
    constexpr int kBatch = Units == 1 && DK == 128 ? 2 : 1;
#pragma unroll 1
    for (int first = warp / 4; first < steps; first += kBatch * (kFewWarps / 4)) {
      float4 x[kBatch][4];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int s = min(first + j * (kFewWarps / 4), steps - 1);
#pragma unroll
        for (int t = 0; t < 4; ++t) x[j][t] = load_four(delta_raw(p, work, base + s + t - 3, in_state, in_pass));
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int s = first + j * (kFewWarps / 4);
        if (s < steps) store(s, delta_convolve4(shared.weights + in_block, x[j][0], x[j][1], x[j][2], x[j][3]));
      }
    }
  }
};

// Norm and gate of the rows of steps [base, base + steps), a warp each; load(step, row, y) loads y.
template <typename Load>
__device__ __forceinline__ void few_outputs(const DeltaParams& p, const DeltaWork& work, int v_head, int base,
                                            int steps, int warp, int lane, const Load& load) {
#pragma unroll 1
  for (int s = warp; s < steps; s += kFewWarps) {
    if (base + s < work.group.accepted) continue;
    const int64_t row = work.row(base + s);
    float4 y[2], z[2];
    delta_load_row(p.z.data + row * p.z.stride + static_cast<int64_t>(v_head) * p.dv, p.dv, lane, z);
    load(s, row, y);
    delta_output(p, row, v_head, lane, y, z);
  }
}

// blockIdx.x: value head and Units times 64 of its columns. blockIdx.y: group.
template <int DK, int Units>
__global__ void __launch_bounds__(32 * kFewWarps, 1) delta_few_kernel(const __grid_constant__ DeltaParams p) {
  using Shared = FewShared<DK, Units>;
  constexpr int kThreads = 32 * kFewWarps;
  __shared__ Shared shared;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int v_head = static_cast<int>(blockIdx.x) / p.parts, part = static_cast<int>(blockIdx.x) % p.parts;
  const int column0 = part * Shared::kWidth, live = min(Shared::kWidth, p.dv - column0);
  const int g = static_cast<int>(blockIdx.y);
  pdl_launch();
  const int k_head = p.k_head_of[v_head];
  if (p.taps == 4) {
    for (int i = thread; i < 2 * DK + live; i += kThreads) {
      const int channel = i < 2 * DK ? i : i + column0;
      shared.weights[i] = load_four(p.conv + delta_channel(p, k_head, v_head, channel) * 4);
    }
  }
  pdl_wait();
  const DeviceGroup group = p.groups[g];
  float* const states = p.states[g];
  const int groups = *p.group_count;
  if (g == 0 && part == 0 && thread < p.rows && p.group_of[thread] < 0) delta_no_output(p, thread, v_head, 0, 1);
  if (g >= groups) return;
  const DeltaWork work(p, group, states, v_head);
  if (work.count <= 0) return;

  Columns<DK, Units> columns;
  const int column = warp * Units * kColumnsAWarp;  // of the block
  const int units = max(0, min(Units, (live - column) / kColumnsAWarp));
  float* state = work.head + (column0 + column) * DK;
  columns.load(state, lane, units);
  __syncthreads();  // weights
  const FewInputs<DK, Units> inputs{p, work, shared, k_head, v_head, column0, live, warp, lane};
  const int64_t width = static_cast<int64_t>(p.v_heads) * p.dv;
#pragma unroll 1
  for (int base = 0; base < work.count; base += kFewChunk) {
    const int steps = min(kFewChunk, work.count - base);
    inputs.run(base, steps);
    __syncthreads();
    if (units > 0) {
      const int own = column + lane_column(lane);
#pragma unroll 1
      for (int s = 0; s < steps; ++s) {
        float y[Units];
        columns.step(shared.qk[s], &shared.qk[s][DK], &shared.values[s][own], shared.gates[s], lane, y);
        const int i = base + s;
        float* to = p.parts == 1 ? &shared.y[s][own] : p.y + work.row(i) * width + v_head * p.dv + column0 + own;
#pragma unroll
        for (int u = 0; u < Units; ++u) {
          const float sum = sum_over_segments(y[u]);
          if (lane_segment(lane) == 0 && u < units && i >= work.group.accepted) to[u * kColumnsAWarp] = sum;
        }
        if (i + 1 == work.commit) columns.store(state, lane, units);
      }
    }
    __syncthreads();
    if (p.parts == 1) {
      few_outputs(p, work, v_head, base, steps, warp, lane,
                  [&](int s, int64_t, float4(&y)[2]) { delta_load_row(shared.y[s], p.dv, lane, y); });
    }
  }
  if (p.parts > 1) {
    // All of this block's y is on its way, and it reads the head's kept rows no more.
    __threadfence();
    __syncthreads();
    if (thread == 0) {
      auto* arrivals = reinterpret_cast<int*>(work.head + p.state.arrivals);
      shared.last = atomicAdd(arrivals, 1) == p.parts - 1 ? 1 : 0;
      if (shared.last != 0) *arrivals = 0;
    }
    __syncthreads();
    if (shared.last == 0) return;
    __threadfence();
    few_outputs(p, work, v_head, 0, work.count, warp, lane, [&](int, int64_t row, float4(&y)[2]) {
      const float4* from = reinterpret_cast<const float4*>(p.y + row * width + v_head * p.dv);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        y[j] = lane + 32 * j < p.dv / 4 ? __ldcg(from + lane + 32 * j) : make_float4(0, 0, 0, 0);
      }
    });
  }
  // From the other end: the first warps are busy with outputs.
  delta_keep(p, work, k_head, v_head, kThreads - 1 - thread, kThreads);
}

template <int DK>
void launch_few(cudaStream_t stream, const DeltaParams& p, bool two) {
  const dim3 grid(static_cast<unsigned>(p.v_heads * p.parts), static_cast<unsigned>(p.max_groups));
  const auto kernel = two ? delta_few_kernel<DK, 2> : delta_few_kernel<DK, 1>;
  launch_kernel(kernel, grid, dim3(32 * kFewWarps), 0, stream, "delta net, few rows", p);
}

template <int DK>
void launch_steps(cudaStream_t stream, const DeltaParams& p) {
  const dim3 grid(static_cast<unsigned>(p.v_heads * p.parts), static_cast<unsigned>(p.max_groups));
  const auto kernel = p.taps == 4 ? delta_steps_kernel<DK, 4> : delta_steps_kernel<DK, 0>;
  launch_kernel(kernel, grid, dim3(32 * kWarps), 0, stream, "delta net steps", p);
}

}  // namespace

void cuda_delta_few(cudaStream_t stream, DeltaParams p) {
  kernel_check(p.rows <= 32 * kFewWarps, "delta net: more rows than a block of the kernel for few has threads");
  // A block a head for one to four rows or many groups; else more, for which a row's steps are a greater part than the
  // blocks' meeting at the end.
  const bool two = p.dv > 64 && (p.rows <= 4 || p.v_heads * p.max_groups > 96);
  const int columns = two ? 128 : 64;
  p.parts = (p.dv + columns - 1) / columns;
  if (p.dk == 128) return launch_few<128>(stream, p, two);
  if (p.dk == 64) return launch_few<64>(stream, p, two);
  kernel_check(p.dk == 32, "delta net: key heads must have 32, 64 or 128 dims");
  launch_few<32>(stream, p, two);
}

void cuda_delta_steps(cudaStream_t stream, DeltaParams p) {
  p.parts = (p.dv + kColumns - 1) / kColumns;
  if (p.dk == 128) return launch_steps<128>(stream, p);
  if (p.dk == 64) return launch_steps<64>(stream, p);
  kernel_check(p.dk == 32, "delta net: key heads must have 32, 64 or 128 dims");
  launch_steps<32>(stream, p);
}

}  // namespace tensorfold
