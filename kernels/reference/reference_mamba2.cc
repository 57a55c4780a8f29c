// Mamba2 in double precision.
#include <algorithm>
#include <cmath>

#include "kernels/reference/reference.h"

namespace tensorfold {
namespace {

double silu(double x) { return x / (1.0 + std::exp(-x)); }
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

}  // namespace

RefMatrix ref_mamba2(const RefMamba2Inputs& in) {
  const Mamba2Shape& s = *in.shape;
  const int64_t rows = in.xbc.rows, together = s.heads / s.groups, wide = together * s.head_dim;
  RefMatrix out(rows, s.width());
  std::vector<RefMatrix> state(static_cast<size_t>(s.heads), RefMatrix(s.state, s.head_dim));
  for (int64_t t = 0; t < rows; ++t) {
    std::vector<double> u(static_cast<size_t>(s.channels()));
    for (int64_t c = 0; c < s.channels(); ++c) {
      double sum = in.conv_bias.empty() ? 0.0 : static_cast<double>(in.conv_bias[static_cast<size_t>(c)]);
      for (int64_t j = 0; j < s.conv_kernel; ++j) {
        const int64_t row = t - (s.conv_kernel - 1) + j;
        if (row >= 0) sum += in.conv[static_cast<size_t>(c * s.conv_kernel + j)] * in.xbc.at(row, c);
      }
      u[static_cast<size_t>(c)] = silu(sum);
    }
    for (int64_t h = 0; h < s.heads; ++h) {
      const size_t at = static_cast<size_t>(h);
      const double* b = u.data() + s.width() + h / together * s.state;
      const double* c = b + s.groups * s.state;
      const double step = std::clamp(softplus(in.dt.at(t, h) + in.dt_bias[at]), in.least_step, in.most_step);
      const double decay = std::exp(-std::exp(static_cast<double>(in.a_log[at])) * step);
      for (int64_t i = 0; i < s.head_dim; ++i) {
        const double x = u[static_cast<size_t>(h * s.head_dim + i)];
        double y = in.d[at] * x;
        for (int64_t n = 0; n < s.state; ++n) {
          double& cell = state[at].at(n, i);
          cell = decay * cell + step * x * b[n];
          y += c[n] * cell;
        }
        out.at(t, h * s.head_dim + i) = y * silu(in.z.at(t, h * s.head_dim + i));
      }
    }
    for (int64_t g = 0; g < s.groups; ++g) {
      double squares = 0;
      for (int64_t i = g * wide; i < (g + 1) * wide; ++i) squares += out.at(t, i) * out.at(t, i);
      const double factor = 1.0 / std::sqrt(squares / static_cast<double>(wide) + in.eps);
      for (int64_t i = g * wide; i < (g + 1) * wide; ++i) out.at(t, i) *= factor * in.norm[static_cast<size_t>(i)];
    }
  }
  return out;
}

}  // namespace tensorfold
