// Row-wise kernels against double precision on the host, and bit for bit against themselves in other company.
#include "kernels/cuda/rowwise.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "kernels/cuda/rowwise_norm.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr uint32_t kPoison = 0xffffffffu;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
uint16_t bf16_of(float x) {  // nearest even; not for NaN
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float of_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

// Device rows wider than their tensor, poisoned, so that writes beside it show.
struct Rows {
  Rows(int64_t rows, int64_t cols, int64_t stride, int64_t offset = 0)
      : rows(rows), cols(cols), stride(stride), offset(offset), memory(static_cast<size_t>(rows * stride + offset)) {
    memory.poison();
  }
  DeviceMatrix matrix() const { return {memory.data() + offset, rows, cols, stride}; }
  void put(const std::vector<float>& dense) {
    std::vector<float> all(memory.size(), float_of(kPoison));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) all[static_cast<size_t>(offset + r * stride + c)] = dense[r * cols + c];
    }
    memory.put(all);
  }
  // The tensor's values; complains about changes beside it.
  std::vector<float> get(const char* what) const {
    const std::vector<float> all = memory.get();
    std::vector<float> dense;
    std::vector<bool> inside(all.size());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const size_t at = static_cast<size_t>(offset + r * stride + c);
        dense.push_back(all[at]);
        inside[at] = true;
      }
    }
    for (size_t i = 0; i < all.size(); ++i) {
      if (!inside[i] && bits_of(all[i]) != kPoison) {
        ADD_FAILURE() << what << ": wrote " << all[i] << " outside, at float " << i << " (stride " << stride << ")";
        break;
      }
    }
    return dense;
  }
  int64_t rows, cols, stride, offset;
  DeviceArray<float> memory;
};

struct InputRows {
  InputRows(int64_t rows, int64_t cols, int64_t stride)
      : rows(rows), cols(cols), stride(stride), memory(static_cast<size_t>(rows * stride)) {
    memory.poison();
  }
  DeviceInput input() const { return {reinterpret_cast<__nv_bfloat16*>(memory.data()), rows, cols, stride}; }
  std::vector<uint16_t> get(const char* what) const {
    const std::vector<uint16_t> all = memory.get();
    std::vector<uint16_t> dense;
    bool outside = false;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < stride; ++c) {
        const uint16_t value = all[static_cast<size_t>(r * stride + c)];
        if (c < cols) {
          dense.push_back(value);
        } else {
          outside = outside || value != 0xffff;
        }
      }
    }
    EXPECT_FALSE(outside) << what << ": wrote beside its columns";
    return dense;
  }
  int64_t rows, cols, stride;
  DeviceArray<uint16_t> memory;
};

void expect_bits(const std::vector<float>& got, const std::vector<float>& want, int64_t cols, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  int shown = 0;
  for (size_t i = 0; i < got.size() && shown < 3; ++i) {
    if (bits_of(got[i]) == bits_of(want[i])) continue;
    ++shown;
    ADD_FAILURE() << what << ": row " << i / cols << " col " << i % cols << " is " << got[i] << " (" << std::hex
                  << bits_of(got[i]) << "), should be " << want[i] << " (" << bits_of(want[i]) << ")";
  }
}

void expect_near(const std::vector<float>& got, const std::vector<double>& want, double relative, double absolute,
                 int64_t cols, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  int shown = 0;
  for (size_t i = 0; i < got.size() && shown < 3; ++i) {
    const bool same = std::isnan(want[i])   ? std::isnan(got[i])
                      : std::isinf(want[i]) ? static_cast<double>(got[i]) == want[i]
                                            : std::abs(got[i] - want[i]) <= relative * std::abs(want[i]) + absolute;
    if (same) continue;
    ++shown;
    ADD_FAILURE() << what << ": row " << i / cols << " col " << i % cols << " is " << got[i] << ", should be "
                  << want[i];
  }
}

std::vector<double> norm_in_double(const std::vector<float>& x, int64_t dim, const std::vector<float>& weight,
                                   double eps) {
  std::vector<double> out;
  for (size_t first = 0; first < x.size(); first += static_cast<size_t>(dim)) {
    double sum = 0;
    for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(x[first + i]) * x[first + i];
    const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(dim) + eps);
    for (int64_t i = 0; i < dim; ++i) out.push_back(x[first + i] * inverse * weight[i]);
  }
  return out;
}

struct Plan {
  std::string name;
  int parts;
  std::vector<AddStep> steps;
};

std::vector<Plan> plans() {
  std::vector<Plan> all;
  for (int64_t slices : {1, 2, 4, 8}) {
    all.push_back(
        {"whole tree over " + std::to_string(slices), static_cast<int>(slices), fold_plan(slices, {0, slices})});
  }
  for (int64_t world : {2, 3, 5, 8}) {
    all.push_back({"nodes of world " + std::to_string(world), static_cast<int>(world_nodes(8, world).nodes.size()),
                   finish_plan(8, world)});
  }
  all.push_back({"a chain over 4", 4, {{0, 1}, {0, 2}, {0, 3}}});  // not the tree: must not be taken for it
  all.push_back({"nothing added", 2, {}});
  return all;
}

// Parts of a sum on the device.
struct Parts {
  Parts(int count, int64_t rows, int64_t cols, int64_t stride, uint32_t seed) {
    for (int i = 0; i < count; ++i) {
      values.push_back(random_floats(static_cast<size_t>(rows * cols), seed + static_cast<uint32_t>(i)));
      memory.push_back(std::make_unique<Rows>(rows, cols, stride));
      memory.back()->put(values.back());
    }
  }
  CudaTreeSum sum(const std::vector<AddStep>& steps) const {
    CudaTreeSum out;
    out.part_count = static_cast<int>(memory.size());
    out.part_stride = memory[0]->stride;
    for (int i = 0; i < out.part_count; ++i) out.parts[i] = memory[static_cast<size_t>(i)]->matrix().data;
    for (const AddStep& step : steps) out.steps[out.step_count++] = step;
    return out;
  }
  std::vector<std::vector<float>> folded(const std::vector<AddStep>& steps) const {
    std::vector<std::vector<float>> all = values;
    for (const AddStep& step : steps) {
      for (size_t i = 0; i < all[0].size(); ++i)
        all[static_cast<size_t>(step.dst)][i] += all[static_cast<size_t>(step.src)][i];
    }
    return all;
  }
  void expect_unchanged() const {
    for (size_t i = 0; i < memory.size(); ++i) {
      expect_bits(memory[i]->get("part"), values[i], memory[i]->cols, "part " + std::to_string(i) + " changed");
    }
  }
  std::vector<std::vector<float>> values;
  std::vector<std::unique_ptr<Rows>> memory;
};

void expect_no_failure() {
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cuda_failure(), "");
}

// The residual is the tree's sum bit for bit, the norm is right, parts stay as they were, nothing else is touched.
TEST(CudaSumNorm, MatchesTheTreeAndDoublePrecision) {
  TF_NEED_GPU();
  for (const Plan& plan : plans()) {
    for (int64_t hidden : {64, 72, 320, 5120}) {
      const std::string what = plan.name + ", hidden " + std::to_string(hidden);
      const int64_t rows = 3;
      Parts parts(plan.parts, rows, hidden, hidden + 8, 17);
      const std::vector<float> before = random_floats(static_cast<size_t>(rows * hidden), 5, 3.0f);
      const std::vector<float> weight = random_floats(static_cast<size_t>(hidden), 6);
      Rows residual(rows, hidden, hidden + 4), out_f(rows, hidden, hidden + 12);
      InputRows out_b(rows, hidden, hidden + 8);
      residual.put(before);
      DeviceArray<float> w(weight);
      cuda_sum_norm(nullptr, parts.sum(plan.steps), residual.matrix(), w.data(), 1e-6f, out_f.matrix(), out_b.input());
      expect_no_failure();

      std::vector<float> after = before;
      const std::vector<float> tree = parts.folded(plan.steps)[0];
      for (size_t i = 0; i < after.size(); ++i) after[i] += tree[i];
      expect_bits(residual.get("residual"), after, hidden, what + ", residual");
      const std::vector<float> got = out_f.get("out_f");
      expect_near(got, norm_in_double(after, hidden, weight, 1e-6), 2e-6, 1e-30, hidden, what + ", norm");
      const std::vector<uint16_t> rounded = out_b.get("out_b");
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(rounded[i], bf16_of(got[i])) << what << ": bf16 of " << got[i] << " at " << i;
      }
      parts.expect_unchanged();
    }
  }
}

// Without a weight only the residual is written.
TEST(CudaSumNorm, WithoutNorm) {
  TF_NEED_GPU();
  for (NormPath path : {NormPath::kCluster, NormPath::kBlock}) {
    Parts parts(8, 5, 512, 512, 3);
    const std::vector<float> before = random_floats(5 * 512, 4);
    Rows residual(5, 512, 512);
    residual.put(before);
    const std::vector<AddStep> steps = fold_plan(8, {0, 8});
    cuda_sum_norm_by(path, nullptr, parts.sum(steps), residual.matrix(), nullptr, 0.0f, {}, {});
    expect_no_failure();
    std::vector<float> after = before;
    const std::vector<float> tree = parts.folded(steps)[0];
    for (size_t i = 0; i < after.size(); ++i) after[i] += tree[i];
    expect_bits(residual.get("residual"), after, 512, "residual");
  }
}

// A row's bits are its own: one row or many, clusters or single blocks, whatever the neighbours hold.
TEST(CudaSumNorm, RowsDoNotDependOnCompany) {
  TF_NEED_GPU();
  for (int64_t hidden : {64, 200, 4096, 5120, 16384}) {
    const std::vector<AddStep> steps = fold_plan(8, {0, 8});
    const std::vector<float> weight = random_floats(static_cast<size_t>(hidden), 6);
    DeviceArray<float> w(weight);
    const size_t n = static_cast<size_t>(hidden);
    Parts one(8, 1, hidden, hidden, 50);
    const std::vector<float> before = random_floats(n, 9);
    std::vector<float> want, want_residual;
    for (int64_t rows : {1, 2, 7, 16, 130, 300}) {
      if (rows > 16 && hidden > 200 && (rows != 300 || hidden != 5120)) continue;  // keeps the test short
      const int64_t place = rows * 2 / 3;
      Parts parts(8, rows, hidden, hidden, 1000);
      std::vector<float> all = random_floats(n * static_cast<size_t>(rows), 8);
      for (int64_t r = 0; r < rows; ++r) {
        if (r % 3 == 1) all[static_cast<size_t>(r) * n + 5] = kNan;
        if (r % 5 == 2) all[static_cast<size_t>(r) * n + 6] = -kInf;
      }
      std::copy(before.begin(), before.end(), all.begin() + place * hidden);
      for (size_t p = 0; p < 8; ++p) {
        std::copy(one.values[p].begin(), one.values[p].end(), parts.values[p].begin() + place * hidden);
        parts.memory[p]->put(parts.values[p]);
      }
      for (NormPath path : {NormPath::kAuto, NormPath::kCluster, NormPath::kBlock}) {
        Rows residual(rows, hidden, hidden), out(rows, hidden, hidden);
        residual.put(all);
        cuda_sum_norm_by(path, nullptr, parts.sum(steps), residual.matrix(), w.data(), 1e-5f, out.matrix(), {});
        expect_no_failure();
        const std::vector<float> got = out.get("out"), got_residual = residual.get("residual");
        const std::vector<float> row(got.begin() + place * hidden, got.begin() + (place + 1) * hidden);
        const std::vector<float> sum(got_residual.begin() + place * hidden,
                                     got_residual.begin() + (place + 1) * hidden);
        if (want.empty()) {
          want = row;
          want_residual = sum;
        }
        const std::string what = "hidden " + std::to_string(hidden) + ", row " + std::to_string(place) + " of " +
                                 std::to_string(rows) + ", path " + std::to_string(static_cast<int>(path));
        expect_bits(row, want, hidden, what);
        expect_bits(sum, want_residual, hidden, what + ", residual");

        // The plain norm of the same residual has the same bits.
        Rows plain(rows, hidden, hidden);
        cuda_rms_norm_by(path, nullptr, residual.matrix(), 1, w.data(), 1e-5f, plain.matrix(), {});
        expect_no_failure();
        const std::vector<float> normed = plain.get("plain");
        expect_bits({normed.begin() + place * hidden, normed.begin() + (place + 1) * hidden}, want, hidden,
                    what + ", rms_norm");
      }
    }
  }
}

// Norms of heads: a warp, a block or a cluster for each, aligned or not, in place or not: one result.
TEST(CudaRmsNorm, HeadsInAllWays) {
  TF_NEED_GPU();
  for (int64_t dim : {4, 32, 36, 64, 80, 96, 128, 192, 256, 260, 512}) {
    const int64_t rows = 5, heads = 3, cols = heads * dim;
    const std::vector<float> x = random_floats(static_cast<size_t>(rows * cols), 1, 2.0f);
    const std::vector<float> weight = random_floats(static_cast<size_t>(dim), 2);
    DeviceArray<float> w(weight);
    std::vector<float> want;
    for (int64_t offset : {0, 1, 4}) {
      for (NormPath path : {NormPath::kAuto, NormPath::kCluster, NormPath::kBlock}) {
        const std::string what = "dim " + std::to_string(dim) + ", offset " + std::to_string(offset) + ", path " +
                                 std::to_string(static_cast<int>(path));
        Rows in(rows, cols, cols + 8 + offset, offset), out(rows, cols, cols + 4);
        InputRows out_b(rows, cols, (cols + 15) / 8 * 8);
        in.put(x);
        cuda_rms_norm_by(path, nullptr, in.matrix(), heads, w.data(), 1e-6f, out.matrix(), {});
        cuda_rms_norm_by(path, nullptr, in.matrix(), heads, w.data(), 1e-6f, {}, out_b.input());
        cuda_rms_norm_by(path, nullptr, in.matrix(), heads, w.data(), 1e-6f, in.matrix(), {});
        expect_no_failure();
        const std::vector<float> got = out.get("out");
        if (want.empty()) {
          want = got;
          expect_near(got, norm_in_double(x, dim, weight, 1e-6), 2e-6, 1e-30, cols, what);
        }
        expect_bits(got, want, cols, what);
        expect_bits(in.get("in place"), want, cols, what + ", in place");
        const std::vector<uint16_t> rounded = out_b.get("out_b");
        for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(rounded[i], bf16_of(got[i])) << what << " at " << i;
      }
    }
  }
}

// A vector of zeros gives zeros, one of NaN gives NaN and no more than itself.
TEST(CudaRmsNorm, ZerosAndNans) {
  TF_NEED_GPU();
  std::vector<float> x(4 * 128, 1.0f);
  for (int i = 0; i < 128; ++i) x[static_cast<size_t>(i)] = 0.0f;
  x[128 + 7] = kNan;
  Rows in(2, 256, 256);
  in.put(x);
  DeviceArray<float> w(std::vector<float>(128, 1.0f));
  cuda_rms_norm(nullptr, in.matrix(), 2, w.data(), 1e-6f, in.matrix(), {});
  expect_no_failure();
  const std::vector<float> got = in.get("x");
  for (size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(got[i], 0.0f) << i;
    EXPECT_TRUE(std::isnan(got[128 + i])) << i;
    EXPECT_NEAR(got[256 + i], 1.0f, 1e-5f) << i;
  }
}

// Nodes to be sent: each root as the plan leaves it, by fours and one by one.
TEST(CudaFold, RootsOfAllPlans) {
  TF_NEED_GPU();
  std::vector<Plan> all = plans();
  all.push_back({"slices 0-2 of world 3", 3, fold_plan(8, {0, 3})});
  all.push_back({"slices 3-5 of world 3", 3, fold_plan(8, {3, 3})});
  for (const Plan& plan : all) {
    for (int64_t cols : {1, 30, 64, 5120}) {
      const int64_t rows = 3;
      Parts parts(plan.parts, rows, cols, cols % 4 == 0 ? cols + 4 : cols + 1, 77);
      std::vector<int> roots;
      std::vector<std::unique_ptr<Rows>> outs;
      std::vector<DeviceMatrix> out;
      for (int p = 0; p < plan.parts; p += 2) {
        roots.push_back(p);
        outs.push_back(std::make_unique<Rows>(rows, cols, cols + 4));
        out.push_back(outs.back()->matrix());
      }
      const std::vector<std::vector<float>> want = parts.folded(plan.steps);
      cuda_fold(nullptr, parts.sum(plan.steps), rows, cols, roots.data(), static_cast<int>(roots.size()), out.data());
      expect_no_failure();
      for (size_t r = 0; r < roots.size(); ++r) {
        expect_bits(outs[r]->get("root"), want[static_cast<size_t>(roots[r])], cols,
                    plan.name + ", root " + std::to_string(roots[r]) + ", cols " + std::to_string(cols));
      }
      Rows first(rows, cols, cols + 4);
      const int root = 0;
      DeviceMatrix only = first.matrix();
      cuda_fold(nullptr, parts.sum(plan.steps), rows, cols, &root, 1, &only);
      expect_no_failure();
      expect_bits(first.get("first"), want[0], cols, plan.name + ", first root alone, cols " + std::to_string(cols));
      parts.expect_unchanged();
    }
  }
}

std::vector<float> with_extremes(size_t count, uint32_t seed) {
  std::vector<float> x = random_floats(count, seed, 4.0f);
  const float extremes[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 30.0f, -30.0f, 87.5f, -87.5f, 100.0f, -100.0f, 1e30f, -1e30f};
  for (size_t i = 0; i < std::size(extremes) && i < count; ++i) x[i] = extremes[i];
  return x;
}

// Activations against double precision, and the same bits by fours, one by one, and in bf16.
TEST(CudaActivations, MatchDoublePrecision) {
  TF_NEED_GPU();
  const int64_t rows = 4, n = 96;
  const size_t count = static_cast<size_t>(rows * n);
  const std::vector<float> gate = with_extremes(count, 1), up = random_floats(count, 2);
  std::vector<float> both;
  std::vector<double> silu_mul, sigmoid_mul;
  for (int64_t r = 0; r < rows; ++r) {
    both.insert(both.end(), gate.begin() + r * n, gate.begin() + (r + 1) * n);
    both.insert(both.end(), up.begin() + r * n, up.begin() + (r + 1) * n);
  }
  for (size_t i = 0; i < count; ++i) {
    const double sigmoid = 1.0 / (1.0 + std::exp(-static_cast<double>(gate[i])));
    silu_mul.push_back(gate[i] * sigmoid * up[i]);
    sigmoid_mul.push_back(up[i] * sigmoid);
  }
  std::vector<float> want_silu, want_sigmoid;
  for (int64_t odd : {0, 1}) {
    Rows gate_up(rows, 2 * n, 2 * n + 4 + odd, odd), out(rows, n, n + 4), x(rows, n, n + 4), g(rows, n, n + 4 + odd);
    InputRows out_b(rows, n, n + 8);
    gate_up.put(both);
    x.put(up);
    g.put(gate);
    cuda_silu_mul(nullptr, gate_up.matrix(), out.matrix(), {});
    cuda_silu_mul(nullptr, gate_up.matrix(), {}, out_b.input());
    cuda_sigmoid_mul(nullptr, x.matrix(), g.matrix());
    expect_no_failure();
    const std::vector<float> got = out.get("silu_mul"), product = x.get("sigmoid_mul");
    if (odd == 0) {
      want_silu = got;
      want_sigmoid = product;
      // ex2 takes the rounded x * log2(e): its error grows with |x|. Below 1e-34 exp(-x) is on its way to infinity.
      expect_near(got, silu_mul, 1e-5, 1e-34, n, "silu_mul");
      expect_near(product, sigmoid_mul, 1e-5, 1e-34, n, "sigmoid_mul");
    }
    expect_bits(got, want_silu, n, "silu_mul, odd address");
    expect_bits(product, want_sigmoid, n, "sigmoid_mul, odd address");
    const std::vector<uint16_t> rounded = out_b.get("out_b");
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(rounded[i], bf16_of(got[i])) << "silu_mul in bf16 at " << i;
  }
}

// Protects relu(x)^2: the host's rounding, by fours and one by one; NaN stays, both zeros and whatever is below give 0,
// infinity stays.
TEST(CudaActivations, ReluSquaredIsExact) {
  TF_NEED_GPU();
  const int64_t rows = 3, n = 32;
  std::vector<float> values = with_extremes(static_cast<size_t>(rows * n), 3);
  values[20] = NAN;
  values[21] = INFINITY;
  values[22] = -INFINITY;
  std::vector<float> want;
  for (const float value : values) want.push_back(value > 0 ? value * value : value * 0);
  want[22] = 0;
  for (int64_t odd : {0, 1}) {
    Rows x(rows, n, n + 4, odd);
    x.put(values);
    cuda_relu_squared(nullptr, x.matrix());
    expect_no_failure();
    const std::vector<float> got = x.get("relu_squared");
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(want[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << "at " << i;
      } else {
        EXPECT_EQ(got[i], want[i]) << "at " << i;
      }
    }
  }
}

// Addition may be in place; every rounding is the host's.
TEST(CudaAdd, Exact) {
  TF_NEED_GPU();
  for (int64_t cols : {1, 7, 64, 1028}) {
    const int64_t rows = 3;
    const std::vector<float> a = random_floats(static_cast<size_t>(rows * cols), 1);
    const std::vector<float> b = random_floats(static_cast<size_t>(rows * cols), 2, 1e-4f);
    Rows x(rows, cols, cols + 4), y(rows, cols, cols + 8), out(rows, cols, cols + 4);
    x.put(a);
    y.put(b);
    cuda_add(nullptr, x.matrix(), y.matrix(), out.matrix());
    cuda_add(nullptr, x.matrix(), y.matrix(), x.matrix());
    expect_no_failure();
    std::vector<float> want = a;
    for (size_t i = 0; i < want.size(); ++i) want[i] += b[i];
    expect_bits(out.get("out"), want, cols, "add");
    expect_bits(x.get("in place"), want, cols, "add in place");
  }
}

// Rounding to bf16 is to nearest even, ties and overflow included, and widening gives the values back.
TEST(CudaToInput, RoundsToNearestEven) {
  TF_NEED_GPU();
  const int64_t rows = 2, cols = 104;
  std::vector<float> x = random_floats(static_cast<size_t>(rows * cols), 3);
  const uint32_t special[] = {0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0x7f7fffff, 0x00008000,
                              0x00018000, 0x80000001, 0x7f800000, 0xff800000, 0x80000000};
  for (size_t i = 0; i < std::size(special); ++i) x[i] = float_of(special[i]);
  x.back() = kNan;
  Rows in(rows, cols, cols + 4), back(rows, cols, cols + 4);
  InputRows out(rows, cols, cols + 8);
  in.put(x);
  cuda_to_input(nullptr, in.matrix(), out.input());
  cuda_from_input(nullptr, out.input(), back.matrix());
  expect_no_failure();
  const std::vector<uint16_t> got = out.get("out");
  const std::vector<float> wide = back.get("back");
  EXPECT_TRUE(std::isnan(of_bf16(got.back())));
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    EXPECT_EQ(got[i], bf16_of(x[i])) << "of " << x[i] << " at " << i;
    EXPECT_EQ(bits_of(wide[i]), bits_of(of_bf16(got[i]))) << "at " << i;
  }
}

// Rows are copied bit for bit, repeated and out of order.
TEST(CudaGatherRows, Copies) {
  TF_NEED_GPU();
  for (int64_t cols : {3, 128}) {
    const std::vector<float> x = random_floats(static_cast<size_t>(6 * cols), 3);
    const std::vector<int32_t> index = {5, 0, 0, 3};
    Rows src(6, cols, cols + 4), dst(4, cols, cols + 8);
    src.put(x);
    DeviceArray<int32_t> rows(index);
    cuda_gather_rows(nullptr, src.matrix(), rows.data(), dst.matrix());
    expect_no_failure();
    std::vector<float> want;
    for (int32_t r : index) want.insert(want.end(), x.begin() + r * cols, x.begin() + (r + 1) * cols);
    expect_bits(dst.get("dst"), want, cols, "gather");
  }
}

// Angles are exact to the last bit but rounding, far positions included; rotation is the host's expression.
TEST(CudaRope, TableAndRotation) {
  TF_NEED_GPU();
  const std::vector<int64_t> positions = {0, 1, 77, 8191, 262143, 1000003};
  const int64_t rows = 6, pairs = 37, heads = 3, head_dim = 80;
  std::vector<float> inv_freq;
  for (int64_t i = 0; i < pairs; ++i)
    inv_freq.push_back(static_cast<float>(std::pow(1e7, -static_cast<double>(i) / 37)));
  const double factor = 1.1875;
  DeviceArray<int64_t> p(positions);
  DeviceArray<float> f(inv_freq);
  Rows cos(rows, pairs, pairs + 3), sin(rows, pairs, pairs + 3);
  cuda_rope_table(nullptr, p.data(), rows, f.data(), pairs, factor, cos.matrix().data, sin.matrix().data, pairs + 3);
  expect_no_failure();
  const std::vector<float> c = cos.get("cos"), s = sin.get("sin");
  std::vector<double> want_c, want_s;
  for (int64_t position : positions) {
    for (float freq : inv_freq) {
      const double angle = static_cast<double>(position) * static_cast<double>(freq);
      want_c.push_back(std::cos(angle) * factor);
      want_s.push_back(std::sin(angle) * factor);
    }
  }
  expect_near(c, want_c, 6e-8, 1e-12, pairs, "cos");
  expect_near(s, want_s, 6e-8, 1e-12, pairs, "sin");

  const std::vector<float> x = random_floats(static_cast<size_t>(rows * heads * head_dim), 4);
  Rows rotated(rows, heads * head_dim, heads * head_dim + 4);
  rotated.put(x);
  cuda_rope(nullptr, rotated.matrix(), heads, head_dim, cos.matrix().data, sin.matrix().data, pairs, pairs + 3);
  expect_no_failure();
  std::vector<float> want = x;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < pairs; ++i) {
        const size_t low = static_cast<size_t>((r * heads + h) * head_dim + i), high = low + static_cast<size_t>(pairs);
        const size_t t = static_cast<size_t>(r * pairs + i);
        const volatile float ac = x[low] * c[t], bs = x[high] * s[t], bc = x[high] * c[t], as = x[low] * s[t];
        want[low] = ac - bs;
        want[high] = bc + as;
      }
    }
  }
  expect_bits(rotated.get("rotated"), want, heads * head_dim, "rope");
}

// Empty passes are no launches and no errors.
TEST(CudaRowwise, NoRows) {
  TF_NEED_GPU();
  DeviceArray<float> memory(64);
  const DeviceMatrix none{memory.data(), 0, 64, 64};
  CudaTreeSum sum;
  sum.parts[0] = memory.data();
  sum.part_count = 1;
  sum.part_stride = 64;
  cuda_rms_norm(nullptr, none, 1, memory.data(), 1e-6f, none, {});
  cuda_sum_norm(nullptr, sum, none, memory.data(), 1e-6f, none, {});
  cuda_add(nullptr, none, none, none);
  cuda_rope(nullptr, none, 1, 64, memory.data(), memory.data(), 32, 32);
  expect_no_failure();
}

}  // namespace
}  // namespace tensorfold
