// The gated delta net around its recurrence (delta_net_steps.cu): the state block, and for many rows what the
// recurrence reads (convolved and normalised q and k, gates) and what comes after it (norm, gate, the state's history
// and kept inputs). Few rows take one launch that does all of it.
//
// How the contract is kept: what a row goes through by itself is in delta_net_row.cuh, the same code for both ways; one
// warp a row and head, whatever the number of rows; nothing is shared between rows.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/cuda/delta_net.h"
#include "kernels/cuda/delta_net_row.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kWarpsABlock = 8;
constexpr int kRun = 8;         // rows a warp of the inputs takes
constexpr int kOutputRows = 4;  // rows a warp of the outputs takes
constexpr int kFewRows = 64;    // up to here one launch does all

// Convolution of 4 channels a lane for a warp's rows; store(slot, result) takes each. In the middle of a prompt all
// inputs are rows of the pass one after another, and each is loaded once.
template <typename Store>
__device__ __forceinline__ void convolve_run(const DeltaParams& p, int64_t first, int64_t slots, int v_head,
                                             int in_state, int64_t in_pass, const Store& store) {
  const float* weights = p.conv + in_pass * p.taps;
  RecurrentSlot begin, end;
  const bool plain = p.taps == 4 && first + kRun <= p.rows && find_slot(p, first, &begin) &&
                     find_slot(p, first + kRun - 1, &end) && begin.g == end.g &&
                     first - 3 >= p.groups[begin.g].first_row;
  if (plain) {
    float4 x[kRun + 3], w[4];
    const float* from = p.qkv.data + (first - 3) * p.qkv.stride + in_pass;
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = load_four(weights + 4 * j);
#pragma unroll
    for (int j = 0; j < kRun + 3; ++j) x[j] = load_four(from + j * p.qkv.stride);
#pragma unroll
    for (int j = 0; j < kRun; ++j) store(first + j, delta_convolve4(w, x[j], x[j + 1], x[j + 2], x[j + 3]));
    return;
  }
#pragma unroll 1
  for (int64_t slot = first; slot < min(first + kRun, slots); ++slot) {
    RecurrentSlot at;
    if (!find_slot(p, slot, &at)) continue;
    const DeltaWork work(p, p.groups[at.g], p.states[at.g], v_head);
    const auto from = [&](int t) { return load_four(delta_raw(p, work, at.i + t - (p.taps - 1), in_state, in_pass)); };
    if (p.taps == 4) {
      float4 w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = load_four(weights + 4 * j);
      store(slot, delta_convolve4(w, from(0), from(1), from(2), from(3)));
    } else {
      store(slot, delta_convolve(p.taps, weights, from));
    }
  }
}

// blockIdx.x: rows, 8 a warp. blockIdx.y: q of a key head, k of a key head, last the gates.
__global__ void __launch_bounds__(32 * kWarpsABlock, 2) delta_inputs_kernel(const __grid_constant__ DeltaParams p) {
  pdl_launch();
  pdl_wait();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarpsABlock + warp) * kRun;
  const int unit = static_cast<int>(blockIdx.y);
  if (unit < 2 * p.k_heads) {
    const bool is_q = unit < p.k_heads;
    const int head = is_q ? unit : unit - p.k_heads;
    int owner = -1;  // a value head that has this key head, for its copy of the state's rows
    for (int h = 0; h < p.v_heads && owner < 0; h += 32) {
      const unsigned found = __ballot_sync(0xffffffffu, h + lane < p.v_heads && p.k_head_of[h + lane] == head);
      if (found != 0) owner = h + __ffs(static_cast<int>(found)) - 1;
    }
    if (owner < 0) return;
    const int channel = min(lane * 4, p.dk - 4);
    convolve_run(p, first, slots, owner, (is_q ? 0 : p.dk) + channel, static_cast<int64_t>(unit) * p.dk + channel,
                 [&](int64_t slot, float4 x) {
                   float* to = p.qk + ((slot * p.k_heads + head) * 2 + (is_q ? 0 : 1)) * p.dk;
                   delta_store_head(p.dk, x, is_q ? p.q_scale : 1.0f, lane, to);
                 });
    return;
  }
#pragma unroll 1
  for (int64_t slot = first; slot < min(first + kRun, slots); ++slot) {
    RecurrentSlot at;
    if (!find_slot(p, slot, &at)) continue;
    for (int h = lane; h < p.v_heads; h += 32) {
      const DeltaWork work(p, p.groups[at.g], p.states[at.g], h);
      const DeltaGate gate = delta_gate(p, work, at.i, h);
      *reinterpret_cast<float2*>(p.gates + slot * p.v_heads + h) = make_float2(gate.decay, gate.beta);
    }
  }
}

// blockIdx.x: value head. blockIdx.y: 32 rows, 4 a warp; beyond the rows, a group whose state is brought up to date.
__global__ void __launch_bounds__(32 * kWarpsABlock) delta_outputs_kernel(const __grid_constant__ DeltaParams p) {
  constexpr int kRows = kWarpsABlock * kOutputRows;
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int row_blocks = (p.rows + kRows - 1) / kRows;
  const int y = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x);
  pdl_launch();
  pdl_wait();
  if (y >= row_blocks) {
    const int g = y - row_blocks;
    if (g >= *p.group_count) return;
    const DeltaWork work(p, p.groups[g], p.states[g], head);
    if (work.count <= 0) return;
    delta_keep(p, work, p.k_head_of[head], head, {0, 1}, static_cast<int>(threadIdx.x), 32 * kWarpsABlock,
               [] { __syncthreads(); });
    return;
  }
  const int first = y * kRows + warp * kOutputRows;
  float4 value[kOutputRows][2], z[kOutputRows][2];
  int group[kOutputRows];
#pragma unroll
  for (int j = 0; j < kOutputRows; ++j) {
    const int64_t row = min(first + j, p.rows - 1);
    group[j] = p.group_of[row];
    delta_load_row(p.z.data + row * p.z.stride + static_cast<int64_t>(head) * p.dv, p.dv, lane, z[j]);
    delta_load_row(p.y + (row * p.v_heads + head) * p.dv, p.dv, lane, value[j]);
  }
#pragma unroll
  for (int j = 0; j < kOutputRows; ++j) {
    const int row = first + j;
    if (row >= p.rows) return;
    if (group[j] >= 0) {
      delta_output(p, row, head, lane, value[j], z[j]);
    } else {
      delta_no_output(p, row, head, lane, 32);
    }
  }
}

DeltaStateLayout state_layout(const DeltaNetShape& s) {
  return delta_state_layout(s.dk, s.dv, s.conv_kernel, s.max_window, s.channel_decay ? s.dk : 1);
}

struct Workspace {
  int64_t qk = 0, gates = 0, floats = 0;
};
Workspace workspace_layout(const DeviceRows& rows, const DeltaNetShape& s) {
  Workspace at;
  if (rows.rows <= kFewRows) return at;
  at.qk = rows.rows * s.v_heads * s.dv;
  const int64_t slots = rows.rows + rows.max_groups * s.max_window;
  at.gates = at.qk + slots * 2 * s.k_heads * s.dk;
  at.floats = at.gates + round_to_four(slots * s.v_heads * 2);
  return at;
}

void launch_inputs(cudaStream_t stream, const DeltaParams& p) {
  constexpr int kRows = kWarpsABlock * kRun;
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
  const dim3 grid(static_cast<unsigned>((slots + kRows - 1) / kRows), static_cast<unsigned>(2 * p.k_heads + 1));
  launch_kernel(delta_inputs_kernel, grid, dim3(32 * kWarpsABlock), 0, stream, "delta net inputs", p);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

std::string delta_net_shape_error(const DeltaNetShape& s) {
  if (s.channel_decay && (s.dk < 8 || s.dk > 128 || s.dk % 8 != 0)) {
    return "delta net with decays of channels: key heads of " + std::to_string(s.dk) +
           " dims; the CUDA kernels want a multiple of 8 up to 128";
  }
  if (!s.channel_decay && s.dk != 32 && s.dk != 64 && s.dk != 128) {
    return "gated delta net: key heads of " + std::to_string(s.dk) + " dims; the CUDA kernels have 32, 64 and 128";
  }
  if (s.dv < 8 || s.dv > 256 || s.dv % 8 != 0) {
    return "gated delta net: value heads of " + std::to_string(s.dv) +
           " dims; the CUDA kernels want a multiple of 8 up to 256";
  }
  if (s.conv_kernel < 1 || s.conv_kernel > kMostRecurrentTaps) {
    return "gated delta net: convolution of " + std::to_string(s.conv_kernel) + " taps; the CUDA kernels have 1 to 16";
  }
  if (s.k_heads < 1 || s.v_heads < 1 || s.max_window < 1 || s.max_window > 1024 ||
      static_cast<int64_t>(s.k_head_of.size()) != s.v_heads) {
    return "gated delta net: heads or window of no size";
  }
  return {};
}

void cuda_delta_outputs(cudaStream_t stream, const DeltaParams& p) {
  constexpr int kRows = kWarpsABlock * kOutputRows;
  const int row_blocks = (p.rows + kRows - 1) / kRows;
  const dim3 grid(static_cast<unsigned>(p.v_heads), static_cast<unsigned>(row_blocks + p.max_groups));
  launch_kernel(delta_outputs_kernel, grid, dim3(32 * kWarpsABlock), 0, stream, "delta net outputs", p);
}

std::unique_ptr<CudaRecurrentState> CudaRecurrentState::create(const DeltaNetShape& shape, cudaStream_t stream,
                                                               std::string* error) {
  const std::string wrong = delta_net_shape_error(shape);
  if (!wrong.empty()) return make_device_state(0, {}, stream, wrong, error);
  return make_device_state(4 * shape.v_heads * state_layout(shape).head, {}, stream, wrong, error);
}

int64_t cuda_delta_net_workspace(const DeviceRows& rows, const DeltaNetShape& shape) {
  if (shape.channel_decay) return cuda_kimi_delta_workspace(rows.rows, rows.max_groups, shape);
  return workspace_layout(rows, shape).floats;
}

void cuda_delta_net(cudaStream_t stream, const DeviceRows& rows, const CudaDeltaNetArgs& args) {
  const DeltaNetShape& s = *args.shape;
  if (rows.rows <= 0 || rows.max_groups <= 0) return;
  kernel_check(delta_net_shape_error(s).empty(), "delta net: a shape that the kernels do not have");
  kernel_check(args.qkv.cols == s.channels() && args.z.cols == s.v_heads * s.dv && args.out.cols == args.z.cols &&
                   args.b.cols == s.v_heads && args.a.cols == s.decays(),
               "delta net: shapes differ");
  kernel_check(args.qkv.stride % 4 == 0 && args.z.stride % 4 == 0 && args.out.stride % 8 == 0 &&
                   aligned(args.qkv.data) && aligned(args.z.data) && aligned(args.out.data) &&
                   aligned(args.workspace) && aligned(args.norm) && aligned(args.conv),
               "delta net: rows that are not aligned to 16 bytes");
  DeltaParams p;
  p.group_count = rows.group_count;
  p.groups = rows.groups;
  p.group_of = rows.group_of;
  p.states = rows.states + args.layer * rows.max_groups;
  p.rows = rows.rows;
  p.max_groups = rows.max_groups;
  p.window = static_cast<int32_t>(s.max_window);
  p.taps = static_cast<int32_t>(s.conv_kernel);
  p.k_heads = static_cast<int32_t>(s.k_heads);
  p.v_heads = static_cast<int32_t>(s.v_heads);
  p.dk = static_cast<int32_t>(s.dk);
  p.dv = static_cast<int32_t>(s.dv);
  p.eps = args.eps;
  p.q_scale = 1.0f / std::sqrt(static_cast<float>(s.dk));
  p.qkv = args.qkv;
  p.z = args.z;
  p.b = args.b;
  p.a = args.a;
  p.out = args.out;
  p.conv = args.conv;
  p.a_log = args.a_log;
  p.dt_bias = args.dt_bias;
  p.norm = args.norm;
  p.k_head_of = args.k_head_of;
  p.state = state_layout(s);
  p.decays = s.channel_decay ? p.dk : 1;
  p.decay_floor = args.decay_floor;
  p.sigmoid_gate = s.channel_decay || args.sigmoid_gate;
  if (s.channel_decay) return cuda_kimi_delta(stream, p, args.workspace);
  const Workspace at = workspace_layout(rows, s);
  if (rows.rows <= kFewRows) return cuda_delta_few(stream, p);
  p.y = args.workspace;
  p.qk = args.workspace + at.qk;
  p.gates = reinterpret_cast<DeltaGate*>(args.workspace + at.gates);
  launch_inputs(stream, p);
  cuda_delta_steps(stream, p);
  cuda_delta_outputs(stream, p);
}

}  // namespace tensorfold
