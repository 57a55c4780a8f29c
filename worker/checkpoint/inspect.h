// What a model folder holds, in numbers: for `tensorfold inspect` and for memory plans. Reads headers only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/checkpoint.h"

namespace tensorfold {

struct ModelFacts {
  std::string family;      // "qwen3_5"
  std::string model_type;  // "qwen3_5_text"
  /// Numbers of the language model with its MTP layer, a tied head once; what is skipped does not count.
  int64_t parameters = 0;
  int64_t mtp_parameters = 0;      // of them
  int64_t drafter_parameters = 0;  // of them: the checkpoint's own block drafter
  /// Bytes in the files by use: embedding, head, attention, delta_net, mlp, experts, shared
  /// expert, router, norms, mtp, drafter, vision, skipped.
  std::map<std::string, int64_t> bytes_by_kind;
  /// The same in the memory of the CPU backend and of CUDA's, all ranks together: formats that are kept dequantised
  /// take more.
  std::map<std::string, int64_t> memory_by_kind;
  std::map<std::string, int64_t> device_memory_by_kind;
  /// Bytes of the language model by format: "bf16", "mlx affine 4-bit g64" (words, scales and biases together).
  std::map<std::string, int64_t> bytes_by_format;
  int64_t weight_bytes = 0;  // of the language model and its drafter
  int64_t file_bytes = 0;    // of all weight files

  int64_t layers = 0;
  int64_t full_attention_layers = 0;
  int64_t linear_attention_layers = 0;
  int64_t mamba2_layers = 0;
  bool has_mtp = false;
  bool has_drafter = false;  // DSpark's stages
  bool tied_head = false;

  /// What a split over ranks has to divide; how is the model's business.
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t linear_key_heads = 0;
  int64_t linear_value_heads = 0;
  int64_t intermediate_size = 0;
  int64_t column_unit = 1;  // columns can only be cut at multiples: the largest quantisation group, or 1
  int64_t vocab_size = 0;

  /// State as fp32 values: keys and values of one token in all attention layers (MTP's included), and one sequence's
  /// recurrent state (S and the convolution's rows).
  int64_t kv_values_per_token = 0;
  int64_t recurrent_values_per_sequence = 0;

  std::string header_hash;
  std::vector<std::string> notes;  // Layout::notes()
};

/// Whether every rank holds the tensors of a kind of bytes_by_kind whole; the others are cut.
bool held_whole(std::string_view kind);

/// All but file_bytes and header_hash, which only files have.
absl::StatusOr<ModelFacts> inspect_tensors(const TensorSource& source);
absl::StatusOr<ModelFacts> inspect(const Checkpoint& checkpoint);
/// Opens the folder first.
absl::StatusOr<ModelFacts> inspect(const std::string& dir);

}  // namespace tensorfold
