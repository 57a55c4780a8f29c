// `tensorfold pull`: a checkpoint from a hub into a folder.
#include "coordinator/hub/pull.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>

#include "coordinator/commands/commands.h"
#include "coordinator/commands/pull/checkpoint_rules.h"

namespace tensorfold {
namespace {

constexpr char kEndpointVariable[] = "HF_ENDPOINT";
constexpr char kTokenVariable[] = "HF_TOKEN";

struct PullFlags {
  std::string repository;
  std::string to;
  std::string endpoint;
  std::string ca_file;
  bool no_token = false;
  int connections = 8;
  double timeout = 30;
  double deadline = 24 * 3600.0;
  int attempts = 5;
  int rank = -1;
  int world = 0;
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

absl::Status set_token(const PullFlags& flags, HubAccess& access) {
  if (flags.no_token) return absl::OkStatus();
  access.token = environment(kTokenVariable);
  for (const char c : access.token) {
    if (c <= 0x20 || c >= 0x7F) {
      return absl::InvalidArgumentError(
          fmt::format("{} holds a space or a character that no token has", kTokenVariable));
    }
  }
  if (!access.token.empty() && !access.endpoint.tls && !is_loopback(access.endpoint.host)) {
    return absl::InvalidArgumentError(fmt::format(
        "{} is set, but {} is reached over plain http, where anybody on the way could read it: use https, or "
        "pull without the token with --no-token",
        kTokenVariable, access.endpoint.authority()));
  }
  return absl::OkStatus();
}

absl::StatusOr<HubAccess> hub_access(const PullFlags& flags) {
  const std::string text = flags.endpoint.empty() ? environment(kEndpointVariable) : flags.endpoint;
  if (text.empty()) {
    return absl::InvalidArgumentError(fmt::format(
        "no hub to pull from: give its address with --endpoint https://HOST, or set {}", kEndpointVariable));
  }
  const char* const source = flags.endpoint.empty() ? kEndpointVariable : "--endpoint";
  absl::StatusOr<Url> url = parse_url(text);
  if (!url.ok()) {
    return absl::InvalidArgumentError(fmt::format("{} is {}", source, std::string(url.status().message())));
  }
  if (url->target.find('?') != std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("{} has a '?'; allowed is http[s]://HOST[:PORT][/PATH]", source));
  }
  while (url->target.ends_with('/')) url->target.pop_back();
  HubAccess access;
  access.endpoint = *url;
  access.http.ca_file = flags.ca_file;
  access.http.idle_timeout = std::chrono::milliseconds(static_cast<int64_t>(flags.timeout * 1000));
  access.http.connect_timeout = std::min(access.http.connect_timeout, access.http.idle_timeout);
  access.http.deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int64_t>(flags.deadline * 1000));
  access.attempts = flags.attempts;
  if (absl::Status status = set_token(flags, access); !status.ok()) return status;
  return access;
}

absl::Status run_pull(const PullFlags& flags) {
  absl::StatusOr<HubRepository> repository = parse_repository(flags.repository);
  if (!repository.ok()) return repository.status();
  absl::StatusOr<HubAccess> access = hub_access(flags);
  if (!access.ok()) return access.status();
  PullOptions options;
  options.access = std::move(*access);
  options.repository = *repository;
  options.connections = flags.connections;
  options.dir = flags.to.empty() ? repository->name.substr(repository->name.rfind('/') + 1) : flags.to;

  std::optional<PullRank> rank;
  if (flags.rank >= 0) rank = PullRank{flags.rank, flags.world};
  std::optional<ModelConfig> config;
  PullRules rules;
  rules.examine = [&](std::string_view text, std::string_view generation, const std::string& label) {
    absl::StatusOr<ModelConfig> parsed = examine_config(text, generation, label, rank);
    if (parsed.ok()) config = std::move(*parsed);
    return parsed.status();
  };
  if (rank) {
    rules.choose = [&](const std::map<std::string, std::string>& weight_map) -> absl::StatusOr<std::set<std::string>> {
      return shards_of_rank(*config, weight_map);
    };
  }
  PullProgress progress(stderr, isatty(STDERR_FILENO) == 1);
  const absl::StatusOr<PullResult> result = pull_checkpoint(options, rules, progress);
  if (!result.ok()) return result.status();
  std::cout << fmt::format(
      "{} at {} is in {}: {} files new ({} received), {} there before{}\n", repository->name,
      result->commit.substr(0, 12), options.dir, result->fetched.size(), bytes_text(result->received),
      result->kept.size(),
      result->left_out.empty() ? std::string() : fmt::format(", {} shards left out", result->left_out.size()));
  return absl::OkStatus();
}

}  // namespace

void add_pull_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<PullFlags>();
  CLI::App* command = app.add_subcommand("pull", "Fetches a checkpoint from a Hugging Face-compatible hub");
  command->add_option("repository", flags->repository, "OWNER/NAME, or OWNER/NAME@REVISION (branch, tag, commit)")
      ->required();
  command->add_option("--to", flags->to, "folder to fill; default: NAME, here");
  command->add_option("--endpoint", flags->endpoint, "the hub's address, https://HOST; default: from HF_ENDPOINT");
  command->add_option("--ca-file", flags->ca_file, "certificates (PEM) to trust instead of the system's")
      ->check(CLI::ExistingFile);
  command->add_flag("--no-token", flags->no_token, "send no token, though HF_TOKEN is set");
  command->add_option("--connections", flags->connections, "downloads at a time")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command->add_option("--timeout", flags->timeout, "seconds to wait for a silent server before another attempt")
      ->check(CLI::Range(1.0, 3600.0))
      ->capture_default_str();
  command->add_option("--deadline", flags->deadline, "seconds for the whole pull")
      ->check(CLI::Range(1.0, 30 * 24 * 3600.0))
      ->capture_default_str();
  command->add_option("--attempts", flags->attempts, "attempts in a row that bring nothing, before giving up")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  CLI::Option* rank = command->add_option("--for-rank", flags->rank, "leave out shards that this rank does not read")
                          ->check(CLI::Range(0, 7));
  CLI::Option* world =
      command->add_option("--world", flags->world, "ranks of the cluster, for --for-rank")->check(CLI::Range(1, 8));
  rank->needs(world);
  world->needs(rank);
  command->callback([flags, exit_code] {
    if (flags->rank >= 0 && flags->rank >= flags->world) {
      throw CLI::ValidationError("--for-rank", fmt::format("rank {} is not one of a world of {}: 0 to {}", flags->rank,
                                                           flags->world, flags->world - 1));
    }
    const absl::Status status = run_pull(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
