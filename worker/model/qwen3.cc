// Qwen3 dense (model_type "qwen3"): llama with an RMS norm over each query and key head.
#include "worker/model/qwen3.h"

#include "worker/model/decoder.h"

namespace tensorfold {

absl::StatusOr<ModelShape> qwen3_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = decoder_shape(config, shard);
  if (shape.ok()) shape->kv_layers = config.layer_count();
  return shape;
}

absl::StatusOr<std::unique_ptr<Model>> load_qwen3(LoadContext& load, const ModelShape& shape) {
  DecoderSpec spec;
  spec.attention = {.heads = load.config.heads,
                    .kv_heads = load.config.kv_heads,
                    .head_dim = load.config.head_dim,
                    .qk_norm = true,
                    .slices = head_slices(load.config)};
  return Decoder::load(load, shape, spec);
}

const FamilyEntry kQwen3Entry = {Family::kQwen3, "qwen3", qwen3_shape, load_qwen3};

}  // namespace tensorfold
