// Nemotron-H and Nemotron 3 (model_type "nemotron_h"): blocks of one mixer each, Mamba2, attention without positions,
// experts or an MLP of squared relu, as the configuration's pattern says; an MTP layer of attention and experts.
#include <fmt/format.h>

#include "worker/model/experts.h"
#include "worker/model/families.h"
#include "worker/model/mamba2.h"

namespace tensorfold {
namespace {

Mamba2Spec mamba2_spec(const ModelConfig& config) {
  const Mamba2Config& mamba = config.mamba2;
  Mamba2Spec spec = {mamba, {}};
  if (mamba.groups > 0) {
    spec.slices =
        cut_dimension(mamba.groups, mamba.heads / mamba.groups * mamba.head_dim, column_unit(config, "mixer.out_proj"));
  }
  return spec;
}

absl::StatusOr<ModelShape> nemotron_h_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = decoder_shape(config, shard);
  if (!shape.ok()) return shape;
  shape->has_mtp = config.mtp_layers > 0;
  shape->kv_layers = config.count(LayerKind::kFullAttention) + (shape->has_mtp ? 1 : 0);
  const int64_t mamba_layers = config.count(LayerKind::kMamba2);
  if (mamba_layers == 0) return shape;
  const Mamba2Spec spec = mamba2_spec(config);
  if (absl::Status s = add_dimension(*shape, "Mamba2 groups", spec.slices, shard); !s.ok()) return s;
  shape->recurrent.assign(static_cast<size_t>(mamba_layers), local_mamba2(spec, make_cut(spec.slices, shard)));
  return shape;
}

/// down(relu(up x)^2).
class ReluMlpBlock {
 public:
  static absl::StatusOr<std::unique_ptr<ReluMlpBlock>> load(LoadContext& load, const std::string& prefix) {
    auto block = std::make_unique<ReluMlpBlock>();
    const int64_t intermediate = load.config.intermediate_size, hidden = load.config.hidden_size;
    const Cut cut = make_cut(mlp_slices(load.config), load.shard);
    const int64_t unit_columns = intermediate / cut.slices.units;
    absl::StatusOr<MatrixSource> up = load.reader.matrix(prefix + ".up_proj", intermediate, hidden);
    if (!up.ok()) return up.status();
    const MatrixSource owned = up->slice_rows(cut.first_unit() * unit_columns, cut.unit_count() * unit_columns);
    block->up_ = load.ops.pack({&owned, 1});
    absl::StatusOr<SlicedProjection> down =
        SlicedProjection::load(load, prefix + ".down_proj", hidden, cut, unit_columns);
    if (!down.ok()) return down.status();
    block->down_ = *std::move(down);
    return block;
  }
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const {
    const Tensor inner = pass.ops->scratch(x.rows, up_->out_features());
    pass.ops->matmul(*up_, x, inner);
    pass.ops->relu_squared(inner);
    return down_.add_to(pass, layer, "mlp.down_proj", inner, residual);
  }
  WeightCost cost() const { return cost_of(*up_) += down_.cost(); }

 private:
  std::unique_ptr<Weight> up_;
  SlicedProjection down_;
};

/// One norm and one of four mixers.
struct Block {
  std::unique_ptr<Vector> norm;
  std::unique_ptr<Mamba2Block> mamba2;
  std::unique_ptr<AttentionBlock> attention;
  std::unique_ptr<ExpertsBlock> experts;
  std::unique_ptr<ReluMlpBlock> mlp;

  WeightCost cost() const {
    if (mamba2 != nullptr) return mamba2->cost();
    if (attention != nullptr) return attention->cost();
    return experts != nullptr ? experts->cost() : mlp->cost();
  }
};

template <typename T>
absl::Status take(absl::StatusOr<std::unique_ptr<T>> loaded, std::unique_ptr<T>* into) {
  if (!loaded.ok()) return loaded.status();
  *into = *std::move(loaded);
  return absl::OkStatus();
}

class NemotronH : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> load(LoadContext& load, const ModelShape& shape);

  const ModelShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return cost().bytes; }
  int64_t weight_values() const override { return cost().values; }
  absl::Status forward(PassContext& pass, Tensor* hidden) override;
  void logits(PassContext& pass, Tensor hidden, Tensor logits) override { vocabulary_->logits(pass, hidden, logits); }
  absl::Status mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) override;
  bool serves_drafters() const override { return true; }
  void embed(PassContext& pass, Tensor out) override { vocabulary_->embed(pass, out); }

 private:
  explicit NemotronH(const ModelShape& shape) : shape_(shape) {}
  absl::StatusOr<Block> load_block(LoadContext& load, const std::string& prefix, LayerKind kind, MlpKind mlp,
                                   int64_t kv_layer, int64_t recurrent_layer) const;
  absl::Status load_mtp(LoadContext& load);
  absl::Status run_block(PassContext& pass, int index, const Block& block, Tensor normed, Tensor residual) const;
  WeightCost cost() const;

  ModelShape shape_;
  float eps_ = 0;
  std::unique_ptr<VocabularyBlock> vocabulary_;
  std::vector<Block> blocks_;
  std::unique_ptr<Vector> final_norm_;
  std::unique_ptr<Vector> mtp_embedding_norm_;
  std::unique_ptr<Vector> mtp_hidden_norm_;
  std::unique_ptr<Weight> mtp_in_;  // [hidden, 2 * hidden]: embedding half first
  std::vector<Block> mtp_blocks_;   // attention, experts
  std::unique_ptr<Vector> mtp_norm_;
};

absl::Status load_norm(LoadContext& load, const std::string& module, std::unique_ptr<Vector>* into) {
  absl::StatusOr<std::vector<float>> values = load.reader.norm(module, load.config.hidden_size);
  if (!values.ok()) return values.status();
  *into = load.ops.pack_vector(*values);
  return absl::OkStatus();
}

absl::StatusOr<Block> NemotronH::load_block(LoadContext& load, const std::string& prefix, LayerKind kind, MlpKind mlp,
                                            int64_t kv_layer, int64_t recurrent_layer) const {
  Block block;
  if (absl::Status s = load_norm(load, prefix + ".norm", &block.norm); !s.ok()) return s;
  const std::string mixer = prefix + ".mixer";
  absl::Status status;
  if (kind == LayerKind::kMamba2) {
    status = take(Mamba2Block::load(load, mixer, mamba2_spec(load.config), recurrent_layer), &block.mamba2);
  } else if (kind == LayerKind::kFullAttention) {
    const AttentionSpec spec = {.heads = load.config.heads,
                                .kv_heads = load.config.kv_heads,
                                .head_dim = load.config.head_dim,
                                .slices = head_slices(load.config)};
    status = take(AttentionBlock::load(load, mixer, spec, kv_layer), &block.attention);
  } else if (mlp == MlpKind::kExperts) {
    status = take(ExpertsBlock::load(load, mixer), &block.experts);
  } else {
    status = take(ReluMlpBlock::load(load, mixer), &block.mlp);
  }
  if (!status.ok()) return status;
  return block;
}

absl::StatusOr<std::unique_ptr<Model>> NemotronH::load(LoadContext& load, const ModelShape& shape) {
  std::unique_ptr<NemotronH> model(new NemotronH(shape));
  const ModelConfig& config = load.config;
  model->eps_ = static_cast<float>(config.rms_norm_eps);
  if (absl::Status s = take(VocabularyBlock::load(load, vocab_slices(config)), &model->vocabulary_); !s.ok()) return s;
  int64_t kv_layer = 0;
  int64_t recurrent_layer = 0;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    absl::StatusOr<Block> block = model->load_block(load, fmt::format("layers.{}", i), config.layers[i], config.mlps[i],
                                                    kv_layer, recurrent_layer);
    if (!block.ok()) return block.status();
    kv_layer += block->attention != nullptr ? 1 : 0;
    recurrent_layer += block->mamba2 != nullptr ? 1 : 0;
    model->blocks_.push_back(*std::move(block));
  }
  if (absl::Status s = load_norm(load, "norm", &model->final_norm_); !s.ok()) return s;
  if (shape.has_mtp) {
    if (absl::Status s = model->load_mtp(load); !s.ok()) return s;
  }
  return model;
}

absl::Status NemotronH::load_mtp(LoadContext& load) {
  const int64_t hidden = load.config.hidden_size;
  if (absl::Status s = load_norm(load, "mtp.layers.0.enorm", &mtp_embedding_norm_); !s.ok()) return s;
  if (absl::Status s = load_norm(load, "mtp.layers.0.hnorm", &mtp_hidden_norm_); !s.ok()) return s;
  if (absl::Status s = load_norm(load, "mtp.layers.1.final_layernorm", &mtp_norm_); !s.ok()) return s;
  absl::StatusOr<MatrixSource> in = load.reader.matrix("mtp.layers.0.eh_proj", hidden, 2 * hidden);
  if (!in.ok()) return in.status();
  mtp_in_ = load.ops.pack({&*in, 1});
  absl::StatusOr<Block> attention =
      load_block(load, "mtp.layers.0", LayerKind::kFullAttention, MlpKind::kNone, shape_.kv_layers - 1, 0);
  if (!attention.ok()) return attention.status();
  absl::StatusOr<Block> experts = load_block(load, "mtp.layers.1", LayerKind::kNone, MlpKind::kExperts, 0, 0);
  if (!experts.ok()) return experts.status();
  mtp_blocks_.push_back(*std::move(attention));
  mtp_blocks_.push_back(*std::move(experts));
  return absl::OkStatus();
}

WeightCost NemotronH::cost() const {
  WeightCost cost = vocabulary_->cost();
  for (const Block& block : blocks_) cost += block.cost();
  return cost;
}

absl::Status NemotronH::run_block(PassContext& pass, int index, const Block& block, Tensor normed,
                                  Tensor residual) const {
  const ScratchScope scope(*pass.ops);
  pass.ops->rms_norm(residual, 1, *block.norm, eps_, normed);
  pass.record(index, "input_norm", normed);
  absl::Status status;
  if (block.mamba2 != nullptr) {
    status = block.mamba2->add_to(pass, index, normed, residual);
  } else if (block.attention != nullptr) {
    status = block.attention->add_to(pass, index, RopeTable{}, normed, residual);
  } else if (block.experts != nullptr) {
    status = block.experts->add_to(pass, index, normed, residual);
  } else {
    status = block.mlp->add_to(pass, index, normed, residual);
  }
  if (status.ok()) pass.record(index, "mixer.residual", residual);
  return status;
}

absl::Status NemotronH::forward(PassContext& pass, Tensor* hidden) {
  const Tensor residual = pass.ops->scratch(pass.rows.rows(), shape_.hidden);
  const Tensor normed = pass.ops->scratch_input(residual.rows, shape_.hidden);
  *hidden = pass.make_rows(shape_.hidden);
  vocabulary_->embed(pass, residual);
  pass.record(-1, "embed", residual);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const absl::Status status = run_block(pass, static_cast<int>(i), blocks_[i], normed, residual);
    if (!status.ok()) return status;
    pass.tap(static_cast<int64_t>(i), residual);
  }
  pass.ops->rms_norm(residual, 1, *final_norm_, eps_, *hidden);
  pass.record(static_cast<int>(blocks_.size()), "final_norm", *hidden);
  return absl::OkStatus();
}

absl::Status NemotronH::mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) {
  if (!shape_.has_mtp) return absl::UnimplementedError("this checkpoint has no MTP layer");
  Ops& ops = *pass.ops;
  const int64_t width = shape_.hidden;
  const Tensor residual = ops.scratch(hidden.rows, width);
  const Tensor normed = ops.scratch_input(hidden.rows, width);
  *out = ops.scratch(hidden.rows, width);
  const Tensor embedding = ops.scratch(hidden.rows, width);
  vocabulary_->embed(pass, embedding);
  const Tensor both = ops.scratch_input(hidden.rows, 2 * width);
  ops.rms_norm(embedding, 1, *mtp_embedding_norm_, eps_, both.columns(0, width));
  ops.rms_norm(hidden, 1, *mtp_hidden_norm_, eps_, both.columns(width, width));
  ops.matmul(*mtp_in_, both, residual);
  if (keys_only) {
    ops.rms_norm(residual, 1, *mtp_blocks_[0].norm, eps_, normed);
    mtp_blocks_[0].attention->write_keys(pass, RopeTable{}, normed);
    return absl::OkStatus();
  }
  for (size_t i = 0; i < mtp_blocks_.size(); ++i) {
    const int index = static_cast<int>(blocks_.size() + i);
    if (absl::Status s = run_block(pass, index, mtp_blocks_[i], normed, residual); !s.ok()) return s;
  }
  ops.rms_norm(residual, 1, *mtp_norm_, eps_, *out);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Model>> load_nemotron_h(LoadContext& load, const ModelShape& shape) {
  return NemotronH::load(load, shape);
}

}  // namespace

const FamilyEntry kNemotronHEntry = {Family::kNemotronH, "nemotron_h", nemotron_h_shape, load_nemotron_h};

}  // namespace tensorfold
