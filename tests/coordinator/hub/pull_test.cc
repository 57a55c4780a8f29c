// Whole pulls against a hub on the loopback: what arrives, what is reused, what is left alone.
#include "coordinator/hub/pull.h"

#include <gmock/gmock.h>

#include "coordinator/hub/folder.h"
#include "tests/coordinator/hub/pull_fixture.h"

namespace tensorfold {
namespace {

using Reply = HubServer::Reply;
using Seen = HubServer::Seen;
using std::chrono::milliseconds;

// The point of it: every wanted file arrives whole, in ranges, from the commit that the revision named; others do not.
TEST_F(PullTest, FetchesEverythingOfACheckpoint) {
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
  EXPECT_FALSE(has("pytorch_model.bin"));
  EXPECT_FALSE(has("figures"));
  EXPECT_FALSE(has(".gitattributes"));
  EXPECT_EQ(result->commit, HubServer::kCommit);
  EXPECT_EQ(result->fetched.back(), "config.json");
  EXPECT_EQ(server_.count(kA), 13);  // 50001 bytes in ranges of 4096
}

// A second pull asks for no contents again.
TEST_F(PullTest, KeepsWhatIsThere) {
  ASSERT_TRUE(pull().ok());
  const uint64_t sent = server_.sent();
  const absl::StatusOr<PullResult> again = pull();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->fetched.empty());
  EXPECT_EQ(again->kept.size(), 5u);
  EXPECT_EQ(server_.sent(), sent);
  expect_whole();
}

// A file that was damaged on disk without changing its size is noticed and fetched again.
TEST_F(PullTest, MendsADamagedFile) {
  ASSERT_TRUE(pull().ok());
  std::fstream file(std::filesystem::path(options_.dir) / kB, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(77);
  file.put(static_cast<char>(~b_[77]));
  file.close();
  const absl::StatusOr<PullResult> again = pull();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_THAT(again->fetched, testing::ElementsAre(kB));
  expect_whole();
}

// A connection that is cut in the middle goes on behind what came, in the same pull.
TEST_F(PullTest, GoesOnAfterACutConnection) {
  std::atomic<int> cuts{0};
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kB) || seen.range != "bytes=4096-8191" || cuts++ > 0) return std::nullopt;
    return Reply{206,
                 {{"ETag", "\"v1\""}, {"Content-Range", "bytes 4096-8191/30000"}},
                 b_.substr(4096, 4096),
                 1000,
                 milliseconds(0)};
  });
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
  bool went_on = false;
  for (const Seen& seen : server_.seen()) went_on |= seen.range == "bytes=5096-8191" && seen.if_range == "\"v1\"";
  EXPECT_TRUE(went_on);
}

// A pull that died is resumed by the next one: what had come is not fetched again.
TEST_F(PullTest, ResumesAnEarlierPull) {
  options_.connections = 1;
  std::atomic<int> requests{0};
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kA) || ++requests <= 6) return std::nullopt;
    return Reply{500, {}, "", std::nullopt, milliseconds(0)};
  });
  ASSERT_FALSE(pull().ok());
  EXPECT_FALSE(has(kA));
  server_.intercept(nullptr);
  const uint64_t before = server_.sent();
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
  EXPECT_LE(server_.sent() - before, 50001 - 6 * 4096 + 30000 + 1000u);
}

// Ranges of two different files of one name must never be sewn together.
TEST_F(PullTest, StartsAgainWhenTheFileChanged) {
  options_.connections = 1;
  std::atomic<int> requests{0};
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (seen.target.ends_with(kA) && ++requests == 4) server_.set_etag("\"v2\"");
    return std::nullopt;
  });
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
  int first_ranges = 0;
  for (const Seen& seen : server_.seen())
    first_ranges += seen.target.ends_with(kA) && seen.range == "bytes=0-4095" ? 1 : 0;
  EXPECT_EQ(first_ranges, 2);
}

// A server that knows no ranges gives each file in one piece.
TEST_F(PullTest, TakesWholeFilesFromAServerWithoutRanges) {
  server_.ignore_ranges();
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
  EXPECT_EQ(server_.count(kA), 1);
}

// The same with a cut: the whole file comes again, and counts once.
TEST_F(PullTest, WholeFileIsAskedForAgainAfterACut) {
  server_.ignore_ranges();
  std::atomic<int> cuts{0};
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kA) || cuts++ > 0) return std::nullopt;
    return Reply{200, {{"ETag", "\"v1\""}}, a_, 20000, milliseconds(0)};
  });
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
}

// Trouble that passes is waited out: 429 and 500 are tried again.
TEST_F(PullTest, TriesAgainAfterPassingTrouble) {
  std::atomic<int> requests{0};
  server_.intercept([&](const Seen&) -> std::optional<Reply> {
    const int n = requests++;
    if (n % 3 == 0) return Reply{429, {{"Retry-After", "0"}}, "slow down", std::nullopt, milliseconds(0)};
    if (n % 3 == 1) return Reply{503, {}, "", std::nullopt, milliseconds(0)};
    return std::nullopt;
  });
  options_.connections = 1;
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
}

// The token goes to the hub and to no other host, wherever the hub sends us; the bytes come from there.
TEST_F(PullTest, TokenStaysWithTheHubOnRedirects) {
  HubServer store;
  fill(store);
  options_.access.token = "secret-token";
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (seen.target.find("/resolve/") == std::string::npos) return std::nullopt;
    return Reply{302, {{"Location", store.url() + seen.target}}, "", std::nullopt, milliseconds(0)};
  });
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
  for (const Seen& seen : server_.seen()) EXPECT_EQ(seen.authorization, "Bearer secret-token");
  EXPECT_FALSE(store.seen().empty());
  for (const Seen& seen : store.seen()) EXPECT_EQ(seen.authorization, "");
}

// The folder's own checkpoint stays usable when a pull of other contents fails.
TEST_F(PullTest, FailedPullLeavesTheFolderAlone) {
  ASSERT_TRUE(pull().ok());
  HubServer other;
  fill(other);
  other.add(kA, bytes_of(50001, 9));
  other.add("config.json", R"({"new": 1})");
  other.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kA)) return std::nullopt;
    return Reply{404, {}, "", std::nullopt, milliseconds(0)};
  });
  use(other);
  ASSERT_FALSE(pull().ok());
  EXPECT_EQ(read(kA), a_);
  EXPECT_EQ(read("config.json"), "{}");
}

// Two pulls into one folder would write over each other.
TEST_F(PullTest, OnePullAFolder) {
  const absl::StatusOr<PullFolder> held = PullFolder::open(options_.dir);
  ASSERT_TRUE(held.ok());
  fails(absl::StatusCode::kFailedPrecondition, {"another pull"});
}

// Shards that nobody needs are not fetched, and the folder's index does not promise them.
TEST_F(PullTest, LeavesOutUnneededShards) {
  rules_.choose = [](const auto&) { return std::set<std::string>{kA}; };
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(read(kA), a_);
  EXPECT_FALSE(has(kB));
  EXPECT_EQ(server_.count(kB), 0);
  EXPECT_THAT(result->left_out, testing::ElementsAre(kB));
  EXPECT_EQ(read("model.safetensors.index.json").find(kB), std::string::npos);
  EXPECT_NE(read("model.safetensors.index.json").find(kA), std::string::npos);
}

// TLS with a given authority works, and a certificate that nobody vouches for is refused.
TEST_F(PullTest, Tls) {
  HubServer secure(true);
  fill(secure);
  use(secure);
  fails(absl::StatusCode::kFailedPrecondition, {"certificate of 127.0.0.1", "--ca-file"});
  options_.access.http.ca_file = (dir_ / "ca.pem").string();
  std::ofstream(options_.access.http.ca_file) << secure.certificate();
  const absl::StatusOr<PullResult> result = pull();
  ASSERT_TRUE(result.ok()) << result.status();
  expect_whole();
}

}  // namespace
}  // namespace tensorfold
