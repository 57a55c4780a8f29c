// The gated delta net's kernels: values against double precision; the same bits for any cut into passes, any windows
// with rejected rows, any neighbours; state blocks that hold all there is.
#include "kernels/cuda/delta_net.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/cuda/delta_net_layout.h"
#include "tests/cuda/recurrence_cases.h"

namespace tensorfold {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One row's inputs.
struct Token {
  std::vector<float> qkv, z, b, a;
};

struct Layer {
  DeltaNetShape shape;
  std::vector<float> conv, a_log, dt_bias, norm;
  std::vector<Token> tokens;
  float eps = 1e-6f;
  float decay_floor = -5.0f;
  bool sigmoid_gate = false;

  Layer(int64_t k_heads, int64_t v_heads, int64_t dk, int64_t dv, int64_t taps, int count, uint32_t seed,
        bool channels = false) {
    shape.channel_decay = channels;
    shape.k_heads = k_heads;
    shape.v_heads = v_heads;
    shape.dk = dk;
    shape.dv = dv;
    shape.conv_kernel = taps;
    for (int64_t h = 0; h < v_heads; ++h) shape.k_head_of.push_back(static_cast<int32_t>(h * k_heads / v_heads));
    const auto size = [](int64_t n) { return static_cast<size_t>(n); };
    conv = random_floats(size(shape.channels() * taps), seed + 1, 0.6f);
    a_log = random_floats(size(v_heads), seed + 2, 1.0f);
    dt_bias = random_floats(size(shape.decays()), seed + 3, 1.0f);
    norm = random_floats(size(dv), seed + 4, 1.0f);
    for (int i = 0; i < count; ++i) {
      const uint32_t s = seed + 100 + 4 * static_cast<uint32_t>(i);
      Token token{random_floats(size(shape.channels()), s), random_floats(size(v_heads * dv), s + 1),
                  random_floats(size(v_heads), s + 2), random_floats(size(shape.decays()), s + 3, 2.0f)};
      // Decays of every kind: next to 1, and rows that forget everything.
      if (i % 13 == 5) token.a.assign(token.a.size(), -9.0f);
      if (i % 29 == 17) token.a.assign(token.a.size(), 60.0f);
      tokens.push_back(std::move(token));
    }
  }

  /// A token that spoils whatever keeps a trace of it.
  int add_bad_token(float value) {
    Token bad = tokens[0];
    for (auto* part : {&bad.qkv, &bad.z, &bad.b, &bad.a}) part->assign(part->size(), value);
    tokens.push_back(bad);
    return static_cast<int>(tokens.size()) - 1;
  }
};

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }

// Plain double precision, token after token.
std::vector<std::vector<double>> reference(const Layer& layer, int count) {
  const DeltaNetShape& s = layer.shape;
  std::vector<double> state(static_cast<size_t>(s.v_heads * s.dk * s.dv), 0.0);
  std::vector<std::vector<double>> all;
  for (int t = 0; t < count; ++t) {
    std::vector<double> mixed(static_cast<size_t>(s.channels()));
    for (int64_t c = 0; c < s.channels(); ++c) {
      double sum = 0;
      for (int64_t j = 0; j < s.conv_kernel; ++j) {
        const int64_t at = t - (s.conv_kernel - 1) + j;
        if (at >= 0) {
          sum += double{layer.conv[static_cast<size_t>(c * s.conv_kernel + j)]} *
                 layer.tokens[static_cast<size_t>(at)].qkv[static_cast<size_t>(c)];
        }
      }
      mixed[static_cast<size_t>(c)] = silu(sum);
    }
    for (int64_t h = 0; h < 2 * s.k_heads; ++h) {
      double squares = 0;
      double* x = mixed.data() + h * s.dk;
      for (int64_t i = 0; i < s.dk; ++i) squares += x[i] * x[i];
      const double scale =
          (h < s.k_heads ? 1.0 / std::sqrt(static_cast<double>(s.dk)) : 1.0) / std::sqrt(squares + 1e-6);
      for (int64_t i = 0; i < s.dk; ++i) x[i] *= scale;
    }
    const Token& token = layer.tokens[static_cast<size_t>(t)];
    std::vector<double> out(static_cast<size_t>(s.v_heads * s.dv));
    for (int64_t h = 0; h < s.v_heads; ++h) {
      const auto at = static_cast<size_t>(h);
      const double beta = sigmoid(token.b[at]);
      const double rate = std::exp(double{layer.a_log[at]});
      const auto decay_of = [&](int64_t i) {
        const auto c = s.channel_decay ? static_cast<size_t>(h * s.dk + i) : at;
        const double x = double{token.a[c]} + layer.dt_bias[c];
        if (s.channel_decay) return std::exp(layer.decay_floor * sigmoid(rate * x));
        return std::exp(-rate * (x > 20 ? x : std::log1p(std::exp(x))));
      };
      std::vector<double> decay;
      for (int64_t i = 0; i < s.dk; ++i) decay.push_back(decay_of(i));
      const double* q = mixed.data() + s.k_head_of[at] * s.dk;
      const double* k = q + s.k_heads * s.dk;
      const double* v = mixed.data() + 2 * s.k_heads * s.dk + h * s.dv;
      std::vector<double> y(static_cast<size_t>(s.dv), 0.0);
      double squares = 0;
      for (int64_t c = 0; c < s.dv; ++c) {
        double* column = state.data() + h * s.dk * s.dv + c;
        double r = 0, sum = 0;
        for (int64_t i = 0; i < s.dk; ++i) r += k[i] * (column[i * s.dv] *= decay[static_cast<size_t>(i)]);
        for (int64_t i = 0; i < s.dk; ++i) sum += q[i] * (column[i * s.dv] += k[i] * (v[c] - r) * beta);
        y[static_cast<size_t>(c)] = sum;
        squares += sum * sum;
      }
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(s.dv) + double{layer.eps});
      for (int64_t c = 0; c < s.dv; ++c) {
        const auto i = static_cast<size_t>(h * s.dv + c);
        out[i] = y[static_cast<size_t>(c)] * scale * layer.norm[static_cast<size_t>(c)] *
                 (s.channel_decay || layer.sigmoid_gate ? sigmoid(token.z[i]) : silu(token.z[i]));
      }
    }
    all.push_back(out);
  }
  return all;
}

// Runs passes of one layer.
class Runner {
 public:
  explicit Runner(const Layer& layer)
      : layer_(layer),
        conv_(layer.conv),
        a_log_(layer.a_log),
        dt_bias_(layer.dt_bias),
        norm_(layer.norm),
        k_head_of_(layer.shape.k_head_of) {
    EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
  }
  ~Runner() { cudaStreamDestroy(stream_); }

  std::unique_ptr<CudaRecurrentState> state() const {
    auto made = CudaRecurrentState::create(layer_.shape, stream_);
    EXPECT_NE(made, nullptr) << cuda_failure();
    return made;
  }

  /// Output rows of all windows in order. `padding`: rows that belong to nobody, full of NaN; `spare`: groups that
  /// there might be, but are not (they also change how the columns are cut into blocks). Many rows, padding included,
  /// take other kernels than few.
  std::vector<Row> pass(const std::vector<Window>& windows, int padding = 0, int spare = 0, bool graph = false) {
    const DeltaNetShape& s = layer_.shape;
    const WindowRows rows(windows, padding, spare);
    const int64_t wide = s.channels() + 16, z_wide = s.v_heads * s.dv, heads_wide = s.v_heads + 3;
    const int64_t a_wide = s.decays() + 3;
    InputRows qkv(wide), z(z_wide), b(heads_wide), a(a_wide);
    for (const Window& w : windows) {
      for (const int id : w.tokens) {
        const Token& token = layer_.tokens[static_cast<size_t>(id)];
        qkv.append(token.qkv);
        z.append(token.z);
        b.append(token.b);
        a.append(token.a);
      }
    }
    const int count = rows.rows();
    const DeviceArray<float> d_qkv = qkv.on_device(count), d_z = z.on_device(count), d_b = b.on_device(count),
                             d_a = a.on_device(count);
    const OutputRows out(count, s.v_heads * s.dv);
    const DeviceRows device = rows.device();
    const WatchedWorkspace workspace(cuda_delta_net_workspace(device, s));
    CudaDeltaNetArgs args;
    args.shape = &s;
    args.layer = 1;
    args.qkv = {d_qkv.data(), count, s.channels(), wide};
    args.z = {d_z.data(), count, s.v_heads * s.dv, z_wide};
    args.b = {d_b.data(), count, s.v_heads, heads_wide};
    args.a = {d_a.data(), count, s.decays(), a_wide};
    args.decay_floor = layer_.decay_floor;
    args.conv = conv_.data();
    args.a_log = a_log_.data();
    args.dt_bias = dt_bias_.data();
    args.norm = norm_.data();
    args.k_head_of = k_head_of_.data();
    args.eps = layer_.eps;
    args.sigmoid_gate = layer_.sigmoid_gate;
    args.out = out.device();
    args.workspace = workspace.data();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (graph) {
      run_as_graph(stream_, [&] { cuda_delta_net(stream_, device, args); });
    } else {
      cuda_delta_net(stream_, device, args);
    }
    EXPECT_EQ(cuda_failure(), "");
    workspace.check();
    return out.get(rows.real());
  }

  std::vector<Row> serial(CudaRecurrentState* state, int count, int chunk, int spare = 0, int padding = 0) {
    return run_serial(*this, state, count, chunk, spare, padding);
  }

 private:
  const Layer& layer_;
  cudaStream_t stream_ = nullptr;
  DeviceArray<float> conv_, a_log_, dt_bias_, norm_;
  DeviceArray<int32_t> k_head_of_;
};

void check_values(const Layer& layer, int count, int spare, int padding = 0) {
  Runner runner(layer);
  const auto state = runner.state();
  const std::vector<Row> got = runner.serial(state.get(), count, count, spare, padding);
  const auto want = reference(layer, count);
  double worst = 0;
  for (size_t r = 0; r < got.size(); ++r) {
    for (size_t c = 0; c < got[r].size(); ++c) {
      const double value = from_bf16(got[r][c]), error = std::abs(value - want[r][c]);
      worst = std::max(worst, error / (std::abs(want[r][c]) + 0.05));
      ASSERT_LE(error, 0.006 * std::abs(want[r][c]) + 3e-4)
          << "row " << r << " col " << c << ": " << value << " instead of " << want[r][c];
    }
  }
  EXPECT_LE(worst, 0.006);
}

constexpr int kMany = 70;  // with so many rows of padding a pass has many rows

// Protects the values: all key dims, few and many rows, odd value dims, convolutions of 1, 2 and 5 taps, rows that
// forget and rows that do not, decays of heads and of channels.
TEST(CudaDeltaNet, AgreesWithDoublePrecision) {
  TF_NEED_GPU();
  for (const int padding : {0, kMany}) {
    check_values(Layer(2, 4, 32, 32, 4, 40, 11), 40, 0, padding);
    check_values(Layer(2, 4, 64, 64, 4, 40, 12), 40, 0, padding);
    check_values(Layer(2, 2, 128, 128, 4, 50, 13), 50, 0, padding);
    check_values(Layer(2, 6, 128, 128, 4, 40, 15), 40, 20, padding);
    check_values(Layer(1, 3, 32, 24, 2, 20, 16), 20, 0, padding);
    check_values(Layer(3, 3, 64, 8, 1, 20, 17), 20, 0, padding);
    check_values(Layer(1, 2, 32, 256, 5, 20, 18), 20, 0, padding);
    check_values(Layer(1, 2, 128, 136, 4, 20, 19), 20, 60, padding);
    check_values(Layer(2, 2, 16, 16, 4, 40, 81, true), 40, 0, padding);
    check_values(Layer(3, 3, 128, 128, 4, 50, 82, true), 50, 20, padding);
    check_values(Layer(2, 4, 64, 136, 3, 30, 83, true), 30, 0, padding);
    check_values(Layer(1, 2, 96, 24, 1, 20, 84, true), 20, 0, padding);
    check_values(Layer(1, 1, 32, 256, 5, 20, 85, true), 20, 0, padding);
  }
  check_values(Layer(2, 6, 128, 128, 4, 150, 14), 150, 0);
}

// Protects the output gate's other function, in the kernels for few rows and for many.
TEST(CudaDeltaNet, SigmoidGateAgreesWithDoublePrecision) {
  TF_NEED_GPU();
  Layer layer(2, 6, 128, 128, 4, 40, 20);
  layer.sigmoid_gate = true;
  for (const int padding : {0, kMany}) check_values(layer, 40, 0, padding);
}

// Protects prompts: cut anywhere, in passes of one row up to all, the same rows and the same state, history of the
// convolution included.
TEST(CudaDeltaNet, ChunksChangeNoBit) {
  TF_NEED_GPU();
  for (const Layer& layer :
       {Layer(2, 4, 32, 32, 4, 150, 21), Layer(1, 2, 64, 64, 4, 150, 22), Layer(1, 3, 128, 128, 4, 150, 23),
        Layer(2, 2, 16, 16, 4, 150, 24, true), Layer(2, 2, 128, 128, 4, 150, 25, true)}) {
    Runner runner(layer);
    const auto whole = runner.state();
    const std::vector<Row> want = runner.serial(whole.get(), 150, 150);
    for (const int chunk : {1, 7, 64}) {
      const auto state = runner.state();
      const std::string what = "dk " + std::to_string(layer.shape.dk) + " chunk " + std::to_string(chunk);
      expect_same(runner.serial(state.get(), 150, chunk), want, what);
      expect_same_state(*state, *whole, what);
    }
  }
}

// Protects the choice of kernels and blocks: one launch or three, a block a head or several, the same bits.
TEST(CudaDeltaNet, BlocksChangeNoBit) {
  TF_NEED_GPU();
  for (const auto& layer :
       {Layer(2, 6, 128, 128, 4, 50, 31), Layer(1, 2, 64, 200, 3, 50, 32), Layer(2, 2, 128, 128, 4, 50, 33, true)}) {
    Runner runner(layer);
    const auto several = runner.state();
    const std::vector<Row> want = runner.serial(several.get(), 50, 50);
    for (const auto& [spare, padding, chunk] :
         {std::array{60, 0, 50}, {0, kMany, 50}, {0, 0, 3}, {60, 0, 11}, {0, kMany, 8}, {0, kMany, 9}, {1, 0, 17}}) {
      const std::string what = "dk " + std::to_string(layer.shape.dk) + " spare " + std::to_string(spare) +
                               " padding " + std::to_string(padding) + " chunk " + std::to_string(chunk);
      const auto state = runner.state();
      expect_same(runner.serial(state.get(), 50, chunk, spare, padding), want, what);
      expect_same_state(*state, *several, what);
    }
  }
}

// Protects windows: `accept` of 15 drafts kept in every pass, the rejected ones poison; the kept rows' bits are those
// of serial decoding. Also with no certain row at all and 16 tentative ones.
void check_windows(const Layer& base, int spare, int padding) {
  Layer layer = base;
  const int count = static_cast<int>(layer.tokens.size());
  const int bad = layer.add_bad_token(kNan), worse = layer.add_bad_token(std::numeric_limits<float>::infinity());
  Runner runner(layer);
  const auto plain = runner.state();
  const std::vector<Row> want = runner.serial(plain.get(), count, 1);
  for (const int certain : {1, 0, 3}) {
    for (const int accept : {0, 1, 2, 3, 5, 8, 15, 16}) {
      const int tentative = certain == 0 ? 16 : 15;
      if (accept > tentative || certain + accept == 0) continue;
      const auto state = runner.state();
      const std::string what = "certain " + std::to_string(certain) + " accept " + std::to_string(accept);
      int committed = 0, accepted = 0;  // committed: tokens before this window
      while (committed < count) {
        const int sure = std::min(certain, count - committed);
        const int good = std::min(accept, count - committed - sure);
        Window w{state.get(), token_range(committed, sure + good), accepted, sure};
        while (static_cast<int>(w.tokens.size()) < sure + tentative) {
          w.tokens.push_back(w.tokens.size() % 2 == 0 ? bad : worse);
        }
        const std::vector<Row> got = runner.pass({w}, padding, spare);
        for (int i = 0; i < sure + good; ++i) {
          const std::string wrong = difference(got[static_cast<size_t>(i)], want[static_cast<size_t>(committed + i)]);
          ASSERT_EQ(wrong, "") << what << ", token " << committed + i;
        }
        committed += sure + good;
        accepted = good;
      }
      // One more row commits what is left over; its bits must not care how the rows before it came.
      const auto after = runner.state();
      runner.serial(after.get(), count, count);
      expect_same(runner.pass({{state.get(), {3}, accepted, 1}}), runner.pass({{after.get(), {3}, 0, 1}}),
                  what + ", end");
    }
  }
}
TEST(CudaDeltaNet, RejectedRowsLeaveNoTrace) {
  TF_NEED_GPU();
  check_windows(Layer(2, 4, 32, 32, 4, 40, 41), 0, 0);
  check_windows(Layer(2, 4, 32, 32, 4, 20, 41), 0, kMany);
  check_windows(Layer(1, 3, 128, 128, 4, 40, 42), 0, 0);
  check_windows(Layer(1, 3, 128, 128, 4, 20, 42), 100, 0);
  check_windows(Layer(1, 3, 64, 128, 5, 20, 43), 0, kMany);
  check_windows(Layer(2, 2, 16, 16, 4, 40, 44, true), 0, 0);
  check_windows(Layer(2, 2, 128, 128, 4, 20, 45, true), 3, kMany);
}

// Protects a commit that comes without rows: accepted rows advance the state, which then equals the serial one.
TEST(CudaDeltaNet, CommitWithoutRows) {
  TF_NEED_GPU();
  for (const Layer& layer : {Layer(2, 4, 64, 64, 4, 30, 51), Layer(2, 2, 48, 32, 4, 30, 52, true)}) {
    Runner runner(layer);
    for (int accepted = 0; accepted <= 16; ++accepted) {
      const auto state = runner.state(), serial = runner.state(), other = runner.state();
      runner.pass({{state.get(), token_range(0, 17), 0, 1}});
      // Another sequence has rows, so that the pass is not empty.
      runner.pass({{state.get(), {}, accepted, 0}, {other.get(), {5}, 0, 1}}, accepted % 2 == 0 ? 0 : kMany);
      runner.serial(serial.get(), accepted + 1, 1);
      const std::string what = "accepted " + std::to_string(accepted);
      expect_same(runner.pass({{state.get(), {20, 21}, 0, 2}}), runner.pass({{serial.get(), {20, 21}, 0, 2}}), what);
    }
  }
}

// Protects sequences from each other: alone, in any place, beside prompts, windows, NaN and infinities, with padding.
TEST(CudaDeltaNet, NeighboursChangeNoBit) {
  TF_NEED_GPU();
  for (Layer layer :
       {Layer(2, 4, 32, 32, 4, 40, 61), Layer(2, 6, 128, 128, 4, 40, 62), Layer(2, 2, 48, 32, 4, 40, 63, true)}) {
    const int bad = layer.add_bad_token(kNan), worse = layer.add_bad_token(std::numeric_limits<float>::infinity());
    Runner runner(layer);
    const auto alone = runner.state();
    const std::vector<Row> want = runner.serial(alone.get(), 23, 23);
    const std::vector<int> ours = token_range(0, 23), spoilt(30, bad), hot(5, worse);
    for (const int place : {0, 1, 2, 3}) {
      std::vector<std::unique_ptr<CudaRecurrentState>> states;
      for (int i = 0; i < 4; ++i) states.push_back(runner.state());
      std::vector<Window> windows{
          {states[1].get(), spoilt, 0, 30}, {states[2].get(), hot, 0, 1}, {states[3].get(), token_range(9, 31), 0, 31}};
      windows.insert(windows.begin() + place, {states[0].get(), ours, 0, 23});
      size_t first = 0;
      for (int g = 0; g < place; ++g) first += windows[static_cast<size_t>(g)].tokens.size();
      const std::vector<Row> all = runner.pass(windows, 3 * place, place);
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(first);
      const std::string what = "place " + std::to_string(place);
      expect_same({at, at + 23}, want, what);
      expect_same_state(*states[0], *alone, what);
    }
  }
}

// Protects graphs, reset and copies: captured launches give the bits of plain ones, a state after reset() is a new one,
// and the bytes at data() are the whole state.
TEST(CudaDeltaNet, GraphResetAndCopy) {
  TF_NEED_GPU();
  const Layer layer(2, 4, 64, 64, 4, 100, 71);
  Runner runner(layer);
  const auto plain = runner.state(), graph = runner.state();
  const Window prompt{plain.get(), token_range(0, 80), 0, 80};
  Window same = prompt;
  same.state = graph.get();
  expect_same(runner.pass({same}, 0, 0, true), runner.pass({prompt}), "graph, prompt");
  const Window window{plain.get(), token_range(80, 9), 0, 1};
  same = window;
  same.state = graph.get();
  expect_same(runner.pass({same}, 7, 2, true), runner.pass({window}), "graph, window");
  const auto copy = runner.state();
  ASSERT_EQ(copy->bytes(), plain->bytes());
  ASSERT_EQ(cudaMemcpy(copy->data(), plain->data(), static_cast<size_t>(plain->bytes()), cudaMemcpyDeviceToDevice),
            cudaSuccess);
  const std::vector<Row> next = runner.pass({{plain.get(), {90, 91}, 4, 1}});
  expect_same(runner.pass({{copy.get(), {90, 91}, 4, 1}}), next, "copy");
  expect_same(runner.pass({{graph.get(), {90, 91}, 4, 1}}), next, "after a graph");
  plain->reset();
  const auto fresh = runner.state();
  expect_same_state(*plain, *fresh, "reset");
}

// Protects users of models that the kernels do not have: a sentence, no crash. Needs no GPU: nothing is allocated.
TEST(CudaDeltaNet, RefusesOtherShapes) {
  const auto refused = [](int64_t dk, int64_t dv, int64_t taps, bool channels = false) {
    DeltaNetShape shape;
    shape.channel_decay = channels;
    shape.k_heads = shape.v_heads = 1;
    shape.dk = dk;
    shape.dv = dv;
    shape.conv_kernel = taps;
    shape.k_head_of = {0};
    std::string error;
    EXPECT_EQ(CudaRecurrentState::create(shape, nullptr, &error), nullptr);
    return error;
  };
  EXPECT_NE(refused(96, 128, 4).find("key heads of 96 dims"), std::string::npos);
  EXPECT_NE(refused(136, 128, 4, true).find("multiple of 8 up to 128"), std::string::npos);
  EXPECT_NE(refused(128, 100, 4).find("value heads of 100 dims"), std::string::npos);
  EXPECT_NE(refused(128, 264, 4).find("value heads of 264 dims"), std::string::npos);
  EXPECT_NE(refused(128, 128, 17).find("convolution of 17 taps"), std::string::npos);
}

// Protects the index functions: a warp's lanes hold every element of 4 columns once, at the float of [column][dk] that
// it has; and the parts of a state do not overlap.
TEST(CudaDeltaNet, LayoutIsABijection) {
  for (const int dk : {32, 64, 128}) {
    std::vector<int> seen(static_cast<size_t>(kColumnsAWarp * dk), 0);
    for (int lane = 0; lane < 32; ++lane) {
      for (int m = 0; m < dk / 32; ++m) {
        for (int e = 0; e < 4; ++e) {
          const int row = 32 * m + 4 * lane_segment(lane) + e, at = delta_lane_offset(dk, lane, m, e);
          EXPECT_EQ(at, lane_column(lane) * dk + row);
          ++seen[static_cast<size_t>(at)];
        }
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), kColumnsAWarp * dk);
    for (const int dv : {8, 24, 128}) {
      const DeltaStateLayout at = delta_state_layout(dk, dv, 4, 16);
      EXPECT_EQ(at.rows, dk * dv);
      EXPECT_GE(at.b, at.rows + (3 + 16) * (2 * dk + dv));
      EXPECT_GE(at.a, at.b + 16);
      EXPECT_GE(at.head, at.a + 16);
      EXPECT_EQ(at.rows % 4, 0);
      EXPECT_EQ(at.head % 32, 0);
    }
  }
}

}  // namespace
}  // namespace tensorfold
