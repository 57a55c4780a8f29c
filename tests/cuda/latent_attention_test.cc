// Attention over lists of cached rows: values against double precision; the same bits alone and among others, in
// graphs, for any bound on the context and any number of heads.
#include <numeric>

#include "tests/cuda/latent_cases.h"

namespace tensorfold {
namespace {

enum class Mode { kChosen, kAll, kWindow, kWindowChosen };

// Latents of a sequence, pooled rows of its windows of 4, queries and choices of its last rows.
struct AttentionCase {
  static constexpr int64_t kTokens = 4, kRows = 70, kWindow = 100;
  int64_t length, width, heads, most;
  Floats latents, pooled, q, selected, sinks;

  AttentionCase(int64_t tokens, int64_t dim, int64_t of_heads, int64_t chosen, uint32_t seed)
      : length(tokens), width(dim), heads(of_heads), most(chosen) {
    latents = bf16_floats(static_cast<size_t>(length * width), seed);
    pooled = bf16_floats(static_cast<size_t>(length / kTokens * width), seed + 1);
    q = bf16_floats(static_cast<size_t>(kRows * heads * width), seed + 2);
    sinks = random_floats(static_cast<size_t>(heads), seed + 3, 2.0f);
    std::mt19937 engine(seed + 4);
    for (int64_t i = 0; i < kRows; ++i) {
      std::vector<float> order(static_cast<size_t>((position(i) + 1) / kTokens));
      std::iota(order.begin(), order.end(), 0.0f);
      std::shuffle(order.begin(), order.end(), engine);
      order.resize(std::min<size_t>(order.size(), static_cast<size_t>(most)));
      std::sort(order.begin(), order.end());
      order.resize(static_cast<size_t>(most), -1.0f);
      selected.insert(selected.end(), order.begin(), order.end());
    }
  }
  int64_t position(int64_t i) const { return length - kRows + i; }
  int64_t page_count() const { return (length + kPageTokens - 1) / kPageTokens; }
  std::vector<std::vector<double>> list(int64_t i, Mode mode) const {
    std::vector<std::vector<double>> rows;
    const int64_t windows = (position(i) + 1) / kTokens;
    const bool chooses = mode == Mode::kChosen || mode == Mode::kWindowChosen;
    const auto token = [&](int64_t p) { rows.push_back(part(latents, p * width, width)); };
    for (int64_t j = 0; mode != Mode::kAll && j < (chooses ? most : windows); ++j) {
      const auto w = chooses ? static_cast<int64_t>(selected[static_cast<size_t>(i * most + j)]) : j;
      if (w < 0) break;
      for (int64_t t = 0; mode == Mode::kChosen && t < kTokens; ++t) token(w * kTokens + t);
      if (mode != Mode::kChosen) rows.push_back(part(pooled, w * width, width));
    }
    int64_t first = mode == Mode::kAll ? 0 : windows * kTokens;
    if (mode == Mode::kWindow || mode == Mode::kWindowChosen) first = std::max<int64_t>(0, position(i) + 1 - kWindow);
    for (int64_t p = first; p <= position(i); ++p) token(p);
    return rows;
  }
};

class AttentionRunner {
 public:
  AttentionRunner(Ops& ops, const AttentionCase& c) : ops_(ops), case_(c) {
    const auto count = static_cast<int32_t>(c.page_count());
    table_ = pages_of(count, 1, 1, count + 1);
    const std::vector<RowCacheLayer> layers = {{c.width, 1}, {c.width, AttentionCase::kTokens}};
    cache_ = ops.make_row_cache(layers, count + 1);
    const int64_t tokens = kPageTokens * c.width, pooled = tokens / AttentionCase::kTokens;
    for (int64_t i = 0; i < count; ++i) {
      Floats page(static_cast<size_t>(tokens + pooled), 0.0f);
      const auto copy = [&](const Floats& from, int64_t size, int64_t at) {
        const int64_t first = i * size, own = std::clamp<int64_t>(static_cast<int64_t>(from.size()) - first, 0, size);
        std::copy_n(from.begin() + first, own, page.begin() + at);
      };
      copy(c.latents, tokens, 0);
      copy(c.pooled, pooled, tokens);
      cache_->load_page(table_[static_cast<size_t>(i)], std::as_bytes(std::span<const float>(page)));
    }
  }

  // Heads [head, head + heads) of queries [first, first + rows): one sequence, or a sequence each.
  Floats run(Mode mode, int64_t first, int64_t rows, int64_t head, int64_t heads, bool apart = false,
             int64_t least_keys = 0) {
    ops_.begin_pass();
    std::vector<Span> spans;
    for (int64_t i = 0; i < (apart ? rows : 1); ++i) {
      spans.push_back({table_, case_.position(first + i), apart ? 1 : rows});
    }
    Pass pass(spans);
    pass.least_keys = least_keys;
    return pass.run(ops_, [&](const RowBatch& batch, Tensor) {
      const Inputs in = upload(first, rows, head, heads);
      return attend(mode, batch, in, heads);
    });
  }
  // The same in a kept run, as it comes out of the graph.
  Floats graph(Mode mode, int64_t first, int64_t rows, int64_t heads) {
    ops_.begin_pass();
    const int64_t wide = case_.heads * case_.width;
    const Tensor q = ops_.persistent(AttentionCase::kRows, wide),
                 selected = ops_.persistent(AttentionCase::kRows, case_.most);
    ops_.upload({case_.q.begin() + first * wide, case_.q.begin() + (first + rows) * wide}, q.row_range(0, rows));
    ops_.upload({case_.selected.begin() + first * case_.most, case_.selected.begin() + (first + rows) * case_.most},
                selected.row_range(0, rows));
    const auto sinks = ops_.pack_vector(case_.sinks);
    const Pass pass({{table_, case_.position(first), rows}});
    Floats out;
    for (int i = 0; i < 2; ++i) {
      out = pass.run(
          ops_,
          [&](const RowBatch& batch, Tensor) {
            return attend(mode, batch, {q.row_range(0, batch.rows()), selected.row_range(0, batch.rows()), sinks.get()},
                          heads);
          },
          {}, true);
    }
    ops_.forget_runs();
    return out;
  }

 private:
  struct Inputs {
    Tensor q, selected;
    const Vector* sinks = nullptr;
  };
  Inputs upload(int64_t first, int64_t rows, int64_t head, int64_t heads) {
    const AttentionCase& c = case_;
    Floats q;
    for (int64_t r = first; r < first + rows; ++r) {
      const auto at = c.q.begin() + (r * c.heads + head) * c.width;
      q.insert(q.end(), at, at + heads * c.width);
    }
    sinks_ = ops_.pack_vector(
        std::span<const float>(c.sinks).subspan(static_cast<size_t>(head), static_cast<size_t>(heads)));
    return {uploaded(ops_, rows, heads * c.width, q),
            uploaded(ops_, rows, c.most, {c.selected.begin() + first * c.most, c.selected.end()}), sinks_.get()};
  }
  Tensor attend(Mode mode, const RowBatch& batch, const Inputs& in, int64_t heads) {
    LatentAttentionArgs args;
    args.q = in.q;
    args.out = ops_.scratch(in.q.rows, in.q.cols);
    args.heads = heads;
    args.scale = 0.11f;
    args.tokens = AttentionCase::kTokens;
    args.rows = batch;
    const bool window = mode == Mode::kWindow || mode == Mode::kWindowChosen;
    if (mode == Mode::kChosen || mode == Mode::kWindowChosen) args.selected = in.selected;
    if (window) {
      args.window = AttentionCase::kWindow;
      args.pooled = 1;
      args.sinks = in.sinks;
    }
    ops_.latent_attention(*cache_, args);
    return args.out;
  }

  Ops& ops_;
  const AttentionCase& case_;
  std::vector<int32_t> table_;
  std::unique_ptr<RowCache> cache_;
  std::unique_ptr<Vector> sinks_;
};

// Protects attention over lists: values against double precision; the same bits alone, among rows of its sequence and
// of others, for a part of the heads, for longer bounds (more splits and waves of them), and in graphs.
TEST(CudaLatents, Attention) {
  TF_NEED_GPU();
  const auto ops = gpu_ops(true);
  for (const AttentionCase& c : {AttentionCase(200, 32, 8, 8, 41), AttentionCase(3000, 512, 40, 150, 42),
                                 AttentionCase(900, 104, 5, 135, 43), AttentionCase(2600, 256, 17, 600, 44)}) {
    AttentionRunner runner(*ops, c);
    const int64_t rows = AttentionCase::kRows, wide = c.heads * c.width;
    for (const Mode mode : {Mode::kChosen, Mode::kAll, Mode::kWindow, Mode::kWindowChosen}) {
      const std::string what = "width " + std::to_string(c.width) + " mode " + std::to_string(static_cast<int>(mode));
      const Floats prompt = runner.run(mode, 0, rows, 0, c.heads);
      const Floats apart = runner.run(mode, 0, 30, 0, c.heads, true);
      const Floats bound = runner.run(mode, 0, rows, 0, c.heads, false, 300000);
      expect_same(bound, prompt, what + ", another bound");
      for (const int64_t r : {int64_t{0}, int64_t{13}, int64_t{29}, rows - 1}) {
        const auto got = row_of(prompt, r, wide);
        expect_same(runner.run(mode, r, 1, 0, c.heads), got, what + ", alone");
        if (r < 30) expect_same(row_of(apart, r, wide), got, what + ", beside other sequences");
        const int64_t some = std::min<int64_t>(3, c.heads);
        const auto last = static_cast<size_t>(some * c.width);
        expect_same(runner.run(mode, r, 1, c.heads - some, some), got.last(last), what + ", some heads");
        const std::vector<std::vector<double>> list = c.list(r, mode);
        for (int64_t h = 0; h < c.heads; h += 4) {
          const double sink = c.sinks[static_cast<size_t>(h)];
          const bool sinks = mode == Mode::kWindow || mode == Mode::kWindowChosen;
          const std::vector<double> want = ref_latent_attention(part(c.q, (r * c.heads + h) * c.width, c.width), list,
                                                                double{0.11f}, sinks ? &sink : nullptr);
          // Weights are rounded to bf16.
          expect_close(got.subspan(static_cast<size_t>(h * c.width), static_cast<size_t>(c.width)), want, 0.02, what);
        }
      }
      const Floats graph = runner.graph(mode, 5, 3, c.heads);
      for (int64_t i = 0; i < 3; ++i)
        expect_same(row_of(graph, i, wide), row_of(prompt, 5 + i, wide), what + ", graph");
    }
  }
}

}  // namespace
}  // namespace tensorfold
