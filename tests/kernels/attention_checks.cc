// Attention over paged keys and values.
#include <algorithm>
#include <cmath>

#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

struct Shape {
  int64_t heads, kv_heads, head_dim, length;
};

// A sequence with its queries, keys and values, and pages in no particular order inside a cache full of NaN.
struct Sequence {
  Shape shape;
  std::vector<float> q, k, v;
  std::vector<int32_t> pages, kv_head_of;
  float scale;

  Sequence(const Shape& s, uint64_t seed, int32_t first_page) : shape(s) {
    Random random(seed);
    q = random.vector(s.length * s.heads * s.head_dim);
    k = random.vector(s.length * s.kv_heads * s.head_dim);
    v = random.vector(s.length * s.kv_heads * s.head_dim);
    for (float& x : q) x *= 4;
    const int32_t count = static_cast<int32_t>((s.length + kPageTokens - 1) / kPageTokens);
    for (int32_t i = 0; i < count; ++i) pages.push_back(first_page + (i * 7 + 3) % count);
    std::sort(pages.begin(), pages.end());
    if (count > 7 && count % 7 != 0) {
      for (int32_t i = 0; i < count; ++i) pages[i] = first_page + (i * 7 + 3) % count;
    }
    for (int64_t h = 0; h < s.heads; ++h) kv_head_of.push_back(static_cast<int32_t>(h * s.kv_heads / s.heads));
    scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  }
  int64_t page_count() const { return static_cast<int64_t>(pages.size()); }
  static std::vector<float> rows(const std::vector<float>& all, int64_t first, int64_t count, int64_t cols) {
    return {all.begin() + first * cols, all.begin() + (first + count) * cols};
  }
};

// Fills every page of a layer with NaN: whatever a former owner left there must not be seen.
void poison(Ops& ops, KvCache& cache, int64_t layer, int64_t pages, const Shape& s) {
  std::vector<int32_t> table;
  for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(i));
  const int64_t rows = pages * kPageTokens, cols = s.kv_heads * s.head_dim;
  const Tensor nan = upload(ops, rows, cols, std::vector<float>(static_cast<size_t>(rows * cols), NAN));
  const RowGroup group{0, rows, 0, 0, rows, table};
  ops.kv_write(cache, layer, nan, nan, batch_of({&group, 1}));
}

// One pass over [first, first + count) of each sequence together; results in order.
std::vector<float> pass(Ops& ops, KvCache& cache, const std::vector<const Sequence*>& sequences, int64_t first,
                        int64_t count) {
  ops.begin_pass();
  const Shape& s = sequences[0]->shape;
  const int64_t q_cols = s.heads * s.head_dim, kv_cols = s.kv_heads * s.head_dim;
  std::vector<float> q, k, v;
  std::vector<RowGroup> groups;
  int64_t at = 0;
  for (const Sequence* seq : sequences) {
    const auto append = [&](std::vector<float>* to, const std::vector<float>& from, int64_t cols) {
      const std::vector<float> part = Sequence::rows(from, first, count, cols);
      to->insert(to->end(), part.begin(), part.end());
    };
    append(&q, seq->q, q_cols);
    append(&k, seq->k, kv_cols);
    append(&v, seq->v, kv_cols);
    groups.push_back({at, count, first, 0, count, seq->pages});
    at += count;
  }
  const Tensor tq = upload(ops, at, q_cols, q), out = ops.scratch(at, q_cols);
  ops.kv_write(cache, 1, upload(ops, at, kv_cols, k), upload(ops, at, kv_cols, v), batch_of(groups));
  AttentionArgs args;
  args.q = tq;
  args.out = out;
  args.heads = s.heads;
  args.head_dim = s.head_dim;
  args.kv_head_of = sequences[0]->kv_head_of;
  args.scale = sequences[0]->scale;
  args.rows = batch_of(groups);
  ops.attention(cache, 1, args);
  return download(ops, out);
}

// The whole sequence in chunks of `chunk` rows; with `mate`, that sequence does the same passes beside it, in front.
std::vector<float> in_chunks(Ops& ops, const Sequence& seq, int64_t chunk, const Sequence* mate = nullptr) {
  ops.begin_pass();
  const Shape& s = seq.shape;
  const int64_t pages = 2 * seq.page_count() + 1;
  const auto cache = ops.make_kv_cache(2, pages, s.kv_heads, s.head_dim);
  poison(ops, *cache, 1, pages, s);
  std::vector<float> all;
  for (int64_t at = 0; at < s.length; at += chunk) {
    const int64_t count = std::min(chunk, s.length - at);
    std::vector<const Sequence*> together;
    if (mate != nullptr) together.push_back(mate);
    together.push_back(&seq);
    const std::vector<float> out = pass(ops, *cache, together, at, count);
    all.insert(all.end(), out.end() - count * s.heads * s.head_dim, out.end());
  }
  return all;
}

// Protects the values: against double precision for several head dims, groupings, and over a split boundary.
void attention_against_reference(Checker& c) {
  for (const Shape& s : {Shape{3, 1, 64, 90}, Shape{4, 4, 48, 33}, Shape{6, 2, 24, 70}, Shape{1, 1, 8, 600},
                         Shape{18, 1, 16, 20}, Shape{2, 1, 256, 40}}) {
    const Sequence seq(s, 31, 1);
    for (Variant& v : all_variants({1})) {
      const std::vector<float> got = in_chunks(*v.ops, seq, s.length);
      const RefMatrix want = ref_attention(
          to_ref(s.length, s.heads * s.head_dim, seq.q), to_ref(s.length, s.kv_heads * s.head_dim, seq.k),
          to_ref(s.length, s.kv_heads * s.head_dim, seq.v), s.heads, s.head_dim, seq.kv_head_of, 0, seq.scale);
      const double error = relative_error(got, want, 1.0);
      c.expect(error < 3e-6, v.name + " head_dim " + std::to_string(s.head_dim) + ": error " + std::to_string(error));
    }
  }
}

// Protects prompt chunking, batch-mates, threads and instruction sets: the bits of each row stay the same.
void attention_is_chunk_invariant(Checker& c) {
  for (const Shape& s : {Shape{3, 1, 64, 100}, Shape{4, 2, 40, 67}, Shape{20, 1, 8, 35}}) {
    const Sequence seq(s, 32, 0), mate(s, 33, static_cast<int32_t>(seq.page_count()));
    std::vector<float> first;
    for (Variant& v : all_variants({1, 2, 3})) {
      for (int64_t chunk : {s.length, int64_t{1}, int64_t{7}, int64_t{64}}) {
        const std::vector<float> got = in_chunks(*v.ops, seq, chunk, chunk == 7 ? &mate : nullptr);
        if (first.empty()) first = got;
        c.expect(same_bits(first, got), v.name + " chunk " + std::to_string(chunk));
      }
    }
  }
}

// Protects the merge of splits: long sequences, where few rows run their splits in parallel and many do not.
void attention_splits_are_merged_in_order(Checker& c) {
  const Shape s{2, 1, 16, 1100};
  const Sequence seq(s, 34, 0);
  std::vector<float> first;
  for (Variant& v : all_variants({1, 3})) {
    const auto cache = v.ops->make_kv_cache(2, seq.page_count(), s.kv_heads, s.head_dim);
    const std::vector<float> whole = pass(*v.ops, *cache, {&seq}, 0, s.length);
    if (first.empty()) first = whole;
    c.expect(same_bits(first, whole), v.name + ": 1100 rows at once");
    for (int64_t at : {0, 500, 511, 512, 513, 1023, 1024, 1090}) {
      for (int64_t rows : {1, 3, 9}) {
        const std::vector<float> some = pass(*v.ops, *cache, {&seq}, at, rows);
        c.expect(same_bits(some, Sequence::rows(first, at, rows, s.heads * s.head_dim)),
                 v.name + " position " + std::to_string(at) + " rows " + std::to_string(rows));
      }
    }
  }
}

}  // namespace

std::vector<NamedCheck> attention_checks() {
  return {{"attention_against_reference", attention_against_reference},
          {"attention_is_chunk_invariant", attention_is_chunk_invariant},
          {"attention_splits_are_merged_in_order", attention_splits_are_merged_in_order}};
}

}  // namespace tensorfold
