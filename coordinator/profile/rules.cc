#include "coordinator/profile/rules.h"

#include <algorithm>
#include <utility>

#include "coordinator/profile/options.h"
#include "coordinator/profile/values.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

using Rules = std::vector<ProfileRule>;
using Context = RuleContext;

constexpr bool kError = false;
constexpr bool kWarning = true;

// Where rank 0's control plane listens.
std::string control_host(const Profile& p) {
  return p.cluster.bind.empty() ? p.cluster.coordinator.host : p.cluster.bind;
}

bool has_api_keys(const Profile& p) { return !p.http.api_keys.empty() || !p.http.api_keys_file.empty(); }

// True when two servers of one process cannot both listen: same port, and the same host or one that stands for all.
bool listeners_clash(const Profile::HostPort& a, const Profile::HostPort& b) {
  if (a.port == 0 || a.port != b.port) return false;
  if (is_any_address(a.host) || is_any_address(b.host) || a.host == b.host) return true;
  return is_loopback_host(a.host) && is_loopback_host(b.host);
}

Profile::HostPort control_listener(const Profile& p) { return {control_host(p), p.cluster.coordinator.port}; }

// The kind of path that a UCX transport name belongs to; "" for self and names that say no kind (all).
std::string ucx_kind(const std::string& name) {
  static const std::set<std::string, std::less<>> kShm = {"sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"};
  if (kShm.contains(name)) return "shm";
  if (name == "tcp") return "tcp";
  const bool rdma = name == "ib" || name.starts_with("rc") || name.starts_with("ud") || name.starts_with("dc");
  return rdma ? "rdma" : "";
}

std::string check_expected_transport(const Context& c) {
  const auto& ucx = c.profile.cluster.ucx;
  if (ucx.tls.empty() || ucx.expect_transport == "any") return "";
  for (const std::string& name : ucx.tls) {
    if (name == "all" || ucx_kind(name) == ucx.expect_transport) return "";
  }
  return fmt::format("expects {}, but cluster.ucx.tls allows no such transport", ucx.expect_transport);
}

Rules cluster_rules() {
  return {
      {{"cluster.transport", "cluster.world"},
       kError,
       "More than one rank needs `transport: ucx`: ranks are processes.",
       [](const Context& c) -> std::string {
         const auto& cluster = c.profile.cluster;
         if (cluster.world == 1 || cluster.transport != "local") return "";
         return fmt::format("world {} needs transport ucx: ranks are processes, and local joins threads of one",
                            cluster.world);
       }},
      {{"cluster.hosts", "cluster.world"},
       kError,
       "`cluster.hosts` has one entry a rank.",
       [](const Context& c) -> std::string {
         const size_t count = c.profile.cluster.hosts.size();
         if (count == 0 || count == static_cast<size_t>(c.profile.cluster.world)) return "";
         return fmt::format("names {} hosts for {} ranks (cluster.world)", count, c.profile.cluster.world);
       }},
      {{"cluster.bind", "cluster.coordinator", "cluster.allow_any_address"},
       kError,
       "The control plane listens on every address of the machine (0.0.0.0, ::) only with `allow_any_address: true`.",
       [](const Context& c) -> std::string {
         const std::string host = control_host(c.profile);
         if (!is_any_address(host) || c.profile.cluster.allow_any_address) return "";
         return fmt::format("{} means every address of the machine: name one, or set cluster.allow_any_address: true",
                            host);
       }},
      {{"cluster.coordinator", "cluster.world"},
       kError,
       "With more than one rank `cluster.coordinator` is an address that ranks can reach, so not 0.0.0.0 or ::, which "
       "belong in "
       "`cluster.bind`.",
       [](const Context& c) -> std::string {
         const std::string& host = c.profile.cluster.coordinator.host;
         if (c.profile.cluster.world == 1 || !is_any_address(host)) return "";
         return fmt::format("ranks cannot reach {}: write rank 0's address here and {} in cluster.bind", host, host);
       }},
      {{"cluster.coordinator", "cluster.bind", "cluster.token", "cluster.token_file"},
       kError,
       "A control plane beyond loopback needs `cluster.token_file` or `cluster.token`.",
       [](const Context& c) -> std::string {
         const auto& cluster = c.profile.cluster;
         const bool inside = is_loopback_host(control_host(c.profile)) && is_loopback_host(cluster.coordinator.host);
         if (inside || !cluster.token.empty() || !cluster.token_file.empty()) return "";
         return "reachable from other machines without a secret: set cluster.token_file";
       }},
      {{"cluster.token", "cluster.token_file"},
       kError,
       "Either `cluster.token` or `cluster.token_file`.",
       [](const Context& c) -> std::string {
         const auto& cluster = c.profile.cluster;
         return cluster.token.empty() || cluster.token_file.empty() ? ""
                                                                    : "cluster.token_file is set too: keep one of them";
       }},
      {{"cluster.heartbeat_timeout", "cluster.heartbeat_interval"},
       kError,
       "`cluster.heartbeat_timeout` is at least twice `cluster.heartbeat_interval`.",
       [](const Context& c) -> std::string {
         const auto& cluster = c.profile.cluster;
         if (cluster.heartbeat_timeout >= 2 * cluster.heartbeat_interval) return "";
         return "one late heartbeat would lose a rank: the timeout must be at least twice cluster.heartbeat_interval";
       }},
      {{"cluster.coordinator", "cluster.hosts"},
       kWarning,
       "Several hosts with a coordinator on loopback.",
       [](const Context& c) -> std::string {
         const auto& cluster = c.profile.cluster;
         const std::set<std::string> distinct(cluster.hosts.begin(), cluster.hosts.end());
         if (distinct.size() < 2 || !is_loopback_host(cluster.coordinator.host)) return "";
         return "ranks on other machines cannot reach a loopback address, and cluster.hosts names several hosts";
       }},
      {{"cluster.park_deadline", "schedule.request_timeout"},
       kWarning,
       "`cluster.park_deadline` beyond `schedule.request_timeout`: the request ends first.",
       [](const Context& c) -> std::string {
         const auto limit = c.profile.schedule.request_timeout;
         if (limit.count() == 0 || c.profile.cluster.park_deadline <= limit) return "";
         return "longer than schedule.request_timeout, which ends the request first";
       }},
  };
}

Rules ucx_rules() {
  return {
      {{"cluster.ucx.net_devices", "cluster.world"},
       kError,
       "`cluster.ucx.net_devices` has one entry, or one a rank.",
       [](const Context& c) -> std::string {
         const size_t count = c.profile.cluster.ucx.net_devices.size();
         if (count <= 1 || count == static_cast<size_t>(c.profile.cluster.world)) return "";
         return fmt::format("names {} devices for {} ranks: one for all, or one a rank", count,
                            c.profile.cluster.world);
       }},
      {{"cluster.ucx.expect_transport", "cluster.ucx.tls"},
       kError,
       "`cluster.ucx.expect_transport` is a kind that `cluster.ucx.tls` allows.",
       check_expected_transport},
      {{"cluster.ucx.on_slow", "cluster.ucx.expect_transport", "cluster.ucx.min_bandwidth"},
       kError,
       "`on_slow: refuse` needs `expect_transport` or `min_bandwidth` to compare with.",
       [](const Context& c) -> std::string {
         const auto& ucx = c.profile.cluster.ucx;
         if (ucx.on_slow != "refuse" || ucx.expect_transport != "any" || ucx.min_bandwidth > 0) return "";
         return "nothing to compare with: set expect_transport or min_bandwidth";
       }},
      {{"cluster.ucx.tls", "cluster.ucx.net_devices", "cluster.ucx.expect_transport", "cluster.ucx.min_bandwidth",
        "cluster.ucx.on_slow", "cluster.transport"},
       kWarning,
       "Options of `cluster.ucx` with another transport: they do nothing.",
       [](const Context& c) -> std::string {
         if (c.profile.cluster.transport == "ucx") return "";
         for (const ProfileOption& option : profile_options()) {
           if (option.key.starts_with("cluster.ucx.") && c.is_set(option.key))
             return "has no effect without transport: ucx";
         }
         return "";
       }},
  };
}

Rules scheduling_rules() {
  return {
      {{"memory.kv_pages", "memory.kv_bytes"},
       kError,
       "Either `memory.kv_pages` or `memory.kv_bytes`.",
       [](const Context& c) -> std::string {
         const bool both = c.profile.memory.kv_pages > 0 && c.is_set("memory.kv_bytes");
         return both ? "memory.kv_bytes is set too: keep one of them" : "";
       }},
      {{"cache.snapshot_tokens"},
       kError,
       "`cache.snapshot_tokens` is a multiple of 64, the tokens of a page.",
       [](const Context& c) -> std::string {
         const std::int64_t tokens = c.profile.cache.snapshot_tokens;
         return tokens % 64 == 0 ? "" : fmt::format("{} is no multiple of 64", tokens);
       }},
      {{"state.quota", "state.min_tokens", "state.directory"},
       kWarning,
       "Options of `state` want `state.directory`.",
       [](const Context& c) -> std::string {
         const bool idle =
             c.profile.state.directory.empty() && (c.is_set("state.quota") || c.is_set("state.min_tokens"));
         return idle ? "has no effect without state.directory" : "";
       }},
      {{"state.directory", "cache.enabled"},
       kError,
       "`state.directory` wants `cache.enabled`: what is not cached cannot be kept.",
       [](const Context& c) -> std::string {
         const bool both = c.profile.state.directory.empty() || c.profile.cache.enabled;
         return both ? "" : "cache.enabled is false";
       }},
      {{"schedule.max_batch_rows", "schedule.max_sequences"},
       kError,
       "`schedule.max_batch_rows` is at least `schedule.max_sequences`: every running sequence has a row.",
       [](const Context& c) -> std::string {
         const auto& s = c.profile.schedule;
         if (s.max_batch_rows >= s.max_sequences) return "";
         return fmt::format("{} rows cannot hold one row of each of {} sequences (schedule.max_sequences)",
                            s.max_batch_rows, s.max_sequences);
       }},
      {{"schedule.prompt_chunk", "schedule.max_batch_rows"},
       kError,
       "`schedule.prompt_chunk` is at most `schedule.max_batch_rows`.",
       [](const Context& c) -> std::string {
         const auto& s = c.profile.schedule;
         if (s.prompt_chunk <= s.max_batch_rows) return "";
         return fmt::format("{} rows do not fit a pass of {} (schedule.max_batch_rows)", s.prompt_chunk,
                            s.max_batch_rows);
       }},
      {{"schedule.background_models", "model.served_name", "model.aliases"},
       kError,
       "`schedule.background_models` are names that the model is served under.",
       [](const Context& c) -> std::string {
         const auto& model = c.profile.model;
         for (const std::string& name : c.profile.schedule.background_models) {
           const bool known = name == model.served_name ||
                              std::find(model.aliases.begin(), model.aliases.end(), name) != model.aliases.end();
           if (!known) return fmt::format("'{}' is neither model.served_name nor one of model.aliases", name);
         }
         return "";
       }},
      {{"draft.max_width", "schedule.max_batch_rows", "draft.kind"},
       kError,
       "`draft.max_width` is at most `schedule.max_batch_rows`.",
       [](const Context& c) -> std::string {
         const int width = c.profile.draft.max_width, rows = c.profile.schedule.max_batch_rows;
         if (c.profile.draft.kind == "none" || width <= rows) return "";
         return fmt::format("a window of {} rows does not fit a pass of {} (schedule.max_batch_rows)", width, rows);
       }},
      {{"schedule.queue_tokens", "model.context_length"},
       kError,
       "`schedule.queue_tokens`, if set, is at least `model.context_length`: the longest prompt could never wait.",
       [](const Context& c) -> std::string {
         const std::int64_t tokens = c.profile.schedule.queue_tokens, context = c.profile.model.context_length;
         if (tokens == 0 || context == 0 || tokens >= context) return "";
         return fmt::format("{} tokens are less than one prompt may have (model.context_length {})", tokens, context);
       }},
      {{"sampling.max_tokens", "model.context_length"},
       kError,
       "`sampling.max_tokens` is at most `model.context_length`.",
       [](const Context& c) -> std::string {
         const std::int64_t tokens = c.profile.sampling.max_tokens, context = c.profile.model.context_length;
         if (context == 0 || tokens <= context || !c.is_set("sampling.max_tokens")) return "";
         return fmt::format("{} tokens do not fit model.context_length {}", tokens, context);
       }},
      {{"draft.max_width", "draft.kind"},
       kError,
       "`draft.max_width: 1` leaves no room for a guess, so it goes with `kind: none`.",
       [](const Context& c) -> std::string {
         if (c.profile.draft.max_width > 1 || c.profile.draft.kind == "none") return "";
         return fmt::format(
             "a window of 1 row has no room for a guess of draft.kind {}: set 2 or more, or draft.kind: none",
             c.profile.draft.kind);
       }},
      {{"draft.max_width", "draft.kind"},
       kWarning,
       "`draft.max_width` with `kind: none`: it does nothing.",
       [](const Context& c) -> std::string {
         const bool idle =
             c.profile.draft.kind == "none" && c.profile.draft.max_width > 1 && c.is_set("draft.max_width");
         return idle ? "has no effect with draft.kind: none" : "";
       }},
      {{"draft.model", "draft.kind"},
       kError,
       "`draft.kind: dflash` needs a block drafter in `draft.model`.",
       [](const Context& c) -> std::string {
         if (c.profile.draft.kind != "dflash" || !c.profile.draft.model.empty()) return "";
         return "draft.kind: dflash drafts with a checkpoint of its own: name its folder here";
       }},
      {{"draft.model", "draft.kind"},
       kWarning,
       "`draft.model` with `kind: none`, `mtp`, `copy` or `dspark`: it does nothing.",
       [](const Context& c) -> std::string {
         const Profile::Draft& draft = c.profile.draft;
         if (draft.model.empty() || !draft.model_in_use().empty()) return "";
         return fmt::format("has no effect with draft.kind: {}", draft.kind);
       }},
      {{"draft.min_match", "draft.kind"},
       kWarning,
       "`draft.min_match` with `kind: none`, `mtp`, `dflash` or `dspark`: it does nothing.",
       [](const Context& c) -> std::string {
         const std::string& kind = c.profile.draft.kind;
         if (!c.is_set("draft.min_match") || kind == "copy" || kind == "auto") return "";
         return fmt::format("has no effect with draft.kind: {}", kind);
       }},
      {{"model.kv_dtype", "compute.backend"},
       kError,
       "`model.kv_dtype` is one that `compute.backend` has: f32 on cpu; bf16 or fp8 on cuda.",
       [](const Context& c) -> std::string {
         const std::string& kv = c.profile.model.kv_dtype;
         const bool cuda = c.profile.compute.backend == "cuda";
         if (kv == "auto" || (kv == "f32") != cuda) return "";
         return fmt::format("compute.backend {} keeps keys and values as {}, not {}", c.profile.compute.backend,
                            cuda ? "bf16 or fp8" : "f32", kv);
       }},
      {{"model.aliases", "model.served_name"},
       kError,
       "`model.aliases` does not repeat `model.served_name`.",
       [](const Context& c) -> std::string {
         const auto& aliases = c.profile.model.aliases;
         const bool repeated = std::find(aliases.begin(), aliases.end(), c.profile.model.served_name) != aliases.end();
         return repeated ? fmt::format("{} is the model's own name already", c.profile.model.served_name) : "";
       }},
  };
}

Rules server_rules() {
  return {
      {{"http.listen", "cluster.coordinator", "cluster.bind"},
       kError,
       "`http.listen` and `cluster.coordinator` do not share an address.",
       [](const Context& c) -> std::string {
         const bool clash = listeners_clash(c.profile.http.listen, control_listener(c.profile));
         return clash ? "the control plane listens there already (cluster.coordinator): take another port" : "";
       }},
      {{"grpc.listen", "http.listen", "grpc.enabled"},
       kError,
       "`grpc.listen` and `http.listen` do not share an address.",
       [](const Context& c) -> std::string {
         const bool clash = c.profile.grpc.enabled && listeners_clash(c.profile.grpc.listen, c.profile.http.listen);
         return clash ? "HTTP listens there already (http.listen): take another port" : "";
       }},
      {{"grpc.listen", "cluster.coordinator", "cluster.bind", "grpc.enabled"},
       kError,
       "`grpc.listen` and `cluster.coordinator` do not share an address.",
       [](const Context& c) -> std::string {
         const bool clash =
             c.profile.grpc.enabled && listeners_clash(c.profile.grpc.listen, control_listener(c.profile));
         return clash ? "the control plane listens there already (cluster.coordinator): take another port" : "";
       }},
      {{"http.listen", "http.api_keys", "http.api_keys_file"},
       kWarning,
       "`http.listen` beyond loopback without API keys: whoever reaches the port is served.",
       [](const Context& c) -> std::string {
         if (is_loopback_host(c.profile.http.listen.host) || has_api_keys(c.profile)) return "";
         return "reachable from other machines without API keys: set http.api_keys_file";
       }},
      {{"grpc.listen", "grpc.enabled", "http.api_keys", "http.api_keys_file"},
       kWarning,
       "`grpc.listen` beyond loopback without API keys: whoever reaches the port is served.",
       [](const Context& c) -> std::string {
         const auto& grpc = c.profile.grpc;
         if (!grpc.enabled || is_loopback_host(grpc.listen.host) || has_api_keys(c.profile)) return "";
         return "reachable from other machines without API keys: set http.api_keys_file";
       }},
      {{"http.cors_origin", "http.api_keys", "http.api_keys_file"},
       kWarning,
       "`cors_origin: \"*\"` without API keys: any page open in a browser that reaches the server may use it.",
       [](const Context& c) -> std::string {
         if (c.profile.http.cors_origin != "*" || has_api_keys(c.profile)) return "";
         return "any web page open in a browser that reaches this server may use it: name an origin or set API keys";
       }},
      {{"grpc.listen", "grpc.max_message_bytes", "grpc.enabled"},
       kWarning,
       "Options of `grpc` with `enabled: false`: they do nothing.",
       [](const Context& c) -> std::string {
         const bool idle = !c.profile.grpc.enabled && (c.is_set("grpc.listen") || c.is_set("grpc.max_message_bytes"));
         return idle ? "has no effect with grpc.enabled: false" : "";
       }},
  };
}

}  // namespace

bool RuleContext::is_set(std::string_view key) const { return where(key).line > 0; }

ProfilePosition RuleContext::where(std::string_view key) const {
  const int index = find_profile_option(key);
  return index < 0 ? ProfilePosition{} : profile.positions[index];
}

const std::vector<ProfileRule>& profile_rules() {
  static const Rules kRules = [] {
    Rules all;
    for (Rules part : {cluster_rules(), ucx_rules(), scheduling_rules(), server_rules()}) {
      for (ProfileRule& rule : part) all.push_back(std::move(rule));
    }
    return all;
  }();
  return kRules;
}

void check_profile_rules(const RuleContext& context) {
  for (const ProfileRule& rule : profile_rules()) {
    const auto refused = [&](const std::string& key) { return context.refused.contains(key); };
    if (std::any_of(rule.keys.begin(), rule.keys.end(), refused)) continue;
    std::string problem = rule.check(context);
    if (problem.empty()) continue;
    ProfileError error;
    error.key = rule.keys.front();
    error.at = {1, 1};
    for (const std::string& key : rule.keys) {
      if (!context.is_set(key)) continue;
      error.key = key;
      error.at = context.where(key);
      break;
    }
    error.problem = std::move(problem);
    (rule.warning ? context.warnings : context.errors)->push_back(std::move(error));
  }
}

}  // namespace tensorfold
