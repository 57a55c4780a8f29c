// `tensorfold bench`: what a model does on this machine, against what this machine can do.
#include "coordinator/commands/bench/bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>

#include "coordinator/commands/bench/shape_bench.h"
#include "coordinator/commands/commands.h"
#include "transport/base/communicator.h"
#include "transport/pass/plan.h"
#include "worker/checkpoint/generated.h"

namespace tensorfold {
namespace {

struct BenchFlags {
  BenchOptions model;
  ShapeBenchOptions shape;  // what both have stands in `model`
  std::string json;
  std::string svg;
  std::string write;
};

absl::Status write_file(const char* option, const std::string& path, const std::string& text) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream out(path);
  out << text;
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(fmt::format("{} {}: cannot be written", option, path));
}

absl::Status run_model(const BenchFlags& flags) {
  if (!flags.svg.empty()) return absl::InvalidArgumentError("--svg goes with --shape");
  if (!flags.write.empty()) return absl::InvalidArgumentError("--write goes with --shape");
  const absl::StatusOr<BenchReport> report = run_bench(flags.model);
  if (!report.ok()) return report.status();
  print_report(*report, std::cout);
  return write_file("--json", flags.json, report_json(*report) + "\n");
}

absl::Status run_shape(const BenchFlags& flags) {
  if (flags.model.transport != "local") {
    return absl::InvalidArgumentError(
        "--shape runs its ranks as threads of this process, whose caches can be set to any context; --transport ucx "
        "goes with --model");
  }
  if (!flags.write.empty()) return write_shape_checkpoint(flags.shape.shape, flags.shape.format, flags.write);
  ShapeBenchOptions options = flags.shape;
  options.world = flags.model.world;
  options.backend = flags.model.backend;
  options.widths = flags.model.widths;
  options.chunks = flags.model.chunks;
  options.seconds = flags.model.seconds;
  const absl::StatusOr<ShapeReport> report = run_shape_bench(options);
  if (!report.ok()) return report.status();
  print_shape_report(*report, std::cout);
  absl::Status status = write_file("--json", flags.json, shape_report_json(*report) + "\n");
  status.Update(write_file("--svg", flags.svg, shape_report_svg(*report)));
  return status;
}

void add_common(CLI::App& command, BenchFlags& flags) {
  BenchOptions& options = flags.model;
  command.add_option("--world", options.world, "ranks, all on this machine")->check(CLI::Range(1, kMaxWorld));
  command.add_option("--transport", options.transport, "local: ranks are threads; ucx: ranks are processes")
      ->check(CLI::IsMember({"local", "ucx"}));
  command.add_option("--backend", options.backend.backend, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  command.add_option("--isa", options.backend.isa, "instruction set; all give the same bits")
      ->check(CLI::IsMember({"auto", "avx512", "avx2", "neon", "portable"}));
  command.add_option("--threads", options.backend.threads, "threads of each rank; 0 shares the cores")
      ->check(CLI::Range(0, 1024));
  command.add_option("--device", options.backend.device, "cuda: GPU of all ranks; without it they take turns")
      ->check(CLI::Range(0, 63));
  command.add_option("--launch", options.backend.launch, "cuda: graph or eager; the same bits")
      ->check(CLI::IsMember({"graph", "eager"}));
  command.add_option("--exchange", options.backend.exchange, "cuda: how ranks' sums travel; auto measures")
      ->check(CLI::IsMember({"auto", "peer", "nccl", "pinned"}));
  command.add_option("--kv-format", options.backend.kv_format, "cuda: how keys and values are kept")
      ->check(CLI::IsMember({"bf16", "fp8"}));
  command
      .add_option("--precision", options.backend.precision,
                  "activations of families that round some: as the model does, or not at all")
      ->check(CLI::IsMember({"checkpoint", "full"}));
  command.add_option("--json", flags.json, "also write the figures to this file");
  command.add_option("--widths", options.widths, "rows of the passes to time")
      ->delimiter(',')
      ->check(CLI::Range(1, static_cast<int>(kMaxWindow)));
  command.add_option("--chunks", options.chunks, "prompt rows a pass; 64,256,512, on GPUs 2048")
      ->delimiter(',')
      ->check(CLI::Range(1, 8192));
  command.add_option("--seconds", options.seconds, "about how long to measure, loading apart")
      ->check(CLI::Range(0.01, 3600.0));
}

void add_model(CLI::App& command, BenchFlags& flags) {
  BenchOptions& options = flags.model;
  command.add_option("--context", options.context, "--model: tokens before a timed window")
      ->check(CLI::Range(1, 1 << 20));
  command.add_option("--prompt-tokens", options.prompt_tokens, "--model: length of the timed prompts")
      ->check(CLI::Range(1, 1 << 20));
  command.add_option("--reply-tokens", options.reply_tokens, "--model: length of the timed replies")
      ->check(CLI::Range(2, 1 << 16));
  command.add_option("--prompt", options.prompt, "--model: what the timed replies answer");
  command.add_option("--draft-model", options.drafter,
                     "--model: folder of a block drafter, whose replies are timed, too");
}

void add_shape(CLI::App& command, BenchFlags& flags) {
  ShapeBenchOptions& options = flags.shape;
  command.add_option("--format", options.format,
                     fmt::format("--shape: what the weights are in: {}", fmt::join(generated_formats(), ", ")));
  command.add_option("--contexts", options.contexts, "--shape: tokens that timed windows see")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  command
      .add_option("--prompt-contexts", options.prompt_contexts,
                  "--shape: positions where timed prompt passes end; 8192")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  command.add_option("--svg", flags.svg, "--shape: also draw the passes into this file");
  command.add_option("--write", flags.write,
                     "--shape: measure nothing, write the random weights as a checkpoint into this folder");
}

}  // namespace

void add_bench_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand("bench", "Measure a model against this machine's limits, in the same run");
  command->footer(report_legend() + "\n" + shape_report_legend());
  CLI::Option_group* what = command->add_option_group("what", "what is measured, one of");
  what->add_option("--model", flags->model.model, "folder of the checkpoint");
  what->add_option("--shape", flags->shape.shape,
                   "random weights of a shape's sizes: a name of deploy/shapes or a config.json-like file");
  add_bench_serve_command(*command, exit_code);
  add_common(*command, *flags);
  add_model(*command, *flags);
  add_shape(*command, *flags);
  command->callback([command, what, flags, exit_code] {
    if (!command->get_subcommands().empty()) return;  // which has run already
    if (what->count_all() != 1) throw CLI::RequiredError("one of --model and --shape, or the command serve");
    const absl::Status status = flags->shape.shape.empty() ? run_model(*flags) : run_shape(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
