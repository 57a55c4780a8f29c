// `tensorfold bench`: what a model does on this machine, against what this machine can do.
#include "coordinator/commands/bench/bench.h"

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>

#include "coordinator/commands/commands.h"
#include "transport/base/communicator.h"
#include "transport/pass/plan.h"

namespace tensorfold {
namespace {

absl::Status run(const BenchOptions& options, const std::string& json_path) {
  const absl::StatusOr<BenchReport> report = run_bench(options);
  if (!report.ok()) return report.status();
  print_report(*report, std::cout);
  if (json_path.empty()) return absl::OkStatus();
  std::ofstream json(json_path);
  json << report_json(*report) << "\n";
  json.close();
  if (!json) return absl::UnavailableError("--json " + json_path + ": cannot be written");
  return absl::OkStatus();
}

}  // namespace

void add_bench_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<BenchOptions>();
  auto json_path = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("bench", "Measure a model against this machine's limits, in the same run");
  command->footer(report_legend());
  command->add_option("--model", options->model, "folder of the checkpoint")->required();
  command->add_option("--world", options->world, "ranks, all on this machine")->check(CLI::Range(1, kMaxWorld));
  command->add_option("--transport", options->transport, "local: ranks are threads; ucx: ranks are processes")
      ->check(CLI::IsMember({"local", "ucx"}));
  command->add_option("--isa", options->isa, "instruction set; all give the same bits")
      ->check(CLI::IsMember({"auto", "avx512", "avx2", "neon", "portable"}));
  command->add_option("--threads", options->threads, "threads of each rank; 0 shares the cores")
      ->check(CLI::Range(0, 1024));
  command->add_option("--json", *json_path, "also write the figures to this file");
  command->add_option("--widths", options->widths, "rows of the passes to time")
      ->delimiter(',')
      ->check(CLI::Range(1, static_cast<int>(kMaxWindow)));
  command->add_option("--chunks", options->chunks, "prompt rows a pass")->delimiter(',')->check(CLI::Range(1, 8192));
  command->add_option("--context", options->context, "tokens before a timed window")->check(CLI::Range(1, 1 << 20));
  command->add_option("--prompt-tokens", options->prompt_tokens, "length of the timed prompts")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--reply-tokens", options->reply_tokens, "length of the timed replies")
      ->check(CLI::Range(2, 1 << 16));
  command->add_option("--prompt", options->prompt, "what the timed replies answer");
  command->add_option("--seconds", options->seconds, "about how long to measure, loading apart")
      ->check(CLI::Range(0.01, 3600.0));
  command->callback([options, json_path, exit_code] {
    const absl::Status status = run(*options, *json_path);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
