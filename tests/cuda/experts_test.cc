// Mixtures of experts on the GPU: bit for bit against what they are by definition (products of single rows, which
// matmul_test.cc holds against double precision), against double precision themselves, and row for row against
// themselves: alone, among others, every way, whoever else chose the same experts.
#include "kernels/cuda/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/matmul_cases.h"

namespace tensorfold {
namespace {

float rounded(float value) { return bf16_value(bf16_bits(value)); }

struct MixtureShape {
  std::string name;
  std::vector<Format> formats;  // in turns, an expert each; the last one's is the shared expert's
  int64_t hidden = 128, columns = 128, shared_columns = 256, slices = 2, experts = 10, slots = 4;
  bool gated = true;
  float limit = 0.0f;
};

// Routed experts and a shared one, the last.
struct Mixture {
  MixtureShape shape;
  std::vector<std::unique_ptr<TestMatrix>> gate, up, down;
  std::vector<ExpertSource> sources;
  std::unique_ptr<CudaExperts> packed;

  explicit Mixture(const MixtureShape& s) : shape(s) {
    std::mt19937 engine(17);
    for (int64_t e = 0; e < s.experts; ++e) {
      const bool last = e + 1 == s.experts;
      const Format format = last ? s.formats.back() : s.formats[static_cast<size_t>(e) % s.formats.size()];
      const int64_t columns = last ? s.shared_columns : s.columns, part = columns / s.slices;
      const auto matrix = [&](int64_t rows, int64_t cols) {
        return std::make_unique<TestMatrix>(make_matrix(format, rows, cols, engine()));
      };
      gate.push_back(s.gated ? matrix(columns, s.hidden) : std::make_unique<TestMatrix>());
      up.push_back(matrix(columns, s.hidden));
      down.push_back(matrix(s.hidden, columns));
      ExpertSource source{gate.back()->source, up.back()->source, {}};
      for (int64_t i = 0; i < s.slices; ++i) source.down.push_back(down.back()->source.slice_cols(i * part, part));
      sources.push_back(source);
    }
    std::string error;
    packed = CudaExperts::create(sources, &error);
    EXPECT_NE(packed, nullptr) << error << cuda_failure();
  }
};

// Rows with their choices; x holds bf16 values.
struct Batch {
  int64_t rows = 0, hidden = 0, slots = 0;
  std::vector<float> x, ids, weights;

  Batch some(const std::vector<int64_t>& which) const {
    Batch out{static_cast<int64_t>(which.size()), hidden, slots, {}, {}, {}};
    for (const int64_t r : which) {
      out.x.insert(out.x.end(), x.begin() + r * hidden, x.begin() + (r + 1) * hidden);
      out.ids.insert(out.ids.end(), ids.begin() + r * slots, ids.begin() + (r + 1) * slots);
      out.weights.insert(out.weights.end(), weights.begin() + r * slots, weights.begin() + (r + 1) * slots);
    }
    return out;
  }
};

enum class Routing { kEven, kSkewed, kOneExpert };

Batch make_batch(const MixtureShape& shape, int64_t rows, Routing routing) {
  Batch b{rows, shape.hidden, shape.slots, random_floats(static_cast<size_t>(rows * shape.hidden), 3), {}, {}};
  for (float& x : b.x) x = rounded(x);
  b.weights = random_floats(static_cast<size_t>(rows * shape.slots), 4);
  std::mt19937 engine(5);
  const int64_t routed = shape.experts - 1;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<int64_t> order(static_cast<size_t>(routed));
    std::iota(order.begin(), order.end(), 0);
    if (routing != Routing::kOneExpert) std::shuffle(order.begin(), order.end(), engine);
    if (routing == Routing::kSkewed && r % 4 != 0)
      std::iter_swap(order.begin(), std::find(order.begin(), order.end(), 2));
    for (int64_t j = 0; j + 1 < shape.slots; ++j) b.ids.push_back(static_cast<float>(order[static_cast<size_t>(j)]));
    b.ids.push_back(static_cast<float>(shape.experts - 1));
  }
  return b;
}

// [slices][rows][hidden]; checks that nothing beside the results was written.
std::vector<float> run(const Mixture& m, const Batch& b, ExpertsWay way) {
  const int64_t stride = (b.hidden + 15) / 16 * 16, slices = m.shape.slices;
  std::vector<uint16_t> bits(static_cast<size_t>(b.rows * stride), 0x7fc0);
  for (int64_t r = 0; r < b.rows; ++r) {
    for (int64_t c = 0; c < b.hidden; ++c) {
      bits[static_cast<size_t>(r * stride + c)] = bf16_bits(b.x[static_cast<size_t>(r * b.hidden + c)]);
    }
  }
  const DeviceArray<uint16_t> x(bits);
  const DeviceArray<float> ids(b.ids), weights(b.weights);
  const size_t part = static_cast<size_t>((b.rows + 1) * stride);
  DeviceArray<float> out(part * static_cast<size_t>(slices));
  out.poison();
  DeviceArray<uint8_t> workspace(static_cast<size_t>(cuda_experts_workspace(*m.packed, b.rows, b.slots)));
  workspace.poison();
  std::vector<DeviceMatrix> partial;
  for (int64_t s = 0; s < slices; ++s) {
    partial.push_back({out.data() + static_cast<size_t>(s) * part, b.rows, b.hidden, stride});
  }
  CudaExpertsArgs args;
  args.experts = m.packed.get();
  args.x = {reinterpret_cast<__nv_bfloat16*>(x.data()), b.rows, b.hidden, stride};
  args.ids = {ids.data(), b.rows, b.slots, b.slots};
  args.weights = {weights.data(), b.rows, b.slots, b.slots};
  args.partial = partial;
  args.limit = m.shape.limit;
  args.way = way;
  args.workspace = workspace.data();
  cuda_experts(nullptr, args);
  const std::vector<float> raw = out.get();
  EXPECT_EQ(cuda_failure(), "");
  std::vector<float> result;
  int wrong = 0;
  for (size_t i = 0; i < raw.size(); ++i) {
    const auto row = static_cast<int64_t>(i % part) / stride, column = static_cast<int64_t>(i % part) % stride;
    if (row < b.rows && column < b.hidden) {
      result.push_back(raw[i]);
    } else {
      uint32_t word;
      std::memcpy(&word, &raw[i], 4);
      wrong += word == 0xffffffffu ? 0 : 1;
    }
  }
  EXPECT_EQ(wrong, 0) << "written beside the results";
  return result;
}

// One row's values of one slice.
std::span<const float> row_of(const std::vector<float>& all, const Batch& b, int64_t slice, int64_t row) {
  return std::span(all).subspan(static_cast<size_t>((slice * b.rows + row) * b.hidden), static_cast<size_t>(b.hidden));
}

// What the operation is by definition, of a row of the batch, from matmuls of that row alone.
std::vector<std::vector<float>> by_definition(Ops& ops, const Mixture& m, const Batch& b, int64_t row) {
  ops.begin_pass();
  const MixtureShape& shape = m.shape;
  std::vector<std::vector<float>> out(static_cast<size_t>(shape.slices));
  const Tensor x = ops.scratch_input(1, b.hidden);
  ops.upload(std::span(b.x).subspan(static_cast<size_t>(row * b.hidden), static_cast<size_t>(b.hidden)), x);
  for (int64_t j = 0; j < b.slots; ++j) {
    const auto at = static_cast<size_t>(row * b.slots + j);
    const ExpertSource& e = m.sources[static_cast<size_t>(b.ids[at])];
    const int64_t columns = e.up.rows, part = columns / shape.slices;
    const Tensor inner = ops.scratch_input(1, columns), y = ops.scratch(1, b.hidden);
    std::vector<float> host(static_cast<size_t>(columns));
    if (!shape.gated) {
      const auto up = ops.pack({&e.up, 1});
      const Tensor whole = ops.scratch(1, columns);
      ops.matmul(*up, x, whole);
      ops.download(whole, host);
      for (float& v : host) v = v < 0 ? 0 : v * v;
      ops.upload(host, inner);
    } else if (shape.limit > 0) {
      // The silu of the backend, of bounded values.
      const MatrixSource both[] = {e.gate, e.up};
      const auto gate_up = ops.pack(both);
      const Tensor whole = ops.scratch(1, 2 * columns);
      ops.matmul(*gate_up, x, whole);
      host.resize(static_cast<size_t>(2 * columns));
      ops.download(whole, host);
      for (int64_t i = 0; i < 2 * columns; ++i) {
        float& v = host[static_cast<size_t>(i)];
        v = std::min(v, shape.limit);
        if (i >= columns) v = std::max(v, -shape.limit);
      }
      ops.upload(host, whole);
      ops.silu_mul(whole, inner);
    } else {
      ops.matmul_silu_mul(*ops.pack_gate_up(e.gate, e.up), x, inner);
    }
    for (int64_t s = 0; s < shape.slices; ++s) {
      const auto down = ops.pack({&e.down[static_cast<size_t>(s)], 1});
      ops.matmul(*down, inner.columns(s * part, part), y);
      std::vector<float> values(static_cast<size_t>(b.hidden));
      ops.download(y, values);
      std::vector<float>& sum = out[static_cast<size_t>(s)];
      sum.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        sum[i] = j == 0 ? b.weights[at] * values[i] : std::fma(b.weights[at], values[i], sum[i]);
      }
    }
  }
  return out;
}

std::vector<MixtureShape> shapes() {
  const Format b16{16, 0}, four64{4, 64}, four32{4, 32}, eight64{8, 64}, eight32{8, 32};
  const Format four_wide{4, 64, true}, four_wide32{4, 32, true}, eight_wide{8, 64, true}, eight_wide32{8, 32, true};
  std::vector<MixtureShape> all = {{"bf16", {b16}},
                                   {"4 bits, groups of 64", {four64}},
                                   {"4 bits, groups of 32", {four32}},
                                   {"8 bits, groups of 64", {eight64}},
                                   {"8 bits, groups of 32", {eight32}},
                                   {"4 bits wide", {four_wide}},
                                   {"4 bits wide, groups of 32", {four_wide32}},
                                   {"8 bits wide", {eight_wide}},
                                   {"8 bits wide, groups of 32", {eight_wide32}},
                                   {"mixed", {four64, b16, four_wide, eight64, four32, eight_wide32, eight32}}};
  const Format fp8{8, 64, false, "fp8 blocks"}, mxfp8{8, 32, false, "mxfp8"}, nvfp4{4, 64, false, "nvfp4"},
      mxfp4{4, 32, false, "mxfp4"};
  for (const Format& format : {fp8, mxfp8, nvfp4, mxfp4}) all.push_back({format.name(), {format}});
  all.push_back({"mixed with small floats", {nvfp4, fp8, four64, mxfp4, mxfp8, b16}});
  // Slices that begin inside blocks of 16: two sets of scales; of FP8: as bf16.
  all.push_back({"nvfp4, odd slices", {nvfp4}, 128, 48, 48, 2, 10, 4});
  all.push_back({"fp8, odd slices", {fp8}, 128, 272, 272, 2, 10, 4});
  // Columns of slices, and rows of outputs, that end inside stages and tiles.
  all.push_back({"odd sizes", {b16}, 136, 48, 80, 2, 10, 4});
  all.push_back({"many slices, long K", {four64}, 1088, 512, 512, 8, 20, 9});
  all.push_back({"one slice", {eight32}, 64, 96, 32, 1, 5, 2});
  MixtureShape plain{"no gates", {four64, b16}};
  plain.gated = false;
  all.push_back(plain);
  MixtureShape limited{"limited", {b16}};
  limited.limit = 0.25f;
  all.push_back(limited);
  return all;
}

// Protects: experts are, bit for bit, weighted sums of matmuls of each row alone, in every format and way, and for any
// number of rows of the pass; and a row has the same bits alone and in other company.
TEST(Experts, AreWhatTheyAreByDefinition) {
  TF_NEED_GPU();
  std::string error;
  const std::unique_ptr<Ops> ops = make_cuda_ops({}, &error);
  ASSERT_NE(ops, nullptr) << error;
  for (const MixtureShape& shape : shapes()) {
    SCOPED_TRACE(shape.name);
    const Mixture m(shape);
    ASSERT_NE(m.packed, nullptr);
    const int64_t most = 300;
    const Batch all = make_batch(shape, most, Routing::kSkewed);
    const std::vector<float> whole = run(m, all, ExpertsWay::kChosen);
    for (const int64_t row : {int64_t{0}, int64_t{7}, most - 1}) {
      const std::vector<std::vector<float>> want = by_definition(*ops, m, all, row);
      for (int64_t s = 0; s < shape.slices; ++s) {
        EXPECT_TRUE(same_bits(row_of(whole, all, s, row), std::span<const float>(want[static_cast<size_t>(s)])))
            << "row " << row << " slice " << s;
      }
    }
    for (const ExpertsWay way : {ExpertsWay::kChosen, ExpertsWay::kRows, ExpertsWay::kGrouped}) {
      for (const int64_t rows : {1, 2, 5, 8, 9, 16, 17, 40, 64, 65, 130}) {
        // Rows from the end backwards, so that each has other neighbours than before.
        std::vector<int64_t> which(static_cast<size_t>(rows));
        for (int64_t i = 0; i < rows; ++i) which[static_cast<size_t>(i)] = most - 1 - 2 * i;
        const Batch some = all.some(which);
        const std::vector<float> got = run(m, some, way);
        int different = 0;
        for (int64_t s = 0; s < shape.slices; ++s) {
          for (int64_t i = 0; i < rows; ++i) {
            const auto a = row_of(got, some, s, i), b = row_of(whole, all, s, which[static_cast<size_t>(i)]);
            different += same_bits(a, b) ? 0 : 1;
          }
        }
        EXPECT_EQ(different, 0) << rows << " rows, way " << static_cast<int>(way);
      }
    }
  }
}

// Protects: the arithmetic itself, against double precision on rounded inputs; the inner values are rounded to bf16.
TEST(Experts, AgreeWithDoublePrecision) {
  TF_NEED_GPU();
  for (const Format& format : {Format{16, 0}, Format{4, 64}, Format{8, 32}, Format{4, 64, false, "nvfp4"}}) {
    MixtureShape shape{"", {format}};
    const Mixture m(shape);
    const Batch b = make_batch(shape, 70, Routing::kEven);
    const std::vector<float> got = run(m, b, ExpertsWay::kChosen);
    double worst = 0;
    for (int64_t r = 0; r < b.rows; r += 3) {
      std::vector<double> want(static_cast<size_t>(b.hidden)), size(static_cast<size_t>(b.hidden));
      for (int64_t j = 0; j < b.slots; ++j) {
        const auto at = static_cast<size_t>(r * b.slots + j), e = static_cast<size_t>(b.ids[at]);
        const int64_t columns = m.up[e]->source.rows;
        std::vector<double> inner(static_cast<size_t>(columns));
        for (int64_t i = 0; i < columns; ++i) {
          double gate = 0, up = 0;
          for (int64_t k = 0; k < b.hidden; ++k) {
            const double x = b.x[static_cast<size_t>(r * b.hidden + k)];
            gate += m.gate[e]->at(i, k) * x;
            up += m.up[e]->at(i, k) * x;
          }
          inner[static_cast<size_t>(i)] = rounded(static_cast<float>(gate / (1 + std::exp(-gate)) * up));
        }
        for (int64_t n = 0; n < b.hidden; ++n) {
          double y = 0, magnitude = 0;
          for (int64_t i = 0; i < columns; ++i) {
            const double term = m.down[e]->at(n, i) * inner[static_cast<size_t>(i)];
            y += term;
            magnitude += std::abs(term);
          }
          want[static_cast<size_t>(n)] += static_cast<double>(b.weights[at]) * y;
          size[static_cast<size_t>(n)] += std::abs(static_cast<double>(b.weights[at])) * magnitude;
        }
      }
      for (int64_t n = 0; n < b.hidden; ++n) {
        double sum = 0;
        for (int64_t s = 0; s < shape.slices; ++s) {
          sum += static_cast<double>(row_of(got, b, s, r)[static_cast<size_t>(n)]);
        }
        worst = std::max(worst, std::abs(sum - want[static_cast<size_t>(n)]) / size[static_cast<size_t>(n)]);
      }
    }
    // An inner value at the edge of two bf16 numbers may round the other way: 2^-9 of one term of more than a hundred.
    EXPECT_LT(worst, 2e-4) << format.bits << " bits";
  }
}

// Protects: rows that all chose the same experts, in as many chunks as that takes.
TEST(Experts, AllRowsMayChooseTheSameExperts) {
  TF_NEED_GPU();
  MixtureShape shape{"", {{4, 64}}};
  const Mixture m(shape);
  const Batch all = make_batch(shape, 300, Routing::kOneExpert);
  const std::vector<float> whole = run(m, all, ExpertsWay::kChosen);
  for (int64_t r = 0; r < all.rows; r += 23) {
    const Batch one = all.some({r});
    const std::vector<float> alone = run(m, one, ExpertsWay::kChosen);
    for (int64_t s = 0; s < shape.slices; ++s) {
      EXPECT_TRUE(same_bits(row_of(alone, one, s, 0), row_of(whole, all, s, r))) << "row " << r;
    }
  }
}

// Protects: NaN and infinities of a row stay in that row, also where others chose the same experts; a row without
// experts (padding) is zeros and takes nothing from others; an expert may be chosen twice.
TEST(Experts, OddRowsStayByThemselves) {
  TF_NEED_GPU();
  MixtureShape shape{"", {{16, 0}}};
  const Mixture m(shape);
  for (const int64_t rows : {int64_t{6}, int64_t{40}, int64_t{100}}) {
    Batch clean = make_batch(shape, rows, Routing::kOneExpert);
    clean.ids[static_cast<size_t>(2 * shape.slots)] = clean.ids[static_cast<size_t>(2 * shape.slots + 1)];
    Batch odd = clean;
    for (int64_t c = 0; c < shape.hidden; ++c) odd.x[static_cast<size_t>(shape.hidden + c)] = NAN;
    odd.x[static_cast<size_t>(3 * shape.hidden + 5)] = std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < shape.slots; ++j) odd.ids[static_cast<size_t>(4 * shape.slots + j)] = -1.0f;
    for (const ExpertsWay way : {ExpertsWay::kRows, ExpertsWay::kGrouped}) {
      const std::vector<float> want = run(m, clean, way), got = run(m, odd, way);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t s = 0; s < shape.slices; ++s) {
          const std::span<const float> values = row_of(got, odd, s, r);
          if (r == 1 || r == 3) {
            EXPECT_TRUE(std::any_of(values.begin(), values.end(), [](float v) { return std::isnan(v); })) << r;
          } else if (r == 4) {
            EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float v) { return v == 0.0f; }));
          } else {
            EXPECT_TRUE(same_bits(values, row_of(want, clean, s, r))) << "row " << r << " of " << rows;
          }
        }
      }
    }
  }
}

// Protects: gate and up that are quantised differently are one matrix of pairs with the values of each.
TEST(Experts, GateAndUpMayDifferInFormat) {
  TF_NEED_GPU();
  std::string error;
  const std::unique_ptr<Ops> ops = make_cuda_ops({}, &error);
  ASSERT_NE(ops, nullptr) << error;
  std::mt19937 engine(29);
  const Format formats[] = {{4, 64},
                            {4, 64, true},
                            {8, 32},
                            {8, 64, true},
                            {4, 32},
                            {16, 0},
                            {4, 64, false, "nvfp4"},
                            {4, 32, false, "mxfp4"},
                            {8, 64, false, "fp8 tensor"},
                            {8, 32, false, "mxfp8"}};
  for (const Format& first : formats) {
    for (const Format& second : formats) {
      const TestMatrix gate = make_matrix(first, 64, 128, engine()), up = make_matrix(second, 64, 128, engine());
      ops->begin_pass();
      const Tensor x = ops->scratch_input(3, 128), whole = ops->scratch(3, 128);
      const Tensor paired = ops->scratch_input(3, 64), apart = ops->scratch_input(3, 64);
      ops->upload(random_floats(3 * 128, 31), x);
      ops->matmul_silu_mul(*ops->pack_gate_up(gate.source, up.source), x, paired);
      const MatrixSource both[] = {gate.source, up.source};
      ops->matmul(*ops->pack(both), x, whole);
      ops->silu_mul(whole, apart);
      std::vector<float> a(3 * 64), b(3 * 64);
      ops->download(paired, a);
      ops->download(apart, b);
      EXPECT_TRUE(same_bits(std::span<const float>(a), std::span<const float>(b)))
          << first.name() << " and " << second.name();
    }
  }
}

struct RouterCase {
  int64_t rows = 40, experts = 0, chosen = 0;
  RouterScore score = RouterScore::kSoftmax;
  bool shared = false, always = false, renormalise = false;
  float scale = 1.0f;
  std::vector<float> logits, shared_gate, bias;
  int64_t slots() const { return chosen + (shared || always ? 1 : 0); }
};

struct Routes {
  std::vector<float> ids, weights;
};

Routes run_router(const RouterCase& c, int64_t rows, std::vector<int32_t> group_of = {}) {
  const DeviceArray<float> logits(std::vector<float>(c.logits.begin(), c.logits.begin() + rows * c.experts));
  const DeviceArray<float> gate(c.shared_gate), bias(c.bias);
  const DeviceArray<int32_t> groups(group_of);
  const DeviceArray<float> ids(static_cast<size_t>(rows * c.slots())), weights(ids.size());
  CudaRouteArgs args;
  args.logits = {logits.data(), rows, c.experts, c.experts};
  if (c.shared) args.shared_gate = gate.data(), args.shared_stride = 1;
  args.shared = c.shared || c.always;
  args.score = c.score;
  args.bias = c.bias.empty() ? nullptr : bias.data();
  args.renormalise = c.renormalise;
  args.scale = c.scale;
  args.ids = {ids.data(), rows, c.slots(), c.slots()};
  args.weights = {weights.data(), rows, c.slots(), c.slots()};
  args.group_of = group_of.empty() ? nullptr : groups.data();
  cuda_route(nullptr, args);
  Routes routes{ids.get(), weights.get()};
  EXPECT_EQ(cuda_failure(), "");
  return routes;
}

double score_of(RouterScore score, double x, double most, double sum) {
  if (score == RouterScore::kSigmoid) return 1 / (1 + std::exp(-x));
  if (score == RouterScore::kSqrtSoftplus) return std::sqrt(std::log1p(std::exp(x)));
  return std::exp(x - most) / sum;
}

// Protects the router: order and ties of the choice, the three scores, bias, renormalising, scale and the shared expert
// against double precision; and a row's equality whatever the number of rows.
TEST(Router, AgreesWithDoublePrecision) {
  TF_NEED_GPU();
  for (int variant = 0; variant < 6; ++variant) {
    RouterCase c;
    c.experts = std::vector<int64_t>{8, 37, 128, 512, 4096, 200}[static_cast<size_t>(variant)];
    c.chosen = variant == 3 ? 32 : variant == 4 ? 63 : 8;
    c.score = variant == 2 ? RouterScore::kSigmoid : variant == 5 ? RouterScore::kSqrtSoftplus : RouterScore::kSoftmax;
    c.shared = variant % 2 == 1;
    c.always = variant == 2;
    c.renormalise = variant != 1;
    c.scale = variant >= 2 ? 2.5f : 1.0f;
    c.logits = random_floats(static_cast<size_t>(c.rows * c.experts), 11);
    if (variant < 2 || variant == 3) {
      for (float& x : c.logits) x = std::round(x * 3) / 2;  // ties in plenty
    }
    c.shared_gate = random_floats(static_cast<size_t>(c.rows), 12);
    if (variant == 2) c.bias = std::vector<float>(static_cast<size_t>(c.experts), 0.0f);
    for (size_t e = 0; e < c.bias.size(); ++e) c.bias[e] = e % 3 == 0 ? 4.0f : -4.0f * static_cast<float>(e % 2);
    const Routes all = run_router(c, c.rows);
    for (int64_t r = 0; r < c.rows; ++r) {
      const float* logits = c.logits.data() + r * c.experts;
      const double most = *std::max_element(logits, logits + c.experts);
      double sum = 0;
      for (int64_t e = 0; e < c.experts; ++e) sum += std::exp(static_cast<double>(logits[e]) - most);
      std::vector<Candidate> order;
      for (int32_t e = 0; e < c.experts; ++e) {
        // With biases of 4 apart no two classes meet; inside one, scores rise with logits.
        const float bias = c.bias.empty() ? 0.0f : 100.0f * c.bias[static_cast<size_t>(e)];
        order.push_back({logits[e] + bias, e});
      }
      std::sort(order.begin(), order.end(), candidate_before);
      double chosen_sum = 0;
      for (int64_t j = 0; j < c.chosen; ++j) {
        chosen_sum += score_of(c.score, static_cast<double>(logits[order[static_cast<size_t>(j)].id]), most, sum);
      }
      for (int64_t j = 0; j < c.slots(); ++j) {
        const auto at = static_cast<size_t>(r * c.slots() + j);
        double want = c.always ? 1 : 1 / (1 + std::exp(-static_cast<double>(c.shared_gate[static_cast<size_t>(r)])));
        int64_t id = c.experts;
        if (j < c.chosen) {
          id = order[static_cast<size_t>(j)].id;
          want = score_of(c.score, static_cast<double>(logits[id]), most, sum);
          if (c.renormalise) want /= chosen_sum;
          want *= static_cast<double>(c.scale);
        }
        EXPECT_EQ(all.ids[at], static_cast<float>(id)) << "variant " << variant << " row " << r << " slot " << j;
        EXPECT_NEAR(all.weights[at], want, 3e-6 * want + 1e-30) << "variant " << variant << " row " << r;
      }
    }
    for (const int64_t rows : {1, 2, 9}) {
      const Routes some = run_router(c, rows);
      EXPECT_TRUE(same_bits(std::span<const float>(some.ids), std::span(all.ids).first(some.ids.size())));
      EXPECT_TRUE(same_bits(std::span<const float>(some.weights), std::span(all.weights).first(some.ids.size())));
    }
  }
}

// Protects the choice where nothing is usual: NaN comes last, equal infinities and zeros of both signs go to the lower
// number; and a row of no sequence gets no experts.
TEST(Router, OddLogitsAndRowsOfNoSequence) {
  TF_NEED_GPU();
  RouterCase c;
  c.rows = 3;
  c.experts = 5;
  c.chosen = 3;
  const float inf = std::numeric_limits<float>::infinity();
  c.logits = {NAN, 1.0f, NAN, -inf, 1.0f, NAN, NAN, NAN, NAN, NAN, -0.0f, 0.0f, -1.0f, 0.0f, -0.0f};
  const std::vector<float> want = {1, 4, 3, 0, 1, 2, 0, 1, 3};
  EXPECT_EQ(run_router(c, 3).ids, want);
  const Routes padded = run_router(c, 3, {0, -1, 0});
  EXPECT_EQ(padded.ids, (std::vector<float>{1, 4, 3, -1, -1, -1, 0, 1, 3}));
  EXPECT_EQ(padded.weights[3], 0.0f);
}

}  // namespace
}  // namespace tensorfold
