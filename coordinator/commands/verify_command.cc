// `tensorfold verify`: proves that no byte depends on anything but the checkpoint and the request.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <map>

#include "coordinator/commands/commands.h"
#include "coordinator/commands/verify/tester.h"
#include "kernels/reference/negative_control.h"
#include "transport/pass/plan.h"

namespace tensorfold {
namespace {

struct VerifyFlags {
  std::string model;
  std::string drafter;
  bool full = false;
  bool negative_control = false;
  bool every_cell = false;
  size_t sample = 0;
  uint32_t prompt_tokens = 70;
  uint32_t reply_tokens = 12;
  uint64_t seed = 1;
  std::vector<int> worlds;
  std::vector<std::string> transports;
  std::vector<std::string> isas;
  std::vector<int> widths;
  std::vector<CellDraft> drafts;
  std::vector<CellCache> caches;
  std::string backend = "cpu";
  std::string kv_format = "bf16";
  std::string precision = "checkpoint";
};

int run_verify(const VerifyFlags& flags) {
  TesterOptions options;
  options.model_dir = flags.model;
  options.drafter = DrafterChoice(flags.drafter, DrafterChoice::Own::kIfThere);
  options.full = flags.full;
  options.sample = flags.sample;
  options.prompt_tokens = flags.prompt_tokens;
  options.reply_tokens = flags.reply_tokens;
  options.seed = flags.seed;
  if (!flags.worlds.empty()) options.axes.worlds = flags.worlds;
  if (!flags.transports.empty()) options.axes.transports = flags.transports;
  if (!flags.widths.empty()) options.axes.widths = flags.widths;
  if (!flags.drafts.empty()) options.axes.drafts = flags.drafts;
  if (!flags.caches.empty()) options.axes.caches = flags.caches;
  options.backend = flags.backend;
  options.kv_format = flags.kv_format;
  options.precision = flags.precision;
  if (flags.backend == "cpu") options.axes.variants = flags.isas;
  if (flags.backend == "cuda" && flags.widths.empty()) options.axes.widths = {2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16};
  if (flags.negative_control) {
    options.decorate = [](std::unique_ptr<Ops> ops) { return make_negative_control(std::move(ops)); };
    options.stop_after = 1;
  }
  const bool show = isatty(STDERR_FILENO) != 0;
  options.progress = [show](size_t done, size_t total) {
    if (show) std::cerr << fmt::format("\r{} of {} cells", done, total) << std::flush;
  };
  const absl::StatusOr<TesterReport> report = run_tester(options);
  if (show) std::cerr << "\r                              \r";
  if (!report.ok()) return report_error(report.status());
  print_report(*report, flags.every_cell, std::cout);
  if (flags.negative_control) {
    if (report->different > 0) {
      std::cout << "negative control: caught, as it must be\n";
      return 0;
    }
    std::cout << "negative control: NOT caught; this tester proves nothing\n";
    return 3;
  }
  std::cout << (report->different == 0 ? "verify: all cells agree\n" : "verify: BYTES DIFFER\n");
  return report->different == 0 ? 0 : 3;
}

// An option that takes some of an axis' values by name.
template <typename Value>
void add_named(CLI::App& command, const std::string& option, const std::string& what, const std::vector<Value>& all,
               std::string (*name)(Value), std::vector<Value>* into) {
  std::map<std::string, Value> values;
  std::vector<std::string> names;
  for (const Value value : all) {
    values[name(value)] = value;
    names.push_back(name(value));
  }
  command
      .add_option_function<std::vector<std::string>>(
          option,
          [values, into](const std::vector<std::string>& given) {
            for (const std::string& text : given) into->push_back(values.at(text));
          },
          what)
      ->delimiter(',')
      ->check(CLI::IsMember(names));
}

}  // namespace

void add_verify_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* command = app.add_subcommand(
      "verify",
      "Run the differential tester: drafts, widths, worlds, transports, chunks, batch-mates, instruction sets, "
      "threads, graphs, sampling; exit code 3 if any byte differs");
  command->add_option("--model", flags->model, "folder of the checkpoint")->required();
  command->add_option("--draft-model", flags->drafter,
                      "folder of a block drafter, for --drafts block; else that of the model, if it brings one along");
  command->add_flag("--full", flags->full, "every combination, not a sample that covers every pair of values");
  command->add_option("--sample", flags->sample, "without --full: at least so many combinations");
  command->add_option("--prompt-tokens", flags->prompt_tokens, "length of the prompt")->check(CLI::Range(16, 8192));
  command->add_option("--reply-tokens", flags->reply_tokens, "length of the reply")->check(CLI::Range(1, 1024));
  command->add_option("--seed", flags->seed, "of the prompts and of the sampled replies");
  command->add_option("--worlds", flags->worlds, "instead of 1,2,3,4,8")->delimiter(',')->check(CLI::Range(1, 8));
  command->add_option("--transports", flags->transports, "instead of local,ucx; peer and nccl want a GPU a rank")
      ->delimiter(',')
      ->check(CLI::IsMember({"local", "ucx", "peer", "nccl"}));
  command->add_option("--widths", flags->widths, "rows of drafted windows")
      ->delimiter(',')
      ->check(CLI::Range(2, static_cast<int>(kMaxWindow)));
  add_named(*command, "--drafts", "how windows are drafted", Axes().drafts, draft_name, &flags->drafts);
  add_named(*command, "--caches", "where the state of the tested sequence comes from", Axes().caches, cache_name,
            &flags->caches);
  command->add_option("--backend", flags->backend, "cpu, or cuda: rank r on GPU r modulo the GPUs of this machine")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  command->add_option("--kv-format", flags->kv_format, "cuda: how keys and values are kept")
      ->check(CLI::IsMember({"bf16", "fp8"}));
  command
      ->add_option("--precision", flags->precision,
                   "activations of families that round some: as the model does, or not at all")
      ->check(CLI::IsMember({"checkpoint", "full"}));
  command->add_option("--isas", flags->isas, "instead of all that this machine has")
      ->delimiter(',')
      ->check(CLI::IsMember({"avx512", "avx2", "neon", "portable"}));
  command->add_flag("--cells", flags->every_cell, "print every cell with its hash");
  command->add_flag("--negative-control", flags->negative_control,
                    "swap in a matmul whose order reads the row count; exit code 0 only if that is caught");
  command->callback([flags, exit_code] { *exit_code = run_verify(*flags); });
}

}  // namespace tensorfold
