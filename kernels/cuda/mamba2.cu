// Mamba2 around its recurrence (mamba2_steps.cu): the state block, and for many rows what the recurrence reads
// (convolved x, B and C, time steps) and what comes after it (gate, norm, the state's history and kept inputs). Few
// rows take one launch that does all of it.
//
// How the contract is kept: what a row goes through by itself is in mamba2_row.cuh, the same code for both ways; a
// thread computes a channel of a row, a warp norms a row and group of heads, whatever the number of rows; nothing is
// shared between rows.
#include <utility>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mamba2.h"
#include "kernels/cuda/mamba2_row.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kWarpsABlock = 8;
constexpr int kRun = 8;         // rows a warp of the inputs takes
constexpr int kOutputRows = 2;  // rows a warp of the outputs takes
constexpr int kFewRows = 64;    // up to here one launch does all

// Convolution of a thread's 4 channels for the slots of its run. In the middle of a prompt all inputs are rows of the
// pass one after another, and each is loaded once.
__device__ __forceinline__ void convolve_run(const Mamba2Params& p, int64_t first, int64_t slots, int in_pass) {
  Mamba2Taps taps;
  taps.load(p, in_pass);
  const auto store = [&](int64_t slot, float4 x) {
    *reinterpret_cast<float4*>(p.mixed + slot * p.channels + in_pass) = x;
  };
  RecurrentSlot begin, end;
  const bool plain = p.taps == 4 && first + kRun <= p.rows && find_slot(p, first, &begin) &&
                     find_slot(p, first + kRun - 1, &end) && begin.g == end.g &&
                     first - 3 >= p.groups[begin.g].first_row;
  if (plain) {
    float4 x[kRun + 3];
    const float* from = p.xbc.data + (first - 3) * p.xbc.stride + in_pass;
#pragma unroll
    for (int j = 0; j < kRun + 3; ++j) x[j] = load_four(from + j * p.xbc.stride);
#pragma unroll
    for (int j = 0; j < kRun; ++j) store(first + j, taps.convolve4(x[j], x[j + 1], x[j + 2], x[j + 3]));
    return;
  }
  const Mamba2Place place = mamba2_place(p, in_pass);
#pragma unroll 1
  for (int64_t slot = first; slot < min(first + kRun, slots); ++slot) {
    RecurrentSlot at;
    if (!find_slot(p, slot, &at)) continue;
    const Mamba2Work work(p, p.groups[at.g], p.states[at.g], place.head_group);
    store(slot, taps.convolve(p, in_pass, [&](int t) {
      return load_four(mamba2_raw(p, work, at.i + t - (p.taps - 1), place.channel, in_pass));
    }));
  }
}

// blockIdx.x: slots, 8 a warp. blockIdx.y: 128 channels; last the time steps.
__global__ void __launch_bounds__(32 * kWarpsABlock, 2) mamba2_inputs_kernel(const __grid_constant__ Mamba2Params p) {
  pdl_launch();
  pdl_wait();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarpsABlock + warp) * kRun;
  if (blockIdx.y + 1 < gridDim.y) {
    const int in_pass = static_cast<int>(blockIdx.y) * 128 + lane * 4;
    if (in_pass < p.channels && first < slots) convolve_run(p, first, slots, in_pass);
    return;
  }
#pragma unroll 1
  for (int64_t slot = first; slot < min(first + kRun, slots); ++slot) {
    RecurrentSlot at;
    if (!find_slot(p, slot, &at)) continue;
    for (int h = lane; h < p.heads; h += 32) {
      const Mamba2Work work(p, p.groups[at.g], p.states[at.g], h / p.together);
      const Mamba2Gate gate = mamba2_gate(p, work, at.i, h);
      *reinterpret_cast<float2*>(p.gates + slot * p.heads + h) = make_float2(gate.step, gate.decay);
    }
  }
}

// blockIdx.x: group of heads. blockIdx.y: 16 rows, 2 a warp; beyond the rows, a group of rows whose state is brought up
// to date.
__global__ void __launch_bounds__(32 * kWarpsABlock) mamba2_outputs_kernel(const __grid_constant__ Mamba2Params p) {
  constexpr int kRows = kWarpsABlock * kOutputRows;
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int row_blocks = (p.rows + kRows - 1) / kRows;
  const int y = static_cast<int>(blockIdx.y), head_group = static_cast<int>(blockIdx.x);
  pdl_launch();
  pdl_wait();
  if (y >= row_blocks) {
    const int g = y - row_blocks;
    if (g >= *p.group_count) return;
    const Mamba2Work work(p, p.groups[g], p.states[g], head_group);
    if (work.count <= 0) return;
    mamba2_keep(p, work, head_group, static_cast<int>(threadIdx.x), 32 * kWarpsABlock);
    return;
  }
#pragma unroll 1
  for (int j = 0; j < kOutputRows; ++j) {
    const int row = y * kRows + warp * kOutputRows + j;
    if (row >= p.rows) return;
    if (p.group_of[row] >= 0) {
      mamba2_output(p, row, head_group, lane);
    } else {
      mamba2_no_output(p, row, head_group * p.wide, p.wide, lane, 32);
    }
  }
}

Mamba2StateLayout state_layout(const Mamba2Shape& s) {
  return mamba2_state_layout(s.heads / s.groups, s.head_dim, s.state, s.conv_kernel, s.max_window);
}

// Few rows: y. Many: mixed, then gates.
struct Workspace {
  int64_t gates = 0, floats = 0;
};
Workspace workspace_layout(const DeviceRows& rows, const Mamba2Shape& s) {
  Workspace at;
  if (rows.rows <= kFewRows) {
    at.floats = rows.rows * s.width();
    return at;
  }
  const int64_t slots = rows.rows + rows.max_groups * s.max_window;
  at.gates = slots * s.channels();
  at.floats = at.gates + round_to_four(slots * s.heads * 2);
  return at;
}

void launch_inputs(cudaStream_t stream, const Mamba2Params& p) {
  constexpr int kRows = kWarpsABlock * kRun;
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
  const dim3 grid(static_cast<unsigned>((slots + kRows - 1) / kRows),
                  static_cast<unsigned>((p.channels + 127) / 128 + 1));
  launch_kernel(mamba2_inputs_kernel, grid, dim3(32 * kWarpsABlock), 0, stream, "Mamba2 inputs", p);
}

void launch_outputs(cudaStream_t stream, const Mamba2Params& p) {
  constexpr int kRows = kWarpsABlock * kOutputRows;
  const int row_blocks = (p.rows + kRows - 1) / kRows;
  const dim3 grid(static_cast<unsigned>(p.head_groups), static_cast<unsigned>(row_blocks + p.max_groups));
  launch_kernel(mamba2_outputs_kernel, grid, dim3(32 * kWarpsABlock), 0, stream, "Mamba2 outputs", p);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void check_args(const CudaMamba2Args& args) {
  const Mamba2Shape& s = *args.shape;
  kernel_check(mamba2_shape_error(s).empty(), "Mamba2: a shape that the kernels do not have");
  kernel_check(args.xbc.cols == s.channels() && args.z.cols == s.width() && args.out.cols == s.width() &&
                   args.dt.cols == s.heads,
               "Mamba2: shapes differ");
  kernel_check(args.xbc.stride % 4 == 0 && args.z.stride % 4 == 0 && args.out.stride % 8 == 0 &&
                   aligned(args.xbc.data) && aligned(args.z.data) && aligned(args.out.data) &&
                   aligned(args.workspace) && aligned(args.norm) && aligned(args.conv) && aligned(args.conv_bias),
               "Mamba2: rows that are not aligned to 16 bytes");
}

}  // namespace

std::string mamba2_shape_error(const Mamba2Shape& s) {
  if (s.state != 32 && s.state != 64 && s.state != 128 && s.state != 256) {
    return "Mamba2: states of " + std::to_string(s.state) + "; the CUDA kernels have 32, 64, 128 and 256";
  }
  if (s.head_dim < 8 || s.head_dim > 1024 || s.head_dim % 8 != 0) {
    return "Mamba2: heads of " + std::to_string(s.head_dim) + " dims; the CUDA kernels want a multiple of 8 up to 1024";
  }
  if (s.conv_kernel < 1 || s.conv_kernel > kMostRecurrentTaps) {
    return "Mamba2: convolution of " + std::to_string(s.conv_kernel) + " taps; the CUDA kernels have 1 to 16";
  }
  if (s.groups < 1 || s.heads < 1 || s.heads > 4096 || s.heads % s.groups != 0 || s.max_window < 1 ||
      s.max_window > 1024) {
    return "Mamba2: heads, groups or window that are none";
  }
  return {};
}

std::unique_ptr<CudaRecurrentState> CudaRecurrentState::create(const Mamba2Shape& shape, cudaStream_t stream,
                                                               std::string* error) {
  const std::string wrong = mamba2_shape_error(shape);
  if (!wrong.empty()) return make_device_state(0, {}, stream, wrong, error);
  const Mamba2StateLayout at = state_layout(shape);
  std::vector<int64_t> counters;
  for (int64_t g = 0; g < shape.groups; ++g) counters.push_back(4 * (g * at.group + at.arrivals));
  return make_device_state(4 * shape.groups * at.group, std::move(counters), stream, wrong, error);
}

int64_t cuda_mamba2_workspace(const DeviceRows& rows, const Mamba2Shape& shape) {
  return workspace_layout(rows, shape).floats;
}

void cuda_mamba2(cudaStream_t stream, const DeviceRows& rows, const CudaMamba2Args& args) {
  if (rows.rows <= 0 || rows.max_groups <= 0) return;
  check_args(args);
  const Mamba2Shape& s = *args.shape;
  Mamba2Params p;
  p.group_count = rows.group_count;
  p.groups = rows.groups;
  p.group_of = rows.group_of;
  p.states = rows.states + args.layer * rows.max_groups;
  p.rows = rows.rows;
  p.max_groups = rows.max_groups;
  p.window = static_cast<int32_t>(s.max_window);
  p.taps = static_cast<int32_t>(s.conv_kernel);
  p.heads = static_cast<int32_t>(s.heads);
  p.head_groups = static_cast<int32_t>(s.groups);
  p.together = p.heads / p.head_groups;
  p.head_dim = static_cast<int32_t>(s.head_dim);
  p.state = static_cast<int32_t>(s.state);
  p.width = static_cast<int32_t>(s.width());
  p.wide = p.together * p.head_dim;
  p.channels = static_cast<int32_t>(s.channels());
  p.eps = args.eps;
  p.least_step = args.least_step;
  p.most_step = args.most_step;
  p.z = args.z;
  p.xbc = args.xbc;
  p.dt = args.dt;
  p.out = args.out;
  p.conv = args.conv;
  p.conv_bias = args.conv_bias;
  p.a_log = args.a_log;
  p.dt_bias = args.dt_bias;
  p.d = args.d;
  p.norm = args.norm;
  p.at = state_layout(s);
  p.y = args.workspace;
  p.y_stride = p.width;
  if (rows.rows <= kFewRows) return cuda_mamba2_few(stream, p);
  p.mixed = args.workspace;
  p.y_stride = p.channels;
  p.gates = reinterpret_cast<Mamba2Gate*>(args.workspace + workspace_layout(rows, s).gates);
  launch_inputs(stream, p);
  cuda_mamba2_steps(stream, p);
  launch_outputs(stream, p);
}

}  // namespace tensorfold
