// `tensorfold plan`: what each rank of a profile needs in memory, and the contexts that it leaves room for.
#include <CLI/CLI.hpp>
#include <iostream>

#include "coordinator/commands/commands.h"
#include "coordinator/plan/memory_plan.h"

namespace tensorfold {
namespace {

struct PlanFlags {
  std::string profile;
  int rank = -1;
  int64_t memory = -1;
};

absl::Status run_plan(const PlanFlags& flags) {
  const absl::StatusOr<Profile> profile = load_profile(flags.profile);
  if (!profile.ok()) return profile.status();
  const absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::open(profile->model.path);
  if (!checkpoint.ok()) return checkpoint.status();
  const absl::StatusOr<ModelFacts> facts = inspect(**checkpoint);
  if (!facts.ok()) return facts.status();
  if (flags.rank >= profile->cluster.world) {
    return absl::InvalidArgumentError("--rank is outside the profile's cluster.world");
  }
  absl::Status fits;
  for (int rank = 0; rank < profile->cluster.world; ++rank) {
    if (flags.rank >= 0 && rank != flags.rank) continue;
    const absl::StatusOr<MemoryPlan> plan = make_memory_plan(*profile, (*checkpoint)->config(), *facts, rank);
    if (!plan.ok()) return plan.status();
    std::cout << profile->cluster.rank_name(rank) << ":\n" << memory_plan_text(*plan);
    if (absl::Status status = check_memory_plan(*plan, *profile, flags.memory); fits.ok()) fits = status;
  }
  return fits;
}

}  // namespace

void add_plan_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<PlanFlags>();
  CLI::App* command = app.add_subcommand("plan", "Memory that each rank of a profile needs, and what contexts fit");
  command->add_option("--profile", flags->profile, "YAML file; docs/profiles.md lists its options")->required();
  command->add_option("--rank", flags->rank, "only this rank")->check(CLI::Range(0, 7));
  command->add_option("--memory", flags->memory, "memory that a rank has (64GiB): says whether the plan fits")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  command->callback([flags, exit_code] {
    const absl::Status status = run_plan(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
