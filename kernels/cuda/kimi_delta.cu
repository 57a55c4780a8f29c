// The delta net with a decay for each key channel (Kimi's delta attention): three launches for any number of rows.
//
//   inputs   convolution, silu, norm of q and k, decays and write strengths: a warp a slot and head, as
//            delta_net_row.cuh says
//   steps    S' = diag(g) S; r = S'^T k; d = (v - r) beta; S = S' + k d^T; y = S^T q
//   outputs  norm, gate, history and kept rows (delta_net.cu)
//
// Order of a step, the same for any number of rows and blocks: a column's dk rows are cut into 8 segments j of rows
// {32 m + 4 j + e}, a lane each; m ascending, in it e ascending:
//   p[m odd] = fma(g k, S, p[m odd]);
//   p = p[even] + p[odd]; segments are added by a butterfly over j ^ 4, j ^ 2, j ^ 1;
//   d = (v - p) * beta;
//   S = fma(k, d, g * S); y[m odd] = fma(q, S, y[m odd]); y is added up like p.
// (r = S^T (g k): a product of two numbers that a lane has, in the place of one for each column.)
//
// A block has 16 columns of a value head, 4 a warp, in registers; what steps read comes by asynchronous copies two
// chunks of 8 steps ahead, one barrier a chunk. Rows of S beyond dk are zeros that stay zeros.
#include "kernels/cuda/delta_net_row.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kInputWarps = 8;
constexpr int kInputRun = 4;  // slots a warp of the inputs takes
constexpr int kChunk = 8;     // steps between two barriers
constexpr int kStages = 3;    // chunks in flight or in use
constexpr int kWarps = 4;
constexpr int kColumns = 4 * kWarps;

__device__ __forceinline__ float4 load_float4(const float* from) { return *reinterpret_cast<const float4*>(from); }

// silu(convolution) of 4 channels at step i.
__device__ __forceinline__ float4 convolve(const DeltaParams& p, const DeltaWork& work, int i, int in_state,
                                           int64_t in_pass) {
  const float* weights = p.conv + in_pass * p.taps;
  const auto from = [&](int t) { return load_float4(delta_raw(p, work, i + t - (p.taps - 1), in_state, in_pass)); };
  if (p.taps != 4) return delta_convolve(p.taps, weights, from);
  float4 w[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) w[j] = load_float4(weights + 4 * j);
  return delta_convolve4(w, from(0), from(1), from(2), from(3));
}

// A value head that has this key head, for its copy of the state's rows; a warp.
__device__ __forceinline__ int owner_of(const DeltaParams& p, int k_head, int lane) {
  for (int h = 0; h < p.v_heads; h += 32) {
    const unsigned found = __ballot_sync(0xffffffffu, h + lane < p.v_heads && p.k_head_of[h + lane] == k_head);
    if (found != 0) return h + __ffs(static_cast<int>(found)) - 1;
  }
  return -1;
}

__device__ __forceinline__ void decay_inputs(const DeltaParams& p, const DeltaWork& work, int64_t slot, int i, int h,
                                             int lane) {
  const bool kept = i < work.group.accepted;
  const float* a = kept ? work.head + p.state.a + static_cast<int64_t>(i) * p.dk
                        : p.a.data + work.row(i) * p.a.stride + static_cast<int64_t>(h) * p.dk;
  const float* bias = p.dt_bias + static_cast<int64_t>(h) * p.dk;
  float* to = p.decay + (slot * p.v_heads + h) * p.dk;
  const float rate = expf(p.a_log[h]);
#pragma unroll 1
  for (int c = lane; c < p.dk; c += 32) {
    to[c] = expf(__fmul_rn(p.decay_floor, sigmoid(__fmul_rn(rate, __fadd_rn(a[c], bias[c])))));
  }
  if (lane == 0) {
    p.beta[slot * p.v_heads + h] = sigmoid(kept ? work.head[p.state.b + i] : p.b.data[work.row(i) * p.b.stride + h]);
  }
}

// blockIdx.x: slots, 4 a warp. blockIdx.y: q of a key head, k of a key head, v of a value head, decays of a value head.
__global__ void __launch_bounds__(32 * kInputWarps) kimi_inputs_kernel(const __grid_constant__ DeltaParams p) {
  pdl_launch();
  pdl_wait();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kInputWarps + warp) * kInputRun;
  const int unit = static_cast<int>(blockIdx.y), values = unit - 2 * p.k_heads;
  const bool is_q = unit < p.k_heads;
  const int k_head = is_q ? unit : unit - p.k_heads;  // where values < 0
  const int head = values < 0 ? owner_of(p, k_head, lane) : values % p.v_heads;
  if (head < 0) return;  // no value head reads this key head
#pragma unroll 1
  for (int64_t slot = first; slot < min(first + kInputRun, slots); ++slot) {
    RecurrentSlot at;
    if (!find_slot(p, slot, &at)) continue;
    const DeltaWork work(p, p.groups[at.g], p.states[at.g], head);
    if (values >= p.v_heads) {
      decay_inputs(p, work, slot, at.i, head, lane);
    } else if (values >= 0) {
      const int own_key = p.k_head_of[head];
#pragma unroll 1
      for (int piece = lane; piece < p.dv / 4; piece += 32) {
        const int channel = 2 * p.dk + piece * 4;
        *reinterpret_cast<float4*>(p.v + (slot * p.v_heads + head) * p.dv + piece * 4) =
            convolve(p, work, at.i, channel, delta_channel(p, own_key, head, channel));
      }
    } else {
      // Lanes beyond the head read its last channels.
      const int channel = min(lane * 4, p.dk - 4);
      const float4 x =
          convolve(p, work, at.i, (is_q ? 0 : p.dk) + channel, static_cast<int64_t>(unit) * p.dk + channel);
      delta_store_head(p.dk, x, is_q ? p.q_scale : 1.0f, lane,
                       p.qk + ((slot * p.k_heads + k_head) * 2 + (is_q ? 0 : 1)) * p.dk);
    }
  }
}

// M: rows of a lane, in fours.
template <int M>
struct alignas(16) KimiShared {
  static constexpr int kRows = 32 * M;
  float q[kStages][kChunk][kRows];
  float k[kStages][kChunk][kRows];
  float decay[kStages][kChunk][kRows];
  float v[kStages][kChunk][kColumns];
  float beta[kStages][kChunk];
};

__device__ __forceinline__ void copy_async4(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// Starts the copies of chunk c, a warp two steps of it.
template <int M>
__device__ __forceinline__ void load_chunk(const DeltaParams& p, const DeltaWork& work, KimiShared<M>& shared, int g,
                                           int k_head, int v_head, int column0, int live, int c, int stage) {
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int steps = min(kChunk, work.count - c * kChunk), pieces = p.dk / 4;
#pragma unroll 1
  for (int s = warp; s < steps; s += kWarps) {
    const int i = c * kChunk + s;
    const int64_t slot = i < work.group.accepted ? p.rows + static_cast<int64_t>(p.window) * g + i : work.row(i);
    const float* qk = p.qk + (slot * p.k_heads + k_head) * 2 * p.dk;
    const int64_t head = slot * p.v_heads + v_head;
    if (lane < pieces) {
      copy_async16(shared_address(&shared.q[stage][s][lane * 4]), qk + lane * 4, true);
      copy_async16(shared_address(&shared.k[stage][s][lane * 4]), qk + p.dk + lane * 4, true);
      copy_async16(shared_address(&shared.decay[stage][s][lane * 4]), p.decay + head * p.dk + lane * 4, true);
    }
    if (lane * 4 < live) {
      copy_async16(shared_address(&shared.v[stage][s][lane * 4]), p.v + head * p.dv + column0 + lane * 4, true);
    }
    if (lane == 31) copy_async4(&shared.beta[stage][s], p.beta + head);
  }
}

// A lane's rows of a column of S, or of k, q and g.
template <int M>
__device__ __forceinline__ void load_lane_rows(float (&to)[M][4], const float* from, int segment) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float4 x = load_float4(from + 32 * m + 4 * segment);
    to[m][0] = x.x;
    to[m][1] = x.y;
    to[m][2] = x.z;
    to[m][3] = x.w;
  }
}
template <int M>
__device__ __forceinline__ float lane_dot(const float (&x)[M][4], const float (&s)[M][4]) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[m & 1] = __fmaf_rn(x[m][e], s[m][e], sum[m & 1]);
  }
  return M > 1 ? __fadd_rn(sum[0], sum[1]) : sum[0];
}
__device__ __forceinline__ float across_segments(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 4));
  return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
}

// One step of a lane's column; returns y. Rows beyond dk, where `in` is false, stay zeros whatever d is.
template <int M>
__device__ __forceinline__ float step(float (&s)[M][4], const float* q_from, const float* k_from, const float* g_from,
                                      float v, float beta, int segment, const bool (&in)[M]) {
  float k[M][4], g[M][4], x[M][4];
  load_lane_rows(k, k_from, segment);
  load_lane_rows(g, g_from, segment);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[m][e] = __fmul_rn(g[m][e], k[m][e]);
  }
  const float d = __fmul_rn(__fsub_rn(v, across_segments(lane_dot(x, s))), beta);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[m][e] = in[m] ? __fmaf_rn(k[m][e], d, __fmul_rn(g[m][e], s[m][e])) : 0.0f;
  }
  load_lane_rows(x, q_from, segment);
  return across_segments(lane_dot(x, s));
}

// blockIdx.x: value head and 16 of its columns. blockIdx.y: group.
template <int M>
__global__ void __launch_bounds__(32 * kWarps) kimi_steps_kernel(const __grid_constant__ DeltaParams p) {
  constexpr int kRows = KimiShared<M>::kRows;
  __shared__ KimiShared<M> shared;
  const int thread = static_cast<int>(threadIdx.x), warp = uniform_warp(), lane = thread % 32;
  const int v_head = static_cast<int>(blockIdx.x) / p.parts, g = static_cast<int>(blockIdx.y);
  const int column0 = static_cast<int>(blockIdx.x) % p.parts * kColumns, live = min(kColumns, p.dv - column0);
  pdl_launch();
  if (p.dk < kRows) {  // what no copy fills
    const int beyond = kRows - p.dk;
    for (int item = thread; item < kStages * kChunk * beyond; item += 32 * kWarps) {
      const int at = item / beyond * kRows + p.dk + item % beyond;
      (&shared.q[0][0][0])[at] = (&shared.k[0][0][0])[at] = (&shared.decay[0][0][0])[at] = 0.0f;
    }
  }
  pdl_wait();
  if (g >= *p.group_count) return;
  const DeltaWork work(p, p.groups[g], p.states[g], v_head);
  if (work.count <= 0) return;
  const int k_head = p.k_head_of[v_head];
  const auto load = [&](int c, int stage) {
    if (c * kChunk < work.count) load_chunk(p, work, shared, g, k_head, v_head, column0, live, c, stage);
    copy_async_commit();
  };
  load(0, 0);
  load(1, 1);

  const bool here = warp * 4 < live;
  const int segment = lane >> 1 & 7, column = warp * 4 + ((lane & 1) | (lane >> 4) << 1);
  float* state = work.head + static_cast<int64_t>(column0 + column) * p.dk;
  float s[M][4];
  bool in[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const int row = 32 * m + 4 * segment;
    in[m] = row < p.dk;
    const float4 x = here && in[m] ? load_float4(state + row) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    s[m][0] = x.x;
    s[m][1] = x.y;
    s[m][2] = x.z;
    s[m][3] = x.w;
  }
  const int64_t width = static_cast<int64_t>(p.v_heads) * p.dv;
  float* y_out = p.y + static_cast<int64_t>(v_head) * p.dv + column0 + column;
  int stage = 0;
#pragma unroll 1
  for (int base = 0; base < work.count; base += kChunk) {
    copy_async_wait<1>();
    __syncthreads();  // this chunk is here; nobody reads the chunk before it any more
    load(base / kChunk + 2, stage == 0 ? kStages - 1 : stage - 1);
    const int now = stage, steps = min(kChunk, work.count - base);
    stage = stage == kStages - 1 ? 0 : stage + 1;
    if (!here) continue;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const float y = step(s, shared.q[now][i], shared.k[now][i], shared.decay[now][i], shared.v[now][i][column],
                           shared.beta[now][i], segment, in);
      if (segment == 0 && base + i >= work.group.accepted) y_out[work.row(base + i) * width] = y;
      if (base + i + 1 != work.commit) continue;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const int row = 32 * m + 4 * segment;
        if (in[m]) *reinterpret_cast<float4*>(state + row) = make_float4(s[m][0], s[m][1], s[m][2], s[m][3]);
      }
    }
  }
}

struct Workspace {
  int64_t qk, v, decay, beta, floats;
};
Workspace workspace_of(int64_t rows, int64_t max_groups, int64_t window, int64_t k_heads, int64_t v_heads, int64_t dk,
                       int64_t dv) {
  const int64_t slots = rows + max_groups * window;
  Workspace at;
  at.qk = rows * v_heads * dv;
  at.v = at.qk + slots * 2 * k_heads * dk;
  at.decay = at.v + slots * v_heads * dv;
  at.beta = at.decay + slots * v_heads * dk;
  at.floats = at.beta + slots * v_heads;
  return at;
}

}  // namespace

int64_t cuda_kimi_delta_workspace(int64_t rows, int64_t max_groups, const DeltaNetShape& s) {
  return workspace_of(rows, max_groups, s.max_window, s.k_heads, s.v_heads, s.dk, s.dv).floats;
}

void cuda_kimi_delta(cudaStream_t stream, DeltaParams p, float* workspace) {
  kernel_check(p.dk % 4 == 0 && p.dk <= 128 && p.dv % 4 == 0, "delta net: heads that the kernels do not have");
  const Workspace at = workspace_of(p.rows, p.max_groups, p.window, p.k_heads, p.v_heads, p.dk, p.dv);
  p.y = workspace;
  p.qk = workspace + at.qk;
  p.v = workspace + at.v;
  p.decay = workspace + at.decay;
  p.beta = workspace + at.beta;
  constexpr int kSlots = kInputWarps * kInputRun;
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
  const dim3 inputs(static_cast<unsigned>((slots + kSlots - 1) / kSlots),
                    static_cast<unsigned>(2 * p.k_heads + 2 * p.v_heads));
  launch_kernel(kimi_inputs_kernel, inputs, dim3(32 * kInputWarps), 0, stream, "delta net inputs", p);
  p.parts = (p.dv + kColumns - 1) / kColumns;
  const dim3 steps(static_cast<unsigned>(p.v_heads * p.parts), static_cast<unsigned>(p.max_groups));
  const auto kernel = p.dk <= 32 ? kimi_steps_kernel<1> : p.dk <= 64 ? kimi_steps_kernel<2> : kimi_steps_kernel<4>;
  launch_kernel(kernel, steps, dim3(32 * kWarps), 0, stream, "delta net steps", p);
  cuda_delta_outputs(stream, p);
}

}  // namespace tensorfold
