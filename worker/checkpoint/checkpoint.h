// A model folder: config.json, then one model.safetensors or the shards of model.safetensors.index.json, mapped.
//
// Thread-safety: a Checkpoint does not change once it is open. Tensors' bytes are mapped pages: only those that are
// read come from disk, so a rank that packs its slices touches only its slices.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/tensor_source.h"

namespace tensorfold {

class Checkpoint : public TensorSource {
 public:
  /// Called from one thread at a time, now and then, with bytes done of bytes in all.
  using Progress = std::function<void(uint64_t done, uint64_t total)>;

  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  /// Reads the configuration (and refuses by it, see read_config), then maps and checks every weight file. The index,
  /// if there is one, must agree with its shards in both directions. Errors name file and tensor.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> open(const std::string& dir);
  /// The same with a configuration that the caller has read.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> open(const std::string& dir, ModelConfig config);

  const std::string& dir() const override { return dir_; }
  const ModelConfig& config() const override { return config_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  /// Names of the weight files, for messages: "model-00001-of-00002.safetensors, ...".
  std::string file_list() const override;

  const TensorInfo* find(std::string_view name) const override;
  const std::vector<std::string>& names() const override { return names_; }

  /// SHA-256 in hex over what is known without reading the weights: the parsed configuration with its quantisation,
  /// each file's size, and each tensor's name, dtype and shape. Equal for equal folders; cheap.
  std::string header_hash() const;

  /// SHA-256 in hex over all tensors: each one's SHA-256 with its name, dtype and shape, in name order. The same for
  /// any split into shards. Reads every byte, with `threads` threads (0: all cores).
  absl::StatusOr<std::string> content_hash(const Progress& progress = {}, int threads = 0) const;

 private:
  Checkpoint() = default;
  absl::Status open_index(const std::string& text);
  absl::Status open_shards(const std::map<std::string, std::string>& file_of_tensor);
  absl::Status collect();

  std::string dir_;
  ModelConfig config_;
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> names_;          // sorted
  std::vector<const TensorInfo*> by_name_;  // parallel to names_
};

}  // namespace tensorfold
