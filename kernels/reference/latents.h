// Operations on latents in double precision, as plain loops; see reference.h and latent_ops.h.
#pragma once

#include "kernels/reference/reference.h"

namespace tensorfold {

/// One row of streams [n, width]: pre [n], post [n] and the mixing matrix C [n, n] of its mix (latent_ops.h).
struct RefStreamWeights {
  std::vector<double> pre, post;
  RefMatrix mix;
};
RefStreamWeights ref_stream_weights(std::span<const double> mix, std::span<const float> scale,
                                    std::span<const float> base, int64_t n, double eps, int64_t iterations);

/// Per channel: sum over j of softmax_j(gates + bias) * keys, all [count, width].
std::vector<double> ref_pool(const RefMatrix& keys, const RefMatrix& gates, const RefMatrix& bias);

/// sum over heads of weights[h] * weight_scale * max(scale * q_h . key, 0).
double ref_index_score(std::span<const double> q, std::span<const double> key, std::span<const double> weights,
                       double scale, double weight_scale);

/// Softmax attention of one query over rows that are keys and values; `sink` (or null) joins the denominator.
std::vector<double> ref_latent_attention(std::span<const double> q, const std::vector<std::vector<double>>& rows,
                                         double scale, const double* sink);

/// The last 2 * pairs of x turned by `angle[i]`, pairs (2 i, 2 i + 1).
void ref_rope_pairs(std::span<double> x, std::span<const double> angles);

}  // namespace tensorfold
