// All of the gated delta net for few rows in one launch: the rows' own work (delta_net_row.cuh) for a chunk of steps,
// the steps (delta_net_columns.cuh), and what comes after them. In one of two forms:
//
// * A block a head, for many groups and where there are no clusters: all warps step, and end each chunk with its norms.
// * A cluster of blocks a head, 64 columns each: 8 of 12 warps step. In the last chunk the others bring the state's
//   history and kept rows up to date meanwhile. y goes to the block that does the row's norm: block r % blocks for row
//   r.
//
// A warp that steps holds 8 columns (16 where a value head has more than 128), so that k and q pass from shared memory
// once for all of them: with 4, those loads were what a step took.
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/delta_net_columns.cuh"
#include "kernels/cuda/delta_net_row.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kAloneWarps = 16;    // that step
constexpr int kTogetherWarps = 8;  // that step, where blocks of a cluster share a head
constexpr int kTogetherColumns = 8 * kTogetherWarps;
constexpr int kMostRows = 64;

/// Units: of 4 columns a warp that steps. kStepWarps: kAloneWarps, or kTogetherWarps in a cluster.
template <int DK, int Units, int kStepWarps>
struct alignas(16) FewShared {
  static constexpr bool kTogether = kStepWarps < kAloneWarps;
  // In a cluster few enough for the registers that a step wants.
  static constexpr int kWarps = kTogether ? kTogetherWarps + 4 : kAloneWarps, kThreads = 32 * kWarps;
  // Warps of the rows' own work: heads of q, then of k, values, and the last one the gates.
  static constexpr int kValueWarps = 3, kHeadWarps = (kWarps - kValueWarps - 1) / 2;
  static constexpr int kWidth = 4 * Units * kStepWarps;
  static constexpr int kChunk = kWidth > 128 ? 8 : 16;  // steps
  // y: of a chunk, or of the rows whose norms are this block's: with 2, 3 or 4 blocks.
  static constexpr int kY = kTogether ? (kMostRows + 2) / 3 * 3 * kTogetherColumns : kChunk * kWidth;
  float qk[kChunk][2 * DK];
  float values[kChunk][kWidth];
  float y[kY];
  float4 weights[2 * DK + kWidth];  // of 4 taps
  DeltaGate gates[kChunk];
  uint64_t inbox;
};

/// Inputs of the convolution of a warp's channels, at steps from `first` on.
struct RawInputs {
  const float* kept;   // where they are if the step is a replayed row's, or before all
  const float* fresh;  // if it is a row of the pass
  int64_t kept_stride, fresh_stride;
  int first, accepted;

  __device__ __forceinline__ RawInputs(const DeltaParams& p, const DeltaWork& work, int first_step, int in_state,
                                       int64_t in_pass)
      : kept(work.head + p.state.rows + static_cast<int64_t>(first_step + p.taps - 1) * p.state.row_floats + in_state),
        fresh(p.qkv.data + work.row(first_step) * p.qkv.stride + in_pass),
        kept_stride(p.state.row_floats),
        fresh_stride(p.qkv.stride),
        first(first_step),
        accepted(work.group.accepted) {}
  __device__ __forceinline__ float4 load(int j) const {
    return load_four(first + j < accepted ? kept + j * kept_stride : fresh + j * fresh_stride);
  }
};

// The rows' own work of a block, a chunk at a time.
template <int DK, typename Shared>
struct FewInputs {
  const DeltaParams& p;
  const DeltaWork& work;
  Shared& shared;
  int k_head, v_head, column0, live, warp, lane;

  __device__ __forceinline__ void run(int base, int steps) const {
    if (warp == Shared::kWarps - 1) {
      if (lane < steps) shared.gates[lane] = delta_gate(p, work, base + lane, v_head);
    } else if (warp >= 2 * Shared::kHeadWarps) {
      values(base, steps);
    } else {
      heads(base, steps, warp / Shared::kHeadWarps, warp % Shared::kHeadWarps);
    }
  }

 private:
  // q (kind 0) or k (1) of some steps one after the other. Lanes beyond the head read its last channels.
  __device__ __forceinline__ void heads(int base, int steps, int kind, int index) const {
    constexpr int kHeadWarps = Shared::kHeadWarps, kRun = (Shared::kChunk + kHeadWarps - 1) / kHeadWarps;
    const int channel = kind * DK + min(lane * 4, DK - 4);
    const int64_t in_pass = delta_channel(p, k_head, v_head, channel);
    const int run = (steps + kHeadWarps - 1) / kHeadWarps, first = index * run, end = min(first + run, steps);
    if (first >= end) return;
    const RawInputs raw(p, work, base + first - (p.taps - 1), channel, in_pass);
    const auto store = [&](int s, float4 x) {
      delta_store_head(DK, x, kind == 0 ? p.q_scale : 1.0f, lane, &shared.qk[s][kind * DK]);
    };
    if (p.taps != 4) {
#pragma unroll 1
      for (int s = first; s < end; ++s) {
        store(s, delta_convolve(p.taps, p.conv + in_pass * p.taps, [&](int t) { return raw.load(s - first + t); }));
      }
      return;
    }
    float4 x[kRun + 3];
#pragma unroll
    for (int j = 0; j < kRun + 3; ++j) {
      if (first + j < end + 3) x[j] = raw.load(j);
    }
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      if (first + j < end) {
        store(first + j, delta_convolve4(shared.weights + channel, x[j], x[j + 1], x[j + 2], x[j + 3]));
      }
    }
  }

  // v of all steps, 4 channels of a step a lane.
  __device__ __forceinline__ void values(int base, int steps) const {
    const int pieces = live / 4, items = steps * pieces;
#pragma unroll 2
    for (int item = (warp - 2 * Shared::kHeadWarps) * 32 + lane; item < items; item += Shared::kValueWarps * 32) {
      const int s = item / pieces, column = (item - s * pieces) * 4;
      const int64_t in_pass = delta_channel(p, k_head, v_head, 2 * DK + column0 + column);
      const RawInputs raw(p, work, base + s - (p.taps - 1), 2 * DK + column0 + column, in_pass);
      const float4 x =
          p.taps == 4
              ? delta_convolve4(shared.weights + 2 * DK + column, raw.load(0), raw.load(1), raw.load(2), raw.load(3))
              : delta_convolve(p.taps, p.conv + in_pass * p.taps, [&](int t) { return raw.load(t); });
      *reinterpret_cast<float4*>(&shared.values[s][column]) = x;
    }
  }
};

/// Norm and gate of step i, whose y lies in shared memory; z: of that row.
__device__ __forceinline__ void few_output(const DeltaParams& p, const DeltaWork& work, int v_head, int i, int lane,
                                           const float* y_from, const float4 (&z)[2]) {
  float4 y[2];
  delta_load_row(y_from, p.dv, lane, y);
  delta_output(p, work.row(i), v_head, lane, y, z);
}
__device__ __forceinline__ void few_gate(const DeltaParams& p, const DeltaWork& work, int v_head, int i, int lane,
                                         float4 (&z)[2]) {
  delta_load_row(p.z.data + work.row(i) * p.z.stride + static_cast<int64_t>(v_head) * p.dv, p.dv, lane, z);
}

// blockIdx.x: value head, or value head and part of its columns, parts of a head in a cluster. blockIdx.y: group.
template <int DK, int Units, int kStepWarps>
__global__ void __launch_bounds__(FewShared<DK, Units, kStepWarps>::kThreads, 1)
    delta_few_kernel(const __grid_constant__ DeltaParams p) {
  using Shared = FewShared<DK, Units, kStepWarps>;
  constexpr bool kTogether = Shared::kTogether;
  constexpr int kWarps = Shared::kWarps, kThreads = Shared::kThreads;
  __shared__ Shared shared;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = uniform_warp();
  const int parts = kTogether ? p.parts : 1;
  const int v_head = static_cast<int>(blockIdx.x) / parts, part = static_cast<int>(blockIdx.x) % parts;
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
  // S too is what an earlier pass left.
  const DeviceGroup group = p.groups[g];
  float* const states = p.states[g];
  const bool any = g < *p.group_count && group.accepted + group.rows > 0;
  const DeltaWork work(p, group, states, v_head);
  Columns<DK, Units> columns;
  const int column = warp * Units * kColumnsAWarp;  // of the block
  const int units = warp < kStepWarps ? max(0, min(Units, (live - column) / kColumnsAWarp)) : 0;
  float* state = work.head + (column0 + column) * DK;
  if (any) columns.load(state, lane, units);
  pdl_wait();
  if (g == 0 && part == 0 && thread < p.rows && p.group_of[thread] < 0) delta_no_output(p, thread, v_head, 0, 1);
  if (!any) return;

  const int norms = (work.group.rows - part + parts - 1) / parts;  // rows part, part + parts, … are this block's
  if (kTogether && thread == 0) inbox_open(&shared.inbox, static_cast<uint32_t>(norms * p.dv * 4));
  __syncthreads();  // weights
  const FewInputs<DK, Shared> inputs{p, work, shared, k_head, v_head, column0, live, warp, lane};
  const int own = column + lane_column(lane);
  int owner = 0, place = 0;  // of the next row's y: block, and row there
  float y[Units];
#pragma unroll
  for (int u = 0; u < Units; ++u) y[u] = 0.0f;
  const auto keep_y = [&](int base, int s, const float(&sums)[Units]) {
    if (base + s < work.group.accepted) return;
    if (lane_segment(lane) == 0) {
#pragma unroll
      for (int u = 0; u < Units; ++u) {
        if (u >= units) continue;
        if constexpr (kTogether) {
          inbox_send(&shared.inbox, &shared.y[place * p.dv + column0 + own + u * kColumnsAWarp], owner, sums[u]);
        } else {
          shared.y[s * Shared::kWidth + own + u * kColumnsAWarp] = sums[u];
        }
      }
    }
    if (kTogether && ++owner == parts) owner = 0, ++place;
  };
#pragma unroll 1
  for (int base = 0; base < work.count; base += Shared::kChunk) {
    const int steps = min(Shared::kChunk, work.count - base);
    const bool last = base + steps == work.count;
    inputs.run(base, steps);
    __syncthreads();
    if constexpr (kTogether) {  // all blocks run, and have read what the state keeps for these steps
      cluster_arrive_unfenced();
      cluster_wait();
    }
    if (kTogether && last && warp >= kStepWarps) {
      constexpr int kOthers = kThreads - 32 * kStepWarps;
      const auto meet = [] { asm volatile("barrier.cta.sync 1, %0;" ::"n"(kOthers) : "memory"); };
      delta_keep(p, work, k_head, v_head, {part, parts}, thread - 32 * kStepWarps, kOthers, meet);
    }
    if (units > 0) {
      float before[Units];
#pragma unroll 1
      for (int s = 0; s < steps; ++s) {
        columns.step_after(shared.qk[s], &shared.qk[s][DK], &shared.values[s][own], shared.gates[s], lane, y, before);
        if (s > 0) keep_y(base, s - 1, before);
        if (base + s + 1 == work.commit) columns.store(state, lane, units);
      }
#pragma unroll
      for (int u = 0; u < Units; ++u) y[u] = sum_over_segments(y[u]);
      keep_y(base, steps - 1, y);
    }
    if constexpr (!kTogether) {
      __syncthreads();
#pragma unroll 1
      for (int s = warp; s < steps; s += kWarps) {
        if (base + s < work.group.accepted) continue;
        float4 z[2];
        few_gate(p, work, v_head, base + s, lane, z);
        few_output(p, work, v_head, base + s, lane, shared.y + s * Shared::kWidth, z);
      }
    } else if (!last) {
      __syncthreads();  // the chunk's q, k, v and gates make place
    }
  }
  if constexpr (kTogether) {
    if (warp >= norms) return;
    float4 z[2];  // the first row's on its way while others step
    few_gate(p, work, v_head, work.group.accepted + part + warp * parts, lane, z);
    inbox_wait(&shared.inbox);
#pragma unroll 1
    for (int at = warp; at < norms; at += kWarps) {
      const int i = work.group.accepted + part + at * parts;
      if (at != warp) few_gate(p, work, v_head, i, lane, z);
      few_output(p, work, v_head, i, lane, shared.y + at * p.dv, z);
    }
  } else {
    // From the other end: the first warps are busy with outputs.
    delta_keep(p, work, k_head, v_head, {0, 1}, kThreads - 1 - thread, kThreads, [] { __syncthreads(); });
  }
}

template <int DK, int Units, int kStepWarps>
void launch(cudaStream_t stream, const DeltaParams& p) {
  const dim3 grid(static_cast<unsigned>(p.v_heads * p.parts), static_cast<unsigned>(p.max_groups));
  launch_cluster_kernel(p.parts > 1 ? static_cast<unsigned>(p.parts) : 0, delta_few_kernel<DK, Units, kStepWarps>, grid,
                        dim3(FewShared<DK, Units, kStepWarps>::kThreads), 0, stream, "delta net, few rows", p);
}

template <int DK>
void launch_few(cudaStream_t stream, const DeltaParams& p) {
  if (p.parts > 1) return launch<DK, 2, kTogetherWarps>(stream, p);
  if (p.dv <= 64) return launch<DK, 1, kAloneWarps>(stream, p);
  if (p.dv <= 128) return launch<DK, 2, kAloneWarps>(stream, p);
  launch<DK, 4, kAloneWarps>(stream, p);
}

}  // namespace

void cuda_delta_few(cudaStream_t stream, DeltaParams p) {
  kernel_check(p.rows <= kMostRows, "delta net: more rows than the kernel for few keeps");
  // Several blocks a head while that keeps the device's blocks about as many as its multiprocessors.
  constexpr int kMostBlocks = 256;
  const int parts = (p.dv + kTogetherColumns - 1) / kTogetherColumns;
  p.parts = pdl_supported() && p.v_heads * parts * p.max_groups <= kMostBlocks ? parts : 1;
  if (p.dk == 128) return launch_few<128>(stream, p);
  if (p.dk == 64) return launch_few<64>(stream, p);
  kernel_check(p.dk == 32, "delta net: key heads must have 32, 64 or 128 dims");
  launch_few<32>(stream, p);
}

}  // namespace tensorfold
