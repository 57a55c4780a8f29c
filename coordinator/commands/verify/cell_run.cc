#include "coordinator/commands/verify/cell_run.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <memory>
#include <span>

#include "coordinator/commands/verify/disk_trip.h"
#include "coordinator/draft/drafter.h"
#include "coordinator/sampling/identity.h"
#include "coordinator/sampling/sampler.h"
#include "kernels/numerics/gumbel.h"

namespace tensorfold {
namespace {

constexpr uint32_t kMates = 3;
constexpr int64_t kPageSize = 64;
constexpr double kDrawTemperature = 1.1;

// One sequence of a cell: the tested one, or a mate that only has to be there.
class Walker {
 public:
  Walker(uint32_t slot, const std::vector<uint32_t>& prompt, uint32_t reply_tokens, int64_t first_page, int64_t pages)
      : slot_(slot), prompt_(prompt.size()), tokens_(prompt), reply_tokens_(reply_tokens) {
    for (int64_t page = 0; page < pages; ++page) pages_.push_back(static_cast<int32_t>(first_page + page));
  }

  bool done() const { return tokens_.size() - prompt_ >= reply_tokens_; }
  bool filling() const { return computed_ < prompt_; }
  size_t position() const { return computed_; }
  uint32_t slot() const { return slot_; }
  const std::vector<uint32_t>& tokens() const { return tokens_; }
  std::vector<uint32_t> reply() const {
    return {tokens_.begin() + static_cast<std::ptrdiff_t>(prompt_), tokens_.end()};
  }

  SequencePlan prompt_plan(size_t chunk, bool use_mtp, bool logits) {
    SequencePlan plan = begin(use_mtp);
    size_t rows = std::min(chunk == 0 ? prompt_ : chunk, prompt_ - computed_);
    if (stop_at_pages_) rows = std::min<size_t>(rows, kPageSize - computed_ % kPageSize);
    for (size_t i = 0; i < rows; ++i) plan.tokens.push_back(static_cast<int32_t>(tokens_[computed_ + i]));
    plan.certain = static_cast<uint32_t>(rows);
    for (size_t i = 0; i < rows; ++i) {
      const size_t at = computed_ + i;
      // Some prompt rows' logits, and the last one's, from which the reply's first token is drawn.
      if (at + 1 == prompt_ || (logits && at % 11 == 5)) plan.wants.push_back({static_cast<uint32_t>(i), kFullRow});
    }
    return plan;
  }

  SequencePlan window_plan(const std::vector<uint32_t>& drafts, uint32_t mtp_steps, bool use_mtp,
                           uint32_t block_drafts = 0) {
    SequencePlan plan = begin(use_mtp);
    plan.tokens.push_back(static_cast<int32_t>(tokens_.back()));
    plan.certain = 1;
    for (const uint32_t id : drafts) plan.tokens.push_back(static_cast<int32_t>(id));
    plan.mtp_steps = mtp_steps;
    plan.block_drafts = block_drafts;
    for (uint32_t row = 0; row < plan.tokens.size() + plan.drafted(); ++row) plan.wants.push_back({row, kFullRow});
    return plan;
  }

  /// From now on prompt plans end at the ends of pages.
  void stop_at_pages() { stop_at_pages_ = true; }
  /// The next plan goes on in `slot`, on `spare` pages from the first one that it writes on, with all that is known
  /// there: from `snapshot`, or from the pages alone. What the plan has to order is added to it.
  void move(uint32_t slot, const std::vector<int32_t>& spare, bool snapshot, bool use_mtp, StateOrders* orders) {
    const size_t committed = computed_ - accepted_;
    const size_t writes_from = snapshot && use_mtp ? committed - 1 : computed_;
    std::vector<int32_t> table(pages_.begin(), pages_.begin() + static_cast<std::ptrdiff_t>(writes_from / kPageSize));
    for (size_t page = table.size(); page < pages_.size(); ++page) {
      if (page * kPageSize < computed_) orders->copies.push_back({pages_[page], spare[page]});
      table.push_back(spare[page]);
    }
    if (snapshot) orders->takes.push_back({slot_, 0});
    pages_ = std::move(table);
    slot_ = slot;
    fresh_ = true;
    snapshot_ = snapshot;
    if (!snapshot) accepted_ = 0;
  }
  /// Its state's way to disk and back into `spare` pages; it goes on there, in `slot`.
  DiskTrip trip(const std::vector<int32_t>& spare) const {
    return {.slot = slot_,
            .tokens = std::span(tokens_).first(computed_),
            .committed = computed_ - accepted_,
            .from = pages_,
            .to = spare,
            .snapshot = 0};
  }
  void land(uint32_t slot, const DiskTrip& trip) {
    slot_ = slot;
    pages_ = trip.to;
    fresh_ = true;
    snapshot_ = true;
  }
  /// Everything computed so far again, as certain rows, in `slot` on `spare` pages: nothing of it is left.
  SequencePlan again(uint32_t slot, const std::vector<int32_t>& spare, bool use_mtp) {
    slot_ = slot;
    pages_ = spare;
    accepted_ = 0;
    SequencePlan plan;
    plan.slot = slot;
    plan.use_mtp = use_mtp;
    plan.fresh = true;
    plan.new_pages = pages_;
    plan.certain = static_cast<uint32_t>(computed_);
    for (size_t i = 0; i < computed_; ++i) plan.tokens.push_back(static_cast<int32_t>(tokens_[i]));
    return plan;
  }

  void computed(size_t position) { computed_ = position; }
  void keep(uint32_t id) { tokens_.push_back(id); }
  void accept(uint32_t rows) { accepted_ = rows; }

 private:
  SequencePlan begin(bool use_mtp) {
    SequencePlan plan;
    plan.slot = slot_;
    plan.use_mtp = use_mtp;
    plan.first_position = computed_;
    plan.accepted = std::exchange(accepted_, 0u);
    plan.fresh = computed_ == 0 || std::exchange(fresh_, false);
    if (plan.fresh) plan.new_pages = pages_;
    if (std::exchange(snapshot_, false)) plan.snapshot = 0;
    return plan;
  }

  uint32_t slot_;
  size_t prompt_;
  std::vector<uint32_t> tokens_;
  uint32_t reply_tokens_;
  std::vector<int32_t> pages_;
  size_t computed_ = 0;
  uint32_t accepted_ = 0;
  bool stop_at_pages_ = false;
  bool fresh_ = false;
  bool snapshot_ = false;
};

std::vector<float> row_logits(const PassResult& pass, uint32_t slot, uint32_t row) {
  std::vector<float> logits;
  for (const PassReport& report : pass.reports) {
    for (const RowReport& part : report.rows) {
      if (part.slot == slot && part.row == row) logits.insert(logits.end(), part.logits.begin(), part.logits.end());
    }
  }
  return logits;
}

uint64_t bits_hash(const std::vector<float>& logits) { return XXH64(logits.data(), logits.size() * sizeof(float), 0); }

uint32_t wrong_token(uint32_t right) { return right == 0 ? 1 : right - 1; }

// The right tokens with some made wrong, so that windows of every acceptance occur.
std::vector<uint32_t> mixed_drafts(const std::vector<uint32_t>& expected, size_t from, size_t count) {
  std::vector<uint32_t> drafts;
  for (size_t i = from; i < expected.size() && drafts.size() < count; ++i) {
    const bool wrong = (i * 7 + count * 3) % 5 == 0;
    drafts.push_back(wrong ? wrong_token(expected[i]) : expected[i]);
  }
  return drafts;
}

// A drafter that is of no use: its windows change their width every round, and in turn everything is right, everything
// is wrong, one token is repeated, or the tokens are noise.
std::vector<uint32_t> adversary_drafts(const std::vector<uint32_t>& expected, size_t from, uint32_t last, size_t round,
                                       size_t most) {
  const size_t count = (round * 5 + 3) % (most + 1);
  std::vector<uint32_t> drafts;
  for (size_t i = from; i < expected.size() && drafts.size() < count; ++i) {
    switch (round / 2 % 4) {
      case 0:
        drafts.push_back(expected[i]);
        break;
      case 1:
        drafts.push_back(wrong_token(expected[i]));
        break;
      case 2:
        drafts.push_back(last);
        break;
      default:
        drafts.push_back(static_cast<uint32_t>((i * 2654435761u + round * 40503u) >> 7) % 64);
    }
  }
  return drafts;
}

class CellRunner {
 public:
  CellRunner(PassExecutor& executor, const Cell& cell, const CellInputs& inputs, const std::vector<uint32_t>& expected)
      : executor_(executor), cell_(cell), inputs_(inputs), expected_(expected), slot_(cell_slot(cell)) {
    sampling_.temperature = cell.sampled ? 0.9 : 0.0;
    sampling_.top_p = cell.sampled ? 0.95 : 1.0;
    sampling_.seed = inputs.seed;
    const int64_t each = cells_pages(inputs) / cells_slots();
    main_ = std::make_unique<Walker>(slot_, inputs.prompt, inputs.reply_tokens, each * slot_, each);
    for (uint32_t i = 0; cell.mates && i < kMates; ++i) {
      const uint32_t slot = i < slot_ ? i : i + 1;
      mates_.push_back(std::make_unique<Walker>(slot, inputs.mates[i], 1000000, each * slot, each));
      mate_slots_.push_back(slot);
    }
    if (cell.draft == CellDraft::kCopy) drafter_ = make_drafter(DraftKind::kCopy);
    // Two sets of pages, between which the tested sequence moves.
    for (const uint32_t slot : {slot_, spare_slot()}) {
      std::vector<int32_t>& bank = banks_.emplace_back();
      for (int64_t page = 0; page < each; ++page) bank.push_back(static_cast<int32_t>(each * slot + page));
    }
    if (cell.cache != CellCache::kCold) main_->stop_at_pages();
  }

  absl::StatusOr<CellResult> run() {
    while (!main_->done()) {
      if (absl::Status status = round(); !status.ok()) return status;
    }
    // Free the slots for the next cell.
    PassPlan release;
    release.kind = PlanKind::kPing;
    for (uint32_t slot = 0; slot <= kMates + 1; ++slot) release.release.push_back(slot);
    if (absl::StatusOr<PassResult> pass = executor_.execute(release); !pass.ok()) return pass.status();
    result_.reply = main_->reply();
    return result_;
  }

 private:
  bool use_mtp() const { return cell_.draft == CellDraft::kMtp; }
  bool use_block() const { return cell_.draft == CellDraft::kBlock; }

  // Whether the tested sequence moves before its next pass.
  bool moves() const {
    const size_t at = main_->position();
    if (at == 0 || cell_.cache == CellCache::kCold) return false;
    const bool at_page = main_->filling() && at % kPageSize == 0;
    if (cell_.cache == CellCache::kPrefix) return at_page;
    if (cell_.cache == CellCache::kReply) return !main_->filling();
    return at_page || (!main_->filling() && rounds_ % 5 == 0);
  }

  // Takes the tested sequence to the other slot, by what `orders` says or by computing it again.
  absl::Status move(StateOrders* orders, std::vector<uint32_t>* release) {
    const uint32_t from = main_->slot();
    const bool away = from == slot_;
    const std::vector<int32_t>& spare = banks_[away ? 1 : 0];
    const uint32_t to = away ? spare_slot() : slot_;
    release->push_back(from);
    if (cell_.cache == CellCache::kDisk) {
      const DiskTrip trip = main_->trip(spare);
      if (absl::Status status = disk_trip(executor_, trip); !status.ok()) return status;
      main_->land(to, trip);
      return absl::OkStatus();
    }
    if (cell_.cache != CellCache::kEvicted) {
      main_->move(to, spare, inputs_.has_states || use_mtp(), use_mtp(), orders);
      return absl::OkStatus();
    }
    PassPlan plan;
    plan.sequences.push_back(main_->again(to, spare, use_mtp()));
    plan.sequences.back().use_block = use_block();
    return executor_.execute(plan).status();
  }

  absl::Status round() {
    PassPlan plan;
    if (moves()) {
      if (absl::Status status = move(&plan.orders, &plan.release); !status.ok()) return status;
    }
    // The tested sequence is first, in the middle or last among its mates.
    const size_t place = mates_.empty() ? 0 : rounds_ % (mates_.size() + 1);
    for (size_t i = 0; i <= mates_.size(); ++i) {
      if (i == place) {
        plan.sequences.push_back(with_draws(main_plan()));
        plan.sequences.back().use_block = use_block();
      }
      if (i < mates_.size()) plan.sequences.push_back(mate_plan(i));
    }
    ++rounds_;
    const absl::StatusOr<PassResult> pass = executor_.execute(plan);
    if (!pass.ok()) return pass.status();
    for (size_t i = 0; i < plan.sequences.size(); ++i) {
      const SequencePlan& sequence = plan.sequences[i];
      const std::vector<int32_t> none;
      const std::vector<int32_t>& drafts = i < pass->drafts.size() ? pass->drafts[i] : none;
      const bool tested = sequence.slot == main_->slot();
      Walker* const walker = tested ? main_.get() : mate_of(sequence.slot);
      if (walker == nullptr) return absl::InternalError(fmt::format("slot {} is nobody's", sequence.slot));
      if (absl::Status status = take(*walker, sequence, drafts, *pass, tested); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // The ranks also draw from each wanted row, at another temperature than the cell's.
  SequencePlan with_draws(SequencePlan plan) const {
    std::vector<RowWant> wants;
    for (const RowWant& want : plan.wants) {
      wants.push_back(want);
      wants.push_back({want.row, kDrawn, row_key(inputs_.seed, plan.first_position + want.row + 1), kDrawTemperature});
    }
    plan.wants = std::move(wants);
    return plan;
  }

  // What the ranks drew from a row must be what the sampler draws from the whole of it.
  absl::Status check_draw(const PassResult& pass, uint32_t slot, const RowWant& want, const std::vector<float>& logits,
                          uint64_t position) const {
    SamplingParams params;
    params.temperature = kDrawTemperature;
    params.seed = inputs_.seed;
    std::vector<SampleCandidate> drawn;
    for (const PassReport& report : pass.reports) {
      for (const RowReport& part : report.rows) {
        if (part.slot != slot || part.row != want.row) continue;
        for (const WireCandidate& token : part.candidates) {
          drawn.push_back({token.logit, static_cast<uint32_t>(token.id)});
        }
      }
    }
    const absl::StatusOr<Sampled> whole = sample_row(params, logits, position, TokenCounts());
    if (!whole.ok()) return whole.status();
    const absl::StatusOr<Sampled> merged = sample_drawn(params, drawn, position);
    if (!merged.ok()) return merged.status();
    if (merged->id == whole->id) return absl::OkStatus();
    return absl::InternalError(
        fmt::format("position {}: the ranks drew token {}, the whole row gives {}", position, merged->id, whole->id));
  }

  Walker* mate_of(uint32_t slot) {
    for (size_t i = 0; i < mates_.size(); ++i) {
      if (mate_slots_[i] == slot) return mates_[i].get();
    }
    return nullptr;
  }

  SequencePlan main_plan() {
    if (main_->filling()) return main_->prompt_plan(static_cast<size_t>(cell_.chunk), use_mtp(), true);
    const size_t count = static_cast<size_t>(cell_.width) - 1;
    const size_t reply = main_->tokens().size() - inputs_.prompt.size();
    switch (cell_.draft) {
      case CellDraft::kOff:
        return main_->window_plan({}, 0, false);
      case CellDraft::kCopy:
        return main_->window_plan(drafter_->propose(main_->tokens(), count).ids, 0, false);
      case CellDraft::kMtp:
        return main_->window_plan({}, static_cast<uint32_t>(count), true);
      case CellDraft::kBlock:
        return main_->window_plan({}, 0, false, std::min(static_cast<uint32_t>(count), inputs_.block_drafts));
      case CellDraft::kMixed:
        return main_->window_plan(mixed_drafts(expected_, reply, count), 0, false);
      case CellDraft::kAdversary:
        return main_->window_plan(adversary_drafts(expected_, reply, main_->tokens().back(), rounds_, count), 0, false);
    }
    return {};
  }

  // Mates read prompts in uneven chunks and then decode with uneven widths, drafts made of noise.
  SequencePlan mate_plan(size_t index) {
    Walker& mate = *mates_[index];
    if (mate.filling()) return mate.prompt_plan(3 + 5 * index + rounds_ % 4, false, false);
    std::vector<uint32_t> noise;
    for (size_t i = 0; i < (rounds_ + index) % 4; ++i) noise.push_back(static_cast<uint32_t>((rounds_ + 3 * i) % 64));
    return mate.window_plan(noise, 0, false);
  }

  absl::Status take(Walker& walker, const SequencePlan& plan, const std::vector<int32_t>& drafts,
                    const PassResult& pass, bool tested) {
    std::vector<int32_t> window(plan.tokens.begin() + plan.certain, plan.tokens.end());
    window.insert(window.end(), drafts.begin(), drafts.end());
    const size_t end_of_prompt = tested ? inputs_.prompt.size() : 0;
    uint32_t accepted = 0;
    for (const RowWant& want : plan.wants) {
      if (want.top_n == kDrawn) continue;
      const std::vector<float> logits = row_logits(pass, plan.slot, want.row);
      const int64_t position = static_cast<int64_t>(plan.first_position + want.row);
      if (tested) {
        const absl::Status drawn = check_draw(pass, plan.slot, want, logits, static_cast<uint64_t>(position) + 1);
        if (!drawn.ok()) return drawn;
      }
      if (tested) result_.rows.emplace_back(position, bits_hash(logits));
      if (static_cast<size_t>(position) + 1 < end_of_prompt) continue;
      const absl::StatusOr<Sampled> next =
          sample_row(sampling_, logits, static_cast<uint64_t>(position) + 1, TokenCounts());
      if (!next.ok()) return next.status();
      walker.keep(next->id);
      if (walker.done()) break;
      const size_t draft = want.row + 1 - plan.certain;
      if (draft >= window.size() || static_cast<uint32_t>(window[draft]) != next->id) break;
      ++accepted;
    }
    walker.computed(plan.first_position + plan.certain + accepted);
    walker.accept(accepted);
    if (tested) {
      result_.drafted += window.size();
      result_.accepted += accepted;
    }
    return absl::OkStatus();
  }

  PassExecutor& executor_;
  const Cell& cell_;
  const CellInputs& inputs_;
  const std::vector<uint32_t>& expected_;
  const uint32_t slot_;
  SamplingParams sampling_;
  std::unique_ptr<Walker> main_;
  std::vector<std::vector<int32_t>> banks_;
  std::vector<std::unique_ptr<Walker>> mates_;
  std::vector<uint32_t> mate_slots_;
  std::unique_ptr<Drafter> drafter_;
  size_t rounds_ = 0;
  CellResult result_;
};

}  // namespace

std::string CellResult::hash() const {
  std::vector<uint32_t> words = reply;
  for (const auto& [position, hash] : rows) {
    words.push_back(static_cast<uint32_t>(position));
    words.push_back(static_cast<uint32_t>(hash >> 32));
    words.push_back(static_cast<uint32_t>(hash));
  }
  return token_sha(words);
}

uint32_t cell_slot(const Cell& cell) { return cell.mates ? 2 : 0; }
uint32_t spare_slot() { return kMates + 1; }
int64_t cells_slots() { return kMates + 2; }

int64_t cells_pages(const CellInputs& inputs) {
  size_t longest = inputs.prompt.size();
  for (const std::vector<uint32_t>& mate : inputs.mates) longest = std::max(longest, mate.size());
  // Mates decode for as long as the tested sequence lives: chunk 1 reads its prompt in as many rounds as it has tokens,
  // and each round may keep a whole window of a mate.
  const size_t rounds = inputs.prompt.size() + inputs.reply_tokens + 2;
  const int64_t tokens = static_cast<int64_t>(longest + 4 * rounds + kMaxWindow);
  return cells_slots() * ((tokens + kPageSize - 1) / kPageSize);
}

absl::StatusOr<CellResult> run_cell(PassExecutor& executor, const Cell& cell, const CellInputs& inputs,
                                    const std::vector<uint32_t>& expected) {
  return CellRunner(executor, cell, inputs, expected).run();
}

}  // namespace tensorfold
