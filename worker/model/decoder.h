// A pre-norm decoder: layers of attention or a gated delta net, each with an MLP or a mixture of experts.
#pragma once

#include "worker/model/experts.h"
#include "worker/model/families.h"

namespace tensorfold {

/// One layer's parts: what mixes tokens is either attention or a gated delta net, what follows is an MLP or experts.
struct DecoderLayer {
  std::unique_ptr<Vector> input_norm;
  std::unique_ptr<AttentionBlock> attention;
  std::unique_ptr<DeltaNetBlock> delta_net;
  std::unique_ptr<Vector> post_norm;
  std::unique_ptr<MlpBlock> mlp;
  std::unique_ptr<ExpertsBlock> experts;

  WeightCost cost() const;
};

/// What a family chooses.
struct DecoderSpec {
  AttentionSpec attention;
  DeltaNetSpec delta_net;  // used by linear layers
};

/// Pre-norm decoder: x += mixer(norm(x)); x += mlp(norm(x)); final norm; head.
class Decoder : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<Decoder>> load(LoadContext& load, const ModelShape& shape,
                                                       const DecoderSpec& spec);

  const ModelShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return cost().bytes; }
  int64_t weight_values() const override { return cost().values; }
  absl::Status forward(PassContext& pass, Tensor* hidden) override;
  void logits(PassContext& pass, Tensor hidden, Tensor logits) override;
  absl::Status mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) override;
  bool serves_drafters() const override { return true; }
  void embed(PassContext& pass, Tensor out) override { vocabulary_->embed(pass, out); }

 protected:
  Decoder(const ModelConfig& config, const ModelShape& shape);
  static absl::Status load_parts(Decoder& decoder, LoadContext& load, const DecoderSpec& spec);
  /// `normed` [rows, hidden] is scratch of the caller's (scratch_input).
  absl::Status run_layer(PassContext& pass, int index, const DecoderLayer& layer, const RopeTable& rope, Tensor normed,
                         Tensor residual) const;
  RopeTable rope_for(PassContext& pass) const;
  WeightCost cost() const;

  ModelShape shape_;
  float eps_ = 0;
  std::unique_ptr<Vector> inv_freq_;
  double attention_factor_ = 1.0;  // of the rotary table
  std::unique_ptr<VocabularyBlock> vocabulary_;
  std::vector<DecoderLayer> layers_;
  std::unique_ptr<Vector> final_norm_;
};

/// Layer `prefix` ("layers.3"): attention to `kv_layer`, or a delta net with state `recurrent_layer`.
absl::StatusOr<DecoderLayer> load_decoder_layer(LoadContext& load, const std::string& prefix, LayerKind kind,
                                                MlpKind mlp, const DecoderSpec& spec, int64_t kv_layer,
                                                int64_t recurrent_layer);

}  // namespace tensorfold
