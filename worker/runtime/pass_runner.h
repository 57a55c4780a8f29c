// Runs one rank's share of a pass: the same function on every rank, for prompt, verify and single rows alike.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/communicator.h"
#include "transport/pass/plan.h"
#include "worker/model/block_drafter.h"
#include "worker/model/model.h"
#include "worker/runtime/world_sum.h"
#include "worker/state/slots.h"
#include "worker/state/snapshots.h"
#include "worker/state/state_store.h"

namespace tensorfold {

struct RunnerOptions {
  int64_t slots = 16;
  int64_t pages = 256;    // KV pages of kPageTokens tokens
  int64_t snapshots = 0;  // copies of slots that may be kept beside them
  /// A pass gets `step_timeout + rows * row_timeout` before a wait inside it gives up: long prompts take long.
  /// Tokens of context up to which a backend that keeps launches makes them all in the first pass after use(), before
  /// the cluster is ready; 0: each when it is first needed.
  int64_t prepare_context = 0;
  std::chrono::milliseconds step_timeout{30000};
  std::chrono::microseconds row_timeout{20000};
};

/// What a pass gave on this rank.
struct LocalResult {
  std::vector<RowReport> rows;               // this rank's candidates or logits of the wanted rows
  std::vector<std::vector<int32_t>> drafts;  // per sequence, the same on every rank
};

/// Thread-safety: one thread runs passes.
class PassRunner {
 public:
  /// Allocates KV pages and slots. `ops`, `model` and `drafter` outlive the runner. `drafter` may be null: plans that
  /// ask for drafts of a block are then errors.
  static absl::StatusOr<std::unique_ptr<PassRunner>> create(Ops& ops, Model& model, const RunnerOptions& options,
                                                            const BlockDrafter* drafter = nullptr);

  /// Null for a world of one. After a regroup, the new communicator; call reset() with it.
  void use(Communicator* communicator);
  /// Forgets all sequences (weights stay).
  void reset();
  /// Must have passed validate_plan. Errors leave the slots in an undefined state: reset() before going on.
  absl::StatusOr<LocalResult> run(const PassPlan& plan);

  /// Where states are kept on disk; outlives the runner. Null: saves and fetches fail, each with its event.
  void keep_states(StateStore* store) { store_ = store; }
  /// Saves, fetches and placings that ended since the last call.
  std::vector<StateEvent> take_events();

  /// Pretends that `tokens` tokens of `slot` have been computed, on pages 0 and up: what lies in them is whatever the
  /// cache holds. For measuring long contexts; the next plan goes on at that position.
  absl::Status assume_context(uint32_t slot, int64_t tokens);

  Deadline deadline_for(uint64_t rows) const;
  void set_trace(Trace* trace) { trace_ = trace; }
  /// Also computes the MTP layer's outputs of all pairs of use_mtp sequences and keeps their logits until the next pass
  /// (the `logits` command); off in service.
  void keep_mtp_logits(bool keep) { keep_mtp_logits_ = keep; }
  /// Row = pair index.
  const std::vector<RowReport>& mtp_rows() const { return mtp_rows_; }
  /// Keeps the logits of all rows of drafted blocks until the next pass (tests); off in service.
  void keep_block_logits(bool keep) { keep_block_logits_ = keep; }
  /// Row = index in the block.
  const std::vector<RowReport>& block_rows() const { return block_rows_; }

  int64_t kv_bytes() const {
    return kv_->bytes() + (row_cache_ == nullptr ? 0 : row_cache_->bytes()) +
           (draft_kv_ == nullptr ? 0 : draft_kv_->bytes()) + (draft_rows_ == nullptr ? 0 : draft_rows_->bytes());
  }
  int64_t state_bytes() const { return slots_->state_bytes() + snapshots_->bytes(); }
  /// Bytes of one page in all caches, as save_page() gives them.
  int64_t page_bytes() const;

 private:
  // One sequence of the pass.
  struct Work {
    const SequencePlan* plan = nullptr;
    Slot* slot = nullptr;
    std::vector<int32_t> tokens;  // the plan's, then the drafted ones
    int64_t accepted = 0;
    int64_t first_row = 0;  // in the forward pass
    // Hidden state and index of the MTP pair that the next draft step starts from.
    Tensor draft_hidden;
    int64_t draft_position = 0;
  };

  PassRunner(Ops& ops, Model& model, const RunnerOptions& options, const BlockDrafter* drafter);
  absl::Status draft(std::vector<Work>& work);
  absl::StatusOr<LocalResult> run_begun(const PassPlan& plan);
  absl::Status prepare();
  absl::Status prepare_size(int64_t rows, int64_t keys, int* made);
  absl::Status carry_out(const PassPlan& plan);
  absl::Status check_pages(const std::vector<int32_t>& pages) const;
  void copy_page(PageCopy copy);
  absl::Status save_state(const SaveOrder& save);
  absl::Status carry_out_load(const LoadOrder& load);
  absl::Status place_state(const LoadOrder& load);
  absl::Status compute(std::vector<Work>& work, LocalResult* result);
  absl::StatusOr<std::vector<int32_t>> best_tokens(Tensor hidden);
  // block_drafts.cc
  absl::Status draft_blocks(std::vector<Work>& work);
  absl::Status add_block_context(const std::vector<Work>& work);
  absl::Status run_block(const RowBatch& rows, Tensor* hidden);
  absl::Status run_block_context(const RowBatch& rows, Tensor taps);
  absl::StatusOr<std::vector<std::vector<Candidate>>> best_candidates(Tensor logits, int64_t most);
  void record_block(std::span<Work* const> drafting, Tensor hidden);
  std::vector<PagedMemory*> paged() const;
  absl::Status run_forward(const RowBatch& batch, Tensor* hidden);
  absl::Status forward(std::vector<Work>& work, Tensor* hidden);
  absl::Status fill_mtp_keys(std::vector<Work>& work, Tensor hidden);
  absl::Status run_mtp(const RowBatch& rows, Tensor hidden, bool keys_only, Tensor* out);
  void record_mtp(std::span<const int64_t> positions, Tensor out);
  void keep_window(std::vector<Work>& work, Tensor hidden);
  absl::Status report_rows(const std::vector<Work>& work, Tensor hidden, std::vector<RowReport>* rows);
  PassContext context();
  PassContext draft_context();

  Ops& ops_;
  Model& model_;
  const RunnerOptions options_;
  Communicator* communicator_ = nullptr;
  std::unique_ptr<WorldSum> sum_;
  std::unique_ptr<KvCache> kv_;
  std::unique_ptr<RowCache> row_cache_;  // null where the model has no row layers
  const BlockDrafter* const drafter_;    // may be null
  // The drafter's, in the same pages; null without one, and where it keeps no such rows.
  std::unique_ptr<KvCache> draft_kv_;
  std::unique_ptr<RowCache> draft_rows_;
  Tensor taps_;  // of the pass's rows
  std::unique_ptr<SlotTable> slots_;
  std::unique_ptr<SnapshotStore> snapshots_;
  StateStore* store_ = nullptr;
  std::vector<StateEvent> events_;
  bool prepared_ = false;
  Trace* trace_ = nullptr;
  bool keep_mtp_logits_ = false;
  std::vector<RowReport> mtp_rows_;
  bool keep_block_logits_ = false;
  std::vector<RowReport> block_rows_;
  Deadline deadline_ = Deadline::after(std::chrono::seconds(60));
};

}  // namespace tensorfold
