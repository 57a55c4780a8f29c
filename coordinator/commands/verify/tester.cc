#include "coordinator/commands/verify/tester.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "coordinator/commands/verify/trace_recorder.h"
#include "kernels/cpu/cpu_ops.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

// Where states of the cells lie on disk while they run.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tensorfold-verify-XXXXXX").string();
    if (::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }  // empty: there is none, and no cell finds its state again

 private:
  std::string path_;
};

// Clusters and shards by what cells share.
class Bench {
 public:
  explicit Bench(const TesterOptions& options) : options_(options) {}

  // A decorated Ops may want to pack the weights itself, so its shards are its own.
  absl::StatusOr<ModelShards*> shards(int world, bool decorated) {
    if (shards_ != nullptr && shards_->world() == world && decorated_ == decorated) return shards_.get();
    cluster_.reset();
    shards_.reset();
    const BackendOptions packer = {
        .backend = options_.backend, .isa = "auto", .threads = 1, .precision = options_.precision};
    auto loaded = ModelShards::load_all(options_.model_dir, world, packer,
                                        decorated ? options_.decorate : ModelShards::Decorate(), options_.drafter);
    if (!loaded.ok()) return loaded.status();
    shards_ = *std::move(loaded);
    decorated_ = decorated;
    return shards_.get();
  }

  absl::StatusOr<LocalCluster*> cluster(const Cell& cell, const CellInputs& inputs, bool decorated) {
    const std::string key =
        fmt::format("{} {} {} {} {}", cell.world, cell.transport, cell.variant, cell.threads, decorated);
    if (cluster_ != nullptr && key == key_) return cluster_.get();
    absl::StatusOr<ModelShards*> weights = shards(cell.world, decorated && options_.decorate);
    if (!weights.ok()) return weights.status();
    cluster_.reset();
    LocalClusterOptions options;
    // The ways between GPUs need some transport to find each other by.
    const bool between_gpus = cell.transport == "peer" || cell.transport == "nccl";
    options.transport = between_gpus ? "local" : cell.transport;
    options.backend = {.backend = options_.backend, .isa = "auto", .threads = cell.threads};
    if (options_.backend == "cpu") {
      options.backend.isa = cell.variant;
    } else {
      options.backend.launch = cell.variant;
      options.backend.kv_format = options_.kv_format;
      options.backend.exchange = between_gpus ? cell.transport : "staged";
    }
    options.runner.slots = cells_slots();
    options.runner.pages = cells_pages(inputs);
    options.runner.snapshots = 1;
    options.state_directory = folder_.path();
    options.state_owner = {.build = "verify", .fingerprint = "verify", .rank = 0, .world = 1};
    if (decorated) options.decorate = options_.decorate;
    auto started = LocalCluster::start(**weights, options);
    if (!started.ok()) return started.status();
    cluster_ = *std::move(started);
    key_ = key;
    return cluster_.get();
  }

 private:
  const TesterOptions& options_;
  TemporaryFolder folder_;  // outlives the cluster
  bool decorated_ = false;
  std::unique_ptr<ModelShards> shards_;
  std::unique_ptr<LocalCluster> cluster_;
  std::string key_;
};

Cell reference_cell(const Axes& axes, bool sampled) {
  Cell cell;
  cell.variant = axes.variants.front();
  cell.sampled = sampled;
  return cell;
}

std::string compare(const CellResult& reference, const CellResult& run) {
  for (size_t i = 0; i < std::min(reference.reply.size(), run.reply.size()); ++i) {
    if (reference.reply[i] != run.reply[i]) {
      return fmt::format("reply token {} is {} instead of {}", i, run.reply[i], reference.reply[i]);
    }
  }
  for (size_t i = 0; i < std::min(reference.rows.size(), run.rows.size()); ++i) {
    if (reference.rows[i] != run.rows[i]) {
      return fmt::format("the logits of position {} have other bits", reference.rows[i].first);
    }
  }
  return "the runs have different rows";
}

// Runs a cell once more with every intermediate value hashed.
absl::StatusOr<std::vector<std::unique_ptr<TraceRecorder>>> traced(Bench& bench, const Cell& cell,
                                                                   const CellInputs& inputs, bool decorated,
                                                                   const std::vector<uint32_t>& expected) {
  absl::StatusOr<LocalCluster*> cluster = bench.cluster(cell, inputs, decorated);
  if (!cluster.ok()) return cluster.status();
  std::vector<std::unique_ptr<TraceRecorder>> traces;
  for (int rank = 0; rank < cell.world; ++rank) {
    traces.push_back(std::make_unique<TraceRecorder>((*cluster)->ops(rank), cell_slot(cell), spare_slot()));
    (*cluster)->runner(rank).set_trace(traces.back().get());
  }
  const absl::StatusOr<CellResult> result = run_cell((*cluster)->executor(), cell, inputs, expected);
  for (int rank = 0; rank < cell.world; ++rank) (*cluster)->runner(rank).set_trace(nullptr);
  if (!result.ok()) return result.status();
  return traces;
}

absl::StatusOr<std::string> explain(const TesterOptions& options, const Axes& axes, const Cell& cell,
                                    const CellInputs& inputs, const std::vector<uint32_t>& expected) {
  Bench bench(options);
  auto reference = traced(bench, reference_cell(axes, cell.sampled), inputs, false, {});
  if (!reference.ok()) return reference.status();
  auto run = traced(bench, cell, inputs, true, expected);
  if (!run.ok()) return run.status();
  const auto view = [](const std::vector<std::unique_ptr<TraceRecorder>>& traces) {
    std::vector<const TraceRecorder*> out;
    out.reserve(traces.size());
    for (const std::unique_ptr<TraceRecorder>& trace : traces) out.push_back(trace.get());
    return out;
  };
  const std::string place = first_difference(view(*reference), view(*run));
  return place.empty() ? std::string("no intermediate value differs: look at the head and the sampler") : place;
}

absl::Status add_schedules(const TesterOptions& options, const Axes& axes, int widest, const CellInputs& inputs,
                           TesterReport* report) {
  ScheduleOptions schedules;
  schedules.model_dir = options.model_dir;
  schedules.drafter = options.drafter;
  schedules.backend = options.backend;
  schedules.kv_format = options.kv_format;
  schedules.precision = options.precision;
  schedules.worlds = {1};
  for (const int world : axes.worlds) {
    if (world > 1 && world <= 3 && world <= widest) schedules.worlds.push_back(world);
  }
  absl::StatusOr<std::vector<ScheduleOutcome>> outcomes = run_schedules(schedules, inputs);
  if (!outcomes.ok()) return outcomes.status();
  report->schedules = *std::move(outcomes);
  report->different += static_cast<size_t>(std::count_if(report->schedules.begin(), report->schedules.end(),
                                                         [](const ScheduleOutcome& outcome) { return !outcome.same; }));
  return absl::OkStatus();
}

}  // namespace

CellInputs make_inputs(uint32_t vocabulary, uint32_t prompt_tokens, uint32_t reply_tokens, uint64_t seed) {
  uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 0x1234567;
  const auto next = [&state](uint32_t below) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<uint32_t>((state >> 33) % below);
  };
  const uint32_t low = std::min(8u, vocabulary / 4);
  const uint32_t usable = std::max(1u, vocabulary - low - std::min(32u, vocabulary / 8));
  const auto prompt = [&](uint32_t length) {
    std::vector<uint32_t> ids;
    for (uint32_t i = 0; i < length; ++i) {
      // Runs that come again give the copy drafter something to find.
      ids.push_back(i >= 12 && i % 12 < 6 ? ids[i - 12] : low + next(usable));
    }
    return ids;
  };
  CellInputs inputs;
  inputs.prompt = prompt(prompt_tokens);
  inputs.mates = {prompt(prompt_tokens / 2 + 3), prompt(9), prompt(prompt_tokens + 17)};
  inputs.reply_tokens = reply_tokens;
  inputs.seed = seed;
  return inputs;
}

absl::StatusOr<TesterReport> run_tester(const TesterOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  Axes axes = options.axes;
  if (options.backend == "cuda") {
    if (axes.variants.empty()) axes.variants = {"eager", "graph"};
    axes.threads = {1};
  }
  if (axes.variants.empty()) axes.variants = available_isas();
  Bench bench(options);
  absl::StatusOr<ModelShards*> alone = bench.shards(1, false);
  if (!alone.ok()) return alone.status();
  const ModelShape shape = (*alone)->shape(0);
  CellInputs inputs =
      make_inputs(static_cast<uint32_t>(shape.vocab), options.prompt_tokens, options.reply_tokens, options.seed);
  inputs.has_states = !shape.recurrent.empty();
  inputs.block_drafts = (*alone)->block_drafts();
  int widest = static_cast<int>(shape.slices.widest_world());
  if (const BlockDrafter* drafter = (*alone)->drafter(0); drafter != nullptr) {
    widest = std::min(widest, static_cast<int>(drafter->shape().slices.widest_world()));
  }
  std::vector<Cell> cells = product(axes, shape.has_mtp, inputs.block_drafts > 0, widest);
  if (!options.full) cells = pairwise_sample(cells, options.sample);

  TesterReport report;
  CellResult reference[2];
  for (const bool sampled : {false, true}) {
    const Cell cell = reference_cell(axes, sampled);
    absl::StatusOr<LocalCluster*> cluster = bench.cluster(cell, inputs, false);
    if (!cluster.ok()) return cluster.status();
    absl::StatusOr<CellResult> result = run_cell((*cluster)->executor(), cell, inputs, {});
    if (!result.ok()) return result.status();
    reference[sampled ? 1 : 0] = *std::move(result);
  }
  report.greedy_hash = reference[0].hash();
  report.sampled_hash = reference[1].hash();

  for (const Cell& cell : cells) {
    absl::StatusOr<LocalCluster*> cluster = bench.cluster(cell, inputs, true);
    if (!cluster.ok()) return cluster.status();
    const CellResult& expected = reference[cell.sampled ? 1 : 0];
    absl::StatusOr<CellResult> result = run_cell((*cluster)->executor(), cell, inputs, expected.reply);
    if (!result.ok()) {
      return absl::Status(result.status().code(),
                          fmt::format("{}: {}", cell.name(), std::string(result.status().message())));
    }
    CellOutcome& outcome = report.cells.emplace_back();
    outcome.cell = cell;
    outcome.hash = result->hash();
    outcome.drafted = result->drafted;
    outcome.accepted = result->accepted;
    outcome.same = outcome.hash == expected.hash();
    if (options.progress) options.progress(report.cells.size(), cells.size());
    if (outcome.same) continue;
    ++report.different;
    const absl::StatusOr<std::string> place = explain(options, axes, cell, inputs, expected.reply);
    outcome.difference =
        fmt::format("{}; first at {}", compare(expected, *result),
                    place.ok() ? *place : fmt::format("(tracing failed: {})", std::string(place.status().message())));
    if (report.different >= options.stop_after) break;
  }
  if (options.schedules && !options.decorate) {
    if (absl::Status status = add_schedules(options, axes, widest, inputs, &report); !status.ok()) return status;
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

void print_report(const TesterReport& report, bool every_cell, std::ostream& out) {
  if (every_cell) {
    for (const CellOutcome& outcome : report.cells) {
      out << fmt::format("{}  {}  {}  accepted {}/{}\n", outcome.same ? "same     " : "DIFFERENT", outcome.hash,
                         outcome.cell.name(), outcome.accepted, outcome.drafted);
    }
  }
  // By axis value: how many cells, how many differ, and the hashes seen.
  struct Line {
    size_t cells = 0;
    size_t different = 0;
    uint64_t drafted = 0;
    uint64_t accepted = 0;
    std::map<std::string, size_t> hashes;
  };
  std::map<std::string, Line> lines;
  for (const CellOutcome& outcome : report.cells) {
    const Cell& cell = outcome.cell;
    for (const std::string& name :
         {fmt::format("world      {}", cell.world),
          fmt::format("transport  {}", cell.world == 1 ? std::string("-") : cell.transport),
          fmt::format("variant    {}", cell.variant), fmt::format("threads    {}", cell.threads),
          fmt::format("draft      {} width {}", draft_name(cell.draft), cell.width),
          fmt::format("chunk      {}", cell.chunk == 0 ? std::string("all") : fmt::format("{}", cell.chunk)),
          fmt::format("batch      {}", cell.mates ? "with mates" : "alone"),
          fmt::format("cache      {}", cache_name(cell.cache)),
          fmt::format("sampling   {}", cell.sampled ? "sampled" : "greedy")}) {
      Line& line = lines[name];
      ++line.cells;
      line.different += outcome.same ? 0 : 1;
      line.drafted += outcome.drafted;
      line.accepted += outcome.accepted;
      ++line.hashes[outcome.hash];
    }
  }
  for (const ScheduleOutcome& outcome : report.schedules) {
    Line& line = lines["schedule   " + schedule_name(outcome.schedule)];
    ++line.cells;
    line.different += outcome.same ? 0 : 1;
    ++line.hashes[outcome.hash];
  }
  out << fmt::format("{:<28} {:>6} {:>9}  {:>13}  hashes\n", "axis", "cells", "different", "kept drafts");
  for (const auto& [name, line] : lines) {
    std::string hashes;
    size_t shown = 0;
    for (const auto& [hash, count] : line.hashes) {
      if (shown++ == 4) {
        hashes += fmt::format("and {} more", line.hashes.size() - 4);
        break;
      }
      hashes += hash + " ";
    }
    out << fmt::format("{:<28} {:>6} {:>9}  {:>6}/{:<6}  {}\n", name, line.cells, line.different, line.accepted,
                       line.drafted, hashes);
  }
  for (const CellOutcome& outcome : report.cells) {
    if (!outcome.same) out << fmt::format("DIFFERENT: {}: {}\n", outcome.cell.name(), outcome.difference);
  }
  for (const ScheduleOutcome& outcome : report.schedules) {
    if (!outcome.same) out << fmt::format("DIFFERENT: {}: {}\n", outcome.name(), outcome.hash);
  }
  out << fmt::format("reference: greedy {}, sampled {}; {} cells, {} different, {:.1f} s\n", report.greedy_hash,
                     report.sampled_hash, report.cells.size() + report.schedules.size(), report.different,
                     report.seconds);
}

}  // namespace tensorfold
