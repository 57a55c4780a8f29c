// For tests of whole operations on a GPU: a backend, tensors, and passes of a few groups of rows.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/reference/reference.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {

inline std::unique_ptr<Ops> gpu_ops(const std::string& kv_format = "bf16") {
  CudaOptions options;
  options.kv_format = kv_format;
  std::string error;
  std::unique_ptr<Ops> ops = make_cuda_ops(options, &error);
  EXPECT_NE(ops, nullptr) << error;
  return ops;
}

inline Tensor put(Ops& ops, int64_t rows, int64_t cols, const std::vector<float>& values, bool rounded = false) {
  const Tensor tensor = rounded ? ops.scratch_input(rows, cols) : ops.scratch(rows, cols);
  ops.upload(values, tensor);
  return tensor;
}

inline std::vector<float> get(Ops& ops, Tensor t) {
  std::vector<float> host(static_cast<size_t>(t.rows * t.cols));
  ops.download(t, host);
  return host;
}

inline std::vector<float> part_of(const std::vector<float>& all, int64_t first, int64_t rows, int64_t cols) {
  return {all.begin() + first * cols, all.begin() + (first + rows) * cols};
}

inline RefMatrix ref_of(int64_t rows, int64_t cols, const std::vector<float>& values) {
  RefMatrix m(rows, cols);
  m.v.assign(values.begin(), values.end());
  return m;
}

/// Largest |a - b| / (|b| + floor); a NaN is the worst.
inline double error_of(const std::vector<float>& a, const RefMatrix& b, double floor) {
  double worst = a.size() == b.v.size() ? 0.0 : HUGE_VAL;
  for (size_t i = 0; i < a.size() && i < b.v.size(); ++i) {
    const double error = std::abs(a[i] - b.v[i]) / (std::abs(b.v[i]) + floor);
    worst = error <= worst ? worst : error;
  }
  return worst;
}

inline float rounded_to_bf16(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) { return same_bits<float>(a, b); }

/// One sequence's rows in a pass.
struct Piece {
  int64_t first = 0;  // position
  int64_t rows = 0;
  int64_t accepted = 0;
  int64_t certain = 0;
  std::vector<int32_t> pages = {};
  std::vector<int32_t> tokens = {};          // zeros if there are none
  std::vector<RecurrentState*> states = {};  // one a recurrent layer
};

/// Runs `body` on the pieces' rows, one after another; kept: as launches that are repeated, with padding. `input` gives
/// the rows that the body reads.
inline std::vector<float> run_pieces(Ops& ops, const std::vector<Piece>& pieces, const std::vector<float>& input,
                                     int64_t cols, bool kept, const Ops::RunBody& body) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  std::vector<std::vector<RecurrentState*>> recurrent(pieces[0].states.size());
  for (const Piece& piece : pieces) {
    groups.push_back(
        {static_cast<int64_t>(tokens.size()), piece.rows, piece.first, piece.accepted, piece.certain, piece.pages});
    for (int64_t i = 0; i < piece.rows; ++i) {
      tokens.push_back(piece.tokens.empty() ? 0 : piece.tokens[static_cast<size_t>(i)]);
      positions.push_back(piece.first + i);
    }
    for (size_t layer = 0; layer < recurrent.size(); ++layer) recurrent[layer].push_back(piece.states[layer]);
  }
  RowBatch batch;
  batch.tokens = tokens;
  batch.positions = positions;
  batch.groups = groups;
  batch.recurrent = recurrent;
  ops.begin_pass();
  const Tensor given = put(ops, batch.rows(), cols, input);
  const Tensor result = ops.run(RunKind::kForward, batch, given, kept, body);
  std::vector<float> out = get(ops, result.row_range(0, batch.rows()));
  EXPECT_EQ(ops.finish_pass(), "");
  return out;
}

/// Pages for so many tokens of the sequence `which` of `sequences`, far from ascending.
inline std::vector<int32_t> pages_for(int64_t tokens, int64_t which, int64_t sequences) {
  const int64_t count = (tokens + kPageTokens - 1) / kPageTokens;
  std::vector<int32_t> pages;
  for (int64_t i = 0; i < count; ++i) pages.push_back(static_cast<int32_t>((count - 1 - i) * sequences + which));
  return pages;
}

}  // namespace tensorfold
