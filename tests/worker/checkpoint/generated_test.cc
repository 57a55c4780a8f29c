// Made-up weights of a true size: parameter counts of the shapes that ship, tensors that a loader accepts, values that
// keep activations finite, little memory.
#include "worker/checkpoint/generated.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>

#include "kernels/ops/dequantise.h"
#include "worker/checkpoint/inspect.h"
#include "worker/checkpoint/tensor_values.h"
#include "worker/checkpoint/weights.h"

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kShapes = TENSORFOLD_SOURCE_DIR "/deploy/shapes/";
const std::string kTiny = TENSORFOLD_SOURCE_DIR "/tests/fixtures/qwen3_5/config.json";

std::unique_ptr<GeneratedCheckpoint> generate(const std::string& path, const std::string& format, uint64_t seed = 1) {
  const auto config = read_shape(path);
  EXPECT_TRUE(config.ok()) << config.status();
  if (!config.ok()) return nullptr;
  auto made = GeneratedCheckpoint::create(*config, format, path, seed);
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? *std::move(made) : nullptr;
}

struct Statistics {
  double mean = 0, deviation = 0, largest = 0;
};

Statistics statistics(const std::vector<float>& values) {
  Statistics out;
  double squares = 0;
  for (const float value : values) {
    EXPECT_TRUE(std::isfinite(value));
    out.mean += value;
    squares += static_cast<double>(value) * value;
    out.largest = std::max(out.largest, std::abs(static_cast<double>(value)));
  }
  out.mean /= static_cast<double>(values.size());
  out.deviation = std::sqrt(squares / static_cast<double>(values.size()) - out.mean * out.mean);
  return out;
}

// A row of an affine matrix as numbers.
std::vector<float> dequantised(const MatrixSource& source, int64_t row) {
  const auto bf16_at = [&](const std::byte* data, int64_t index) {
    uint16_t bits;
    std::memcpy(&bits, data + row * source.scale_row_bytes + index * 2, 2);
    return float_from_bf16(bits);
  };
  std::vector<float> values;
  for (int64_t col = 0; col < source.cols; ++col) {
    uint32_t word;
    std::memcpy(&word, source.data + row * source.row_bytes + col * source.bits / 32 * 4, 4);
    const uint32_t code = (word >> (col * source.bits % 32)) & ((1u << source.bits) - 1);
    const int64_t group = col / source.group;
    values.push_back(std::fma(bf16_at(source.scales, group), static_cast<float>(code), bf16_at(source.biases, group)));
  }
  return values;
}

// A wrong figure in a shape file would make every benchmark of it one of another model.
TEST(Generated, ShapesHaveTheirModelsParameterCounts) {
  const std::vector<std::pair<std::string, double>> shapes = {{"qwen3.8-27b", 27.3e9},
                                                              {"qwen3.5-2b", 1.93e9},
                                                              {"llama-8b", 8.03e9},
                                                              {"qwen3-30b-a3b", 30.53e9},
                                                              {"nemotron-3.5-lightning", 32.9e9}};
  for (const auto& [name, parameters] : shapes) {
    for (const std::string& format : generated_formats()) {
      const auto source = generate(kShapes + name + ".json", format);
      ASSERT_NE(source, nullptr);
      const auto facts = inspect_tensors(*source);
      ASSERT_TRUE(facts.ok()) << facts.status();
      EXPECT_NEAR(static_cast<double>(facts->parameters), parameters, 0.01 * parameters) << name << " " << format;
      if (format == "nvfp4" || format == "fp8") {  // embedding and head stay bf16
        const ModelConfig& c = source->config();
        const double plain = static_cast<double>(c.vocab_size * c.hidden_size * (c.tie_word_embeddings ? 1 : 2));
        const double bytes = 2 * plain + (parameters - plain) * (format == "fp8" ? 8 : 4.5) / 8;
        EXPECT_NEAR(static_cast<double>(facts->weight_bytes), bytes, 0.02 * bytes) << name << " " << format;
        continue;
      }
      const double bits = format == "bf16" ? 16 : format == "mlx-4bit" ? 4.5 : 8.5;
      EXPECT_NEAR(static_cast<double>(facts->weight_bytes), parameters * bits / 8, 0.015 * parameters * bits / 8);
    }
  }
}

// What a loader asks for is there, with the shapes that it expects, and nothing else is.
TEST(Generated, LoadersFindEveryTensorOfEveryFormat) {
  for (const std::string& format : generated_formats()) {
    const auto source = generate(kTiny, format);
    ASSERT_NE(source, nullptr);
    auto reader = WeightReader::open(*source);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_TRUE(reader->layout().has_mtp());
    for (const std::string& name : source->names()) {
      const TensorInfo* tensor = source->find(name);
      ASSERT_NE(tensor, nullptr);
      EXPECT_EQ(tensor->data.size(), static_cast<size_t>(tensor->elements() * dtype_bytes(tensor->dtype))) << name;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data.data()) % 4, 0u) << name;
    }
    const auto matrix = reader->matrix("layers.3.mlp.down_proj", 64, 256);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    EXPECT_EQ(matrix->format, format == "bf16"    ? WeightFormat::kBf16
                              : format == "nvfp4" ? WeightFormat::kE2m1
                              : format == "fp8"   ? WeightFormat::kE4m3
                                                  : WeightFormat::kMlxAffine);
    EXPECT_TRUE(reader->convolution("layers.0.linear_attn.conv1d", 512, 4).ok());
    EXPECT_EQ(source->find("layers.0.mlp.down_proj.weight"), nullptr);
  }
}

// Norms near 1 in both conventions, weights of the stated deviation, biases that belong to their scales.
TEST(Generated, ValuesKeepActivationsFinite) {
  for (const std::string& format : generated_formats()) {
    const auto source = generate(kShapes + "qwen3.5-2b.json", format);
    ASSERT_NE(source, nullptr);
    auto reader = WeightReader::open(*source);
    ASSERT_TRUE(reader.ok()) << reader.status();
    for (const char* module : {"norm", "layers.0.input_layernorm", "mtp.norm"}) {
      const auto gamma = reader->norm(module, 2048);
      ASSERT_TRUE(gamma.ok()) << gamma.status();
      EXPECT_NEAR(statistics(*gamma).mean, 1.0, 0.02) << module << " " << format;
    }
    const auto decay = reader->vector("layers.0.linear_attn.A_log", 16);
    ASSERT_TRUE(decay.ok()) << decay.status();
    EXPECT_LT(statistics(*decay).largest, 3.0);
    const auto matrix = reader->matrix("layers.1.mlp.down_proj", 2048, 6144);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    std::vector<float> values;
    if (format == "bf16") {
      TensorInfo row = *source->find("model.layers.1.mlp.down_proj.weight");
      row.data = row.data.subspan(5 * 6144 * 2, 6144 * 2);
      row.shape = {6144};
      values = *read_floats(row);
    } else if (format == "nvfp4" || format == "fp8") {
      values.resize(6144);
      WeightView().dequantise(*matrix, 5, 0, 6144, values.data());
    } else {
      values = dequantised(*matrix, 5);
    }
    const Statistics found = statistics(values);
    EXPECT_NEAR(found.mean, 0, 0.005) << format;
    EXPECT_GT(found.deviation, 0.015) << format;
    EXPECT_LT(found.deviation, 0.05) << format;
  }
}

// Two runs measure the same numbers, two tensors are not the same ones, and the seed counts.
TEST(Generated, NumbersDependOnNameAndSeedAlone) {
  const auto bytes = [](const GeneratedCheckpoint& source, const std::string& name) {
    const TensorInfo* tensor = source.find(name);
    return std::string(reinterpret_cast<const char*>(tensor->data.data()), tensor->data.size());
  };
  const auto a = generate(kTiny, "mlx-4bit"), b = generate(kTiny, "mlx-4bit"), c = generate(kTiny, "mlx-4bit", 2);
  for (const std::string& name : a->names()) EXPECT_EQ(bytes(*a, name), bytes(*b, name)) << name;
  EXPECT_NE(bytes(*a, "lm_head.weight"), bytes(*c, "lm_head.weight"));
  EXPECT_NE(bytes(*a, "model.layers.0.mlp.up_proj.weight"), bytes(*a, "model.layers.0.mlp.gate_proj.weight"));
}

// A tensor longer than its block reads on without a break: its bytes repeat with the block's period.
TEST(Generated, LongTensorsRepeatTheirBlock) {
  const auto source = generate(kShapes + "qwen3.8-27b.json", "bf16");
  ASSERT_NE(source, nullptr);
  const TensorInfo* table = source->find("model.embed_tokens.weight");
  ASSERT_NE(table, nullptr);
  constexpr size_t kPeriod = 64u << 20;
  ASSERT_GT(table->data.size(), 2 * kPeriod);
  for (const size_t at : {size_t{0}, kPeriod - 8, table->data.size() - kPeriod - 64}) {
    EXPECT_EQ(std::memcmp(table->data.data() + at, table->data.data() + at + kPeriod, 64), 0) << at;
  }
}

// What a user may get wrong: the format, a file that is no shape, one that states a quantisation itself.
TEST(Generated, ErrorsNameWhatIsAllowed) {
  const auto config = read_shape(kTiny);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto format = GeneratedCheckpoint::create(*config, "gguf", "tiny");
  ASSERT_FALSE(format.ok());
  EXPECT_THAT(std::string(format.status().message()), AllOf(HasSubstr("gguf"), HasSubstr("bf16, mlx-4bit, mlx-8bit")));
  EXPECT_THAT(std::string(read_shape("/nonexistent.json").status().message()), HasSubstr("/nonexistent.json"));
  EXPECT_THAT(std::string(read_shape(kShapes + "README.md").status().message()), HasSubstr("README.md"));
  const auto quantised = read_shape(TENSORFOLD_SOURCE_DIR "/tests/fixtures/mlx_4bit/config.json");
  ASSERT_FALSE(quantised.ok());
  EXPECT_THAT(std::string(quantised.status().message()), HasSubstr("--format"));
}

// Sizes that no machine has are refused by name, not by running out of memory.
TEST(Generated, HugeTensorsAreRefused) {
  auto config = read_shape(kTiny);
  ASSERT_TRUE(config.ok()) << config.status();
  config->vocab_size = 1 << 24;
  config->hidden_size = 65536;
  const auto huge = GeneratedCheckpoint::create(*config, "bf16", "huge");
  ASSERT_FALSE(huge.ok());
  EXPECT_THAT(std::string(huge.status().message()), AllOf(HasSubstr("huge"), HasSubstr("embed_tokens")));
  config = read_shape(kTiny);
  config->linear.value_heads = config->linear.value_dim = 1024;
  config->layers.assign(1024, LayerKind::kLinearAttention);
  const auto wide = GeneratedCheckpoint::create(*config, "bf16", "wide");
  ASSERT_FALSE(wide.ok());
  EXPECT_THAT(std::string(wide.status().message()), AllOf(HasSubstr("wide"), HasSubstr("convolutions")));
}

}  // namespace
}  // namespace tensorfold
