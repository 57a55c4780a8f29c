// Files: the profile itself, the token, the API keys, and the commands over them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "coordinator/profile/command.h"
#include "coordinator/profile/profile.h"

namespace tensorfold {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ProfileFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "profile_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    ASSERT_EQ(mkdir((folder_ + "/m").c_str(), 0700), 0);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text, mode_t mode = 0600) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << text;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }

  std::string load_error(const std::string& path) {
    const auto profile = load_profile(path);
    return profile.ok() ? "ok" : std::string(profile.status().message());
  }

  std::string folder_;
};

// Protects the reading of the profile: missing, too large, not a file.
TEST_F(ProfileFiles, ProfileThatCannotBeRead) {
  EXPECT_TRUE(absl::IsNotFound(load_profile(folder_ + "/none.yaml").status()));
  EXPECT_EQ(load_error(folder_ + "/none.yaml"), folder_ + "/none.yaml: cannot be read: No such file or directory");
  EXPECT_EQ(load_error(folder_), folder_ + ": not a regular file");
  EXPECT_EQ(load_error("/dev/zero"), "/dev/zero: not a regular file");
  const std::string big = write("big.yaml", std::string((1 << 20) + 1, '#'));
  EXPECT_EQ(load_error(big), big + ": too large; allowed: at most 1048576 bytes");
}

// Protects a secret in the profile: every user of the machine could read it.
TEST_F(ProfileFiles, InlineTokenInAReadableFile) {
  const std::string text = "model: {path: m}\ncluster: {token: 0123456789abcdef}\n";
  EXPECT_EQ(load_error(write("p.yaml", text, 0640)), "ok");
  EXPECT_THAT(load_error(write("p.yaml", text, 0644)),
              HasSubstr("cluster.token is set and every user of this machine may read"));
}

// Protects the token: trimmed, long enough, and from a file that others cannot read.
TEST_F(ProfileFiles, TokenFile) {
  Profile profile = default_profile();
  EXPECT_EQ(*cluster_token(profile), "");
  profile.cluster.token_file = write("token", "  0123456789abcdef\n");
  EXPECT_EQ(*cluster_token(profile), "0123456789abcdef");
  write("token", "0123456789abcdef", 0644);
  EXPECT_TRUE(absl::IsPermissionDenied(cluster_token(profile).status()));
  write("token", "short\n");
  EXPECT_THAT(std::string(cluster_token(profile).status().message()), HasSubstr("holds no token of 16 to 256"));
  write("token", std::string(70000, 'x'));
  EXPECT_THAT(std::string(cluster_token(profile).status().message()), HasSubstr("at most 65536 bytes"));
  profile.cluster.token_file = folder_ + "/none";
  EXPECT_TRUE(absl::IsNotFound(cluster_token(profile).status()));
}

// Protects the API keys: both sources, one case, comments, and no file that opens the server by being empty.
TEST_F(ProfileFiles, ApiKeys) {
  const std::string a(64, 'a'), b(64, 'b'), upper(64, 'B');
  Profile profile = default_profile();
  EXPECT_TRUE(api_key_hashes(profile)->empty());
  profile.http.api_keys = {a};
  profile.http.api_keys_file = write("keys", "# ours\n\n" + upper + "  # team\r\n" + a);
  EXPECT_THAT(*api_key_hashes(profile), ElementsAre(a, b));
  write("keys", a + "\nnot a hash\n");
  EXPECT_THAT(std::string(api_key_hashes(profile).status().message()),
              EndsWith("/keys:2: not 64 hex digits (the SHA-256 of a key)"));
  profile.http.api_keys.clear();
  write("keys", "# none\n");
  EXPECT_THAT(std::string(api_key_hashes(profile).status().message()), EndsWith("holds no key hash"));
}

// Protects the exit codes and where the lines go.
TEST_F(ProfileFiles, CheckCommand) {
  const std::string good = write("good.yaml", "model: {path: m}\nhttp: {cors_origin: '*'}\n");
  const std::string bad = write("bad.yaml", "model: {pth: m}\n");
  std::ostringstream out, err;
  EXPECT_EQ(profile_check_command({good}, out, err), 0);
  EXPECT_THAT(out.str(), StartsWith(good + ": ok, world 1, profile hash "));
  EXPECT_THAT(err.str(), StartsWith("warning: " + good + ":2:21: http.cors_origin: "));
  out.str("");
  err.str("");
  EXPECT_EQ(profile_check_command({bad, good}, out, err), 1);
  EXPECT_THAT(out.str(), StartsWith(good + ": ok"));
  EXPECT_THAT(err.str(), StartsWith(bad + ":1:9: model.pth: unknown key; did you mean model.path?\n"));
}

// Protects the check of files that a profile names: missing ones may be on other hosts, unusable ones are errors.
TEST_F(ProfileFiles, CheckCommandLooksAtNamedFiles) {
  const std::string profile = write("p.yaml", "model: {path: elsewhere}\ncluster: {token_file: token}\n");
  std::ostringstream out, err;
  EXPECT_EQ(profile_check_command({profile}, out, err), 0);
  EXPECT_EQ(err.str(), profile + ": warning: model.path: no folder " + folder_ + "/elsewhere on this machine\n" +
                           profile + ": warning: cluster.token_file: " + folder_ +
                           "/token: cannot be read: No such file or directory\n");
  write("token", "0123456789abcdef", 0644);
  EXPECT_EQ(profile_check_command({profile}, out, err), 1);
}

// Protects the wiring into the program's command line.
TEST_F(ProfileFiles, CommandLine) {
  const std::string bad = write("bad.yaml", "x\n");
  CLI::App app;
  int exit_code = 7;
  add_profile_command(app, &exit_code);
  ::testing::internal::CaptureStderr();
  app.parse("profile check " + bad);
  EXPECT_EQ(exit_code, 1);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr(":1:1: not a profile: found \"x\""));
  ::testing::internal::CaptureStdout();
  app.parse("profile reference");
  EXPECT_EQ(exit_code, 0);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), reference_markdown());
  const std::string good = write("good.yaml", "model: {path: m}\n");
  std::ostringstream out, err;
  EXPECT_EQ(profile_explain_command(good, "model.path", out, err), 0);
  EXPECT_THAT(out.str(), HasSubstr("model.path = " + folder_ + "/m"));
  EXPECT_EQ(profile_explain_command(good, "model.pth", out, err), 1);
  EXPECT_THAT(err.str(), HasSubstr("did you mean model.path?"));
}

}  // namespace
}  // namespace tensorfold
