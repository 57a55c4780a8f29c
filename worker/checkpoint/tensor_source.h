// Where the tensors of a model come from: a folder (checkpoint.h), or made up for a benchmark (generated.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/safetensors.h"

namespace tensorfold {

/// Thread-safety: a source does not change once it is made; any thread may read it. It owns the tensors' bytes.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  /// What messages begin with: the folder, or the shape file.
  virtual const std::string& dir() const = 0;
  virtual const ModelConfig& config() const = 0;
  /// Where the tensors stand, for messages: "model-00001-of-00002.safetensors, ...".
  virtual std::string file_list() const = 0;
  /// nullptr if there is no such tensor. Pointers stay valid as long as the source lives.
  virtual const TensorInfo* find(std::string_view name) const = 0;
  /// Every tensor's full name, sorted.
  virtual const std::vector<std::string>& names() const = 0;
};

}  // namespace tensorfold
