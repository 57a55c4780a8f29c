#include "worker/model/ngrams.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kernels/numerics/ngram_hash.h"
#include "kernels/ops/stream_ops.h"
#include "worker/model/families.h"
#include "worker/model/primes.h"

namespace tensorfold {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// The splitmix64 generator's output for state `x`.
uint64_t splitmix64(uint64_t x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

NgramHash::NgramHash(const NgramConfig& config, int64_t vocab, int64_t index) {
  heads_.heads_per_size = config.heads_per_size;
  heads_.end_token = static_cast<int32_t>(config.end_token);
  const uint64_t bound = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / std::max<int64_t>(vocab, 1));
  const uint64_t half = std::max<uint64_t>(1, bound / 2);
  const uint64_t seed = static_cast<uint64_t>(config.seed) + 10007u * static_cast<uint64_t>(index);
  for (int64_t i = 0; i < config.size; ++i) {
    const uint64_t drawn = splitmix64(seed + kGolden * static_cast<uint64_t>(i + 1));
    heads_.multipliers.push_back(static_cast<int64_t>(2 * (drawn % half) + 1));
  }
  // Successive primes; a later layer goes on where the one before stopped.
  int64_t prime = config.table_base - 1;
  const int64_t first = index * config.heads();
  for (int64_t i = 0; i < first + config.heads(); ++i) {
    prime = next_prime(prime);
    if (i < first) continue;
    offsets_.push_back(padded_rows_);
    heads_.table_rows.push_back(prime);
    padded_rows_ += prime;
  }
  padded_rows_ = (padded_rows_ + config.table_divisor - 1) / config.table_divisor * config.table_divisor;
}

Slices ngram_slices(const ModelConfig& config) {
  const NgramConfig& ngrams = config.ngrams;
  int64_t unit = 1;
  for (const int64_t layer : ngrams.layers) {
    for (const char* module : {"key_proj", "value_proj"}) {
      const auto format = config.quantization.of(fmt::format("layers.{}.ple.{}", layer, module));
      if (format) unit = std::max<int64_t>(unit, format->group);
    }
  }
  return cut_dimension(ngrams.heads(), ngrams.embed_dim / ngrams.heads(), unit);
}

ShortConvShape ngram_state(const ModelConfig& config) {
  return {.channels = config.gated_streams.count * config.hidden_size,
          .taps = config.ngrams.conv_kernel,
          .dilation = config.ngrams.size,
          .context = config.ngrams.size - 1};
}

absl::StatusOr<std::unique_ptr<NgramBlock>> NgramBlock::load(LoadContext& load, const std::string& prefix,
                                                             int64_t index, int64_t recurrent_layer) {
  const ModelConfig& config = load.config;
  std::unique_ptr<NgramBlock> block(new NgramBlock(NgramHash(config.ngrams, config.vocab_size, index)));
  block->cut_ = make_cut(ngram_slices(config), load.shard);
  block->head_dim_ = config.ngrams.embed_dim / config.ngrams.heads();
  block->count_ = config.gated_streams.count;
  block->width_ = config.hidden_size;
  block->recurrent_layer_ = recurrent_layer;
  block->eps_ = static_cast<float>(config.rms_norm_eps);
  block->conv_shape_ = ngram_state(config);
  if (absl::Status s = block->load_tables(load, prefix + ".ple_embedding"); !s.ok()) return s;
  if (absl::Status s = block->load_projections(load, prefix); !s.ok()) return s;
  struct Part {
    const char* name;
    StreamNorm* into;
  };
  for (const Part& part : {Part{".norm_key", &block->key_norm_}, Part{".norm_query", &block->query_norm_},
                           Part{".norm_conv", &block->conv_norm_}}) {
    absl::StatusOr<StreamNorm> norm = StreamNorm::load(load, prefix + part.name);
    if (!norm.ok()) return norm.status();
    *part.into = *std::move(norm);
  }
  absl::StatusOr<std::vector<float>> conv =
      load.reader.convolution(prefix + ".conv1d", block->conv_shape_.channels, block->conv_shape_.taps);
  if (!conv.ok()) return conv.status();
  block->conv_ = load.ops.pack_vector(*conv);
  return block;
}

// The tables of all heads are one matrix, stored in shards of rows; the numbers of the hash may be stored beside it.
absl::Status NgramBlock::load_tables(LoadContext& load, const std::string& prefix) {
  struct Stored {
    const char* name;
    const std::vector<int64_t>& computed;
  };
  for (const Stored& stored :
       {Stored{".layer_multipliers", hash_.multipliers()}, Stored{".ngram_heads_vocab_sizes", hash_.table_rows()},
        Stored{".ngram_heads_offsets", hash_.offsets()}}) {
    absl::StatusOr<std::vector<int64_t>> found =
        load.reader.integers(prefix + stored.name, static_cast<int64_t>(stored.computed.size()));
    if (!found.ok()) return found.status();
    if (!found->empty() && *found != stored.computed) {
      return absl::InvalidArgumentError(
          fmt::format("tensor {}{} holds other numbers than config.json's seed, vocabulary and n-gram settings give",
                      prefix, stored.name));
    }
  }
  std::vector<MatrixSource> shards;
  int64_t rows = 0;
  for (int64_t i = 0; i < load.config.ngrams.shards; ++i) {
    const std::string module = fmt::format("{}.ngram_embedding.shard_{}", prefix, i);
    const TensorInfo* tensor = load.reader.source().find(load.reader.layout().full_name(module + ".weight"));
    const bool sized = tensor != nullptr && !tensor->shape.empty();
    // A missing shard is reported by name.
    absl::StatusOr<MatrixSource> shard = load.reader.matrix(module, sized ? tensor->shape[0] : 1, head_dim_);
    if (!shard.ok()) return shard.status();
    rows += shard->rows;
    shards.push_back(*shard);
  }
  if (rows != hash_.padded_rows()) {
    return absl::InvalidArgumentError(
        fmt::format("{}.ngram_embedding has {} rows in {} shards; by config.json it must "
                    "have {}",
                    prefix, rows, shards.size(), hash_.padded_rows()));
  }
  for (int64_t head = cut_.first_unit(); head < cut_.first_unit() + cut_.unit_count(); ++head) {
    const int64_t first = hash_.offsets()[static_cast<size_t>(head)];
    const int64_t end = first + hash_.table_rows()[static_cast<size_t>(head)];
    std::vector<MatrixSource> parts;
    int64_t at = 0;
    for (const MatrixSource& shard : shards) {
      const int64_t from = std::max(first, at), to = std::min(end, at + shard.rows);
      if (from < to) parts.push_back(shard.slice_rows(from - at, to - from));
      at += shard.rows;
    }
    tables_.push_back(load.ops.pack(parts));
  }
  return absl::OkStatus();
}

absl::Status NgramBlock::load_projections(LoadContext& load, const std::string& prefix) {
  const SlicedProjection::Module modules[] = {{prefix + ".key_proj", count_ * width_},
                                              {prefix + ".value_proj", width_}};
  absl::StatusOr<SlicedProjection> projection = SlicedProjection::load(load, modules, cut_, head_dim_);
  if (!projection.ok()) return projection.status();
  projection_ = *std::move(projection);
  return absl::OkStatus();
}

WeightCost NgramBlock::cost() const { return projection_.cost(); }

absl::Status NgramBlock::add_to(PassContext& pass, int layer, Tensor streams) const {
  Ops& ops = *pass.ops;
  const ScratchScope scope(ops);
  const int64_t rows = streams.rows, all = count_ * width_;
  const Tensor found = ops.scratch_input(rows, cut_.unit_count() * head_dim_);
  const std::vector<const Weight*> tables = borrowed(tables_);
  ops.embed_ngrams({.heads = &hash_.heads(),
                    .shape = &conv_shape_,
                    .tables = tables,
                    .first_head = cut_.first_unit(),
                    .out = found,
                    .rows = pass.rows,
                    .layer = recurrent_layer_});
  pass.record(layer, "ngrams.rows", found, cut_.first_unit(), cut_.unit_count());
  const Tensor projected = ops.scratch(rows, all + width_);
  ops.clear(projected);
  if (absl::Status s = projection_.add_to(pass, layer, "ngrams.projections", found, projected); !s.ok()) return s;

  const Tensor key = projected.columns(0, all), value = projected.columns(all, width_);
  const Tensor query = ops.scratch(rows, all), gated = ops.scratch(rows, all), mixed = ops.scratch(rows, all);
  key_norm_.apply(ops, eps_, key, key);
  query_norm_.apply(ops, eps_, streams, query);
  ops.gate_streams({.key = key, .query = query, .value = value, .count = count_, .out = gated});
  conv_norm_.apply(ops, eps_, gated, query);
  ShortConvArgs conv;
  conv.shape = &conv_shape_;
  conv.x = query;
  conv.conv = conv_.get();
  conv.out = mixed;
  conv.rows = pass.rows;
  conv.layer = recurrent_layer_;
  ops.short_conv(conv);
  ops.add(gated, mixed, mixed);
  ops.add(streams, mixed, streams);
  pass.record(layer, "ngrams.residual", streams);
  return absl::OkStatus();
}

}  // namespace tensorfold
