#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>

#include "coordinator/commands/commands.h"
#include "coordinator/commands/log_format.h"
#include "coordinator/profile/command.h"

namespace tensorfold {

int report_error(const absl::Status& status) {
  std::cerr << "error: " << std::string(status.message()) << "\n";
  return 1;
}

}  // namespace tensorfold

namespace {

int run(int argc, char** argv) {
  // Results go to stdout, everything else to stderr.
  spdlog::set_default_logger(spdlog::stderr_color_mt("tensorfold"));
  tensorfold::set_log("text", "info");
  CLI::App app{"TensorFold Cluster: exact tensor-parallel serving of language models"};
  app.require_subcommand(1);
  int exit_code = 0;
  tensorfold::add_serve_command(app, &exit_code);
  tensorfold::add_generate_command(app, &exit_code);
  tensorfold::add_logits_command(app, &exit_code);
  tensorfold::add_inspect_command(app, &exit_code);
  tensorfold::add_state_command(app, &exit_code);
  tensorfold::add_verify_command(app, &exit_code);
  tensorfold::add_bench_command(app, &exit_code);
  tensorfold::add_plan_command(app, &exit_code);
  tensorfold::add_pull_command(app, &exit_code);
  tensorfold::add_profile_command(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {  // of memory that is not there, say
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
