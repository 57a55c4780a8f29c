// Families against the float64 references: logits, MTP logits and greedy continuations of every fixture, and sprout's.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <numeric>

#include "worker/checkpoint/tensor_values.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

const std::string kSource = TENSORFOLD_SOURCE_DIR;

constexpr const char* kStored[] = {"fp8_block",     "fp8_tensor",     "nvfp4_modelopt", "nvfp4_compressed_tensors",
                                   "exl3_mcg_4bit", "exl3_mul1_3bit", "exl3_3inst_4bit"};

// Freshly generated fixtures may be tested too: TENSORFOLD_FIXTURES names a folder of such folders.
std::vector<std::string> fixture_folders() {
  std::vector<std::string> folders;
  for (const char* name : {"llama", "llama3_rope", "qwen3", "qwen3_5", "mlx_4bit", "qwen3_moe", "qwen3_next",
                           "qwen3_5_moe", "nemotron_h", "qwen4_exp", "glm5_next", "glm5_next_mtp", "deepseek_v4",
                           "deepseek_v4_released", "deepseek_v4_quantised", "deepseek_v41"}) {
    folders.push_back(kSource + "/tests/fixtures/" + name);
  }
  for (const char* name : kStored) folders.push_back(kSource + "/tests/fixtures/" + name);
  if (const char* more = std::getenv("TENSORFOLD_FIXTURES"); more != nullptr) {
    for (const auto& entry : std::filesystem::directory_iterator(more)) folders.push_back(entry.path());
  }
  return folders;
}

/// Of the worlds 1, 2, 3, 4, 8 those that the model's slices allow: at least the first four.
std::vector<int> legal_worlds(const std::string& dir) {
  const auto config = read_config(dir);
  EXPECT_TRUE(config.ok()) << config.status();
  const auto shape = model_shape(*config, {1, 0});
  EXPECT_TRUE(shape.ok()) << shape.status();
  EXPECT_GE(shape->slices.widest_world(), 4);
  std::vector<int> worlds;
  for (const int world : {1, 2, 3, 4, 8}) {
    if (world <= shape->slices.widest_world()) worlds.push_back(world);
  }
  return worlds;
}

struct World {
  std::unique_ptr<ModelShards> shards;
  std::unique_ptr<LocalCluster> cluster;
};

const BackendOptions kCpu = {.backend = "cpu", .isa = "auto", .threads = 1};

World open_world(const std::string& dir, int world, int64_t pages, const BackendOptions& backend = kCpu) {
  World out;
  auto shards = ModelShards::load_all(dir, world, backend);
  EXPECT_TRUE(shards.ok()) << shards.status();
  if (!shards.ok()) return out;
  out.shards = *std::move(shards);
  LocalClusterOptions options;
  options.backend = backend;
  options.runner.slots = 1;
  options.runner.pages = pages;
  auto cluster = LocalCluster::start(*out.shards, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (cluster.ok()) out.cluster = *std::move(cluster);
  return out;
}

struct Rows {
  std::map<int64_t, std::vector<float>> logits;  // by position
  std::map<int64_t, std::vector<float>> mtp;     // by pair
};

void put(std::map<int64_t, std::vector<float>>& rows, int64_t at, int64_t vocab, const RowReport& part) {
  std::vector<float>& row = rows[at];
  row.resize(static_cast<size_t>(vocab));
  std::copy(part.logits.begin(), part.logits.end(), row.begin() + part.first_id);
}

// All positions' logits of a token sequence, read in chunks.
Rows run_tokens(World& world, const std::vector<int64_t>& ids, int64_t chunk) {
  const ModelShape& shape = world.shards->shape(0);
  for (int rank = 0; rank < world.cluster->world(); ++rank) world.cluster->runner(rank).keep_mtp_logits(shape.has_mtp);
  Rows rows;
  const int64_t total = static_cast<int64_t>(ids.size());
  for (int64_t at = 0; at < total; at += chunk) {
    PassPlan plan;
    SequencePlan& sequence = plan.sequences.emplace_back();
    sequence.fresh = at == 0;
    sequence.use_mtp = shape.has_mtp;
    sequence.first_position = static_cast<uint64_t>(at);
    const int64_t count = std::min(chunk, total - at);
    for (int64_t i = 0; i < count; ++i) {
      sequence.tokens.push_back(static_cast<int32_t>(ids[static_cast<size_t>(at + i)]));
      sequence.wants.push_back({static_cast<uint32_t>(i), kFullRow});
    }
    sequence.certain = static_cast<uint32_t>(count);
    for (int64_t page = 0; at == 0 && page <= total / kPageTokens; ++page) {
      sequence.new_pages.push_back(static_cast<int32_t>(page));
    }
    const auto pass = world.cluster->executor().execute(plan);
    EXPECT_TRUE(pass.ok()) << pass.status();
    if (!pass.ok()) return rows;
    for (const PassReport& report : pass->reports) {
      for (const RowReport& part : report.rows) put(rows.logits, at + part.row, shape.vocab, part);
    }
    for (int rank = 0; rank < world.cluster->world(); ++rank) {
      for (const RowReport& part : world.cluster->runner(rank).mtp_rows()) {
        put(rows.mtp, part.row, shape.vocab, part);
      }
    }
  }
  return rows;
}

double standard_deviation(const std::vector<float>& values) {
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  double sum = 0;
  for (const float value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// Each row's largest difference in units of the expected logits' standard deviation, ascending.
std::vector<double> row_errors(const std::vector<float>& expected, const std::vector<int64_t>& positions,
                               const std::map<int64_t, std::vector<float>>& rows) {
  const double deviation = standard_deviation(expected);
  const size_t vocab = expected.size() / positions.size();
  std::vector<double> errors;
  for (size_t p = 0; p < positions.size(); ++p) {
    const auto row = rows.find(positions[p]);
    double worst = row == rows.end() ? INFINITY : 0;
    for (size_t i = 0; row != rows.end() && i < vocab; ++i) {
      const double difference = std::abs(static_cast<double>(expected[p * vocab + i]) - row->second[i]);
      worst = std::max(worst, std::isnan(difference) ? INFINITY : difference);
    }
    errors.push_back(worst / deviation);
  }
  std::sort(errors.begin(), errors.end());
  return errors;
}

double worst_error(const std::vector<float>& expected, const std::vector<int64_t>& positions,
                   const std::map<int64_t, std::vector<float>>& rows) {
  return row_errors(expected, positions, rows).back();
}

class Expected {
 public:
  explicit Expected(const std::string& path) : file_(*SafetensorsFile::open(path)) {}
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  std::vector<int64_t> ints(const std::string& name) const { return *read_integers(*file_.find(name)); }
  std::vector<float> floats(const std::string& name) const { return *read_floats(*file_.find(name)); }

 private:
  SafetensorsFile file_;
};

// Protects: every family and format computes what its published definition says, to fp32 accuracy, in any chunking and
// any world.
TEST(Fixtures, LogitsAgreeWithFloat64) {
  for (const std::string& dir : fixture_folders()) {
    SCOPED_TRACE(dir);
    const Expected expected(dir + "/expected.safetensors");
    const std::vector<int64_t> ids = expected.ints("input_ids");
    const std::vector<int64_t> positions = expected.ints("positions");
    for (const int ranks : legal_worlds(dir)) {
      World world = open_world(dir, ranks, static_cast<int64_t>(ids.size()) / kPageTokens + 1);
      ASSERT_NE(world.cluster, nullptr);
      for (const int64_t chunk : {int64_t{512}, int64_t{37}}) {
        const Rows rows = run_tokens(world, ids, chunk);
        const double error = worst_error(expected.floats("logits"), positions, rows.logits);
        std::printf("%s ranks %d chunk %d: worst logit error %.2e of the standard deviation\n", dir.c_str(), ranks,
                    static_cast<int>(chunk), error);
        EXPECT_LT(error, 2e-4);
        if (!expected.has("mtp_logits")) continue;
        const std::vector<int64_t> pairs(positions.begin(), positions.end() - 1);
        const double mtp_error = worst_error(expected.floats("mtp_logits"), pairs, rows.mtp);
        std::printf("%s ranks %d chunk %d: worst MTP logit error %.2e\n", dir.c_str(), ranks, static_cast<int>(chunk),
                    mtp_error);
        EXPECT_LT(mtp_error, 2e-4);
      }
    }
  }
}

// Protects: precision "full" leaves out the rounding that is a part of the model, and nothing else.
TEST(Fixtures, FullPrecisionAgreesWithFloat64) {
  BackendOptions full = kCpu;
  full.precision = "full";
  int checked = 0;
  for (const std::string& dir : fixture_folders()) {
    const Expected expected(dir + "/expected.safetensors");
    if (!expected.has("full.logits")) continue;
    SCOPED_TRACE(dir);
    const std::vector<int64_t> ids = expected.ints("input_ids");
    for (const int ranks : legal_worlds(dir)) {
      World world = open_world(dir, ranks, static_cast<int64_t>(ids.size()) / kPageTokens + 1, full);
      ASSERT_NE(world.cluster, nullptr);
      const Rows rows = run_tokens(world, ids, 37);
      const double error = worst_error(expected.floats("full.logits"), expected.ints("positions"), rows.logits);
      std::printf("%s full, ranks %d: worst logit error %.2e of the standard deviation\n", dir.c_str(), ranks, error);
      EXPECT_LT(error, 2e-4);
      // The two are far from each other, so that neither can pass for the other.
      EXPECT_GT(worst_error(expected.floats("logits"), expected.ints("positions"), rows.logits), 1e-2);
    }
    ++checked;
  }
  EXPECT_GE(checked, 1);
}

// Protects: formats whose blocks are larger than a rank's share: the same numbers, to fp32 accuracy, at every world.
TEST(Fixtures, StoredFormatsAgreeAtEveryWorld) {
  for (const char* name : kStored) {
    SCOPED_TRACE(name);
    const std::string dir = kSource + "/tests/fixtures/" + name;
    const Expected expected(dir + "/expected.safetensors");
    const std::vector<int64_t> ids = expected.ints("input_ids");
    for (const int ranks : {2, 3, 4, 8}) {
      World world = open_world(dir, ranks, static_cast<int64_t>(ids.size()) / kPageTokens + 1);
      ASSERT_NE(world.cluster, nullptr);
      const Rows rows = run_tokens(world, ids, 512);
      const double error = worst_error(expected.floats("logits"), expected.ints("positions"), rows.logits);
      std::printf("%s, %d ranks: worst logit error %.2e of the standard deviation\n", name, ranks, error);
      EXPECT_LT(error, 2e-4);
    }
  }
}

// Protects: greedy continuations, step by step, wherever the reference's choice is not a near-tie.
TEST(Fixtures, GreedyContinuationsAgree) {
  for (const std::string& dir : fixture_folders()) {
    SCOPED_TRACE(dir);
    const Expected expected(dir + "/expected.safetensors");
    if (!expected.has("greedy")) continue;
    std::vector<int64_t> ids = expected.ints("input_ids");
    ids.resize(32);
    const std::vector<int64_t> greedy = expected.ints("greedy");
    const std::vector<float> margin = expected.floats("margin");
    ids.insert(ids.end(), greedy.begin(), greedy.end());
    World world = open_world(dir, 2, 2);
    ASSERT_NE(world.cluster, nullptr);
    const Rows rows = run_tokens(world, ids, 16);
    for (size_t step = 0; step < greedy.size(); ++step) {
      if (margin[step] <= 1e-3f) continue;
      const std::vector<float>& row = rows.logits.at(static_cast<int64_t>(31 + step));
      const auto best = std::max_element(row.begin(), row.begin() + 490);  // the reference bars ids from 490 up
      EXPECT_EQ(best - row.begin(), greedy[step]) << "step " << step;
    }
  }
}

// Protects: the demo model computes what its README says: logits, greedy text, and the MTP layer's first draft step.
TEST(Fixtures, SproutMeetsItsReference) {
  const std::string dir = kSource + "/deploy/models/sprout";
  const Expected expected(dir + "/expected.safetensors");
  for (const std::string prompt : {"p0", "p1", "p2"}) {
    SCOPED_TRACE(prompt);
    std::vector<int64_t> ids = expected.ints(prompt + ".input_ids");
    const size_t length = ids.size();
    const std::vector<int64_t> greedy = expected.ints(prompt + ".greedy");
    ids.insert(ids.end(), greedy.begin(), greedy.end());
    World world = open_world(dir, 2, static_cast<int64_t>(ids.size()) / kPageTokens + 1);
    ASSERT_NE(world.cluster, nullptr);
    const Rows rows = run_tokens(world, ids, 256);
    const std::vector<int64_t> positions = expected.ints(prompt + ".positions");
    const double error = worst_error(expected.floats(prompt + ".logits"), positions, rows.logits);
    std::printf("sprout %s: worst logit error %.2e of the standard deviation\n", prompt.c_str(), error);
    EXPECT_LT(error, 2e-4);
    for (size_t step = 0; step < greedy.size(); ++step) {
      const std::vector<float>& row = rows.logits.at(static_cast<int64_t>(length + step - 1));
      EXPECT_EQ(std::max_element(row.begin(), row.end()) - row.begin(), greedy[step]) << "step " << step;
    }
    if (!expected.has(prompt + ".mtp1_logits")) continue;
    const double mtp_error = worst_error(expected.floats(prompt + ".mtp1_logits"), positions, rows.mtp);
    std::printf("sprout %s: worst MTP logit error %.2e\n", prompt.c_str(), mtp_error);
    EXPECT_LT(mtp_error, 2e-4);
  }
}

// Rows whose best id is not the reference's although the reference's margin is larger than the error allows.
int wrong_choices(const std::vector<float>& expected, const std::vector<int64_t>& positions,
                  const std::map<int64_t, std::vector<float>>& rows, double margin) {
  int wrong = 0;
  const size_t vocab = expected.size() / positions.size();
  for (size_t p = 0; p < positions.size(); ++p) {
    const std::span<const float> want(expected.data() + p * vocab, vocab);
    const size_t best = static_cast<size_t>(std::max_element(want.begin(), want.end()) - want.begin());
    float second = -INFINITY;
    for (size_t i = 0; i < vocab; ++i) {
      if (i != best) second = std::max(second, want[i]);
    }
    if (want[best] - second <= margin) continue;
    const std::vector<float>& row = rows.at(positions[p]);
    wrong += static_cast<size_t>(std::max_element(row.begin(), row.end()) - row.begin()) == best ? 0 : 1;
  }
  return wrong;
}

// What the CUDA backend refuses when it is loaded, and a word of why: operations that it has not, slices too narrow.
constexpr std::array<std::pair<std::string_view, const char*>, 2> kNotOnGpu = {
    {{"deepseek_v41", "does not compute"}, {"deepseek_v4_quantised", "multiples of 8 columns"}}};

// How far rows may be from float64. What bf16 inputs of products cost by themselves, seen on the CPU backend with
// nothing but those rounded to bf16: dense models' worst rows are 0.028, 0.020, 0.022, 0.014 away; qwen3_5's 0.19,
// whose delta net of 32-wide heads amplifies them (0.05 with the delta net's own projection unrounded). Where experts
// are nearly tied a row may choose another one, which is no small error: one of qwen3_moe's 49 rows is 0.49 away and
// the others at most 0.018; qwen3_next's worst is 0.87, with a median of 0.023; qwen3_5_moe's 0.42 (its MTP logits
// 0.43), median 0.022; nemotron_h's 0.06 (MTP 0.18), medians 0.015 and 0.021, and, inputs moved by up to a quarter of
// their last bf16 bit before the rounding, 0.03 to 0.80 (MTP 0.04 to 0.86). Where windows of tokens are chosen the same
// happens, and recurrences of 16-wide heads amplify more: with bf16 queries and rows of latents too, glm5_next's worst
// is 1.31 (21 of 25 rows within 0.3), glm5_next_mtp's 1.32 (its MTP logits 1.33, 27 of 32 within 0.6),
// deepseek_v4's 1.15 (24 of 25 within 0.15), deepseek_v4_released's 0.24 and deepseek_v4_quantised's 0.025. Rows that
// have nothing to do with the expected ones are 4 away. qwen4_exp's worst are 0.054 and 0.059.
struct Allowance {
  double worst = 4e-2;
  double within = 1.0;  // share of the rows that must be
  double near = 4e-2;   // at most this far away
};

Allowance allowance_of(const std::string& fixture) {
  if (fixture == "qwen3_5") return {0.25, 0.7};
  if (fixture == "qwen3_moe") return {1.0, 0.8};
  if (fixture == "qwen3_next" || fixture == "qwen3_5_moe" || fixture == "nemotron_h" || fixture == "qwen4_exp")
    return {1.2, 0.6};
  if (fixture == "glm5_next") return {2.0, 0.65, 0.3};
  if (fixture == "glm5_next_mtp") return {2.0, 0.65, 0.6};
  if (fixture == "deepseek_v4") return {2.0, 0.8, 0.15};
  if (fixture == "deepseek_v4_released") return {1.0, 0.8, 0.15};
  return {};
}

void expect_accuracy(const std::string& what, const std::vector<double>& errors, const Allowance& allowed) {
  const auto within = std::upper_bound(errors.begin(), errors.end(), allowed.near) - errors.begin();
  std::printf("%s: worst error %.2e of the standard deviation, median %.2e, %d of %d rows within %.0e\n", what.c_str(),
              errors.back(), errors[errors.size() / 2], static_cast<int>(within), static_cast<int>(errors.size()),
              allowed.near);
  EXPECT_LT(errors.back(), allowed.worst) << what;
  EXPECT_GE(static_cast<double>(within), allowed.within * static_cast<double>(errors.size())) << what;
}

class FixturesOnGpu : public ::testing::TestWithParam<const char*> {};

// Protects: the CUDA backend computes the same models, to the accuracy of bf16 products, as graphs and launch by
// launch, whole and in chunks, alone and cut into three ranks on one GPU.
TEST_P(FixturesOnGpu, LogitsAgreeWithFloat64) {
  BackendOptions backend = {.backend = "cuda", .isa = "auto", .threads = 1};
  backend.launch = GetParam();
  backend.exchange = "staged";
  if (const auto ops = make_backend(backend); !ops.ok()) GTEST_SKIP() << ops.status().message();
  const std::unique_ptr<Ops> packer = *make_backend(backend);
  for (const std::string& dir : fixture_folders()) {
    SCOPED_TRACE(dir);
    const std::string name = std::filesystem::path(dir).filename().string();
    const auto refused = std::find_if(kNotOnGpu.begin(), kNotOnGpu.end(),
                                      [&](const auto& entry) { return name.starts_with(entry.first); });
    if (refused != kNotOnGpu.end()) {
      const auto shards = ModelShards::load_all(dir, 1, *packer);
      ASSERT_FALSE(shards.ok());
      EXPECT_THAT(std::string(shards.status().message()), ::testing::HasSubstr(refused->second));
      continue;
    }
    const Allowance allowed = allowance_of(name);
    const Expected expected(dir + "/expected.safetensors");
    const std::vector<int64_t> ids = expected.ints("input_ids");
    const std::vector<int64_t> positions = expected.ints("positions");
    const std::vector<float> logits = expected.floats("logits");
    const double margin = allowed.worst * standard_deviation(logits);
    for (const int ranks : {1, 3}) {
      World world = open_world(dir, ranks, static_cast<int64_t>(ids.size()) / kPageTokens + 1, backend);
      ASSERT_NE(world.cluster, nullptr);
      for (const int64_t chunk : {int64_t{512}, int64_t{37}}) {
        const Rows rows = run_tokens(world, ids, chunk);
        const std::string what = fmt::format("{} ranks {} chunk {}", name, ranks, chunk);
        expect_accuracy(what + ": logits", row_errors(logits, positions, rows.logits), allowed);
        EXPECT_EQ(wrong_choices(logits, positions, rows.logits, margin), 0);
        if (!expected.has("mtp_logits")) continue;
        const std::vector<int64_t> pairs(positions.begin(), positions.end() - 1);
        expect_accuracy(what + ": MTP logits", row_errors(expected.floats("mtp_logits"), pairs, rows.mtp), allowed);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Launch, FixturesOnGpu, ::testing::Values("eager", "graph"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace tensorfold
