// A block drafter beside its target in a world of this process, walked along one sequence; and what its reference says.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/tensor_values.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {

inline constexpr int64_t kPages = 5;

/// Folders.
struct Pair {
  std::string target;
  std::string drafter;
};
inline const Pair kPairs[] = {{kFixtures + "qwen3", kFixtures + "dflash"},
                              {kFixtures + "qwen3_5", kFixtures + "dflash2"}};

class Expected {
 public:
  explicit Expected(const std::string& folder) : file_(*SafetensorsFile::open(folder + "/expected.safetensors")) {}
  std::vector<int64_t> ints(const std::string& name) const { return *read_integers(*file_.find(name)); }
  std::vector<float> floats(const std::string& name) const { return *read_floats(*file_.find(name)); }

 private:
  SafetensorsFile file_;
};

struct World {
  std::unique_ptr<ModelShards> shards;
  std::unique_ptr<LocalCluster> cluster;

  World(const Pair& pair, int ranks, const BackendOptions& backend)
      : World(pair.target, DrafterChoice(pair.drafter), ranks, backend) {}
  World(const std::string& target, const DrafterChoice& drafter, int ranks, const BackendOptions& backend) {
    auto loaded = ModelShards::load_all(target, ranks, backend, nullptr, drafter);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok()) return;
    shards = *std::move(loaded);
    LocalClusterOptions options;
    options.backend = backend;
    options.runner.slots = 1;
    options.runner.pages = kPages;
    auto started = LocalCluster::start(*shards, options);
    EXPECT_TRUE(started.ok()) << started.status();
    if (!started.ok()) return;
    cluster = *std::move(started);
    for (int rank = 0; rank < ranks; ++rank) cluster->runner(rank).keep_block_logits(true);
  }
};

// One block: the rows' logits, all ranks' parts together, and what was drafted.
struct Block {
  std::vector<std::vector<float>> rows;
  std::vector<int32_t> drafts;
};

// Walks along `ids`, one sequence, to each anchor, and drafts a block there that is then rejected. On the way windows
// hold right tokens, which are kept, and wrong ones behind them, which are not.
class Walk {
 public:
  Walk(World& world, const std::vector<int64_t>& ids, int64_t chunk) : world_(world), ids_(ids), chunk_(chunk) {}

  /// Right after draft_at(), in the first two pages: the sequence goes on from copies of its pages, in other places.
  void move_to_copies() { moving_ = true; }

  Block draft_at(int64_t anchor) {
    while (at_ < anchor) advance(anchor);
    PassPlan plan;
    SequencePlan& sequence = begin(plan);
    sequence.tokens = {token(at_)};
    sequence.certain = 1;
    sequence.block_drafts = world_.shards->block_drafts();
    const absl::StatusOr<PassResult> pass = world_.cluster->executor().execute(plan);
    EXPECT_TRUE(pass.ok()) << pass.status();
    if (!pass.ok()) return {};
    ++at_;
    Block block;
    block.drafts = pass->drafts[0];
    block.rows.resize(static_cast<size_t>(world_.shards->drafter_facts()->block_size));
    for (int rank = 0; rank < world_.cluster->world(); ++rank) {
      for (const RowReport& part : world_.cluster->runner(rank).block_rows()) {
        std::vector<float>& row = block.rows[part.row];
        row.insert(row.end(), part.logits.begin(), part.logits.end());
      }
    }
    return block;
  }

 private:
  int32_t token(int64_t at) const { return static_cast<int32_t>(ids_[static_cast<size_t>(at)]); }

  SequencePlan& begin(PassPlan& plan) {
    SequencePlan& sequence = plan.sequences.emplace_back();
    sequence.use_block = true;
    sequence.fresh = at_ == 0;
    for (int32_t page = 0; at_ == 0 && page < kPages; ++page) sequence.new_pages.push_back(page);
    if (std::exchange(moving_, false)) {
      plan.orders.copies = {{0, 4}, {1, 3}};
      sequence.fresh = true;
      sequence.new_pages = {4, 3, 2};
    }
    sequence.first_position = static_cast<uint64_t>(at_);
    sequence.accepted = std::exchange(accepted_, 0u);
    return sequence;
  }

  void advance(int64_t anchor) {
    PassPlan plan;
    SequencePlan& sequence = begin(plan);
    const int64_t left = anchor - at_;
    if (at_ == 0 || left > 20) {  // as a prompt
      const int64_t rows = std::min(chunk_, left);
      for (int64_t i = 0; i < rows; ++i) sequence.tokens.push_back(token(at_ + i));
      sequence.certain = static_cast<uint32_t>(rows);
      at_ += rows;
    } else {  // as a window: some right, then two wrong
      const int64_t right = std::min<int64_t>(left - 1, 3);
      for (int64_t i = 0; i <= right; ++i) sequence.tokens.push_back(token(at_ + i));
      for (int64_t i = 1; i <= 2; ++i)
        sequence.tokens.push_back((token(at_ + right) + 7 * static_cast<int32_t>(i)) % 400);
      sequence.certain = 1;
      accepted_ = static_cast<uint32_t>(right);
      at_ += right + 1;
    }
    const absl::StatusOr<PassResult> pass = world_.cluster->executor().execute(plan);
    EXPECT_TRUE(pass.ok()) << pass.status();
  }

  World& world_;
  const std::vector<int64_t>& ids_;
  const int64_t chunk_;
  int64_t at_ = 0;
  uint32_t accepted_ = 0;
  bool moving_ = false;
};

/// Ranks share the GPU.
inline BackendOptions on_gpu(const std::string& launch) {
  BackendOptions backend = {.backend = "cuda", .isa = "auto", .threads = 1};
  backend.launch = launch;
  backend.exchange = "staged";
  return backend;
}

/// Blocks at the anchors have the same bits as graphs and launch by launch, whole and cut, and however the text before
/// came.
inline void expect_same_on_gpu(const std::string& target, const DrafterChoice& drafter, const std::vector<int64_t>& ids,
                               const std::vector<int64_t>& anchors) {
  std::vector<Block> first;
  for (const int ranks : {1, 3, 8}) {
    for (const char* launch : {"eager", "graph"}) {
      SCOPED_TRACE(target + ", " + std::to_string(ranks) + " ranks, " + launch);
      World world(target, drafter, ranks, on_gpu(launch));
      ASSERT_NE(world.cluster, nullptr);
      Walk walk(world, ids, ranks == 1 ? 64 : 23);
      std::vector<Block> blocks;
      for (const int64_t anchor : anchors) blocks.push_back(walk.draft_at(anchor));
      if (first.empty()) first = blocks;
      for (size_t i = 0; i < blocks.size(); ++i) {
        EXPECT_EQ(blocks[i].drafts, first[i].drafts);
        EXPECT_TRUE(blocks[i].rows == first[i].rows) << "logits of block " << i;
      }
    }
  }
}

inline double standard_deviation(const std::vector<float>& values) {
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  double sum = 0;
  for (const float value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size()));
}

}  // namespace tensorfold
