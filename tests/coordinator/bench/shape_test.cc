// `tensorfold bench --shape`: figures of a tiny shape on the CPU, contexts that do not fit, and what a user gets wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <sstream>

#include "coordinator/commands/bench/plot.h"
#include "coordinator/commands/bench/shape_bench.h"
#include "coordinator/commands/bench/shape_files.h"

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ShapeBenchOptions quick(const std::string& fixture, const std::string& format, int world = 1) {
  ShapeBenchOptions options;
  options.shape = TENSORFOLD_SOURCE_DIR "/tests/fixtures/" + fixture + "/config.json";
  options.format = format;
  options.world = world;
  options.backend.threads = 1;
  options.widths = {1, 16};
  options.contexts = {100, 1024, 1 << 20};
  options.chunks = {96};
  options.prompt_contexts = {512};
  options.seconds = 0.05;
  return options;
}

std::string message(const absl::StatusOr<ShapeReport>& result) {
  return result.ok() ? "no error" : std::string(result.status().message());
}

// All fields, each a figure; no time is asserted.
void check_json(const ShapeReport& report, size_t links) {
  const boost::json::value root = boost::json::parse(shape_report_json(report));
  for (const char* key : {"shape", "format", "kv_format", "backend"}) EXPECT_FALSE(root.at(key).as_string().empty());
  for (const char* key : {"world", "parameters", "weight_bytes", "weight_values"}) {
    EXPECT_GT(root.at(key).as_int64(), 0) << key;
  }
  EXPECT_GT(root.at("limits").at("read_bytes_per_s").as_double(), 0);
  EXPECT_GT(root.at("limits").at("matrix_flop_per_s").as_double(), 0);
  const boost::json::array& contexts = root.at("contexts").as_array();
  ASSERT_EQ(contexts.size(), 2u);
  EXPECT_EQ(contexts[0].at("context").as_int64(), 128);  // whole pages
  EXPECT_EQ(contexts[1].at("context").as_int64(), 1024);
  EXPECT_EQ(contexts[1].at("kv_bytes").as_int64(), 8 * contexts[0].at("kv_bytes").as_int64());
  for (const boost::json::value& context : contexts) {
    ASSERT_EQ(context.at("widths").as_array().size(), 2u);
    for (const boost::json::value& width : context.at("widths").as_array()) {
      for (const char* key : {"best_ms", "p50_ms", "read_bytes_per_s", "read_share", "weight_share", "roofline_ms",
                              "times_roofline", "times_first"}) {
        EXPECT_GT(width.at(key).to_number<double>(), 0) << key;
      }
      EXPECT_GE(width.at("passes").as_int64(), 5);
    }
  }
  ASSERT_EQ(root.at("prompts").as_array().size(), 1u);
  const boost::json::value& prompt = root.at("prompts").at(0);
  EXPECT_EQ(prompt.at("rows").as_int64(), 96);
  EXPECT_EQ(prompt.at("start").as_int64(), 384);  // 512 - 96, a whole page
  EXPECT_GT(prompt.at("tokens_per_s").as_double(), 0);
  EXPECT_GT(prompt.at("matrix_share_with_attention").as_double(), prompt.at("matrix_share").as_double());
  EXPECT_EQ(root.at("links").as_array().size(), links);
  ASSERT_EQ(root.at("left_out").as_array().size(), 1u);
  EXPECT_THAT(std::string(root.at("left_out").at(0).as_string().c_str()), HasSubstr("1048576"));
}

// A hybrid model as MLX would have converted it, on one rank.
TEST(ShapeBench, OneRankOfAHybridModel) {
  const auto report = run_shape_bench(quick("qwen3_5", "mlx-4bit"));
  ASSERT_TRUE(report.ok()) << report.status();
  check_json(*report, 0);
  EXPECT_GT(report->state_bytes, 0);
  EXPECT_EQ(report->kv_format, "f32");
  std::ostringstream table;
  print_shape_report(*report, table);
  EXPECT_THAT(table.str(), AllOf(HasSubstr("x roofline"), HasSubstr("% with attention"),
                                 HasSubstr("left out: a context"
                                           " of 1048576")));
  const std::string svg = shape_report_svg(*report);
  EXPECT_THAT(svg, AllOf(HasSubstr("<svg xmlns"), HasSubstr("1k context, roofline"), HasSubstr("rows of the pass"),
                         HasSubstr("</svg>")));
}

// Blocks of one mixer: Mamba2, attention without positions, experts without gates, and a drafter of two blocks.
TEST(ShapeBench, BlocksOfOneMixer) {
  for (const char* format : {"bf16", "mlx-4bit"}) {
    const auto report = run_shape_bench(quick("nemotron_h", format));
    ASSERT_TRUE(report.ok()) << report.status();
    check_json(*report, 0);
    EXPECT_GT(report->state_bytes, 0);
  }
}

// Ranks as threads: they all stand at the same context, and links are measured.
TEST(ShapeBench, TwoRanks) {
  const auto report = run_shape_bench(quick("llama", "bf16", 2));
  ASSERT_TRUE(report.ok()) << report.status();
  check_json(*report, 5);
}

// A chunk longer than its context begins at an empty cache.
TEST(ShapeBench, LongChunksBeginAtZero) {
  ShapeBenchOptions options = quick("qwen3_5", "mlx-8bit");
  options.contexts = {64};
  options.chunks = {200};
  options.prompt_contexts = {128};
  const auto report = run_shape_bench(options);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->prompts.size(), 1u);
  EXPECT_EQ(report->prompts[0].start, 0);
  EXPECT_EQ(report->prompts[0].chunk, 200);
}

// Names of the shapes that ship are found wherever the program stands.
TEST(ShapeBench, ShapesThatShipAreFoundByName) {
  for (const char* name : {"qwen3.8-27b", "qwen3.5-2b", "llama-8b", "nemotron-3.5-lightning"}) {
    EXPECT_TRUE(find_shape(name).ok()) << name;
  }
}

// Every mistake is named with what there is instead.
TEST(ShapeBench, BadOptionsAreNamed) {
  ShapeBenchOptions options = quick("qwen3_5", "mlx-4bit");
  options.shape = "qwen9";
  EXPECT_THAT(
      message(run_shape_bench(options)),
      AllOf(HasSubstr("qwen9"), HasSubstr("llama-8b, nemotron-3.5-lightning, qwen3-30b-a3b, qwen3.5-2b, qwen3.8-27b")));
  options.shape = "/nonexistent/shape.json";
  EXPECT_THAT(message(run_shape_bench(options)), HasSubstr("no such file"));
  options.shape = TENSORFOLD_SOURCE_DIR "/tests/fixtures/refuse_awq/config.json";
  EXPECT_THAT(message(run_shape_bench(options)), HasSubstr("awq"));
  options = quick("qwen3_5", "int4");
  EXPECT_THAT(message(run_shape_bench(options)), AllOf(HasSubstr("int4"), HasSubstr("mlx-8bit")));
  options = quick("qwen3_5", "bf16", 64);
  EXPECT_THAT(message(run_shape_bench(options)), HasSubstr("world"));
  options = quick("qwen3_5", "bf16");
  options.contexts = {1 << 20};
  options.prompt_contexts = {1 << 20};
  EXPECT_THAT(message(run_shape_bench(options)), AllOf(HasSubstr("nothing can be measured"), HasSubstr("positions")));
}

// Labels come from file names: they must not break the file.
TEST(Plot, TextIsEscaped) {
  const std::string svg = svg_plots("a<b & \"c\"", "", {{"t", "x", "y", {{"<line>", {{1, 2}, {2, 3}}, 0, false}}}});
  EXPECT_THAT(svg, AllOf(HasSubstr("a&lt;b &amp; &quot;c&quot;"), HasSubstr("&lt;line&gt;")));
  EXPECT_EQ(svg.find("<line>"), std::string::npos);
}

}  // namespace
}  // namespace tensorfold
