// The block drafter's part of a pass: blocks before the forward pass, context rows after it.
#include <algorithm>

#include "worker/runtime/pass_runner.h"

namespace tensorfold {

// A backend keeps launches of these as of forward passes: a kind each, in all sizes (prepare()).
absl::Status PassRunner::run_block(const RowBatch& rows, Tensor* hidden) {
  absl::Status status;
  *hidden = ops_.run(RunKind::kBlock, rows, {}, true, [&](const RowBatch& batch, Tensor) {
    PassContext pass = context();
    pass.kv = draft_kv_.get();
    pass.rows = batch;
    Tensor result;
    status = drafter_->block(pass, model_, &result);
    return result;
  });
  return status;
}

absl::Status PassRunner::run_block_context(const RowBatch& rows, Tensor taps) {
  absl::Status status;
  ops_.run(RunKind::kBlockContext, rows, taps, true, [&](const RowBatch& batch, Tensor input) {
    PassContext pass = context();
    pass.kv = draft_kv_.get();
    pass.rows = batch;
    status = drafter_->add_context(pass, input);
    return input;
  });
  return status;
}

// A block is [last token, mask …] at the positions of the window's rows. All ranks choose the same tokens, since all
// see all ranks' best candidates.
absl::Status PassRunner::draft_blocks(std::vector<Work>& work) {
  std::vector<Work*> drafting;
  for (Work& item : work) {
    if (item.plan->block_drafts > 0) drafting.push_back(&item);
  }
  if (drafting.empty()) return absl::OkStatus();
  const ScratchScope scope(ops_);
  const int64_t size = drafter_->config().block_size;
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  for (const Work* item : drafting) {
    // Behind certain rows, if a window has more than its first: the last token known.
    const int64_t anchor = static_cast<int64_t>(item->plan->first_position + item->tokens.size()) - 1;
    groups.push_back({.first_row = static_cast<int64_t>(tokens.size()),
                      .rows = size,
                      .first_position = anchor,
                      .certain = size,
                      .pages = item->slot->pages});
    for (int64_t i = 0; i < size; ++i) {
      tokens.push_back(i == 0 ? item->tokens.back() : drafter_->config().mask_token_id);
      positions.push_back(anchor + i);
    }
  }
  Tensor hidden;
  const RowBatch batch = {.tokens = tokens, .positions = positions, .groups = groups, .recurrent = {}};
  if (absl::Status status = run_block(batch, &hidden); !status.ok()) return status;
  if (keep_block_logits_) record_block(drafting, hidden);

  std::vector<int32_t> wanted;  // the rows behind the anchors, as many as are drafted
  for (size_t i = 0; i < drafting.size(); ++i) {
    for (uint32_t row = 1; row <= drafting[i]->plan->block_drafts; ++row) {
      wanted.push_back(static_cast<int32_t>(groups[i].first_row + row));
    }
  }
  const Tensor rows = ops_.scratch(static_cast<int64_t>(wanted.size()), hidden.cols);
  ops_.gather_rows(hidden, wanted, rows);
  const absl::StatusOr<std::vector<std::vector<Candidate>>> best = best_candidates(rows, drafter_->candidates());
  if (!best.ok()) return best.status();
  size_t first = 0;
  for (Work* item : drafting) {
    const size_t count = item->plan->block_drafts;
    const auto candidates = std::span(*best).subspan(first, count);
    std::vector<int32_t> drafts;
    if (drafter_->config().second) {
      drafts = drafter_->choose(ops_, rows.row_range(static_cast<int64_t>(first), static_cast<int64_t>(count)),
                                candidates, item->tokens.back());
    } else {
      for (const std::vector<Candidate>& row : candidates) drafts.push_back(row[0].id);
    }
    item->tokens.insert(item->tokens.end(), drafts.begin(), drafts.end());
    first += count;
  }
  return absl::OkStatus();
}

// The `most` best tokens of each row over all ranks' vocabulary slices.
absl::StatusOr<std::vector<std::vector<Candidate>>> PassRunner::best_candidates(Tensor hidden, int64_t most) {
  const ModelShape& shape = model_.shape();
  PassContext pass = context();
  const Tensor logits = ops_.scratch(hidden.rows, shape.local_vocab);
  model_.logits(pass, hidden, logits);
  std::vector<std::vector<Candidate>> rows =
      ops_.top_candidates(logits, static_cast<int32_t>(shape.first_vocab_id), most);
  if (communicator_ == nullptr || communicator_->world() == 1) return rows;
  const size_t each = static_cast<size_t>(most);
  const Candidate none = {.logit = 0.0f, .id = -1};
  std::vector<Candidate> mine(rows.size() * each, none);
  for (size_t row = 0; row < rows.size(); ++row) {
    std::copy_n(rows[row].begin(), std::min(rows[row].size(), each), mine.begin() + static_cast<ptrdiff_t>(row * each));
  }
  const std::vector<size_t> sizes(static_cast<size_t>(communicator_->world()), mine.size() * sizeof(Candidate));
  std::vector<Candidate> all(mine.size() * sizes.size());
  const absl::Status status = communicator_->all_gather(std::as_bytes(std::span(mine)), sizes,
                                                        std::as_writable_bytes(std::span(all)), deadline_);
  if (!status.ok()) return status;
  for (size_t row = 0; row < rows.size(); ++row) {
    std::vector<Candidate>& merged = rows[row];
    merged.clear();
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      for (size_t i = 0; i < each; ++i) {
        const Candidate& candidate = all[rank * mine.size() + row * each + i];
        if (candidate.id >= 0) merged.push_back(candidate);
      }
    }
    std::sort(merged.begin(), merged.end(), candidate_before);
    if (merged.size() > each) merged.resize(each);
  }
  return rows;
}

void PassRunner::record_block(std::span<Work* const> drafting, Tensor hidden) {
  PassContext pass = context();
  const ModelShape& shape = model_.shape();
  const Tensor logits = ops_.scratch(hidden.rows, shape.local_vocab);
  model_.logits(pass, hidden, logits);
  for (int64_t i = 0; i < hidden.rows; ++i) {
    RowReport& row = block_rows_.emplace_back();
    row.slot = drafting[static_cast<size_t>(i / drafter_->config().block_size)]->plan->slot;
    row.row = static_cast<uint32_t>(i % drafter_->config().block_size);
    row.first_id = static_cast<int32_t>(shape.first_vocab_id);
    row.logits.resize(static_cast<size_t>(shape.local_vocab));
    ops_.download(logits.row_range(i, 1), row.logits);
  }
}

// Keys and values of all rows of the pass, tentative ones included: those of rows that are not kept lie behind the
// committed position, are seen by no block, and are written again by the rows that take their place.
absl::Status PassRunner::add_block_context(const std::vector<Work>& work) {
  if (drafter_ == nullptr) return absl::OkStatus();
  const ScratchScope scope(ops_);
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  std::vector<int32_t> index;
  for (const Work& item : work) {
    if (!item.plan->use_block) continue;
    const int64_t rows = static_cast<int64_t>(item.tokens.size());
    const int64_t first = static_cast<int64_t>(item.plan->first_position);
    groups.push_back({.first_row = static_cast<int64_t>(tokens.size()),
                      .rows = rows,
                      .first_position = first,
                      .certain = rows,
                      .pages = item.slot->pages});
    for (int64_t i = 0; i < rows; ++i) {
      tokens.push_back(item.tokens[static_cast<size_t>(i)]);
      positions.push_back(first + i);
      index.push_back(static_cast<int32_t>(item.first_row + i));
    }
  }
  if (tokens.empty()) return absl::OkStatus();
  Tensor taps = taps_;
  if (static_cast<int64_t>(index.size()) != taps_.rows) {
    taps = ops_.scratch(static_cast<int64_t>(index.size()), taps_.cols);
    ops_.gather_rows(taps_, index, taps);
  }
  return run_block_context({.tokens = tokens, .positions = positions, .groups = groups, .recurrent = {}}, taps);
}

}  // namespace tensorfold
