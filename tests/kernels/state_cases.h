// What a cache of states relies on, for any backend: a page or a state that was copied, or put away and brought back,
// is the same in every bit and goes on to the same bits; whatever lies beside it is untouched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/ops.h"

namespace tensorfold::state_cases {

using Failures = std::vector<std::string>;

inline void expect(bool ok, const std::string& what, Failures* failures) {
  if (!ok) failures->push_back(what);
}

// splitmix64, in [-1, 1).
inline std::vector<float> numbers(int64_t count, uint64_t seed) {
  std::vector<float> out;
  uint64_t state = seed;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t x = state += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    out.push_back(static_cast<float>(static_cast<int64_t>((x ^ (x >> 31)) >> 40)) * 0x1p-23f - 1.0f);
  }
  return out;
}

inline Tensor uploaded(Ops& ops, int64_t rows, int64_t cols, const std::vector<float>& values) {
  const Tensor tensor = ops.scratch(rows, cols);
  ops.upload(values, tensor);
  return tensor;
}

// The rows of one group, with what Ops::run and the ops look at.
struct Rows {
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  std::vector<std::vector<RecurrentState*>> recurrent;

  Rows(int64_t first, int64_t count, int64_t accepted, int64_t certain, std::span<const int32_t> pages)
      : tokens(static_cast<size_t>(count), 0) {
    for (int64_t i = 0; i < count; ++i) positions.push_back(first + i);
    groups.push_back({0, count, first, accepted, certain, pages});
  }
  RowBatch batch() const {
    RowBatch rows;
    rows.tokens = tokens;
    rows.positions = positions;
    rows.groups = groups;
    rows.recurrent = recurrent;
    return rows;
  }
};

inline std::vector<std::byte> saved(const PagedMemory& memory, int32_t page) {
  std::vector<std::byte> bytes(static_cast<size_t>(memory.page_bytes()));
  memory.save_page(page, bytes);
  return bytes;
}

// Copies, saves and loads among `pages` pages that all hold something different.
inline void check_pages(PagedMemory& memory, int32_t pages, const std::string& name, Failures* failures) {
  std::vector<std::vector<std::byte>> before;
  for (int32_t page = 0; page < pages; ++page) before.push_back(saved(memory, page));
  for (int32_t page = 1; page < pages; ++page) {
    expect(before[0] != before[static_cast<size_t>(page)], name + ": pages that should differ do not", failures);
  }
  memory.copy_page(1, 3);
  before[3] = before[1];
  memory.load_page(0, before[2]);
  before[0] = before[2];
  for (int32_t page = 0; page < pages; ++page) {
    expect(saved(memory, page) == before[static_cast<size_t>(page)],
           name + ": page " + std::to_string(page) + " is not what was copied or loaded, or was touched", failures);
  }
}

inline Failures kv_pages(Ops& ops) {
  constexpr int64_t kLayers = 3, kPages = 5, kHeads = 2, kDim = 32;
  Failures failures;
  const auto cache = ops.make_kv_cache(kLayers, kPages, kHeads, kDim);
  const std::vector<int32_t> table = {4, 1, 0, 3, 2};
  constexpr int64_t kRows = kPages * kPageTokens;
  Rows rows(0, kRows, 0, kRows, table);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    ops.begin_pass();
    const auto write = [&](const RowBatch& batch, Tensor) {
      const Tensor k = uploaded(ops, kRows, kHeads * kDim, numbers(kRows * kHeads * kDim, 2 * layer + 1));
      ops.kv_write(*cache, layer, k, uploaded(ops, kRows, kHeads * kDim, numbers(kRows * kHeads * kDim, 2 * layer + 2)),
                   batch);
      return k;
    };
    ops.run(RunKind::kForward, rows.batch(), {}, false, write);
    expect(ops.finish_pass().empty(), "keys and values: the device failed", &failures);
  }
  check_pages(*cache, kPages, "keys and values", &failures);
  return failures;
}

inline Failures row_pages(Ops& ops) {
  constexpr int64_t kPages = 5;
  Failures failures;
  if (!ops.supports_row_caches()) return failures;
  // A layer with a row a token between two with pooled rows, which this check leaves at what loading gives them.
  const std::vector<RowCacheLayer> layers = {
      {.width = 12, .tokens = 4}, {.width = 24, .tokens = 1}, {.width = 8, .tokens = 64}};
  const auto cache = ops.make_row_cache(layers, kPages);
  expect(cache->page_bytes() == (12 * 16 + 24 * 64 + 8) * 4, "rows: bytes of a page", &failures);
  for (int32_t page = 0; page < kPages; ++page) {
    std::vector<std::byte> bytes(static_cast<size_t>(cache->page_bytes()));
    const std::vector<float> values = numbers(cache->page_bytes() / 4, 100 + static_cast<uint64_t>(page));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    cache->load_page(page, bytes);
    expect(saved(*cache, page) == bytes, "rows: what was loaded is not what is saved", &failures);
  }
  const std::vector<int32_t> table = {4, 1, 0, 3, 2};
  constexpr int64_t kRows = kPages * kPageTokens;
  const Rows rows(0, kRows, 0, kRows, table);
  ops.begin_pass();
  ops.run(RunKind::kForward, rows.batch(), {}, false, [&](const RowBatch& batch, Tensor) {
    const Tensor values = uploaded(ops, kRows, 24, numbers(kRows * 24, 7));
    ops.row_write(*cache, 1, values, batch);
    return values;
  });
  expect(ops.finish_pass().empty(), "rows: the device failed", &failures);
  check_pages(*cache, kPages, "rows", &failures);
  return failures;
}

// One recurrent layer's pass over inputs [first, first + count) of a fixed sequence.
class RecurrentLayer {
 public:
  RecurrentLayer(Ops& ops, int64_t width) : ops_(ops), width_(width) {
    std::vector<float> ones(static_cast<size_t>(width * width));
    for (int64_t i = 0; i < width; ++i) ones[static_cast<size_t>(i * width + i)] = 1.0f;
    MatrixSource source;
    source.rows = source.cols = width;
    source.data = reinterpret_cast<const std::byte*>(ones.data());
    source.row_bytes = width * static_cast<int64_t>(sizeof(float));
    diagonal_ = ops.pack({&source, 1});
  }
  virtual ~RecurrentLayer() = default;
  virtual StateShape shape() const = 0;

  std::vector<float> pass(RecurrentState* state, int64_t first, int64_t count, int64_t accepted, int64_t certain) {
    const std::vector<int32_t> pages = {0, 1};
    Rows rows(first, count, accepted, certain, pages);
    rows.recurrent = {{state}};
    std::vector<float> out(static_cast<size_t>(count * width_));
    ops_.begin_pass();
    const Tensor result = ops_.run(RunKind::kForward, rows.batch(), {}, false, [&](const RowBatch& batch, Tensor) {
      const auto input = [&](int64_t cols, uint64_t seed) {
        const std::vector<float> all = numbers(kLength * cols, seed);
        return uploaded(ops_, batch.rows(), cols, padded(all, first * cols, count * cols, batch.rows() * cols));
      };
      const Tensor mixed = ops_.scratch_input(batch.rows(), width_);
      step(input, batch, mixed);
      // What only products read may be rounded, and cannot be downloaded: a product with ones on the diagonal can.
      const Tensor values = ops_.scratch(batch.rows(), width_);
      ops_.matmul(*diagonal_, mixed, values);
      return values;
    });
    ops_.download(result.row_range(0, count), out);
    ops_.finish_pass();
    return out;
  }

 protected:
  /// The rows' inputs of so many columns; the number tells one input from another.
  using Input = std::function<Tensor(int64_t cols, uint64_t seed)>;
  virtual void step(const Input& input, const RowBatch& rows, Tensor out) = 0;
  Ops& ops_;

 private:
  static constexpr int64_t kLength = 64;
  static std::vector<float> padded(const std::vector<float>& all, int64_t first, int64_t count, int64_t size) {
    std::vector<float> out(all.begin() + first, all.begin() + first + count);
    out.resize(static_cast<size_t>(size));
    return out;
  }

  int64_t width_;
  std::unique_ptr<Weight> diagonal_;
};

class DeltaLayer : public RecurrentLayer {
 public:
  explicit DeltaLayer(Ops& ops) : RecurrentLayer(ops, 4 * 64) {
    shape_.k_heads = 2;
    shape_.v_heads = 4;
    shape_.dk = 64;
    shape_.dv = 64;
    shape_.k_head_of = {0, 0, 1, 1};
    conv_ = ops.pack_vector(numbers(shape_.channels() * shape_.conv_kernel, 11));
    a_log_ = ops.pack_vector(numbers(shape_.v_heads, 12));
    dt_bias_ = ops.pack_vector(numbers(shape_.v_heads, 13));
    norm_ = ops.pack_vector(numbers(shape_.dv, 14));
  }
  StateShape shape() const override { return shape_; }

 protected:
  void step(const Input& input, const RowBatch& rows, Tensor out) override {
    DeltaNetArgs args;
    args.shape = &shape_;
    args.qkv = input(shape_.channels(), 21);
    args.z = input(shape_.v_heads * shape_.dv, 22);
    args.b = input(shape_.v_heads, 23);
    args.a = input(shape_.v_heads, 24);
    args.conv = conv_.get();
    args.a_log = a_log_.get();
    args.dt_bias = dt_bias_.get();
    args.norm = norm_.get();
    args.out = out;
    args.rows = rows;
    ops_.delta_net(args);
  }

 private:
  DeltaNetShape shape_;
  std::unique_ptr<Vector> conv_, a_log_, dt_bias_, norm_;
};

class Mamba2Layer : public RecurrentLayer {
 public:
  explicit Mamba2Layer(Ops& ops) : RecurrentLayer(ops, 4 * 64) {
    shape_ = {.heads = 4, .head_dim = 64, .groups = 2, .state = 32};
    conv_ = ops.pack_vector(numbers(shape_.channels() * shape_.conv_kernel, 31));
    conv_bias_ = ops.pack_vector(numbers(shape_.channels(), 32));
    a_log_ = ops.pack_vector(numbers(shape_.heads, 33));
    dt_bias_ = ops.pack_vector(numbers(shape_.heads, 34));
    d_ = ops.pack_vector(numbers(shape_.heads, 35));
    norm_ = ops.pack_vector(numbers(shape_.width(), 36));
  }
  StateShape shape() const override { return shape_; }

 protected:
  void step(const Input& input, const RowBatch& rows, Tensor out) override {
    Mamba2Args args;
    args.shape = &shape_;
    args.z = input(shape_.width(), 41);
    args.xbc = input(shape_.channels(), 42);
    args.dt = input(shape_.heads, 43);
    args.conv = conv_.get();
    args.conv_bias = conv_bias_.get();
    args.a_log = a_log_.get();
    args.dt_bias = dt_bias_.get();
    args.d = d_.get();
    args.norm = norm_.get();
    args.most_step = std::numeric_limits<float>::infinity();
    args.out = out;
    args.rows = rows;
    ops_.mamba2(args);
  }

 private:
  Mamba2Shape shape_;
  std::unique_ptr<Vector> conv_, conv_bias_, a_log_, dt_bias_, d_, norm_;
};

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A state that keeps the inputs of five tentative rows, copied and put away: each copy goes on with any number of them
// accepted, as the sequence would have, whatever became of the state it was taken from.
inline Failures recurrent_states(Ops& ops, RecurrentLayer& layer) {
  Failures failures;
  const auto make = [&] { return ops.make_recurrent_state(layer.shape()); };
  const auto original = make();
  layer.pass(original.get(), 0, 20, 0, 20);
  layer.pass(original.get(), 20, 6, 0, 1);  // one certain row, five tentative
  const auto copy = make();
  copy->copy_from(*original);
  std::vector<std::byte> bytes(static_cast<size_t>(original->bytes()));
  original->save(bytes);
  for (int64_t accepted = 0; accepted <= 5; ++accepted) {
    const int64_t at = 21 + accepted;
    const auto serial = make();
    layer.pass(serial.get(), 0, at, 0, at);
    const std::vector<float> expected = layer.pass(serial.get(), at, 4, 0, 4);
    const auto from_copy = make();
    layer.pass(from_copy.get(), 0, 9, 0, 2);  // something else first
    from_copy->copy_from(*copy);
    const auto from_bytes = make();
    layer.pass(from_bytes.get(), 0, 9, 0, 2);
    expect(from_bytes->load(bytes, 5), "a state that was saved cannot be loaded", &failures);
    const std::string which = std::to_string(accepted) + " of 5 kept rows accepted";
    expect(same(layer.pass(from_copy.get(), at, 4, accepted, 4), expected), "copied state, " + which, &failures);
    expect(same(layer.pass(from_bytes.get(), at, 4, accepted, 4), expected), "loaded state, " + which, &failures);
  }
  // Bytes from a file are believed in nothing.
  const auto refusing = make();
  expect(!refusing->load(std::span(bytes).first(bytes.size() - 1), 5), "a state that is too short", &failures);
  // Going on and starting anew leave what was taken from it alone.
  layer.pass(original.get(), 23, 8, 2, 8);
  original->reset();
  std::vector<std::byte> again(bytes.size());
  copy->save(again);
  expect(again == bytes, "a copy changed with the state it was taken from", &failures);
  const auto fresh = make();
  expect(same(layer.pass(original.get(), 0, 7, 0, 7), layer.pass(fresh.get(), 0, 7, 0, 7)), "a reset state", &failures);
  return failures;
}
inline Failures all_recurrent_states(Ops& ops) {
  DeltaLayer delta(ops);
  Mamba2Layer mamba2(ops);
  Failures failures = recurrent_states(ops, delta);
  for (const std::string& failure : recurrent_states(ops, mamba2)) failures.push_back("Mamba2: " + failure);
  return failures;
}

}  // namespace tensorfold::state_cases
