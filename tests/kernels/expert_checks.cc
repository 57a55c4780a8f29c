// Routers and mixtures of experts.
#include <algorithm>
#include <cmath>

#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

constexpr int64_t kRows = 70;

std::vector<float> first_rows(const std::vector<float>& all, int64_t rows, int64_t cols) {
  return {all.begin(), all.begin() + rows * cols};
}

struct Routes {
  std::vector<float> ids, weights;
};

struct RouterCase {
  int64_t experts = 0, chosen = 0;
  RouterScore score = RouterScore::kSoftmax;
  bool shared = false, renormalise = false, always = false;
  float scale = 1.0f;
  std::vector<float> logits, shared_gate, bias;
  int64_t slots() const { return chosen + (shared || always ? 1 : 0); }
};

Routes run_router(Ops& ops, const RouterCase& c, int64_t rows) {
  ops.begin_pass();
  const auto bias = c.bias.empty() ? nullptr : ops.pack_vector(c.bias);
  RouteArgs args;
  args.logits = upload(ops, rows, c.experts, first_rows(c.logits, rows, c.experts));
  if (c.shared) args.shared_gate = upload(ops, rows, 1, first_rows(c.shared_gate, rows, 1));
  args.shared_always = c.always;
  args.score = c.score;
  args.bias = bias.get();
  args.renormalise = c.renormalise;
  args.scale = c.scale;
  args.ids = ops.scratch(rows, c.slots());
  args.weights = ops.scratch(rows, c.slots());
  ops.route(args);
  return {download(ops, args.ids), download(ops, args.weights)};
}

// Protects the router: order and ties of the choice, both scores, bias, renormalising, scale and the shared expert's
// slot against double precision; and equality on every instruction set, thread count and row count.
void router(Checker& c) {
  Random random(70);
  for (int variant = 0; variant < 4; ++variant) {
    RouterCase at;
    at.experts = variant == 0 ? 8 : 37 + 20 * variant;
    at.chosen = variant == 3 ? at.experts > 32 ? 32 : at.experts : 4;
    at.score = variant >= 2 ? RouterScore::kSigmoid : RouterScore::kSoftmax;
    at.shared = variant % 2 == 1;
    at.always = variant == 2;
    at.renormalise = variant != 1;
    at.scale = variant >= 2 ? 2.5f : 1.0f;
    at.logits = random.vector(kRows * at.experts);
    // Ties in plenty where no bias blurs them.
    for (float& x : at.logits) x = variant < 2 ? std::round(x * 6) / 2 : x * 4;
    at.shared_gate = random.vector(kRows);
    if (variant == 3) at.bias = random.vector(at.experts);
    const RefMatrix gate = to_ref(kRows, 1, at.shared_gate);
    const RefRoutes want = ref_route(to_ref(kRows, at.experts, at.logits), at.shared ? &gate : nullptr, at.score,
                                     at.bias, at.chosen, at.renormalise, static_cast<double>(at.scale), at.always);
    std::vector<float> ids;
    for (const std::vector<int64_t>& row : want.ids) ids.insert(ids.end(), row.begin(), row.end());
    std::vector<float> weights;
    for (Variant& v : all_variants({1, 2, 3})) {
      for (int64_t rows : {kRows, int64_t{1}, int64_t{2}, int64_t{9}}) {
        const Routes got = run_router(*v.ops, at, rows);
        const std::string what = "router " + std::to_string(variant) + ", " + v.name + ", " + std::to_string(rows);
        c.expect(same_bits(got.ids, first_rows(ids, rows, at.slots())), what + ": choice");
        if (weights.empty()) {
          weights = got.weights;
          c.expect(relative_error(weights, want.weights, 0.0) < 2e-6, what + ": weights against the reference");
        }
        c.expect(same_bits(got.weights, first_rows(weights, rows, at.slots())), what + ": weights differ");
      }
    }
  }
}

// Protects the choice where nothing is usual: NaN comes last, equal infinities go to the lower number.
void router_odd_values(Checker& c) {
  RouterCase at;
  at.experts = 5;
  at.chosen = 3;
  at.logits = {NAN, 1.0f, NAN, -INFINITY, 1.0f, NAN, NAN, NAN, NAN, NAN, -0.0f, 0.0f, -1.0f, 0.0f, -0.0f};
  for (Variant& v : all_variants({1})) {
    c.expect(same_bits(run_router(*v.ops, at, 3).ids, {1, 4, 3, 0, 1, 2, 0, 1, 3}), v.name + ": odd logits");
  }
}

// Routed experts of 64 columns and a shared one of 96, in two slices, of several formats.
struct Mixture {
  static constexpr int64_t kHidden = 64, kSlices = 2, kExperts = 7, kSlots = 4;
  std::vector<std::unique_ptr<OwnedMatrix>> owned;
  std::vector<ExpertSource> sources;
  std::vector<RefExpert> reference;
  std::vector<float> x, ids, weights;
  RefRoutes routes{{}, RefMatrix(kRows, kSlots)};

  // `repeats`: the first rows name an expert twice, so that its rows are 0, 0, 2.
  explicit Mixture(uint64_t seed, bool gated = true, bool repeats = false) {
    Random random(seed);
    for (int64_t e = 0; e < kExperts; ++e) {
      const int64_t columns = e + 1 == kExperts ? 96 : 64;
      const WeightFormat format =
          e % 3 == 0 ? WeightFormat::kBf16 : (e % 3 == 1 ? WeightFormat::kF32 : WeightFormat::kMlxAffine);
      const auto make = [&](int64_t rows, int64_t cols) -> const MatrixSource& {
        owned.push_back(random_matrix(&random, rows, cols, e + 1 == kExperts ? WeightFormat::kF16 : format, 4, 32));
        return owned.back()->source;
      };
      const MatrixSource gate = gated ? make(columns, kHidden) : MatrixSource{};
      const MatrixSource up = make(columns, kHidden), down = make(kHidden, columns);
      ExpertSource source{gate, up, {}};
      const int64_t part = columns / kSlices;
      for (int64_t s = 0; s < kSlices; ++s) source.down.push_back(down.slice_cols(s * part, part));
      sources.push_back(source);
      reference.push_back({gated ? ref_dequantise(gate) : RefMatrix(), ref_dequantise(up), ref_dequantise(down)});
    }
    x = random.vector(kRows * kHidden);
    weights = random.vector(kRows * kSlots);
    for (int64_t r = 0; r < kRows; ++r) {
      // Three different experts of six, expert 4 for nobody; the shared one last.
      std::vector<int64_t> row;
      while (row.size() < 3) {
        const int64_t e = random.below(kExperts - 1);
        if (e != 4 && std::find(row.begin(), row.end(), e) == row.end()) row.push_back(e);
      }
      if (repeats && r < 3) row = r == 1 ? std::vector<int64_t>{1, 3, 0} : std::vector<int64_t>{2, r == 0 ? 2 : 1, 3};
      row.push_back(kExperts - 1);
      ids.insert(ids.end(), row.begin(), row.end());
      routes.ids.push_back(row);
    }
    routes.weights = to_ref(kRows, kSlots, weights);
  }
};

// The partial results of slices [first, first + count) of a rank that owns only these.
std::vector<float> run_experts(Ops& ops, const Mixture& m, int64_t rows, int64_t first, int64_t count) {
  ops.begin_pass();
  std::vector<ExpertSource> sources;
  for (const ExpertSource& whole : m.sources) {
    const int64_t part = whole.up.rows / Mixture::kSlices;
    sources.push_back({whole.gate.rows == 0 ? whole.gate : whole.gate.slice_rows(first * part, count * part),
                       whole.up.slice_rows(first * part, count * part),
                       {whole.down.begin() + first, whole.down.begin() + first + count}});
  }
  const auto packed = ops.pack_experts(sources);
  std::vector<Tensor> partial;
  for (int64_t s = 0; s < count; ++s) partial.push_back(ops.scratch(rows, Mixture::kHidden));
  ExpertsArgs args;
  args.experts = packed.get();
  args.x = upload(ops, rows, Mixture::kHidden, first_rows(m.x, rows, Mixture::kHidden));
  args.ids = upload(ops, rows, Mixture::kSlots, first_rows(m.ids, rows, Mixture::kSlots));
  args.weights = upload(ops, rows, Mixture::kSlots, first_rows(m.weights, rows, Mixture::kSlots));
  args.partial = partial;
  ops.experts(args);
  std::vector<float> out;
  for (const Tensor& t : partial) {
    const std::vector<float> part = download(ops, t);
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

// What the operation is by definition, from products of single rows.
std::vector<float> by_definition(Ops& ops, const Mixture& m, int64_t row, int64_t slice) {
  ops.begin_pass();
  std::vector<float> out;
  for (int64_t j = 0; j < Mixture::kSlots; ++j) {
    const ExpertSource& e =
        m.sources[static_cast<size_t>(m.routes.ids[static_cast<size_t>(row)][static_cast<size_t>(j)])];
    const int64_t columns = e.up.rows, part = columns / Mixture::kSlices;
    const MatrixSource& down_source = e.down[static_cast<size_t>(slice)];
    const auto down = ops.pack({&down_source, 1});
    const Tensor x = upload(ops, 1, Mixture::kHidden,
                            {m.x.begin() + row * Mixture::kHidden, m.x.begin() + (row + 1) * Mixture::kHidden});
    const Tensor inner = ops.scratch(1, columns), y = ops.scratch(1, Mixture::kHidden);
    if (e.gate.rows > 0) {
      ops.matmul_silu_mul(*ops.pack_gate_up(e.gate, e.up), x, inner);
    } else {
      ops.matmul(*ops.pack({&e.up, 1}), x, inner);
      ops.relu_squared(inner);
    }
    ops.matmul(*down, inner.columns(slice * part, part), y);
    const std::vector<float> values = download(ops, y);
    const float weight = m.weights[static_cast<size_t>(row * Mixture::kSlots + j)];
    if (j == 0) out.assign(values.size(), 0.0f);
    for (size_t i = 0; i < values.size(); ++i) {
      out[i] = j == 0 ? weight * values[i] : std::fma(weight, values[i], out[i]);
    }
  }
  return out;
}

// Protects experts: the definition bit for bit, double precision, an expert without rows, and equality on every
// instruction set, thread count, row count, for a rank that owns one slice of two, and where a row names an expert
// twice.
void check_experts(Checker& c, const Mixture& m) {
  const int64_t half = kRows * Mixture::kHidden;
  const RefMatrix want = ref_experts(m.reference, to_ref(kRows, Mixture::kHidden, m.x), m.routes);
  std::vector<float> first;
  for (Variant& v : all_variants({1, 2, 3})) {
    for (int64_t rows : {kRows, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{9}}) {
      const std::vector<float> got = run_experts(*v.ops, m, rows, 0, 2);
      if (first.empty()) {
        first = got;
        std::vector<float> sum(got.begin(), got.begin() + half);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += got[i + static_cast<size_t>(half)];
        double most = 0;
        for (double x : want.v) most = std::max(most, std::abs(x));
        c.expect(relative_error(sum, want, most) < 1e-6, "experts against the reference");
        for (int64_t r : {int64_t{0}, int64_t{13}, kRows - 1}) {
          for (int64_t s = 0; s < 2; ++s) {
            const auto begin = first.begin() + s * half + r * Mixture::kHidden;
            c.expect(same_bits({begin, begin + Mixture::kHidden}, by_definition(*v.ops, m, r, s)),
                     "experts by definition: row " + std::to_string(r) + " slice " + std::to_string(s));
          }
        }
      }
      const int64_t n = rows * Mixture::kHidden;
      const std::string what = v.name + ", " + std::to_string(rows) + " rows";
      for (int64_t s = 0; s < 2; ++s) {
        const std::vector<float> expected(first.begin() + s * half, first.begin() + s * half + n);
        c.expect(same_bits({got.begin() + s * n, got.begin() + (s + 1) * n}, expected), "experts differ: " + what);
        if (rows != 9) continue;
        c.expect(same_bits(run_experts(*v.ops, m, rows, s, 1), expected), "experts of one slice differ: " + what);
      }
    }
  }
}

void experts(Checker& c) {
  check_experts(c, Mixture(71));
  check_experts(c, Mixture(75, true, true));
}

// Protects the same of experts without gates.
void ungated_experts(Checker& c) { check_experts(c, Mixture(74, false)); }

// Protects relu(x)^2 where nothing is usual: NaN stays, both zeros and whatever is below give 0, infinity stays.
void relu_squared_odd_values(Checker& c) {
  for (Variant& v : all_variants({1})) {
    v.ops->begin_pass();
    const Tensor x = upload(*v.ops, 1, 7, {NAN, -0.0f, 0.0f, -3.0f, 1.5f, INFINITY, -INFINITY});
    v.ops->relu_squared(x);
    const std::vector<float> got = download(*v.ops, x);
    c.expect(std::isnan(got[0]), v.name + ": NaN");
    c.expect(got[1] == 0 && got[2] == 0 && got[3] == 0 && got[4] == 2.25f && got[5] == INFINITY && got[6] == 0,
             v.name + ": relu squared");
  }
}

}  // namespace

uint64_t router_hash(Ops& ops) {
  Random random(72);
  RouterCase at;
  at.experts = 37;
  at.chosen = 6;
  at.shared = at.renormalise = true;
  at.logits = random.vector(kRows * at.experts, true);
  at.shared_gate = random.vector(kRows);
  const Routes softmax = run_router(ops, at, kRows);
  at.score = RouterScore::kSigmoid;
  at.bias = random.vector(at.experts);
  const Routes sigmoid = run_router(ops, at, kRows);
  return hash_bits(sigmoid.weights, hash_bits(sigmoid.ids, hash_bits(softmax.weights, hash_bits(softmax.ids))));
}

uint64_t experts_hash(Ops& ops) { return hash_bits(run_experts(ops, Mixture(73), kRows, 0, 2)); }

uint64_t ungated_experts_hash(Ops& ops) { return hash_bits(run_experts(ops, Mixture(75, false), kRows, 0, 2)); }

std::vector<NamedCheck> expert_checks() {
  return {{"router", router},
          {"router_odd_values", router_odd_values},
          {"experts", experts},
          {"ungated_experts", ungated_experts},
          {"relu_squared_odd_values", relu_squared_odd_values}};
}

}  // namespace tensorfold
