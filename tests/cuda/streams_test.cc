// Residuals of several streams, the dilated convolution with its state, and n-gram tables on a GPU: values against
// double precision, and the same bits whatever rows and sequences are beside a row.
#include <algorithm>

#include "kernels/cuda/short_conv.h"
#include "kernels/ops/latent_ops.h"
#include "kernels/reference/latents.h"
#include "kernels/reference/reference_streams.h"
#include "tests/cuda/stream_ops.h"
#include "tests/kernels/ngram_cases.h"

namespace tensorfold {
namespace {

constexpr int64_t kRows = 21;

struct Streams {
  int64_t count, width;
  std::vector<float> x, gate, inject, y, query;

  Streams(int64_t n, int64_t w) : count(n), width(w) {
    const auto values = [](int64_t size, uint32_t seed, float scale = 1.0f) {
      return random_floats(static_cast<size_t>(size), seed, scale);
    };
    x = values(kRows * n * w, 1);
    gate = values(kRows * n * w, 2, 3.0f);
    inject = values(kRows * n, 3);
    y = values(kRows * w, 4);
    query = values(kRows * n * w, 5);
    std::fill(query.begin(), query.begin() + w, 0.0f);  // a score of exactly 0
  }
};

// mix, gate, inject and the scaled silu of rows [first, first + rows), a vector each.
std::vector<std::vector<float>> run_streams(Ops& ops, const Streams& s, int64_t first, int64_t rows, bool rounded) {
  ops.begin_pass();
  const int64_t all = s.count * s.width;
  const auto part = [&](const std::vector<float>& values, int64_t cols, bool round = false) {
    return put(ops, rows, cols, part_of(values, first, rows, cols), round);
  };
  const Tensor x = part(s.x, all), gate = part(s.gate, all), y = part(s.y, s.width);
  const Tensor mixed = rounded ? ops.scratch_input(rows, s.width) : ops.scratch(rows, s.width);
  const Tensor gated = ops.scratch(rows, all);
  ops.mix_streams({.x = rounded ? part(s.x, all, true) : x, .gate = gate, .count = s.count, .out = mixed});
  ops.gate_streams({.key = gate, .query = part(s.query, all), .value = y, .count = s.count, .out = gated});
  ops.inject_streams({.x = x, .inject = part(s.inject, s.count), .count = s.count, .y = y});
  ops.scaled_silu(gate, 0.25f);
  std::vector<std::vector<float>> out = {get(ops, mixed), get(ops, gated), get(ops, x), get(ops, gate)};
  ops.clear(gate);
  out.push_back(get(ops, gate));
  EXPECT_EQ(ops.finish_pass(), "");
  return out;
}

// Protects mixing, gating, injecting and the scaled silu: values, and rows that are the same alone.
TEST(CudaStreams, AgreeWithDoublePrecisionAndAreTheSameAlone) {
  TF_NEED_GPU();
  const std::unique_ptr<Ops> ops = gpu_ops();
  for (const auto& [count, width] :
       {std::pair<int64_t, int64_t>{4, 64}, {2, 19}, {3, 5000}, {4, 2048}, {8, 4100}, {1, 7}}) {
    const Streams s(count, width);
    const int64_t all = count * width;
    const RefMatrix x = ref_of(kRows, all, s.x), gate = ref_of(kRows, all, s.gate), y = ref_of(kRows, width, s.y);
    const auto whole = run_streams(*ops, s, 0, kRows, false);
    EXPECT_LT(error_of(whole[0], ref_mix_streams(x, gate, count), 0.1), 2e-5) << width;
    EXPECT_LT(error_of(whole[1], ref_gate_streams(gate, ref_of(kRows, all, s.query), y, count), 0.1), 2e-5) << width;
    EXPECT_LT(error_of(whole[2], ref_inject_streams(x, ref_of(kRows, count, s.inject), y, count), 0.1), 2e-5) << width;
    for (size_t i = 0; i < whole[3].size(); ++i) {
      const double z = double{s.gate[i]} * 0.25;
      ASSERT_NEAR(whole[3][i], z / (1 + std::exp(-z)), 2e-6 * (1 + std::abs(z)));
    }
    EXPECT_TRUE(std::all_of(whole[4].begin(), whole[4].end(), [](float v) { return v == 0.0f; }));
    // Rounded inputs and outputs are the same values, rounded.
    Streams near = s;
    for (float& v : near.x) v = rounded_to_bf16(v);
    std::vector<float> want = run_streams(*ops, near, 0, kRows, false)[0];
    for (float& v : want) v = rounded_to_bf16(v);
    EXPECT_TRUE(equal_bits(run_streams(*ops, s, 0, kRows, true)[0], want)) << width;
    for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 1}, {5, 1}, {kRows - 3, 3}}) {
      const auto some = run_streams(*ops, s, first, rows, false);
      for (size_t i = 0; i < some.size(); ++i) {
        const int64_t cols = i == 0 ? width : all;
        EXPECT_TRUE(equal_bits(some[i], part_of(whole[i], first, rows, cols))) << width << " result " << i;
      }
    }
  }
}

struct Hyper {
  static constexpr int64_t kCount = 4, kMix = kCount * (2 + kCount), kIterations = 20;
  static constexpr float kEps = 1e-6f;
  int64_t width;
  std::vector<float> streams, mix, y, scale, base;

  explicit Hyper(int64_t w) : width(w) {
    streams = random_floats(static_cast<size_t>(kRows * kCount * w), 11);
    mix = random_floats(static_cast<size_t>(kRows * kMix), 12);
    y = random_floats(static_cast<size_t>(kRows * w), 13);
    scale = random_floats(3, 14);
    base = random_floats(static_cast<size_t>(kMix), 15);
  }
};

// collapse's input, weights and zeros, expand's streams, the mean of those, and two collapses with carried weights.
std::vector<std::vector<float>> run_hyper(Ops& ops, const Hyper& h, int64_t first, int64_t rows) {
  constexpr int64_t kN = Hyper::kCount;
  ops.begin_pass();
  const auto part = [&](const std::vector<float>& values, int64_t cols) {
    return put(ops, rows, cols, part_of(values, first, rows, cols));
  };
  const auto scale = ops.pack_vector(h.scale), base = ops.pack_vector(h.base);
  HyperArgs args;
  args.streams = part(h.streams, kN * h.width);
  args.count = kN;
  args.mix = part(h.mix, Hyper::kMix);
  args.scale = scale.get();
  args.base = base.get();
  args.eps = Hyper::kEps;
  args.iterations = Hyper::kIterations;
  args.weights = ops.scratch(rows, kN * (1 + kN));
  args.out = ops.scratch(rows, h.width);
  args.zero = part(h.y, h.width);
  ops.hyper_collapse(args);
  std::vector<std::vector<float>> out = {get(ops, args.out), get(ops, args.weights), get(ops, args.zero)};
  args.y = part(h.y, h.width);
  ops.hyper_expand(args);
  out.push_back(get(ops, args.streams));
  const Tensor mix = std::exchange(args.mix, Tensor{});
  ops.hyper_collapse(args);
  out.push_back(get(ops, args.out));
  args.mix = mix;
  args.carried = ops.scratch(rows, kN);
  ops.clear(args.carried);
  ops.hyper_collapse(args);
  out.push_back(get(ops, args.out));
  ops.hyper_collapse(args);
  out.push_back(get(ops, args.out));
  EXPECT_EQ(ops.finish_pass(), "");
  return out;
}

// Protects hyper-connections with balanced mixing: values, and rows that are the same alone.
TEST(CudaStreams, HyperConnectionsAgreeWithDoublePrecision) {
  TF_NEED_GPU();
  constexpr int64_t kN = Hyper::kCount;
  const std::unique_ptr<Ops> ops = gpu_ops();
  for (const int64_t width : {int64_t{40}, int64_t{1030}}) {
    const Hyper h(width);
    const auto whole = run_hyper(*ops, h, 0, kRows);
    RefMatrix input(kRows, width), expanded(kRows, kN * width), mean(kRows, width), carried(kRows, width);
    RefMatrix weights(kRows, kN * (1 + kN));
    for (int64_t r = 0; r < kRows; ++r) {
      const std::vector<float> own = part_of(h.mix, r, 1, Hyper::kMix);
      const RefStreamWeights want = ref_stream_weights(std::vector<double>(own.begin(), own.end()), h.scale, h.base, kN,
                                                       Hyper::kEps, Hyper::kIterations);
      for (int64_t i = 0; i < kN; ++i) weights.at(r, i) = want.post[static_cast<size_t>(i)];
      for (int64_t i = 0; i < kN * kN; ++i) weights.at(r, kN + i) = want.mix.at(i / kN, i % kN);
      for (int64_t d = 0; d < width; ++d) {
        const auto x = [&](int64_t s) { return double{h.streams[static_cast<size_t>((r * kN + s) * width + d)]}; };
        for (int64_t s = 0; s < kN; ++s) input.at(r, d) += want.pre[static_cast<size_t>(s)] * x(s);
        for (int64_t k = 0; k < kN; ++k) {
          double sum = want.post[static_cast<size_t>(k)] * h.y[static_cast<size_t>(r * width + d)];
          for (int64_t j = 0; j < kN; ++j) sum += want.mix.at(j, k) * x(j);
          expanded.at(r, k * width + d) = sum;
          mean.at(r, d) += sum / static_cast<double>(kN);
          carried.at(r, d) += want.pre[static_cast<size_t>(k)] * sum;
        }
      }
    }
    EXPECT_LT(error_of(whole[0], input, 0.1), 2e-5);
    EXPECT_LT(error_of(whole[1], weights, 0.1), 2e-5);
    EXPECT_LT(error_of(whole[3], expanded, 0.1), 2e-5);
    EXPECT_LT(error_of(whole[4], mean, 0.1), 2e-5);
    for (const size_t zeros : {size_t{2}, size_t{5}}) {  // carried weights were zeros
      EXPECT_TRUE(std::all_of(whole[zeros].begin(), whole[zeros].end(), [](float v) { return v == 0.0f; }));
    }
    EXPECT_LT(error_of(whole[6], carried, 0.1), 2e-5);
    for (const int64_t row : {int64_t{0}, kRows - 1}) {
      const auto alone = run_hyper(*ops, h, row, 1);
      for (size_t i = 0; i < alone.size(); ++i) {
        const int64_t cols = static_cast<int64_t>(alone[i].size());
        EXPECT_TRUE(equal_bits(alone[i], part_of(whole[i], row, 1, cols))) << "result " << i;
      }
    }
  }
}

// A sequence of the convolution's inputs and tokens; end tokens (3) among them.
struct Line {
  std::vector<float> x;
  std::vector<int32_t> tokens;

  Line(int64_t rows, int64_t channels, uint32_t seed) {
    x = random_floats(static_cast<size_t>(rows * channels), seed);
    std::mt19937 engine(seed);
    for (int64_t i = 0; i < rows; ++i) tokens.push_back(static_cast<int32_t>(engine() % 20));
  }
};

class ConvLayer {
 public:
  ConvLayer(Ops& ops, const ShortConvShape& shape) : ops_(ops), shape_(shape), ngrams_(ops) {
    weights_ = random_floats(static_cast<size_t>(shape.channels * shape.taps), 83);
    conv_ = ops.pack_vector(weights_);
  }

  const std::vector<float>& weights() const { return weights_; }
  std::unique_ptr<RecurrentState> state() { return ops_.make_recurrent_state(shape_); }

  // Results of the pieces' rows: the convolution's channels, then what the n-grams find. `x`: the rows' inputs.
  std::vector<float> pass(const std::vector<Piece>& pieces, const std::vector<float>& x, bool kept) {
    const int64_t found = 3 * Ngrams::kCols;
    return run_pieces(ops_, pieces, x, shape_.channels, kept, [&](const RowBatch& rows, Tensor input) {
      const Tensor out = ops_.scratch(rows.rows(), shape_.channels + found);
      const Tensor rounded = ops_.scratch_input(rows.rows(), found);
      const std::vector<const Weight*> tables = borrowed(ngrams_.tables);
      EmbedNgramsArgs ngrams;
      ngrams.heads = &ngrams_.heads;
      ngrams.shape = &shape_;
      ngrams.tables = tables;
      ngrams.first_head = 1;
      ngrams.out = rounded;
      ngrams.rows = rows;
      ops_.embed_ngrams(ngrams);
      ngrams.out = out.columns(shape_.channels, found);
      ops_.embed_ngrams(ngrams);
      ShortConvArgs args;
      args.shape = &shape_;
      args.x = input;
      args.conv = conv_.get();
      args.out = out.columns(0, shape_.channels);
      args.rows = rows;
      ops_.short_conv(args);
      return out;
    });
  }

  const Ngrams& ngrams() const { return ngrams_; }

 private:
  Ops& ops_;
  ShortConvShape shape_;
  Ngrams ngrams_;
  std::vector<float> weights_;
  std::unique_ptr<Vector> conv_;
};

Piece conv_piece(const Line& line, RecurrentState* state, int64_t at, int64_t rows, int64_t accepted, int64_t certain) {
  Piece piece{at, rows, accepted, certain, pages_for(at + rows, 0, 1), {}, {state}};
  piece.tokens.assign(line.tokens.begin() + at, line.tokens.begin() + at + rows);
  return piece;
}

// Rows of results that must be what the whole line gave, and find what their n-grams pick.
void check_rows(const std::string& what, const ConvLayer& layer, const Line& line, const std::vector<float>& first,
                const std::vector<float>& got, int64_t at, int64_t rows, int64_t channels) {
  const int64_t cols = channels + 3 * Ngrams::kCols;
  EXPECT_TRUE(equal_bits(part_of(got, 0, rows, cols), part_of(first, at, rows, cols))) << what;
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<float> row = part_of(got, r, 1, cols);
    EXPECT_EQ(std::vector<float>(row.begin() + channels, row.end()), layer.ngrams().want(line.tokens, at + r))
        << what << ": n-grams of row " << at + r;
  }
}

// Protects the dilated convolution and the tokens that its state keeps: values, chunks of any size, windows of which
// any number of rows is accepted, states put away in between, other sequences beside it, eager and kept launches.
TEST(CudaShortConv, AgreesWithDoublePrecisionInEveryPass) {
  TF_NEED_GPU();
  constexpr int64_t kLength = 50;
  const std::unique_ptr<Ops> ops = gpu_ops();
  for (const ShortConvShape& shape :
       {ShortConvShape{.channels = 40, .taps = 4, .dilation = 3, .context = 2, .max_window = 8},
        ShortConvShape{.channels = 1028, .taps = 3, .dilation = 5, .context = 4, .max_window = 8},
        ShortConvShape{.channels = 64, .taps = 1, .dilation = 1, .context = 2, .max_window = 8}}) {
    const int64_t channels = shape.channels;
    ops->forget_runs();  // those of another shape
    ConvLayer layer(*ops, shape);
    const Line line(kLength, channels, 81), wrong(kLength, channels, 82);
    const auto rows_of = [&](const Line& from, int64_t at, int64_t rows) {
      return part_of(from.x, at, rows, channels);
    };
    std::vector<float> first;
    for (const bool kept : {false, true}) {
      const std::string mode = kept ? "kept" : "eager";
      for (const int64_t chunk : {kLength, int64_t{1}, int64_t{7}}) {
        const auto state = layer.state();
        for (int64_t at = 0; at < kLength; at += chunk) {
          const int64_t rows = std::min(chunk, kLength - at);
          const std::vector<float> got =
              layer.pass({conv_piece(line, state.get(), at, rows, 0, rows)}, rows_of(line, at, rows), kept);
          if (first.empty()) first = got;
          check_rows(mode + ", chunk " + std::to_string(chunk), layer, line, first, got, at, rows, channels);
        }
      }
      std::mt19937 engine(84);
      for (int trial = 0; trial < 4; ++trial) {
        auto state = layer.state();
        const auto other = layer.state();  // another sequence, before ours in each pass
        int64_t at = 0, accepted = 0;
        while (at + 9 < kLength) {
          const int64_t tentative = engine() % 9, good = engine() % static_cast<uint32_t>(tentative + 1);
          Line drafted = line;
          for (int64_t r = at + 1 + good; r < at + 1 + tentative; ++r) {
            std::copy_n(wrong.x.begin() + r * channels, channels, drafted.x.begin() + r * channels);
            drafted.tokens[static_cast<size_t>(r)] = wrong.tokens[static_cast<size_t>(r)];
          }
          std::vector<float> x = rows_of(wrong, at, 2);
          const std::vector<float> own = rows_of(drafted, at, 1 + tentative);
          x.insert(x.end(), own.begin(), own.end());
          const std::vector<float> got = layer.pass({conv_piece(wrong, other.get(), at, 2, 0, 2),
                                                     conv_piece(drafted, state.get(), at, 1 + tentative, accepted, 1)},
                                                    x, kept);
          const int64_t cols = channels + 3 * Ngrams::kCols;
          check_rows(mode + ", window at " + std::to_string(at), layer, line, first, part_of(got, 2, 1 + good, cols),
                     at, 1 + good, channels);
          at += 1 + good;
          accepted = good;
          std::vector<std::byte> bytes(static_cast<size_t>(state->bytes()));
          state->save(bytes);
          state = layer.state();
          ASSERT_TRUE(state->load(bytes, tentative));
        }
      }
    }
    const int64_t cols = channels + 3 * Ngrams::kCols;
    std::vector<float> values;
    for (int64_t r = 0; r < kLength; ++r) {
      values.insert(values.end(), first.begin() + r * cols, first.begin() + r * cols + channels);
    }
    const RefMatrix want = ref_short_conv(shape, ref_of(kLength, channels, line.x), layer.weights());
    EXPECT_LT(error_of(values, want, 0.1), 2e-5);
  }
}

// Protects: shapes that the kernels do not have are refused in a sentence.
TEST(ShortConv, RefusesOtherShapes) {
  EXPECT_EQ(short_conv_shape_error({.channels = 40, .taps = 4, .dilation = 3, .context = 2}), "");
  EXPECT_NE(short_conv_shape_error({.channels = 42, .taps = 4, .dilation = 3, .context = 2}), "");
  EXPECT_NE(short_conv_shape_error({.channels = 40, .taps = 17, .dilation = 3, .context = 2}), "");
  EXPECT_NE(short_conv_shape_error({.channels = 40, .taps = 4, .dilation = 3, .context = 33}), "");
}

// Protects: parts of a state do not overlap and fill it.
TEST(ShortConv, LayoutHasAPlaceForEverything) {
  const ShortConvShape shape = {.channels = 40, .taps = 4, .dilation = 3, .context = 2, .max_window = 8};
  const ShortConvLayout at = short_conv_layout(shape);
  EXPECT_EQ(at.history, 0);
  EXPECT_EQ(at.kept, 9 * 40);
  EXPECT_EQ(at.tokens, 17 * 40);
  EXPECT_EQ(at.kept_tokens, 17 * 40 + 2);
  EXPECT_EQ(at.words, 17 * 40 + 10);
  EXPECT_EQ(at.words, shape.state_values());
}

}  // namespace
}  // namespace tensorfold
