// The commands of the program `tensorfold`, each a thin file over the libraries.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace tensorfold {

/// Each adds its sub-command to `app`; when the user calls it, it runs at once and puts its exit code into *exit_code,
/// which must outlive the parse. Exit codes: 0 well, 1 an error (printed to stderr), 2 wrong usage, 3 bytes differ.
void add_serve_command(CLI::App& app, int* exit_code);
void add_generate_command(CLI::App& app, int* exit_code);
void add_logits_command(CLI::App& app, int* exit_code);
void add_inspect_command(CLI::App& app, int* exit_code);
void add_state_command(CLI::App& app, int* exit_code);
void add_verify_command(CLI::App& app, int* exit_code);
void add_bench_command(CLI::App& app, int* exit_code);
/// `bench serve`: a sub-command of bench.
void add_bench_serve_command(CLI::App& bench, int* exit_code);
void add_plan_command(CLI::App& app, int* exit_code);
void add_pull_command(CLI::App& app, int* exit_code);

/// Prints "error: …" and returns 1.
int report_error(const absl::Status& status);

}  // namespace tensorfold
