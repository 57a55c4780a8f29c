#include "kernels/reference/reference_streams.h"

#include <algorithm>
#include <cmath>

namespace tensorfold {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

RefMatrix row_of(const RefMatrix& m, int64_t r) {
  RefMatrix row(1, m.cols);
  for (int64_t i = 0; i < m.cols; ++i) row.at(0, i) = m.at(r, i);
  return row;
}

}  // namespace

RefMatrix ref_mix_streams(const RefMatrix& x, const RefMatrix& gate, int64_t count) {
  RefMatrix out(x.rows, x.cols / count);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t i = 0; i < x.cols; ++i) {
      out.at(r, i % out.cols) += sigmoid(gate.at(r, i)) * x.at(r, i) / static_cast<double>(count);
    }
  }
  return out;
}

RefMatrix ref_inject_streams(const RefMatrix& x, const RefMatrix& inject, const RefMatrix& y, int64_t count) {
  RefMatrix out = x;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t i = 0; i < x.cols; ++i) {
      out.at(r, i) += 2 * sigmoid(inject.at(r, i / y.cols) / static_cast<double>(count)) * y.at(r, i % y.cols);
    }
  }
  return out;
}

RefMatrix ref_gate_streams(const RefMatrix& key, const RefMatrix& query, const RefMatrix& value, int64_t count) {
  RefMatrix out(key.rows, key.cols);
  const int64_t width = value.cols;
  for (int64_t r = 0; r < key.rows; ++r) {
    for (int64_t s = 0; s < count; ++s) {
      double score = 0;
      for (int64_t i = s * width; i < (s + 1) * width; ++i) score += key.at(r, i) * query.at(r, i);
      score /= std::sqrt(static_cast<double>(width));
      const double bent = score == 0 ? 0.0 : std::copysign(std::sqrt(std::max(std::abs(score), 1e-6)), score);
      for (int64_t i = 0; i < width; ++i) out.at(r, s * width + i) = sigmoid(bent) * value.at(r, i);
    }
  }
  return out;
}

RefMatrix ref_short_conv(const ShortConvShape& shape, const RefMatrix& x, std::span<const float> conv) {
  RefMatrix out(x.rows, x.cols);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < shape.taps; ++j) {
        const int64_t row = r - (shape.taps - 1 - j) * shape.dilation;
        if (row >= 0) sum += conv[static_cast<size_t>(c * shape.taps + j)] * x.at(row, c);
      }
      out.at(r, c) = sum * sigmoid(sum);
    }
  }
  return out;
}

RefMatrix ref_pool_means(const RefMatrix& keys, int64_t tokens, std::span<const float> norm, double eps,
                         std::span<const float> inv_freq) {
  RefMatrix means(keys.rows / tokens, keys.cols);
  std::vector<int64_t> positions;
  for (int64_t w = 0; w < means.rows; ++w) {
    positions.push_back(w * tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < keys.cols; ++i) {
        means.at(w, i) += keys.at(w * tokens + t, i) / static_cast<double>(tokens);
      }
    }
  }
  return ref_rope(ref_rms_norm(means, 1, norm, eps), 1, positions, inv_freq, 1.0);
}

std::vector<std::vector<int64_t>> ref_select_windows(const RefMatrix& q, const RefMatrix& pooled, int64_t heads,
                                                     int64_t tokens, int64_t most, double* margin) {
  std::vector<std::vector<int64_t>> out;
  *margin = HUGE_VAL;
  for (int64_t r = 0; r < q.rows; ++r) {
    const int64_t windows = (r + 1) / tokens;
    std::vector<double> score(static_cast<size_t>(windows));
    std::vector<int64_t> order;
    for (int64_t w = 0; w < windows; ++w) {
      order.push_back(w);
      for (int64_t h = 0; h < heads; ++h) {
        double product = 0;
        for (int64_t i = 0; i < pooled.cols; ++i) product += q.at(r, h * pooled.cols + i) * pooled.at(w, i);
        score[static_cast<size_t>(w)] += std::max(product, 0.0);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return score[static_cast<size_t>(a)] > score[static_cast<size_t>(b)];
    });
    if (windows > most) {
      const double last = score[static_cast<size_t>(order[static_cast<size_t>(most - 1)])];
      const double next = score[static_cast<size_t>(order[static_cast<size_t>(most)])];
      if (last > 0) *margin = std::min(*margin, last - next);  // exact zeros tie in every precision
      order.resize(static_cast<size_t>(most));
    }
    std::sort(order.begin(), order.end());
    out.push_back(order);
  }
  return out;
}

RefMatrix ref_sparse_attention(const RefMatrix& q, const RefMatrix& keys, const RefMatrix& values, int64_t heads,
                               int64_t head_dim, std::span<const int32_t> kv_head_of,
                               const std::vector<std::vector<int64_t>>& windows, int64_t tokens, double scale) {
  RefMatrix out(q.rows, q.cols);
  for (int64_t r = 0; r < q.rows; ++r) {
    std::vector<int64_t> list;
    for (const int64_t w : windows[static_cast<size_t>(r)]) {
      for (int64_t t = 0; t < tokens; ++t) list.push_back(w * tokens + t);
    }
    for (int64_t p = (r + 1) / tokens * tokens; p <= r; ++p) list.push_back(p);
    RefMatrix k(static_cast<int64_t>(list.size()), keys.cols), v = k;
    for (size_t i = 0; i < list.size(); ++i) {
      for (int64_t c = 0; c < keys.cols; ++c) {
        k.at(static_cast<int64_t>(i), c) = keys.at(list[i], c);
        v.at(static_cast<int64_t>(i), c) = values.at(list[i], c);
      }
    }
    const RefMatrix row =
        ref_attention(row_of(q, r), k, v, heads, head_dim, kv_head_of, static_cast<int64_t>(list.size()) - 1, scale);
    for (int64_t c = 0; c < q.cols; ++c) out.at(r, c) = row.at(0, c);
  }
  return out;
}

}  // namespace tensorfold
