// The gated delta net around its recurrence (delta_net_steps.cu): the state block, what the recurrence reads (convolved
// and normalised q and k, gates), and what comes after it (norm, gate, the state's history and kept inputs).
//
// How the contract is kept. Convolution: one chain of fused multiply-adds over the taps, oldest first. Sum of squares
// of a head: each lane's dk / 32 (or dv / 32) values in a chain, lanes by a butterfly over 16, 8, 4, 2, 1; one warp a
// row and head, whatever the number of rows. Nothing is shared between rows.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/delta_net.h"
#include "kernels/cuda/delta_net_params.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kWarpsABlock = 8;
constexpr int kPollRows = 64;  // from this many rows on the last kernel overlaps the recurrence

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

// Group and step of a slot; false for padding and for replay slots that are not in use.
__device__ __forceinline__ bool delta_step_of(const DeltaParams& p, int64_t slot, int* g, int* i) {
  if (slot < p.rows) {
    *g = p.group_of[slot];
    if (*g < 0) return false;
    const DeviceGroup& group = p.groups[*g];
    *i = group.accepted + static_cast<int>(slot) - group.first_row;
    return true;
  }
  const int replay = static_cast<int>(slot - p.rows);
  *g = replay / p.window;
  if (*g >= *p.group_count) return false;
  *i = replay % p.window;
  return *i < p.groups[*g].accepted;
}

// Decay and write strength of every value head at one step: a warp.
__device__ __forceinline__ void delta_gates(const DeltaParams& p, int64_t slot, int g, int i, int lane) {
  const DeviceGroup group = p.groups[g];
  const float* state = p.states[g];
  const int64_t row = static_cast<int64_t>(group.first_row) + i - group.accepted;
  const bool kept = i < group.accepted;
  const float* b = kept ? state + p.state.kept_b + static_cast<int64_t>(i) * p.v_heads : p.b.data + row * p.b.stride;
  const float* a = kept ? state + p.state.kept_a + static_cast<int64_t>(i) * p.v_heads : p.a.data + row * p.a.stride;
  for (int h = lane; h < p.v_heads; h += 32) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float rate = __fmul_rn(expf(p.a_log[h]), softplus(__fadd_rn(a[h], p.dt_bias[h])));
    const float octaves = __fmul_rn(rate, kLog2E);
    DeltaGate gate;
    // A decay that is not a number must reach the state; the clock cannot carry it.
    gate.beta = octaves == octaves ? sigmoid(b[h]) : octaves;
    // 2^-1024 is 0 beside anything in fp32.
    const float bounded = fminf(fmaxf(octaves, 0.0f), 1024.0f);
    gate.octaves = __float2ull_rn(bounded * static_cast<float>(1ull << kDeltaClockBits));
    *reinterpret_cast<ulonglong2*>(p.gates + slot * p.v_heads + h) =
        make_ulonglong2(gate.octaves, static_cast<unsigned long long>(__float_as_uint(gate.beta)));
  }
}

// A lane's neighbouring channels, loaded and stored at once.
template <int Values>
struct alignas(4 * Values) Pack {
  float x[Values];
};

// q or k of one step and head, a warp: convolution, silu, normalisation. `weight`: the lane's channels' taps.
// Taps: their number, or 0 for any; the same chain for both.
template <int Values, int Taps, typename Weight>
__device__ __forceinline__ void delta_head(const DeltaParams& p, int64_t slot, int g, int i, int head, int64_t channel,
                                           const Weight& weight) {
  const DeviceGroup group = p.groups[g];
  const float* state = p.states[g];
  const int taps = Taps > 0 ? Taps : p.taps;
  Pack<Values> sum;
#pragma unroll
  for (int t = 0; t < taps; ++t) {
    const float* from = delta_raw_row(p, group, state, i - (taps - 1) + t) + channel;
    const Pack<Values> x = *reinterpret_cast<const Pack<Values>*>(from);
#pragma unroll
    for (int v = 0; v < Values; ++v) {
      const float w = weight(v, t);
      sum.x[v] = t == 0 ? __fmul_rn(w, x.x[v]) : __fmaf_rn(w, x.x[v], sum.x[v]);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < Values; ++v) {
    sum.x[v] = silu(sum.x[v]);
    squares = __fmaf_rn(sum.x[v], sum.x[v], squares);
  }
  float scale = rsqrtf(__fadd_rn(warp_sum(squares), 1e-6f));
  if (head < p.k_heads) scale = __fmul_rn(scale, p.q_scale);
#pragma unroll
  for (int v = 0; v < Values; ++v) sum.x[v] = __fmul_rn(sum.x[v], scale);
  float* to = p.qk + slot * (2 * static_cast<int64_t>(p.k_heads) * p.dk) + channel;
  *reinterpret_cast<Pack<Values>*>(to) = sum;
}

// blockIdx.x: 8 slots a warp's worth of rows, neighbours, so that their windows meet in the first-level cache.
// blockIdx.y: a head of q or k, or, last, the gates. With many rows a warp takes several, to load its weights once.
template <int Values>
__global__ void __launch_bounds__(32 * kWarpsABlock) delta_inputs_kernel(const __grid_constant__ DeltaParams p) {
  pdl_launch();
  pdl_wait();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y);
  const bool gates = head == 2 * p.k_heads;
  if (gates) {
    const int64_t counters = static_cast<int64_t>(p.max_groups) * p.split.blocks;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < counters; i += step) {
      p.progress[i] = 0;
    }
  }
  const int64_t channel = static_cast<int64_t>(head) * p.dk + lane * Values;
  const float* weight = p.conv + channel * p.taps;
  Pack<4> taps[Values];
  if (!gates && p.taps == 4) {
#pragma unroll
    for (int v = 0; v < Values; ++v) taps[v] = *reinterpret_cast<const Pack<4>*>(weight + v * 4);
  }
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
#pragma unroll 1
  for (int j = 0; j < p.rows_a_warp; ++j) {
    const int64_t slot = (static_cast<int64_t>(blockIdx.x) * p.rows_a_warp + j) * kWarpsABlock + warp;
    int g = 0, i = 0;
    if (slot >= slots || !delta_step_of(p, slot, &g, &i)) continue;
    if (gates) {
      delta_gates(p, slot, g, i, lane);
    } else if (p.taps == 4) {
      delta_head<Values, 4>(p, slot, g, i, head, channel, [&](int v, int t) { return taps[v].x[t]; });
    } else {
      delta_head<Values, 0>(p, slot, g, i, head, channel, [&](int v, int t) { return weight[v * p.taps + t]; });
    }
  }
}

__device__ __forceinline__ int32_t load_acquire(const int32_t* at) {
  int32_t value = 0;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Waits until the recurrence has written y of step i of a head. Bounded: after a while it waits for the whole kernel
// instead, which needs no counters.
__device__ void wait_for_step(const DeltaParams& p, int g, int head, int i) {
  const int unit_heads = p.dv / kDeltaUnit;
  const int first = delta_block_of(p.split, head * unit_heads);
  const int last = delta_block_of(p.split, (head + 1) * unit_heads - 1);
  int tries = 0;
  for (int block = first; block <= last; ++block) {
    const int32_t* at = p.progress + static_cast<int64_t>(g) * p.split.blocks + block;
    while (load_acquire(at) <= i) {
      if (++tries > 20000) return pdl_wait();
      __nanosleep(1000);
    }
  }
}

// out = y * rsqrt(mean y^2 + eps) * norm * silu(z) of one row and head: a warp.
__device__ __forceinline__ void delta_output(const DeltaParams& p, int64_t row, int head, int lane,
                                             const float4 (&z)[2]) {
  const int pieces = p.dv / 4;
  const float* from = p.y + (row * p.v_heads + head) * p.dv;
  float4 y[2];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int piece = lane + 32 * j;
    y[j] = piece < pieces ? __ldcg(reinterpret_cast<const float4*>(from) + piece) : make_float4(0, 0, 0, 0);
    squares = __fmaf_rn(y[j].x, y[j].x, squares);
    squares = __fmaf_rn(y[j].y, y[j].y, squares);
    squares = __fmaf_rn(y[j].z, y[j].z, squares);
    squares = __fmaf_rn(y[j].w, y[j].w, squares);
  }
  const float mean = __fdiv_rn(warp_sum(squares), static_cast<float>(p.dv));
  const float scale = rsqrtf(__fadd_rn(mean, p.eps));
  __nv_bfloat16* to = p.out.data + row * p.out.stride + static_cast<int64_t>(head) * p.dv;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int piece = lane + 32 * j;
    if (piece >= pieces) continue;
    const float4 w = *reinterpret_cast<const float4*>(p.norm + piece * 4);
    const auto one = [scale](float value, float weight, float gate) {
      return __fmul_rn(__fmul_rn(__fmul_rn(value, scale), weight), silu(gate));
    };
    union {
      __nv_bfloat162 pair[2];
      uint2 bits;
    } packed;
    packed.pair[0] = __floats2bfloat162_rn(one(y[j].x, w.x, z[j].x), one(y[j].y, w.y, z[j].y));
    packed.pair[1] = __floats2bfloat162_rn(one(y[j].z, w.z, z[j].z), one(y[j].w, w.w, z[j].w));
    *reinterpret_cast<uint2*>(to + piece * 4) = packed.bits;
  }
}

// The convolution's history and the tentative rows' inputs. A thread owns its channels, and reads old kept rows (for
// the history) before it writes over them.
__device__ void delta_keep(const DeltaParams& p, int g) {
  const DeviceGroup group = p.groups[g];
  if (group.accepted + group.rows <= 0) return;
  float* state = p.states[g];
  const int commit = group.accepted + group.certain, tentative = group.rows - group.certain;
  const int per_block = (p.channels + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int begin = static_cast<int>(blockIdx.x) * per_block, end = min(begin + per_block, p.channels);
  const int64_t first_kept = static_cast<int64_t>(group.first_row) + group.certain;
  for (int channel = begin + static_cast<int>(threadIdx.x); channel < end; channel += static_cast<int>(blockDim.x)) {
    // New history row t comes from old row t + commit or from elsewhere: going up, none is overwritten before it is
    // read.
    for (int t = 0; t < p.taps - 1; ++t) {
      state[p.state.history + static_cast<int64_t>(t) * p.channels + channel] =
          delta_raw_row(p, group, state, commit - (p.taps - 1) + t)[channel];
    }
    for (int r = 0; r < tentative; ++r) {
      state[p.state.kept_qkv + static_cast<int64_t>(r) * p.channels + channel] =
          p.qkv.data[(first_kept + r) * p.qkv.stride + channel];
    }
  }
  if (blockIdx.x != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < tentative * p.v_heads; i += static_cast<int>(blockDim.x)) {
    const int r = i / p.v_heads, h = i % p.v_heads;
    state[p.state.kept_b + i] = p.b.data[(first_kept + r) * p.b.stride + h];
    state[p.state.kept_a + i] = p.a.data[(first_kept + r) * p.a.stride + h];
  }
}

// blockIdx.x: value head. blockIdx.y: 8 rows, a warp each; beyond the rows, a group whose state is brought up to date.
//
// With many rows the blocks come in while the recurrence runs (it lets them in once all of its own blocks run, so that
// they cannot keep it from a place) and follow its progress; what they read apart from y was written by kernels that
// had ended before the recurrence began, and nobody else uses what they write.
__global__ void __launch_bounds__(32 * kWarpsABlock, 6) delta_finish_kernel(const __grid_constant__ DeltaParams p) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row_blocks = (p.rows + kWarpsABlock - 1) / kWarpsABlock;
  const int y = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x);
  pdl_launch();
  if (p.poll == 0 || y >= row_blocks) pdl_wait();
  if (y >= row_blocks) {
    if (y - row_blocks < *p.group_count) delta_keep(p, y - row_blocks);
    return;
  }
  const int first = y * kWarpsABlock, row = first + warp;
  const int g = row < p.rows ? p.group_of[row] : -1;
  float4 z[2];
  if (g >= 0) {
    const float4* from =
        reinterpret_cast<const float4*>(p.z.data + row * p.z.stride + static_cast<int64_t>(head) * p.dv);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      z[j] = lane + 32 * j < p.dv / 4 ? from[lane + 32 * j] : make_float4(0, 0, 0, 0);
    }
  }
  if (p.poll != 0) {
    if (warp == 0 && lane < kWarpsABlock && first + lane < p.rows) {
      const int of = p.group_of[first + lane];
      if (of >= 0) {
        const DeviceGroup& group = p.groups[of];
        wait_for_step(p, of, head, group.accepted + first + lane - group.first_row);
      }
    }
    __syncthreads();
  }
  if (g >= 0) {
    delta_output(p, row, head, lane, z);
  } else if (row < p.rows) {
    __nv_bfloat16* to = p.out.data + row * p.out.stride + static_cast<int64_t>(head) * p.dv;
    for (int i = lane; i < p.dv; i += 32) to[i] = __float2bfloat16_rn(0.0f);
  }
  if (p.poll != 0) pdl_wait();
}

class State : public CudaRecurrentState {
 public:
  State(float* memory, int64_t bytes, cudaStream_t stream) : memory_(memory), bytes_(bytes), stream_(stream) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() override { device_free(memory_); }

  int64_t bytes() const override { return bytes_; }
  void reset() override {
    cuda_ok(cudaMemsetAsync(memory_, 0, static_cast<size_t>(bytes_), stream_), "reset of a recurrent state");
  }
  void copy_from(const RecurrentState& other) override {
    const auto& from = static_cast<const State&>(other);
    kernel_check(from.bytes_ == bytes_, "delta net: copy of a state of another shape");
    cuda_ok(cudaMemcpyAsync(memory_, from.memory_, static_cast<size_t>(bytes_), cudaMemcpyDeviceToDevice, stream_),
            "copy of a recurrent state");
  }
  void save(std::span<std::byte> into) const override {
    kernel_check(static_cast<int64_t>(into.size()) == bytes_, "delta net: save into another size");
    cuda_ok(cudaMemcpyAsync(into.data(), memory_, into.size(), cudaMemcpyDeviceToHost, stream_),
            "save of a recurrent state");
    cuda_ok(cudaStreamSynchronize(stream_), "save of a recurrent state");
  }
  void load(std::span<const std::byte> from) override {
    kernel_check(static_cast<int64_t>(from.size()) == bytes_, "delta net: load of another size");
    cuda_ok(cudaMemcpyAsync(memory_, from.data(), from.size(), cudaMemcpyHostToDevice, stream_),
            "load of a recurrent state");
    cuda_ok(cudaStreamSynchronize(stream_), "load of a recurrent state");
  }
  float* data() const override { return memory_; }

 private:
  float* memory_;
  int64_t bytes_;
  cudaStream_t stream_;
};

std::string shape_error(const DeltaNetShape& s) {
  if (s.dk != 32 && s.dk != 64 && s.dk != 128) {
    return "gated delta net: key heads of " + std::to_string(s.dk) + " dims; the CUDA kernels have 32, 64 and 128";
  }
  if (s.dv < 8 || s.dv > 256 || s.dv % 8 != 0) {
    return "gated delta net: value heads of " + std::to_string(s.dv) +
           " dims; the CUDA kernels want a multiple of 8 up to 256";
  }
  if (s.conv_kernel < 1 || s.conv_kernel > kDeltaMaxTaps) {
    return "gated delta net: convolution of " + std::to_string(s.conv_kernel) + " taps; the CUDA kernels have 1 to 16";
  }
  if (s.k_heads < 1 || s.v_heads < 1 || s.max_window < 1 || s.max_window > 1024 ||
      static_cast<int64_t>(s.k_head_of.size()) != s.v_heads) {
    return "gated delta net: heads or window of no size";
  }
  return {};
}

DeltaStateLayout state_layout(const DeltaNetShape& s) {
  return delta_state_layout(s.v_heads * s.dv / kDeltaUnit, s.dk, s.conv_kernel, s.channels(), s.v_heads, s.max_window);
}

// Value heads in a row that share their key head, if that number is the same all along; else 1.
int64_t heads_a_span(const DeltaNetShape& s) {
  const auto& of = s.k_head_of;
  size_t run = 1;
  while (run < of.size() && of[run] == of[0]) ++run;
  if (of.size() % run != 0) return 1;
  for (size_t h = 0; h < of.size(); ++h) {
    if (of[h] != of[h / run * run]) return 1;
  }
  return static_cast<int64_t>(run);
}

struct Device {
  int processors = 0;
  int shared_bytes = 0;
};
const Device& device() {
  static const Device value = [] {
    Device d;
    int id = 0;
    cuda_ok(cudaGetDevice(&id), "delta net: device");
    cuda_ok(cudaDeviceGetAttribute(&d.processors, cudaDevAttrMultiProcessorCount, id), "delta net: device");
    cuda_ok(cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id), "delta net: device");
    return d;
  }();
  return value;
}

// How the columns are cut into blocks changes no bits: columns have nothing to do with each other. Three units a warp
// need fewer loads an operation, and make one wave of blocks where single units would make several.
DeltaPlan make_plan(const DeltaNetShape& s, int64_t max_groups) {
  const int64_t units = s.v_heads * s.dv / kDeltaUnit, head_units = s.dv / kDeltaUnit;
  DeltaPlan plan;
  plan.split = delta_split(static_cast<int32_t>(units), static_cast<int32_t>(head_units), kDeltaWarps);
  const int64_t span_units = heads_a_span(s) * head_units;
  if (s.dk != 128 || span_units % (3 * kDeltaWarps) != 0) return plan;
  if (plan.split.blocks * max_groups <= 2 * device().processors) return plan;
  DeltaPlan wide;
  wide.units_per_warp = 3;
  wide.split = delta_split(static_cast<int32_t>(units), static_cast<int32_t>(span_units), 3 * kDeltaWarps);
  wide.chunk = 16;
  if (delta_steps_shared(s.dk, wide, s.conv_kernel) > device().shared_bytes) wide.chunk = 8;
  return delta_steps_shared(s.dk, wide, s.conv_kernel) > device().shared_bytes ? plan : wide;
}

struct Workspace {
  int64_t gates = 0, y = 0, progress = 0, floats = 0;
};
Workspace workspace_layout(const DeviceRows& rows, const DeltaNetShape& s, const DeltaSplit& split) {
  const int64_t slots = rows.rows + rows.max_groups * s.max_window;
  Workspace at;
  at.gates = delta_round4(slots * 2 * s.k_heads * s.dk);
  at.y = at.gates + slots * s.v_heads * 4;
  at.progress = at.y + delta_round4(rows.rows * s.v_heads * s.dv);
  at.floats = at.progress + delta_round4(static_cast<int64_t>(rows.max_groups) * split.blocks);
  return at;
}

void launch_inputs(cudaStream_t stream, const DeltaParams& p) {
  const int64_t slots = p.rows + static_cast<int64_t>(p.max_groups) * p.window;
  const int64_t block_slots = static_cast<int64_t>(kWarpsABlock) * p.rows_a_warp;
  const dim3 grid(static_cast<unsigned>((slots + block_slots - 1) / block_slots),
                  static_cast<unsigned>(2 * p.k_heads + 1));
  const auto kernel = p.dk == 128  ? delta_inputs_kernel<4>
                      : p.dk == 64 ? delta_inputs_kernel<2>
                                   : delta_inputs_kernel<1>;
  launch_kernel(kernel, grid, dim3(32 * kWarpsABlock), 0, stream, "delta net inputs", p);
}

void launch_finish(cudaStream_t stream, const DeltaParams& p) {
  const int row_blocks = (p.rows + kWarpsABlock - 1) / kWarpsABlock;
  const dim3 grid(static_cast<unsigned>(p.v_heads), static_cast<unsigned>(row_blocks + p.max_groups));
  launch_kernel(delta_finish_kernel, grid, dim3(32 * kWarpsABlock), 0, stream, "delta net outputs", p);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

std::unique_ptr<CudaRecurrentState> CudaRecurrentState::create(const DeltaNetShape& shape, cudaStream_t stream,
                                                               std::string* error) {
  const std::string wrong = shape_error(shape);
  if (!wrong.empty()) {
    if (error != nullptr) {
      *error = wrong;
    } else {
      cuda_ok(cudaErrorInvalidValue, wrong.c_str());
    }
    return nullptr;
  }
  const int64_t bytes = 4 * state_layout(shape).floats;
  void* memory = device_allocate(bytes, "memory of a recurrent state");
  if (memory == nullptr) return nullptr;
  auto state = std::make_unique<State>(static_cast<float*>(memory), bytes, stream);
  state->reset();
  return state;
}

int64_t cuda_delta_net_workspace(const DeviceRows& rows, const DeltaNetShape& shape) {
  return workspace_layout(rows, shape, make_plan(shape, rows.max_groups).split).floats;
}

void cuda_delta_net(cudaStream_t stream, const DeviceRows& rows, const CudaDeltaNetArgs& args) {
  const DeltaNetShape& s = *args.shape;
  if (rows.rows <= 0 || rows.max_groups <= 0) return;
  kernel_check(shape_error(s).empty(), "delta net: a shape that the kernels do not have");
  kernel_check(args.qkv.cols == s.channels() && args.z.cols == s.v_heads * s.dv && args.out.cols == args.z.cols &&
                   args.b.cols == s.v_heads && args.a.cols == s.v_heads,
               "delta net: shapes differ");
  kernel_check(args.qkv.stride % 4 == 0 && args.z.stride % 4 == 0 && args.out.stride % 8 == 0 &&
                   aligned(args.qkv.data) && aligned(args.z.data) && aligned(args.out.data) &&
                   aligned(args.workspace) && aligned(args.norm) && aligned(args.conv),
               "delta net: rows that are not aligned to 16 bytes");
  const DeltaPlan plan = make_plan(s, rows.max_groups);
  const Workspace at = workspace_layout(rows, s, plan.split);
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
  p.channels = static_cast<int32_t>(s.channels());
  p.eps = args.eps;
  p.q_scale = 1.0f / std::sqrt(static_cast<float>(s.dk));
  p.rows_a_warp = rows.rows >= 256 ? 8 : 1;
  p.poll = rows.rows >= kPollRows && pdl_supported() ? 1 : 0;
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
  p.split = plan.split;
  p.qk = args.workspace;
  p.gates = reinterpret_cast<DeltaGate*>(args.workspace + at.gates);
  p.y = args.workspace + at.y;
  p.progress = reinterpret_cast<int32_t*>(args.workspace + at.progress);
  launch_inputs(stream, p);
  cuda_delta_steps(stream, p, plan);
  launch_finish(stream, p);
}

}  // namespace tensorfold
