#include "worker/model/engram.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kernels/ops/stream_ops.h"
#include "worker/model/families.h"
#include "worker/model/ngrams.h"
#include "worker/model/numpy_generator.h"
#include "worker/model/primes.h"

namespace tensorfold {

EngramHash::EngramHash(const EngramConfig& config, int64_t index) : heads_per_size_(config.heads_per_size) {
  const int64_t layer = config.layers[static_cast<size_t>(index)];
  const int64_t most = std::numeric_limits<int64_t>::max() / std::max<int64_t>(config.classes, 1);
  NumpyGenerator generator(10007u * static_cast<uint64_t>(layer));
  for (int64_t i = 0; i < config.size; ++i) {
    // Products of classes and factors stay below the sign bit.
    multipliers_.push_back(static_cast<int64_t>(2 * generator.below(static_cast<uint64_t>(most / 2)) + 1));
  }
  // Successive primes; a later layer goes on where the one before stopped.
  int64_t prime = config.table_base - 1, rows = 0;
  const int64_t first = index * config.heads();
  for (int64_t i = 0; i < first + config.heads(); ++i) {
    prime = next_prime(prime);
    if (i < first) continue;
    offsets_.push_back(rows);
    table_rows_.push_back(prime);
    rows += prime;
  }
}

void EngramHash::rows_of(std::span<const int32_t> classes, std::span<int32_t> rows) const {
  const auto product = [&](size_t back) {
    return static_cast<uint64_t>(classes[back]) * static_cast<uint64_t>(multipliers_[back]);
  };
  uint64_t mixed = product(0);
  size_t head = 0;
  for (size_t back = 1; back < multipliers_.size(); ++back) {
    mixed ^= product(back);
    for (int64_t i = 0; i < heads_per_size_; ++i, ++head) {
      rows[head] = static_cast<int32_t>(mixed % static_cast<uint64_t>(table_rows_[head]));
    }
  }
}

Slices engram_slices(const ModelConfig& config) {
  return cut_dimension(config.engram.heads(), config.engram.head_dim, column_unit(config, "engram.wkv"));
}

TokenClasses TokenClasses::read(PassContext& pass, const EngramConfig& config, int64_t cache_layer) {
  const std::vector<int32_t>& class_of = *config.class_of;
  const int64_t rows = pass.rows.rows(), before = config.size - 1;
  const Tensor own = pass.ops->scratch(rows, 1);
  std::vector<float> numbers;
  for (const int32_t token : pass.rows.tokens) {
    numbers.push_back(static_cast<float>(class_of[static_cast<size_t>(token)]));
  }
  pass.ops->upload(numbers, own);
  pass.ops->row_write(*pass.row_cache, cache_layer, own, pass.rows);
  const std::vector<int32_t> found = pass.ops->numbers_before(*pass.row_cache, cache_layer, pass.rows, before);
  TokenClasses out;
  out.size_ = config.size;
  const int32_t pad = class_of[static_cast<size_t>(config.pad_token)];
  for (int64_t r = 0; r < rows; ++r) {
    out.classes_.push_back(static_cast<int32_t>(numbers[static_cast<size_t>(r)]));
    for (int64_t back = 0; back < before; ++back) {
      const int32_t id = found[static_cast<size_t>(r * before + back)];
      out.classes_.push_back(id < 0 ? pad : id);
    }
  }
  return out;
}

std::span<const int32_t> TokenClasses::of(int64_t r) const {
  return std::span(classes_).subspan(static_cast<size_t>(r * size_), static_cast<size_t>(size_));
}

absl::StatusOr<std::unique_ptr<EngramBlock>> EngramBlock::load(LoadContext& load, const std::string& prefix,
                                                               int64_t index) {
  const ModelConfig& config = load.config;
  std::unique_ptr<EngramBlock> block(new EngramBlock(EngramHash(config.engram, index)));
  block->cut_ = make_cut(engram_slices(config), load.shard);
  block->head_dim_ = config.engram.head_dim;
  block->count_ = config.streams.count;
  block->width_ = config.hidden_size;
  block->eps_ = static_cast<float>(config.rms_norm_eps);
  if (absl::Status s = block->load_tables(load, prefix, index); !s.ok()) return s;
  if (absl::Status s = block->load_weights(load, prefix); !s.ok()) return s;
  return block;
}

absl::Status EngramBlock::load_tables(LoadContext& load, const std::string& prefix, int64_t index) {
  const int64_t stated = load.config.engram.table_rows[static_cast<size_t>(index)];
  if (hash_.rows() != stated) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: engram_num_embeddings is {}; by engram_vocab_size and the numbers of heads and n-grams it must "
        "be {}, a sum of primes",
        prefix, stated, hash_.rows()));
  }
  absl::StatusOr<MatrixSource> table = load.reader.matrix(prefix + ".embed", stated, head_dim_);
  if (!table.ok()) return table.status();
  for (int64_t head = cut_.first_unit(); head < cut_.first_unit() + cut_.unit_count(); ++head) {
    const MatrixSource part =
        table->slice_rows(hash_.offsets()[static_cast<size_t>(head)], hash_.table_rows()[static_cast<size_t>(head)]);
    tables_.push_back(load.ops.pack({&part, 1}));
  }
  return absl::OkStatus();
}

absl::Status EngramBlock::load_weights(LoadContext& load, const std::string& prefix) {
  absl::StatusOr<SlicedProjection> projection =
      SlicedProjection::load(load, prefix + ".wkv", (count_ + 1) * width_, cut_, head_dim_);
  if (!projection.ok()) return projection.status();
  projection_ = *std::move(projection);
  struct Part {
    const char* name;
    std::vector<std::unique_ptr<Vector>>& into;
  };
  for (const Part& part : {Part{".q_weight", query_norms_}, Part{".k_weight", key_norms_}}) {
    absl::StatusOr<std::vector<float>> values = load.reader.table(prefix + part.name, count_, width_);
    if (!values.ok()) return values.status();
    for (int64_t s = 0; s < count_; ++s) {
      part.into.push_back(load.ops.pack_vector(
          std::span(*values).subspan(static_cast<size_t>(s * width_), static_cast<size_t>(width_))));
    }
  }
  return absl::OkStatus();
}

WeightCost EngramBlock::cost() const { return projection_.cost(); }

namespace {

// [rows, own heads * head_dim]: row ids[head][r] of each own head's table; `ids` has all heads.
Tensor embed_heads(PassContext& pass, std::span<const std::unique_ptr<Weight>> tables, int64_t first_head,
                   int64_t head_dim, const std::vector<std::vector<int32_t>>& ids) {
  const int64_t heads = static_cast<int64_t>(tables.size());
  const Tensor found = pass.ops->scratch_input(pass.rows.rows(), heads * head_dim);
  for (int64_t i = 0; i < heads; ++i) {
    RowBatch batch;
    batch.tokens = ids[static_cast<size_t>(first_head + i)];
    pass.ops->embed(*tables[static_cast<size_t>(i)], batch, found.columns(i * head_dim, head_dim));
  }
  return found;
}

}  // namespace

Tensor EngramBlock::look_up(PassContext& pass, const TokenClasses& classes) const {
  const int64_t rows = pass.rows.rows();
  std::vector<std::vector<int32_t>> ids(static_cast<size_t>(cut_.slices.units),
                                        std::vector<int32_t>(static_cast<size_t>(rows)));
  std::vector<int32_t> own(ids.size());
  for (int64_t r = 0; r < rows; ++r) {
    hash_.rows_of(classes.of(r), own);
    for (size_t head = 0; head < own.size(); ++head) ids[head][static_cast<size_t>(r)] = own[head];
  }
  return embed_heads(pass, tables_, cut_.first_unit(), head_dim_, ids);
}

void EngramBlock::norm_streams(Ops& ops, const std::vector<std::unique_ptr<Vector>>& weights, Tensor x,
                               Tensor out) const {
  for (int64_t s = 0; s < count_; ++s) {
    ops.rms_norm(x.columns(s * width_, width_), 1, *weights[static_cast<size_t>(s)], eps_,
                 out.columns(s * width_, width_));
  }
}

absl::Status EngramBlock::add_to(PassContext& pass, int layer, const TokenClasses& classes, Tensor streams) const {
  Ops& ops = *pass.ops;
  const ScratchScope scope(ops);
  const int64_t rows = streams.rows, all = count_ * width_;
  const Tensor found = look_up(pass, classes);
  pass.record(layer, "engram.rows", found, cut_.first_unit(), cut_.unit_count());
  const Tensor projected = ops.scratch(rows, all + width_);
  ops.clear(projected);
  if (absl::Status s = projection_.add_to(pass, layer, "engram.projection", found, projected); !s.ok()) return s;

  const Tensor key = projected.columns(0, all), value = projected.columns(all, width_);
  const Tensor query = ops.scratch(rows, all), gated = ops.scratch(rows, all);
  norm_streams(ops, key_norms_, key, key);
  norm_streams(ops, query_norms_, streams, query);
  ops.gate_streams({.key = key, .query = query, .value = value, .count = count_, .out = gated});
  ops.add(streams, gated, streams);
  pass.record(layer, "engram.residual", streams);
  return absl::OkStatus();
}

}  // namespace tensorfold
