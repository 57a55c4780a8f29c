#include "coordinator/commands/bench/shape_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "coordinator/commands/bench/bench.h"
#include "coordinator/commands/bench/pass_bench.h"
#include "coordinator/commands/bench/shape_files.h"
#include "coordinator/commands/bench/shape_world.h"
#include "coordinator/commands/bench/world.h"
#include "worker/checkpoint/generated.h"
#include "worker/checkpoint/inspect.h"
#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/safetensors_write.h"

namespace tensorfold {
namespace {

constexpr int kTurns = 4;  // of everything, so that a busy moment does not fall on one figure
constexpr int64_t kPromptContext = 8192;

int64_t whole_pages(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens * kPageTokens; }

// A prompt pass: `chunk` rows that end at `context`, or begin at 0 when they are more.
struct PromptCase {
  int chunk = 0;
  int64_t context = 0;
  int64_t end() const { return whole_pages(std::max<int64_t>(chunk, context)); }
};

// What is measured, and how many positions the caches need for it.
struct Cases {
  std::vector<int64_t> contexts;  // ascending multiples of kPageTokens
  std::vector<PromptCase> prompts;
  int64_t positions = 0;
  std::vector<std::string> left_out;
};

int distinct_gpus(const ShapeBenchOptions& options) {
  std::set<int> gpus;
  for (int rank = 0; rank < options.world; ++rank) gpus.insert(gpu_of_rank(options.backend, rank));
  return static_cast<int>(gpus.size());
}

// Bytes that one token takes in the caches of the ranks that share rank 0's memory.
int64_t token_bytes(const ShapeWorld& world, const ShapeBenchOptions& options) {
  int64_t bytes = 0;
  for (int rank = 0; rank < options.world; ++rank) {
    if (gpu_of_rank(options.backend, rank) != gpu_of_rank(options.backend, 0)) continue;
    const ModelShape& shape = world.shape(rank);
    bytes += 2 * shape.kv_layers * shape.kv_heads * shape.head_dim * kv_value_bytes(options.backend);
  }
  return bytes;
}

// Why so many positions cannot be held; empty if they can.
std::string obstacle(int64_t positions, const ModelShape& shape, int64_t bytes_a_token, int64_t available) {
  if (shape.context_length > 0 && positions > shape.context_length) {
    return fmt::format("the model has {} positions", shape.context_length);
  }
  const int64_t usable = available - available / 16;  // activations want some
  if (positions > usable / std::max<int64_t>(bytes_a_token, 1)) {
    return fmt::format("its keys and values need {:.1f} GB, {:.1f} GB of memory are left",
                       static_cast<double>(positions) * static_cast<double>(bytes_a_token) * 1e-9,
                       static_cast<double>(available) * 1e-9);
  }
  if (positions / kPageTokens > kMaxPages) return fmt::format("a cache has at most {} pages", kMaxPages);
  return "";
}

absl::StatusOr<Cases> choose_cases(const ShapeBenchOptions& options, const ShapeWorld& world) {
  const auto available = memory_available(options.backend);
  if (!available.ok()) return available.status();
  const ModelShape& shape = world.shape(0);
  const int64_t bytes = token_bytes(world, options);
  Cases cases;
  const auto fits = [&](const std::string& what, int64_t positions) {
    const std::string reason = obstacle(positions, shape, bytes, *available);
    if (!reason.empty()) cases.left_out.push_back(fmt::format("{}: {}", what, reason));
    if (reason.empty()) cases.positions = std::max(cases.positions, positions);
    return reason.empty();
  };
  std::set<int64_t> contexts;
  for (const int64_t context : options.contexts) contexts.insert(whole_pages(context));
  for (const int64_t context : contexts) {
    if (fits(fmt::format("a context of {} tokens", context), context)) cases.contexts.push_back(context);
  }
  std::vector<int64_t> ends = options.prompt_contexts;
  if (ends.empty()) {
    ends.push_back(shape.context_length > 0 ? std::min(kPromptContext, shape.context_length) : kPromptContext);
  }
  const std::vector<int> chunks = options.chunks.empty() ? default_chunks(options.backend.backend) : options.chunks;
  for (const int64_t end : ends) {
    for (const int chunk : chunks) {
      const PromptCase one{chunk, end};
      if (fits(fmt::format("a prompt pass of {} rows up to position {}", chunk, one.end()), one.end())) {
        cases.prompts.push_back(one);
      }
    }
  }
  if (cases.contexts.empty() && cases.prompts.empty()) {
    std::string reasons;
    for (const std::string& sentence : cases.left_out) reasons += (reasons.empty() ? "" : "; ") + sentence;
    return absl::ResourceExhaustedError(fmt::format("{}: nothing can be measured: {}", options.shape, reasons));
  }
  return cases;
}

absl::Status measure(const ShapeBenchOptions& options, const Cases& cases, PassBench& passes, LimitMeter& limits,
                     ShapeReport* report) {
  const size_t windows = cases.contexts.size() * options.widths.size();
  const double seconds = options.seconds / kTurns / static_cast<double>(windows + cases.prompts.size() + 2);
  for (const int64_t context : cases.contexts) {
    ContextFigure& figure = report->contexts.emplace_back();
    figure.context = context;
    figure.widths.resize(options.widths.size());
  }
  report->prompts.resize(cases.prompts.size());
  for (int turn = 0; turn < kTurns; ++turn) {
    if (absl::Status status = limits.measure(seconds); !status.ok()) return status;
    for (ContextFigure& context : report->contexts) {
      passes.use_context(context.context);
      for (size_t i = 0; i < options.widths.size(); ++i) {
        absl::Status status = passes.measure_window(options.widths[i], seconds, &context.widths[i]);
        if (!status.ok()) return status;
      }
    }
    if (absl::Status status = limits.measure(seconds); !status.ok()) return status;
    for (size_t i = 0; i < cases.prompts.size(); ++i) {
      const PromptCase& one = cases.prompts[i];
      absl::Status status = passes.measure_chunk(one.chunk, one.context, seconds, &report->prompts[i]);
      if (!status.ok()) return status;
    }
  }
  report->limits = limits.limits();
  return absl::OkStatus();
}

// Keys and values that a pass reads, by what the caches really take.
void count_keys(const ModelConfig& config, const ShapeWorld& world, int64_t positions, ShapeReport* report) {
  const int64_t attention_layers = config.count(LayerKind::kFullAttention);
  const double token = static_cast<double>(world.kv_bytes()) / static_cast<double>(positions) *
                       static_cast<double>(attention_layers) /
                       static_cast<double>(std::max<int64_t>(world.shape(0).kv_layers, 1));  // the MTP layer rests
  for (ContextFigure& context : report->contexts) {
    context.kv_bytes = static_cast<int64_t>(token * static_cast<double>(context.context));
  }
  report->attention_values = config.heads * config.head_dim * attention_layers;
  report->state_bytes = world.state_bytes();
}

}  // namespace

absl::Status write_shape_checkpoint(const std::string& shape, const std::string& format, const std::string& folder) {
  const absl::StatusOr<std::string> path = find_shape(shape);
  if (!path.ok()) return path.status();
  const absl::StatusOr<ModelConfig> config = read_shape(*path);
  if (!config.ok()) return config.status();
  const auto source = GeneratedCheckpoint::create(*config, format, *path);
  if (!source.ok()) return source.status();
  absl::StatusOr<std::string> text = read_text_file(*path, kMaxConfigBytes);
  if (!text.ok()) return text.status();
  const std::string config_text = (*source)->with_quantization(*text);

  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::InvalidArgumentError(fmt::format("--write {}: {}", folder, error.message()));
  const std::filesystem::path config_path = std::filesystem::path(folder) / "config.json";
  const std::filesystem::path weights_path = std::filesystem::path(folder) / "model.safetensors";
  for (const auto& file : {config_path, weights_path}) {
    if (std::filesystem::exists(file, error)) {
      return absl::InvalidArgumentError(fmt::format("--write {}: {} is there already", folder, file.string()));
    }
  }
  std::vector<TensorInfo> tensors;
  for (const std::string& name : (*source)->names()) tensors.push_back(*(*source)->find(name));
  if (absl::Status status = write_safetensors(weights_path.string(), tensors); !status.ok()) return status;
  std::ofstream out(config_path);
  out << config_text << "\n";
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(fmt::format("{}: cannot be written", config_path.string()));
}

absl::StatusOr<ShapeReport> run_shape_bench(const ShapeBenchOptions& options) {
  const absl::StatusOr<std::string> path = find_shape(options.shape);
  if (!path.ok()) return path.status();
  const absl::StatusOr<ModelConfig> config = read_shape(*path);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::unique_ptr<GeneratedCheckpoint>> source =
      GeneratedCheckpoint::create(*config, options.format, *path);
  if (!source.ok()) return source.status();
  const absl::StatusOr<ModelFacts> facts = inspect_tensors(**source);
  if (!facts.ok()) return facts.status();

  ShapeWorldOptions world_options;
  world_options.world = options.world;
  world_options.backend = options.backend;
  world_options.backend.threads = rank_threads(options.backend.threads, options.world);
  world_options.link_rounds = std::clamp(static_cast<int>(options.seconds * 200), 20, 5000);
  auto world = ShapeWorld::load(**source, world_options);
  if (!world.ok()) return world.status();
  source->reset();

  const bool cpu = options.backend.backend == "cpu";
  ShapeReport report;
  report.shape = options.shape;
  report.format = options.format;
  report.kv_format = cpu ? "f32" : options.backend.kv_format;
  report.backend = (*world)->backend();
  report.world = options.world;
  report.gpus = cpu ? 0 : distinct_gpus(options);
  report.threads = cpu ? world_options.backend.threads : 0;
  report.parameters = facts->parameters;
  report.weights = (*world)->weights();
  report.links = (*world)->links();
  absl::StatusOr<Cases> cases = choose_cases(options, **world);
  if (!cases.ok()) return cases.status();
  report.left_out = cases->left_out;
  auto limits = make_limit_meter(options.backend, world_options.backend.threads * options.world, report.gpus);
  if (!limits.ok()) return limits.status();
  const int64_t pages = cases->positions / kPageTokens + kSparePages;
  if (absl::Status status = (*world)->start(pages); !status.ok()) return status;
  PassBench passes((*world)->executor(), (*world)->shape(0).vocab,
                   [&](int64_t tokens) { return (*world)->assume_context(tokens); });
  if (absl::Status status = measure(options, *cases, passes, **limits, &report); !status.ok()) return status;
  count_keys(*config, **world, pages * kPageTokens, &report);
  if (absl::Status status = passes.release(); !status.ok()) return status;
  return report;
}

}  // namespace tensorfold
