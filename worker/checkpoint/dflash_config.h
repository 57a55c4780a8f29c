// config.json of a block drafter (architectures DFlashDraftModel and DFlash2DraftModel): a few layers that draft a
// whole block of tokens at once from outputs of its target's layers. It has no embedding and no head: those are the
// target's.
//
// Key names: DFlash's are those of its released files (block_size at the top or in dflash_config; dflash_config has
// mask_token_id and target_layer_ids); DFlash2's own keys may stand at either place, too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

struct DflashConfig {
  /// Sizes, heads, rope, eps and quantisation, as the blocks of worker/model want them. Its family is qwen3, its
  /// vocab_size the one stated: the drafter has no matrix of that size but DFlash2's codebooks.
  ModelConfig model;
  bool second = false;                 // DFlash2: convolutions and a candidate selector
  int64_t block_size = 0;              // rows of a block, the anchor's included: at most block_size - 1 drafts
  int32_t mask_token_id = 0;           // stands in the block where a token is to be drafted
  std::vector<int64_t> target_layers;  // whose outputs are read, in this order
  int64_t stated_target_layers = 0;    // num_target_layers; 0: not stated
  int64_t target_hidden = 0;           // of one layer's output
  std::vector<int64_t> windows;        // [layers]: positions that a row looks back; 0: all
  // DFlash2.
  int64_t conv_taps = 0;
  int64_t conv_group = 0;
  int64_t selector_rank = 0;
  int64_t selector_candidates = 0;
  double output_multiplier = 1.0;      // of logits
  double final_logit_softcapping = 0;  // 0: none; logits = cap * tanh(logits / cap)
};

/// Every field above as text, for hashes.
std::string canonical_text(const DflashConfig& config);

/// The folder's config.json; never opens a weight file. Refuses by name what would change the numbers and is not
/// computed here (NotFound, InvalidArgument, Unimplemented).
absl::StatusOr<DflashConfig> read_dflash_config(const std::string& dir);
absl::StatusOr<DflashConfig> parse_dflash_config(std::string_view config_json,
                                                 const std::string& label = "config.json");

/// Whether a config.json is a block drafter's, read here or not: its architecture says so.
bool is_dflash_config(std::string_view config_json);

/// Whether a drafter fits its target; a FailedPrecondition or InvalidArgument that names the option and prints both
/// values where it does not.
absl::Status check_dflash_fits(const DflashConfig& drafter, const ModelConfig& target);

}  // namespace tensorfold
