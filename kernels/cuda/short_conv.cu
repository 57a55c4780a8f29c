// See short_conv.h. How the contract is kept: a row's result is one chain of fma over the taps, oldest first, for each
// channel, of inputs that are found by their place in the sequence: in the state's history, among the rows kept from
// the last window, or in the pass. Channels never meet. The state is moved on by a launch of its own, after all rows
// have read it, a thread for four channels of a sequence.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise_vec.cuh"
#include "kernels/cuda/short_conv.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 4;  // rows a block takes
constexpr int64_t kMostTaps = 16;
constexpr int64_t kMostContext = 32;  // a lane of a warp each
constexpr int kMostHeads = 448;       // of 2- to 8-grams, 64 each

struct ConvParams {
  const int32_t* group_count;
  const int32_t* group_of;
  const int32_t* tokens;
  const DeviceGroup* groups;
  float* const* states;  // of this layer
  DeviceMatrix x, out;
  const float* conv;
  ShortConvLayout at;
  int rows, channels, taps, dilation, history, context;
};

// Inputs of step `i` of a group, counted from its first accepted row; negative ones are history.
__device__ __forceinline__ const float* input_of_step(const ConvParams& p, const DeviceGroup& group, const float* state,
                                                      int i) {
  if (i < 0) return state + p.at.history + static_cast<int64_t>(i + p.history) * p.channels;
  if (i < group.accepted) return state + p.at.kept + static_cast<int64_t>(i) * p.channels;
  return p.x.data + (static_cast<int64_t>(group.first_row) + i - group.accepted) * p.x.stride;
}

// blockIdx.x: 4 channels a thread; blockIdx.y: kRows rows.
__global__ void __launch_bounds__(kThreads) conv_kernel(const __grid_constant__ ConvParams p) {
  pdl_launch();
  pdl_wait();
  const int channel = 4 * (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x));
  if (channel >= p.channels) return;
  const float* weights = p.conv + static_cast<int64_t>(channel) * p.taps;
  for (int r = 0; r < kRows; ++r) {
    const int row = static_cast<int>(blockIdx.y) * kRows + r;
    if (row >= p.rows) return;
    const int g = p.group_of[row];
    Lanes<4> sum{};
    if (g >= 0) {
      const DeviceGroup group = p.groups[g];
      const float* state = p.states[g];
      const int step = group.accepted + row - group.first_row;
      for (int t = 0; t < p.taps; ++t) {
        const Lanes<4> x =
            load_lanes<4>(input_of_step(p, group, state, step - (p.taps - 1 - t) * p.dilation) + channel);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = weights[i * p.taps + t];
          sum.v[i] = t == 0 ? __fmul_rn(weight, x.v[i]) : __fmaf_rn(weight, x.v[i], sum.v[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.v[i] = silu(sum.v[i]);
    }
    store_lanes<4>(p.out.data + row * p.out.stride + channel, sum);
  }
}

// Token of step `i` of a group as it is kept: its number + 1, 0 for none.
__device__ __forceinline__ int32_t token_of_step(const ShortConvLayout& at, int context, const int32_t* tokens,
                                                 const DeviceGroup& group, const float* state, int i) {
  const int32_t* words = reinterpret_cast<const int32_t*>(state);
  if (i < -context) return 0;
  if (i < 0) return words[at.tokens + i + context];
  if (i < group.accepted) return words[at.kept_tokens + i];
  return tokens[group.first_row + i - group.accepted] + 1;
}

// blockIdx.x: 4 channels a thread; blockIdx.y: group.
__global__ void __launch_bounds__(kThreads) conv_state_kernel(const __grid_constant__ ConvParams p) {
  constexpr int kTogether = 4;
  pdl_launch();
  pdl_wait();
  const int g = static_cast<int>(blockIdx.y);
  if (g >= *p.group_count) return;
  const DeviceGroup group = p.groups[g];
  float* state = p.states[g];
  const int commit = group.accepted + group.certain, tentative = group.rows - group.certain;
  const int channel = 4 * (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x));
  if (channel < p.channels) {
    // A new row t comes from old row t + commit, or from later: going up, none is overwritten before it is read.
    for (int first = 0; first < p.history && commit > 0; first += kTogether) {
      Lanes<4> x[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        if (first + t < p.history) {
          x[t] = load_lanes<4>(input_of_step(p, group, state, commit - p.history + first + t) + channel);
        }
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        if (first + t < p.history) {
          store_lanes<4>(state + p.at.history + static_cast<int64_t>(first + t) * p.channels + channel, x[t]);
        }
      }
    }
    for (int r = 0; r < tentative; ++r) {  // history may have come from kept rows: of this thread's channels
      const int64_t row = static_cast<int64_t>(group.first_row) + group.certain + r;
      store_lanes<4>(state + p.at.kept + static_cast<int64_t>(r) * p.channels + channel,
                     load_lanes<4>(p.x.data + row * p.x.stride + channel));
    }
  }
  if (blockIdx.x != 0 || threadIdx.x >= 32) return;
  const int lane = static_cast<int>(threadIdx.x);
  int32_t* words = reinterpret_cast<int32_t*>(state);
  int32_t token = 0;
  if (lane < p.context) token = token_of_step(p.at, p.context, p.tokens, group, state, commit - p.context + lane);
  __syncwarp();  // all have read
  if (lane < p.context) words[p.at.tokens + lane] = token;
  for (int r = lane; r < tentative; r += 32) {
    words[p.at.kept_tokens + r] = p.tokens[group.first_row + group.certain + r] + 1;
  }
}

struct NgramParams {
  int64_t multipliers[kMostNgramTokens];
  int32_t table_rows[kMostHeads];  // of all heads
  const int32_t* group_of;
  const int32_t* tokens;
  const DeviceGroup* groups;
  float* const* states;
  ShortConvLayout at;
  int32_t* numbers;
  int rows, context, first_head, heads_per_size;
  int32_t end_token;
};

// blockIdx.x: rows; blockIdx.y: head.
__global__ void __launch_bounds__(kThreads) ngram_kernel(const __grid_constant__ NgramParams p) {
  pdl_launch();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (row >= p.rows) return;
  const int i = static_cast<int>(blockIdx.y), head = p.first_head + i;
  const int g = p.group_of[row];
  DeviceGroup group;
  const float* state = nullptr;
  int step = 0;
  if (g >= 0) {
    group = p.groups[g];
    state = p.states[g];
    step = group.accepted + row - group.first_row;
  }
  const auto before = [&](int back) {
    return g < 0 ? -1 : token_of_step(p.at, p.context, p.tokens, group, state, step - back) - 1;
  };
  p.numbers[static_cast<int64_t>(i) * p.rows + row] =
      ngram_row(p.tokens[row], head / p.heads_per_size + 1, p.multipliers, p.end_token, p.table_rows[head], before);
}

}  // namespace

ShortConvLayout short_conv_layout(const ShortConvShape& shape) {
  ShortConvLayout at;
  at.kept = shape.history() * shape.channels;
  at.tokens = at.kept + shape.max_window * shape.channels;
  at.kept_tokens = at.tokens + shape.context;
  at.words = at.kept_tokens + shape.max_window;
  return at;
}

std::string short_conv_shape_error(const ShortConvShape& s) {
  if (s.channels < 4 || s.channels % 4 != 0 || s.channels > (int64_t{1} << 28)) {
    return "dilated convolution: " + std::to_string(s.channels) + " channels; the CUDA kernels want a multiple of 4";
  }
  if (s.taps < 1 || s.taps > kMostTaps || s.dilation < 1 || s.dilation > 1024) {
    return "dilated convolution: " + std::to_string(s.taps) + " taps " + std::to_string(s.dilation) +
           " apart; the CUDA kernels have 1 to 16, at most 1024 apart";
  }
  if (s.context < 0 || s.context > kMostContext || s.max_window < 1 || s.max_window > 1024) {
    return "dilated convolution: a window of no size, or more than 32 tokens to keep";
  }
  return {};
}

std::unique_ptr<CudaRecurrentState> CudaRecurrentState::create(const ShortConvShape& shape, cudaStream_t stream,
                                                               std::string* error) {
  return make_device_state(4 * short_conv_layout(shape).words, {}, stream, short_conv_shape_error(shape), error);
}

void cuda_short_conv(cudaStream_t stream, const DeviceRows& rows, const CudaShortConv& args) {
  const ShortConvShape& s = *args.shape;
  if (rows.rows <= 0) return;
  kernel_check(short_conv_shape_error(s).empty(), "short_conv: a shape that the kernels do not have");
  kernel_check(args.x.cols == s.channels && args.out.cols == s.channels && args.x.rows == rows.rows &&
                   args.out.rows == rows.rows && by_fours(args.x) && by_fours(args.out),
               "short_conv: shapes differ, or rows that are not aligned to 16 bytes");
  ConvParams p = {rows.group_count,
                  rows.group_of,
                  rows.tokens,
                  rows.groups,
                  rows.states + args.layer * rows.max_groups,
                  args.x,
                  args.out,
                  args.conv,
                  short_conv_layout(s),
                  rows.rows,
                  static_cast<int>(s.channels),
                  static_cast<int>(s.taps),
                  static_cast<int>(s.dilation),
                  static_cast<int>(s.history()),
                  static_cast<int>(s.context)};
  const unsigned across = static_cast<unsigned>((s.channels / 4 + kThreads - 1) / kThreads);
  const dim3 grid(across, static_cast<unsigned>((rows.rows + kRows - 1) / kRows));
  if (!launch_kernel(conv_kernel, grid, dim3(kThreads), 0, stream, "dilated convolution", p)) return;
  if (rows.max_groups <= 0) return;  // rows of no group, which got zeros
  launch_kernel(conv_state_kernel, dim3(across, static_cast<unsigned>(rows.max_groups)), dim3(kThreads), 0, stream,
                "state of a dilated convolution", p);
}

void cuda_ngram_rows(cudaStream_t stream, const DeviceRows& rows, const CudaNgramRows& args) {
  const NgramHeads& heads = *args.heads;
  const size_t backs = heads.multipliers.size() - 1;
  kernel_check(!heads.multipliers.empty() && heads.multipliers.size() <= kMostNgramTokens &&
                   heads.table_rows.size() <= kMostHeads && heads.heads_per_size >= 1 && args.first_head >= 0 &&
                   args.count >= 1 && args.first_head + args.count <= static_cast<int64_t>(heads.table_rows.size()) &&
                   heads.backs(args.first_head + args.count - 1) <= static_cast<int64_t>(backs) &&
                   static_cast<int64_t>(backs) <= args.shape->context,
               "embed_ngrams: shapes differ, or n-grams that the CUDA kernels do not have");
  if (rows.rows <= 0) return;
  NgramParams p = {};
  for (size_t i = 0; i < heads.multipliers.size(); ++i) p.multipliers[i] = heads.multipliers[i];
  for (size_t i = 0; i < heads.table_rows.size(); ++i) p.table_rows[i] = static_cast<int32_t>(heads.table_rows[i]);
  p.group_of = rows.group_of;
  p.tokens = rows.tokens;
  p.groups = rows.groups;
  p.states = rows.states + args.layer * rows.max_groups;
  p.at = short_conv_layout(*args.shape);
  p.numbers = args.numbers;
  p.rows = rows.rows;
  p.context = static_cast<int>(args.shape->context);
  p.first_head = static_cast<int>(args.first_head);
  p.heads_per_size = static_cast<int>(heads.heads_per_size);
  p.end_token = heads.end_token;
  const dim3 grid(static_cast<unsigned>((rows.rows + kThreads - 1) / kThreads), static_cast<unsigned>(args.count));
  launch_kernel(ngram_kernel, grid, dim3(kThreads), 0, stream, "rows of n-grams", p);
}

}  // namespace tensorfold
