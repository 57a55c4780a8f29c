// Norms, activations, rotary embedding, copies and candidates.
#include <cmath>

#include "kernels/numerics/gumbel.h"
#include "kernels/numerics/math64.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

// Runs `body` on every variant for several row counts; all must agree bitwise with the first variant's 70-row run.
template <typename Body>
void same_everywhere(Checker& c, const std::string& what, int64_t out_cols, Body body) {
  std::vector<float> first;
  for (Variant& v : all_variants({1, 2, 3})) {
    for (int64_t rows : {70, 1, 2, 9}) {
      v.ops->begin_pass();
      const std::vector<float> got = body(*v.ops, rows);
      if (first.empty()) first = got;
      const std::vector<float> want(first.begin(), first.begin() + rows * out_cols);
      c.expect(same_bits(got, want), what + " differs: " + v.name + " rows " + std::to_string(rows));
    }
  }
}

std::vector<float> head_rows(const std::vector<float>& all, int64_t rows, int64_t cols) {
  return {all.begin(), all.begin() + rows * cols};
}

// Protects rms_norm: double precision, per head, odd widths, aliasing, and equality everywhere.
void rms_norm(Checker& c) {
  Random random(20);
  for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>{1, 100}, {3, 24}, {2, 64}, {1, 576}}) {
    const int64_t cols = heads * dim;
    const std::vector<float> x = random.vector(70 * cols, true), weight = random.vector(dim);
    same_everywhere(c, "rms_norm", cols, [&, heads = heads](Ops& ops, int64_t rows) {
      const auto w = ops.pack_vector(weight);
      const Tensor in = upload(ops, rows, cols, head_rows(x, rows, cols)), out = ops.scratch(rows, cols);
      ops.rms_norm(in, heads, *w, 1e-5f, out);
      const std::vector<float> got = download(ops, out);
      ops.rms_norm(in, heads, *w, 1e-5f, in);
      c.expect(same_bits(got, download(ops, in)), "rms_norm in place");
      c.expect(relative_error(got, ref_rms_norm(to_ref(rows, cols, head_rows(x, rows, cols)), heads, weight, 1e-5),
                              1e-20) < 1e-6,
               "rms_norm against the reference");
      return got;
    });
  }
}

// Protects the elementwise operations against double precision and across variants, beyond one piece of columns too.
// Below -88.73 a sigmoid is 0, where the true value is under 4e-39: hence the floors.
void elementwise(Checker& c) {
  Random random(21);
  for (int64_t n : {1, 19, 64, 5000}) {
    const std::vector<float> gate_up = random.vector(70 * 2 * n, true), a = random.vector(70 * n, true),
                             b = random.vector(70 * n, true);
    same_everywhere(c, "silu_mul", n, [&](Ops& ops, int64_t rows) {
      const Tensor in = upload(ops, rows, 2 * n, head_rows(gate_up, rows, 2 * n)), out = ops.scratch(rows, n);
      ops.silu_mul(in, out);
      const std::vector<float> got = download(ops, out);
      c.expect(relative_error(got, ref_silu_mul(to_ref(rows, 2 * n, head_rows(gate_up, rows, 2 * n))), 1e-26) < 1e-6,
               "silu_mul against the reference");
      return got;
    });
    same_everywhere(c, "sigmoid_mul", n, [&](Ops& ops, int64_t rows) {
      const Tensor x = upload(ops, rows, n, head_rows(a, rows, n)), gate = upload(ops, rows, n, head_rows(b, rows, n));
      ops.sigmoid_mul(x, gate);
      const std::vector<float> got = download(ops, x);
      const RefMatrix want =
          ref_sigmoid_mul(to_ref(rows, n, head_rows(a, rows, n)), to_ref(rows, n, head_rows(b, rows, n)));
      c.expect(relative_error(got, want, 1e-26) < 1e-6, "sigmoid_mul against the reference");
      return got;
    });
    same_everywhere(c, "add", n, [&](Ops& ops, int64_t rows) {
      const Tensor x = upload(ops, rows, n, head_rows(a, rows, n)), y = upload(ops, rows, n, head_rows(b, rows, n));
      ops.add(x, y, y);
      std::vector<float> want = head_rows(a, rows, n);
      for (size_t i = 0; i < want.size(); ++i) want[i] += b[i];
      const std::vector<float> got = download(ops, y);
      c.expect(same_bits(got, want), "add is one IEEE addition");
      return got;
    });
  }
}

// Protects rope: double precision at far positions, partial rotation, and equality everywhere.
void rope(Checker& c) {
  Random random(22);
  for (const auto& [head_dim, pairs] : {std::pair<int64_t, int64_t>{64, 32}, {48, 24}, {128, 20}, {8, 3}}) {
    const int64_t heads = 3, cols = heads * head_dim;
    std::vector<float> inv_freq;
    for (int64_t i = 0; i < pairs; ++i) {
      inv_freq.push_back(static_cast<float>(pow64(1e4, -static_cast<double>(i) / static_cast<double>(pairs))));
    }
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < 70; ++i) positions.push_back(i < 10 ? i : random.below(1 << 20));
    const std::vector<float> x = random.vector(70 * cols);
    same_everywhere(c, "rope", cols, [&, head_dim = head_dim](Ops& ops, int64_t rows) {
      const std::span<const int64_t> at(positions.data(), static_cast<size_t>(rows));
      const RopeTable table = ops.rope_table(batch_at(at), *ops.pack_vector(inv_freq), 1.25);
      const Tensor t = upload(ops, rows, cols, head_rows(x, rows, cols));
      ops.rope(t, heads, head_dim, table);
      const std::vector<float> got = download(ops, t);
      const RefMatrix want = ref_rope(to_ref(rows, cols, head_rows(x, rows, cols)), heads, at, inv_freq, 1.25);
      c.expect(relative_error(got, want, 1.0) < 5e-7, "rope against the reference");
      return got;
    });
  }
}

// Protects candidates: order by (logit, id), ties, NaN last, fewer columns than asked, chunks of the vocabulary.
void top_candidates(Checker& c) {
  Random random(23);
  for (Variant& v : all_variants({1, 2})) {
    for (int64_t cols : {1, 5, 40, 9000, 20000}) {
      std::vector<std::vector<float>> rows;
      std::vector<float> flat;
      for (int r = 0; r < 3; ++r) {
        std::vector<float> row = random.vector(cols);
        for (float& x : row) x = std::round(x * 50) / 8;  // many ties, both zeros
        if (r == 1) row[static_cast<size_t>(random.below(cols))] = NAN;
        if (r == 2) row.assign(row.size(), NAN);
        flat.insert(flat.end(), row.begin(), row.end());
        rows.push_back(row);
      }
      for (int64_t n : {0, 1, 7, 64}) {
        v.ops->begin_pass();
        const auto got = v.ops->top_candidates(upload(*v.ops, 3, cols, flat), 1000, n);
        const auto want = ref_top_candidates(rows, 1000, n);
        bool same = got.size() == want.size();
        for (size_t r = 0; same && r < got.size(); ++r) {
          same = got[r].size() == want[r].size();
          for (size_t i = 0; same && i < got[r].size(); ++i) {
            same =
                got[r][i].id == want[r][i].id && (got[r][i].logit == want[r][i].logit || std::isnan(want[r][i].logit));
          }
        }
        c.expect(same, v.name + ": candidates of " + std::to_string(cols) + " columns, n " + std::to_string(n));
      }
    }
  }
}

// Protects draws: the token of the largest noisy score, found without the bound that skips most of the work; ties of
// logits, rows that draw nothing, the first logit that is not finite; chunks of the vocabulary and threads.
void best_draws(Checker& c) {
  Random random(29);
  for (Variant& v : all_variants({1, 2})) {
    for (int64_t cols : {1, 5, 4096, 9001}) {
      const int64_t count = 5;
      std::vector<float> flat = random.vector(count * cols);
      for (float& x : flat) x = std::round(x * 40) / 8;
      std::vector<DrawKey> keys;
      for (int64_t r = 0; r < count; ++r)
        keys.push_back({mix64(static_cast<uint64_t>(r)), 0.3 + 0.4 * static_cast<double>(r)});
      keys[1].temperature = 0.0;
      const int64_t broken = cols / 2;
      flat[static_cast<size_t>(3 * cols + broken)] = NAN;
      flat[static_cast<size_t>(4 * cols - 1)] = std::isnan(flat[static_cast<size_t>(4 * cols - 1)]) ? NAN : INFINITY;
      v.ops->begin_pass();
      const std::vector<Candidate> got = v.ops->best_draws(upload(*v.ops, count, cols, flat), 1000, keys);
      for (int64_t r = 0; r < count; ++r) {
        Candidate want{0.0f, -1};
        double best = 0.0;
        for (int64_t i = 0; r != 1 && r != 3 && i < cols; ++i) {
          const float logit = flat[static_cast<size_t>(r * cols + i)];
          const DrawKey& key = keys[static_cast<size_t>(r)];
          const double score = static_cast<double>(logit) / key.temperature +
                               gumbel_of_hash(token_hash(key.key, static_cast<uint32_t>(1000 + i)));
          if (want.id >= 0 && score <= best) continue;
          best = score;
          want = {logit, static_cast<int32_t>(1000 + i)};
        }
        if (r == 3) want.id = static_cast<int32_t>(1000 + broken);
        const Candidate& have = got[static_cast<size_t>(r)];
        c.expect(have.id == want.id && (r == 3 ? std::isnan(have.logit) : have.logit == want.logit),
                 v.name + ": draw of row " + std::to_string(r) + " of " + std::to_string(cols) + " columns");
      }
    }
  }
}

// Protects copies: gather keeps rows as they are, persistent tensors survive a pass.
void copies(Checker& c) {
  Random random(24);
  for (Variant& v : all_variants({1, 2})) {
    const std::vector<float> x = random.vector(6 * 21);
    const Tensor kept = v.ops->persistent(2, 21);
    const Tensor src = upload(*v.ops, 6, 21, x);
    const std::vector<int32_t> rows = {5, 2};
    v.ops->gather_rows(src, rows, kept);
    v.ops->begin_pass();
    v.ops->scratch(100, 1000);
    std::vector<float> want(x.begin() + 5 * 21, x.begin() + 6 * 21);
    want.insert(want.end(), x.begin() + 2 * 21, x.begin() + 3 * 21);
    c.expect(same_bits(download(*v.ops, kept), want), v.name + ": gathered rows");
  }
}

}  // namespace

std::vector<NamedCheck> rowwise_checks() {
  return {{"rms_norm", rms_norm},
          {"elementwise", elementwise},
          {"rope", rope},
          {"top_candidates", top_candidates},
          {"best_draws", best_draws},
          {"copies", copies}};
}

}  // namespace tensorfold
