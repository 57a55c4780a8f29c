// N-grams whose rows are known, for tests of every backend's lookup.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops/ops.h"
#include "kernels/ops/stream_ops.h"

namespace tensorfold {

/// 2-grams with two heads and 3-grams with two, of tables whose rows hold their own numbers.
struct Ngrams {
  static constexpr int64_t kCols = 8;
  NgramHeads heads = {
      .heads_per_size = 2, .end_token = 3, .multipliers = {101, 7919, 104729}, .table_rows = {97, 101, 103, 107}};
  std::vector<std::unique_ptr<Weight>> tables;  // of heads 1, 2 and 3

  explicit Ngrams(Ops& ops) {
    for (size_t head = 1; head < heads.table_rows.size(); ++head) {
      const int64_t rows = heads.table_rows[head];
      std::vector<float> values(static_cast<size_t>(rows * kCols));
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i / kCols);
      MatrixSource source;
      source.rows = rows;
      source.cols = kCols;
      source.data = reinterpret_cast<const std::byte*>(values.data());
      source.row_bytes = kCols * static_cast<int64_t>(sizeof(float));
      tables.push_back(ops.pack({&source, 1}));
    }
  }
  /// What a row of a line must find: the numbers of its rows.
  std::vector<float> want(const std::vector<int32_t>& tokens, int64_t row) const {
    std::vector<float> out;
    for (size_t head = 1; head < heads.table_rows.size(); ++head) {
      uint64_t mixed = static_cast<uint64_t>(tokens[static_cast<size_t>(row)]) * 101;
      bool ended = false;
      for (int64_t back = 1; back <= (head < 2 ? 1 : 2); ++back) {
        const int32_t token = row < back ? -1 : tokens[static_cast<size_t>(row - back)];
        ended = ended || token < 0 || token == 3;
        mixed ^= static_cast<uint64_t>(ended ? 3 : token) * (back == 1 ? 7919u : 104729u);
      }
      out.insert(out.end(), kCols, static_cast<float>(mixed % static_cast<uint64_t>(heads.table_rows[head])));
    }
    return out;
  }
};

}  // namespace tensorfold
