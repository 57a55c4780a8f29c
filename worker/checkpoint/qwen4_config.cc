#include "worker/checkpoint/qwen4_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "kernels/ops/stream_ops.h"

namespace tensorfold {
namespace {

void parse_indexer(FieldReader& fields, ModelConfig& config) {
  IndexerConfig& indexer = config.indexer;
  indexer.heads = fields.integer("indexer_n_heads", 1, 256);
  indexer.head_dim = fields.integer("indexer_head_dim", 2, 1024);
  indexer.tokens = fields.integer("indexer_compress_ratio", 1, kPageTokens);
  indexer.budget = fields.integer("indexer_budget", 1, 1 << 20);
  if (fields.integer("indexer_kv_heads", 1, 1024) != 1) fields.refuse("indexer_kv_heads", "1");
  if (!fields.ok()) return;
  if (kPageTokens % indexer.tokens != 0) {
    fields.refuse("indexer_compress_ratio", fmt::format("a divisor of {}", kPageTokens));
  }
  if (indexer.budget % indexer.tokens != 0) {
    fields.refuse("indexer_budget", fmt::format("a multiple of indexer_compress_ratio, which is {}", indexer.tokens));
  }
  if (config.rope.dims > indexer.head_dim) {
    fields.refuse("indexer_head_dim", fmt::format("at least the rotated dims, which are {}", config.rope.dims));
  }
}

void parse_ngrams(FieldReader& fields, ModelConfig& config) {
  NgramConfig& ngrams = config.ngrams;
  // Counted from 1.
  for (const int64_t layer : fields.integers("ple_layer_ids", 1, config.layer_count())) {
    ngrams.layers.push_back(layer - 1);
  }
  std::sort(ngrams.layers.begin(), ngrams.layers.end());
  ngrams.layers.erase(std::unique(ngrams.layers.begin(), ngrams.layers.end()), ngrams.layers.end());
  if (ngrams.layers.empty() || !fields.ok()) return;
  ngrams.embed_dim = fields.integer("ple_embed_dim", 1, 65536, config.hidden_size);
  ngrams.size = fields.integer("ngram_size", 2, 8, 3);
  ngrams.heads_per_size = fields.integer("heads_per_ngram", 1, 64, 8);
  // Row numbers of one table must fit an id.
  ngrams.table_base = fields.integer("ngram_vocab_size_base", 2, 1 << 30, 20'000'000);
  ngrams.table_divisor = fields.integer("make_ngram_vocab_size_divisible_by", 1, 1 << 20, 128);
  ngrams.shards = fields.integer("split_ngram_parts", 1, 65536, 512);
  ngrams.seed = fields.integer("seed", 0, int64_t{1} << 53, 1234);
  ngrams.conv_kernel = fields.integer("ple_conv_kernel_size", 2, 16, 4);
  const std::vector<int64_t> ends = fields.integers("eos_token_id", 0, config.vocab_size - 1);
  if (!fields.ok()) return;
  if (ends.empty()) return fields.refuse("eos_token_id", "a token: n-grams need one");
  ngrams.end_token = ends.front();
  if (ngrams.embed_dim % ngrams.heads() != 0) {
    fields.refuse("ple_embed_dim",
                  fmt::format("a multiple of (ngram_size - 1) * heads_per_ngram, which is {}", ngrams.heads()));
  }
}

}  // namespace

void parse_qwen4_exp(FieldReader& fields, ModelConfig& config) {
  const std::string gate = fields.string("output_gate_type", "silu");
  config.linear.sigmoid_gate = gate == "sigmoid";
  GatedStreamsConfig& streams = config.gated_streams;
  streams.count = fields.integer("hc_count", 2, kMostGatedStreams, 4);
  streams.rank = fields.integer("hc_lowrank", 1, 65536, 320);
  if (fields.ok() && config.count(MlpKind::kDense) > 0) {
    fields.fail(absl::UnimplementedError(
        fmt::format("{}: {} layers without experts; qwen4_exp is read with experts in every layer",
                    fields.where("mlp_only_layers"), config.count(MlpKind::kDense))));
  }
  if (fields.ok()) parse_indexer(fields, config);
  if (fields.ok()) parse_ngrams(fields, config);
}

std::string qwen4_text(const ModelConfig& c) {
  if (c.gated_streams.count == 0) return {};
  const IndexerConfig& i = c.indexer;
  const NgramConfig& n = c.ngrams;
  return fmt::format("streams={},{} indexer={},{},{},{} sigmoid gate={}\nngrams={} of {},{},{},{},{},{},{},{},{}\n",
                     c.gated_streams.count, c.gated_streams.rank, i.heads, i.head_dim, i.tokens, i.budget,
                     c.linear.sigmoid_gate, fmt::join(n.layers, ","), n.embed_dim, n.size, n.heads_per_size,
                     n.table_base, n.table_divisor, n.shards, n.seed, n.conv_kernel, n.end_token);
}

}  // namespace tensorfold
