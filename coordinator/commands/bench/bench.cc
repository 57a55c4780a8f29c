#include "coordinator/commands/bench/bench.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/commands/bench/engine_bench.h"
#include "coordinator/commands/bench/limits.h"
#include "coordinator/commands/bench/pass_bench.h"
#include "coordinator/commands/bench/world.h"

namespace tensorfold {
namespace {

// Everything is measured in so many turns, one after the other, so that a busy moment does not fall on one figure.
constexpr int kTurns = 4;

std::vector<DraftKind> drafters(bool has_mtp, bool has_block) {
  std::vector<DraftKind> kinds = {DraftKind::kNone, DraftKind::kCopy};
  if (has_mtp) kinds.push_back(DraftKind::kMtp);
  if (has_block) kinds.push_back(DraftKind::kBlock);
  kinds.push_back(DraftKind::kAuto);
  return kinds;
}

int64_t pages_needed(const BenchOptions& options) {
  const int64_t windows = std::max(options.context, options.prompt_tokens) + kWindowPositions + kMaxWindow;
  const int64_t reply = static_cast<int64_t>(options.prompt.size()) + 512 + options.reply_tokens + 2 * kMaxWindow;
  return std::max(windows, reply) / kPageTokens + 2;
}

absl::Status check_fits(const BenchOptions& options, const ModelShape& shape) {
  const int64_t needed = std::max<int64_t>(options.context + kWindowPositions, options.prompt_tokens) + kMaxWindow;
  if (needed <= shape.context_length || shape.context_length == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("--context {} and the windows after it need {} positions, the model has {}", options.context, needed,
                  shape.context_length));
}

}  // namespace

std::vector<int> default_chunks(const std::string& backend) {
  return backend == "cpu" ? std::vector<int>{64, 256, 512} : std::vector<int>{2048};
}

absl::StatusOr<BenchReport> run_bench(const BenchOptions& options) {
  const std::vector<int> chunks = options.chunks.empty() ? default_chunks(options.backend.backend) : options.chunks;
  BenchReport report;
  report.model = options.model;
  report.world = options.world;
  report.transport = options.transport;
  report.context = options.context;
  BenchWorldOptions world_options;
  world_options.model = options.model;
  world_options.drafter = DrafterChoice(options.drafter, DrafterChoice::Own::kIfThere);
  world_options.world = options.world;
  world_options.transport = options.transport;
  world_options.backend = options.backend;
  world_options.runner.slots = 1;
  world_options.runner.pages = pages_needed(options);
  world_options.link_rounds = std::clamp(static_cast<int>(options.seconds * 200), 20, 5000);
  auto world = BenchWorld::open(world_options);
  if (!world.ok()) return world.status();
  const ModelShape& shape = (*world)->shape();
  if (absl::Status status = check_fits(options, shape); !status.ok()) return status;
  report.backend = (*world)->backend();
  report.threads = (*world)->threads();
  report.processes = (*world)->processes();
  report.weights = (*world)->weights();
  report.links = (*world)->links();

  EngineBenchOptions replies;
  auto prompt = bench_prompt(options.model, options.prompt, shape.vocab);
  if (!prompt.ok()) return prompt.status();
  replies.prompt = *std::move(prompt);
  auto limits = make_limit_meter(options.backend, report.threads * options.world, 1);
  if (!limits.ok()) return limits.status();
  const double figures = static_cast<double>(options.widths.size() + chunks.size() + 2);
  const double seconds = options.seconds * 0.7 / kTurns / figures;  // of one figure in one turn
  PassBench passes((*world)->executor(), shape.vocab, options.context);
  report.widths.resize(options.widths.size());
  report.prompts.resize(chunks.size());
  for (int turn = 0; turn < kTurns; ++turn) {
    if (absl::Status status = (*limits)->measure(seconds); !status.ok()) return status;
    for (size_t i = 0; i < options.widths.size(); ++i) {
      absl::Status status = passes.measure_window(options.widths[i], seconds, &report.widths[i]);
      if (!status.ok()) return status;
    }
    if (absl::Status status = (*limits)->measure(seconds); !status.ok()) return status;
    for (size_t i = 0; i < chunks.size(); ++i) {
      absl::Status status = passes.measure_prompt(chunks[i], options.prompt_tokens, seconds, &report.prompts[i]);
      if (!status.ok()) return status;
    }
  }
  if (absl::Status status = passes.release(); !status.ok()) return status;
  report.limits = (*limits)->limits();

  const std::vector<int32_t>& ends = (*world)->config().eos_token_ids;
  replies.end_ids.assign(ends.begin(), ends.end());
  replies.tokens = static_cast<uint32_t>(options.reply_tokens);
  replies.pages = world_options.runner.pages;
  replies.block_drafts = (*world)->block_drafts();
  const std::vector<DraftKind> kinds = drafters(shape.has_mtp, (*world)->block_drafts() > 0);
  replies.seconds = options.seconds * 0.3 / static_cast<double>(kinds.size());
  for (const DraftKind kind : kinds) {
    auto figure = bench_decode((*world)->executor(), shape, kind, replies);
    if (!figure.ok()) return figure.status();
    report.decodes.push_back(*std::move(figure));
    if (report.decodes.back().token_sha != report.decodes[0].token_sha) {
      return absl::InternalError(fmt::format("drafts \"{}\" changed the reply: token_sha {} and {}",
                                             report.decodes.back().draft, report.decodes.back().token_sha,
                                             report.decodes[0].token_sha));
    }
  }
  return report;
}

}  // namespace tensorfold
