// Block drafters: a few layers on every rank that guess a block of tokens in one forward pass. Those that are
// checkpoints of their own are in dflash.h, the one that DeepSeek's checkpoints bring along in dspark.h.
//
// What they read of the target are outputs of some of its layers ("taps"), one context row for each committed token:
// add_context() keeps what each layer needs of those rows, in pages of the sequence's page table. block() computes the
// rows of a block, [last token | filler …], each over the cached rows before the block and over the whole block.
// Embedding and head are the target's.
//
// A context row depends on its taps alone, so it is written for all rows of a pass, tentative ones included: those of
// rejected rows lie behind the committed position and are written again before anybody reads them.
// Thread-safety: as Model.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "worker/model/blocks.h"

namespace tensorfold {

/// What a rank of a world must hold for a drafter; known from its config alone.
struct DrafterShape {
  SlicePlan slices;
  int64_t kv_layers = 0;  // keys and values of heads
  int64_t kv_heads = 0;   // this rank's
  int64_t head_dim = 0;
  std::vector<RowCacheLayer> row_layers;  // rows that are keys and values at once

  /// Bytes of one page of the row layers.
  int64_t row_page_bytes() const;
};

/// What is known of a drafter without its weights.
struct DrafterFacts {
  std::string kind;    // "dflash", "dspark": its name as a draft kind
  std::string source;  // of messages: "the block drafter (draft.model)"
  int64_t layers = 0;
  int64_t block_size = 0;              // rows of a block, the anchor's included: at most kMostBlockRows
  int64_t first_draft = 0;             // the row that guesses the token behind the anchor
  int32_t filler_token = 0;            // stands in the block where a token is to be guessed
  std::vector<int64_t> target_layers;  // whose outputs are read, in this order

  int64_t most_drafts() const { return block_size - first_draft; }
};

/// The projection and the norm that make a token's context row of its taps. Cut along its columns.
class TapProjection {
 public:
  struct Size {
    int64_t taps = 0;
    int64_t width = 0;                  // of one
    int64_t hidden = 0;                 // of a context row
    std::optional<int64_t> group = {};  // quantisation group that a slice must end on
  };
  /// InvalidArgument where groups do not fit, or the world is wider than the slices.
  static absl::StatusOr<SlicePlan> plan(const Size& size, ShardSpec shard);
  static absl::StatusOr<TapProjection> load(LoadContext& load, const std::string& projection, const std::string& norm,
                                            const Size& size);
  /// normed [rows, hidden] of taps [rows, taps * width].
  absl::Status make_rows(PassContext& pass, Tensor taps, float eps, Tensor normed) const;
  WeightCost cost() const { return projection_.cost(); }

 private:
  int64_t first_column_ = 0;  // of this rank's slices
  int64_t columns_ = 0;
  SlicedProjection projection_;
  std::unique_ptr<Vector> norm_;
};

/// The rows of a pass that guess, block after block, and what a drafter chooses tokens with.
struct BlockRows {
  Ops* ops = nullptr;
  Tensor hidden;                     // [rows, hidden]
  std::span<const int64_t> drafts;   // rows of each block
  std::span<const int32_t> anchors;  // its last token
  int64_t local_vocab = 0;           // this rank's part of the vocabulary
  /// logits [rows, local_vocab] of hidden rows: the target's head.
  std::function<void(Tensor hidden, Tensor logits)> head;
  /// The `most` best tokens of each row over all ranks' parts; an exchange. Every rank must call it alike.
  std::function<absl::StatusOr<std::vector<std::vector<Candidate>>>(Tensor logits, int64_t most)> best;
};

class BlockDrafter {
 public:
  virtual ~BlockDrafter() = default;
  /// Unimplemented, naming the backend and `source`, where it computes no blocks.
  static absl::Status check_backend(const Ops& ops, std::string_view source = "a block drafter (draft.model)");

  virtual const DrafterFacts& facts() const = 0;
  virtual const DrafterShape& shape() const = 0;
  /// Bytes of packed weights that a block reads on this rank, and that adding context rows reads.
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t context_bytes() const = 0;

  /// Keeps what is needed of pass.rows in pass.kv or pass.row_cache (the drafter's own), from their taps
  /// [rows, taps * hidden].
  virtual absl::Status add_context(PassContext& pass, Tensor taps) const = 0;
  /// Blocks of block_size rows, one a group of pass.rows, whose first position is the anchor's: `*hidden` [rows,
  /// hidden] is normed, for the target's head.
  virtual absl::Status block(PassContext& pass, Model& target, Tensor* hidden) const = 0;
  /// The drafts of each block, the same on every rank.
  virtual absl::StatusOr<std::vector<std::vector<int32_t>>> choose(const BlockRows& rows) const = 0;
};

}  // namespace tensorfold
