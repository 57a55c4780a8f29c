#include "worker/runtime/pass_runner.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>

namespace tensorfold {

PassRunner::PassRunner(Ops& ops, Model& model, const RunnerOptions& options, const BlockDrafter* drafter)
    : ops_(ops), model_(model), options_(options), sum_(make_world_sum(ops)), drafter_(drafter) {}

absl::StatusOr<std::unique_ptr<PassRunner>> PassRunner::create(Ops& ops, Model& model, const RunnerOptions& options,
                                                               const BlockDrafter* drafter) {
  const ModelShape& shape = model.shape();
  if (options.snapshots < 0 || options.snapshots > kMaxSnapshots) {
    return absl::InvalidArgumentError(fmt::format("{} snapshots: allowed are 0..{}", options.snapshots, kMaxSnapshots));
  }
  if (options.slots < 1 || options.slots > kMaxSlots || options.pages < 1 || options.pages > kMaxPages) {
    return absl::InvalidArgumentError(fmt::format("{} slots and {} KV pages: allowed are 1..{} and 1..{}",
                                                  options.slots, options.pages, kMaxSlots, kMaxPages));
  }
  if (drafter != nullptr && !model.serves_drafters()) {
    return absl::UnimplementedError(fmt::format(
        "{} reads outputs of its target's layers, which this family does not hand out", drafter->facts().source));
  }
  std::unique_ptr<PassRunner> runner(new PassRunner(ops, model, options, drafter));
  // Null where the backend cannot keep such heads, or has no memory left: it says which.
  const auto no_room = [&ops](const std::string& what) {
    return absl::FailedPreconditionError(fmt::format("{}: {}", what, ops.finish_pass()));
  };
  const auto no_cache = [&](const std::string& whose) { return no_room("keys and values of " + whose); };
  runner->kv_ = ops.make_kv_cache(shape.kv_layers, options.pages, shape.kv_heads, shape.head_dim);
  if (runner->kv_ == nullptr) return no_cache("the model");
  if (!shape.row_layers.empty()) {
    runner->row_cache_ = ops.make_row_cache(shape.row_layers, options.pages);
    if (runner->row_cache_ == nullptr) return no_cache("the model");
  }
  if (drafter != nullptr) {
    const DrafterShape& draft = drafter->shape();
    if (draft.kv_layers > 0) {
      runner->draft_kv_ = ops.make_kv_cache(draft.kv_layers, options.pages, draft.kv_heads, draft.head_dim);
      if (runner->draft_kv_ == nullptr) return no_cache(drafter->facts().source);
    }
    if (!draft.row_layers.empty()) {
      runner->draft_rows_ = ops.make_row_cache(draft.row_layers, options.pages);
      if (runner->draft_rows_ == nullptr) return no_cache(drafter->facts().source);
    }
  }
  runner->snapshots_ = std::make_unique<SnapshotStore>(shape, ops, options.snapshots);
  if (!runner->snapshots_->whole()) {
    return no_room(fmt::format("states of {} snapshots (cache.snapshot_bytes)", options.snapshots));
  }
  runner->reset();
  if (!runner->slots_->whole()) {
    return no_room(fmt::format("states of {} sequences (schedule.max_sequences)", options.slots));
  }
  return runner;
}

void PassRunner::use(Communicator* communicator) {
  communicator_ = communicator;
  sum_->use(communicator);
  ops_.forget_runs();
  prepared_ = false;
}

void PassRunner::reset() {
  snapshots_->clear();
  // Nobody waits for these any more.
  events_.clear();
  if (store_ != nullptr) store_->events(SIZE_MAX);
  // States are kept by the old table's slots only; persistent tensors belong to the Ops and are taken over by none.
  if (slots_ == nullptr) {
    slots_ = std::make_unique<SlotTable>(model_.shape(), ops_, options_.slots, options_.pages);
    return;
  }
  for (int64_t slot = 0; slot < slots_->slots(); ++slot) slots_->release(static_cast<uint32_t>(slot));
}

absl::Status PassRunner::assume_context(uint32_t slot, int64_t tokens) { return slots_->assume(slot, tokens); }

Deadline PassRunner::deadline_for(uint64_t rows) const {
  return Deadline::after(options_.step_timeout + options_.row_timeout * static_cast<int64_t>(rows));
}

PassContext PassRunner::context() {
  PassContext pass;
  pass.ops = &ops_;
  pass.kv = kv_.get();
  pass.row_cache = row_cache_.get();
  pass.sum = sum_.get();
  return pass;
}

absl::Status PassRunner::run_mtp(const RowBatch& rows, Tensor hidden, bool keys_only, Tensor* out) {
  absl::Status status;
  const RunKind kind = keys_only ? RunKind::kMtpKeys : RunKind::kMtp;
  *out = ops_.run(kind, rows, hidden, true, [&](const RowBatch& batch, Tensor input) {
    PassContext pass = context();
    pass.rows = batch;
    Tensor result;
    status = model_.mtp(pass, input, keys_only, &result);
    return result;
  });
  return status;
}

absl::StatusOr<LocalResult> PassRunner::run(const PassPlan& plan) {
  ops_.begin_pass();
  deadline_ = deadline_for(plan.rows());
  if (absl::Status status = sum_->begin_pass(deadline_); !status.ok()) return status;
  absl::StatusOr<LocalResult> result = run_begun(plan);
  // Whatever came of it, what began ends: a deadline left behind would strike while the rank is idle. A failed exchange
  // or device is the cause of whatever else went wrong after it.
  const std::string failure = ops_.finish_pass();
  if (absl::Status exchanged = sum_->finish_pass(); !exchanged.ok()) return exchanged;
  if (!failure.empty()) return absl::InternalError(failure);
  return result;
}

absl::StatusOr<LocalResult> PassRunner::run_begun(const PassPlan& plan) {
  if (!prepared_ && options_.prepare_context > 0) {
    if (absl::Status status = prepare(); !status.ok()) return status;
    ops_.begin_pass();
  }
  prepared_ = true;
  mtp_rows_.clear();
  block_rows_.clear();
  if (absl::Status status = carry_out(plan); !status.ok()) return status;
  LocalResult result;
  std::vector<Work> work;
  for (const SequencePlan& sequence : plan.sequences) {
    if (sequence.use_mtp && !model_.shape().has_mtp) {
      return absl::InvalidArgumentError("the plan asks for the MTP layer, which this checkpoint lacks");
    }
    if (sequence.use_block && drafter_ == nullptr) {
      return absl::InvalidArgumentError("the plan asks for a block drafter, which this rank lacks");
    }
    if (drafter_ != nullptr && sequence.block_drafts > static_cast<uint64_t>(drafter_->facts().most_drafts())) {
      return absl::InvalidArgumentError(fmt::format("the plan drafts {} tokens of a block of {}", sequence.block_drafts,
                                                    drafter_->facts().block_size));
    }
    absl::StatusOr<Slot*> slot = slots_->open(sequence, snapshots_.get());
    if (!slot.ok()) return slot.status();
    if (sequence.mtp_steps > 0 && (*slot)->kept_rows == 0) {
      return absl::FailedPreconditionError(
          fmt::format("plan drafts {} tokens of slot {} with the MTP layer, which kept nothing of its last pass",
                      sequence.mtp_steps, sequence.slot));
    }
    for (const int32_t token : sequence.tokens) {
      if (token >= model_.shape().vocab) {
        return absl::InvalidArgumentError(
            fmt::format("token {} is outside the vocabulary of {}", token, model_.shape().vocab));
      }
    }
    Work& item = work.emplace_back();
    item.plan = &sequence;
    item.slot = *slot;
    item.tokens = sequence.tokens;
    item.accepted = sequence.accepted;
  }
  if (work.empty()) return result;
  if (absl::Status status = compute(work, &result); !status.ok()) return status;
  for (const Work& item : work) {
    result.drafts.emplace_back(item.tokens.begin() + static_cast<std::ptrdiff_t>(item.plan->tokens.size()),
                               item.tokens.end());
  }
  return result;
}

// Every kind of run in every size, on rows that belong to no sequence and leave nothing behind. All ranks do this in
// the same pass, so that sums over slices find their partners.
absl::Status PassRunner::prepare() {
  const auto start = std::chrono::steady_clock::now();
  const int64_t free_before = ops_.free_memory();
  int made = 0;
  for (int64_t keys = Ops::kKeptContext;; keys *= 4) {
    for (int64_t rows = 1; rows <= ops_.most_kept_rows(); rows *= 2) {
      ops_.begin_pass();
      if (absl::Status status = prepare_size(rows, keys, &made); !status.ok()) return status;
      if (const std::string failure = ops_.finish_pass(); !failure.empty()) return absl::InternalError(failure);
    }
    if (keys >= options_.prepare_context) break;
  }
  if (ops_.most_kept_rows() == 0) return absl::OkStatus();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  spdlog::info("kept {} kinds of pass, up to {} rows and {} tokens of context, in {:.2f} s and {:.0f} MiB", made,
               ops_.most_kept_rows(), options_.prepare_context, seconds,
               static_cast<double>(free_before - ops_.free_memory()) / (1024.0 * 1024.0));
  return absl::OkStatus();
}

absl::Status PassRunner::prepare_size(int64_t rows, int64_t keys, int* made) {
  const ModelShape& shape = model_.shape();
  const std::vector<std::vector<RecurrentState*>> recurrent(shape.recurrent.size());
  const std::vector<int32_t> tokens(static_cast<size_t>(rows));
  const std::vector<int64_t> positions(static_cast<size_t>(rows));
  RowBatch batch = {.tokens = tokens, .positions = positions, .groups = {}, .recurrent = recurrent};
  batch.least_keys = keys;
  Tensor hidden;
  if (absl::Status status = run_forward(batch, &hidden); !status.ok()) return status;
  ++*made;
  if (rows > 1 && rows <= Ops::kMostRowsOfOne) {
    batch.of_one = true;
    if (absl::Status status = run_forward(batch, &hidden); !status.ok()) return status;
    ++*made;
    batch.of_one = false;
  }
  batch.recurrent = {};
  if (drafter_ != nullptr) {
    if (absl::Status status = run_block_context(batch, taps_); !status.ok()) return status;
    ++*made;
  }
  // Whole blocks, rounded up.
  if (drafter_ != nullptr && rows >= drafter_->facts().block_size) {
    Tensor block;
    if (absl::Status status = run_block(batch, &block); !status.ok()) return status;
    ++*made;
  }
  for (const bool keys_only : {true, false}) {
    Tensor out;
    if (!shape.has_mtp) break;
    if (absl::Status status = run_mtp(batch, hidden, keys_only, &out); !status.ok()) return status;
    ++*made;
  }
  return absl::OkStatus();
}

absl::Status PassRunner::compute(std::vector<Work>& work, LocalResult* result) {
  if (absl::Status status = draft(work); !status.ok()) return status;
  if (absl::Status status = draft_blocks(work); !status.ok()) return status;
  Tensor hidden;
  if (absl::Status status = forward(work, &hidden); !status.ok()) return status;
  if (absl::Status status = add_block_context(work); !status.ok()) return status;
  if (absl::Status status = report_rows(work, hidden, &result->rows); !status.ok()) return status;
  if (absl::Status status = fill_mtp_keys(work, hidden); !status.ok()) return status;
  keep_window(work, hidden);
  return absl::OkStatus();
}

// The MTP layer's part before the forward pass: pairs of the committed rows of the last window, then draft steps. All
// ranks choose the same tokens, since all see all ranks' best candidates.
absl::Status PassRunner::draft(std::vector<Work>& work) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  std::vector<Work*> with_pairs;
  for (Work& item : work) {
    const Slot& slot = *item.slot;
    if (!item.plan->use_mtp || slot.kept_rows == 0) continue;
    const int64_t pairs = 1 + item.accepted;
    groups.push_back({.first_row = static_cast<int64_t>(tokens.size()),
                      .rows = pairs,
                      .first_position = slot.kept_position,
                      .certain = pairs,
                      .pages = slot.pages});
    for (int64_t i = 0; i < pairs; ++i) {
      tokens.push_back(i < item.accepted ? slot.kept_tokens[static_cast<size_t>(i)] : item.tokens[0]);
      positions.push_back(slot.kept_position + i);
    }
    with_pairs.push_back(&item);
  }
  if (with_pairs.empty()) return absl::OkStatus();
  const int64_t hidden_size = model_.shape().row_values();
  const Tensor hidden = ops_.scratch(static_cast<int64_t>(tokens.size()), hidden_size);
  std::vector<int32_t> index;
  for (size_t i = 0; i < with_pairs.size(); ++i) {
    const int64_t pairs = groups[i].rows;
    index.resize(static_cast<size_t>(pairs));
    for (int64_t j = 0; j < pairs; ++j) index[static_cast<size_t>(j)] = static_cast<int32_t>(j);
    ops_.gather_rows(with_pairs[i]->slot->kept_hidden, index, hidden.row_range(groups[i].first_row, pairs));
  }
  Tensor out;
  const bool any_steps =
      std::any_of(with_pairs.begin(), with_pairs.end(), [](const Work* item) { return item->plan->mtp_steps > 0; });
  const bool keys_only = !any_steps && !keep_mtp_logits_;
  const RowBatch batch = {.tokens = tokens, .positions = positions, .groups = groups, .recurrent = {}};
  if (absl::Status status = run_mtp(batch, hidden, keys_only, &out); !status.ok()) return status;
  if (keep_mtp_logits_) record_mtp(positions, out);
  std::vector<Work*> drafting;
  for (size_t i = 0; i < with_pairs.size(); ++i) {
    Work& item = *with_pairs[i];
    if (item.plan->mtp_steps == 0) continue;
    const int64_t last = groups[i].rows - 1;
    item.draft_hidden = out.row_range(groups[i].first_row + last, 1);
    item.draft_position = groups[i].first_position + last;
    drafting.push_back(&item);
  }
  for (uint32_t step = 1; !drafting.empty(); ++step) {
    const int64_t rows = static_cast<int64_t>(drafting.size());
    const Tensor ends = ops_.scratch(rows, hidden_size);
    const int32_t zero = 0;
    for (int64_t i = 0; i < rows; ++i) {
      ops_.gather_rows(drafting[static_cast<size_t>(i)]->draft_hidden, {&zero, 1}, ends.row_range(i, 1));
    }
    absl::StatusOr<std::vector<int32_t>> best = best_tokens(ends);
    if (!best.ok()) return best.status();
    std::vector<Work*> next;
    for (int64_t i = 0; i < rows; ++i) {
      Work& item = *drafting[static_cast<size_t>(i)];
      item.tokens.push_back((*best)[static_cast<size_t>(i)]);
      if (step < item.plan->mtp_steps) next.push_back(&item);
    }
    if (next.empty()) break;
    tokens.clear();
    positions.clear();
    groups.clear();
    const Tensor from = ops_.scratch(static_cast<int64_t>(next.size()), hidden_size);
    for (size_t i = 0; i < next.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i);
      ops_.gather_rows(next[i]->draft_hidden, {&zero, 1}, from.row_range(row, 1));
      next[i]->draft_position += 1;
      tokens.push_back(next[i]->tokens.back());
      positions.push_back(next[i]->draft_position);
      groups.push_back({.first_row = row,
                        .rows = 1,
                        .first_position = next[i]->draft_position,
                        .certain = 1,
                        .pages = next[i]->slot->pages});
    }
    const RowBatch chained = {.tokens = tokens, .positions = positions, .groups = groups, .recurrent = {}};
    if (absl::Status status = run_mtp(chained, from, false, &out); !status.ok()) return status;
    for (size_t i = 0; i < next.size(); ++i) next[i]->draft_hidden = out.row_range(static_cast<int64_t>(i), 1);
    drafting = std::move(next);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> PassRunner::best_tokens(Tensor hidden) {
  const ModelShape& shape = model_.shape();
  PassContext pass = context();
  const Tensor logits = ops_.scratch(hidden.rows, shape.local_vocab);
  model_.logits(pass, hidden, logits);
  std::vector<Candidate> mine;
  for (const std::vector<Candidate>& row : ops_.top_candidates(logits, static_cast<int32_t>(shape.first_vocab_id), 1)) {
    mine.push_back(row.empty() ? Candidate{} : row[0]);
  }
  std::vector<Candidate> all = mine;
  if (communicator_ != nullptr && communicator_->world() > 1) {
    const size_t bytes = mine.size() * sizeof(Candidate);
    const std::vector<size_t> sizes(static_cast<size_t>(communicator_->world()), bytes);
    all.resize(mine.size() * sizes.size());
    const absl::Status status = communicator_->all_gather(std::as_bytes(std::span(mine)), sizes,
                                                          std::as_writable_bytes(std::span(all)), deadline_);
    if (!status.ok()) return status;
  }
  std::vector<int32_t> best;
  for (size_t row = 0; row < mine.size(); ++row) {
    Candidate top = all[row];
    for (size_t i = row + mine.size(); i < all.size(); i += mine.size()) {
      // Ranks hold ascending vocabulary slices: an equal logit of a later rank has the higher id.
      if (all[i].logit > top.logit) top = all[i];
    }
    best.push_back(top.id);
  }
  return best;
}

absl::Status PassRunner::forward(std::vector<Work>& work, Tensor* hidden) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  for (Work& item : work) {
    item.first_row = static_cast<int64_t>(tokens.size());
    const int64_t rows = static_cast<int64_t>(item.tokens.size());
    const int64_t first = static_cast<int64_t>(item.plan->first_position);
    groups.push_back({.first_row = item.first_row,
                      .rows = rows,
                      .first_position = first,
                      .accepted = item.accepted,
                      .certain = item.plan->certain,
                      .pages = item.slot->pages});
    for (int64_t i = 0; i < rows; ++i) {
      tokens.push_back(item.tokens[static_cast<size_t>(i)]);
      positions.push_back(first + i);
    }
  }
  if (trace_ != nullptr) {
    std::vector<uint32_t> slots;
    for (const Work& item : work) slots.insert(slots.end(), item.tokens.size(), item.plan->slot);
    trace_->begin_pass(positions, slots);
  }
  std::vector<std::vector<RecurrentState*>> recurrent(model_.shape().recurrent.size());
  for (size_t layer = 0; layer < recurrent.size(); ++layer) {
    for (const Work& item : work) recurrent[layer].push_back(item.slot->recurrent[layer].get());
  }
  const RowBatch batch = {.tokens = tokens, .positions = positions, .groups = groups, .recurrent = recurrent};
  return run_forward(batch, hidden);
}

absl::Status PassRunner::run_forward(const RowBatch& batch, Tensor* hidden) {
  absl::Status status;
  const auto body = [&](const RowBatch& rows, Tensor) {
    PassContext pass = context();
    pass.trace = trace_;
    pass.rows = rows;
    if (drafter_ != nullptr) {
      pass.tap_layers = drafter_->facts().target_layers;
      pass.tap_width = model_.shape().hidden;
    }
    Tensor result;
    status = model_.forward(pass, &result);
    return drafter_ != nullptr ? pass.handed : result;
  };
  *hidden = ops_.run(RunKind::kForward, batch, {}, trace_ == nullptr, body);
  if (!status.ok() || drafter_ == nullptr) return status;
  const int64_t taps = hidden->cols - model_.shape().row_values();
  taps_ = hidden->columns(0, taps);
  *hidden = hidden->columns(taps, model_.shape().row_values());
  return status;
}

absl::Status PassRunner::report_rows(const std::vector<Work>& work, Tensor hidden, std::vector<RowReport>* rows) {
  std::vector<int32_t> index;  // rows of the pass, each once, also one that is wanted in two ways
  std::vector<DrawKey> keys;   // of these
  int64_t most = 0;
  bool draws = false;
  for (const Work& item : work) {
    for (const RowWant& want : item.plan->wants) {
      const auto row = static_cast<int32_t>(item.first_row + want.row);
      if (index.empty() || index.back() != row) {
        index.push_back(row);
        keys.emplace_back();
      }
      if (want.top_n == kDrawn) keys.back() = {want.key, want.temperature};
      draws = draws || want.top_n == kDrawn;
      if (want.top_n != kFullRow && want.top_n != kDrawn) most = std::max<int64_t>(most, want.top_n);
    }
  }
  if (index.empty()) return absl::OkStatus();
  const ModelShape& shape = model_.shape();
  const int64_t count = static_cast<int64_t>(index.size());
  const Tensor wanted = ops_.scratch(count, shape.row_values());
  ops_.gather_rows(hidden, index, wanted);
  const Tensor logits = ops_.scratch(count, shape.local_vocab);
  PassContext pass = context();
  model_.logits(pass, wanted, logits);
  std::vector<std::vector<Candidate>> candidates;
  if (most > 0) candidates = ops_.top_candidates(logits, static_cast<int32_t>(shape.first_vocab_id), most);
  std::vector<Candidate> drawn;
  if (draws) drawn = ops_.best_draws(logits, static_cast<int32_t>(shape.first_vocab_id), keys);
  int64_t at = -1;
  for (const Work& item : work) {
    for (size_t i = 0; i < item.plan->wants.size(); ++i) {
      const RowWant& want = item.plan->wants[i];
      if (i == 0 || want.row != item.plan->wants[i - 1].row) ++at;
      RowReport& row = rows->emplace_back();
      row.slot = item.plan->slot;
      row.row = want.row;
      row.first_id = static_cast<int32_t>(shape.first_vocab_id);
      if (want.top_n == kFullRow) {
        row.logits.resize(static_cast<size_t>(shape.local_vocab));
        ops_.download(logits.row_range(at, 1), row.logits);
      } else if (want.top_n == kDrawn) {
        const Candidate& token = drawn[static_cast<size_t>(at)];
        row.candidates.push_back({token.logit, token.id});
      } else {
        const std::vector<Candidate>& best = candidates[static_cast<size_t>(at)];
        const size_t keep = std::min<size_t>(best.size(), want.top_n);
        for (size_t k = 0; k < keep; ++k) row.candidates.push_back({best[k].logit, best[k].id});
      }
    }
  }
  return absl::OkStatus();
}

// Prompt rows know the next token already: their MTP pairs leave keys and values now, all but the last certain row's,
// whose next token is not known yet.
absl::Status PassRunner::fill_mtp_keys(std::vector<Work>& work, Tensor hidden) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  std::vector<int32_t> index;
  for (const Work& item : work) {
    const int64_t pairs = static_cast<int64_t>(item.plan->certain) - 1;
    if (!item.plan->use_mtp || pairs <= 0) continue;
    const int64_t first = static_cast<int64_t>(item.plan->first_position);
    groups.push_back({.first_row = static_cast<int64_t>(tokens.size()),
                      .rows = pairs,
                      .first_position = first,
                      .certain = pairs,
                      .pages = item.slot->pages});
    for (int64_t i = 0; i < pairs; ++i) {
      tokens.push_back(item.tokens[static_cast<size_t>(i + 1)]);
      positions.push_back(first + i);
      index.push_back(static_cast<int32_t>(item.first_row + i));
    }
  }
  if (tokens.empty()) return absl::OkStatus();
  const Tensor rows = ops_.scratch(static_cast<int64_t>(index.size()), model_.shape().row_values());
  ops_.gather_rows(hidden, index, rows);
  const RowBatch batch = {.tokens = tokens, .positions = positions, .groups = groups, .recurrent = {}};
  Tensor out;
  if (absl::Status status = run_mtp(batch, rows, !keep_mtp_logits_, &out); !status.ok()) return status;
  if (keep_mtp_logits_) record_mtp(positions, out);
  return absl::OkStatus();
}

void PassRunner::record_mtp(std::span<const int64_t> positions, Tensor out) {
  PassContext pass = context();
  const Tensor logits = ops_.scratch(out.rows, model_.shape().local_vocab);
  model_.logits(pass, out, logits);
  for (int64_t i = 0; i < out.rows; ++i) {
    RowReport& row = mtp_rows_.emplace_back();
    row.row = static_cast<uint32_t>(positions[static_cast<size_t>(i)]);
    row.first_id = static_cast<int32_t>(model_.shape().first_vocab_id);
    row.logits.resize(static_cast<size_t>(model_.shape().local_vocab));
    ops_.download(logits.row_range(i, 1), row.logits);
  }
}

void PassRunner::keep_window(std::vector<Work>& work, Tensor hidden) {
  std::vector<int32_t> index;
  for (Work& item : work) {
    Slot& slot = *item.slot;
    const int64_t rows = static_cast<int64_t>(item.tokens.size());
    const int64_t certain = item.plan->certain;
    const int64_t first = static_cast<int64_t>(item.plan->first_position);
    slot.committed = first + certain;
    slot.tentative = rows - certain;
    slot.kept_tokens.assign(item.tokens.begin() + certain, item.tokens.end());
    slot.kept_rows = 0;
    if (!item.plan->use_mtp) continue;
    slot.kept_rows = rows - certain + 1;
    slot.kept_position = first + certain - 1;
    index.resize(static_cast<size_t>(slot.kept_rows));
    for (int64_t i = 0; i < slot.kept_rows; ++i) {
      index[static_cast<size_t>(i)] = static_cast<int32_t>(item.first_row + certain - 1 + i);
    }
    ops_.gather_rows(hidden, index, slot.kept_hidden.row_range(0, slot.kept_rows));
  }
}

}  // namespace tensorfold
