#include "coordinator/profile/command.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <memory>

#include "coordinator/profile/options.h"
#include "coordinator/profile/profile.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

// What the profile names on this machine. Missing files are warnings, as the profile may be for other hosts; a file
// that is there but would be refused by `serve` is an error. Returns whether all is usable.
bool check_named_files(const Profile& profile, std::ostream& err) {
  std::error_code code;
  if (!std::filesystem::is_directory(profile.model.path, code)) {
    err << fmt::format("{}: warning: model.path: no folder {} on this machine\n", profile.origin, profile.model.path);
  }
  bool usable = true;
  const auto judge = [&](const absl::Status& status) {
    if (status.ok()) return;
    const bool missing = absl::IsNotFound(status);
    err << fmt::format("{}: {}{}\n", profile.origin, missing ? "warning: " : "", std::string(status.message()));
    usable = usable && missing;
  };
  judge(cluster_token(profile).status());
  judge(api_key_hashes(profile).status());
  return usable;
}

// One message a line on `err`, also for statuses with several lines.
void print_status(const absl::Status& status, std::ostream& err) { err << std::string(status.message()) << "\n"; }

}  // namespace

int profile_check_command(const std::vector<std::string>& files, std::ostream& out, std::ostream& err) {
  int wrong = 0;
  for (const std::string& file : files) {
    const auto profile = load_profile(file);
    if (!profile.ok()) {
      print_status(profile.status(), err);
      ++wrong;
      continue;
    }
    for (const std::string& warning : profile->warnings) err << "warning: " << warning << "\n";
    if (!check_named_files(*profile, err)) {
      ++wrong;
      continue;
    }
    out << fmt::format("{}: ok, world {}, profile hash {}\n", file, profile->cluster.world,
                       profile_hash(*profile).substr(0, 16));
  }
  return wrong == 0 ? 0 : 1;
}

int profile_explain_command(const std::string& file, const std::string& key, std::ostream& out, std::ostream& err) {
  const auto profile = load_profile(file);
  if (!profile.ok()) {
    print_status(profile.status(), err);
    return 1;
  }
  const auto text = explain_profile(*profile, key);
  if (!text.ok()) {
    print_status(text.status(), err);
    return 1;
  }
  for (const std::string& warning : profile->warnings) err << "warning: " << warning << "\n";
  out << *text;
  return 0;
}

int profile_reference_command(std::ostream& out) {
  out << reference_markdown();
  return 0;
}

void add_profile_command(CLI::App& app, int* exit_code) {
  // Shared by the callbacks below, which CLI11 keeps as long as the app.
  struct Arguments {
    std::vector<std::string> files;
    std::string file, key;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* profile = app.add_subcommand("profile", "Check and explain profiles");
  profile->require_subcommand(1);

  CLI::App* check =
      profile->add_subcommand("check", "Print every error and warning of profiles; exit code 1 if there is an error");
  check->add_option("FILE", arguments->files, "Profiles")->required();
  check->callback([=] { *exit_code = profile_check_command(arguments->files, std::cout, std::cerr); });

  CLI::App* explain =
      profile->add_subcommand("explain", "Print every effective option, where it comes from and what it means");
  explain->add_option("FILE", arguments->file, "Profile")->required();
  explain->add_option("KEY", arguments->key, "One option or section, as in cluster.world");
  explain->callback(
      [=] { *exit_code = profile_explain_command(arguments->file, arguments->key, std::cout, std::cerr); });

  CLI::App* reference = profile->add_subcommand("reference", "Print the reference of all options, in Markdown");
  reference->callback([=] { *exit_code = profile_reference_command(std::cout); });
}

}  // namespace tensorfold
