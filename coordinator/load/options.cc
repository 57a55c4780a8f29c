#include "coordinator/load/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>

namespace tensorfold {
namespace {

// In the order of LoadMix.
constexpr std::array<std::string_view, 5> kMixes = {"chat", "long-prompt", "shared-prefix", "agent", "mixed"};
constexpr int kMostUsers = 4096;

absl::Status outside(const char* option, const std::string& allowed) {
  return absl::InvalidArgumentError(fmt::format("{}: {} is allowed", option, allowed));
}

bool is_share(double value) { return value >= 0 && value <= 1; }

}  // namespace

std::string_view load_mix_name(LoadMix mix) { return kMixes[static_cast<size_t>(mix)]; }

std::vector<std::string> load_mix_names() { return {kMixes.begin(), kMixes.end()}; }

absl::StatusOr<LoadMix> parse_load_mix(std::string_view name) {
  for (size_t i = 0; i < kMixes.size(); ++i) {
    if (kMixes[i] == name) return static_cast<LoadMix>(i);
  }
  return absl::InvalidArgumentError(fmt::format("--mix {}: one of {} is allowed", name, fmt::join(kMixes, ", ")));
}

absl::Status LoadOptions::validate() const {
  if (url.tls) {
    return absl::InvalidArgumentError(
        "--url: https is not measured, since the server has none of its own; give the http address behind the proxy");
  }
  if (concurrency.empty() && rates.empty()) return outside("--concurrency", "at least one level");
  for (const int users : concurrency) {
    if (users < 1 || users > kMostUsers) return outside("--concurrency", fmt::format("1 to {}", kMostUsers));
  }
  for (const double rate : rates) {
    if (!(rate > 0 && rate <= 1e5)) return outside("--rate", "more than 0, at most 100000 a second");
  }
  if (conversations < 0) return outside("--conversations", "1 or more");
  if (conversations > 0 && duration.count() > 0) {
    return absl::InvalidArgumentError("--conversations and --duration exclude one another");
  }
  if (!is_share(disconnect)) return outside("--disconnect", "0 to 1");
  if (!is_share(malformed)) return outside("--malformed", "0 to 1");
  if (!is_share(conversation.background)) return outside("--background", "0 to 1");
  if (!is_share(check_share)) return outside("--check-share", "0 to 1");
  if (!(ttft_limit_s > 0)) return outside("--ttft-limit", "more than 0");
  if (!(gap_limit_s > 0)) return outside("--gap-limit", "more than 0");
  if (conversation.reply_tokens < 1) return outside("--reply-tokens", "1 or more");
  if (conversation.prompt_tokens < 16) return outside("--prompt-tokens", "16 or more");
  if (conversation.prefix_tokens < 16) return outside("--prefix-tokens", "16 or more");
  return absl::OkStatus();
}

}  // namespace tensorfold
