// Qwen3.5 and Qwen3.8 (model_type "qwen3_5"): gated delta net layers with a gated full attention layer every few, and
// one multi-token-prediction (MTP) layer that drafts. qwen3_5_moe has experts for MLPs; qwen3_next fuses the delta
// net's inputs: the configuration says which layers are what.
#include "worker/model/qwen3_5.h"

#include <fmt/format.h>

#include "worker/model/decoder.h"

namespace tensorfold {
DeltaNetSpec qwen3_5_delta_net(const ModelConfig& config) {
  const LinearAttentionConfig& linear = config.linear;
  DeltaNetSpec spec = {.k_heads = linear.key_heads,
                       .v_heads = linear.value_heads,
                       .dk = linear.key_dim,
                       .dv = linear.value_dim,
                       .conv_kernel = linear.conv_kernel,
                       .fused = linear.fused,
                       .sigmoid_gate = linear.sigmoid_gate,
                       .slices = {}};
  if (linear.value_heads > 0) {
    spec.slices = cut_dimension(linear.value_heads, linear.value_dim, column_unit(config, "linear_attn.out_proj"));
  }
  return spec;
}

absl::StatusOr<ModelShape> qwen3_5_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = decoder_shape(config, shard);
  if (!shape.ok()) return shape;
  const int64_t linear_layers = config.count(LayerKind::kLinearAttention);
  shape->has_mtp = config.mtp_layers > 0;
  shape->kv_layers = config.count(LayerKind::kFullAttention) + (shape->has_mtp ? 1 : 0);
  if (linear_layers == 0) return shape;
  const DeltaNetSpec spec = qwen3_5_delta_net(config);
  if (absl::Status s = add_dimension(*shape, "linear attention heads", spec.slices, shard); !s.ok()) return s;
  shape->recurrent.assign(static_cast<size_t>(linear_layers), local_delta_net(spec, make_cut(spec.slices, shard)));
  return shape;
}

namespace {

class Qwen35 : public Decoder {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> load(LoadContext& load, const ModelShape& shape);

  absl::Status mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) override;

 private:
  Qwen35(const ModelConfig& config, const ModelShape& shape) : Decoder(config, shape) {}
  absl::Status load_mtp(LoadContext& load, const DecoderSpec& spec);

  std::unique_ptr<Vector> mtp_embedding_norm_;
  std::unique_ptr<Vector> mtp_hidden_norm_;
  std::unique_ptr<Weight> mtp_fc_;  // [hidden, 2 * hidden]: embedding half first
  DecoderLayer mtp_layer_;
  std::unique_ptr<Vector> mtp_norm_;
};

absl::StatusOr<std::unique_ptr<Model>> Qwen35::load(LoadContext& load, const ModelShape& shape) {
  DecoderSpec spec;
  spec.attention = {.heads = load.config.heads,
                    .kv_heads = load.config.kv_heads,
                    .head_dim = load.config.head_dim,
                    .qk_norm = load.config.qk_norm,
                    .gated = load.config.attn_output_gate,
                    .slices = head_slices(load.config)};
  spec.delta_net = qwen3_5_delta_net(load.config);
  std::unique_ptr<Qwen35> model(new Qwen35(load.config, shape));
  if (absl::Status status = load_parts(*model, load, spec); !status.ok()) return status;
  if (shape.has_mtp) {
    if (absl::Status status = model->load_mtp(load, spec); !status.ok()) return status;
  }
  return model;
}

absl::Status Qwen35::load_mtp(LoadContext& load, const DecoderSpec& spec) {
  const int64_t hidden = load.config.hidden_size;
  struct Part {
    const char* name;
    std::unique_ptr<Vector>* into;
  };
  for (const Part& part : {Part{"mtp.pre_fc_norm_embedding", &mtp_embedding_norm_},
                           Part{"mtp.pre_fc_norm_hidden", &mtp_hidden_norm_}, Part{"mtp.norm", &mtp_norm_}}) {
    absl::StatusOr<std::vector<float>> values = load.reader.norm(part.name, hidden);
    if (!values.ok()) return values.status();
    *part.into = load.ops.pack_vector(*values);
  }
  absl::StatusOr<MatrixSource> fc = load.reader.matrix("mtp.fc", hidden, 2 * hidden);
  if (!fc.ok()) return fc.status();
  mtp_fc_ = load.ops.pack({&*fc, 1});
  absl::StatusOr<DecoderLayer> layer = load_decoder_layer(
      load, "mtp.layers.0", LayerKind::kFullAttention,
      load.config.experts.count > 0 ? MlpKind::kExperts : MlpKind::kDense, spec, shape_.kv_layers - 1, 0);
  if (!layer.ok()) return layer.status();
  mtp_layer_ = *std::move(layer);
  return absl::OkStatus();
}

absl::Status Qwen35::mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) {
  Ops& ops = *pass.ops;
  const int64_t width = shape_.hidden;
  const Tensor residual = ops.scratch(hidden.rows, width);
  const Tensor normed = ops.scratch_input(hidden.rows, width);
  *out = ops.scratch(hidden.rows, width);
  const RopeTable rope = rope_for(pass);
  const Tensor embedding = ops.scratch(hidden.rows, width);
  vocabulary_->embed(pass, embedding);
  const Tensor both = ops.scratch_input(hidden.rows, 2 * width);
  ops.rms_norm(embedding, 1, *mtp_embedding_norm_, eps_, both.columns(0, width));
  ops.rms_norm(hidden, 1, *mtp_hidden_norm_, eps_, both.columns(width, width));
  ops.matmul(*mtp_fc_, both, residual);
  if (keys_only) {
    ops.rms_norm(residual, 1, *mtp_layer_.input_norm, eps_, normed);
    mtp_layer_.attention->write_keys(pass, rope, normed);
    return absl::OkStatus();
  }
  const int index = static_cast<int>(shape_.layers);
  if (absl::Status status = run_layer(pass, index, mtp_layer_, rope, normed, residual); !status.ok()) return status;
  ops.rms_norm(residual, 1, *mtp_norm_, eps_, *out);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> load_qwen3_5(LoadContext& load, const ModelShape& shape) {
  return Qwen35::load(load, shape);
}

const FamilyEntry kQwen35Entry = {Family::kQwen3_5, "qwen3_5", qwen3_5_shape, load_qwen3_5};

}  // namespace tensorfold
