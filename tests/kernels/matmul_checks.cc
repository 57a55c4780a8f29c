// Matrix products and packed weights.
#include <cmath>

#include "kernels/reference/negative_control.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

struct Format {
  const char* name;
  WeightFormat format;
  int bits = 0;
  int group = 0;
  WeightFormat scale = WeightFormat::kBf16;
};
const Format kFormats[] = {
    {"f32", WeightFormat::kF32},
    {"bf16", WeightFormat::kBf16},
    {"f16", WeightFormat::kF16},
    {"affine2g32", WeightFormat::kMlxAffine, 2, 32},
    {"affine3g64", WeightFormat::kMlxAffine, 3, 64},
    {"affine4g64", WeightFormat::kMlxAffine, 4, 64},
    {"affine4g128f16", WeightFormat::kMlxAffine, 4, 128, WeightFormat::kF16},
    {"affine5g32", WeightFormat::kMlxAffine, 5, 32},
    {"affine6g64f32", WeightFormat::kMlxAffine, 6, 64, WeightFormat::kF32},
    {"affine8g32", WeightFormat::kMlxAffine, 8, 32},
    {"affine8g128f16", WeightFormat::kMlxAffine, 8, 128, WeightFormat::kF16},
};

std::unique_ptr<OwnedMatrix> make(Random* random, const Format& f, int64_t rows, int64_t cols) {
  return random_matrix(random, rows, cols, f.format, f.bits, f.group, f.scale);
}

std::vector<float> run(Ops& ops, std::span<const MatrixSource> blocks, int64_t rows, const std::vector<float>& x) {
  ops.begin_pass();
  const auto w = ops.pack(blocks);
  const Tensor in = upload(ops, rows, w->in_features(), x), out = ops.scratch(rows, w->out_features());
  ops.matmul(*w, in, out);
  return download(ops, out);
}
std::vector<float> run(Ops& ops, const MatrixSource& source, int64_t rows, const std::vector<float>& x) {
  return run(ops, std::span<const MatrixSource>(&source, 1), rows, x);
}

// The definition, one output at a time: 16 chains of fma and the fold l + 8, l + 4, l + 2, l + 1.
std::vector<float> by_definition(const MatrixSource& source, int64_t rows, const std::vector<float>& x) {
  const RefMatrix w = ref_dequantise(source);
  std::vector<float> out;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < w.rows; ++n) {
      float lane[16] = {};
      for (int64_t k = 0; k < (w.cols + 15) / 16 * 16; ++k) {
        const bool inside = k < w.cols;
        lane[k % 16] = std::fma(inside ? static_cast<float>(w.at(n, k)) : 0.0f,
                                inside ? x[static_cast<size_t>(r * w.cols + k)] : 0.0f, lane[k % 16]);
      }
      for (int half = 8; half >= 1; half /= 2) {
        for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
      }
      out.push_back(lane[0]);
    }
  }
  return out;
}

// Protects the values: every format, odd column counts and row counts, against double precision with its error bound.
void matmul_against_reference(Checker& c) {
  Random random(3);
  for (Variant& v : all_variants({1})) {
    for (const Format& f : kFormats) {
      for (int64_t cols : {1, 17, 100, 128, 256}) {
        if (f.group != 0 && cols % f.group != 0) continue;
        const auto m = make(&random, f, 21, cols);
        for (int64_t rows : {1, 4, 11}) {
          const std::vector<float> x = random.vector(rows * cols, true);
          const std::vector<float> got = run(*v.ops, m->source, rows, x);
          RefMatrix magnitude;
          const RefMatrix want = ref_matmul(ref_dequantise(m->source), to_ref(rows, cols, x), &magnitude);
          double worst = 0;
          for (size_t i = 0; i < got.size(); ++i) {
            worst = std::max(worst, std::abs(got[i] - want.v[i]) / (magnitude.v[i] + 1e-30));
          }
          const int64_t terms = cols / 16 + 6;
          c.expect(worst <= static_cast<double>(terms) * 0x1p-24,
                   v.name + " " + f.name + " cols " + std::to_string(cols) + ": error " + std::to_string(worst));
        }
      }
    }
  }
}

// Protects the promise itself: the bits of the definition on every instruction set, thread count, format and row count.
void matmul_bits_are_the_definition(Checker& c) {
  Random random(4);
  std::vector<Variant> variants = all_variants({1, 2, 3});
  for (const Format& f : kFormats) {
    for (int64_t cols : {37, 128, 384}) {
      if (f.group != 0 && cols % f.group != 0) continue;
      const auto m = make(&random, f, 39, cols);
      const std::vector<float> x = random.vector(70 * cols, true);
      const std::vector<float> all = by_definition(m->source, 70, x);
      for (Variant& v : variants) {
        for (int64_t rows : {1, 2, 3, 5, 8, 9, 70}) {
          const std::vector<float> some(x.begin(), x.begin() + rows * cols);
          const std::vector<float> want(all.begin(), all.begin() + rows * 39);
          c.expect(same_bits(run(*v.ops, m->source, rows, some), want),
                   v.name + " " + f.name + " cols " + std::to_string(cols) + " rows " + std::to_string(rows));
        }
      }
    }
  }
}

// Protects "the row alone, or with others": every row count from 1 to 70, every position, equals the row alone.
void matmul_row_does_not_see_its_neighbours(Checker& c) {
  Random random(5);
  const int64_t cols = 80, outs = 33;
  for (const Format& f : {kFormats[0], kFormats[1], Format{"affine4g32", WeightFormat::kMlxAffine, 4, 32}}) {
    const int64_t k = f.group == 0 ? cols : 96;
    const auto m = make(&random, f, outs, k);
    const std::vector<float> x = random.vector(70 * k, true);
    for (Variant& v : all_variants({1, 2})) {
      const auto w = v.ops->pack(std::span<const MatrixSource>(&m->source, 1));
      std::vector<float> alone;
      for (int64_t r = 0; r < 70; ++r) {
        v.ops->begin_pass();
        const Tensor in = upload(*v.ops, 1, k, {x.begin() + r * k, x.begin() + (r + 1) * k});
        const Tensor out = v.ops->scratch(1, outs);
        v.ops->matmul(*w, in, out);
        const std::vector<float> y = download(*v.ops, out);
        alone.insert(alone.end(), y.begin(), y.end());
      }
      for (int64_t rows = 1; rows <= 70; ++rows) {
        v.ops->begin_pass();
        const int64_t first = 70 - rows;
        const Tensor in = upload(*v.ops, rows, k, {x.begin() + first * k, x.end()});
        const Tensor out = v.ops->scratch(rows, outs);
        v.ops->matmul(*w, in, out);
        c.expect(same_bits(download(*v.ops, out), {alone.begin() + first * outs, alone.end()}),
                 v.name + " " + f.name + " rows " + std::to_string(rows));
      }
    }
  }
}

// Protects against leaks between rows and from padding: NaN and infinity in other rows and beyond the columns.
void matmul_nan_stays_in_its_row(Checker& c) {
  Random random(6);
  const int64_t cols = 37, rows = 9, outs = 10;
  const auto m = make(&random, kFormats[1], outs, cols);
  std::vector<float> clean = random.vector(rows * cols);
  for (Variant& v : all_variants({1, 2})) {
    const std::vector<float> want = run(*v.ops, m->source, rows, clean);
    const auto w = v.ops->pack(std::span<const MatrixSource>(&m->source, 1));
    v.ops->begin_pass();
    const Tensor wide = v.ops->scratch(rows, 64), out_wide = v.ops->scratch(rows, 64);
    v.ops->upload(std::vector<float>(rows * 64, NAN), wide);
    const Tensor x = wide.columns(5, cols), out = out_wide.columns(3, outs);  // views with a stride and NaN around them
    std::vector<float> dirty = clean;
    for (int64_t i = 0; i < cols; ++i) dirty[4 * cols + i] = i % 2 == 0 ? NAN : INFINITY;
    v.ops->upload(dirty, x);
    v.ops->matmul(*w, x, out);
    const std::vector<float> got = download(*v.ops, out);
    for (int64_t r = 0; r < rows; ++r) {
      if (r == 4) continue;
      c.expect(same_bits({got.begin() + r * outs, got.begin() + (r + 1) * outs},
                         {want.begin() + r * outs, want.begin() + (r + 1) * outs}),
               v.name + ": row " + std::to_string(r) + " saw another row or the padding");
    }
  }
}

// Protects the definition of quantised values: every format gives the bits of its dequantised fp32 copy; so does embed.
void formats_equal_their_fp32_copy(Checker& c) {
  Random random(7);
  for (Variant& v : all_variants({1, 2})) {
    for (const Format& f : kFormats) {
      const auto m = make(&random, f, 13, 256);
      const auto copy = as_f32(m->source);
      for (int64_t rows : {1, 3, 20}) {
        const std::vector<float> x = random.vector(rows * 256, true);
        c.expect(same_bits(run(*v.ops, m->source, rows, x), run(*v.ops, copy->source, rows, x)),
                 v.name + " " + f.name + " rows " + std::to_string(rows));
      }
      const auto table = v.ops->pack(std::span<const MatrixSource>(&m->source, 1));
      const std::vector<int32_t> ids = {12, 0, 7, 7, 1};
      v.ops->begin_pass();
      const Tensor out = v.ops->scratch(5, 256);
      v.ops->embed(*table, batch_with(ids), out);
      const RefMatrix values = ref_dequantise(m->source);
      std::vector<float> want;
      for (int32_t id : ids) {
        for (int64_t i = 0; i < 256; ++i) want.push_back(static_cast<float>(values.at(id, i)));
      }
      c.expect(same_bits(download(*v.ops, out), want), v.name + " " + f.name + " embed");
    }
  }
}

// Protects slicing while loading: stacked blocks of different formats, row slices and column slices of one matrix.
void stacked_and_sliced_weights(Checker& c) {
  Random random(8);
  const auto a = make(&random, kFormats[1], 6, 256), b = make(&random, kFormats[5], 5, 256),
             d = make(&random, kFormats[0], 3, 256);
  const std::vector<float> x = random.vector(7 * 256);
  for (Variant& v : all_variants({1, 2})) {
    const MatrixSource blocks[] = {a->source, b->source, d->source};
    const std::vector<float> stacked = run(*v.ops, blocks, 7, x);
    const std::vector<float> parts[] = {run(*v.ops, a->source, 7, x), run(*v.ops, b->source, 7, x),
                                        run(*v.ops, d->source, 7, x)};
    std::vector<float> want;
    for (int64_t r = 0; r < 7; ++r) {
      for (const std::vector<float>& p : parts) {
        const int64_t n = static_cast<int64_t>(p.size()) / 7;
        want.insert(want.end(), p.begin() + r * n, p.begin() + (r + 1) * n);
      }
    }
    c.expect(same_bits(stacked, want), v.name + ": stacked blocks");
    for (const OwnedMatrix* m : {a.get(), b.get()}) {
      const MatrixSource part = m->source.slice_rows(2, 3).slice_cols(128, 64);
      const auto copy = as_f32(m->source);
      const MatrixSource same = copy->source.slice_rows(2, 3).slice_cols(128, 64);
      const std::vector<float> narrow(x.begin(), x.begin() + 2 * 64);
      c.expect(same_bits(run(*v.ops, part, 2, narrow), run(*v.ops, same, 2, narrow)), v.name + ": slices");
    }
  }
}

// Protects tied heads: a view of a matrix's rows gives the bits of those rows packed alone, may outlive the matrix, and
// is refused where it would have to begin inside a panel.
void views_equal_packed_rows(Checker& c) {
  Random random(10);
  for (const Format& f : kFormats) {
    const auto a = make(&random, f, 22, 128), b = make(&random, f, 12, 128);
    const MatrixSource blocks[] = {a->source, b->source};
    const std::vector<float> x = random.vector(3 * 128);
    for (Variant& v : all_variants({2})) {
      const auto viewed = [&](const MatrixSource* first, size_t count, int64_t from, int64_t rows) {
        std::unique_ptr<Weight> whole = v.ops->pack(std::span<const MatrixSource>(first, count));
        const std::unique_ptr<Weight> view = v.ops->view_rows(*whole, from, rows);
        whole.reset();
        const Tensor in = upload(*v.ops, 3, 128, x), out = v.ops->scratch(3, rows);
        v.ops->matmul(*view, in, out);
        return download(*v.ops, out);
      };
      const std::string name = v.name + " " + f.name;
      c.expect(same_bits(viewed(&a->source, 1, 8, 12), run(*v.ops, a->source.slice_rows(8, 12), 3, x)), name);
      c.expect(same_bits(viewed(&a->source, 1, 8, 14), run(*v.ops, a->source.slice_rows(8, 14), 3, x)), name + ": end");
      const MatrixSource tails[] = {a->source.slice_rows(12, 10), b->source.slice_rows(0, 4)};
      c.expect(same_bits(viewed(blocks, 2, 12, 14), run(*v.ops, tails, 3, x)), name + ": over a seam");
      const std::unique_ptr<Weight> whole = v.ops->pack(std::span<const MatrixSource>(&a->source, 1));
      c.expect(v.ops->view_rows(*whole, 6, 8) == nullptr, name + ": begins inside a panel");
      c.expect(v.ops->view_rows(*whole, 4, 6) == nullptr, name + ": ends inside a panel");
    }
  }
}

// Protects sliced projections: jobs of different shapes and rows in one call give the bits of single calls.
void many_equal_one_after_another(Checker& c) {
  Random random(11);
  const auto a = make(&random, kFormats[1], 70, 96), b = make(&random, kFormats[5], 5, 192),
             d = make(&random, kFormats[0], 300, 16);
  for (Variant& v : all_variants({1, 2})) {
    v.ops->begin_pass();
    std::vector<std::unique_ptr<Weight>> weights;
    std::vector<MatmulJob> jobs;
    std::vector<std::vector<float>> want;
    const int64_t rows[] = {1, 0, 31, 8};
    for (size_t i = 0; i < 4; ++i) {
      const MatrixSource& source = (i == 0 ? a : i == 2 ? b : d)->source;
      const std::vector<float> x = random.vector(rows[i] * source.cols);
      weights.push_back(v.ops->pack(std::span<const MatrixSource>(&source, 1)));
      jobs.push_back(
          {weights.back().get(), upload(*v.ops, rows[i], source.cols, x), v.ops->scratch(rows[i], source.rows)});
      const Tensor alone = v.ops->scratch(rows[i], source.rows);
      v.ops->matmul(*weights.back(), jobs.back().x, alone);
      want.push_back(download(*v.ops, alone));
    }
    v.ops->matmul_many(jobs);
    for (size_t i = 0; i < 4; ++i) {
      c.expect(same_bits(download(*v.ops, jobs[i].out), want[i]), v.name + ": job " + std::to_string(i));
    }
    v.ops->matmul_many({});
  }
}

// Protects the differential tester: the negative control must differ from the row alone, or its catching proves
// nothing.
void negative_control_is_caught(Checker& c) {
  Random random(9);
  const auto m = make(&random, kFormats[1], 24, 64);
  const std::vector<float> x = random.vector(4 * 64, true);
  for (Variant& v : all_variants({1})) {
    const auto bad = make_negative_control(std::move(v.ops));
    const std::vector<float> first(x.begin(), x.begin() + 64);
    const std::vector<float> alone = run(*bad, m->source, 1, first), among = run(*bad, m->source, 4, x);
    c.expect(!same_bits(alone, {among.begin(), among.begin() + 24}), v.name + ": the control is not caught");
    c.expect(same_bits(alone, by_definition(m->source, 1, first)), v.name + ": a row alone is as defined");
  }
}

// Protects the choice of instruction set: an unavailable one is refused, and the message names what there is.
void unavailable_isa_is_refused(Checker& c) {
  std::string error;
  CpuOptions options;
  options.isa = "sse9";
  c.expect(make_cpu_ops(options, &error) == nullptr, "sse9 is not an instruction set");
  c.expect(error.find("sse9") != std::string::npos && error.find("portable") != std::string::npos, "message: " + error);
  options = {};
  options.threads = -1;
  c.expect(make_cpu_ops(options, &error) == nullptr && error.find("-1") != std::string::npos, "message: " + error);
}

}  // namespace

std::vector<NamedCheck> matmul_checks() {
  return {{"matmul_against_reference", matmul_against_reference},
          {"matmul_bits_are_the_definition", matmul_bits_are_the_definition},
          {"matmul_row_does_not_see_its_neighbours", matmul_row_does_not_see_its_neighbours},
          {"matmul_nan_stays_in_its_row", matmul_nan_stays_in_its_row},
          {"formats_equal_their_fp32_copy", formats_equal_their_fp32_copy},
          {"stacked_and_sliced_weights", stacked_and_sliced_weights},
          {"views_equal_packed_rows", views_equal_packed_rows},
          {"many_equal_one_after_another", many_equal_one_after_another},
          {"negative_control_is_caught", negative_control_is_caught},
          {"unavailable_isa_is_refused", unavailable_isa_is_refused}};
}

}  // namespace tensorfold
