// `tensorfold bench serve`: a load on a server, over HTTP.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>

#include "coordinator/commands/bench/serve_plots.h"
#include "coordinator/commands/commands.h"
#include "coordinator/load/check.h"
#include "coordinator/load/load.h"
#include "coordinator/load/report.h"

namespace tensorfold {
namespace {

constexpr int kDifferent = 3;

struct ServeFlags {
  LoadOptions load;
  std::string url;
  std::string api_key_file;
  std::string mix = "chat";
  double duration_s = 0;
  double timeout_s = 300;
  double wait_ready_s = 0;
  double temperature = -1;  // below 0: the server's
  bool check = false;
  std::string json;
  std::string svg;
};

std::chrono::milliseconds from_seconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

absl::Status write_text(const char* option, const std::string& path, const std::string& text) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream out(path);
  out << text;
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(fmt::format("{} {}: cannot be written", option, path));
}

absl::Status read_key(ServeFlags* flags) {
  if (flags->api_key_file.empty()) return absl::OkStatus();
  std::ifstream in(flags->api_key_file);
  if (!std::getline(in, flags->load.api_key) || flags->load.api_key.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("--api-key-file {}: cannot be read, or its first line is empty", flags->api_key_file));
  }
  for (const char c : flags->load.api_key) {
    if (c <= 0x20 || c >= 0x7F) return absl::InvalidArgumentError("--api-key-file: a key is printable, without spaces");
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadOptions> options_of(ServeFlags* flags) {
  LoadOptions& options = flags->load;
  const absl::StatusOr<Url> url = parse_url(flags->url);
  if (!url.ok()) return absl::InvalidArgumentError("--url: " + std::string(url.status().message()));
  if (url->target != "/") return absl::InvalidArgumentError("--url: only http://HOST:PORT, without a path");
  options.url = *url;
  const absl::StatusOr<LoadMix> mix = parse_load_mix(flags->mix);
  if (!mix.ok()) return mix.status();
  options.conversation.mix = *mix;
  if (flags->temperature >= 0) options.conversation.temperature = flags->temperature;
  options.duration = from_seconds(flags->duration_s);
  options.timeout = from_seconds(flags->timeout_s);
  options.wait_ready = from_seconds(flags->wait_ready_s);
  if (!flags->check) options.check_share = 0;
  if (absl::Status status = read_key(flags); !status.ok()) return status;
  if (absl::Status status = options.validate(); !status.ok()) return status;
  return options;
}

void tell_level(const LevelFigures& level) {
  std::cerr << fmt::format("{}: {} requests in {:.1f} s, {:.1f} reply tokens/s, {} errors\n",
                           level.users > 0 ? fmt::format("{} user{}", level.users, level.users == 1 ? "" : "s")
                                           : fmt::format("{:g}/s", level.rate),
                           level.requests, level.wall_s, level.reply_tokens_per_s, level.error_count());
}

absl::StatusOr<int> run_bench_serve(ServeFlags* flags) {
  const absl::StatusOr<LoadOptions> options = options_of(flags);
  if (!options.ok()) return options.status();
  const absl::StatusOr<LoadServer> server = find_server(*options);
  if (!server.ok()) return server.status();
  const absl::StatusOr<LoadReport> report = run_load(*options, *server, tell_level);
  if (!report.ok()) return report.status();
  std::optional<HashCheck> check;
  absl::Status unchecked;
  if (flags->check) {
    std::cerr << fmt::format("checking {} conversations one at a time\n", report->hashes.size());
    absl::StatusOr<HashCheck> checked = check_load(*report, [](size_t done, size_t of) {
      std::cerr << fmt::format("checked {} of {} conversations\n", done, of);
    });
    // What was measured is shown even if it could not be checked.
    checked.ok() ? static_cast<void>(check = *checked) : unchecked.Update(checked.status());
  }
  print_load(*report, check, std::cout);
  absl::Status status = write_text("--json", flags->json, load_json(*report, check) + "\n");
  status.Update(write_text("--svg", flags->svg, load_svg(*report)));
  status.Update(unchecked);
  if (!status.ok()) return status;
  return check && check->different > 0 ? kDifferent : 0;
}

void add_load(CLI::App& command, ServeFlags& flags) {
  LoadOptions& load = flags.load;
  command.add_option("--url", flags.url, "http://HOST:PORT of the server")->required();
  command.add_option("--model", load.conversation.model, "a name that it serves; without it the first");
  command.add_option("--api-key-file", flags.api_key_file, "file with the key on its first line");
  command.add_option("--wait-ready", flags.wait_ready_s, "seconds to wait for a server that is not ready")
      ->check(CLI::Range(0.0, 86400.0));
  command.add_option("--concurrency", load.concurrency, "closed loop: so many users, each waiting for its reply")
      ->delimiter(',');
  command.add_option("--rate", load.rates, "open loop instead: so many new conversations a second (Poisson)")
      ->delimiter(',');
  command.add_option("--conversations", load.conversations, "at each level; without it four a user, at least 16");
  command.add_option("--duration", flags.duration_s, "seconds of each level, instead of a number of conversations")
      ->check(CLI::Range(0.0, 604800.0));
  command.add_option("--timeout", flags.timeout_s, "seconds for one request")->check(CLI::Range(0.1, 86400.0));
}

void add_contents(CLI::App& command, ServeFlags& flags) {
  ConversationOptions& what = flags.load.conversation;
  command.add_option("--mix", flags.mix, fmt::format("what users do: {}", fmt::join(load_mix_names(), ", ")))
      ->check(CLI::IsMember(load_mix_names()));
  command.add_option("--seed", what.seed, "of all prompts and arrivals: equal seeds give equal runs");
  command.add_option("--prompt-tokens", what.prompt_tokens, "of a long prompt, about")->check(CLI::Range(16, 1 << 24));
  command.add_option("--prefix-tokens", what.prefix_tokens, "of a shared prefix, about")
      ->check(CLI::Range(16, 1 << 24));
  command.add_option("--reply-tokens", what.reply_tokens, "longest reply")->check(CLI::Range(1, 1 << 20));
  command.add_option("--background", what.background, "share of conversations that are background work");
  command.add_flag("--ignore-eos", what.ignore_eos, "every reply has --reply-tokens tokens");
  command.add_option("--temperature", flags.temperature, "of every request; without it the server's")
      ->check(CLI::Range(0.0, 2.0));
}

}  // namespace

void add_bench_serve_command(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command = bench.add_subcommand("serve", "Load a running server over HTTP: rates, waiting times, hashes");
  command->footer(load_legend());
  add_load(*command, *flags);
  add_contents(*command, *flags);
  LoadOptions& load = flags->load;
  command->add_option("--ttft-limit", load.ttft_limit_s, "goodput: seconds until the first token");
  command->add_option("--gap-limit", load.gap_limit_s, "goodput: seconds between tokens");
  command->add_option("--disconnect", load.disconnect, "share of requests that the client drops midway");
  command->add_option("--malformed", load.malformed, "share of conversations that are one malformed request instead");
  command->add_flag("--check", flags->check,
                    "repeat the requests one at a time without drafts and caches, compare token_sha");
  command->add_option("--check-share", load.check_share, "--check: share of conversations that are repeated");
  command->add_option("--json", flags->json, "also write the figures to this file");
  command->add_option("--svg", flags->svg, "also draw them into this file");
  command->callback([flags, exit_code] {
    const absl::StatusOr<int> code = run_bench_serve(flags.get());
    *exit_code = code.ok() ? *code : report_error(code.status());
  });
}

}  // namespace tensorfold
