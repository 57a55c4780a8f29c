// Candidates against a plain sort on the host: the answer is exact, so every bit must agree.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/cuda/candidates_key.h"
#include "kernels/cuda/rowwise.h"
#include "kernels/numerics/gumbel.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

bool better(const Candidate& a, const Candidate& b) {
  const bool a_nan = std::isnan(a.logit), b_nan = std::isnan(b.logit);
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a.logit != b.logit) return a.logit > b.logit;
  return a.id < b.id;
}

std::vector<Candidate> sorted(const float* row, int64_t cols, int32_t first_id, int64_t n) {
  std::vector<Candidate> all;
  for (int64_t i = 0; i < cols; ++i) all.push_back({row[i], static_cast<int32_t>(first_id + i)});
  const size_t keep = static_cast<size_t>(std::min(n, cols));
  std::partial_sort(all.begin(), all.begin() + static_cast<int64_t>(keep), all.end(), better);
  all.resize(keep);
  return all;
}

// Runs rows of `logits` [rows, cols] laid out `stride` apart from an address `offset` floats in.
void check(const std::string& what, const std::vector<float>& logits, int64_t rows, int64_t cols, int64_t n,
           int64_t stride, int64_t offset = 0) {
  const int32_t first_id = 1000;
  std::vector<float> all(static_cast<size_t>(rows * stride + offset), kInf);  // what lies beside must not be seen
  for (int64_t r = 0; r < rows; ++r) {
    std::copy(logits.begin() + r * cols, logits.begin() + (r + 1) * cols, all.begin() + offset + r * stride);
  }
  DeviceArray<float> memory(all);
  const size_t workspace_bytes = static_cast<size_t>(cuda_candidates_workspace(rows, cols, n));
  DeviceArray<uint8_t> workspace(workspace_bytes + 64);
  workspace.poison();
  DeviceArray<Candidate> out(static_cast<size_t>(rows * n) + 8);
  out.poison();
  cuda_candidates(nullptr, {memory.data() + offset, rows, cols, stride}, first_id, n, workspace.data(), out.data());
  const std::vector<Candidate> got = out.get();
  ASSERT_EQ(cuda_failure(), "") << what;
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<Candidate> want = sorted(logits.data() + r * cols, cols, first_id, n);
    for (int64_t i = 0; i < n; ++i) {
      const Candidate& g = got[static_cast<size_t>(r * n + i)];
      if (i >= static_cast<int64_t>(want.size())) {
        ASSERT_EQ(g.id, -1) << what << ": row " << r << " place " << i << " should be empty";
        continue;
      }
      const Candidate& w = want[static_cast<size_t>(i)];
      ASSERT_TRUE(g.id == w.id && bits_of(g.logit) == bits_of(w.logit))
          << what << ": row " << r << " of " << rows << " place " << i << " of " << n << " is id " << g.id << " logit "
          << g.logit << ", should be id " << w.id << " logit " << w.logit;
    }
  }
  for (size_t i = static_cast<size_t>(rows * n); i < got.size(); ++i) {
    ASSERT_EQ(got[i].id, -1) << what << ": wrote beyond its results";  // 0xffffffff
    ASSERT_EQ(bits_of(got[i].logit), 0xffffffffu) << what << ": wrote beyond its results";
  }
  const std::vector<uint8_t> work = workspace.get();
  for (size_t i = workspace_bytes; i < work.size(); ++i) ASSERT_EQ(work[i], 0xff) << what << ": wrote beyond workspace";
}

// The integer order is the order of candidates, for all pairs of awkward values. Needs no GPU.
TEST(CandidateKey, IsTheOrder) {
  std::vector<float> values = {0.0f, -0.0f, 1e-45f, -1e-45f, 1.0f, -1.0f, 3e38f, -3e38f, kInf, -kInf, kNan, -kNan};
  for (float v : random_floats(40, 1)) values.push_back(v);
  for (int32_t i = 0; i < static_cast<int32_t>(values.size()); ++i) {
    EXPECT_EQ(candidate_column(candidate_key(bits_of(values[static_cast<size_t>(i)]), i)), i);
    for (int32_t j = 0; j < static_cast<int32_t>(values.size()); ++j) {
      const float a = values[static_cast<size_t>(i)], b = values[static_cast<size_t>(j)];
      EXPECT_EQ(candidate_key(bits_of(a), i) > candidate_key(bits_of(b), j), better({a, i}, {b, j}))
          << a << " at " << i << " and " << b << " at " << j;
    }
  }
  EXPECT_NE(candidate_key(bits_of(kNan), 0x7fffffff), 0u);
}

// All counts around the borders of the kernels, on rows that end inside a part, aligned and not.
TEST(CudaCandidates, CountsAndShapes) {
  TF_NEED_GPU();
  for (int64_t cols : {1, 5, 63, 2048, 2049, 31040, 40003}) {
    for (int64_t n : {1, 2, 8, 20, 63, 64, 65, 100}) {
      const std::string what = "cols " + std::to_string(cols) + " n " + std::to_string(n);
      const std::vector<float> logits = random_floats(static_cast<size_t>(3 * cols), static_cast<uint32_t>(cols + n));
      check(what, logits, 3, cols, n, (cols + 7) / 4 * 4);
      if (cols < 3000) check(what + ", odd addresses", logits, 3, cols, n, cols + 1, 1);
    }
  }
}

// The true size, and the largest count.
TEST(CudaCandidates, WholeVocabulary) {
  TF_NEED_GPU();
  const int64_t cols = 248320;
  for (int64_t n : {1, 40, 64, 4096}) {
    const std::vector<float> logits = random_floats(static_cast<size_t>(2 * cols), static_cast<uint32_t>(n));
    check("n " + std::to_string(n), logits, 2, cols, n, cols);
  }
}

// Ties, sorted rows, few distinct values, signed zeros, infinities and NaNs: what a bound or a histogram could trip on.
TEST(CudaCandidates, AwkwardRows) {
  TF_NEED_GPU();
  const int64_t cols = 9000;
  std::vector<std::pair<std::string, std::vector<float>>> rows;
  auto add = [&](const std::string& name, auto value) {
    std::vector<float> row;
    for (int64_t i = 0; i < cols; ++i) row.push_back(value(i));
    rows.push_back({name, row});
  };
  const std::vector<float> noise = random_floats(static_cast<size_t>(cols), 3);
  add("all equal", [](int64_t) { return 1.5f; });
  add("rising", [](int64_t i) { return static_cast<float>(i); });
  add("falling", [](int64_t i) { return static_cast<float>(-i); });
  add("zeros of both signs", [](int64_t i) { return i % 3 == 0 ? 0.0f : -0.0f; });
  add("three values", [](int64_t i) { return static_cast<float>(i * 7 % 3); });
  add("all NaN", [](int64_t) { return kNan; });
  add("all minus infinity", [](int64_t) { return -kInf; });
  add("few numbers among NaN", [&](int64_t i) { return i % 500 == 499 ? noise[static_cast<size_t>(i)] : kNan; });
  add("masked", [&](int64_t i) { return i % 300 == 7 ? noise[static_cast<size_t>(i)] : -kInf; });
  add("infinities", [&](int64_t i) { return i % 1000 == 3 ? kInf : noise[static_cast<size_t>(i)]; });
  add("best in one thread", [](int64_t i) { return i / 4 % 256 == 17 ? 10.0f + static_cast<float>(i % 4) : 0.1f; });
  add("one last bit apart", [](int64_t i) {
    const uint32_t bits = 0x3f800000u + static_cast<uint32_t>(i * 7919 % 9000);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  });
  for (int64_t n : {1, 7, 64, 65, 1000, 4096}) {
    std::vector<float> all;
    for (const auto& [name, row] : rows) {
      all.insert(all.end(), row.begin(), row.end());
      check(name + ", n " + std::to_string(n), row, 1, cols, n, cols);
    }
    check("all rows together, n " + std::to_string(n), all, static_cast<int64_t>(rows.size()), cols, n, cols);
  }
}

// Draws choose the host's tokens, for a true vocabulary, hot and cold rows, ties, rows that draw
// nothing; a logit that is not finite is what comes back, the first of the row.
TEST(CudaDraws, EqualTheHosts) {
  TF_NEED_GPU();
  for (const int64_t cols : {1, 300, 2049, 248320}) {
    const int64_t rows = 6, stride = cols + 3;
    std::vector<float> logits = random_floats(static_cast<size_t>(rows * stride), static_cast<uint32_t>(cols), 3.0f);
    for (int64_t i = 0; i < cols; ++i) logits[static_cast<size_t>(2 * stride + i)] = static_cast<float>(i % 3);
    logits[static_cast<size_t>(4 * stride + cols - 1)] = kInf;
    logits[static_cast<size_t>(4 * stride + cols / 2)] = kNan;
    std::vector<DrawKey> keys;
    for (int64_t r = 0; r < rows; ++r) {
      keys.push_back({mix64(static_cast<uint64_t>(r + cols)), r == 3 ? 0.0 : 0.01 + 0.7 * static_cast<double>(r)});
    }
    DeviceArray<float> memory(logits);
    DeviceArray<DrawKey> device_keys(keys);
    DeviceArray<uint8_t> workspace(static_cast<size_t>(cuda_draws_workspace(rows, cols)));
    workspace.poison();
    DeviceArray<Candidate> out(static_cast<size_t>(rows));
    out.poison();
    cuda_draws(nullptr, {memory.data(), rows, cols, stride}, 500, device_keys.data(), workspace.data(), out.data());
    const std::vector<Candidate> got = out.get();
    ASSERT_EQ(cuda_failure(), "");
    for (int64_t r = 0; r < rows; ++r) {
      KeyedDraw want;
      for (int64_t i = 0; r != 3 && i < cols; ++i) {
        const float logit = logits[static_cast<size_t>(r * stride + i)];
        if (!std::isfinite(logit)) {
          want = {0.0, static_cast<double>(logit), static_cast<uint32_t>(500 + i), true};
          break;
        }
        const DrawKey& key = keys[static_cast<size_t>(r)];
        want.offer(key.key, static_cast<double>(logit) / key.temperature, static_cast<double>(logit),
                   static_cast<uint32_t>(500 + i));
      }
      const Candidate& have = got[static_cast<size_t>(r)];
      EXPECT_EQ(have.id, want.any ? static_cast<int32_t>(want.id) : -1) << cols << " columns, row " << r;
      if (!want.any || !std::isfinite(want.logit)) continue;
      EXPECT_EQ(static_cast<double>(have.logit), want.logit) << r;
    }
  }
}

// Nothing asked, nothing done; no columns, all places empty.
TEST(CudaCandidates, Empty) {
  TF_NEED_GPU();
  check("no columns", {}, 2, 0, 3, 8);
  check("no columns, many", {}, 2, 0, 200, 8);
  check("none wanted", random_floats(20, 1), 2, 10, 0, 10);
}

}  // namespace
}  // namespace tensorfold
