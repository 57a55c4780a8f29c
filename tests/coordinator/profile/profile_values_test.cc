// What well-formed profiles turn into.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "coordinator/profile/profile.h"

namespace tensorfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

Profile parse(const std::string& text, const std::string& origin = "profiles/p.yaml") {
  auto profile = parse_profile(text, origin);
  EXPECT_TRUE(profile.ok()) << profile.status();
  return profile.ok() ? *profile : default_profile();
}

// Protects the values of every type.
TEST(ProfileValues, EveryType) {
  const Profile p = parse(R"(
model: {path: ../models/sprout, aliases: [a, "b"]}
cluster:
  world: 3
  transport: ucx
  hosts: {2: c, 0: a, 1: b}
  coordinator: "[fd00::1]:7070"
  token: 0123456789abcdef
  join_timeout: 5m
  step_timeout: 1500ms
  park_deadline: 0s
  ucx: {tls: [self, sm], net_devices: ["mlx5_0:1,mlx5_1:1"], min_bandwidth: 10GiB/s}
memory: {kv_bytes: 512MiB, floor_free: 0}
sampling: {temperature: 0.25, top_p: 1e-2, seed_salt: 9223372036854775807}
http: {listen: "localhost:0", api_keys: []}
metrics: {enabled: false}
)");
  EXPECT_EQ(p.model.path, "models/sprout");
  EXPECT_EQ(p.model.served_name, "sprout");
  EXPECT_THAT(p.model.aliases, ElementsAre("a", "b"));
  EXPECT_EQ(p.cluster.world, 3);
  EXPECT_THAT(p.cluster.hosts, ElementsAre("a", "b", "c"));
  EXPECT_EQ(p.cluster.coordinator, (Profile::HostPort{"fd00::1", 7070}));
  EXPECT_EQ(host_port_text(p.cluster.coordinator), "[fd00::1]:7070");
  EXPECT_EQ(p.cluster.join_timeout, minutes(5));
  EXPECT_EQ(p.cluster.step_timeout, milliseconds(1500));
  EXPECT_EQ(p.cluster.park_deadline, seconds(0));
  EXPECT_EQ(p.cluster.step_deadline(10), milliseconds(2500));
  EXPECT_EQ(p.cluster.ucx_tls(), "self,sm");
  EXPECT_EQ(p.cluster.net_devices_of(2), "mlx5_0:1,mlx5_1:1");
  EXPECT_EQ(p.cluster.rank_name(1), "b (rank 1)");
  EXPECT_EQ(p.cluster.rank_name(5), "rank 5");
  EXPECT_EQ(p.cluster.ucx.min_bandwidth, std::int64_t{10} << 30);
  EXPECT_EQ(p.memory.kv_bytes, 512 << 20);
  EXPECT_EQ(p.memory.floor_free, 0);
  EXPECT_EQ(p.sampling.temperature, 0.25);
  EXPECT_EQ(p.sampling.top_p, 0.01);
  EXPECT_EQ(p.sampling.seed_salt, 9223372036854775807);
  EXPECT_EQ(p.http.listen, (Profile::HostPort{"localhost", 0}));
  EXPECT_FALSE(p.metrics.enabled);
  EXPECT_THAT(p.warnings, IsEmpty());
}

// Protects the rule that paths are relative to the profile's folder, and only the trailing slash is dropped.
TEST(ProfileValues, PathsAreRelativeToTheProfile) {
  EXPECT_EQ(parse("model: {path: m/}", "/etc/tf/p.yaml").model.path, "/etc/tf/m");
  EXPECT_EQ(parse("model: {path: /srv/./m}", "/etc/tf/p.yaml").model.path, "/srv/m");
  EXPECT_EQ(parse("model: {path: m}", "p.yaml").model.path, "m");
}

// Protects harmless YAML: comments, sections whose options are all commented out, a byte order mark, CRLF, directives.
TEST(ProfileValues, HarmlessYaml) {
  const Profile p =
      parse("\xEF\xBB\xBF%YAML 1.2\r\n---\r\n# c\r\ncluster:\r\n  # world: 2\r\nmodel:\r\n  path: m # c\r\n...\r\n");
  EXPECT_EQ(p.model.path, "profiles/m");
  EXPECT_EQ(p.cluster.world, 1);
}

// Protects the classification of addresses, which decides whether a secret is demanded.
TEST(ProfileValues, LoopbackAndAnyAddresses) {
  for (const char* host : {"localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"})
    EXPECT_TRUE(is_loopback_host(host)) << host;
  for (const char* host : {"0.0.0.0", "::", "10.0.0.1", "spark-1", "::ffff:10.0.0.1"})
    EXPECT_FALSE(is_loopback_host(host)) << host;
  for (const char* host : {"0.0.0.0", "::", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"})
    EXPECT_TRUE(is_any_address(host)) << host;
  for (const char* host : {"127.0.0.1", "::1", "localhost"}) EXPECT_FALSE(is_any_address(host)) << host;
}

// Protects the join check: the hash reads effective cluster-wide values, however they were written, and nothing else.
TEST(ProfileHash, CoversClusterWideValuesOnly) {
  const std::string base = "model: {path: m}\n";
  const std::string hash = profile_hash(parse(base));
  EXPECT_EQ(hash.size(), 64u);
  EXPECT_EQ(profile_hash(parse(base + "# c\nschedule: {max_sequences: 8}\ncluster: {step_timeout: 10000ms}")), hash);
  EXPECT_EQ(profile_hash(parse("model: {path: elsewhere}\ncompute: {threads: 3}\nlog: {level: debug}", "q.yaml")),
            hash);
  EXPECT_NE(profile_hash(parse(base + "schedule: {max_sequences: 9}")), hash);
  EXPECT_NE(profile_hash(parse(base + "cluster: {step_timeout: 11s}")), hash);
  EXPECT_NE(profile_hash(parse(base + "cluster: {hosts: [a]}")), profile_hash(parse(base + "cluster: {hosts: [b]}")));
}

}  // namespace
}  // namespace tensorfold
