// A loaded fixture, plans of one sequence, and a model that does what a test says.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/runtime/local_cluster.h"

namespace tensorfold {

inline const std::string kFixtureRoot = TENSORFOLD_SOURCE_DIR "/tests/fixtures/";

#define EXPECT_STATUS(status_, code_, ...)                                           \
  do {                                                                               \
    const absl::Status& found_status = (status_);                                    \
    EXPECT_EQ(found_status.code(), code_) << found_status;                           \
    EXPECT_THAT(std::string(found_status.message()), ::testing::AllOf(__VA_ARGS__)); \
  } while (false)

inline std::unique_ptr<Ops> one_thread_ops(const std::string& isa = "auto") {
  auto ops = make_backend({.backend = "cpu", .isa = isa, .threads = 1});
  EXPECT_TRUE(ops.ok()) << ops.status();
  return ops.ok() ? *std::move(ops) : nullptr;
}

/// A fixture loaded for a world, with a cluster on it.
struct TestCluster {
  std::unique_ptr<Ops> packer;
  std::unique_ptr<ModelShards> shards;
  std::unique_ptr<LocalCluster> cluster;

  TestCluster(const std::string& fixture, int world, int64_t slots = 4, int64_t pages = 32,
              const std::string& transport = "local", int64_t snapshots = 0)
      : packer(one_thread_ops()) {
    auto loaded = ModelShards::load_all(kFixtureRoot + fixture, world, *packer);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok()) return;
    shards = *std::move(loaded);
    LocalClusterOptions options;
    options.transport = transport;
    options.backend.threads = 1;
    options.runner.slots = slots;
    options.runner.pages = pages;
    options.runner.snapshots = snapshots;
    auto started = LocalCluster::start(*shards, options);
    EXPECT_TRUE(started.ok()) << started.status();
    if (started.ok()) cluster = *std::move(started);
  }

  PassExecutor& executor() { return cluster->executor(); }
};

/// Tokens of a deterministic text below `vocabulary`.
inline std::vector<int32_t> sample_tokens(size_t count, uint32_t seed = 1, int32_t vocabulary = 480) {
  std::vector<int32_t> tokens;
  uint64_t state = seed;
  for (size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    tokens.push_back(static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(vocabulary)));
  }
  return tokens;
}

/// A plan that starts slot `slot` with `tokens`, all certain, on pages `first_page`…; wants the last row whole.
inline PassPlan prompt_plan(std::vector<int32_t> tokens, int64_t pages = 4, int32_t first_page = 0, uint32_t slot = 0) {
  PassPlan plan;
  SequencePlan& sequence = plan.sequences.emplace_back();
  sequence.slot = slot;
  sequence.fresh = true;
  sequence.certain = static_cast<uint32_t>(tokens.size());
  sequence.tokens = std::move(tokens);
  for (int32_t page = 0; page < pages; ++page) sequence.new_pages.push_back(first_page + page);
  sequence.wants = {{sequence.certain - 1, kFullRow}};
  return plan;
}

/// A plan that goes on: one certain token, then `drafts` that may be rejected; wants all rows whole.
inline PassPlan window_plan(uint64_t position, int32_t token, std::vector<int32_t> drafts = {}, uint32_t accepted = 0,
                            uint32_t slot = 0) {
  PassPlan plan;
  SequencePlan& sequence = plan.sequences.emplace_back();
  sequence.slot = slot;
  sequence.first_position = position;
  sequence.accepted = accepted;
  sequence.certain = 1;
  sequence.tokens = {token};
  sequence.tokens.insert(sequence.tokens.end(), drafts.begin(), drafts.end());
  for (uint32_t row = 0; row < sequence.tokens.size(); ++row) sequence.wants.push_back({row, kFullRow});
  return plan;
}

/// A row's logits, the ranks' parts together.
inline std::vector<float> row_of(const PassResult& pass, uint32_t row, uint32_t slot = 0) {
  std::vector<float> logits;
  for (const PassReport& report : pass.reports) {
    for (const RowReport& part : report.rows) {
      if (part.slot == slot && part.row == row) logits.insert(logits.end(), part.logits.begin(), part.logits.end());
    }
  }
  return logits;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// A model without weights whose forward pass is the test's function; logits are zeros.
class ScriptedModel : public Model {
 public:
  using Forward = std::function<absl::Status(PassContext&, Tensor residual)>;
  ScriptedModel(ShardSpec shard, Forward forward) : forward_(std::move(forward)) {
    shape_.hidden = 16;
    shape_.vocab = 32;
    shape_.layers = 1;
    shape_.kv_layers = 1;
    shape_.kv_heads = 1;
    shape_.head_dim = 16;
    shape_.local_vocab = 32 / shard.world;
    shape_.first_vocab_id = shape_.local_vocab * shard.rank;
  }
  const ModelShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return 0; }
  int64_t weight_values() const override { return 0; }
  absl::Status forward(PassContext& pass, Tensor* hidden) override {
    *hidden = zeros(*pass.ops, pass.rows.rows(), shape_.hidden);
    return forward_(pass, *hidden);
  }
  void logits(PassContext& pass, Tensor hidden, Tensor logits) override {
    const std::vector<float> none(static_cast<size_t>(hidden.rows * logits.cols));
    pass.ops->upload(none, logits);
  }
  absl::Status mtp(PassContext&, Tensor, bool, Tensor*) override { return absl::UnimplementedError("no MTP layer"); }

  static Tensor zeros(Ops& ops, int64_t rows, int64_t cols) {
    const Tensor tensor = ops.scratch(rows, cols);
    ops.upload(std::vector<float>(static_cast<size_t>(rows * cols)), tensor);
    return tensor;
  }

 private:
  ModelShape shape_;
  Forward forward_;
};

}  // namespace tensorfold
