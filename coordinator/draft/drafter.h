// Drafters: who guesses the tokens of a verify window. A guess is kept exactly when it equals what the row before it
// samples, so nothing here can change a reply's bytes; only how many passes it takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

enum class DraftKind : uint8_t {
  kNone,   // one token a pass
  kMtp,    // the model's own multi-token-prediction layer, chained; runs on the workers
  kCopy,   // what followed the longest earlier occurrence of the history's end
  kBlock,  // a block drafter (DFlash, DFlash2, DSpark), a block of tokens at once; runs on the workers
  kAuto,   // mtp, copy or blocks, chosen for each window by WidthPolicy
};

// "none" (also "off"), "mtp", "copy", "dflash" and "dspark" (both kBlock), "auto"; anything else is an InvalidArgument
// that lists them.
absl::StatusOr<DraftKind> parse_draft_kind(std::string_view name);
std::string_view draft_kind_name(DraftKind kind);

// What the engine needs to know about a kind before it makes one.
struct DraftKindInfo {
  DraftKind kind = DraftKind::kNone;
  bool on_workers = false;  // true: the engine asks the pass runner for the drafts, and no Drafter object exists for it
  bool needs_mtp = false;   // the checkpoint must have an MTP layer
  bool needs_block = false;  // there must be a block drafter
};
DraftKindInfo info_of(DraftKind kind);

struct CopyOptions {
  uint32_t min_match = 3;   // tokens; shorter ends match by chance
  uint32_t max_match = 64;  // comparing further back tells no more
  uint32_t max_chain = 32;  // occurrences compared, latest first, for each indexed length
};

struct Draft {
  std::vector<uint32_t> ids;  // at most what was asked for; empty = no guess
  uint32_t match = 0;         // copy: how many tokens of the history's end were found again
};

// One sequence's drafter on rank 0. Owned by the sequence; not thread-safe.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual DraftKind kind() const = 0;

  // Takes in tokens of a growing history (prompt and kept reply, never unverified drafts). Each call's history must
  // start with the one before. Optional: propose does it too; long prompts call it as they fill, so that no single call
  // is long.
  virtual void observe(std::span<const uint32_t> history) = 0;

  // Guesses at most `max_ids` tokens that follow `history`.
  virtual Draft propose(std::span<const uint32_t> history, size_t max_ids) = 0;
};

// kNone, kMtp and kBlock give a drafter that never guesses on rank 0; kAuto gives the copy drafter, whose guess
// WidthPolicy weighs against the model's own.
std::unique_ptr<Drafter> make_drafter(DraftKind kind, CopyOptions options = {});

}  // namespace tensorfold
