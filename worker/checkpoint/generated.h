// Random weights of a model's true size, from its configuration alone: what `tensorfold bench --shape` loads.
//
// No tensor is generated on its own. Each kind of content (bf16 weights, quantised words, scales, biases) is one block
// of at most 64 MiB, filled once; a tensor is a window of it at an offset of its own, and longer tensors see it repeat
// (repeated_block.h). So a model of any size takes under 200 MiB of host memory and well under a second, and what it
// measures is honest as long as a backend packs weights into memory of its own (Ops::pack copies). Only the small
// vectors (norms, convolutions, decays) are made each for itself. The numbers depend on the seed alone.
//
// Values: weights are near normal with deviation 0.02, norms near 1, decays as the family initialises them, so that
// activations stay finite through any number of layers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/repeated_block.h"
#include "worker/checkpoint/tensor_source.h"

namespace tensorfold {

/// What the made-up checkpoint holds: "bf16" (Hugging Face's layout), "mlx-4bit" or "mlx-8bit" (as MLX converts it:
/// linear layers, embedding and head in groups of 64 with bf16 scales and biases; a matrix whose rows are no multiple
/// of 64 stays bf16), "nvfp4" (as modelopt writes it) or "fp8" (blocks of 128 x 128); these two leave embedding, head
/// and routers in bf16.
std::vector<std::string> generated_formats();

/// A shape file: a config.json without quantisation. NotFound if there is none; errors as parse_config's.
absl::StatusOr<ModelConfig> read_shape(const std::string& path);

/// Thread-safety: as every TensorSource.
class GeneratedCheckpoint : public TensorSource {
 public:
  /// `label` stands for the folder in messages. InvalidArgument names the formats there are.
  static absl::StatusOr<std::unique_ptr<GeneratedCheckpoint>> create(const ModelConfig& config, std::string_view format,
                                                                     const std::string& label, uint64_t seed = 1);

  /// The text of a config.json that reads as this checkpoint: the shape file's, with what the format adds to it.
  std::string with_quantization(const std::string& shape_text) const;

  const std::string& dir() const override { return label_; }
  const ModelConfig& config() const override { return config_; }
  std::string file_list() const override { return "made-up weights"; }
  const TensorInfo* find(std::string_view name) const override;
  const std::vector<std::string>& names() const override { return names_; }

 private:
  enum class Content : uint8_t { kWeights, kWords, kScales, kBiases, kCodes };
  static constexpr size_t kContents = 5;
  static bool is_small(Content content) { return content == Content::kScales || content == Content::kBiases; }
  struct Window {
    size_t tensor = 0;  // index into tensors_
    Content content = Content::kWeights;
    size_t offset = 0;
    size_t bytes = 0;
  };

  GeneratedCheckpoint() = default;
  void list_tensors();
  void list_layer(const std::string& prefix, LayerKind kind, MlpKind mlp);
  void list_mlp(const std::string& prefix, int64_t columns);
  void list_experts(const std::string& prefix);
  void list_mtp();
  void list_nemotron();
  void list_nemotron_block(const std::string& prefix, LayerKind kind, MlpKind mlp);
  void list_mamba2(const std::string& prefix);
  void add_linear(const std::string& module, int64_t rows, int64_t cols);
  void add_window(std::string name, Dtype dtype, std::vector<int64_t> shape, Content content, size_t offset);
  void add_values(std::string name, Dtype dtype, std::vector<int64_t> shape, float low, float high);
  void add_norm(const std::string& module, int64_t size, bool plain = false);
  absl::Status map_windows();
  void sort_by_name();

  std::string label_;
  ModelConfig config_;
  uint64_t seed_ = 1;
  size_t format_ = 0;
  std::vector<TensorInfo> tensors_;  // sorted by name once made
  std::vector<std::string> names_;   // parallel to tensors_
  std::vector<Window> windows_;
  std::vector<std::unique_ptr<std::byte[]>> values_;  // of small tensors
  std::unique_ptr<RepeatedBlock> blocks_[kContents];  // null where no tensor needs one
};

}  // namespace tensorfold
