// Pulls that must fail: each with a message that says what to do, and without a folder that looks like a checkpoint.
#include <gmock/gmock.h>

#include "tests/coordinator/hub/pull_fixture.h"

namespace tensorfold {
namespace {

using Reply = HubServer::Reply;
using Seen = HubServer::Seen;
using absl::StatusCode;
using std::chrono::milliseconds;

Reply plain(int status) { return Reply{status, {}, "", std::nullopt, milliseconds(0)}; }

// Bytes that are not those that the hub lists never reach the folder, and are not resumed from.
TEST_F(PullTest, WrongSha256) {
  std::string wrong = a_;
  wrong[100] ^= 1;
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kA) || seen.range != "bytes=0-4095") return std::nullopt;
    return Reply{206,
                 {{"ETag", "\"v1\""}, {"Content-Range", "bytes 0-4095/50001"}},
                 wrong.substr(0, 4096),
                 std::nullopt,
                 milliseconds(0)};
  });
  fails(StatusCode::kDataLoss, {kA, "sha256", sha256_hex(a_)});
  server_.intercept(nullptr);
  ASSERT_TRUE(pull().ok());
  expect_whole();
}

// A refused configuration costs a few small requests, not hours of weights.
TEST_F(PullTest, ConfigRefusedBeforeWeights) {
  rules_.examine = [](std::string_view, std::string_view, const std::string& label) {
    return absl::UnimplementedError(label + ": quant_method 'gptq' is not read");
  };
  fails(StatusCode::kUnimplemented, {"gptq", "No weights were fetched"});
  EXPECT_EQ(server_.count(".safetensors"), 0);
  EXPECT_EQ(server_.count("tokenizer.json"), 0);
  EXPECT_FALSE(std::filesystem::exists(options_.dir)) << "an empty folder is left behind";
}

// The disk is looked at before, not after, hours.
TEST_F(PullTest, DiskTooSmall) {
  rules_.free_bytes = [](const std::string&) { return absl::StatusOr<uint64_t>((32u << 20) + 60000); };
  fails(StatusCode::kResourceExhausted, {"78.14 KiB more are needed", "free"});
  EXPECT_EQ(server_.count(".safetensors"), 0);
}

// A file of the list that the hub does not give.
TEST_F(PullTest, MissingFile) {
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    return seen.target.ends_with(kB) ? std::optional(plain(404)) : std::nullopt;
  });
  fails(StatusCode::kNotFound, {kB, "404"});
}

// A shard that the index names and the repository lacks is found before any weight.
TEST_F(PullTest, IndexNamesAMissingShard) {
  server_.add("model.safetensors.index.json", R"({"weight_map": {"a": "gone.safetensors"}})");
  fails(StatusCode::kNotFound, {"gone.safetensors"});
  EXPECT_EQ(server_.count(kA), 0);
}

// Who may not read is told what to do.
TEST_F(PullTest, AccessRefused) {
  std::atomic<int> status{401};
  server_.intercept([&](const Seen&) { return std::optional(plain(status)); });
  fails(StatusCode::kPermissionDenied, {"set HF_TOKEN", "401"});
  status = 403;
  fails(StatusCode::kPermissionDenied, {"set HF_TOKEN", "403"});
  status = 404;
  fails(StatusCode::kNotFound, {"someone/model", "404"});
  options_.access.token = "wrong";
  status = 401;
  fails(StatusCode::kPermissionDenied, {"does not accept the token"});
  status = 403;
  fails(StatusCode::kPermissionDenied, {"terms"});
}

// Trouble that does not pass ends after a few attempts.
TEST_F(PullTest, LastingTrouble) {
  std::atomic<int> status{500};
  server_.intercept([&](const Seen&) { return std::optional(plain(status)); });
  fails(StatusCode::kUnavailable, {"500", "5 attempts"});
  EXPECT_EQ(server_.seen().size(), 5u);
  status = 429;
  fails(StatusCode::kUnavailable, {"asked too often (429)"});
}

// Nobody listens: the host is named.
TEST_F(PullTest, NobodyListens) {
  options_.access.endpoint.port = 1;
  options_.access.attempts = 2;
  fails(StatusCode::kUnavailable, {"cannot connect to 127.0.0.1:1"});
}

// Names that lead out of the folder stop everything.
TEST_F(PullTest, HostileNames) {
  for (const char* name :
       {"../evil.json", "/etc/evil", "a/../../evil", "a//b", "x\\\\y", "a\\u0000b", "a\\nb", "./a", ""}) {
    server_.list_as(std::string(R"([{"type": "file", "path": ")") + name + R"(", "size": 2, "oid": ""}])");
    fails(StatusCode::kInvalidArgument, {"refused", "nothing is fetched"});
  }
  server_.list_as("");
  server_.add("model.safetensors.index.json", R"({"weight_map": {"a": "../../evil.safetensors"}})");
  fails(StatusCode::kInvalidArgument, {"../../evil.safetensors"});
}

// Lists beyond all sense are refused, whole or damaged.
TEST_F(PullTest, HostileLists) {
  server_.list_as(R"([{"type": "file", "path": "config.json", "size": 99999999999999, "oid": ""}])");
  fails(StatusCode::kInvalidArgument, {"99999999999999 bytes"});
  server_.list_as(R"([{"type": "file", "path": "config.json", "size": -5, "oid": ""}])");
  fails(StatusCode::kInvalidArgument, {"no size"});
  server_.list_as(R"([{"type": "file", "path": "config.json", "size": 5, "lfs": {"oid": "zz", "size": 5}}])");
  fails(StatusCode::kInvalidArgument, {"no sha256"});
  server_.list_as(R"([{"type": "file", "path": "x", "size": 1}, {"type": "file", "path": "x", "size": 1}])");
  fails(StatusCode::kInvalidArgument, {"twice"});
  std::string many = "[";
  for (int i = 0; i < 10001; ++i) {
    many += std::string(i > 0 ? "," : "") + R"({"type": "file", "size": 1, "path": "f)" + std::to_string(i) + "\"}";
  }
  server_.list_as(many + "]");
  fails(StatusCode::kInvalidArgument, {"10000 files"});
  server_.list_as("<html>");
  fails(StatusCode::kInvalidArgument, {"no JSON"});
  server_.list_as(R"([{"type": "file", "path": "config.json", "size": 99999999, "oid": ""}])");
  fails(StatusCode::kInvalidArgument, {"99999999 bytes"});
  server_.list_as(R"([{"type": "file", "path": "model.gguf", "size": 9, "oid": ""}])");
  fails(StatusCode::kInvalidArgument, {"no config.json", "model.gguf"});
}

// A body that always ends early is no file.
TEST_F(PullTest, TruncatedBody) {
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kB)) return std::nullopt;
    return Reply{200, {{"ETag", "\"v1\""}}, b_, 100, milliseconds(0)};
  });
  fails(StatusCode::kUnavailable, {"127.0.0.1", "cut the connection", "5 attempts"});
}

// Other bytes than were asked for would be written in the wrong place.
TEST_F(PullTest, WrongRange) {
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kB)) return std::nullopt;
    return Reply{206, {{"Content-Range", "bytes 1-4096/30000"}}, b_.substr(1, 4096), std::nullopt, milliseconds(0)};
  });
  fails(StatusCode::kInvalidArgument, {kB, "asked for bytes 0 to 4095"});
}

// A server that sends a byte now and then never lets an idle timeout pass: the deadline ends it.
TEST_F(PullTest, SlowServerHitsTheDeadline) {
  server_.intercept([&](const Seen& seen) -> std::optional<Reply> {
    if (!seen.target.ends_with(kB)) return std::nullopt;
    return Reply{200, {}, b_, std::nullopt, milliseconds(20)};
  });
  const auto start = std::chrono::steady_clock::now();
  options_.access.http.deadline = start + milliseconds(1500);
  fails(StatusCode::kDeadlineExceeded, {"whole pull", "127.0.0.1"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(6000));
}

// A server that says nothing at all is waited for only so long, and named.
TEST_F(PullTest, SilentServerHitsTheTimeout) {
  // The server's threads outlive this function.
  const auto over = std::make_shared<std::atomic<bool>>(false);
  server_.intercept([over](const Seen&) {
    while (!*over) std::this_thread::sleep_for(milliseconds(20));
    return std::optional(plain(500));
  });
  options_.access.http.idle_timeout = milliseconds(200);
  options_.access.attempts = 2;
  fails(StatusCode::kUnavailable, {"waiting for 127.0.0.1", "0.2 s", "2 attempts"});
  *over = true;
}

// Redirects that never end, or lead from https to http.
TEST_F(PullTest, Redirects) {
  server_.intercept([&](const Seen& seen) {
    return std::optional(Reply{302, {{"Location", seen.target}}, "", std::nullopt, milliseconds(0)});
  });
  fails(StatusCode::kInvalidArgument, {"more than 5 redirects"});
  HubServer secure(true);
  secure.intercept([&](const Seen& seen) {
    return std::optional(Reply{302, {{"Location", server_.url() + seen.target}}, "", std::nullopt, milliseconds(0)});
  });
  use(secure);
  std::filesystem::create_directories(dir_);
  options_.access.http.ca_file = (dir_ / "ca.pem").string();
  std::ofstream(options_.access.http.ca_file) << secure.certificate();
  fails(StatusCode::kInvalidArgument, {"from https to http"});
}

// What is typed: names and revisions that would make other requests.
TEST(Repository, Names) {
  EXPECT_EQ(parse_repository("a/b")->revision, "main");
  EXPECT_EQ(parse_repository("a/b@refs/pr/1")->revision, "refs/pr/1");
  for (const char* bad : {"", "/", "a/", "/b", "a/b/c", "../b", "a/..", "a b", "a/b@", "a/b@x y", "a?b", "a/b#c"}) {
    EXPECT_FALSE(parse_repository(bad).ok()) << bad;
  }
}

// Addresses from users and from Location headers.
TEST(Url, Parse) {
  const absl::StatusOr<Url> url = parse_url("HTTPS://Hub.Example:8443/base?x=1#part");
  ASSERT_TRUE(url.ok());
  EXPECT_TRUE(url->tls);
  EXPECT_EQ(url->authority(), "hub.example:8443");
  EXPECT_EQ(url->target, "/base?x=1");
  EXPECT_EQ(parse_url("http://[::1]:80/")->authority(), "[::1]");
  EXPECT_EQ(resolve_location(*url, "/other")->target, "/other");
  EXPECT_EQ(resolve_location(*url, "//cdn.example/x")->authority(), "cdn.example");
  for (const char* bad : {"hub", "ftp://x", "http://", "http://a@b", "http://a:0", "http://a:99999", "http://a b",
                          "http://a\r\nX: y", "http://[::1", "file:///etc/passwd"}) {
    EXPECT_FALSE(parse_url(bad).ok()) << bad;
  }
  EXPECT_EQ(percent_encode("a/b c%", false), "a%2Fb%20c%25");
}

}  // namespace
}  // namespace tensorfold
