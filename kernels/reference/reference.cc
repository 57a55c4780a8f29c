#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tensorfold {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }

// Value `index` of an unquantised array.
float plain_value(const std::byte* data, int64_t index, WeightFormat format) {
  if (format == WeightFormat::kF32) {
    float x;
    std::memcpy(&x, data + 4 * index, 4);
    return x;
  }
  uint16_t half;
  std::memcpy(&half, data + 2 * index, 2);
  if (format == WeightFormat::kBf16) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  const int sign = half >> 15, exponent = half >> 10 & 31, mantissa = half & 1023;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) magnitude = mantissa == 0 ? HUGE_VAL : std::nan("");
  return static_cast<float>(sign != 0 ? -magnitude : magnitude);
}

// Code `index` of a row, bit by bit from the least significant one.
int affine_code(const std::byte* row, int64_t index, int bits) {
  int code = 0;
  for (int b = 0; b < bits; ++b) {
    const int64_t at = index * bits + b;
    if ((row[at / 8] & (std::byte{1} << (at % 8))) != std::byte{0}) code |= 1 << b;
  }
  return code;
}

// A number of 1 sign bit, `exponent` bits and the rest mantissa, without infinities.
double small_float(int code, int exponent_bits, int mantissa_bits, int bias) {
  const int mantissa = code & ((1 << mantissa_bits) - 1), exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return (code >> (exponent_bits + mantissa_bits) & 1) != 0 ? -magnitude : magnitude;
}

double e4m3_value(std::byte code) {
  const int bits = std::to_integer<int>(code);
  return (bits & 127) == 127 ? std::nan("") : small_float(bits, 4, 3, 7);
}

// FP8 and FP4: value times scale is exact in double precision. The third factor's rounding there is finer than fp32's
// can notice (dequantise.h), so the value is rounded once.
float small_float_at(const MatrixSource& s, int64_t row, int64_t col) {
  const int64_t r = s.first_row + row, c = s.first_col + col;
  const std::byte* codes = s.data + r * s.row_bytes;
  const double value = s.format == WeightFormat::kE4m3
                           ? e4m3_value(codes[c])
                           : small_float(std::to_integer<int>(codes[c / 2]) >> (c % 2 * 4) & 15, 2, 1, 1);
  const std::byte* scales = s.scales + r / s.block_rows * s.scale_row_bytes;
  const int64_t at = c / s.block_cols;
  double scale = 0;
  if (s.scale_format == WeightFormat::kE4m3) {
    scale = e4m3_value(scales[at]);
  } else if (s.scale_format == WeightFormat::kE8m0) {
    const int code = std::to_integer<int>(scales[at]);
    scale = code == 255 ? std::nan("") : std::ldexp(1.0, code - 127);
  } else {
    scale = static_cast<double>(plain_value(scales, at, s.scale_format));
  }
  const double global = static_cast<double>(s.global_scale), product = value * scale;
  return static_cast<float>(s.divide_by_global ? product / global : product * global);
}

}  // namespace

RefMatrix ref_dequantise(const MatrixSource& s) {
  RefMatrix out(s.rows, s.cols);
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t c = 0; c < s.cols; ++c) {
      if (is_plain(s.format)) {
        out.at(r, c) = plain_value(s.data + r * s.row_bytes, c, s.format);
        continue;
      }
      if (s.format == WeightFormat::kE4m3 || s.format == WeightFormat::kE2m1) {
        out.at(r, c) = static_cast<double>(small_float_at(s, r, c));
        continue;
      }
      const float scale = plain_value(s.scales + r * s.scale_row_bytes, c / s.group, s.scale_format);
      const float bias = plain_value(s.biases + r * s.scale_row_bytes, c / s.group, s.scale_format);
      out.at(r, c) = std::fma(scale, static_cast<float>(affine_code(s.data + r * s.row_bytes, c, s.bits)), bias);
    }
  }
  return out;
}

RefMatrix ref_matmul(const RefMatrix& w, const RefMatrix& x, RefMatrix* magnitude) {
  RefMatrix out(x.rows, w.rows);
  if (magnitude != nullptr) *magnitude = RefMatrix(x.rows, w.rows);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t n = 0; n < w.rows; ++n) {
      for (int64_t k = 0; k < w.cols; ++k) {
        out.at(r, n) += w.at(n, k) * x.at(r, k);
        if (magnitude != nullptr) magnitude->at(r, n) += std::abs(w.at(n, k) * x.at(r, k));
      }
    }
  }
  return out;
}

RefMatrix ref_rms_norm(const RefMatrix& x, int64_t heads, std::span<const float> weight, double eps) {
  RefMatrix out(x.rows, x.cols);
  const int64_t dim = x.cols / heads;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      double squares = 0;
      for (int64_t i = 0; i < dim; ++i) squares += x.at(r, h * dim + i) * x.at(r, h * dim + i);
      const double factor = 1.0 / std::sqrt(squares / static_cast<double>(dim) + eps);
      for (int64_t i = 0; i < dim; ++i)
        out.at(r, h * dim + i) = x.at(r, h * dim + i) * factor * weight[static_cast<size_t>(i)];
    }
  }
  return out;
}

RefMatrix ref_silu_mul(const RefMatrix& gate_up) {
  const int64_t n = gate_up.cols / 2;
  RefMatrix out(gate_up.rows, n);
  for (int64_t r = 0; r < out.rows; ++r) {
    for (int64_t i = 0; i < n; ++i) out.at(r, i) = silu(gate_up.at(r, i)) * gate_up.at(r, n + i);
  }
  return out;
}

RefMatrix ref_sigmoid_mul(const RefMatrix& x, const RefMatrix& gate) {
  RefMatrix out = x;
  for (size_t i = 0; i < out.v.size(); ++i) out.v[i] *= sigmoid(gate.v[i]);
  return out;
}

RefRoutes ref_route(const RefMatrix& logits, const RefMatrix* shared_gate, RouterScore score,
                    std::span<const float> bias, int64_t chosen, bool renormalise, double scale, bool shared_always) {
  const bool shared = shared_gate != nullptr || shared_always;
  RefRoutes routes{{}, RefMatrix(logits.rows, chosen + (shared ? 1 : 0))};
  for (int64_t r = 0; r < logits.rows; ++r) {
    double total = 0;
    for (int64_t e = 0; e < logits.cols; ++e) total += std::exp(logits.at(r, e));
    const auto score_of = [&](int64_t e) {
      return score == RouterScore::kSigmoid ? sigmoid(logits.at(r, e)) : std::exp(logits.at(r, e)) / total;
    };
    const auto choice = [&](int64_t e) {
      return bias.empty() ? logits.at(r, e) : score_of(e) + bias[static_cast<size_t>(e)];
    };
    std::vector<int64_t> order(static_cast<size_t>(logits.cols));
    for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int64_t>(e);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return choice(a) > choice(b); });
    order.resize(static_cast<size_t>(chosen));
    double sum = 0;
    for (int64_t e : order) sum += score_of(e);
    for (int64_t j = 0; j < chosen; ++j) {
      routes.weights.at(r, j) = score_of(order[static_cast<size_t>(j)]) / (renormalise ? sum : 1.0) * scale;
    }
    if (shared) {
      order.push_back(logits.cols);
      routes.weights.at(r, chosen) = shared_gate != nullptr ? sigmoid(shared_gate->at(r, 0)) : 1.0;
    }
    routes.ids.push_back(order);
  }
  return routes;
}

RefMatrix ref_experts(std::span<const RefExpert> experts, const RefMatrix& x, const RefRoutes& routes) {
  RefMatrix out(x.rows, x.cols);
  for (int64_t r = 0; r < x.rows; ++r) {
    RefMatrix row(1, x.cols);
    for (int64_t i = 0; i < x.cols; ++i) row.at(0, i) = x.at(r, i);
    const std::vector<int64_t>& ids = routes.ids[static_cast<size_t>(r)];
    for (size_t j = 0; j < ids.size(); ++j) {
      const RefExpert& expert = experts[static_cast<size_t>(ids[j])];
      const RefMatrix gate = ref_matmul(expert.gate, row), up = ref_matmul(expert.up, row);
      RefMatrix inner(1, up.cols);
      for (int64_t i = 0; i < up.cols; ++i) {
        const double positive = std::max(up.at(0, i), 0.0);
        inner.at(0, i) = expert.gate.rows == 0 ? positive * positive : silu(gate.at(0, i)) * up.at(0, i);
      }
      const RefMatrix y = ref_matmul(expert.down, inner);
      for (int64_t i = 0; i < x.cols; ++i) {
        out.at(r, i) += routes.weights.at(r, static_cast<int64_t>(j)) * y.at(0, i);
      }
    }
  }
  return out;
}

RefMatrix ref_rope(const RefMatrix& x, int64_t heads, std::span<const int64_t> positions,
                   std::span<const float> inv_freq, double attention_factor) {
  RefMatrix out = x;
  const int64_t dim = x.cols / heads, pairs = static_cast<int64_t>(inv_freq.size());
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(positions[static_cast<size_t>(r)]) * inv_freq[static_cast<size_t>(i)];
      const double c = std::cos(angle) * attention_factor, s = std::sin(angle) * attention_factor;
      for (int64_t h = 0; h < heads; ++h) {
        const double a = x.at(r, h * dim + i), b = x.at(r, h * dim + pairs + i);
        out.at(r, h * dim + i) = a * c - b * s;
        out.at(r, h * dim + pairs + i) = b * c + a * s;
      }
    }
  }
  return out;
}

RefMatrix ref_attention(const RefMatrix& q, const RefMatrix& keys, const RefMatrix& values, int64_t heads,
                        int64_t head_dim, std::span<const int32_t> kv_head_of, int64_t first_position, double scale) {
  RefMatrix out(q.rows, q.cols);
  for (int64_t r = 0; r < q.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = kv_head_of[static_cast<size_t>(h)] * head_dim, visible = first_position + r + 1;
      std::vector<double> score(static_cast<size_t>(visible));
      double largest = -HUGE_VAL, sum = 0;
      for (int64_t j = 0; j < visible; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < head_dim; ++d) dot += q.at(r, h * head_dim + d) * keys.at(j, kv + d);
        score[static_cast<size_t>(j)] = dot * scale;
        largest = std::max(largest, dot * scale);
      }
      for (double& s : score) sum += s = std::exp(s - largest);
      for (int64_t d = 0; d < head_dim; ++d) {
        double o = 0;
        for (int64_t j = 0; j < visible; ++j) o += score[static_cast<size_t>(j)] / sum * values.at(j, kv + d);
        out.at(r, h * head_dim + d) = o;
      }
    }
  }
  return out;
}

RefMatrix ref_delta_net(const RefDeltaInputs& in) {
  const DeltaNetShape& s = *in.shape;
  const int64_t rows = in.qkv.rows, channels = s.channels(), key_width = s.k_heads * s.dk;
  RefMatrix out(rows, s.v_heads * s.dv);
  std::vector<RefMatrix> state(static_cast<size_t>(s.v_heads), RefMatrix(s.dk, s.dv));
  for (int64_t t = 0; t < rows; ++t) {
    std::vector<double> u(static_cast<size_t>(channels));
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < s.conv_kernel; ++j) {
        const int64_t row = t - (s.conv_kernel - 1) + j;
        if (row >= 0) sum += in.conv[static_cast<size_t>(c * s.conv_kernel + j)] * in.qkv.at(row, c);
      }
      u[static_cast<size_t>(c)] = silu(sum);
    }
    const auto normalised = [&](int64_t first, double scale) {
      std::vector<double> x(u.begin() + first, u.begin() + first + s.dk);
      double squares = 0;
      for (double e : x) squares += e * e;
      for (double& e : x) e *= scale / std::sqrt(squares + 1e-6);
      return x;
    };
    for (int64_t h = 0; h < s.v_heads; ++h) {
      const int64_t kh = s.k_head_of[static_cast<size_t>(h)];
      const std::vector<double> q = normalised(kh * s.dk, 1.0 / std::sqrt(static_cast<double>(s.dk)));
      const std::vector<double> k = normalised(key_width + kh * s.dk, 1.0);
      const double beta = sigmoid(in.b.at(t, h));
      const double rate = std::exp(static_cast<double>(in.a_log[static_cast<size_t>(h)]));
      const auto decay = [&](int64_t i) {  // of key channel i
        const int64_t at = s.channel_decay ? h * s.dk + i : h;
        const double step = in.a.at(t, at) + in.dt_bias[static_cast<size_t>(at)];
        return std::exp(s.channel_decay ? in.decay_floor * sigmoid(rate * step) : -rate * softplus(step));
      };
      RefMatrix& matrix = state[static_cast<size_t>(h)];
      for (int64_t i = 0; i < s.dk; ++i) {
        const double g = decay(i);
        for (int64_t c = 0; c < s.dv; ++c) matrix.at(i, c) *= g;
      }
      RefMatrix y(1, s.dv);
      for (int64_t c = 0; c < s.dv; ++c) {
        double r = 0;
        for (int64_t i = 0; i < s.dk; ++i) r += k[static_cast<size_t>(i)] * matrix.at(i, c);
        const double d = (u[static_cast<size_t>(2 * key_width + h * s.dv + c)] - r) * beta;
        for (int64_t i = 0; i < s.dk; ++i) {
          matrix.at(i, c) += k[static_cast<size_t>(i)] * d;
          y.at(0, c) += q[static_cast<size_t>(i)] * matrix.at(i, c);
        }
      }
      const RefMatrix normed = ref_rms_norm(y, 1, in.norm, in.eps);
      for (int64_t c = 0; c < s.dv; ++c) {
        const double z = in.z.at(t, h * s.dv + c);
        out.at(t, h * s.dv + c) = normed.at(0, c) * (s.channel_decay ? sigmoid(z) : silu(z));
      }
    }
  }
  return out;
}

std::vector<std::vector<Candidate>> ref_top_candidates(const std::vector<std::vector<float>>& logits, int32_t first_id,
                                                       int64_t n) {
  std::vector<std::vector<Candidate>> rows;
  for (const std::vector<float>& row : logits) {
    std::vector<Candidate> all;
    for (size_t i = 0; i < row.size(); ++i) all.push_back({row[i], first_id + static_cast<int32_t>(i)});
    std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
      if (std::isnan(a.logit) || std::isnan(b.logit)) return !std::isnan(a.logit);
      return a.logit > b.logit;
    });
    all.resize(std::min(all.size(), static_cast<size_t>(n)));
    rows.push_back(std::move(all));
  }
  return rows;
}

}  // namespace tensorfold
