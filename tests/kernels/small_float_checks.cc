// FP8 and FP4 weights that are read as they are stored: the bits of the same matrix given as its fp32 values.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/weights.h"
#include "kernels/ops/dequantise.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

struct Layout {
  const char* name;
  WeightFormat format;
  WeightFormat scale;
  int64_t block_rows;
  int64_t block_cols;
  float global = 1.0f;
  bool divide = false;
};
constexpr WeightFormat kE4 = WeightFormat::kE4m3, kE2 = WeightFormat::kE2m1, kE8 = WeightFormat::kE8m0;
constexpr int64_t kWhole = MatrixSource::kWhole;
// Every layout of docs/formats/weights.md, and scales that a checkpoint could have beside those.
const Layout kLayouts[] = {
    {"nvfp4", kE2, kE4, 1, 16},
    {"nvfp4*global", kE2, kE4, 1, 16, 0.000123456f},
    {"nvfp4/global", kE2, kE4, 1, 16, 1347.0179f, true},
    {"nvfp4/-global", kE2, kE4, 1, 16, -3.3f, true},
    {"nvfp4*tiny", kE2, kE4, 1, 16, 0x1.234568p-140f},
    {"nvfp4/huge", kE2, kE4, 1, 16, 0x1.fedcbap127f, true},
    {"nvfp4*huge", kE2, kE4, 1, 16, 0x1.23456p115f},
    {"mxfp4", kE2, kE8, 1, 32},
    {"fp4 32x32", kE2, kE8, 32, 32},
    {"fp8 tensor f32", kE4, WeightFormat::kF32, kWhole, kWhole},
    {"fp8 row f32", kE4, WeightFormat::kF32, 1, kWhole},
    {"fp8 row bf16", kE4, WeightFormat::kBf16, 1, kWhole},
    {"fp8 128x128 f32", kE4, WeightFormat::kF32, 128, 128},
    {"fp8 128x128 bf16", kE4, WeightFormat::kBf16, 128, 128},
    {"fp8 1x128 f16", kE4, WeightFormat::kF16, 1, 128},
    {"fp8 32x32 e8m0", kE4, kE8, 32, 32},
    {"fp8 128x128 e8m0", kE4, kE8, 128, 128},
    {"fp8 e4m3", kE4, kE4, 1, 16},
    {"mxfp8", kE4, kE8, 1, 32},
    {"fp8 48x48 f32", kE4, WeightFormat::kF32, 48, 48},
};

std::unique_ptr<OwnedMatrix> make(Random* random, const Layout& l, int64_t rows, int64_t cols) {
  return random_small_floats(random, rows, cols, l.format, l.scale, l.block_rows, l.block_cols, l.global, l.divide);
}

std::vector<float> values_of(const MatrixSource& source) {
  std::vector<float> values(static_cast<size_t>(source.rows * source.cols));
  WeightView view;
  for (int64_t row = 0; row < source.rows; ++row) {
    view.dequantise(source, row, 0, source.cols, values.data() + row * source.cols);
  }
  return values;
}

// The values by the weight view, as an fp32 matrix: what the backend kept before it read these formats as stored.
std::unique_ptr<OwnedMatrix> plain_copy(const MatrixSource& source) {
  const std::vector<float> values = values_of(source);
  auto m = std::make_unique<OwnedMatrix>();
  m->data.resize(values.size() * 4);
  std::memcpy(m->data.data(), values.data(), m->data.size());
  m->source.rows = source.rows;
  m->source.cols = source.cols;
  m->source.data = m->data.data();
  m->source.row_bytes = source.cols * 4;
  return m;
}

std::vector<float> product(Ops& ops, const Weight& w, int64_t rows, const std::vector<float>& x) {
  ops.begin_pass();
  const Tensor in = upload(ops, rows, w.in_features(), x), out = ops.scratch(rows, w.out_features());
  ops.matmul(w, in, out);
  return download(ops, out);
}

std::vector<float> table_rows(Ops& ops, const Weight& w, const std::vector<int32_t>& ids) {
  ops.begin_pass();
  const Tensor out = ops.scratch(static_cast<int64_t>(ids.size()), w.in_features());
  ops.embed(w, batch_with(ids), out);
  return download(ops, out);
}

PanelKind kind_of(const Weight& w) { return static_cast<const CpuWeight&>(w).segments().front().view.kind; }

// Bits, where every NaN is one: infinities of huge scales meet infinities, and which NaN that makes is the machine's.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]) && !(std::isnan(a[i]) && std::isnan(b[i]))) {
      return false;
    }
  }
  return true;
}

// Everything that reads a weight, against the fp32 matrix of its values.
void expect_equal_to_plain(Checker& c, Variant& v, const MatrixSource& source, const std::string& name,
                           std::initializer_list<int64_t> row_counts, const std::vector<float>& x) {
  const auto copy = plain_copy(source);
  const auto stored = v.ops->pack({&source, 1}), plain = v.ops->pack({&copy->source, 1});
  c.expect(kind_of(*stored) == (source.format == kE4 ? PanelKind::kFp8 : PanelKind::kFp4), name + ": not as stored");
  for (int64_t rows : row_counts) {
    const std::vector<float> some(x.begin(), x.begin() + rows * source.cols);
    c.expect(same(product(*v.ops, *stored, rows, some), product(*v.ops, *plain, rows, some)),
             name + ": product of " + std::to_string(rows) + " rows");
  }
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < source.rows; ++i) ids.push_back(static_cast<int32_t>(source.rows - 1 - i));
  c.expect(same_bits(table_rows(*v.ops, *stored, ids), table_rows(*v.ops, *plain, ids)), name + ": table");
}

// Protects the values: by the weight view and by the reference, which share no code, the same bits for every layout.
void small_floats_by_reference(Checker& c) {
  Random random(80);
  for (const Layout& l : kLayouts) {
    const auto m = make(&random, l, 150, 288);
    const MatrixSource part = m->source.slice_rows(5, 140).slice_cols(33, 250);
    c.expect(source_error(part).empty(), std::string(l.name) + ": " + source_error(part));
    const RefMatrix reference = ref_dequantise(part);
    const std::vector<float> values = values_of(part);
    bool equal = true;
    for (size_t i = 0; i < values.size(); ++i) {
      equal =
          equal && std::bit_cast<uint32_t>(values[i]) == std::bit_cast<uint32_t>(static_cast<float>(reference.v[i]));
    }
    c.expect(equal, l.name);
  }
}

// Protects: products and table rows of every layout, for odd shapes and 1 to 70 rows, have the bits of the fp32 copy on
// every instruction set and thread count.
void small_floats_equal_their_fp32_copy(Checker& c) {
  Random random(81);
  std::vector<Variant> variants = all_variants({1, 3});
  for (const Layout& l : kLayouts) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {7, 15}, {39, 100}, {150, 290}, {12, 384}}) {
      const auto m = make(&random, l, rows, cols);
      const std::vector<float> x = random.vector(70 * cols, true);
      for (Variant& v : variants) {
        const std::string name = v.name + " " + l.name + " " + std::to_string(rows) + " x " + std::to_string(cols);
        expect_equal_to_plain(c, v, m->source, name, {1, 2, 3, 4, 6, 8, 13, 70}, x);
      }
    }
  }
}

// Protects slices of ranks: parts that begin and end anywhere, inside blocks and at odd nibbles.
void small_float_parts(Checker& c) {
  Random random(82);
  std::vector<Variant> variants = all_variants({2});
  for (const Layout& l : kLayouts) {
    const auto m = make(&random, l, 300, 420);
    const std::vector<float> x = random.vector(3 * 420, true);
    for (int64_t first : {1, 8, 15, 16, 17, 24, 32, 47, 48, 96, 127, 129, 144, 200}) {
      for (int64_t count : {1, 5, 16, 31, 32, 100, 128, 200}) {
        const int64_t row = first % 131;
        const MatrixSource part = m->source.slice_rows(row, 11).slice_cols(first, count);
        for (Variant& v : variants) {
          const std::string name = v.name + " " + l.name + " columns " + std::to_string(first) + " + " +
                                   std::to_string(count) + " from row " + std::to_string(row);
          expect_equal_to_plain(c, v, part, name, {1, 3}, x);
        }
      }
    }
    const MatrixSource rows = m->source.slice_rows(101, 199);
    for (Variant& v : variants) expect_equal_to_plain(c, v, rows, v.name + " " + l.name + " rows", {1, 2}, x);
  }
}

// Protects tied heads and stacked projections: views over a seam, blocks of different formats beside one another.
void small_float_views(Checker& c) {
  Random random(83);
  for (const Layout& l : kLayouts) {
    const auto a = make(&random, l, 22, 100), b = make(&random, kLayouts[2], 13, 100);
    const auto d = random_matrix(&random, 9, 100, WeightFormat::kBf16);
    const auto plain_a = plain_copy(a->source), plain_b = plain_copy(b->source), plain_d = plain_copy(d->source);
    const MatrixSource stored[] = {a->source, b->source, d->source};
    const MatrixSource plain[] = {plain_a->source, plain_b->source, plain_d->source};
    const std::vector<float> x = random.vector(5 * 100, true);
    for (Variant& v : all_variants({2})) {
      const std::string name = v.name + " " + l.name;
      std::unique_ptr<Weight> whole = v.ops->pack(stored);
      const std::unique_ptr<Weight> copy = v.ops->pack(plain);
      const std::unique_ptr<Weight> view = v.ops->view_rows(*whole, 12, 18),
                                    same_rows = v.ops->view_rows(*copy, 12, 18);
      for (int64_t rows : {1, 5}) {
        const std::vector<float> some(x.begin(), x.begin() + rows * 100);
        c.expect(same(product(*v.ops, *whole, rows, some), product(*v.ops, *copy, rows, some)), name + ": stacked");
      }
      whole.reset();  // the view keeps what it needs
      for (int64_t rows : {1, 5}) {
        const std::vector<float> some(x.begin(), x.begin() + rows * 100);
        c.expect(same(product(*v.ops, *view, rows, some), product(*v.ops, *same_rows, rows, some)), name + ": view");
      }
    }
  }
}

// Protects every value: all codes under all scales of a byte, and FP8's under scales at the ends of fp32's range, with
// factors whose products round, are subnormal, or overflow.
void all_codes_under_all_scales(Checker& c) {
  std::vector<Variant> variants = all_variants({1});
  const auto check = [&](OwnedMatrix& m, const std::string& name) {
    m.source.data = m.data.data();
    m.source.scales = m.scales.data();
    const std::vector<float> want = values_of(m.source);
    std::vector<int32_t> ids(static_cast<size_t>(m.source.rows));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    for (Variant& v : variants) {
      const auto w = v.ops->pack({&m.source, 1});
      c.expect(kind_of(*w) == PanelKind::kFp8 || kind_of(*w) == PanelKind::kFp4,
               v.name + " " + name + ": not as stored");
      c.expect(same_bits(table_rows(*v.ops, *w, ids), want), v.name + " " + name);
    }
  };
  // FP4: a row for each scale, of all 16 codes.
  for (const WeightFormat format : {kE4, kE8}) {
    for (const auto& [global, divide] : {std::pair<float, bool>{1.0f, false},
                                         {0x1.555556p-3f, false},
                                         {0x1.555556p-3f, true},
                                         {2688.0f / 0.7123f, true},
                                         {0x1.fffffep-127f, false},
                                         {-0x1p-149f, true},
                                         {0x1.fffffep127f, true},
                                         {0.0f, false}}) {
      OwnedMatrix m;
      for (int scale = 0; scale < 256; ++scale) {
        const bool nan = format == kE4 ? (scale & 127) == 127 : scale == 255;
        m.scales.push_back(static_cast<std::byte>(nan ? 0 : scale));
        for (int code = 0; code < 16; code += 2) m.data.push_back(static_cast<std::byte>(code | (code + 1) << 4));
      }
      m.source.format = kE2;
      m.source.rows = 256;
      m.source.cols = 16;
      m.source.row_bytes = 8;
      m.source.block_cols = 16;
      m.source.scale_format = format;
      m.source.scale_row_bytes = 1;
      m.source.global_scale = global;
      m.source.divide_by_global = divide;
      check(m, std::string("fp4, scales of ") + (format == kE4 ? "e4m3" : "e8m0") + (divide ? " / " : " * ") +
                   std::to_string(global));
    }
  }
  // FP8: a row for each scale, of all 256 codes but NaN's.
  std::vector<float> floats = {0.0f,
                               -0.0f,
                               1.0f,
                               -1.0f,
                               0x1p-149f,
                               -0x1.8p-148f,
                               0x1.fffffep-127f,
                               0x1.fffffep119f,
                               -0x1.abcdeep119f,
                               0x1.555556p-1f,
                               0x1.fffffep-1f,
                               0x1.000002p0f};
  Random random(84);
  for (int i = 0; i < 100; ++i) {
    floats.push_back(std::ldexp(random.uniform(), static_cast<int>(random.below(260)) - 141));
  }
  for (const WeightFormat format : {WeightFormat::kF32, kE8, kE4}) {
    OwnedMatrix m;
    const int rows = format == WeightFormat::kF32 ? static_cast<int>(floats.size()) : format == kE8 ? 247 : 256;
    m.scales.resize(static_cast<size_t>(rows) * (format == WeightFormat::kF32 ? 4 : 1));
    for (int row = 0; row < rows; ++row) {
      if (format == WeightFormat::kF32) {
        std::memcpy(m.scales.data() + 4 * row, &floats[static_cast<size_t>(row)], 4);
      } else {
        m.scales[static_cast<size_t>(row)] = static_cast<std::byte>(format == kE4 && (row & 127) == 127 ? 0 : row);
      }
      for (int code = 0; code < 256; ++code) m.data.push_back(static_cast<std::byte>((code & 127) == 127 ? 0 : code));
    }
    m.source.format = kE4;
    m.source.rows = rows;
    m.source.cols = 256;
    m.source.row_bytes = 256;
    m.source.block_cols = kWhole;
    m.source.scale_format = format;
    m.source.scale_row_bytes = format == WeightFormat::kF32 ? 4 : 1;
    check(m, "fp8, scales " + std::to_string(static_cast<int>(format)));
  }
}

// Protects signed zeros: a lane whose sum is -0 stays so or becomes +0 as it does in fp32, whatever sign the zeros of
// the columns beyond the matrix would have under a negative scale.
void padding_is_positive_zero(Checker& c) {
  for (const WeightFormat format : {kE4, kE2}) {
    for (const bool negative_global : {false, true}) {
      if (format == kE4 && negative_global) continue;
      OwnedMatrix m;
      m.source.format = format;
      m.source.rows = 1;
      m.source.cols = 17;
      m.source.row_bytes = 17;
      m.source.block_cols = 32;
      m.source.scale_format = kE4;
      m.source.scale_row_bytes = 1;
      m.source.global_scale = negative_global ? -1.0f : 1.0f;
      m.scales = {static_cast<std::byte>(negative_global ? 0x01 : 0x81)};  // 2^-9 or -2^-9
      m.data.assign(17, static_cast<std::byte>(format == kE4 ? 0x01 : 0x11));
      m.source.data = m.data.data();
      m.source.scales = m.scales.data();
      // Tiny negative products: every lane's sum rounds to -0 before the padded columns come.
      const std::vector<float> x(17, 0x1p-149f);
      const auto copy = plain_copy(m.source);
      for (Variant& v : all_variants({1})) {
        const auto stored = v.ops->pack({&m.source, 1}), plain = v.ops->pack({&copy->source, 1});
        c.expect(same_bits(product(*v.ops, *stored, 1, x), product(*v.ops, *plain, 1, x)), v.name + ": one row");
        std::vector<float> two = x;
        two.insert(two.end(), x.begin(), x.end());
        c.expect(same_bits(product(*v.ops, *stored, 2, two), product(*v.ops, *plain, 2, two)), v.name + ": two rows");
      }
    }
  }
}

// Protects the rule: what cannot be read as stored is kept as its values, with the same bits.
void others_are_kept_as_values(Checker& c) {
  Random random(85);
  std::vector<std::pair<std::string, std::unique_ptr<OwnedMatrix>>> cases;
  const auto add = [&](const std::string& name, const Layout& l) -> OwnedMatrix& {
    cases.push_back({name, make(&random, l, 9, 80)});
    return *cases.back().second;
  };
  add("fp8 with a code of NaN", kLayouts[12]).data[85] = std::byte{0xff};
  const float large = 0x1p120f;
  std::memcpy(add("fp8 with a large scale", kLayouts[10]).scales.data() + 8, &large, 4);
  add("fp8 with a large e8m0", kLayouts[18]).scales[3] = std::byte{247};
  add("fp8 with a global scale", {"", kE4, WeightFormat::kF32, 1, kWhole, 0.7f});
  add("fp8 in narrow blocks", {"", kE4, WeightFormat::kF32, 8, 8});
  add("fp8 in blocks of 24", {"", kE4, kE8, 8, 24});
  add("fp4 with scales of f32", {"", kE2, WeightFormat::kF32, 1, 16});
  add("fp4 with a scale of NaN", kLayouts[1]).scales[7] = std::byte{0x7f};
  add("fp4 with an infinite global scale", {"", kE2, kE4, 1, 16, INFINITY});
  for (Variant& v : all_variants({2})) {
    for (const auto& [name, m] : cases) {
      const auto copy = plain_copy(m->source);
      const auto kept = v.ops->pack({&m->source, 1}), plain = v.ops->pack({&copy->source, 1});
      c.expect(kind_of(*kept) != PanelKind::kFp8 && kind_of(*kept) != PanelKind::kFp4,
               v.name + " " + name + ": as stored");
      const std::vector<float> x = random.vector(2 * 80);
      c.expect(same(product(*v.ops, *kept, 2, x), product(*v.ops, *plain, 2, x)), v.name + " " + name);
    }
  }
}

// Experts of mixed formats with their down projections in slices of 24 columns, so that slices begin inside groups of
// 16 and 32; as stored or as fp32 copies.
std::vector<float> mixture(Ops& ops, bool stored, int64_t rows) {
  constexpr int64_t kHidden = 64, kColumns = 48, kPart = 24, kExperts = 5;
  const Layout layouts[kExperts] = {kLayouts[1], kLayouts[2], kLayouts[7], kLayouts[12], kLayouts[18]};
  Random random(88);
  std::vector<std::unique_ptr<OwnedMatrix>> owned;
  const auto keep = [&](const MatrixSource& source) -> const MatrixSource& {
    owned.push_back(plain_copy(source));
    return owned.back()->source;
  };
  std::vector<ExpertSource> sources;
  for (const Layout& l : layouts) {
    for (const auto& [r, k] :
         {std::pair<int64_t, int64_t>{kColumns, kHidden}, {kColumns, kHidden}, {kHidden, kColumns}}) {
      owned.push_back(make(&random, l, r, k));
    }
    const MatrixSource gate = owned[owned.size() - 3]->source, up = owned[owned.size() - 2]->source,
                       down = owned.back()->source;
    ExpertSource source{stored ? gate : keep(gate), stored ? up : keep(up), {}};
    for (int64_t at = 0; at < kColumns; at += kPart) {
      const MatrixSource part = down.slice_cols(at, kPart);
      source.down.push_back(stored ? part : keep(part));
    }
    sources.push_back(source);
  }
  std::vector<float> x = random.vector(7 * kHidden), weights = random.vector(7 * 2), ids;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = r % kExperts;
    ids.insert(ids.end(), {static_cast<float>(first), static_cast<float>((first + 2) % kExperts)});
  }
  x.resize(static_cast<size_t>(rows * kHidden));
  weights.resize(static_cast<size_t>(rows * 2));
  ops.begin_pass();
  const auto packed = ops.pack_experts(sources);
  const std::vector<Tensor> partial = {ops.scratch(rows, kHidden), ops.scratch(rows, kHidden)};
  ExpertsArgs args;
  args.experts = packed.get();
  args.x = upload(ops, rows, kHidden, x);
  args.ids = upload(ops, rows, 2, ids);
  args.weights = upload(ops, rows, 2, weights);
  args.partial = partial;
  ops.experts(args);
  std::vector<float> out = download(ops, partial[0]);
  const std::vector<float> second = download(ops, partial[1]);
  out.insert(out.end(), second.begin(), second.end());
  return out;
}

// Protects experts: the bits of their fp32 copies, for one row and for rows that share experts.
void small_float_experts(Checker& c) {
  for (Variant& v : all_variants({1, 2})) {
    for (int64_t rows : {1, 3, 7}) {
      const std::vector<float> stored = mixture(*v.ops, true, rows);
      const auto finite = std::count_if(stored.begin(), stored.end(), [](float y) { return std::isfinite(y); });
      c.expect(2 * finite > static_cast<int64_t>(stored.size()), v.name + ": too few numbers to compare");
      c.expect(same(stored, mixture(*v.ops, false, rows)), v.name + ": " + std::to_string(rows) + " rows");
    }
  }
}

// Protects the sharing of tables: weights alive together that differ in one thing of what a table depends on.
void fp4_tables_are_not_confused(Checker& c) {
  Random random(89);
  const Layout layouts[] = {{"e4m3 * 3", kE2, kE4, 1, 16, 3.0f},
                            {"e4m3 / 3", kE2, kE4, 1, 16, 3.0f, true},
                            {"e8m0 * 3", kE2, kE8, 1, 16, 3.0f},
                            {"e4m3 * -3", kE2, kE4, 1, 16, -3.0f},
                            {"e4m3 * 1", kE2, kE4, 1, 16}};
  for (Variant& v : all_variants({1})) {
    std::vector<std::unique_ptr<OwnedMatrix>> matrices;
    std::vector<std::unique_ptr<Weight>> weights;
    for (const Layout& l : layouts) {
      matrices.push_back(make(&random, l, 5, 48));
      weights.push_back(v.ops->pack({&matrices.back()->source, 1}));
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      c.expect(same_bits(table_rows(*v.ops, *weights[i], {0, 1, 2, 3, 4}), values_of(matrices[i]->source)),
               v.name + " " + layouts[i].name);
    }
  }
}

// Protects memory: what a weight says of itself is a byte or half a one a value, and its scales; FP4 weights of one
// global scale share a table.
void small_floats_take_what_is_stored(Checker& c) {
  Random random(86);
  const int64_t values = 512 * 1024;
  for (Variant& v : all_variants({1})) {
    const auto bytes_of = [&](const Layout& l) {
      const auto m = make(&random, l, 512, 1024);
      return static_cast<double>(v.ops->pack({&m->source, 1})->bytes()) / static_cast<double>(values);
    };
    c.expect(bytes_of(kLayouts[9]) <= 1.005, v.name + ": fp8 tensor");
    c.expect(bytes_of(kLayouts[12]) <= 1.04, v.name + ": fp8 128x128");
    c.expect(bytes_of(kLayouts[18]) <= 1.04, v.name + ": mxfp8");
    c.expect(bytes_of(kLayouts[7]) <= 0.535 + 0.02, v.name + ": mxfp4");
    const auto m = make(&random, kLayouts[1], 512, 1024);
    const auto first = v.ops->pack({&m->source, 1}), second = v.ops->pack({&m->source, 1});
    c.expect(second->bytes() * 16 == values * 9, v.name + ": nvfp4 takes " + std::to_string(second->bytes()));
    c.expect(first->bytes() == second->bytes() + Fp4Tables::kBytes, v.name + ": one table");
  }
}

}  // namespace

uint64_t small_floats_hash(Ops& ops) {
  uint64_t hash = hash_bits({});
  Random random(87);
  for (const Layout& l : kLayouts) {
    if (l.global > 1e30f && !l.divide) continue;  // NaN: its bits are the machine's
    const auto m = make(&random, l, 150, 300);
    const MatrixSource part = m->source.slice_rows(3, 45).slice_cols(23, 203);
    for (int64_t rows : {1, 11}) {
      const auto w = ops.pack({&part, 1});
      hash = hash_bits(product(ops, *w, rows, random.vector(rows * 203)), hash);
    }
  }
  return hash;
}

std::vector<NamedCheck> small_float_checks() {
  return {{"small_floats_by_reference", small_floats_by_reference},
          {"small_floats_equal_their_fp32_copy", small_floats_equal_their_fp32_copy},
          {"small_float_parts", small_float_parts},
          {"small_float_views", small_float_views},
          {"all_codes_under_all_scales", all_codes_under_all_scales},
          {"padding_is_positive_zero", padding_is_positive_zero},
          {"others_are_kept_as_values", others_are_kept_as_values},
          {"small_float_experts", small_float_experts},
          {"fp4_tables_are_not_confused", fp4_tables_are_not_confused},
          {"small_floats_take_what_is_stored", small_floats_take_what_is_stored}};
}

}  // namespace tensorfold
