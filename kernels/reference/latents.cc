#include "kernels/reference/latents.h"

#include <algorithm>
#include <cmath>

namespace tensorfold {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < b.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

RefStreamWeights ref_stream_weights(std::span<const double> mix, std::span<const float> scale,
                                    std::span<const float> base, int64_t n, double eps, int64_t iterations) {
  RefStreamWeights out;
  out.mix = RefMatrix(n, n);
  const auto logit = [&](int64_t i, size_t part) {
    return mix[static_cast<size_t>(i)] * scale[part] + base[static_cast<size_t>(i)];
  };
  for (int64_t s = 0; s < n; ++s) {
    out.pre.push_back(sigmoid(logit(s, 0)) + eps);
    out.post.push_back(2 * sigmoid(logit(n + s, 1)));
  }
  for (int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (int64_t k = 0; k < n; ++k) sum += std::exp(logit(2 * n + j * n + k, 2));
    for (int64_t k = 0; k < n; ++k) out.mix.at(j, k) = std::exp(logit(2 * n + j * n + k, 2)) / sum + eps;
  }
  for (int64_t i = 0; i < 2 * iterations - 1; ++i) {
    const bool columns = i % 2 == 0;
    for (int64_t line = 0; line < n; ++line) {
      double sum = eps;
      for (int64_t k = 0; k < n; ++k) sum += columns ? out.mix.at(k, line) : out.mix.at(line, k);
      for (int64_t k = 0; k < n; ++k) (columns ? out.mix.at(k, line) : out.mix.at(line, k)) /= sum;
    }
  }
  return out;
}

std::vector<double> ref_pool(const RefMatrix& keys, const RefMatrix& gates, const RefMatrix& bias) {
  std::vector<double> out;
  for (int64_t c = 0; c < keys.cols; ++c) {
    double total = 0, sum = 0;
    for (int64_t j = 0; j < keys.rows; ++j) {
      const double p = std::exp(gates.at(j, c) + bias.at(j, c));
      total += p;
      sum += p * keys.at(j, c);
    }
    out.push_back(sum / total);
  }
  return out;
}

double ref_index_score(std::span<const double> q, std::span<const double> key, std::span<const double> weights,
                       double scale, double weight_scale) {
  double sum = 0;
  for (size_t h = 0; h < weights.size(); ++h) {
    sum += weights[h] * weight_scale * std::max(scale * dot(q.subspan(h * key.size(), key.size()), key), 0.0);
  }
  return sum;
}

std::vector<double> ref_latent_attention(std::span<const double> q, const std::vector<std::vector<double>>& rows,
                                         double scale, const double* sink) {
  std::vector<double> out(q.size(), 0.0);
  double total = sink == nullptr ? 0.0 : std::exp(*sink);
  for (const std::vector<double>& row : rows) {
    const double p = std::exp(scale * dot(q, row));
    total += p;
    for (size_t d = 0; d < out.size(); ++d) out[d] += p * row[d];
  }
  for (double& value : out) value /= total;
  return out;
}

void ref_rope_pairs(std::span<double> x, std::span<const double> angles) {
  const size_t first = x.size() - 2 * angles.size();
  for (size_t i = 0; i < angles.size(); ++i) {
    double &a = x[first + 2 * i], &b = x[first + 2 * i + 1];
    const double c = std::cos(angles[i]), s = std::sin(angles[i]), was = a;
    a = was * c - b * s;
    b = b * c + was * s;
  }
}

}  // namespace tensorfold
