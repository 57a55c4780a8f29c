// What the gated delta net does to a row by itself, used by the kernels for few rows and by those for many, which
// must have the same bits.
//
// Convolution: one chain of fused multiply-adds over the taps, oldest first. Sums of squares of a head: each lane's
// values 4 (lane + 32 j) + {0..3} in a chain, lanes by a butterfly over 16, 8, 4, 2, 1.
#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/delta_net_params.h"

namespace tensorfold {

/// What a block knows of a group and a value head. Steps are counted from the state's last whole chunk: `replay` rows
/// come from the state (committed since, or accepted now), the others are the pass's.
struct DeltaWork {
  DeviceGroup group;
  float* head;  // state of the value head
  int replay;
  int count;   // steps
  int commit;  // leading steps that are committed after the pass

  __device__ __forceinline__ DeltaWork(const DeltaParams& p, int g, int v_head)
      : group(p.groups[g]), head(p.states[g] + v_head * p.state.head) {
    const int fill = *reinterpret_cast<const int32_t*>(head + p.state.fill);
    replay = fill + group.accepted;
    count = replay + group.rows;
    commit = replay + group.certain;
  }
  __device__ __forceinline__ int64_t row(int i) const {
    return static_cast<int64_t>(group.first_row) + i - replay;
  }
  /// Nothing to do at all.
  __device__ __forceinline__ bool idle() const { return group.accepted + group.rows <= 0; }
};

/// Inputs of the convolution at step i (negative ones are before the chunk): `in_state` is the offset in a state's
/// row, `in_pass` that in a row of the pass.
__device__ __forceinline__ const float* delta_raw(const DeltaParams& p, const DeltaWork& work, int i, int in_state,
                                                  int64_t in_pass) {
  return i < work.replay ? work.head + p.state.rows + static_cast<int64_t>(i + p.taps - 1) * p.state.row_floats + in_state
                         : p.qkv.data + work.row(i) * p.qkv.stride + in_pass;
}

__device__ __forceinline__ float delta_warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}
__device__ __forceinline__ float delta_squares(float4 x, float sum) {
  sum = __fmaf_rn(x.x, x.x, sum);
  sum = __fmaf_rn(x.y, x.y, sum);
  sum = __fmaf_rn(x.z, x.z, sum);
  return __fmaf_rn(x.w, x.w, sum);
}

/// silu(convolution) of 4 channels; from(t): their inputs at tap t; weights: [channel][taps].
template <typename From>
__device__ __forceinline__ float4 delta_convolve(int taps, const float* weights, const From& from) {
  float4 sum;
  if (taps == 4) {
    const float4 w0 = *reinterpret_cast<const float4*>(weights), w1 = *reinterpret_cast<const float4*>(weights + 4);
    const float4 w2 = *reinterpret_cast<const float4*>(weights + 8), w3 = *reinterpret_cast<const float4*>(weights + 12);
    const float4 a = *reinterpret_cast<const float4*>(from(0)), b = *reinterpret_cast<const float4*>(from(1));
    const float4 c = *reinterpret_cast<const float4*>(from(2)), d = *reinterpret_cast<const float4*>(from(3));
    const auto chain = [](float4 w, float x0, float x1, float x2, float x3) {
      return __fmaf_rn(w.w, x3, __fmaf_rn(w.z, x2, __fmaf_rn(w.y, x1, __fmul_rn(w.x, x0))));
    };
    sum = make_float4(chain(w0, a.x, b.x, c.x, d.x), chain(w1, a.y, b.y, c.y, d.y), chain(w2, a.z, b.z, c.z, d.z),
                      chain(w3, a.w, b.w, c.w, d.w));
  } else {
    const float4 a = *reinterpret_cast<const float4*>(from(0));
    sum = make_float4(__fmul_rn(weights[0], a.x), __fmul_rn(weights[taps], a.y), __fmul_rn(weights[2 * taps], a.z),
                      __fmul_rn(weights[3 * taps], a.w));
    for (int t = 1; t < taps; ++t) {
      const float4 x = *reinterpret_cast<const float4*>(from(t));
      sum.x = __fmaf_rn(weights[t], x.x, sum.x);
      sum.y = __fmaf_rn(weights[taps + t], x.y, sum.y);
      sum.z = __fmaf_rn(weights[2 * taps + t], x.z, sum.z);
      sum.w = __fmaf_rn(weights[3 * taps + t], x.w, sum.w);
    }
  }
  return make_float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
}

/// x = high + low, within 2^-17 of x; high and low are pairs of bf16.
__device__ __forceinline__ void delta_split(float x0, float x1, uint32_t& high, uint32_t& low) {
  high = pack_bf16(x0, x1);
  low = pack_bf16(__fsub_rn(x0, __uint_as_float(high << 16)), __fsub_rn(x1, __uint_as_float(high & 0xffff0000u)));
}

/// A warp: q or k of a head after convolution and silu, a lane's values x (lanes beyond the head: anything), is
/// normalised, scaled and stored as high and low halves at `to` and `to + low` (values).
__device__ __forceinline__ void delta_store_head(int dk, float4 x, float factor, bool scaled, int lane,
                                                 __nv_bfloat16* to, int low_at) {
  const bool inside = lane * 4 < dk;
  const float squares = delta_warp_sum(inside ? delta_squares(x, 0.0f) : 0.0f);
  float scale = rsqrtf(__fadd_rn(squares, 1e-6f));
  if (scaled) scale = __fmul_rn(scale, factor);
  if (!inside) return;
  uint2 high, low;
  delta_split(__fmul_rn(x.x, scale), __fmul_rn(x.y, scale), high.x, low.x);
  delta_split(__fmul_rn(x.z, scale), __fmul_rn(x.w, scale), high.y, low.y);
  *reinterpret_cast<uint2*>(to + lane * 4) = high;
  *reinterpret_cast<uint2*>(to + low_at + lane * 4) = low;
}

/// Decay and write strength of value head h at step i.
__device__ __forceinline__ DeltaGate delta_gate(const DeltaParams& p, const DeltaWork& work, int i, int h) {
  constexpr float kLog2E = 1.4426950408889634f;
  const bool kept = i < work.replay;
  const float b = kept ? work.head[p.state.b + i] : p.b.data[work.row(i) * p.b.stride + h];
  const float a = kept ? work.head[p.state.a + i] : p.a.data[work.row(i) * p.a.stride + h];
  const float rate = __fmul_rn(expf(p.a_log[h]), softplus(__fadd_rn(a, p.dt_bias[h])));
  const float octaves = __fmul_rn(rate, kLog2E);
  DeltaGate gate;
  // A decay that is not a number must reach the results; an integer cannot carry it.
  gate.beta = octaves == octaves ? sigmoid(b) : octaves;
  // 2^-1024 is 0 beside anything in fp32.
  gate.octaves = __float2ull_rn(fminf(fmaxf(octaves, 0.0f), 1024.0f) * static_cast<float>(1ull << kDeltaClockBits));
  return gate;
}
__device__ __forceinline__ void delta_store_gate(DeltaGate* to, const DeltaGate& gate) {
  *reinterpret_cast<ulonglong2*>(to) =
      make_ulonglong2(gate.octaves, static_cast<unsigned long long>(__float_as_uint(gate.beta)));
}

/// out = y * rsqrt(mean y^2 + eps) * norm * silu(z) of one row and head: a warp. y: float4 lane + 32 j of the head.
__device__ __forceinline__ void delta_output(const DeltaParams& p, int64_t row, int head, int lane,
                                             const float4 (&y)[2], const float4 (&z)[2]) {
  const int pieces = p.dv / 4;
  const float squares = delta_squares(y[1], delta_squares(y[0], 0.0f));
  const float mean = __fdiv_rn(delta_warp_sum(squares), static_cast<float>(p.dv));
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
    *reinterpret_cast<uint2*>(to + piece * 4) =
        make_uint2(pack_bf16(one(y[j].x, w.x, z[j].x), one(y[j].y, w.y, z[j].y)),
                   pack_bf16(one(y[j].z, w.z, z[j].z), one(y[j].w, w.w, z[j].w)));
  }
}
__device__ __forceinline__ void delta_load_row(const float* from, int dv, int lane, float4 (&to)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    to[j] = lane + 32 * j < dv / 4 ? reinterpret_cast<const float4*>(from)[lane + 32 * j] : make_float4(0, 0, 0, 0);
  }
}

/// Brings the rows of a value head's state up to date: those of the pass come in, and if a chunk was completed all that
/// lies before it goes (and the rest becomes zero, so that states of equal history have equal bytes). `threads` threads
/// call it, at least 192, which meet at `sync`; nobody else may read these rows any more.
template <typename Sync>
__device__ __forceinline__ void delta_keep(const DeltaParams& p, const DeltaWork& work, int k_head, int v_head,
                                           int thread, int threads, const Sync& sync) {
  const int pieces = p.state.row_floats / 4, before = p.taps - 1;
  const int shift = work.commit / kDeltaChunk * kDeltaChunk;
  float* rows = work.head + p.state.rows;
  const auto pass_offset = [&](int channel) -> int64_t {
    if (channel < p.dk) return static_cast<int64_t>(k_head) * p.dk + channel;
    if (channel < 2 * p.dk) return static_cast<int64_t>(p.k_heads + k_head - 1) * p.dk + channel;
    return static_cast<int64_t>(2 * p.k_heads + 0) * p.dk + static_cast<int64_t>(v_head) * p.dv + channel - 2 * p.dk;
  };
  if (shift == 0) {
    for (int item = thread; item < work.group.rows * pieces; item += threads) {
      const int i = work.replay + item / pieces, channel = item % pieces * 4;
      *reinterpret_cast<float4*>(rows + static_cast<int64_t>(i + before) * p.state.row_floats + channel) =
          *reinterpret_cast<const float4*>(p.qkv.data + work.row(i) * p.qkv.stride + pass_offset(channel));
    }
    for (int i = work.replay + thread; i < work.count; i += threads) {
      work.head[p.state.b + i] = p.b.data[work.row(i) * p.b.stride + v_head];
      work.head[p.state.a + i] = p.a.data[work.row(i) * p.a.stride + v_head];
    }
  } else {
    // 16 rows at a time: what they come from lies at least 16 rows above.
    constexpr int kMost = 11;
    const int all = before + p.state.kept;
    for (int base = 0; base < all; base += kDeltaChunk) {
      float4 x[kMost];
      const int items = min(kDeltaChunk, all - base) * pieces;
#pragma unroll
      for (int n = 0; n < kMost; ++n) {
        const int item = thread + n * threads;
        const int i = base + item / pieces - before + shift, channel = item % pieces * 4;
        x[n] = make_float4(0, 0, 0, 0);
        if (item < items && i < work.count) {
          x[n] = *reinterpret_cast<const float4*>(delta_raw(p, work, i, channel, pass_offset(channel)));
        }
      }
      sync();
#pragma unroll
      for (int n = 0; n < kMost; ++n) {
        const int item = thread + n * threads;
        if (item >= items) continue;
        *reinterpret_cast<float4*>(rows + static_cast<int64_t>(base + item / pieces) * p.state.row_floats +
                                   item % pieces * 4) = x[n];
      }
      sync();
    }
    float a = 0.0f, b = 0.0f;  // kept <= threads
    const int i = thread + shift;
    if (i < work.count) {
      b = i < work.replay ? work.head[p.state.b + i] : p.b.data[work.row(i) * p.b.stride + v_head];
      a = i < work.replay ? work.head[p.state.a + i] : p.a.data[work.row(i) * p.a.stride + v_head];
    }
    sync();
    if (thread < p.state.kept) {
      work.head[p.state.b + thread] = b;
      work.head[p.state.a + thread] = a;
    }
  }
  if (thread == 0) *reinterpret_cast<int32_t*>(work.head + p.state.fill) = work.commit - shift;
}

}  // namespace tensorfold
