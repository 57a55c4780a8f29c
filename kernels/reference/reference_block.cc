#include "kernels/reference/reference_block.h"

#include <algorithm>
#include <cmath>

namespace tensorfold {

RefMatrix ref_block_conv(const RefMatrix& x, const RefMatrix& dynamic, std::span<const float> base, int64_t taps,
                         int64_t group) {
  RefMatrix out(x.rows, x.cols);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      for (int64_t t = 0; t < taps && t <= r; ++t) {
        const double kernel = static_cast<double>(base[static_cast<size_t>(t * x.cols + c)]) +
                              dynamic.at(r, t * (x.cols / group) + c / group);
        out.at(r, c) += x.at(r - t, c) * kernel;
      }
    }
  }
  return out;
}

RefMatrix ref_block_attention(const RefMatrix& q, const RefMatrix& k, const RefMatrix& v, const RefMatrix& cached_k,
                              const RefMatrix& cached_v, std::span<const int32_t> kv_head_of, int64_t head_dim,
                              double scale, int64_t window) {
  const int64_t before = cached_k.rows;
  RefMatrix out(q.rows, q.cols);
  for (int64_t r = 0; r < q.rows; ++r) {
    const int64_t from = window > 0 ? std::max<int64_t>(0, before + r - window + 1) : 0;
    for (size_t h = 0; h < kv_head_of.size(); ++h) {
      const int64_t head = static_cast<int64_t>(h) * head_dim, kv = kv_head_of[h] * head_dim;
      const auto key = [&](int64_t p, int64_t d) {
        return p < before ? cached_k.at(p, kv + d) : k.at(p - before, kv + d);
      };
      std::vector<double> score;
      for (int64_t p = from; p < before + k.rows; ++p) {
        double sum = 0;
        for (int64_t d = 0; d < head_dim; ++d) sum += q.at(r, head + d) * key(p, d);
        score.push_back(sum * scale);
      }
      const double most = *std::max_element(score.begin(), score.end());
      double total = 0;
      for (double& s : score) total += s = std::exp(s - most);
      for (int64_t p = from; p < before + k.rows; ++p) {
        const double weight = score[static_cast<size_t>(p - from)] / total;
        for (int64_t d = 0; d < head_dim; ++d) {
          out.at(r, head + d) += weight * (p < before ? cached_v.at(p, kv + d) : v.at(p - before, kv + d));
        }
      }
    }
  }
  return out;
}

}  // namespace tensorfold
