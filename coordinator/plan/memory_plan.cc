#include "coordinator/plan/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "coordinator/plan/drafter_plan.h"
#include "kernels/numerics/padded_heads.h"
#include "transport/pass/plan.h"
#include "worker/state/snapshots.h"

namespace tensorfold {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// The program's code, its libraries and threads, as measured on Linux when it is ready; and what a transport between
// ranks has besides.
constexpr int64_t kProgramBytes = 30 * kMiB;
constexpr int64_t kTransportBytes = 24 * kMiB;
// A CUDA context, its libraries and the exchange's buffers.
constexpr int64_t kDeviceContextBytes = 1024 * kMiB;
// Kept launches: so much for each kind of pass, and kinds for each power of two of rows and of four of context.
constexpr int64_t kKeptLaunchBytes = 6 * kMiB;
constexpr int64_t kKeptRowSizes = 7;    // 1 to 64
constexpr int64_t kKeptSizesOfOne = 4;  // of forward passes of one sequence: from 2 rows on
static_assert(1 << kKeptSizesOfOne == Ops::kMostRowsOfOne);
// A token of a sequence on rank 0: in the request, the history and the request's body as it came and was read; and
// twice in the copy drafter's index (16 bytes an entry of a hash table that is half empty after it has grown, and a
// chain).
constexpr int64_t kTokenBytes = 4 + 4 + 16;
constexpr int64_t kIndexedTokenBytes = 2 * (32 + 8);
constexpr int64_t kTokenizerTimes = 10;  // its tables, by the size of its file
constexpr int64_t kMaxSlicesOwned = 8;   // of a world of one

int64_t float_bytes(int64_t values) { return values * static_cast<int64_t>(sizeof(float)); }

int64_t slices_owned(const ModelShape& shape) {
  // By the vocabulary's share, which every family cuts; one slice more for uneven cuts.
  return kMaxSlicesOwned * shape.local_vocab / std::max<int64_t>(shape.vocab, 1) + 1;
}

// Scratch of the largest pass: what lives through a layer, the widest of its parts, a partial for each slice that the
// rank owns, and the logits of the rows that are wanted.
int64_t scratch_bytes(const Profile& profile, const ModelConfig& config, const ModelShape& shape) {
  const auto& schedule = profile.schedule;
  const int64_t mixer =
      (2 * config.heads + 2 * config.kv_heads) * config.head_dim +
      (2 * config.linear.key_heads * config.linear.key_dim + 2 * config.linear.value_heads * config.linear.value_dim) +
      4 * (config.mamba2.heads * config.mamba2.head_dim + config.mamba2.groups * config.mamba2.state);
  const int64_t mlp =
      3 * std::max(config.intermediate_size, config.experts.per_token * config.experts.intermediate_size +
                                                 config.experts.shared_intermediate_size);
  // Streams, their norms and gates; n-grams have a slice's keys and values for each.
  const int64_t streams = config.gated_streams.count *
                          (4 + (config.ngrams.layers.empty() ? 0 : 3 + 2 * slices_owned(shape))) * shape.hidden;
  // Residuals of several streams, twice; engrams look rows up and have keys for each stream, a partial for each slice.
  const int64_t count = config.streams.count, slices = slices_owned(shape);
  int64_t latents = 2 * count * shape.hidden + config.latent.index_windows + config.shared_latents.candidate_blocks;
  if (!config.engram.layers.empty()) {
    latents += ((1 + slices) * (count + 1) + 2 * count) * shape.hidden + config.engram.heads() * config.engram.head_dim;
  }
  const int64_t row = shape.hidden * (4 + slices) + std::max(mixer, mlp) + streams + latents;
  const int64_t windows =
      std::min<int64_t>(int64_t{schedule.max_sequences} * profile.draft.max_width, schedule.max_batch_rows);
  return float_bytes(schedule.max_batch_rows * row + windows * (shape.local_vocab + shape.row_values()));
}

// What the CUDA backend's experts take besides: outputs of every row and slot for each slice, up to 192 MiB, and inner
// values, for rows rounded up to a power of two and the smaller ones before.
int64_t device_expert_bytes(const Profile& profile, const ModelConfig& config, const ModelShape& shape) {
  if (config.experts.count == 0) return 0;
  const int64_t slots = config.experts.per_token + (config.experts.shared_intermediate_size > 0 ? 1 : 0);
  const int64_t pairs = 2 * int64_t{profile.schedule.max_batch_rows} * slots;
  const int64_t widest = std::max(config.experts.intermediate_size, config.experts.shared_intermediate_size);
  return 2 * std::min(int64_t{192} << 20, float_bytes(pairs * slices_owned(shape) * shape.hidden)) + pairs * 2 * widest;
}

// What choosing keys takes on the CUDA backend: scores of windows, 64 MiB at a time, then, in their place, states of
// attention's splits. Eager passes and both kinds of kept ones that choose have their own.
int64_t device_choice_bytes(const ModelConfig& config) {
  return config.indexer.heads > 0 || is_latent(config.family) ? 3 * (int64_t{64} << 20) : 0;
}

// What a delta net with decays of channels takes there besides: q, k, v and decays of every row, and what it gives.
int64_t device_delta_bytes(const Profile& profile, const ModelConfig& config) {
  if (config.family != Family::kGlm5Next) return 0;
  const LinearAttentionConfig& linear = config.linear;
  // Rows that are computed again come on top: a window for each sequence of a pass, and of a kept one for each row.
  constexpr int64_t kKeptRows = 64;
  const int64_t rows = profile.schedule.max_batch_rows + int64_t{profile.schedule.max_sequences} * kMaxWindow +
                       kKeptRows * (1 + kMaxWindow);
  return float_bytes(rows * (3 * linear.key_heads * linear.key_dim + 2 * linear.value_heads * linear.value_dim));
}

// A whole number with its unit, as a profile reads sizes; rounded up.
std::string mebibytes(int64_t bytes) { return fmt::format("{}MiB", (bytes + kMiB - 1) / kMiB); }

int64_t lane_state_bytes(const ModelShape& shape) {
  int64_t bytes = shape.has_mtp ? float_bytes(kMaxWindow * shape.row_values()) : 0;
  for (const StateShape& layer : shape.recurrent) bytes += state_bytes(layer);
  return bytes;
}

int64_t kept_launch_bytes(const ModelShape& shape, bool drafter, int64_t context) {
  int64_t contexts = 1;
  for (int64_t keys = Ops::kKeptContext; keys < context; keys *= 4) ++contexts;
  const int64_t kinds = 1 + (shape.has_mtp ? 2 : 0) + (drafter ? 2 : 0);
  return contexts * (kKeptRowSizes * kinds + kKeptSizesOfOne) * kKeptLaunchBytes;
}

// Rank 0's tokens. Sequences cannot all have the whole context: their pages bound their tokens.
int64_t token_bytes(const Profile& profile, const MemoryPlan& plan) {
  const int64_t tokens = std::min(plan.pages * kPageTokens, plan.context * plan.lanes);
  const bool indexed = profile.draft.kind == "copy" || profile.draft.kind == "auto";
  return tokens * (kTokenBytes + (indexed ? kIndexedTokenBytes : 0));
}

int64_t tokenizer_bytes(const Profile& profile) {
  std::error_code none;
  const auto size = std::filesystem::file_size(profile.model.path + "/tokenizer.json", none);
  return none ? 0 : kTokenizerTimes * static_cast<int64_t>(size);
}

std::string pages_note(const MemoryPlan& plan) {
  return fmt::format("{} pages of {} tokens, {} each", plan.pages, kPageTokens, human_bytes(plan.page_bytes));
}

void add_device_items(const Profile& profile, const ModelConfig& config, const ModelFacts& facts,
                      const ModelShape& shape, bool drafter, MemoryPlan* plan) {
  plan->items.push_back({"weights", rank_weight_bytes(facts, shape, plan->device),
                         fmt::format("of {} in all files", human_bytes(facts.weight_bytes)), false});
  plan->items.push_back({"pages", plan->pages * plan->page_bytes, pages_note(*plan), false});
  const int64_t lane = lane_state_bytes(shape);
  if (lane > 0) {
    plan->items.push_back(
        {"states", lane * plan->lanes, fmt::format("{} lanes, {} each", plan->lanes, human_bytes(lane)), false});
  }
  if (profile.cache.enabled && profile.cache.snapshot_bytes > 0 && !shape.recurrent.empty()) {
    const int64_t each = snapshot_bytes(shape), wanted = std::min<int64_t>(2 * plan->lanes, kMaxSnapshots);
    std::string note = fmt::format("{} for the prefix cache, {} each", plan->snapshots, human_bytes(each));
    if (plan->snapshots < wanted) {
      note += fmt::format(
          "; few: two a lane, so that conversations go on from their last turn, are cache.snapshot_bytes: {}",
          mebibytes(wanted * each));
    }
    plan->items.push_back({"snapshots", plan->snapshots * each, std::move(note), false});
  }
  if (plan->device && profile.compute.launch == "graph") {
    plan->items.push_back({"kept launches", kept_launch_bytes(shape, drafter, plan->context), "at most", false});
  }
  const int64_t more = plan->device ? device_expert_bytes(profile, config, shape) + device_choice_bytes(config) +
                                          device_delta_bytes(profile, config)
                                    : 0;
  plan->items.push_back({"scratch", scratch_bytes(profile, config, shape) + more,
                         fmt::format("a pass of {} rows", profile.schedule.max_batch_rows), false});
  if (plan->device) plan->items.push_back({"context", kDeviceContextBytes, "driver, libraries, exchange", false});
}

}  // namespace

// The embedding is whole on every rank, and a tied head is a view of it; what is cut goes by this rank's share of the
// vocabulary, the finest cut.
int64_t rank_weight_bytes(const ModelFacts& facts, const ModelShape& shape, bool device) {
  const double part = static_cast<double>(shape.local_vocab) / static_cast<double>(shape.vocab);
  double bytes = 0;
  for (const auto& [kind, size] : device ? facts.device_memory_by_kind : facts.memory_by_kind) {
    if (kind == "vision" || kind == "skipped" || kind == "drafter") continue;  // the last is planned apart
    bytes += static_cast<double>(size) * (held_whole(kind) ? 1.0 : part);
  }
  return static_cast<int64_t>(bytes);
}

std::string human_bytes(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, units[unit]);
}

int64_t key_value_page_bytes(const Profile& profile, int64_t layers, int64_t kv_heads, int64_t head_dim) {
  const std::string format = profile.kv_format();
  const int64_t vectors = kPageTokens * layers * kv_heads * 2;
  if (format == "fp8") return vectors * (std::max<int64_t>(padded_head_dim(head_dim), head_dim) + 4);  // and a scale
  if (format == "bf16") return vectors * std::max<int64_t>(padded_head_dim(head_dim), head_dim) * 2;
  return float_page_bytes(layers, kv_heads, head_dim);
}

int64_t page_bytes(const Profile& profile, const ModelShape& shape) {
  return shape.row_page_bytes() + key_value_page_bytes(profile, shape.kv_layers, shape.kv_heads, shape.head_dim);
}

absl::StatusOr<int64_t> planned_pages(const Profile& profile, const ModelConfig& config) {
  if (profile.memory.kv_pages > 0) return profile.memory.kv_pages;
  const absl::StatusOr<ModelShape> widest = model_shape(config, {profile.cluster.world, 0});
  if (!widest.ok()) return widest.status();
  // A family without keys and values has pages all the same: they bound its tokens.
  const absl::StatusOr<DrafterPlan> drafter = plan_drafter(profile, config, {profile.cluster.world, 0});
  if (!drafter.ok()) return drafter.status();
  const int64_t bytes = std::max<int64_t>(page_bytes(profile, *widest) + drafter->page_bytes, 1);
  const int64_t pages = profile.memory.kv_bytes / bytes;
  if (pages < 1) {
    return absl::InvalidArgumentError(fmt::format("memory.kv_bytes {} is less than one page of {} tokens ({} bytes)",
                                                  profile.memory.kv_bytes, kPageTokens, bytes));
  }
  return std::min<int64_t>(pages, kMaxPages);
}

absl::StatusOr<int64_t> planned_snapshots(const Profile& profile, const ModelConfig& config) {
  const absl::StatusOr<ModelShape> widest = model_shape(config, {profile.cluster.world, 0});
  if (!widest.ok()) return widest.status();
  if (!profile.cache.enabled || widest->recurrent.empty()) return 0;
  return std::min<int64_t>(profile.cache.snapshot_bytes / snapshot_bytes(*widest), kMaxSnapshots);
}

int64_t MemoryPlan::total() const {
  int64_t bytes = 0;
  for (const MemoryItem& item : items) bytes += device && item.host ? 0 : item.bytes;
  return bytes;
}

int64_t MemoryPlan::host_total() const {
  int64_t bytes = 0;
  for (const MemoryItem& item : items) bytes += item.host ? item.bytes : 0;
  return bytes;
}

int64_t MemoryPlan::tokens_each(int sequences) const {
  // A window's tentative rows may reach past the last token.
  const int64_t tokens = pages / std::max(sequences, 1) * kPageTokens - kMaxWindow;
  return std::clamp<int64_t>(tokens, 0, context);
}

absl::StatusOr<MemoryPlan> make_memory_plan(const Profile& profile, const ModelConfig& whole, const ModelFacts& facts,
                                            int rank) {
  // Some files do not say whether they have an MTP layer: their tensors do.
  ModelConfig config = whole;
  if (!facts.has_mtp) config.mtp_layers = 0;
  if (!facts.has_drafter) config.dspark = {};
  if (rank < 0 || rank >= profile.cluster.world) {
    return absl::InvalidArgumentError(
        fmt::format("rank {} is outside the profile's cluster.world of {}", rank, profile.cluster.world));
  }
  const absl::StatusOr<ModelShape> shape = model_shape(config, {profile.cluster.world, rank});
  if (!shape.ok()) return shape.status();
  const absl::StatusOr<int64_t> pages = planned_pages(profile, config);
  if (!pages.ok()) return pages.status();
  MemoryPlan plan;
  plan.rank = rank;
  plan.device = profile.compute.backend == "cuda";
  plan.pages = *pages;
  const absl::StatusOr<DrafterPlan> drafter = plan_drafter(profile, config, {profile.cluster.world, rank}, &facts);
  if (!drafter.ok()) return drafter.status();
  plan.page_bytes = page_bytes(profile, *shape) + drafter->page_bytes;
  const absl::StatusOr<int64_t> snapshots = planned_snapshots(profile, config);
  if (!snapshots.ok()) return snapshots.status();
  plan.snapshots = *snapshots;
  plan.context = profile.model.context_length > 0 ? profile.model.context_length : shape->context_length;
  plan.lanes = profile.schedule.max_sequences;
  add_device_items(profile, config, facts, *shape, drafter->in_use, &plan);
  if (drafter->in_use) {
    plan.items.push_back({"drafter", drafter->weight_bytes + drafter->scratch_bytes,
                          fmt::format("its weights, and {} of scratch", human_bytes(drafter->scratch_bytes)), false});
  }
  if (rank == 0) {
    plan.items.push_back({"tokens", token_bytes(profile, plan), "histories and their index on rank 0", true});
    plan.items.push_back({"tokenizer", tokenizer_bytes(profile), "its tables", true});
  }
  const int64_t transport = profile.cluster.world > 1 ? kTransportBytes : 0;
  plan.items.push_back({"program", kProgramBytes + transport, "code, threads, transport", true});
  return plan;
}

absl::Status check_memory_plan(const MemoryPlan& plan, const Profile& profile, int64_t available) {
  if (profile.model.context_length > 0 && plan.tokens_each(1) < profile.model.context_length) {
    return absl::ResourceExhaustedError(
        fmt::format("model.context_length asks for {} tokens, but the pool's {} pages hold {} of one sequence: raise "
                    "memory.kv_bytes to {} or memory.kv_pages to {}, or lower model.context_length",
                    profile.model.context_length, plan.pages, plan.tokens_each(1),
                    human_bytes((profile.model.context_length / kPageTokens + 2) * plan.page_bytes),
                    profile.model.context_length / kPageTokens + 2));
  }
  if (available < 0 || plan.total() <= available - profile.memory.floor_free) return absl::OkStatus();
  const bool drafter =
      std::any_of(plan.items.begin(), plan.items.end(), [](const MemoryItem& item) { return item.name == "drafter"; });
  return absl::ResourceExhaustedError(
      fmt::format("rank {} needs {}, but {} are available and memory.floor_free keeps {}: lower memory.kv_bytes, "
                  "cache.snapshot_bytes, schedule.max_sequences or schedule.max_batch_rows, {}or use more ranks",
                  plan.rank, human_bytes(plan.total()), human_bytes(available), human_bytes(profile.memory.floor_free),
                  drafter ? "leave the block drafter out (draft.kind), " : ""));
}

std::string memory_plan_text(const MemoryPlan& plan) {
  std::string text;
  for (const MemoryItem& item : plan.items) {
    text += fmt::format("  {:<14}{:>12}  {}{}\n", item.name, human_bytes(item.bytes), item.note,
                        plan.device && item.host ? " (host)" : "");
  }
  text += fmt::format("  {:<14}{:>12}{}\n", "total", human_bytes(plan.total()),
                      plan.device ? fmt::format("  and {} of the host", human_bytes(plan.host_total())) : "");
  text += fmt::format("  {:<14}", "context");
  std::string separator;
  for (int sequences = 1;; sequences = std::min(2 * sequences, plan.lanes)) {
    text += fmt::format("{}{} x {} tokens", separator, sequences, plan.tokens_each(sequences));
    separator = ", ";
    if (sequences >= plan.lanes) break;
  }
  return text + "\n";
}

}  // namespace tensorfold
