// Contradictions between options: each rule speaks, at its exact place, and is silent when its input is already
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "coordinator/profile/profile.h"
#include "coordinator/profile/rules.h"

namespace tensorfold {
namespace {

struct Case {
  const char* name;
  std::string text;      // follows "model: {path: m}" on line 1
  std::string expected;  // the one error or warning
};

void PrintTo(const Case& each, std::ostream* out) { *out << each.name; }

std::string parse_text(const std::string& text) {
  const auto profile = parse_profile("model: {path: m}\n" + text, "p.yaml");
  if (!profile.ok()) return std::string(profile.status().message());
  std::string all = "ok";
  for (const std::string& warning : profile->warnings) all += "\n" + warning;
  return all;
}

class RuleTest : public ::testing::TestWithParam<Case> {};

// Protects each rule's place and words.
TEST_P(RuleTest, Speaks) { EXPECT_EQ(parse_text(GetParam().text), GetParam().expected); }

const char kHash[] = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683";

std::vector<Case> error_cases() {
  return {
      {"local_ranks", "cluster: {world: 2}",
       "p.yaml:2:18: cluster.world: world 2 needs transport ucx: ranks are processes, and local joins threads of one"},
      {"hosts", "cluster: {world: 2, transport: ucx, hosts: [a, b, c]}",
       "p.yaml:2:44: cluster.hosts: names 3 hosts for 2 ranks (cluster.world)"},
      {"any_address", "cluster: {coordinator: '0.0.0.0:7070', token: 0123456789abcdef}",
       "p.yaml:2:24: cluster.coordinator: 0.0.0.0 means every address of the machine: name one, or set "
       "cluster.allow_any_address: true"},
      {"any_bind", "cluster: {coordinator: 'a:7070', bind: '::', token: 0123456789abcdef}",
       "p.yaml:2:40: cluster.bind: :: means every address of the machine: name one, or set cluster.allow_any_address: "
       "true"},
      {"any_coordinator",
       "cluster: {world: 2, transport: ucx, coordinator: '0.0.0.0:7070', allow_any_address: true, token: "
       "0123456789abcdef}",
       "p.yaml:2:50: cluster.coordinator: ranks cannot reach 0.0.0.0: write rank 0's address here and 0.0.0.0 in "
       "cluster.bind"},
      {"token_missing", "cluster: {coordinator: 'spark-1:7070'}",
       "p.yaml:2:24: cluster.coordinator: reachable from other machines without a secret: set cluster.token_file"},
      {"bind_token_missing", "cluster: {bind: 10.0.0.1}",
       "p.yaml:2:17: cluster.bind: reachable from other machines without a secret: set cluster.token_file"},
      {"two_tokens", "cluster: {token: 0123456789abcdef, token_file: t}",
       "p.yaml:2:18: cluster.token: cluster.token_file is set too: keep one of them"},
      {"heartbeat", "cluster: {heartbeat_interval: 600ms}",
       "p.yaml:2:31: cluster.heartbeat_interval: one late heartbeat would lose a rank: the timeout must be at least "
       "twice "
       "cluster.heartbeat_interval"},
      {"devices", "cluster: {world: 3, transport: ucx, ucx: {net_devices: [a, b]}}",
       "p.yaml:2:56: cluster.ucx.net_devices: names 2 devices for 3 ranks: one for all, or one a rank"},
      {"expected", "cluster: {transport: ucx, ucx: {tls: [self, tcp], expect_transport: rdma}}",
       "p.yaml:2:69: cluster.ucx.expect_transport: expects rdma, but cluster.ucx.tls allows no such transport"},
      {"refuse_what", "cluster: {transport: ucx, ucx: {on_slow: refuse}}",
       "p.yaml:2:42: cluster.ucx.on_slow: nothing to compare with: set expect_transport or min_bandwidth"},
      {"pages_and_bytes", "memory: {kv_pages: 4, kv_bytes: 1GiB}",
       "p.yaml:2:20: memory.kv_pages: memory.kv_bytes is set too: keep one of them"},
      {"snapshot_grid", "cache: {snapshot_tokens: 100}",
       "p.yaml:2:26: cache.snapshot_tokens: 100 is no multiple of 64"},
      {"state_without_cache", "cache: {enabled: false}\nstate: {directory: s}",
       "p.yaml:3:20: state.directory: cache.enabled is false"},
      {"rows_sequences", "schedule: {max_batch_rows: 64, max_sequences: 65}",
       "p.yaml:2:28: schedule.max_batch_rows: 64 rows cannot hold one row of each of 65 sequences "
       "(schedule.max_sequences)"},
      {"chunk", "schedule: {prompt_chunk: 257}",
       "p.yaml:2:26: schedule.prompt_chunk: 257 rows do not fit a pass of 256 (schedule.max_batch_rows)"},
      {"width_rows", "schedule: {max_batch_rows: 4, max_sequences: 4, prompt_chunk: 4}",
       "p.yaml:2:28: schedule.max_batch_rows: a window of 8 rows does not fit a pass of 4 (schedule.max_batch_rows)"},
      {"queue_tokens", "schedule: {queue_tokens: 100}\n", "ok"},
      {"max_tokens", "sampling: {max_tokens: 100}\n", "ok"},
      {"width_one", "draft: {max_width: 1}",
       "p.yaml:2:20: draft.max_width: a window of 1 row has no room for a guess of draft.kind auto: set 2 or more, or "
       "draft.kind: "
       "none"},
      {"http_port", "http: {listen: 'localhost:7070'}",
       "p.yaml:2:16: http.listen: the control plane listens there already (cluster.coordinator): take another port"},
      {"grpc_port", "grpc: {listen: '127.0.0.1:8000'}",
       "p.yaml:2:16: grpc.listen: HTTP listens there already (http.listen): take another port"},
      {"grpc_control_port", "grpc: {listen: '127.0.0.1:7070'}",
       "p.yaml:2:16: grpc.listen: the control plane listens there already (cluster.coordinator): take another port"},
  };
}

std::vector<Case> warning_cases() {
  const std::string reach = "reachable from other machines without API keys: set http.api_keys_file";
  return {
      {"loopback_hosts", "cluster: {world: 2, transport: ucx, hosts: [a, b]}",
       "ok\np.yaml:2:44: cluster.hosts: ranks on other machines cannot reach a loopback address, and cluster.hosts "
       "names several "
       "hosts"},
      {"park", "schedule: {request_timeout: 30s}",
       "ok\np.yaml:2:29: schedule.request_timeout: longer than schedule.request_timeout, which ends the request first"},
      {"idle_ucx", "cluster: {ucx: {tls: [tcp]}}",
       "ok\np.yaml:2:22: cluster.ucx.tls: has no effect without transport: ucx"},
      {"idle_state", "state: {quota: 4GiB}", "ok\np.yaml:2:16: state.quota: has no effect without state.directory"},
      {"idle_width", "draft: {kind: none, max_width: 4}",
       "ok\np.yaml:2:32: draft.max_width: has no effect with draft.kind: none"},
      {"idle_match", "draft: {kind: mtp, min_match: 4}",
       "ok\np.yaml:2:31: draft.min_match: has no effect with draft.kind: mtp"},
      {"open_http", "http: {listen: '0.0.0.0:8000'}\ngrpc: {enabled: false}", "ok\np.yaml:2:16: http.listen: " + reach},
      {"open_grpc", "grpc: {listen: '10.0.0.1:8001'}", "ok\np.yaml:2:16: grpc.listen: " + reach},
      {"open_cors", "http: {cors_origin: '*'}",
       "ok\np.yaml:2:21: http.cors_origin: any web page open in a browser that reaches this server may use it: name an "
       "origin or "
       "set API keys"},
      {"idle_grpc", "grpc: {enabled: false, listen: '127.0.0.1:9000'}",
       "ok\np.yaml:2:32: grpc.listen: has no effect with grpc.enabled: false"},
  };
}

// The same options put together well: no rule may speak.
std::vector<Case> silent_cases() {
  return {
      {"ranks", "cluster: {world: 2, transport: ucx, hosts: [a, a]}", "ok"},
      {"bind", "cluster: {coordinator: 'a:1', bind: 0.0.0.0, allow_any_address: true, token_file: t}", "ok"},
      {"kinds", "cluster: {transport: ucx, ucx: {tls: [self, rc_x], expect_transport: rdma, on_slow: refuse}}", "ok"},
      {"width", "draft: {kind: none, max_width: 1}", "ok"},
      {"blocks", "draft: {kind: dflash, model: d}\ncompute: {backend: cuda}", "ok"},
      {"blocks_on_cpu", "draft: {kind: dflash, model: d}", "ok"},
      {"keys", std::string("http: {listen: '0.0.0.0:8000', api_keys: [") + kHash + "], cors_origin: '*'}", "ok"},
      {"free_ports", "http: {listen: '127.0.0.1:0'}\ngrpc: {listen: '127.0.0.1:0'}", "ok"},
      {"grpc_off", "http: {listen: '127.0.0.1:8001'}\ngrpc: {enabled: false}", "ok"},
      {"refused_input", "cluster: {wrold: 2, hosts: [a, b]}",
       "p.yaml:2:11: cluster.wrold: unknown key; did you mean cluster.world?"},
  };
}

const auto kNameOf = [](const ::testing::TestParamInfo<Case>& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Errors, RuleTest, ::testing::ValuesIn(error_cases()), kNameOf);
INSTANTIATE_TEST_SUITE_P(Warnings, RuleTest, ::testing::ValuesIn(warning_cases()), kNameOf);
INSTANTIATE_TEST_SUITE_P(Silent, RuleTest, ::testing::ValuesIn(silent_cases()), kNameOf);

std::string whole_text(const std::string& text) {
  const auto profile = parse_profile(text, "p.yaml");
  return profile.ok() ? "ok" : std::string(profile.status().message());
}

// Protects the rules that read the model section, which the table above fixes.
TEST(ProfileRules, ModelSection) {
  EXPECT_EQ(whole_text("model: {path: m, aliases: [m]}"),
            "p.yaml:1:27: model.aliases: m is the model's own name already");
  EXPECT_EQ(
      whole_text("model: {path: m, context_length: 512}\nschedule: {queue_tokens: 100}"),
      "p.yaml:2:26: schedule.queue_tokens: 100 tokens are less than one prompt may have (model.context_length 512)");
  EXPECT_EQ(whole_text("model: {path: m, context_length: 512}\nsampling: {max_tokens: 513}"),
            "p.yaml:2:24: sampling.max_tokens: 513 tokens do not fit model.context_length 512");
  // A short context alone contradicts no default.
  EXPECT_EQ(whole_text("model: {path: m, context_length: 512}"), "ok");
}

// Protects against a rule that can never be skipped or placed: its keys must be options.
TEST(ProfileRules, KeysAreOptions) {
  Profile profile = default_profile();
  for (auto& position : profile.positions) position = {1, 1};
  const std::set<std::string> none;
  const RuleContext context{profile, none, nullptr, nullptr};
  for (const ProfileRule& rule : profile_rules()) {
    EXPECT_FALSE(rule.words.empty());
    for (const std::string& key : rule.keys) EXPECT_TRUE(context.is_set(key)) << key;
  }
}

// Protects a fresh start: defaults alone contradict nothing.
TEST(ProfileRules, DefaultsAreSilent) { EXPECT_EQ(parse_text(""), "ok"); }

}  // namespace
}  // namespace tensorfold
