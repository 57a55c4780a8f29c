// `tensorfold inspect`: what a checkpoint folder is, how it is cut, and what a rank of a world needs. Reads headers
// only.
#include "worker/checkpoint/inspect.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "coordinator/commands/commands.h"
#include "worker/checkpoint/names.h"
#include "worker/model/model.h"

namespace tensorfold {
namespace {

struct InspectFlags {
  std::string model;
  int world = 0;
  int64_t context = 0;
  int sequences = 8;
};

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

// The part of the weights that rank `rank` of `world` holds, from the slices of each dimension.
int64_t rank_weight_bytes(const ModelFacts& facts, const ModelShape& shape) {
  // The embedding is whole on every rank, and a tied head is a view of it; what is cut goes by this rank's share of the
  // vocabulary, the finest cut.
  const double part = static_cast<double>(shape.local_vocab) / static_cast<double>(shape.vocab);
  double bytes = 0;
  for (const auto& [kind, whole] : facts.memory_by_kind) {
    if (kind == "vision" || kind == "skipped") continue;
    const bool replicated =
        kind == "embedding" || kind == "norms" || kind == "router" || kind == "streams" || kind == "indexer";
    bytes += static_cast<double>(whole) * (replicated ? 1.0 : part);
  }
  return static_cast<int64_t>(bytes);
}

absl::Status run_inspect(const InspectFlags& flags) {
  const absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::open(flags.model);
  if (!checkpoint.ok()) return checkpoint.status();
  const absl::StatusOr<ModelFacts> facts = inspect(**checkpoint);
  if (!facts.ok()) return facts.status();
  const ModelConfig& config = (*checkpoint)->config();
  const absl::StatusOr<ModelShape> whole = model_shape(config, {1, 0});
  if (!whole.ok()) return whole.status();
  std::cout << fmt::format("family      {} ({})\n", facts->family, facts->model_type);
  std::cout << fmt::format("parameters  {:.2f} M{}\n", static_cast<double>(facts->parameters) / 1e6,
                           facts->has_mtp ? fmt::format(", {:.2f} M of them in the MTP layer",
                                                        static_cast<double>(facts->mtp_parameters) / 1e6)
                                          : std::string());
  std::cout << fmt::format("files       {} in {}\n", human_bytes(facts->file_bytes), (*checkpoint)->file_list());
  for (const auto& [format, bytes] : facts->bytes_by_format) {
    std::cout << fmt::format("format      {}: {}\n", format, human_bytes(bytes));
  }
  for (const auto& [kind, bytes] : facts->bytes_by_kind) {
    std::cout << fmt::format("  {:<14}{}\n", kind, human_bytes(bytes));
  }
  std::cout << fmt::format("layers      {} ({} attention, {} gated delta net{})\n", facts->layers,
                           facts->full_attention_layers, facts->linear_attention_layers,
                           facts->mamba2_layers > 0 ? fmt::format(", {} Mamba2", facts->mamba2_layers) : std::string());
  std::cout << fmt::format("context     {} tokens\n", whole->context_length);
  std::cout << fmt::format("hash        {} (names, shapes, sizes)\n", facts->header_hash.substr(0, 16));
  for (const std::string& note : facts->notes) std::cout << fmt::format("note        {}\n", note);
  std::cout << "slices      ";
  for (size_t i = 0; i < whole->slices.dimensions.size(); ++i) {
    const SlicePlan::Dimension& dimension = whole->slices.dimensions[i];
    std::cout << fmt::format("{}{} {}: {} slices", i > 0 ? "; " : "", dimension.units, dimension.name,
                             dimension.slices);
  }
  const int64_t widest = whole->slices.widest_world();
  std::cout << fmt::format("\nworlds      1 to {}\n", widest);

  const int64_t context = flags.context > 0 ? flags.context : std::min<int64_t>(whole->context_length, 8192);
  std::cout << fmt::format("\nmemory per rank for {} sequence{} of {} tokens (kv f32):\n", flags.sequences,
                           flags.sequences == 1 ? "" : "s", context);
  std::cout << fmt::format("{:>6} {:>5} {:>12} {:>12} {:>12} {:>12}\n", "world", "rank", "weights", "keys/values",
                           "states", "total");
  for (int world = 1; world <= widest; ++world) {
    if (flags.world != 0 && world != flags.world) continue;
    for (int rank = 0; rank < world; ++rank) {
      const absl::StatusOr<ModelShape> shape = model_shape(config, {world, rank});
      if (!shape.ok()) return shape.status();
      const int64_t pages = (context + kPageTokens - 1) / kPageTokens * flags.sequences;
      const int64_t kv = pages * kPageTokens * shape->kv_layers * shape->kv_heads * shape->head_dim * 2 * 4 +
                         shape->row_page_bytes() * pages;
      int64_t states = 0;
      for (const StateShape& layer : shape->recurrent) states += state_bytes(layer);
      states *= flags.sequences;
      const int64_t weights = rank_weight_bytes(*facts, *shape);
      std::cout << fmt::format("{:>6} {:>5} {:>12} {:>12} {:>12} {:>12}\n", world, rank, human_bytes(weights),
                               human_bytes(kv), human_bytes(states), human_bytes(weights + kv + states));
    }
  }
  return absl::OkStatus();
}

}  // namespace

void add_inspect_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* command =
      app.add_subcommand("inspect", "Family, sizes, format, slices and memory per rank of a checkpoint folder");
  command->add_option("model", flags->model, "folder of the checkpoint")->required();
  command->add_option("--world", flags->world, "only this world; 0: every legal one")->check(CLI::Range(0, 8));
  command->add_option("--context", flags->context, "tokens a sequence, for the memory table; 0: up to 8192");
  command->add_option("--sequences", flags->sequences, "sequences at once, for the memory table")
      ->check(CLI::Range(1, 1024));
  command->callback([flags, exit_code] {
    const absl::Status status = run_inspect(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
