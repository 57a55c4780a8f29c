// The block drafter's part of a pass: blocks before the forward pass, context rows after it.
#include <algorithm>

#include "worker/runtime/pass_runner.h"

namespace tensorfold {

// A backend keeps launches of these as of forward passes: a kind each, in all sizes (prepare()).
absl::Status PassRunner::run_block(const RowBatch& rows, Tensor* hidden) {
  absl::Status status;
  *hidden = ops_.run(RunKind::kBlock, rows, {}, true, [&](const RowBatch& batch, Tensor) {
    PassContext pass = draft_context();
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
    PassContext pass = draft_context();
    pass.rows = batch;
    status = drafter_->add_context(pass, input);
    return input;
  });
  return status;
}

PassContext PassRunner::draft_context() {
  PassContext pass = context();
  pass.kv = draft_kv_.get();
  pass.row_cache = draft_rows_.get();
  return pass;
}

// A block is [last token, filler …] at the positions of the window's rows. All ranks choose the same tokens, since all
// see all ranks' best candidates.
absl::Status PassRunner::draft_blocks(std::vector<Work>& work) {
  std::vector<Work*> drafting;
  for (Work& item : work) {
    if (item.plan->block_drafts > 0) drafting.push_back(&item);
  }
  if (drafting.empty()) return absl::OkStatus();
  const ScratchScope scope(ops_);
  const DrafterFacts& facts = drafter_->facts();
  const int64_t size = facts.block_size;
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
      tokens.push_back(i == 0 ? item->tokens.back() : facts.filler_token);
      positions.push_back(anchor + i);
    }
  }
  Tensor hidden;
  const RowBatch batch = {.tokens = tokens, .positions = positions, .groups = groups, .recurrent = {}};
  if (absl::Status status = run_block(batch, &hidden); !status.ok()) return status;
  if (keep_block_logits_) record_block(drafting, hidden);

  std::vector<int32_t> wanted, anchors;  // the rows that guess, as many as are asked for
  std::vector<int64_t> counts;
  for (size_t i = 0; i < drafting.size(); ++i) {
    counts.push_back(drafting[i]->plan->block_drafts);
    anchors.push_back(drafting[i]->tokens.back());
    for (int64_t draft = 0; draft < counts.back(); ++draft) {
      wanted.push_back(static_cast<int32_t>(groups[i].first_row + facts.first_draft + draft));
    }
  }
  PassContext pass = context();
  BlockRows rows;
  rows.ops = &ops_;
  rows.hidden = ops_.scratch(static_cast<int64_t>(wanted.size()), hidden.cols);
  ops_.gather_rows(hidden, wanted, rows.hidden);
  rows.drafts = counts;
  rows.anchors = anchors;
  rows.local_vocab = model_.shape().local_vocab;
  rows.head = [&](Tensor from, Tensor logits) { model_.logits(pass, from, logits); };
  rows.best = [&](Tensor logits, int64_t most) { return best_candidates(logits, most); };
  const absl::StatusOr<std::vector<std::vector<int32_t>>> drafts = drafter_->choose(rows);
  if (!drafts.ok()) return drafts.status();
  for (size_t i = 0; i < drafting.size(); ++i) {
    drafting[i]->tokens.insert(drafting[i]->tokens.end(), (*drafts)[i].begin(), (*drafts)[i].end());
  }
  return absl::OkStatus();
}

// The `most` best tokens of each row over all ranks' vocabulary slices.
absl::StatusOr<std::vector<std::vector<Candidate>>> PassRunner::best_candidates(Tensor logits, int64_t most) {
  std::vector<std::vector<Candidate>> rows =
      ops_.top_candidates(logits, static_cast<int32_t>(model_.shape().first_vocab_id), most);
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
  const int64_t size = drafter_->facts().block_size;
  const Tensor logits = ops_.scratch(hidden.rows, shape.local_vocab);
  model_.logits(pass, hidden, logits);
  for (int64_t i = 0; i < hidden.rows; ++i) {
    RowReport& row = block_rows_.emplace_back();
    row.slot = drafting[static_cast<size_t>(i / size)]->plan->slot;
    row.row = static_cast<uint32_t>(i % size);
    row.first_id = static_cast<int32_t>(shape.first_vocab_id);
    row.logits.resize(static_cast<size_t>(shape.local_vocab));
    ops_.download(logits.row_range(i, 1), row.logits);
  }
}

// What the drafter keeps of all rows of the pass, tentative ones included: those of rows that are not kept lie behind
// the committed position, are seen by no block, and are written again by the rows that take their place.
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
