// A server with a small checkpoint, and a pull from it into a folder that goes away with the test.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "coordinator/hub/pull.h"
#include "tests/coordinator/hub/hub_server.h"

namespace tensorfold {

inline std::string bytes_of(size_t size, unsigned seed) {
  std::string out(size, '\0');
  for (char& c : out) c = static_cast<char>((seed = seed * 1664525u + 1013904223u) >> 24);
  return out;
}

class PullTest : public testing::Test {
 protected:
  static constexpr char kA[] = "model-00001-of-00002.safetensors";
  static constexpr char kB[] = "model-00002-of-00002.safetensors";

  void SetUp() override {
    dir_ = std::filesystem::temp_directory_path() / ("tensorfold-pull-" + std::to_string(getpid()));
    std::filesystem::remove_all(dir_);
    fill(server_);
    options_.repository = {"someone/model", "main"};
    options_.dir = (dir_ / "model").string();
    options_.connections = 4;
    options_.chunk_bytes = 4096;
    use(server_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void fill(HubServer& server) {
    server.add("config.json", "{}");
    server.add("tokenizer.json", R"({"model": {}})");
    server.add("model.safetensors.index.json",
               std::string(R"({"metadata": {}, "weight_map": {"a": ")") + kA + R"(", "b": ")" + kB + R"("}})");
    server.add(kA, a_);
    server.add(kB, b_);
    server.add("pytorch_model.bin", "not wanted");
    server.add("figures/plot.json", "{}");
    server.add(".gitattributes", "");
  }

  void use(const HubServer& server) {
    options_.access.endpoint = *parse_url(server.url());
    options_.access.endpoint.target = "";
    options_.access.first_backoff = std::chrono::milliseconds(5);
    options_.access.http.idle_timeout = std::chrono::milliseconds(2000);
  }

  absl::StatusOr<PullResult> pull() {
    PullProgress silent(nullptr, false);
    return pull_checkpoint(options_, rules_, silent);
  }

  // The error's text, which must hold all of `parts`; the folder must not look like a checkpoint.
  void fails(absl::StatusCode code, const std::vector<std::string>& parts) {
    const absl::StatusOr<PullResult> result = pull();
    ASSERT_FALSE(result.ok());
    const std::string message(result.status().message());
    EXPECT_EQ(result.status().code(), code) << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
    EXPECT_FALSE(has("config.json"));
    EXPECT_FALSE(has(kA));
  }

  bool has(const std::string& name) const {
    return std::filesystem::exists(std::filesystem::path(options_.dir) / name);
  }
  std::string read(const std::string& name) const {
    std::ifstream in(std::filesystem::path(options_.dir) / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void expect_whole() const {
    EXPECT_EQ(read(kA), a_);
    EXPECT_EQ(read(kB), b_);
    EXPECT_EQ(read("config.json"), "{}");
    EXPECT_TRUE(has("tokenizer.json"));
    EXPECT_TRUE(has("model.safetensors.index.json"));
    EXPECT_FALSE(has(".tensorfold-pull"));
  }

  const std::string a_ = bytes_of(50001, 1);
  const std::string b_ = bytes_of(30000, 2);
  std::filesystem::path dir_;
  HubServer server_;
  PullOptions options_;
  PullRules rules_;
};

}  // namespace tensorfold
