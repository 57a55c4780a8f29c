// What the gated delta net does to a row by itself, used by the kernel for few rows and by those for many, which must
// have the same bits.
//
// Convolution: one chain of fused multiply-adds over the taps, oldest first. Sums of squares of a head: each lane's
// values 4 (lane + 32 j) + {0..3} in a chain, lanes by a butterfly over 16, 8, 4, 2, 1.
#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/delta_net_params.h"
#include "kernels/cuda/recurrence.cuh"

namespace tensorfold {

/// What a block knows of a group and a value head. Steps count from the first replayed row.
struct DeltaWork {
  DeviceGroup group;
  float* head;  // state of the value head
  int count;    // steps
  int commit;   // leading steps that advance the committed state

  __device__ __forceinline__ DeltaWork(const DeltaParams& p, const DeviceGroup& rows, float* state, int v_head)
      : group(rows),
        head(state + v_head * p.state.head),
        count(rows.accepted + rows.rows),
        commit(rows.accepted + rows.certain) {}
  /// Row of the pass that step i is (replayed steps: none).
  __device__ __forceinline__ int64_t row(int i) const {
    return static_cast<int64_t>(group.first_row) + i - group.accepted;
  }
};

/// Inputs of the convolution at step i (negative ones are history): `in_state` is the offset in a row of the state,
/// `in_pass` that in a row of the pass.
__device__ __forceinline__ const float* delta_raw(const DeltaParams& p, const DeltaWork& work, int i, int in_state,
                                                  int64_t in_pass) {
  return i < work.group.accepted
             ? work.head + p.state.rows + static_cast<int64_t>(i + p.taps - 1) * p.state.row_floats + in_state
             : p.qkv.data + work.row(i) * p.qkv.stride + in_pass;
}

/// Offset in a row of the pass of a channel of a head's [q | k | v].
__device__ __forceinline__ int64_t delta_channel(const DeltaParams& p, int k_head, int v_head, int channel) {
  if (channel < p.dk) return k_head * p.dk + channel;
  if (channel < 2 * p.dk) return (p.k_heads + k_head - 1) * p.dk + channel;
  return 2 * (p.k_heads - 1) * p.dk + v_head * p.dv + channel;
}

/// silu(convolution) of 4 channels of 4 taps; w: their weights.
__device__ __forceinline__ float4 delta_convolve4(const float4* w, float4 a, float4 b, float4 c, float4 d) {
  return make_float4(silu(four_taps(w[0], a.x, b.x, c.x, d.x)), silu(four_taps(w[1], a.y, b.y, c.y, d.y)),
                     silu(four_taps(w[2], a.z, b.z, c.z, d.z)), silu(four_taps(w[3], a.w, b.w, c.w, d.w)));
}
/// The same for any number of taps; from(t): the inputs at tap t; weights: [channel][taps].
template <typename From>
__device__ __forceinline__ float4 delta_convolve(int taps, const float* weights, const From& from) {
  const float4 a = from(0);
  float4 sum = make_float4(__fmul_rn(weights[0], a.x), __fmul_rn(weights[taps], a.y), __fmul_rn(weights[2 * taps], a.z),
                           __fmul_rn(weights[3 * taps], a.w));
#pragma unroll 1
  for (int t = 1; t < taps; ++t) {
    const float4 x = from(t);
    sum.x = __fmaf_rn(weights[t], x.x, sum.x);
    sum.y = __fmaf_rn(weights[taps + t], x.y, sum.y);
    sum.z = __fmaf_rn(weights[2 * taps + t], x.z, sum.z);
    sum.w = __fmaf_rn(weights[3 * taps + t], x.w, sum.w);
  }
  return make_float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
}

/// A warp: q or k of a head after convolution and silu, a lane's values x (lanes beyond the head: anything), is
/// normalised, scaled by `factor` and stored at `to`.
__device__ __forceinline__ void delta_store_head(int dk, float4 x, float factor, int lane, float* to) {
  const bool inside = lane * 4 < dk;
  const float squares = sum_over_lanes(inside ? add_squares(x, 0.0f) : 0.0f);
  const float scale = __fmul_rn(rsqrtf(__fadd_rn(squares, 1e-6f)), factor);
  if (!inside) return;
  *reinterpret_cast<float4*>(to + lane * 4) =
      make_float4(__fmul_rn(x.x, scale), __fmul_rn(x.y, scale), __fmul_rn(x.z, scale), __fmul_rn(x.w, scale));
}

/// Decay and write strength of value head h at step i.
__device__ __forceinline__ DeltaGate delta_gate(const DeltaParams& p, const DeltaWork& work, int i, int h) {
  const bool kept = i < work.group.accepted;
  const float b = kept ? work.head[p.state.b + i] : p.b.data[work.row(i) * p.b.stride + h];
  const float a = kept ? work.head[p.state.a + i] : p.a.data[work.row(i) * p.a.stride + h];
  DeltaGate gate;
  gate.decay = expf(-__fmul_rn(expf(p.a_log[h]), softplus(__fadd_rn(a, p.dt_bias[h]))));
  gate.beta = sigmoid(b);
  return gate;
}

/// A lane's values of a row of a value head: 4 (lane + 32 j) + {0..3}.
__device__ __forceinline__ void delta_load_row(const float* from, int dv, int lane, float4 (&to)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    to[j] = lane + 32 * j < dv / 4 ? reinterpret_cast<const float4*>(from)[lane + 32 * j] : make_float4(0, 0, 0, 0);
  }
}

/// out = y * rsqrt(mean y^2 + eps) * norm * silu(z), or sigmoid(z), of one row and head: a warp.
__device__ __forceinline__ void delta_output(const DeltaParams& p, int64_t row, int head, int lane,
                                             const float4 (&y)[2], const float4 (&z)[2]) {
  const float squares = add_squares(y[1], add_squares(y[0], 0.0f));
  const float mean = __fdiv_rn(sum_over_lanes(squares), static_cast<float>(p.dv));
  const float scale = rsqrtf(__fadd_rn(mean, p.eps));
  __nv_bfloat16* to = p.out.data + row * p.out.stride + static_cast<int64_t>(head) * p.dv;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int piece = lane + 32 * j;
    if (piece >= p.dv / 4) continue;
    const float4 w = *reinterpret_cast<const float4*>(p.norm + piece * 4);
    const auto one = [scale, &p](float value, float weight, float gate) {
      return __fmul_rn(__fmul_rn(__fmul_rn(value, scale), weight), p.sigmoid_gate ? sigmoid(gate) : silu(gate));
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
/// Zeros for a row that belongs to nobody, by `lanes` threads.
__device__ __forceinline__ void delta_no_output(const DeltaParams& p, int64_t row, int head, int lane, int lanes) {
  __nv_bfloat16* to = p.out.data + row * p.out.stride + static_cast<int64_t>(head) * p.dv;
  for (int i = lane; i < p.dv / 4; i += lanes) reinterpret_cast<uint2*>(to)[i] = make_uint2(0, 0);
}

/// Which share of a head's channels: `index` of `count`.
struct DeltaShare {
  int index;
  int count;
};
/// Brings a share of a value head's history and kept rows up to date, when nobody reads the share's any more. By
/// `threads` threads, which meet in meet().
template <typename Meet>
__device__ __forceinline__ void delta_keep(const DeltaParams& p, const DeltaWork& work, int k_head, int v_head,
                                           DeltaShare share, int thread, int threads, const Meet& meet) {
  const int all = p.state.row_floats / 4, history = p.taps - 1, tentative = work.count - work.commit;
  const int first = all * share.index / share.count, pieces = all * (share.index + 1) / share.count - first;
  float* rows = work.head + p.state.rows;
  if (work.commit > 0) {
#pragma unroll 1
    for (int piece = thread; piece < pieces; piece += threads) {
      const int channel = (first + piece) * 4;
      const int64_t in_pass = delta_channel(p, k_head, v_head, channel);
      // A new row t comes from old row t + commit or from the pass: going up, none is overwritten before it is read.
      // Three at a time.
#pragma unroll 1
      for (int base = 0; base < history; base += 3) {
        float4 x[3];
#pragma unroll
        for (int t = 0; t < 3; ++t) {
          if (base + t < history) {
            x[t] = load_four(delta_raw(p, work, work.commit - history + base + t, channel, in_pass));
          }
        }
#pragma unroll
        for (int t = 0; t < 3; ++t) {
          if (base + t < history) *reinterpret_cast<float4*>(rows + (base + t) * p.state.row_floats + channel) = x[t];
        }
      }
    }
  }
  if (tentative <= 0) return;
  meet();  // history may come from kept rows
  rows += history * p.state.row_floats;
#pragma unroll 4
  for (int item = thread; item < tentative * pieces; item += threads) {
    const int r = item / pieces, channel = (first + item % pieces) * 4;
    *reinterpret_cast<float4*>(rows + r * p.state.row_floats + channel) =
        load_four(p.qkv.data + work.row(work.commit + r) * p.qkv.stride + delta_channel(p, k_head, v_head, channel));
  }
  if (share.index > 0) return;
#pragma unroll 1
  for (int r = thread; r < tentative; r += threads) {
    work.head[p.state.b + r] = p.b.data[work.row(work.commit + r) * p.b.stride + v_head];
    if (p.decays == 1) work.head[p.state.a + r] = p.a.data[work.row(work.commit + r) * p.a.stride + v_head];
  }
  if (p.decays == 1) return;
#pragma unroll 1
  for (int item = thread; item < tentative * p.decays; item += threads) {
    const int64_t row = work.row(work.commit + item / p.decays);
    work.head[p.state.a + item] = p.a.data[row * p.a.stride + v_head * p.decays + item % p.decays];
  }
}

}  // namespace tensorfold
