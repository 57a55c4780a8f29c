#include "worker/checkpoint/deepseek_v41_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace tensorfold {
namespace {

bool contains(const std::vector<int64_t>& list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Layers of a key, in ascending order, each once.
std::vector<int64_t> layer_list(FieldReader& fields, const char* key, int64_t count) {
  const std::vector<int64_t> layers = fields.integers(key, 0, count - 1);
  for (size_t i = 1; i < layers.size(); ++i) {
    if (layers[i] <= layers[i - 1]) fields.refuse(key, "layers in ascending order");
  }
  return layers;
}

void parse_candidates(FieldReader& fields, const std::vector<int64_t>& kv_sources,
                      const std::vector<int64_t>& index_sources, ModelConfig& config) {
  SharedLatentsConfig& shared = config.shared_latents;
  shared.candidate_layer = fields.integer("candidate_source_layer_id", -1, config.layer_count() - 1, -1);
  if (shared.candidate_layer < 0 || !fields.ok()) return;
  shared.candidate_blocks = fields.integer("candidate_topk_blocks", 1, 1 << 20);
  shared.candidate_block = fields.integer("candidate_block_size", 1, 1 << 16);
  if (!contains(index_sources, shared.candidate_layer)) {
    fields.refuse("candidate_source_layer_id", "one of index_source_layer_ids, or -1");
  }
  if (!kv_sources.empty() && kv_sources.back() > shared.candidate_layer) {
    fields.refuse("candidate_source_layer_id",
                  "a layer from the last of kv_source_layer_ids on: candidates are of its rows");
  }
}

void parse_layers(FieldReader& fields, ModelConfig& config) {
  const int64_t count = fields.integer("num_hidden_layers", 1, 1024);
  if (!fields.ok()) return;
  // One number a layer, and those of the drafter behind them.
  const std::vector<int64_t> ratios = fields.integers("compress_ratios", 0, 64);
  if (fields.ok() && static_cast<int64_t>(ratios.size()) < count) {
    fields.refuse("compress_ratios", fmt::format("{} numbers or more, as many as num_hidden_layers", count));
  }
  const std::vector<int64_t> kv_sources = layer_list(fields, "kv_source_layer_ids", count);
  const std::vector<int64_t> index_sources = layer_list(fields, "index_source_layer_ids", count);
  if (!fields.ok()) return;
  SharedLatentsConfig& shared = config.shared_latents;
  int64_t kv = -1, index = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t ratio = ratios[static_cast<size_t>(i)];
    if (64 % std::max<int64_t>(ratio, 1) != 0) fields.refuse("compress_ratios", "divisors of a page's 64 tokens, or 0");
    if (contains(kv_sources, i)) kv = i;
    if (contains(index_sources, i)) index = i;
    if (kv == i && (ratio == 0 || index != i)) {
      fields.refuse("kv_source_layer_ids", fmt::format("layers with pooled rows that are in index_source_layer_ids "
                                                       "too; layer {} is not",
                                                       i));
    }
    if (index == i && ratio == 0) {
      fields.refuse("index_source_layer_ids", fmt::format("layers with pooled rows; layer {} has none", i));
    }
    const bool sourced = kv >= 0 && ratios[static_cast<size_t>(kv)] == ratio;
    if (ratio > 0 && !sourced) {
      fields.refuse("compress_ratios", fmt::format("for layer {} the number of the last kv source before it", i));
    }
    shared.tokens.push_back(ratio);
    shared.kv_source.push_back(ratio > 0 ? kv : -1);
    shared.index_source.push_back(ratio > 0 ? index : -1);
    config.layers.push_back(ratio > 0 ? LayerKind::kWindowAndChosen : LayerKind::kWindow);
    config.mlps.push_back(MlpKind::kExperts);
    config.latent.experts_by_token.push_back(false);
  }
  if (fields.ok()) parse_candidates(fields, kv_sources, index_sources, config);
}

void parse_engram(FieldReader& fields, ModelConfig& config) {
  EngramConfig& engram = config.engram;
  engram.layers = layer_list(fields, "engram_layer_ids", config.layer_count());
  if (engram.layers.empty() || !fields.ok()) return;
  engram.table_rows = fields.integers("engram_num_embeddings", 1, int64_t{1} << 40);
  engram.size = fields.integer("engram_max_ngram_size", 2, 8, 4);
  engram.heads_per_size = fields.integer("engram_n_heads", 1, 64, 8);
  engram.head_dim = fields.integer("engram_head_dim", 1, 65536, 256);
  // Row numbers of one head's table must fit an id.
  engram.table_base = fields.integer("engram_vocab_size", 2, 1 << 30, 16'000'000);
  engram.pad_token = fields.integer("engram_pad_token_id", 0, config.vocab_size - 1, 2);
  engram.classes = fields.integer("engram_compressed_vocab_size", 1, config.vocab_size);
  if (fields.ok() && engram.table_rows.size() != engram.layers.size()) {
    fields.refuse("engram_num_embeddings",
                  fmt::format("{} numbers, as many as engram_layer_ids", engram.layers.size()));
  }
}

}  // namespace

void parse_deepseek_v41(FieldReader& fields, ModelConfig& config) {
  parse_layers(fields, config);
  if (fields.ok()) parse_engram(fields, config);
  // Rows are rounded in groups of 32 values.
  if (fields.ok() && config.head_dim % 32 != 0) fields.refuse("head_dim", "a multiple of 32");
  if (fields.ok() && config.latent.index_dim % 32 != 0) fields.refuse("index_head_dim", "a multiple of 32");
  if (fields.number("gate_temp", 0.0, 1e6, 1.0) != 1.0) fields.refuse("gate_temp", "1");
  const std::string method = fields.string("topk_method", "noaux_tc");
  if (method != "noaux_tc") fields.refuse("topk_method", "noaux_tc");
  // Rows of engram tables have a scale for 32 values each, beside modules with one for a block.
  if (config.quantization.method == "fp8") config.quantization.kinds.insert(StoredKind::kMxfp8);
}

std::string deepseek_v41_text(const ModelConfig& c) {
  if (c.family != Family::kDeepseekV41) return {};
  const SharedLatentsConfig& s = c.shared_latents;
  const EngramConfig& e = c.engram;
  std::string text = fmt::format("pooled={} from {} chosen by {} candidates={},{},{}\n", fmt::join(s.tokens, ","),
                                 fmt::join(s.kv_source, ","), fmt::join(s.index_source, ","), s.candidate_layer,
                                 s.candidate_blocks, s.candidate_block);
  if (e.layers.empty()) return text;
  text +=
      fmt::format("engram={} rows {} of {},{},{},{},{},{}\n", fmt::join(e.layers, ","), fmt::join(e.table_rows, ","),
                  e.size, e.heads_per_size, e.head_dim, e.table_base, e.pad_token, e.classes);
  if (e.class_of == nullptr) return text;
  // Ranks must agree on the classes, which come from a file of their own.
  uint64_t hash = 0xcbf29ce484222325u;
  for (const int32_t id : *e.class_of) hash = (hash ^ static_cast<uint64_t>(id)) * 0x100000001b3u;
  return text + fmt::format("classes={},{:016x}\n", e.class_of->size(), hash);
}

}  // namespace tensorfold
