// The differential tester over the fixtures and the demo model, its negative control, and golden hashes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>

#include "coordinator/commands/verify/tester.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/reference/negative_control.h"
#include "tests/worker/checkpoint/wide_follower.h"
#include "worker/runtime/backend.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

const std::string kSource = TENSORFOLD_SOURCE_DIR;
const std::string kGolden = kSource + "/tests/differential/golden.txt";

std::string folder(const std::string& name) {
  return name == "sprout" ? kSource + "/deploy/models/sprout" : kSource + "/tests/fixtures/" + name;
}

TesterOptions options_for(const std::string& name) {
  TesterOptions options;
  options.model_dir = folder(name);
  options.drafter = DrafterChoice("", DrafterChoice::Own::kIfThere);  // cells that draft blocks where the model can
  // 70 tokens: a chunk of 64 is neither "all" nor a divisor.
  options.prompt_tokens = 70;
  options.reply_tokens = 12;
  options.stop_after = 2;
  return options;
}

struct Hashes {
  std::string greedy;
  std::string sampled;
};

std::map<std::string, Hashes> read_golden() {
  std::map<std::string, Hashes> golden;
  std::ifstream in(kGolden);
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string name;
    words >> name;
    words >> golden[name].greedy >> golden[name].sampled;
  }
  return golden;
}

// Rewrites one line of golden.txt, the comments kept.
void write_golden(const std::string& name, const Hashes& hashes) {
  std::map<std::string, Hashes> golden = read_golden();
  golden[name] = hashes;
  std::string comments;
  {
    std::ifstream in(kGolden);
    for (std::string line; std::getline(in, line);) {
      if (!line.empty() && line[0] == '#') comments += line + "\n";
    }
  }
  std::ofstream out(kGolden);
  out << comments;
  for (const auto& [key, value] : golden) out << fmt::format("{} {} {}\n", key, value.greedy, value.sampled);
}

void check_golden(const std::string& name, const TesterReport& report) {
  const Hashes found = {report.greedy_hash, report.sampled_hash};
  EXPECT_NE(found.greedy, found.sampled);
  if (std::getenv("TENSORFOLD_UPDATE_GOLDEN") != nullptr) {
    write_golden(name, found);
    return;
  }
  const std::map<std::string, Hashes> golden = read_golden();
  const auto expected = golden.find(name);
  ASSERT_NE(expected, golden.end()) << kGolden << " has no line for " << name << "; found: " << name << " "
                                    << found.greedy << " " << found.sampled;
  EXPECT_EQ(found.greedy, expected->second.greedy) << "the arithmetic changed; see tests/differential/README.md";
  EXPECT_EQ(found.sampled, expected->second.sampled) << "the arithmetic changed; see tests/differential/README.md";
}

// What a sample must contain to mean anything: every value of every axis, and windows of which some drafts were kept
// and some were not.
void check_coverage(const TesterReport& report, const Axes& axes, bool has_mtp, bool has_drafter = false) {
  std::set<std::string> seen;
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  for (const CellOutcome& outcome : report.cells) {
    const Cell& cell = outcome.cell;
    seen.insert(fmt::format("world {}", cell.world));
    if (cell.world > 1) seen.insert(cell.transport);
    seen.insert(cell.variant);
    seen.insert(fmt::format("threads {}", cell.threads));
    seen.insert(draft_name(cell.draft));
    seen.insert(fmt::format("width {}", cell.width));
    seen.insert(fmt::format("chunk {}", cell.chunk));
    seen.insert(cell.mates ? "mates" : "alone");
    seen.insert(cache_name(cell.cache));
    seen.insert(cell.sampled ? "sampled" : "greedy");
    drafted += outcome.drafted;
    accepted += outcome.accepted;
  }
  for (const ScheduleOutcome& outcome : report.schedules) {
    seen.insert("schedule " + schedule_name(outcome.schedule));
  }
  std::set<std::string> wanted = {"off",  "copy", "mixed",  "adversary", "width 1", "mates",  "alone",
                                  "cold", "disk", "prefix", "reply",     "evicted", "greedy", "sampled"};
  for (const char* schedule : {"alone", "mixed", "preempted", "background"}) {
    wanted.insert(fmt::format("schedule {}", schedule));
  }
  if (has_mtp) wanted.insert("mtp");
  if (has_drafter) wanted.insert("block");
  wanted.insert(axes.transports.begin(), axes.transports.end());
  for (const int world : axes.worlds) wanted.insert(fmt::format("world {}", world));
  for (const int threads : axes.threads) wanted.insert(fmt::format("threads {}", threads));
  for (const int width : axes.widths) wanted.insert(fmt::format("width {}", width));
  for (const int chunk : axes.chunks) wanted.insert(fmt::format("chunk {}", chunk));
  for (const std::string& isa : axes.variants.empty() ? available_isas() : axes.variants) wanted.insert(isa);
  for (const std::string& value : wanted) EXPECT_TRUE(seen.count(value)) << "no cell with " << value;
  EXPECT_GT(accepted, 0u);
  EXPECT_LT(accepted, drafted);
}

class Differential : public ::testing::TestWithParam<const char*> {};

// Protects: the promise. Worlds, transports, instruction sets, threads, drafts, widths, chunks and batch-mates leave no
// mark on a reply's ids or on the bits of its logits; and the bits are those that were committed.
TEST_P(Differential, EveryCellHasTheReferencesBits) {
  const std::string name = GetParam();
  TesterOptions options = options_for(name);
  if (name == "sprout") {
    // A real model costs more a cell: fewer values of the axes that the fixtures cover in full.
    options.axes.worlds = {1, 2, 3};
    options.axes.variants = available_isas();
    if (options.axes.variants.size() > 2)
      options.axes.variants.erase(options.axes.variants.begin() + 1, options.axes.variants.end() - 1);
    options.axes.widths = {2, 4, 8};
    options.axes.chunks = {7, 64, 0};
  }
  if (name == "fp8_block" || name == "nvfp4_modelopt") {
    // Formats alone: weights as they are stored, in the axes that products see.
    options.axes.worlds = {1, 3, 8};
    options.axes.widths = {2, 5, 8};
    options.axes.chunks = {7, 64, 0};
  }
  if (name == "nemotron_h") options.axes.worlds = {1, 2, 3, 4};  // its Mamba2 groups are four
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::ostringstream table;
  print_report(*report, report->different > 0, table);
  if (report->different > 0) std::cout << table.str();
  EXPECT_EQ(report->different, 0u);
  std::cout << fmt::format("{}: {} cells in {:.1f} s, {:.1f} cells a second; greedy {}, sampled {}\n", name,
                           report->cells.size(), report->seconds,
                           static_cast<double>(report->cells.size()) / report->seconds, report->greedy_hash,
                           report->sampled_hash);
  check_coverage(*report, options.axes,
                 name == "qwen3_5" || name == "qwen3_5_moe" || name == "sprout" || name == "nemotron_h" ||
                     name == "qwen4_exp" || name == "glm5_next_mtp",
                 name == "deepseek_v4_released" || name == "deepseek_v41");
  check_golden(name, *report);
}

INSTANTIATE_TEST_SUITE_P(Models, Differential,
                         ::testing::Values("llama", "llama3_rope", "qwen3", "qwen3_5", "mlx_4bit", "qwen3_moe",
                                           "qwen3_next", "qwen3_5_moe", "nemotron_h", "qwen4_exp", "glm5_next",
                                           "glm5_next_mtp", "deepseek_v4", "deepseek_v4_released", "deepseek_v41",
                                           "fp8_block", "nvfp4_modelopt", "sprout"),
                         [](const auto& param) { return std::string(param.param); });

// Protects: rows that stand for 128 tokens, two pages, where drafts that are rejected have completed one, and where a
// state is taken over in the middle of one: the prompts above are too short for any.
TEST(DifferentialLongWindows, PooledAcrossPages) {
  TesterOptions options = options_for("deepseek_v4_released");
  options.prompt_tokens = 122;
  options.axes.worlds = {1, 3};
  options.axes.transports = {"local"};
  options.axes.variants = {available_isas().front()};
  options.axes.threads = {2};
  options.axes.widths = {3, 8};
  options.axes.chunks = {7, 0};
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::ostringstream table;
  print_report(*report, report->different > 0, table);
  EXPECT_EQ(report->different, 0u) << table.str();
  check_coverage(*report, options.axes, false, true);
}

// Protects: the same where activations that the model rounds are left as they are; and that the two are not one.
TEST(DifferentialPrecision, FullHasBitsOfItsOwnInEveryCell) {
  TesterOptions options = options_for("deepseek_v41");
  options.precision = "full";
  options.axes.worlds = {1, 3, 8};
  options.axes.variants = {available_isas().front()};
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::ostringstream table;
  print_report(*report, report->different > 0, table);
  EXPECT_EQ(report->different, 0u) << table.str();
  check_coverage(*report, options.axes, false, true);
  check_golden("deepseek_v41:full", *report);
  EXPECT_NE(read_golden().at("deepseek_v41:full").greedy, read_golden().at("deepseek_v41").greedy);
}

// A target and a block drafter for it, for cells that draft with it beside the others.
TesterOptions with_drafter(const std::string& target, const std::string& drafter) {
  TesterOptions options = options_for(target);
  options.drafter = DrafterChoice(folder(drafter));
  options.axes.variants = {available_isas().front(), "portable"};
  options.axes.worlds = {1, 3, 8};
  options.axes.widths = {2, 5, 8};
  options.axes.chunks = {7, 64, 0};
  return options;
}

void expect_no_difference(const TesterOptions& options, bool has_mtp) {
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::ostringstream table;
  print_report(*report, report->different > 0, table);
  EXPECT_EQ(report->different, 0u) << table.str();
  check_coverage(*report, options.axes, has_mtp, true);
  uint64_t drafted = 0;
  for (const CellOutcome& outcome : report->cells) {
    if (outcome.cell.draft == CellDraft::kBlock) drafted += outcome.drafted;
  }
  EXPECT_GT(drafted, 0u);
}

// Protects: block drafters leave no mark, whatever is kept of their drafts: with random weights nearly nothing, on a
// target with an MTP layer and recurrent states; where nothing but the drafter drafts, too.
TEST(DifferentialDrafters, BlocksLeaveNoMark) {
  expect_no_difference(with_drafter("qwen3_5", "dflash2"), true);
  expect_no_difference(with_drafter("qwen3", "dflash"), false);
}

// Protects: the same where drafts are kept, many at once, in windows of every kind and states that move about.
TEST(DifferentialDrafters, KeptBlocksLeaveNoMark) {
  TesterOptions options = with_drafter("follower", "follower_dflash");
  options.prompt_tokens = 70;
  options.reply_tokens = 40;  // its cycle is 8 tokens: what is drafted is right from the tenth on
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->different, 0u);
  EXPECT_NE(report->greedy_hash, report->sampled_hash);
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  for (const CellOutcome& outcome : report->cells) {
    if (outcome.cell.draft != CellDraft::kBlock || outcome.cell.sampled) continue;
    drafted += outcome.drafted;
    accepted += outcome.accepted;
  }
  EXPECT_GT(accepted * 5, drafted) << "hardly any draft of a block was kept";
}

// Protects: the same on a GPU, where blocks and context rows are kept launches of their own beside eager ones; on a
// target that a drafter guesses right, too.
TEST(DifferentialDrafters, BlocksLeaveNoMarkOnGpu) {
  if (const auto ops = make_backend({.backend = "cuda", .isa = "auto", .threads = 1}); !ops.ok()) {
    GTEST_SKIP() << ops.status().message();
  }
  const auto on_gpu = [](TesterOptions options) {
    options.backend = "cuda";
    options.axes.variants = {"eager", "graph"};
    options.axes.threads = {1};
    options.axes.worlds = {1, 3};
    return options;
  };
  expect_no_difference(on_gpu(with_drafter("qwen3_5", "dflash2")), true);
  expect_no_difference(on_gpu(with_drafter("qwen3", "dflash")), false);
  TesterOptions follower = on_gpu(with_drafter("follower", "follower_dflash"));
  follower.model_dir = wide_follower("follower");
  follower.drafter = DrafterChoice(wide_follower("follower_dflash"));
  follower.reply_tokens = 40;
  const absl::StatusOr<TesterReport> report = run_tester(follower);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->different, 0u);
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  for (const CellOutcome& outcome : report->cells) {
    if (outcome.cell.draft != CellDraft::kBlock || outcome.cell.sampled) continue;
    drafted += outcome.drafted;
    accepted += outcome.accepted;
  }
  EXPECT_GT(accepted * 5, drafted) << "hardly any draft of a block was kept";
}

// Cells that a broken kernel must show up in, for a quick negative control.
TesterOptions with_negative_control(const std::string& name) {
  TesterOptions options = options_for(name);
  options.axes.worlds = {1, 3};
  options.axes.transports = {"local"};
  options.axes.threads = {1};
  options.axes.variants = {"auto"};
  options.decorate = [](std::unique_ptr<Ops> ops) { return make_negative_control(std::move(ops)); };
  return options;
}

// Protects: the tester's own worth. An op whose order reads the row count is caught, and its place is named: the first
// position, layer and op that differ.
TEST(DifferentialNegativeControl, IsCaughtAndNamed) {
  for (const char* name : {"llama", "qwen3_5", "mlx_4bit", "qwen3_5_moe", "nemotron_h", "qwen4_exp", "glm5_next",
                           "deepseek_v4", "deepseek_v41"}) {
    SCOPED_TRACE(name);
    TesterOptions options = with_negative_control(name);
    options.stop_after = 1;
    const absl::StatusOr<TesterReport> report = run_tester(options);
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->different, 1u);
    const std::string difference = report->cells.back().difference;
    std::cout << fmt::format("{}: {}: {}\n", name, report->cells.back().cell.name(), difference);
    EXPECT_THAT(difference, HasSubstr("; first at position "));
    EXPECT_THAT(difference, MatchesRegex(".*first at position [0-9]+, layer [0-9]+, [a-z_.]+[a-z].*"));
    EXPECT_THAT(difference, ::testing::Not(HasSubstr("tracing failed")));
    EXPECT_THAT(difference, ::testing::Not(HasSubstr("no intermediate value differs")));
    // Layer 0's first product already differs; nothing before it does.
    EXPECT_THAT(difference, HasSubstr("layer 0, "));
    EXPECT_THAT(difference, ::testing::Not(HasSubstr("input_norm")));
  }
}

// Protects: the negative control alone causes what the test above sees: the same cells without it agree.
TEST(DifferentialNegativeControl, SameCellsAgreeWithoutIt) {
  TesterOptions options = with_negative_control("qwen3_5");
  options.decorate = nullptr;
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->different, 0u);
}

// Protects: a pass's width is what the negative control reads, so a cell of single rows must not be flagged: the tester
// names real differences, not its own noise.
TEST(DifferentialNegativeControl, SingleRowsMatchTheReference) {
  TesterOptions options = with_negative_control("llama");
  options.prompt_tokens = 16;
  options.axes.worlds = {1};
  options.axes.chunks = {1};
  options.axes.drafts = {CellDraft::kOff};
  options.axes.mates = {false};
  // Evicted states are computed again many rows at a time, which the control must see.
  options.axes.caches = {CellCache::kCold, CellCache::kPrefix, CellCache::kReply, CellCache::kDisk};
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->cells.size(), 8u);
  EXPECT_EQ(report->different, 0u);
}

// Protects: the sample leaves out no pair of axis values that the product has, and is the same every time.
TEST(DifferentialCells, SampleCoversEveryPair) {
  Axes axes;
  axes.variants = {"x", "y", "z"};
  const std::vector<Cell> all = product(axes, true, true, 8);
  const std::vector<Cell> sample = pairwise_sample(all, 0);
  EXPECT_LT(sample.size(), all.size() / 20);
  const auto values = [](const Cell& cell) {
    return std::vector<std::string>{
        fmt::format("{}", cell.world),   cell.transport,         cell.variant,
        fmt::format("{}", cell.threads), draft_name(cell.draft), fmt::format("{}", cell.width),
        fmt::format("{}", cell.chunk),   cell.mates ? "m" : "a", cell.sampled ? "s" : "g"};
  };
  const auto pairs = [&](const std::vector<Cell>& cells) {
    std::set<std::string> out;
    for (const Cell& cell : cells) {
      const std::vector<std::string> axis = values(cell);
      for (size_t i = 0; i < axis.size(); ++i) {
        for (size_t j = i + 1; j < axis.size(); ++j) out.insert(fmt::format("{} {} {} {}", i, axis[i], j, axis[j]));
      }
    }
    return out;
  };
  EXPECT_EQ(pairs(sample), pairs(all));
  const std::vector<Cell> again = pairwise_sample(all, 0);
  ASSERT_EQ(again.size(), sample.size());
  for (size_t i = 0; i < again.size(); ++i) EXPECT_EQ(again[i].name(), sample[i].name());
}

// Protects: the product itself: worlds beyond the widest are left out, MTP drafts where there is no MTP layer, and a
// world of one has no transport.
TEST(DifferentialCells, ProductHasWhatTheModelAllows) {
  Axes axes;
  axes.variants = {"x"};
  EXPECT_EQ(product(axes, true, true, 8).size(), (1 + 4 * 2) * 2 * (1 + 5 * 7) * 4 * 2 * 5 * 2u);
  EXPECT_EQ(product(axes, true, false, 8).size(), (1 + 4 * 2) * 2 * (1 + 4 * 7) * 4 * 2 * 5 * 2u);
  for (const Cell& cell : product(axes, false, false, 4)) {
    EXPECT_LE(cell.world, 4);
    EXPECT_NE(cell.draft, CellDraft::kMtp);
    EXPECT_TRUE(cell.world > 1 || cell.transport == "local");
  }
}

}  // namespace
}  // namespace tensorfold
