// Families with experts: other layouts of the same weights, layers without experts between those with, and refusals.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/isa.h"
#include "tests/worker/checkpoint/model_copy.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const BackendOptions kCpu = {.backend = "cpu", .isa = "auto", .threads = 1};

std::string load_error(const std::string& dir, int world = 1) {
  const auto shards = ModelShards::load_all(dir, world, kCpu);
  return shards.ok() ? "no error" : std::string(shards.status().message());
}

// Logits and MTP logits of a prompt of 70 tokens in passes of 33, or nothing.
std::vector<float> run_model(const std::string& dir, int ranks) {
  const auto shards = ModelShards::load_all(dir, ranks, kCpu);
  EXPECT_TRUE(shards.ok()) << shards.status();
  if (!shards.ok()) return {};
  LocalClusterOptions options;
  options.backend = kCpu;
  options.runner.slots = 1;
  options.runner.pages = 2;
  auto cluster = LocalCluster::start(**shards, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return {};
  const bool mtp = (*shards)->shape(0).has_mtp;
  for (int rank = 0; rank < ranks; ++rank) (*cluster)->runner(rank).keep_mtp_logits(mtp);
  constexpr int64_t kTokens = 70, kVocab = 512;
  std::vector<float> out(2 * kTokens * kVocab);
  const auto put = [&](int64_t row, const RowReport& part) {
    std::copy(part.logits.begin(), part.logits.end(), out.begin() + row * kVocab + part.first_id);
  };
  for (int64_t at = 0; at < kTokens; at += 33) {
    PassPlan plan;
    SequencePlan& sequence = plan.sequences.emplace_back();
    sequence.fresh = at == 0;
    sequence.use_mtp = mtp;
    sequence.first_position = static_cast<uint64_t>(at);
    for (int64_t i = at; i < std::min<int64_t>(at + 33, kTokens); ++i) {
      sequence.tokens.push_back(static_cast<int32_t>(i * 37 % 500));
      sequence.wants.push_back({static_cast<uint32_t>(i - at), kFullRow});
    }
    sequence.certain = static_cast<uint32_t>(sequence.tokens.size());
    if (at == 0) sequence.new_pages = {0, 1};
    const auto pass = (*cluster)->executor().execute(plan);
    EXPECT_TRUE(pass.ok()) << pass.status();
    if (!pass.ok()) return {};
    for (const PassReport& report : pass->reports) {
      for (const RowReport& part : report.rows) put(at + part.row, part);
    }
    for (int rank = 0; mtp && rank < ranks; ++rank) {
      for (const RowReport& part : (*cluster)->runner(rank).mtp_rows()) put(kTokens + part.row, part);
    }
  }
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void remove_tensors(ModelCopy& copy, const std::string& part) {
  std::erase_if(copy.tensors, [&](const OwnedTensor& t) { return t.name.find(part) != std::string::npos; });
}

// Rows [first, first + count) of a matrix.
void append_rows(OwnedTensor& to, const OwnedTensor& from, int64_t first, int64_t count) {
  const auto row = static_cast<int64_t>(from.bytes.size()) / from.shape[0];
  to.bytes.insert(to.bytes.end(), from.bytes.begin() + first * row, from.bytes.begin() + (first + count) * row);
  to.shape[0] += count;
}

// qwen3_5_moe's fixture under qwen3_next's names: in_proj_qkv, z, b, a fused by key head.
ModelCopy as_qwen3_next() {
  ModelCopy copy = ModelCopy::of(kFixtures + "qwen3_5_moe");
  remove_tensors(copy, ".visual.");
  for (OwnedTensor& t : copy.tensors) {
    const size_t at = t.name.find("model.language_model.");
    if (at == 0) t.name.replace(0, 21, "model.");
  }
  constexpr int64_t kHeads = 4, kDim = 32, kGroup = 2;
  for (int layer = 0; layer < 3; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.linear_attn.", layer);
    const OwnedTensor qkv = copy.at(prefix + "in_proj_qkv.weight"), z = copy.at(prefix + "in_proj_z.weight"),
                      b = copy.at(prefix + "in_proj_b.weight"), a = copy.at(prefix + "in_proj_a.weight");
    OwnedTensor qkvz{prefix + "in_proj_qkvz.weight", qkv.dtype, {0, qkv.shape[1]}, {}};
    OwnedTensor ba{prefix + "in_proj_ba.weight", b.dtype, {0, b.shape[1]}, {}};
    for (int64_t head = 0; head < kHeads; ++head) {
      append_rows(qkvz, qkv, head * kDim, kDim);
      append_rows(qkvz, qkv, (kHeads + head) * kDim, kDim);
      append_rows(qkvz, qkv, (2 * kHeads + head * kGroup) * kDim, kGroup * kDim);
      append_rows(qkvz, z, head * kGroup * kDim, kGroup * kDim);
      append_rows(ba, b, head * kGroup, kGroup);
      append_rows(ba, a, head * kGroup, kGroup);
    }
    for (const char* name : {"in_proj_qkv.", "in_proj_z.", "in_proj_b.", "in_proj_a."})
      remove_tensors(copy, prefix + name);
    copy.tensors.push_back(qkvz);
    copy.tensors.push_back(ba);
  }
  const ModelCopy next = ModelCopy::of(kFixtures + "qwen3_next");
  copy.config = next.config;
  return copy;
}

// Protects: qwen3_next's fused inputs are taken apart right, at every cut, and its MTP layer is read although its
// configuration does not count it: the same weights give qwen3_5_moe's bits.
TEST(Experts, FusedDeltaNetInputsGiveTheSameBits) {
  const std::string dir = as_qwen3_next().write("as_next");
  const std::vector<float> want = run_model(kFixtures + "qwen3_5_moe", 1);
  for (const int ranks : {1, 2, 3, 8}) EXPECT_TRUE(same_bits(run_model(dir, ranks), want)) << ranks << " ranks";
}

// Experts 0 to 7 of `module` stacked, parts one after another within an expert.
OwnedTensor stack(const ModelCopy& copy, const std::string& prefix, const std::vector<std::string>& parts,
                  const std::string& name, const std::string& kind = "weight") {
  ModelCopy reader = copy;
  OwnedTensor out{name, Dtype::kBf16, {8, 0, 0}, {}};
  for (int e = 0; e < 8; ++e) {
    for (const std::string& part : parts) {
      const OwnedTensor& t = reader.at(fmt::format("{}.experts.{}.{}.{}", prefix, e, part, kind));
      out.dtype = t.dtype;
      out.bytes.insert(out.bytes.end(), t.bytes.begin(), t.bytes.end());
      if (e == 0) out.shape[1] += t.shape[0];
      out.shape[2] = t.shape[1];
    }
  }
  return out;
}

// Protects: experts stacked as experts.gate_up_proj or as MLX's switch_mlp are the same experts, the MTP layer's too.
TEST(Experts, StackedExpertsGiveTheSameBits) {
  const ModelCopy plain = ModelCopy::of(kFixtures + "qwen3_5_moe");
  const std::vector<float> want = run_model(kFixtures + "qwen3_5_moe", 1);
  ModelCopy fused = plain, switched = plain;
  remove_tensors(fused, ".mlp.experts.");
  remove_tensors(switched, ".mlp.experts.");
  for (const std::string layer : {"model.language_model.layers.0", "model.language_model.layers.1",
                                  "model.language_model.layers.2", "model.language_model.layers.3", "mtp.layers.0"}) {
    const std::string at = layer + ".mlp";
    fused.tensors.push_back(stack(plain, at, {"gate_proj", "up_proj"}, at + ".experts.gate_up_proj"));
    fused.tensors.push_back(stack(plain, at, {"down_proj"}, at + ".experts.down_proj"));
    for (const std::string part : {"gate_proj", "up_proj", "down_proj"}) {
      switched.tensors.push_back(stack(plain, at, {part}, fmt::format("{}.switch_mlp.{}.weight", at, part)));
    }
  }
  for (const int ranks : {1, 3}) {
    EXPECT_TRUE(same_bits(run_model(fused.write("fused"), ranks), want)) << ranks << " ranks";
    EXPECT_TRUE(same_bits(run_model(switched.write("switched"), ranks), want)) << ranks << " ranks";
  }
  fused.tensors.back().shape = {8, 32, 128};
  EXPECT_THAT(load_error(fused.write("bad")), AllOf(HasSubstr("experts.down_proj"), HasSubstr("[8, 64, 64]")));
}

// Protects: nemotron_h under the names of other writers gives the same bits, MTP logits too: the prefix model., experts
// stacked without gates, or MLX's fc1 and fc2 beside its layout of convolutions.
TEST(Experts, NemotronLayoutsGiveTheSameBits) {
  const ModelCopy plain = ModelCopy::of(kFixtures + "nemotron_h");
  const std::vector<float> want = run_model(kFixtures + "nemotron_h", 1);
  ModelCopy renamed = plain, stacked = plain, mlx = plain;
  for (OwnedTensor& t : renamed.tensors) {
    if (t.name.starts_with("backbone.")) t.name.replace(0, 9, "model.");
  }
  for (OwnedTensor& t : mlx.tensors) {
    if (t.name.ends_with("conv1d.weight")) std::swap(t.shape[1], t.shape[2]);
  }
  remove_tensors(stacked, ".mixer.experts.");
  remove_tensors(mlx, ".mixer.experts.");
  for (const std::string layer : {"backbone.layers.1", "backbone.layers.5", "mtp.layers.1"}) {
    const std::string at = layer + ".mixer";
    stacked.tensors.push_back(stack(plain, at, {"up_proj"}, at + ".experts.up_proj"));
    stacked.tensors.push_back(stack(plain, at, {"down_proj"}, at + ".experts.down_proj"));
    mlx.tensors.push_back(stack(plain, at, {"up_proj"}, at + ".switch_mlp.fc1.weight"));
    mlx.tensors.push_back(stack(plain, at, {"down_proj"}, at + ".switch_mlp.fc2.weight"));
  }
  for (const int ranks : {1, 3}) {
    EXPECT_TRUE(same_bits(run_model(renamed.write("renamed"), ranks), want)) << ranks << " ranks";
    EXPECT_TRUE(same_bits(run_model(stacked.write("stacked"), ranks), want)) << ranks << " ranks";
    EXPECT_TRUE(same_bits(run_model(mlx.write("mlx"), ranks), want)) << ranks << " ranks";
  }
  EXPECT_THAT(load_error(kFixtures + "nemotron_h", 8), HasSubstr("4 Mamba2 groups cut into 4 slices"));
}

// Protects: an MTP layer that the configuration does not count is left out, and one without its projection is refused.
TEST(Experts, NemotronMtpLayerIsWholeOrAbsent) {
  ModelCopy uncounted = ModelCopy::of(kFixtures + "nemotron_h"), broken = uncounted, absent = uncounted;
  uncounted.replace_in_config("\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 0");
  remove_tensors(broken, "mtp.layers.0.eh_proj");
  remove_tensors(absent, "mtp.");
  const std::vector<float> want = run_model(absent.write("absent"), 2);
  EXPECT_TRUE(same_bits(run_model(uncounted.write("uncounted"), 2), want));
  EXPECT_THAT(load_error(broken.write("broken")), HasSubstr("no mtp.layers.0.eh_proj.weight"));
}

// MLX affine, 4 bits in groups of 32, for [64, 64] matrices: words of noise, scales and biases of bf16 values.
void quantise(ModelCopy& copy, const std::string& module, uint32_t seed) {
  const auto tensor = [](const std::string& name, Dtype dtype, std::vector<int64_t> shape, const auto& values) {
    OwnedTensor t{name, dtype, std::move(shape), std::vector<std::byte>(values.size() * sizeof(values[0]))};
    std::memcpy(t.bytes.data(), values.data(), t.bytes.size());
    return t;
  };
  std::vector<uint32_t> words(64 * 8);
  for (uint32_t& word : words) word = seed = seed * 1664525u + 1013904223u;
  for (uint32_t& word : words) word ^= word >> 16;
  remove_tensors(copy, module + ".weight");
  copy.tensors.push_back(tensor(module + ".weight", Dtype::kU32, {64, 8}, words));
  copy.tensors.push_back(tensor(module + ".scales", Dtype::kBf16, {64, 2}, std::vector<uint16_t>(128, 0x3cf0)));
  copy.tensors.push_back(tensor(module + ".biases", Dtype::kBf16, {64, 2}, std::vector<uint16_t>(128, 0xbe60)));
}

// Protects: MLX's quantised stacks are the same numbers as one quantised module an expert; the group is the unit that
// columns are cut at, so 64 columns in groups of 32 give two slices.
TEST(Experts, QuantisedStacksGiveTheSameBits) {
  ModelCopy single = ModelCopy::of(kFixtures + "qwen3_moe");
  single.replace_in_config("\"attention_bias\"",
                           "\"quantization\": {\"bits\": 4, \"group_size\": 32}, \"attention_bias\"");
  const std::vector<std::string> parts = {"gate_proj", "up_proj", "down_proj"};
  for (uint32_t layer = 0; layer < 4; ++layer) {
    for (uint32_t e = 0; e < 8; ++e) {
      for (uint32_t part = 0; part < 3; ++part) {
        quantise(single, fmt::format("model.layers.{}.mlp.experts.{}.{}", layer, e, parts[part]),
                 layer * 100 + e * 10 + part);
      }
    }
  }
  ModelCopy stacked = single;
  remove_tensors(stacked, ".mlp.experts.");
  for (int layer = 0; layer < 4; ++layer) {
    const std::string at = fmt::format("model.layers.{}.mlp", layer);
    for (const std::string& part : parts) {
      for (const std::string kind : {"weight", "scales", "biases"}) {
        stacked.tensors.push_back(stack(single, at, {part}, fmt::format("{}.switch_mlp.{}.{}", at, part, kind), kind));
      }
    }
  }
  const std::string dir = stacked.write("quantised_stack");
  const std::vector<float> want = run_model(single.write("quantised_single"), 1);
  for (const int ranks : {1, 2}) EXPECT_TRUE(same_bits(run_model(dir, ranks), want)) << ranks << " ranks";
  EXPECT_THAT(load_error(dir, 3), HasSubstr("2 expert column groups cut into 2 slices"));
}

// Protects: dense layers between layers with experts (mlp_only_layers), and ties of a router: one expert a token, whose
// weight is then 1, chosen by a router of zeros, so the lowest, is bit for bit the dense layer with its weights.
TEST(Experts, DenseLayersAmongThem) {
  ModelCopy sparse = ModelCopy::of(kFixtures + "qwen3_moe");
  sparse.replace_in_config("\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 1");
  OwnedTensor& router = sparse.at("model.layers.1.mlp.gate.weight");
  std::fill(router.bytes.begin(), router.bytes.end(), std::byte{0});
  ModelCopy mixed = sparse;
  mixed.replace_in_config("\"mlp_only_layers\": []", "\"mlp_only_layers\": [1]");
  mixed.replace_in_config("\"intermediate_size\": 256", "\"intermediate_size\": 64");
  for (const std::string part : {"gate_proj", "up_proj", "down_proj"}) {
    OwnedTensor t = sparse.at(fmt::format("model.layers.1.mlp.experts.0.{}.weight", part));
    t.name = fmt::format("model.layers.1.mlp.{}.weight", part);
    mixed.tensors.push_back(t);
  }
  remove_tensors(mixed, "model.layers.1.mlp.experts.");
  remove_tensors(mixed, "model.layers.1.mlp.gate.");
  const std::vector<float> want = run_model(sparse.write("sparse"), 1);
  const std::string dir = mixed.write("mixed");
  for (const int ranks : {1, 3}) EXPECT_TRUE(same_bits(run_model(dir, ranks), want)) << ranks << " ranks";
}

// Protects: a checkpoint that lacks a part of an expert, the router or the shared expert is refused by the tensor's
// name.
TEST(Experts, MissingTensorsAreNamed) {
  for (const std::string part :
       {"layers.2.mlp.experts.5.down_proj.weight", "layers.0.mlp.gate.weight",
        "layers.1.mlp.shared_expert.up_proj.weight", "layers.1.mlp.shared_expert_gate.weight"}) {
    ModelCopy copy = ModelCopy::of(kFixtures + "qwen3_next");
    remove_tensors(copy, part);
    EXPECT_THAT(load_error(copy.write("missing")), AllOf(HasSubstr("no tensor"), HasSubstr(part)));
  }
  ModelCopy more = ModelCopy::of(kFixtures + "qwen3_moe");
  more.replace_in_config("\"num_local_experts\": 8", "\"num_local_experts\": 6");
  EXPECT_THAT(load_error(more.write("more")), HasSubstr("model.layers.0.mlp.gate.weight' is BF16 [8, 64]"));
}

// Protects: the widest world of a model is that of its experts' columns, named.
TEST(Experts, ColumnsLimitTheWorld) {
  ModelCopy copy = ModelCopy::of(kFixtures + "qwen3_5_moe");
  copy.replace_in_config("\"moe_intermediate_size\": 64", "\"moe_intermediate_size\": 36");
  EXPECT_THAT(load_error(copy.write("narrow"), 8),
              AllOf(HasSubstr("8 ranks are too many"), HasSubstr("36 expert columns cut into 4 slices")));
}

class NoExperts : public CpuOps {
 public:
  NoExperts() : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)) {}
  bool supports_experts() const override { return false; }
  std::string fingerprint_name() const override { return "plain"; }
};

// Protects: a backend without the operations refuses a model with experts at load, in a sentence.
TEST(Experts, BackendWithoutThemRefuses) {
  NoExperts ops;
  const auto shards = ModelShards::load_all(kFixtures + "qwen3_moe", 1, ops);
  ASSERT_FALSE(shards.ok());
  EXPECT_EQ(std::string(shards.status().message()),
            "model_type qwen3_moe has mixture-of-experts layers, which backend plain does not compute: run it with "
            "backend cpu");
  EXPECT_TRUE(ModelShards::load_all(kFixtures + "qwen3", 1, ops).ok());
}

class NoMamba2 : public CpuOps {
 public:
  NoMamba2() : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)) {}
  std::string state_error(const StateShape& shape) const override { return Ops::state_error(shape); }
  std::string fingerprint_name() const override { return "plain"; }
};

// Protects: a backend that has only gated delta nets refuses Mamba2 layers at load, in a sentence.
TEST(Experts, BackendWithoutMamba2Refuses) {
  NoMamba2 ops;
  const auto shards = ModelShards::load_all(kFixtures + "nemotron_h", 1, ops);
  ASSERT_FALSE(shards.ok());
  EXPECT_EQ(std::string(shards.status().message()),
            "model_type nemotron_h has recurrent layers that backend plain does not compute (no Mamba2 layers): run it "
            "with backend cpu");
  EXPECT_TRUE(ModelShards::load_all(kFixtures + "qwen3_5", 1, ops).ok());
}

}  // namespace
}  // namespace tensorfold
