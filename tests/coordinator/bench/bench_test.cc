#include "coordinator/commands/bench/bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json.hpp>
#include <filesystem>
#include <sstream>

#include "coordinator/commands/bench/shape_bench.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/generated.h"

namespace tensorfold {
namespace {

BenchOptions quick(int world, const std::string& transport) {
  BenchOptions options;
  options.model = TENSORFOLD_SOURCE_DIR "/tests/fixtures/llama";
  options.world = world;
  options.transport = transport;
  options.backend.threads = 1;
  options.widths = {1, 3};
  options.chunks = {16};
  options.context = 20;
  options.prompt_tokens = 32;
  options.reply_tokens = 8;
  options.seconds = 0.05;
  return options;
}

// Protects against figures that are missing, zero or not JSON; never against slow ones: no time is asserted.
void check_report(const BenchReport& report, size_t links) {
  const boost::json::value root = boost::json::parse(report_json(report));
  EXPECT_GT(root.at("limits").at("read_bytes_per_s").as_double(), 0);
  EXPECT_GT(root.at("limits").at("fma_flop_per_s").as_double(), 0);
  ASSERT_EQ(root.at("widths").as_array().size(), 2u);
  EXPECT_EQ(root.at("widths").at(1).at("rows").as_int64(), 3);
  EXPECT_GT(root.at("widths").at(0).at("read_share").as_double(), 0);
  ASSERT_EQ(root.at("prompts").as_array().size(), 1u);
  EXPECT_GT(root.at("prompts").at(0).at("tokens_per_s").as_double(), 0);
  ASSERT_EQ(root.at("decodes").as_array().size(), 3u);
  EXPECT_EQ(root.at("decodes").at(0).at("draft").as_string(), "none");
  EXPECT_EQ(root.at("decodes").at(0).at("rows_per_pass").to_number<double>(), 1.0);
  EXPECT_EQ(root.at("decodes").at(0).at("token_sha"), root.at("decodes").at(2).at("token_sha"));
  EXPECT_EQ(root.at("links").as_array().size(), links);
  std::ostringstream table;
  print_report(report, table);
  EXPECT_NE(table.str().find("x roofline"), std::string::npos);
}

// The plain command: one rank, no links.
TEST(Bench, OneRank) {
  const auto report = run_bench(quick(1, "local"));
  ASSERT_TRUE(report.ok()) << report.status();
  check_report(*report, 0);
}

// Ranks as processes: forked, loaded, measured and gone again.
TEST(Bench, TwoProcesses) {
  const auto report = run_bench(quick(2, "ucx"));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->processes, 2);
  check_report(*report, 5);
}

// Ranks as threads: links are measured there too.
TEST(Bench, TwoThreads) {
  const auto report = run_bench(quick(2, "local"));
  ASSERT_TRUE(report.ok()) << report.status();
  check_report(*report, 5);
}

// Both ends of what a user may get wrong: no such folder, more positions than the model has.
TEST(Bench, BadOptionsAreNamed) {
  BenchOptions options = quick(1, "local");
  options.context = 1 << 20;
  const auto too_long = run_bench(options);
  ASSERT_FALSE(too_long.ok());
  EXPECT_NE(std::string(too_long.status().message()).find("--context"), std::string::npos) << too_long.status();
  options = quick(2, "ucx");
  options.model = "/nonexistent";
  EXPECT_FALSE(run_bench(options).ok());
}

// What --write leaves is a checkpoint like any other: it opens with the same configuration and tensors as the made-up
// one, quantised or not, and what is there already is not written over.
TEST(Bench, WritesAShapeAsACheckpoint) {
  const std::string shape = TENSORFOLD_SOURCE_DIR "/tests/fixtures/qwen3_5/config.json";
  for (const std::string format : {"bf16", "mlx-4bit"}) {
    const std::string folder = ::testing::TempDir() + "/written_" + format;
    std::filesystem::remove_all(folder);
    const absl::Status written = write_shape_checkpoint(shape, format, folder);
    ASSERT_TRUE(written.ok()) << written;
    const auto read = Checkpoint::open(folder);
    ASSERT_TRUE(read.ok()) << read.status();
    const auto made = GeneratedCheckpoint::create(*read_shape(shape), format, shape);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ((*read)->config().quantization.any(), format != "bf16");
    ASSERT_EQ((*read)->names(), (*made)->names());
    for (const std::string& name : (*made)->names()) {
      const TensorInfo* a = (*made)->find(name);
      const TensorInfo* b = (*read)->find(name);
      EXPECT_EQ(a->shape, b->shape) << name;
      EXPECT_TRUE(std::ranges::equal(a->data, b->data)) << name;
    }
    EXPECT_EQ(write_shape_checkpoint(shape, format, folder).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace tensorfold
