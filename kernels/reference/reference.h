// The operations once more in double precision, as plain loops: what the fast backends are compared with in tests.
//
// Nothing here is fast, blocked or clever, and nothing is shared with the backends except the numbers' definition.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops/ops.h"

namespace tensorfold {

/// Row-major [rows, cols] in double precision.
struct RefMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> v;

  RefMatrix() = default;
  RefMatrix(int64_t r, int64_t c) : rows(r), cols(c), v(static_cast<size_t>(r * c)) {}
  double& at(int64_t r, int64_t c) { return v[static_cast<size_t>(r * cols + c)]; }
  double at(int64_t r, int64_t c) const { return v[static_cast<size_t>(r * cols + c)]; }
};

/// The fp32 values that a weight is by definition (contract, section 3), held as doubles. Not EXL3.
RefMatrix ref_dequantise(const MatrixSource& source);

/// [x.rows, w.rows]: out[r, n] = sum_k w[n, k] x[r, k]. If `magnitude` is set: the same with absolute values, for
/// bounds.
RefMatrix ref_matmul(const RefMatrix& w, const RefMatrix& x, RefMatrix* magnitude = nullptr);

RefMatrix ref_rms_norm(const RefMatrix& x, int64_t heads, std::span<const float> weight, double eps);
/// gate_up [rows, 2 n] -> [rows, n].
RefMatrix ref_silu_mul(const RefMatrix& gate_up);
RefMatrix ref_sigmoid_mul(const RefMatrix& x, const RefMatrix& gate);
/// Chosen experts of each row and their weights, in slot order, a shared expert (gate given) last.
struct RefRoutes {
  std::vector<std::vector<int64_t>> ids;
  RefMatrix weights;
};
/// `shared_always`: a shared expert of weight 1, without a gate.
RefRoutes ref_route(const RefMatrix& logits, const RefMatrix* shared_gate, RouterScore score,
                    std::span<const float> bias, int64_t chosen, bool renormalise, double scale,
                    bool shared_always = false);
/// sum over slots of weight * down(silu(gate x) * up x), or of weight * down(relu(up x)^2) where the gate has no rows;
/// the three matrices of each expert, whole.
struct RefExpert {
  RefMatrix gate, up, down;
};
RefMatrix ref_experts(std::span<const RefExpert> experts, const RefMatrix& x, const RefRoutes& routes);
RefMatrix ref_rope(const RefMatrix& x, int64_t heads, std::span<const int64_t> positions,
                   std::span<const float> inv_freq, double attention_factor);

/// One sequence: q row i is at position first_position + i; keys and values [positions, kv_heads * head_dim] from 0.
RefMatrix ref_attention(const RefMatrix& q, const RefMatrix& keys, const RefMatrix& values, int64_t heads,
                        int64_t head_dim, std::span<const int32_t> kv_head_of, int64_t first_position, double scale);

/// A gated delta net over a whole sequence from the empty state: one output row [v_heads * dv] for each input row.
struct RefDeltaInputs {
  const DeltaNetShape* shape = nullptr;
  RefMatrix qkv, z, b, a;
  std::vector<float> conv, a_log, dt_bias, norm;
  double eps = 1e-6;
  double decay_floor = 0;  // with channel_decay
};
RefMatrix ref_delta_net(const RefDeltaInputs& in);

/// A Mamba2 layer over a whole sequence from the empty state: one output row [width] for each input row.
struct RefMamba2Inputs {
  const Mamba2Shape* shape = nullptr;
  RefMatrix z, xbc, dt;
  std::vector<float> conv, conv_bias, a_log, dt_bias, d, norm;  // conv_bias may be empty
  double eps = 1e-5, least_step = 0, most_step = 0;
};
RefMatrix ref_mamba2(const RefMamba2Inputs& in);

/// Full sort of each row.
std::vector<std::vector<Candidate>> ref_top_candidates(const std::vector<std::vector<float>>& logits, int32_t first_id,
                                                       int64_t n);

}  // namespace tensorfold
