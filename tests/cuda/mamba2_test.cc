// Mamba2's kernels: values against double precision; the same bits for any cut into passes, any windows with rejected
// rows, any neighbours; state blocks that hold all there is.
#include "kernels/cuda/mamba2.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/cuda/mamba2_layout.h"
#include "tests/cuda/recurrence_cases.h"

namespace tensorfold {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

size_t size(int64_t n) { return static_cast<size_t>(n); }

// One row's inputs.
struct Token {
  std::vector<float> z, xbc, dt;
};

struct Layer {
  Mamba2Shape shape;
  std::vector<float> conv, conv_bias, a_log, dt_bias, d, norm;
  std::vector<Token> tokens;
  float eps = 1e-5f, least = 0.0f, most = kInfinity;

  Layer(int64_t heads, int64_t head_dim, int64_t groups, int64_t state, int64_t taps, int count, uint32_t seed) {
    shape = {.heads = heads, .head_dim = head_dim, .groups = groups, .state = state, .conv_kernel = taps};
    conv = random_floats(size(shape.channels() * taps), seed + 1, 0.6f);
    conv_bias = random_floats(size(shape.channels()), seed + 2, 0.3f);
    a_log = random_floats(size(heads), seed + 3, 1.0f);
    dt_bias = random_floats(size(heads), seed + 4, 1.0f);
    d = random_floats(size(heads), seed + 5, 1.0f);
    norm = random_floats(size(shape.width()), seed + 6, 1.0f);
    for (int i = 0; i < count; ++i) {
      const uint32_t s = seed + 100 + 3 * static_cast<uint32_t>(i);
      Token token{random_floats(size(shape.width()), s), random_floats(size(shape.channels()), s + 1),
                  random_floats(size(heads), s + 2, 2.0f)};
      // Decays of every kind: next to 1, and rows that forget everything.
      if (i % 13 == 5) token.dt.assign(token.dt.size(), -9.0f);
      if (i % 29 == 17) token.dt.assign(token.dt.size(), 60.0f);
      tokens.push_back(std::move(token));
    }
  }

  /// A token that spoils whatever keeps a trace of it.
  int add_bad_token(float value) {
    Token bad = tokens[0];
    for (auto* part : {&bad.z, &bad.xbc, &bad.dt}) part->assign(part->size(), value);
    tokens.push_back(bad);
    return static_cast<int>(tokens.size()) - 1;
  }
};

double silu(double x) { return x / (1.0 + std::exp(-x)); }

// Convolved channels of token t.
std::vector<double> mixed(const Layer& layer, int t) {
  const Mamba2Shape& s = layer.shape;
  std::vector<double> out;
  for (int64_t c = 0; c < s.channels(); ++c) {
    double sum = layer.conv_bias.empty() ? 0.0 : double{layer.conv_bias[size(c)]};
    for (int64_t j = 0; j < s.conv_kernel; ++j) {
      const int64_t at = t - (s.conv_kernel - 1) + j;
      if (at >= 0) {
        sum += double{layer.conv[size(c * s.conv_kernel + j)]} * double{layer.tokens[size(at)].xbc[size(c)]};
      }
    }
    out.push_back(silu(sum));
  }
  return out;
}

// Plain double precision, token after token.
std::vector<std::vector<double>> reference(const Layer& layer, int count) {
  const Mamba2Shape& s = layer.shape;
  const int64_t together = s.heads / s.groups, wide = together * s.head_dim;
  std::vector<double> state(size(s.width() * s.state), 0.0);
  std::vector<std::vector<double>> all;
  for (int t = 0; t < count; ++t) {
    const std::vector<double> u = mixed(layer, t);
    const Token& token = layer.tokens[size(t)];
    std::vector<double> out(size(s.width()));
    for (int64_t h = 0; h < s.heads; ++h) {
      const double raw = double{token.dt[size(h)]} + layer.dt_bias[size(h)];
      const double step =
          std::clamp(raw > 20 ? raw : std::log1p(std::exp(raw)), double{layer.least}, double{layer.most});
      const double decay = std::exp(-std::exp(double{layer.a_log[size(h)]}) * step);
      const double* b = u.data() + s.width() + h / together * s.state;
      const double* c = b + s.groups * s.state;
      for (int64_t i = h * s.head_dim; i < (h + 1) * s.head_dim; ++i) {
        double y = layer.d[size(h)] * u[size(i)];
        for (int64_t n = 0; n < s.state; ++n) {
          double& cell = state[size(i * s.state + n)];
          cell = decay * cell + step * u[size(i)] * b[n];
          y += c[n] * cell;
        }
        out[size(i)] = y * silu(token.z[size(i)]);
      }
    }
    for (int64_t g = 0; g < s.groups; ++g) {
      double squares = 0;
      for (int64_t i = g * wide; i < (g + 1) * wide; ++i) squares += out[size(i)] * out[size(i)];
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(wide) + double{layer.eps});
      for (int64_t i = g * wide; i < (g + 1) * wide; ++i) out[size(i)] *= scale * layer.norm[size(i)];
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
        conv_bias_(layer.conv_bias),
        a_log_(layer.a_log),
        dt_bias_(layer.dt_bias),
        d_(layer.d),
        norm_(layer.norm) {
    EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
  }
  ~Runner() { cudaStreamDestroy(stream_); }

  std::unique_ptr<CudaRecurrentState> state() const {
    auto made = CudaRecurrentState::create(layer_.shape, stream_);
    EXPECT_NE(made, nullptr) << cuda_failure();
    return made;
  }

  /// Output rows of all windows in order. `padding`: rows that belong to nobody, full of NaN; `spare`: groups that
  /// there might be, but are not. Many rows, padding included, take other kernels than few.
  std::vector<Row> pass(const std::vector<Window>& windows, int padding = 0, int spare = 0, bool graph = false) {
    const Mamba2Shape& s = layer_.shape;
    const WindowRows rows(windows, padding, spare);
    const int64_t z_wide = s.width() + 4, wide = s.channels() + 16, dt_wide = s.heads + 3;
    InputRows z(z_wide), xbc(wide), dt(dt_wide);
    for (const Window& w : windows) {
      for (const int id : w.tokens) {
        const Token& token = layer_.tokens[size(id)];
        z.append(token.z);
        xbc.append(token.xbc);
        dt.append(token.dt);
      }
    }
    const int count = rows.rows();
    const DeviceArray<float> d_z = z.on_device(count), d_xbc = xbc.on_device(count), d_dt = dt.on_device(count);
    const OutputRows out(count, s.width());
    const DeviceRows device = rows.device();
    const WatchedWorkspace workspace(cuda_mamba2_workspace(device, s));
    CudaMamba2Args args = parameters();
    args.layer = 1;
    args.z = {d_z.data(), count, s.width(), z_wide};
    args.xbc = {d_xbc.data(), count, s.channels(), wide};
    args.dt = {d_dt.data(), count, s.heads, dt_wide};
    args.out = out.device();
    args.workspace = workspace.data();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (graph) {
      run_as_graph(stream_, [&] { cuda_mamba2(stream_, device, args); });
    } else {
      cuda_mamba2(stream_, device, args);
    }
    EXPECT_EQ(cuda_failure(), "");
    workspace.check();
    return out.get(rows.real());
  }

  std::vector<Row> serial(CudaRecurrentState* state, int count, int chunk, int spare = 0, int padding = 0) {
    return run_serial(*this, state, count, chunk, spare, padding);
  }

 private:
  CudaMamba2Args parameters() const {
    CudaMamba2Args args;
    args.shape = &layer_.shape;
    args.conv = conv_.data();
    args.conv_bias = layer_.conv_bias.empty() ? nullptr : conv_bias_.data();
    args.a_log = a_log_.data();
    args.dt_bias = dt_bias_.data();
    args.d = d_.data();
    args.norm = norm_.data();
    args.eps = layer_.eps;
    args.least_step = layer_.least;
    args.most_step = layer_.most;
    return args;
  }

  const Layer& layer_;
  cudaStream_t stream_ = nullptr;
  DeviceArray<float> conv_, conv_bias_, a_log_, dt_bias_, d_, norm_;
};

void check_values(const Layer& layer, int count, int spare, int padding) {
  SCOPED_TRACE("heads of " + std::to_string(layer.shape.head_dim) + ", states of " + std::to_string(layer.shape.state) +
               ", padding " + std::to_string(padding));
  Runner runner(layer);
  const auto state = runner.state();
  const std::vector<Row> got = runner.serial(state.get(), count, count, spare, padding);
  const auto want = reference(layer, count);
  for (size_t r = 0; r < got.size(); ++r) {
    for (size_t c = 0; c < got[r].size(); ++c) {
      const double value = from_bf16(got[r][c]), error = std::abs(value - want[r][c]);
      ASSERT_LE(error, 0.006 * std::abs(want[r][c]) + 3e-4)
          << "row " << r << " col " << c << ": " << value << " instead of " << want[r][c];
    }
  }
}

constexpr int kMany = 70;  // with so many rows of padding a pass has many rows

// Protects the values: all state sizes, few and many rows, odd head dims, groups wider than a warp holds, convolutions
// of 1, 2, 4, 5 and 16 taps, with and without bias, bounded time steps, rows that forget and rows that do not.
TEST(CudaMamba2, AgreesWithDoublePrecision) {
  TF_NEED_GPU();
  for (const int padding : {0, kMany}) {
    check_values(Layer(8, 16, 4, 32, 4, 40, 11), 40, 0, padding);
    check_values(Layer(4, 64, 2, 64, 4, 40, 12), 40, 3, padding);
    check_values(Layer(8, 64, 1, 128, 4, 50, 13), 50, 0, padding);
    check_values(Layer(2, 32, 1, 256, 4, 40, 14), 40, 20, padding);
    check_values(Layer(3, 24, 3, 64, 2, 20, 15), 20, 0, padding);
    check_values(Layer(2, 8, 1, 32, 1, 20, 16), 20, 0, padding);
    check_values(Layer(16, 80, 2, 128, 5, 20, 17), 20, 0, padding);
    check_values(Layer(2, 40, 2, 128, 16, 40, 18), 40, 0, padding);
    Layer plain(4, 64, 2, 128, 4, 30, 19);
    plain.conv_bias.clear();
    plain.least = 0.5f;
    plain.most = 1.0f;
    check_values(plain, 30, 0, padding);
  }
  check_values(Layer(16, 64, 2, 128, 4, 150, 20), 150, 0, 0);
}

// Protects prompts: cut anywhere, in passes of one row up to all, the same rows and the same state, history of the
// convolution included.
TEST(CudaMamba2, ChunksChangeNoBit) {
  TF_NEED_GPU();
  for (const Layer& layer : {Layer(8, 16, 4, 32, 4, 150, 21), Layer(4, 64, 2, 64, 4, 150, 22),
                             Layer(8, 64, 1, 128, 4, 150, 23), Layer(2, 40, 1, 256, 5, 150, 24)}) {
    Runner runner(layer);
    const auto whole = runner.state();
    const std::vector<Row> want = runner.serial(whole.get(), 150, 150);
    for (const int chunk : {1, 7, 64, 67}) {
      const auto state = runner.state();
      const std::string what = "states of " + std::to_string(layer.shape.state) + ", chunk " + std::to_string(chunk);
      expect_same(runner.serial(state.get(), 150, chunk), want, what);
      expect_same_state(*state, *whole, what);
    }
  }
}

// Protects the choice of kernels: one launch or three, any number of groups that might be, the same bits.
TEST(CudaMamba2, BlocksChangeNoBit) {
  TF_NEED_GPU();
  for (const auto& layer : {Layer(16, 64, 2, 128, 4, 50, 31), Layer(4, 88, 2, 64, 3, 50, 32)}) {
    Runner runner(layer);
    const auto several = runner.state();
    const std::vector<Row> want = runner.serial(several.get(), 50, 50);
    for (const auto& [spare, padding, chunk] :
         {std::array{60, 0, 50}, {0, kMany, 50}, {0, 0, 3}, {60, 0, 11}, {0, kMany, 8}, {0, kMany, 9}, {1, 0, 17}}) {
      const std::string what = "states of " + std::to_string(layer.shape.state) + " spare " + std::to_string(spare) +
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
  const int bad = layer.add_bad_token(kNan), worse = layer.add_bad_token(kInfinity);
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
          const std::string wrong = difference(got[size(i)], want[size(committed + i)]);
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
TEST(CudaMamba2, RejectedRowsLeaveNoTrace) {
  TF_NEED_GPU();
  check_windows(Layer(8, 16, 4, 32, 4, 40, 41), 0, 0);
  check_windows(Layer(8, 16, 4, 32, 4, 20, 41), 0, kMany);
  check_windows(Layer(8, 64, 2, 128, 4, 40, 42), 0, 0);
  check_windows(Layer(8, 64, 2, 128, 4, 20, 42), 100, 0);
  check_windows(Layer(8, 64, 2, 128, 4, 20, 42), 0, kMany);
  check_windows(Layer(2, 40, 1, 256, 5, 20, 43), 0, kMany);
}

// Protects a commit that comes without rows: accepted rows advance the state, which then equals the serial one.
TEST(CudaMamba2, CommitWithoutRows) {
  TF_NEED_GPU();
  const Layer layer(4, 64, 2, 64, 4, 30, 51);
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

// Protects sequences from each other: alone, in any place, beside prompts, windows, NaN and infinities, with padding.
TEST(CudaMamba2, NeighboursChangeNoBit) {
  TF_NEED_GPU();
  for (Layer layer : {Layer(8, 16, 4, 32, 4, 40, 61), Layer(8, 64, 2, 128, 4, 40, 62)}) {
    const int bad = layer.add_bad_token(kNan), worse = layer.add_bad_token(kInfinity);
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
      for (int g = 0; g < place; ++g) first += windows[size(g)].tokens.size();
      const std::vector<Row> all = runner.pass(windows, 3 * place, place);
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(first);
      const std::string what = "place " + std::to_string(place);
      expect_same({at, at + 23}, want, what);
      expect_same_state(*states[0], *alone, what);
    }
  }
}

// Protects the cut over ranks: a rank's groups of heads have the bits that they have in the whole layer.
TEST(CudaMamba2, GroupsOfHeadsStandAlone) {
  TF_NEED_GPU();
  const Layer whole(8, 64, 4, 128, 4, 80, 65);
  const Mamba2Shape& s = whole.shape;
  const int64_t first = 2, together = s.heads / s.groups, wide = together * s.head_dim;  // groups 2 and 3
  Layer part(4, 64, 2, 128, 4, 0, 65);
  const auto cut = [](const std::vector<float>& from, int64_t begin, int64_t end) {
    return std::vector<float>(from.begin() + begin, from.begin() + end);
  };
  // Channels of the part: x, B and C of its groups.
  const auto channels = [&](const std::vector<float>& from, int64_t each) {
    std::vector<float> out;
    const int64_t b = s.width(), c = s.width() + s.groups * s.state;
    for (const auto& [begin, end] :
         {std::pair{first * wide, s.width()}, {b + first * s.state, c}, {c + first * s.state, s.channels()}}) {
      const std::vector<float> some = cut(from, begin * each, end * each);
      out.insert(out.end(), some.begin(), some.end());
    }
    return out;
  };
  part.conv = channels(whole.conv, s.conv_kernel);
  part.conv_bias = channels(whole.conv_bias, 1);
  for (auto [to, from] : {std::pair{&part.a_log, &whole.a_log}, {&part.dt_bias, &whole.dt_bias}, {&part.d, &whole.d}}) {
    *to = cut(*from, first * together, s.heads);
  }
  part.norm = cut(whole.norm, first * wide, s.width());
  for (const Token& token : whole.tokens) {
    part.tokens.push_back(
        {cut(token.z, first * wide, s.width()), channels(token.xbc, 1), cut(token.dt, first * together, s.heads)});
  }
  Runner runner(whole), own(part);
  for (const int chunk : {80, 9}) {
    const auto state = runner.state(), own_state = own.state();
    std::vector<Row> want;
    for (const Row& row : runner.serial(state.get(), 80, chunk))
      want.emplace_back(row.begin() + first * wide, row.end());
    expect_same(own.serial(own_state.get(), 80, chunk), want, "chunk " + std::to_string(chunk));
  }
}

// Protects graphs, reset and copies: captured launches give the bits of plain ones, a state after reset() is a new one,
// a state that was copied, or put away and brought back with kept rows, goes on as it would have.
TEST(CudaMamba2, GraphResetAndCopy) {
  TF_NEED_GPU();
  const Layer layer(4, 64, 2, 64, 4, 100, 71);
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
  expect_same_state(*graph, *plain, "graph, window");
  const auto copy = runner.state(), loaded = runner.state();
  copy->copy_from(*plain);
  EXPECT_TRUE(loaded->load(bytes_of(*plain), 8));
  const std::vector<Row> next = runner.pass({{plain.get(), {90, 91}, 4, 1}});
  for (const auto& [state, what] : {std::pair{copy.get(), "copy"}, {loaded.get(), "loaded"}, {graph.get(), "graph"}}) {
    expect_same(runner.pass({{state, {90, 91}, 4, 1}}), next, what);
    expect_same_state(*state, *plain, what);
  }
  plain->reset();
  const auto fresh = runner.state();
  expect_same_state(*plain, *fresh, "reset");
  // Bytes from a file whose counters are not zero would leave blocks waiting for too few of each other.
  std::vector<std::byte> wrong = bytes_of(*copy);
  const Mamba2StateLayout at = mamba2_state_layout(2, 64, 64, 4, layer.shape.max_window);
  wrong[size(4 * (at.group + at.arrivals))] = std::byte{1};
  EXPECT_FALSE(copy->load(wrong, 1));
  wrong = bytes_of(*plain);
  EXPECT_TRUE(copy->load(wrong, 1));
  wrong.pop_back();
  EXPECT_FALSE(copy->load(wrong, 1));
}

// Protects users of models that the kernels do not have: a sentence, no crash. Needs no GPU: nothing is allocated.
TEST(CudaMamba2, RefusesOtherShapes) {
  const auto refused = [](int64_t head_dim, int64_t state, int64_t taps, int64_t heads) {
    const Mamba2Shape shape = {.heads = heads, .head_dim = head_dim, .groups = 2, .state = state, .conv_kernel = taps};
    std::string error;
    EXPECT_EQ(CudaRecurrentState::create(shape, nullptr, &error), nullptr);
    return error;
  };
  EXPECT_NE(refused(64, 96, 4, 4).find("states of 96"), std::string::npos);
  EXPECT_NE(refused(20, 128, 4, 4).find("heads of 20 dims"), std::string::npos);
  EXPECT_NE(refused(64, 128, 17, 4).find("convolution of 17 taps"), std::string::npos);
  EXPECT_NE(refused(64, 128, 4, 3).find("heads, groups or window"), std::string::npos);
}

// Protects the state block: its parts do not overlap and begin where loads of 16 bytes may.
TEST(CudaMamba2, LayoutHasRoomForAll) {
  for (const auto& [together, head_dim, state, taps, window] :
       {std::array<int64_t, 5>{8, 64, 128, 4, 16}, {1, 8, 32, 1, 1}, {3, 40, 256, 16, 7}}) {
    const Mamba2StateLayout at = mamba2_state_layout(together, head_dim, state, taps, window);
    EXPECT_EQ(at.arrivals, together * head_dim * state);
    EXPECT_GE(at.rows, at.arrivals + 1);
    EXPECT_GE(at.dt, at.rows + (taps - 1 + window) * (together * head_dim + 2 * state));
    EXPECT_GE(at.group, at.dt + window * together);
    EXPECT_EQ(at.rows % 4, 0);
    EXPECT_EQ(at.row_floats % 4, 0);
    EXPECT_EQ(at.group % 32, 0);
  }
}

}  // namespace
}  // namespace tensorfold
