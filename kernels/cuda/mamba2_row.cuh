// What Mamba2 does to a row by itself, used by the kernel for few rows and by those for many, which must have the same
// bits.
//
// Convolution: one chain of fused multiply-adds over the taps, oldest first, then the bias is added. Sums of squares of
// a group of heads: each lane's values 4 (lane + 32 j) + {0..3} in a chain, lanes by a butterfly over 16, 8, 4, 2, 1.
#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/mamba2_params.h"
#include "kernels/cuda/recurrence.cuh"

namespace tensorfold {

/// What a block knows of a group of rows and a group of heads. Steps count from the first replayed row.
struct Mamba2Work {
  DeviceGroup group;
  float* memory;  // the state's part of the group of heads
  int count;      // steps
  int commit;     // leading steps that advance the committed state

  __device__ __forceinline__ Mamba2Work(const Mamba2Params& p, const DeviceGroup& rows, float* state, int head_group)
      : group(rows),
        memory(state + head_group * p.at.group),
        count(rows.accepted + rows.rows),
        commit(rows.accepted + rows.certain) {}
  /// Row of the pass that step i is (replayed steps: none).
  __device__ __forceinline__ int64_t row(int i) const {
    return static_cast<int64_t>(group.first_row) + i - group.accepted;
  }
};

/// Channel in a row of the pass of a channel of a group of heads: x of its heads | B | C.
__device__ __forceinline__ int mamba2_in_pass(const Mamba2Params& p, int head_group, int channel) {
  if (channel < p.wide) return head_group * p.wide + channel;
  channel -= p.wide;
  const int first = p.width + head_group * p.state;  // of B
  return channel < p.state ? first + channel : first + (p.head_groups - 1) * p.state + channel;
}
/// The other way round: the group of heads that a channel of the pass belongs to, and the channel there.
struct Mamba2Place {
  int head_group;
  int channel;
};
__device__ __forceinline__ Mamba2Place mamba2_place(const Mamba2Params& p, int in_pass) {
  if (in_pass < p.width) return {in_pass / p.wide, in_pass % p.wide};
  int channel = in_pass - p.width;
  const bool is_c = channel >= p.head_groups * p.state;
  if (is_c) channel -= p.head_groups * p.state;
  return {channel / p.state, p.wide + (is_c ? p.state : 0) + channel % p.state};
}

/// Inputs of the convolution at step i (negative ones are history).
__device__ __forceinline__ const float* mamba2_raw(const Mamba2Params& p, const Mamba2Work& work, int i, int in_state,
                                                   int in_pass) {
  return i < work.group.accepted
             ? work.memory + p.at.rows + static_cast<int64_t>(i + p.taps - 1) * p.at.row_floats + in_state
             : p.xbc.data + work.row(i) * p.xbc.stride + in_pass;
}

/// Bias, and weights if there are 4 taps, of the convolution of 4 channels.
struct Mamba2Taps {
  float4 w[4];
  float4 bias;

  __device__ __forceinline__ void load(const Mamba2Params& p, int in_pass) {
    bias = p.conv_bias == nullptr ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : load_four(p.conv_bias + in_pass);
    if (p.taps != 4) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = load_four(p.conv + (in_pass + j) * 4);
  }
  __device__ __forceinline__ float4 activated(float4 sum) const {
    return make_float4(silu(__fadd_rn(sum.x, bias.x)), silu(__fadd_rn(sum.y, bias.y)), silu(__fadd_rn(sum.z, bias.z)),
                       silu(__fadd_rn(sum.w, bias.w)));
  }
  /// silu(convolution + bias) with 4 taps.
  __device__ __forceinline__ float4 convolve4(float4 a, float4 b, float4 c, float4 d) const {
    return activated(make_float4(four_taps(w[0], a.x, b.x, c.x, d.x), four_taps(w[1], a.y, b.y, c.y, d.y),
                                 four_taps(w[2], a.z, b.z, c.z, d.z), four_taps(w[3], a.w, b.w, c.w, d.w)));
  }
  /// The same for any number of taps; from(t): the inputs at tap t.
  template <typename From>
  __device__ __forceinline__ float4 convolve(const Mamba2Params& p, int in_pass, const From& from) const {
    if (p.taps == 4) return convolve4(from(0), from(1), from(2), from(3));
    const int taps = p.taps;
    const float* weights = p.conv + in_pass * taps;
    const float4 a = from(0);
    float4 sum = make_float4(__fmul_rn(weights[0], a.x), __fmul_rn(weights[taps], a.y),
                             __fmul_rn(weights[2 * taps], a.z), __fmul_rn(weights[3 * taps], a.w));
#pragma unroll 1
    for (int t = 1; t < taps; ++t) {
      const float4 x = from(t);
      sum.x = __fmaf_rn(weights[t], x.x, sum.x);
      sum.y = __fmaf_rn(weights[taps + t], x.y, sum.y);
      sum.z = __fmaf_rn(weights[2 * taps + t], x.z, sum.z);
      sum.w = __fmaf_rn(weights[3 * taps + t], x.w, sum.w);
    }
    return activated(sum);
  }
};

/// Time step and decay of a head at step i.
__device__ __forceinline__ Mamba2Gate mamba2_gate(const Mamba2Params& p, const Mamba2Work& work, int i, int head) {
  const float dt = i < work.group.accepted ? work.memory[p.at.dt + i * p.together + head % p.together]
                                           : p.dt.data[work.row(i) * p.dt.stride + head];
  Mamba2Gate gate;
  gate.step = softplus(__fadd_rn(dt, p.dt_bias[head]));
  gate.step = gate.step < p.least_step ? p.least_step : gate.step;  // NaN stays
  gate.step = gate.step > p.most_step ? p.most_step : gate.step;
  gate.decay = expf(-__fmul_rn(expf(p.a_log[head]), gate.step));
  return gate;
}

/// out = rms(y * silu(z)) * norm of one row and group of heads: a warp. y may have been written by other blocks of the
/// launch.
__device__ __forceinline__ void mamba2_output(const Mamba2Params& p, int64_t row, int head_group, int lane) {
  constexpr int kHeld = 4;  // values of groups up to 512 wide are computed once
  const int first = head_group * p.wide, pieces = p.wide / 4;
  const float* y = p.y + row * p.y_stride + first;
  const float* z = p.z.data + row * p.z.stride + first;
  const auto gated = [&](int piece) {
    const float4 value = __ldcg(reinterpret_cast<const float4*>(y) + piece), gate = load_four(z + 4 * piece);
    return make_float4(__fmul_rn(value.x, silu(gate.x)), __fmul_rn(value.y, silu(gate.y)),
                       __fmul_rn(value.z, silu(gate.z)), __fmul_rn(value.w, silu(gate.w)));
  };
  float4 held[kHeld];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    held[j] = lane + 32 * j < pieces ? gated(lane + 32 * j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) squares = add_squares(held[j], squares);
#pragma unroll 1
  for (int piece = lane + 32 * kHeld; piece < pieces; piece += 32) squares = add_squares(gated(piece), squares);
  const float mean = __fdiv_rn(sum_over_lanes(squares), static_cast<float>(p.wide));
  const float scale = rsqrtf(__fadd_rn(mean, p.eps));
  __nv_bfloat16* to = p.out.data + row * p.out.stride + first;
  const auto store = [&](int piece, float4 x) {
    const float4 w = load_four(p.norm + first + 4 * piece);
    union {
      __nv_bfloat162 pair[2];
      uint2 bits;
    } packed;
    packed.pair[0] =
        __floats2bfloat162_rn(__fmul_rn(__fmul_rn(x.x, scale), w.x), __fmul_rn(__fmul_rn(x.y, scale), w.y));
    packed.pair[1] =
        __floats2bfloat162_rn(__fmul_rn(__fmul_rn(x.z, scale), w.z), __fmul_rn(__fmul_rn(x.w, scale), w.w));
    *reinterpret_cast<uint2*>(to + 4 * piece) = packed.bits;
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (lane + 32 * j < pieces) store(lane + 32 * j, held[j]);
  }
#pragma unroll 1
  for (int piece = lane + 32 * kHeld; piece < pieces; piece += 32) store(piece, gated(piece));
}

/// Zeros in columns [first, first + count) of a row that belongs to nobody, by `threads` threads.
__device__ __forceinline__ void mamba2_no_output(const Mamba2Params& p, int64_t row, int first, int count, int thread,
                                                 int threads) {
  __nv_bfloat16* to = p.out.data + row * p.out.stride + first;
  for (int i = thread; i < count / 4; i += threads) reinterpret_cast<uint2*>(to)[i] = make_uint2(0, 0);
}

/// Brings the history and kept rows of a group of heads up to date. All threads of a block call it, when nobody else
/// reads or writes them any more.
__device__ __forceinline__ void mamba2_keep(const Mamba2Params& p, const Mamba2Work& work, int head_group, int thread,
                                            int threads) {
  const int pieces = p.at.row_floats / 4, history = p.taps - 1, tentative = work.count - work.commit;
  float* rows = work.memory + p.at.rows;
  if (work.commit > 0) {
#pragma unroll 1
    for (int piece = thread; piece < pieces; piece += threads) {
      const int channel = piece * 4, in_pass = mamba2_in_pass(p, head_group, channel);
      // A new row t comes from old row t + commit or from the pass: going up, none is overwritten before it is read.
      // Three at a time.
#pragma unroll 1
      for (int base = 0; base < history; base += 3) {
        float4 x[3];
#pragma unroll
        for (int t = 0; t < 3; ++t) {
          if (base + t < history) {
            x[t] = load_four(mamba2_raw(p, work, work.commit - history + base + t, channel, in_pass));
          }
        }
#pragma unroll
        for (int t = 0; t < 3; ++t) {
          if (base + t < history) *reinterpret_cast<float4*>(rows + (base + t) * p.at.row_floats + channel) = x[t];
        }
      }
    }
  }
  if (tentative <= 0) return;
  __syncthreads();  // history may come from kept rows
  rows += history * p.at.row_floats;
#pragma unroll 4
  for (int item = thread; item < tentative * pieces; item += threads) {
    const int r = item / pieces, channel = item % pieces * 4;
    *reinterpret_cast<float4*>(rows + r * p.at.row_floats + channel) =
        load_four(p.xbc.data + work.row(work.commit + r) * p.xbc.stride + mamba2_in_pass(p, head_group, channel));
  }
#pragma unroll 1
  for (int item = thread; item < tentative * p.together; item += threads) {
    const int r = item / p.together, h = item % p.together;
    work.memory[p.at.dt + item] = p.dt.data[work.row(work.commit + r) * p.dt.stride + head_group * p.together + h];
  }
}

}  // namespace tensorfold
