// Where a checkpoint keeps the tensors of a family: prefixes, the head, the MTP layer, what to skip, and whether norm
// weights are stored as gamma or as gamma - 1.
//
// Code that loads a family uses paths without prefixes: "embed_tokens", "layers.3.mlp.down_proj", "norm", "lm_head",
// "mtp.fc", "mtp.layers.0.input_layernorm".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/tensor_source.h"

namespace tensorfold {

/// Why a tensor is left unread on purpose.
enum class Skip : uint8_t {
  kNo,         // it is the language model's
  kVision,     // image and video towers
  kTiedHead,   // a stored copy of the embedding under lm_head, though the config ties them
  kMtp,        // an MTP layer that the config says is not there
  kDrafter,    // stages of the checkpoint's own block drafter, which is read apart
  kRopeCache,  // rotary_emb.inv_freq, which old conversions stored
};

/// Whether norm weights are stored as gamma - 1, and how that was decided.
struct NormConvention {
  bool zero_centred = false;
  std::string reason;
};

class Layout {
 public:
  /// Finds out from the tensors' names and shapes, and for the MTP norms of MLX conversions from their means. Errors
  /// name what was looked for.
  static absl::StatusOr<Layout> detect(const TensorSource& source);
  /// Every path is a name as it is: a drafter's files, which have neither embedding nor head.
  static Layout bare() { return {}; }
  /// The same files, of which only the stages of their own block drafter are read ("mtp.0.attn.wq_a"); has_drafter().
  Layout of_drafter() const;

  /// Full name of a tensor or module from its path without prefixes.
  std::string full_name(std::string_view path) const;
  Skip skip(std::string_view full_name) const;

  /// The checkpoint holds an MTP layer and the config counts it.
  bool has_mtp() const { return has_mtp_; }
  /// The checkpoint holds the stages of a block drafter and the config tells of them.
  bool has_drafter() const { return has_drafter_; }
  /// lm_head is the embedding.
  bool tied_head() const { return tied_head_; }
  const NormConvention& main_norms() const { return main_norms_; }
  const NormConvention& mtp_norms() const { return mtp_norms_; }
  /// gamma - 1 is stored for this module ("layers.0.input_layernorm", "mtp.norm").
  bool zero_centred(std::string_view module) const;
  const std::string& main_prefix() const { return main_prefix_; }

  int64_t vision_tensors() const { return vision_tensors_; }
  int64_t vision_bytes() const { return vision_bytes_; }
  /// Lines for the log: prefixes found, decisions taken, tensors skipped.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  Layout() = default;
  absl::Status find_prefixes(const TensorSource& source);
  absl::Status find_drafter(const TensorSource& source);
  absl::Status find_head(const TensorSource& source);
  absl::Status decide_norms(const TensorSource& source);
  absl::Status decide_mtp_norms(const TensorSource& source);
  void count_skipped(const TensorSource& source);

  std::string main_prefix_;  // "model.", "model.language_model.", "language_model.model.", "backbone.", …
  std::string embedding_ = "embed_tokens";
  std::string final_norm_ = "norm";
  std::string head_module_ = "lm_head";
  bool short_names_ = false;                 // deepseek's: w1, w3, w2 of experts
  std::string mtp_first_ = "mtp.fc.weight";  // what every MTP layer of the family has
  std::string head_;                         // full module name of lm_head
  std::string mtp_prefix_;                   // before "mtp."
  std::string mtp_layer_;  // "layers.45.": where a family keeps its MTP layer behind the others; else empty
  bool has_mtp_ = false;
  bool has_drafter_ = false;
  bool drafter_alone_ = false;  // of_drafter()
  bool tied_head_ = false;
  bool mlx_layout_ = false;  // convolutions [C, K, 1]
  NormConvention main_norms_;
  NormConvention mtp_norms_;
  int64_t vision_tensors_ = 0;
  int64_t vision_bytes_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace tensorfold
