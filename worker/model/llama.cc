// Llama (model_type "llama"): grouped-query attention with rotary positions, SwiGLU, plain RMS norms.
#include "worker/model/decoder.h"

namespace tensorfold {
namespace {

absl::StatusOr<ModelShape> llama_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = decoder_shape(config, shard);
  if (shape.ok()) shape->kv_layers = config.layer_count();
  return shape;
}

absl::StatusOr<std::unique_ptr<Model>> load_llama(LoadContext& load, const ModelShape& shape) {
  DecoderSpec spec;
  spec.attention = {.heads = load.config.heads,
                    .kv_heads = load.config.kv_heads,
                    .head_dim = load.config.head_dim,
                    .slices = head_slices(load.config)};
  return Decoder::load(load, shape, spec);
}

}  // namespace

const FamilyEntry kLlamaEntry = {Family::kLlama, "llama", llama_shape, load_llama};

}  // namespace tensorfold
