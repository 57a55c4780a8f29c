// Columns of a delta net's state in a warp's registers, and the step.
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
#pragma once

#include "kernels/cuda/delta_net_params.h"
#include "kernels/cuda/recurrence.cuh"

namespace tensorfold {

/// A lane's share of `Units` times 4 columns of S.
template <int DK, int Units>
struct Columns {
  static constexpr int kM = DK / 32;
  float s[Units][kM][4];

  /// `at`: S of the first column; units from `live` on are not there.
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

  /// The lane's part of S^T x of a unit.
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

  /// One step; y: the lane's parts. v: of the lane's column, units 4 apart.
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
    for (int u = 0; u < Units; ++u) y[u] = finish(q, k, u, d[u], v[u * kColumnsAWarp], gate);
  }

  /// The same, with the sums of the step before: y comes in as its parts, which are summed beside the parts of d, so
  /// that both wait once.
  __device__ __forceinline__ void step_after(const float* q_from, const float* k_from, const float* v, DeltaGate gate,
                                             int lane, float (&y)[Units], float (&before)[Units]) {
    float k[kM][4], q[kM][4], d[Units];
    load_rows(k, k_from, lane);
    load_rows(q, q_from, lane);
#pragma unroll
    for (int u = 0; u < Units; ++u) d[u] = dot(k, u);
#pragma unroll
    for (int u = 0; u < Units; ++u) before[u] = y[u];
    sum_both_over_segments(d, before);
#pragma unroll
    for (int u = 0; u < Units; ++u) y[u] = finish(q, k, u, d[u], v[u * kColumnsAWarp], gate);
  }

 private:
  // r: k's dot product with the column. Returns the lane's part of y.
  __device__ __forceinline__ float finish(const float (&q)[kM][4], const float (&k)[kM][4], int u, float r, float v,
                                          DeltaGate gate) {
    const float d = __fmul_rn(__fmaf_rn(-gate.decay, r, v), gate.beta);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[u][m][e] = __fmaf_rn(k[m][e], d, __fmul_rn(gate.decay, s[u][m][e]));
    }
    return dot(q, u);
  }
  __device__ __forceinline__ static void sum_both_over_segments(float (&a)[Units], float (&b)[Units]) {
    // All of a round are asked for before the first is used, which the compiler does not do by itself.
#pragma unroll
    for (int distance = 8; distance > 1; distance /= 2) {
      float from_a[Units], from_b[Units];
#pragma unroll
      for (int u = 0; u < Units; ++u) {
        from_a[u] = __shfl_xor_sync(0xffffffffu, a[u], distance);
        from_b[u] = __shfl_xor_sync(0xffffffffu, b[u], distance);
      }
#pragma unroll
      for (int u = 0; u < Units; ++u) {
        a[u] = __fadd_rn(a[u], from_a[u]);
        b[u] = __fadd_rn(b[u], from_b[u]);
      }
    }
  }
};

}  // namespace tensorfold
