// Weights that find what random ones do not: quantised against dequantised, wide exponents, near ties.
#include "worker/checkpoint/weights.h"

#include <fmt/format.h>

#include <boost/json.hpp>
#include <cmath>
#include <iostream>
#include <set>
#include <sstream>

#include "coordinator/commands/verify/tester.h"
#include "kernels/ops/dequantise.h"
#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/stored_weights.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

// All positions' logits of a prompt, and then of a window of eight rows.
const BackendOptions kCpu = {.backend = "cpu", .isa = "auto", .threads = 1};

std::vector<std::vector<float>> logits_of(const std::string& dir, int world, const BackendOptions& backend = kCpu) {
  std::vector<std::vector<float>> rows;
  auto shards = ModelShards::load_all(dir, world, backend);
  EXPECT_TRUE(shards.ok()) << shards.status();
  if (!shards.ok()) return rows;
  LocalClusterOptions options;
  options.backend = backend;
  options.runner = {.slots = 1, .pages = 2};
  auto cluster = LocalCluster::start(**shards, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return rows;
  const int32_t vocab = static_cast<int32_t>((*shards)->shape(0).vocab);
  const auto run = [&](uint64_t first, int32_t count, uint32_t certain) {
    PassPlan plan;
    SequencePlan& sequence = plan.sequences.emplace_back();
    sequence.fresh = first == 0;
    sequence.first_position = first;
    sequence.certain = certain;
    if (first == 0) sequence.new_pages = {0, 1};
    for (int32_t i = 0; i < count; ++i) {
      sequence.tokens.push_back((static_cast<int32_t>(first) + i) * 37 % vocab);
      sequence.wants.push_back({static_cast<uint32_t>(i), kFullRow});
    }
    const auto pass = (*cluster)->executor().execute(plan);
    EXPECT_TRUE(pass.ok()) << pass.status();
    if (!pass.ok()) return;
    for (int32_t i = 0; i < count; ++i) {
      std::vector<float>& row = rows.emplace_back();
      for (const PassReport& report : pass->reports) {
        const RowReport& part = report.rows[static_cast<size_t>(i)];
        row.insert(row.end(), part.logits.begin(), part.logits.end());
      }
    }
  };
  run(0, 60, 60);
  run(60, 8, 1);
  return rows;
}

void expect_same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  ASSERT_EQ(a.size(), 68u);
  ASSERT_EQ(b.size(), a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    EXPECT_EQ(std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)), 0) << "row " << i;
  }
}

std::vector<float> floats_of(const OwnedTensor& tensor) {
  const auto values = read_floats(tensor.view());
  EXPECT_TRUE(values.ok()) << values.status();
  return *values;
}

// The nearest bf16 number, ties to even, of a number far from the ends of the range.
float bf16_of(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  std::frexp(value, &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(value, 8 - exponent)), exponent - 8));
}

// MLX affine, by its definition: value i of a row is scale * q + bias of its group, one rounding, to fp32 or to bf16; q
// are `bits` wide, packed from the low bits of consecutive words.
std::vector<float> dequantised(const OwnedTensor& weight, const std::vector<float>& scales,
                               const std::vector<float>& biases, int bits, int64_t columns, bool to_bf16) {
  const int64_t rows = weight.shape[0];
  const int64_t words = weight.shape[1];
  const int64_t group = columns / (static_cast<int64_t>(scales.size()) / rows);
  std::vector<float> values;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      uint32_t q = 0;
      for (int bit = 0; bit < bits; ++bit) {
        const int64_t at = i * bits + bit;
        uint32_t word = 0;
        std::memcpy(&word, weight.bytes.data() + (row * words + at / 32) * 4, 4);
        q |= (word >> (at % 32) & 1u) << bit;
      }
      const size_t g = static_cast<size_t>((row * columns + i) / group);
      values.push_back(to_bf16 ? bf16_of(static_cast<double>(scales[g]) * q + static_cast<double>(biases[g]))
                               : std::fma(scales[g], static_cast<float>(q), biases[g]));
    }
  }
  return values;
}

double e2m1(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const double magnitude = exponent == 0 ? 0.5 * mantissa : std::ldexp(2 + mantissa, exponent - 2);
  return code >= 8 ? -magnitude : magnitude;
}

double e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code >= 128 ? -magnitude : magnitude;
}

// The same model without quantisation, in fp32; `to_bf16`: of values that bf16 holds.
std::string dequantised_copy(const std::string& dir, bool to_bf16 = false) {
  ModelCopy copy = ModelCopy::of(dir);
  const auto config = read_config(dir);
  EXPECT_TRUE(config.ok()) << config.status();
  std::vector<OwnedTensor> tensors;
  for (const OwnedTensor& tensor : copy.tensors) {
    if (tensor.name.ends_with(".scales") || tensor.name.ends_with(".biases")) continue;
    OwnedTensor& out = tensors.emplace_back(tensor);
    if (tensor.dtype != Dtype::kU32) continue;
    const std::string module = tensor.name.substr(0, tensor.name.size() - std::string(".weight").size());
    const auto format = config->quantization.of(module);
    EXPECT_TRUE(format.has_value()) << module;
    const int64_t columns = tensor.shape[1] * 32 / format->bits;
    out.set_floats(dequantised(tensor, floats_of(copy.at(module + ".scales")), floats_of(copy.at(module + ".biases")),
                               format->bits, columns, to_bf16));
    out.shape[1] = columns;
  }
  copy.tensors = std::move(tensors);
  boost::json::object json = boost::json::parse(copy.config).as_object();
  EXPECT_EQ(json.erase("quantization") + json.erase("quantization_config"), 2u);
  copy.config = boost::json::serialize(json);
  return copy.write("dequantised");
}

// Protects: a quantised weight *is* its dequantised value: the copy in fp32 gives the same bits, alone and cut.
TEST(Weights, QuantisedGivesTheBitsOfItsDequantisedCopy) {
  const std::string quantised = kFixtures + "mlx_4bit";
  const std::string plain = dequantised_copy(quantised);
  const std::vector<std::vector<float>> expected = logits_of(quantised, 1);
  for (const int world : {1, 2, 3, 8}) {
    SCOPED_TRACE(world);
    expect_same_bits(expected, logits_of(plain, world));
    expect_same_bits(expected, logits_of(quantised, world));
  }
}

// FP8, NVFP4 and EXL3 without quantisation, as they are defined: value times scale, times or over the global scale, one
// rounding. (EXL3 is the weight view's own; the fixtures check that against float64 references.)
std::vector<float> exl3_values(const Checkpoint& checkpoint, const std::string& module, int64_t rows, int64_t cols,
                               bool to_bf16) {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  auto reader = WeightReader::open(checkpoint);
  const auto matrix = reader->matrix(strip_prefixes(module), rows, cols);
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  if (!matrix.ok()) return values;
  std::vector<uint16_t> halves(static_cast<size_t>(cols));
  WeightView view;
  for (int64_t row = 0; row < rows; ++row) {
    float* at = values.data() + row * cols;
    view.dequantise(*matrix, row, 0, cols, at);
    if (!to_bf16) continue;
    view.dequantise_bf16(*matrix, row, 0, cols, halves.data());
    for (size_t i = 0; i < halves.size(); ++i) at[i] = float_from_bf16(halves[i]);
  }
  return values;
}

// The scale of value [row, col]: of `block_cols` values of a row, or of a square block.
double scale_of(const OwnedTensor& scales, const std::vector<float>& floats, const StoredModule& stored, int64_t row,
                int64_t col) {
  const bool byte = floats.empty();
  int64_t at = 0;
  if (stored.block_cols > 0) {
    at = row * scales.shape[1] + col / stored.block_cols;
  } else if (!scales.shape.empty()) {
    const int64_t block = byte ? 32 : 128;  // of these fixtures
    at = row / block * scales.shape[1] + col / block;
  }
  if (!byte) return double{floats[static_cast<size_t>(at)]};
  const int code = std::to_integer<int>(scales.bytes[static_cast<size_t>(at)]);
  return scales.dtype == Dtype::kF8E8m0 ? std::ldexp(1.0, code - 127) : e4m3(code);
}

std::vector<float> small_float_values(const OwnedTensor& tensor, const OwnedTensor& scales, double global,
                                      const StoredModule& stored, const std::vector<int64_t>& shape, bool to_bf16) {
  const bool fp4 = stored.kind == StoredKind::kNvfp4 || stored.kind == StoredKind::kMxfp4;
  const bool bytes = scales.dtype == Dtype::kF8E8m0 || scales.dtype == Dtype::kF8E4m3;
  const std::vector<float> floats = bytes ? std::vector<float>() : floats_of(scales);
  std::vector<float> values;
  for (int64_t row = 0; row < shape[0]; ++row) {
    for (int64_t col = 0; col < shape[1]; ++col) {
      const int byte =
          std::to_integer<int>(tensor.bytes[static_cast<size_t>(row * tensor.shape[1] + (fp4 ? col / 2 : col))]);
      const double value = fp4 ? e2m1(byte >> (col % 2 * 4) & 15) : e4m3(byte);
      const double scale = scale_of(scales, floats, stored, row, col);
      const double exact = stored.divide ? value * scale / global : value * scale * global;
      values.push_back(to_bf16 ? bf16_of(exact) : static_cast<float>(exact));
    }
  }
  return values;
}

std::string plain_copy(const std::string& dir, bool to_bf16 = false) {
  ModelCopy copy = ModelCopy::of(dir);
  const auto checkpoint = Checkpoint::open(dir);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<OwnedTensor> tensors;
  for (const OwnedTensor& tensor : copy.tensors) {
    const size_t dot = tensor.name.rfind('.');
    if (dot == std::string::npos) {
      tensors.push_back(tensor);
      continue;
    }
    const std::string module = tensor.name.substr(0, dot), suffix = tensor.name.substr(dot);
    const auto stored = find_stored(**checkpoint, module);
    if (!stored) tensors.push_back(tensor);
    if (!stored || suffix != stored->values) continue;
    OwnedTensor out;
    out.name = module + ".weight";
    if (stored->kind == StoredKind::kExl3) {
      out.shape = {tensor.shape[1] * 16, tensor.shape[0] * 16};
      out.set_floats(exl3_values(**checkpoint, module, out.shape[0], out.shape[1], to_bf16));
    } else {
      const std::string global = module + std::string(stored->global_scale);
      const bool fp4 = stored->kind == StoredKind::kNvfp4 || stored->kind == StoredKind::kMxfp4;
      out.shape = {tensor.shape[0], tensor.shape[1] * (fp4 ? 2 : 1)};
      out.set_floats(small_float_values(tensor, copy.at(module + std::string(stored->scales)),
                                        stored->global_scale.empty() ? 1.0 : double{floats_of(copy.at(global))[0]},
                                        *stored, out.shape, to_bf16));
    }
    tensors.push_back(std::move(out));
  }
  copy.tensors = std::move(tensors);
  boost::json::object json = boost::json::parse(copy.config).as_object();
  EXPECT_EQ(json.erase("quantization_config"), 1u);
  copy.config = boost::json::serialize(json);
  const std::string written = copy.write("plain");
  if (std::filesystem::exists(dir + "/tokenizer.json")) {
    std::filesystem::copy_file(dir + "/tokenizer.json", written + "/tokenizer.json");
  }
  return written;
}

constexpr const char* kStored[] = {"fp8_block",     "fp8_tensor",     "nvfp4_modelopt", "nvfp4_compressed_tensors",
                                   "exl3_mcg_4bit", "exl3_mul1_3bit", "exl3_3inst_4bit"};

// Released DeepSeek checkpoints: FP8 with blocks of 32 x 32 and e8m0, MXFP4, rows of FP8 with e8m0 for 32.
constexpr const char* kReleased[] = {"deepseek_v4_quantised", "deepseek_v41"};

// Protects: the same of FP8, FP4 and EXL3, cut inside their blocks too.
TEST(Weights, StoredFormatsGiveTheBitsOfTheirPlainCopies) {
  std::vector<const char*> names(std::begin(kStored), std::end(kStored));
  names.insert(names.end(), std::begin(kReleased), std::end(kReleased));
  for (const char* name : names) {
    SCOPED_TRACE(name);
    const std::vector<std::vector<float>> expected = logits_of(plain_copy(kFixtures + name), 1);
    for (const int world : {1, 2, 4, 8}) {
      SCOPED_TRACE(world);
      expect_same_bits(expected, logits_of(kFixtures + name, world));
    }
  }
}

// Protects: the same on a GPU, where values are rounded to bf16 once.
TEST(Weights, StoredFormatsGiveTheBitsOfTheirPlainCopiesOnGpu) {
  BackendOptions backend = {.backend = "cuda"};
  if (const auto ops = make_backend(backend); !ops.ok()) GTEST_SKIP() << ops.status().message();
  for (const char* name : kStored) {
    SCOPED_TRACE(name);
    const std::vector<std::vector<float>> expected = logits_of(plain_copy(kFixtures + name, true), 1, backend);
    for (const int world : {1, 2, 8}) expect_same_bits(expected, logits_of(kFixtures + name, world, backend));
  }
}

// Protects: MLX affine on a GPU, where values are rounded to bf16 once.
TEST(Weights, QuantisedGivesTheBitsOfItsDequantisedCopyOnGpu) {
  BackendOptions backend = {.backend = "cuda"};
  if (const auto ops = make_backend(backend); !ops.ok()) GTEST_SKIP() << ops.status().message();
  const std::string quantised = kFixtures + "mlx_4bit";
  const std::string plain = dequantised_copy(quantised, true);
  const std::vector<std::vector<float>> expected = logits_of(quantised, 1, backend);
  for (const int world : {1, 2, 8}) {
    SCOPED_TRACE(world);
    expect_same_bits(expected, logits_of(plain, world, backend));
    expect_same_bits(expected, logits_of(quantised, world, backend));
  }
}

// Protects: bf16 and f16 weights are their values widened to fp32: the widened copy gives the same bits.
TEST(Weights, Bf16GivesTheBitsOfItsFp32Copy) {
  for (const char* name : {"llama", "qwen3_5"}) {
    SCOPED_TRACE(name);
    ModelCopy copy = ModelCopy::of(kFixtures + name);
    for (OwnedTensor& tensor : copy.tensors) tensor.set_floats(floats_of(tensor));
    const std::string widened = copy.write("widened");
    expect_same_bits(logits_of(kFixtures + name, 1), logits_of(widened, 1));
    expect_same_bits(logits_of(kFixtures + name, 1), logits_of(widened, 3));
  }
}

uint32_t scrambled(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// llama with each value scaled by its own power of two (2^-24 to 2^8, and whole rows more), so that sums mix large and
// tiny terms, and an embedding (also the head) whose rows come in pairs that are equal or one bit apart.
std::string adversarial_copy() {
  ModelCopy copy = ModelCopy::of(kFixtures + "llama");
  uint32_t seed = 1;
  for (OwnedTensor& tensor : copy.tensors) {
    std::vector<float> values = floats_of(tensor);
    const size_t columns = static_cast<size_t>(tensor.shape.back());
    const bool matrix = tensor.shape.size() == 2;
    for (size_t i = 0; matrix && i < values.size(); ++i) {
      const int own = static_cast<int>(scrambled(seed + static_cast<uint32_t>(i)) % 33) - 24;
      const int row = static_cast<int>(scrambled(static_cast<uint32_t>(i / columns) * 7919u + seed) % 5) - 2;
      values[i] = std::ldexp(values[i], own + row);
      // Neighbouring columns that nearly cancel where activations are alike.
      if (i % 4 == 3) values[i] = -values[i - 1] * (1.0f + 0x1p-20f);
    }
    if (tensor.name == "model.embed_tokens.weight") {
      for (size_t row = 1; row < values.size() / columns; row += 2) {
        for (size_t i = 0; i < columns; ++i) values[row * columns + i] = values[(row - 1) * columns + i];
        if (row % 4 == 1) {
          float& last = values[row * columns + columns - 1];
          last = std::nextafter(last, 1e30f);
        }
      }
    }
    tensor.set_floats(values);
    seed += 104729;
  }
  return copy.write("adversarial");
}

// Protects: weights of wide exponents and logits that tie, or differ in their last bit, show orders of addition that
// ordinary weights hide: every cell must still agree.
TEST(Weights, AdversarialOnesAgreeInEveryCell) {
  TesterOptions options;
  options.model_dir = adversarial_copy();
  options.axes.threads = {1};
  options.axes.transports = {"local"};
  options.axes.widths = {2, 5, 8};
  options.stop_after = 2;
  const absl::StatusOr<TesterReport> report = run_tester(options);
  ASSERT_TRUE(report.ok()) << report.status();
  if (report->different > 0) {
    std::ostringstream table;
    print_report(*report, true, table);
    std::cout << table.str();
  }
  EXPECT_EQ(report->different, 0u);
  std::cout << fmt::format("adversarial: {} cells in {:.1f} s\n", report->cells.size(), report->seconds);
}

// Protects: the adversarial weights are what they claim: finite logits, many exact ties and many near ones.
TEST(Weights, AdversarialOnesTieAndStayFinite) {
  size_t ties = 0;
  size_t near_ties = 0;
  const std::vector<std::vector<float>> rows = logits_of(adversarial_copy(), 1);
  for (const std::vector<float>& row : rows) {
    for (size_t id = 0; id + 1 < row.size(); id += 2) {
      ASSERT_TRUE(std::isfinite(row[id]) && std::isfinite(row[id + 1]));
      const float gap = std::abs(row[id] - row[id + 1]);
      if (gap == 0) {
        ++ties;
      } else if (gap <= std::abs(row[id]) * 1e-5f) {
        ++near_ties;
      }
    }
  }
  std::cout << fmt::format("adversarial: {} exact ties, {} near ones\n", ties, near_ties);
  EXPECT_GT(ties, rows.size() * 128);
  EXPECT_GT(near_ties, 0u);
}

}  // namespace
}  // namespace tensorfold
