// `tensorfold inspect`: what a checkpoint folder is, how it is cut, and what a rank of a world needs. Reads headers
// only.
#include "worker/checkpoint/inspect.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "coordinator/chat/chat_template.h"
#include "coordinator/commands/commands.h"
#include "coordinator/plan/memory_plan.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "worker/checkpoint/names.h"
#include "worker/model/model.h"

namespace tensorfold {
namespace {

struct InspectFlags {
  std::string model;
  int world = 0;
  int64_t context = 0;
  int sequences = 8;
  double bandwidth = 0;  // GB/s; 0: not asked
};

// Bytes of weights that this rank reads for one row: its share, the table's one row aside, of the experts only those
// that a row chooses.
int64_t rank_read_bytes(const ModelFacts& facts, const ModelConfig& config, const ModelShape& shape) {
  const auto bytes_of = [&](const char* kind) {
    const auto found = facts.memory_by_kind.find(kind);
    return found == facts.memory_by_kind.end() ? 0.0 : static_cast<double>(found->second);
  };
  const double part = static_cast<double>(shape.local_vocab) / static_cast<double>(shape.vocab);
  double bytes = static_cast<double>(rank_weight_bytes(facts, shape, false)) - bytes_of("embedding");
  if (facts.tied_head) bytes += bytes_of("embedding") * part;
  if (config.experts.count > 0) {
    const double idle = 1.0 - static_cast<double>(config.experts.per_token) / static_cast<double>(config.experts.count);
    bytes -= bytes_of("experts") * part * idle;
  }
  bytes -= bytes_of("mtp") * part;
  bytes -= bytes_of("n-gram tables") * part;  // a few rows of them
  return static_cast<int64_t>(bytes);
}

std::string tools_name(ToolSyntax syntax) {
  switch (syntax) {
    case ToolSyntax::kNone:
      return "no tool calls";
    case ToolSyntax::kTagged:
      return "tool calls in <tool_call>";
    case ToolSyntax::kArgumentKeys:
      return "tool calls in <tool_call> with <arg_key>";
    case ToolSyntax::kDsml:
      return "tool calls in DSML";
  }
  return "";
}

// What text goes in and out by. A folder without them serves token ids.
void print_text_parts(const std::string& dir) {
  const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(dir + "/tokenizer.json");
  std::cout << fmt::format("tokenizer   {}\n", tokenizer.ok() ? fmt::format("{} tokens", (*tokenizer)->vocab_size())
                                               : absl::IsNotFound(tokenizer.status())
                                                   ? std::string("none: token ids only")
                                                   : std::string(tokenizer.status().message()));
  const absl::StatusOr<ChatTemplate> chat = ChatTemplate::load(dir);
  if (!chat.ok()) {
    std::cout << fmt::format("template    {}\n", absl::IsNotFound(chat.status())
                                                     ? std::string("none: no chat")
                                                     : std::string(chat.status().message()));
    return;
  }
  std::cout << fmt::format("template    {} bytes; {}; {}\n", chat->source().size(),
                           chat->reply_format().reasoning ? "thinks in <think>" : "no thinking",
                           tools_name(chat->reply_format().tools));
}

void print_drafters(const ModelFacts& facts) {
  std::cout << fmt::format("drafter     {}\n", facts.has_mtp       ? "mtp (its own layer), copy"
                                               : facts.has_drafter ? "dspark (its own stages), copy"
                                                                   : "copy (no MTP layer in these files)");
}

std::string drafting_parameters(const ModelFacts& facts) {
  if (facts.has_mtp) {
    return fmt::format(", {:.2f} M of them in the MTP layer", static_cast<double>(facts.mtp_parameters) / 1e6);
  }
  if (!facts.has_drafter) return {};
  return fmt::format(", {:.2f} M of them in the block drafter", static_cast<double>(facts.drafter_parameters) / 1e6);
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
                           drafting_parameters(*facts));
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
  print_drafters(*facts);
  print_text_parts(flags.model);
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
  const auto slowest = [&](int world, int64_t tokens) -> absl::StatusOr<int64_t> {
    int64_t most = 0;
    for (int rank = 0; rank < world; ++rank) {
      const absl::StatusOr<ModelShape> shape = model_shape(config, {world, rank});
      if (!shape.ok()) return shape.status();
      const int64_t keys = tokens * shape->kv_layers * shape->kv_heads * shape->head_dim * 2 * 4;
      most = std::max(most, rank_read_bytes(*facts, config, *shape) + keys);
    }
    return most;
  };
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
      const int64_t weights = rank_weight_bytes(*facts, *shape, false);
      std::cout << fmt::format("{:>6} {:>5} {:>12} {:>12} {:>12} {:>12}\n", world, rank, human_bytes(weights),
                               human_bytes(kv), human_bytes(states), human_bytes(weights + kv + states));
    }
  }
  if (flags.bandwidth <= 0) return absl::OkStatus();
  std::cout << fmt::format(
      "\nserial decode at most, with {:g} GB/s on every rank and no time for anything but reading:\n", flags.bandwidth);
  std::cout << fmt::format("{:>6} {:>16} {:>16} {:>16}\n", "world", "read a token", "tokens/s at 0",
                           fmt::format("at {}", context));
  for (int world = 1; world <= widest; ++world) {
    if (flags.world != 0 && world != flags.world) continue;
    const absl::StatusOr<int64_t> empty = slowest(world, 0), full = slowest(world, context);
    if (!empty.ok()) return empty.status();
    if (!full.ok()) return full.status();
    const double bytes_a_second = flags.bandwidth * 1e9;
    std::cout << fmt::format("{:>6} {:>16} {:>16.1f} {:>16.1f}\n", world, human_bytes(*empty),
                             bytes_a_second / static_cast<double>(std::max<int64_t>(*empty, 1)),
                             bytes_a_second / static_cast<double>(std::max<int64_t>(*full, 1)));
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
  command->add_option("--bandwidth", flags->bandwidth, "GB/s that a rank reads: adds the decode ceiling")
      ->check(CLI::Range(0.1, 100000.0));
  command->add_option("--sequences", flags->sequences, "sequences at once, for the memory table")
      ->check(CLI::Range(1, 1024));
  command->callback([flags, exit_code] {
    const absl::Status status = run_inspect(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
