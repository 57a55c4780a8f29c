// FP8, FP4 and EXL3: every code of the number formats, the weight view, layouts of all converters, and every
// contradiction or damage named.
#include "worker/checkpoint/stored_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "kernels/ops/dequantise.h"
#include "kernels/ops/small_floats.h"
#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/inspect.h"
#include "worker/checkpoint/weights.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

// Protects: every code of e4m3, e2m1 and e8m0 is the number that its specification says.
TEST(SmallFloats, AllCodes) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float e4m3 = float_of_e4m3(static_cast<uint8_t>(code));
    if ((code & 127) == 127) {
      EXPECT_TRUE(std::isnan(e4m3));
    } else {
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
      EXPECT_EQ(static_cast<double>(e4m3), code < 128 ? magnitude : -magnitude) << code;
      EXPECT_EQ(std::signbit(e4m3), code >= 128);
    }
    const float e8m0 = float_of_e8m0(static_cast<uint8_t>(code));
    if (code == 255) {
      EXPECT_TRUE(std::isnan(e8m0));
    } else {
      EXPECT_EQ(static_cast<double>(e8m0), std::ldexp(1.0, code - 127)) << code;
    }
  }
  EXPECT_EQ(float_of_e4m3(0x7e), 448.0f);
  const std::vector<float> expected = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint8_t code = 0; code < 16; ++code) {
    const float value = float_of_e2m1(code);
    EXPECT_EQ(std::fabs(value), expected[code & 7]);
    EXPECT_EQ(std::signbit(value), code >= 8);
  }
}

// Protects: bf16 is rounded once, to nearest even, even where fp32 would round to a tie first.
TEST(SmallFloats, Bf16RoundsOnce) {
  EXPECT_EQ(bf16_of_double(1.0), 0x3f80);
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-8), 0x3f80);            // a tie goes to even
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-8 + 0x1p-40), 0x3f81);  // and this is none, though fp32 cannot tell
  EXPECT_EQ(bf16_of_double(1.0 + 0x3p-8 - 0x1p-40), 0x3f81);
  EXPECT_EQ(bf16_of_double(-1.0 - 0x1p-8 - 0x1p-40), 0xbf81);
  EXPECT_EQ(bf16_of_double(1e300), 0x7f80);
  EXPECT_EQ(bf16_of_double(-0.0), 0x8000);
  EXPECT_EQ(bf16_of_double(0x1p-133), 0x0001);
  EXPECT_EQ(bf16_of_double(0x1p-134), 0x0000);
  EXPECT_TRUE(std::isnan(float_of_bf16(bf16_of_double(std::nan("")))));
}

// Protects: the codebooks' published values.
TEST(Exl3, Codebooks) {
  const std::vector<std::pair<Exl3Codebook, std::vector<float>>> expected = {
      {Exl3Codebook::k3Inst, {0.76806640625f, -0.91943359375f, -2.19921875f}},
      {Exl3Codebook::kMcg, {1.84375f, 0.134521484375f, 1.5146484375f}},
      {Exl3Codebook::kMul1, {-3.453125f, 0.64111328125f, -0.5771484375f}}};
  const std::vector<double> deviations = {1.2437, 1.2441, 1.0003};
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [codebook, values] = expected[i];
    EXPECT_EQ(exl3_value(codebook, 0), values[0]);
    EXPECT_EQ(exl3_value(codebook, 1), values[1]);
    EXPECT_EQ(exl3_value(codebook, 0x1234), values[2]);
    double sum = 0;
    for (uint32_t state = 0; state < 65536; ++state) {
      sum += std::pow(exl3_value(codebook, static_cast<uint16_t>(state)), 2);
    }
    EXPECT_NEAR(std::sqrt(sum / 65536), deviations[i], 2e-3);
  }
}

// Protects: tiles of every width, the half steps too: each state is the 16 bits that end where the value's bits end.
TEST(Exl3, TilesOfEveryWidth) {
  for (int half_bits = 2; half_bits <= 16; ++half_bits) {
    const bool fits = half_bits % 2 == 0 || half_bits < 8;
    EXPECT_EQ(exl3_half_bits(16 * half_bits, Exl3Codebook::kMul1), fits ? half_bits : 0);
    EXPECT_EQ(exl3_half_bits(16 * half_bits, Exl3Codebook::kMcg), half_bits % 2 == 0 ? half_bits : 0);
    if (!fits) continue;
    std::vector<std::byte> tile(static_cast<size_t>(16 * half_bits));
    for (size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<std::byte>(i * 151 + 7 * i * i + 11);
    const int total = 128 * half_bits, whole = half_bits / 2;
    const auto bit = [&](int i) {
      uint32_t word;
      std::memcpy(&word, tile.data() + i / 32 * 4, 4);
      return word >> (31 - i % 32) & 1;
    };
    float values[256];
    decode_exl3_tile(tile.data(), half_bits, Exl3Codebook::kMul1, values);
    for (int p = 0; p < 256; ++p) {
      const int end = half_bits % 2 == 0 ? (p + 1) * whole : ((p + 1) * (2 * whole + 1) - (p + 1) % 2) / 2;
      uint32_t state = 0;
      for (int i = 0; i < 16; ++i) state = state << 1 | bit((end - 16 + i + total) % total);
      const int lane = p / 8, j = p % 8;
      const int row = 2 * (lane % 4) + (j & 1) + 8 * (j >> 1 & 1), col = lane / 4 + 8 * (j >> 2);
      ASSERT_EQ(values[row * 16 + col], exl3_value(Exl3Codebook::kMul1, static_cast<uint16_t>(state)))
          << half_bits << " half bits, value " << p;
    }
  }
}

struct Opened {
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<WeightReader> reader;
};

Opened open(const std::string& dir) {
  Opened out;
  auto checkpoint = Checkpoint::open(dir);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  if (!checkpoint.ok()) return out;
  out.checkpoint = std::move(*checkpoint);
  auto reader = WeightReader::open(*out.checkpoint);
  EXPECT_TRUE(reader.ok()) << reader.status();
  if (reader.ok()) out.reader = std::make_unique<WeightReader>(std::move(*reader));
  return out;
}

std::vector<float> values_of(const MatrixSource& source) {
  std::vector<float> values(static_cast<size_t>(source.rows * source.cols));
  WeightView view;
  for (int64_t row = 0; row < source.rows; ++row) {
    view.dequantise(source, row, 0, source.cols, values.data() + row * source.cols);
  }
  return values;
}

constexpr const char* kStored[] = {"fp8_block",     "fp8_tensor",     "nvfp4_modelopt", "nvfp4_compressed_tensors",
                                   "exl3_mcg_4bit", "exl3_mul1_3bit", "mlx_4bit"};

// Protects: a part of a matrix that begins and ends anywhere, inside blocks, has the values of the whole.
TEST(WeightView, PartsAreTheWhole) {
  for (const char* name : kStored) {
    SCOPED_TRACE(name);
    Opened at = open(kFixtures + name);
    const auto whole = at.reader->matrix("layers.0.mlp.down_proj", 128, 512);
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_EQ(source_error(*whole), "");
    const std::vector<float> values = values_of(*whole);
    const int64_t unit = whole->column_unit();
    const int64_t first = unit == 1 ? 131 : unit, count = unit == 1 ? 250 : 2 * unit;
    const MatrixSource part = whole->slice_cols(first, count).slice_rows(7, 60);
    EXPECT_EQ(source_error(part), "");
    const std::vector<float> found = values_of(part);
    for (int64_t row = 0; row < 60; ++row) {
      for (int64_t col = 0; col < count; ++col) {
        ASSERT_EQ(found[static_cast<size_t>(row * count + col)],
                  values[static_cast<size_t>((row + 7) * 512 + first + col)]);
      }
    }
  }
}

// qwen3_base128 with layers.0.mlp.down_proj [128, 512] replaced by what `make` says, under this quantisation_config.
std::string with_module(const std::string& config_key, const std::string& config, std::vector<OwnedTensor> tensors) {
  ModelCopy copy = ModelCopy::of(kFixtures + "fp8_tensor");
  const std::string module = "model.layers.0.mlp.down_proj";
  std::erase_if(copy.tensors, [&](const OwnedTensor& t) { return t.name.starts_with(module + "."); });
  for (OwnedTensor& tensor : tensors) {
    tensor.name = module + tensor.name;
    copy.tensors.push_back(std::move(tensor));
  }
  const size_t at = copy.config.find("\"quantization_config\"");
  copy.config = copy.config.substr(0, at) + "\"" + config_key + "\": " + config + "}";
  return copy.write("module");
}

OwnedTensor bytes_tensor(const std::string& suffix, Dtype dtype, std::vector<int64_t> shape,
                         const std::function<int(int64_t)>& make) {
  OwnedTensor tensor = {suffix, dtype, shape, {}};
  tensor.bytes.resize(static_cast<size_t>(tensor.view().elements() * dtype_bytes(dtype)));
  for (size_t i = 0; i < tensor.bytes.size(); ++i) {
    tensor.bytes[i] = static_cast<std::byte>(make(static_cast<int64_t>(i)));
  }
  return tensor;
}

int code(int64_t i) { return static_cast<int>(i * 37 % 251) & 0x77; }
int e4m3_scale(int64_t i) { return 0x30 + static_cast<int>(i % 16); }
int e8m0_scale(int64_t i) { return 120 + static_cast<int>(i % 9); }
double e2m1(int64_t index) { return double{float_of_e2m1(static_cast<uint8_t>(code(index / 2) >> (index % 2 * 4)))}; }
double e4m3(int64_t index) { return double{float_of_e4m3(static_cast<uint8_t>(code(index)))}; }

struct Layout8 {
  const char* name;
  std::string key, config;
  std::vector<OwnedTensor> tensors;
  std::function<double(int64_t row, int64_t col)> value;
  bool exact;
};

std::vector<Layout8> layouts() {
  const auto fp4 = [](int64_t row, int64_t col) { return e2m1(row * 512 + col); };
  const auto fp8 = [](int64_t row, int64_t col) { return e4m3(row * 512 + col); };
  const auto mx = [](int64_t row, int64_t col) { return std::ldexp(1.0, e8m0_scale(row * 16 + col / 32) - 127); };
  const auto nv = [](int64_t row, int64_t col) {
    return double{float_of_e4m3(static_cast<uint8_t>(e4m3_scale(row * 32 + col / 16)))};
  };
  const auto values4 = [](const char* suffix, Dtype d) { return bytes_tensor(suffix, d, {128, 256}, code); };
  const auto words = [](int64_t n) { return bytes_tensor(".weight", Dtype::kU32, {128, n}, code); };
  const OwnedTensor values8 = bytes_tensor(".weight", Dtype::kF8E4m3, {128, 512}, code);
  const auto scales = [](const char* suffix, Dtype d, int64_t n, int (*make)(int64_t)) {
    return bytes_tensor(suffix, d, {128, n}, make);
  };
  const std::string modelopt = R"({"quant_method":"modelopt","quant_algo":"MIXED_PRECISION"})";
  const std::string compressed = R"({"quant_method":"compressed-tensors","config_groups":{"g":{"weights":
      {"num_bits":4,"type":"float","group_size":32}},"h":{"weights":{"num_bits":8,"type":"float"}}}})";
  const auto e8 = bytes_tensor(".scale", Dtype::kF8E8m0, {4, 16}, e8m0_scale);
  const auto block = [fp8](int64_t row, int64_t col) {
    return fp8(row, col) * std::ldexp(1.0, e8m0_scale(row / 32 * 16 + col / 32) - 127);
  };
  const auto channel = [fp8](int64_t row, int64_t col) { return fp8(row, col) * (row % 2 == 0 ? 1.0 : -0.375); };
  OwnedTensor rows = {".weight_scale", Dtype::kF32, {128, 1}, {}};
  std::vector<float> row_scales;
  for (int i = 0; i < 128; ++i) row_scales.push_back(i % 2 == 0 ? 1.0f : -0.375f);
  rows.set_floats(row_scales);
  const auto mlx = [](const char* mode) { return std::string(R"({"mode":")") + mode + "\"}"; };
  return {
      {"mlx mxfp4",
       "quantization",
       R"({"mode":"mxfp4","bits":4,"group_size":32})",
       {words(64), scales(".scales", Dtype::kU8, 16, e8m0_scale)},
       [=](auto r, auto c) { return fp4(r, c) * mx(r, c); },
       true},
      {"mlx mxfp8",
       "quantization",
       mlx("mxfp8"),
       {words(128), scales(".scales", Dtype::kU8, 16, e8m0_scale)},
       [=](auto r, auto c) { return fp8(r, c) * mx(r, c); },
       true},
      {"mlx nvfp4",
       "quantization",
       mlx("nvfp4"),
       {words(64), scales(".scales", Dtype::kU8, 32, e4m3_scale)},
       [=](auto r, auto c) { return fp4(r, c) * nv(r, c); },
       true},
      {"modelopt mxfp8",
       "quantization_config",
       modelopt,
       {values8, scales(".weight_scale", Dtype::kU8, 16, e8m0_scale)},
       [=](auto r, auto c) { return fp8(r, c) * mx(r, c); },
       true},
      {"compressed mxfp4",
       "quantization_config",
       compressed,
       {values4(".weight_packed", Dtype::kU8), scales(".weight_scale", Dtype::kU8, 16, e8m0_scale)},
       [=](auto r, auto c) { return fp4(r, c) * mx(r, c); },
       true},
      {"fp8 channels", "quantization_config", compressed, {values8, rows}, channel, false},
      {"fp8 32x32 e8m0", "quantization_config", R"({"quant_method":"fp8"})", {values8, e8}, block, true},
      {"fp4 experts",
       "expert_dtype\": \"fp4\", \"quantization_config",
       R"({"quant_method":"fp8"})",
       {values4(".weight", Dtype::kI8), scales(".scale", Dtype::kF8E8m0, 16, e8m0_scale)},
       [=](auto r, auto c) { return fp4(r, c) * mx(r, c); },
       true},
  };
}

// Protects: each layout that no fixture has, value by value against its definition; and which of them bf16 can hold.
TEST(StoredWeights, Layouts) {
  for (const Layout8& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    Opened at = open(with_module(layout.key, layout.config, layout.tensors));
    ASSERT_NE(at.reader, nullptr);
    const auto source = at.reader->matrix("layers.0.mlp.down_proj", 128, 512);
    ASSERT_TRUE(source.ok()) << source.status();
    EXPECT_EQ(exact_in_bf16(*source), layout.exact);
    const std::vector<float> values = values_of(*source);
    for (int64_t row = 0; row < 128; ++row) {
      for (int64_t col = 0; col < 512; ++col) {
        ASSERT_EQ(values[static_cast<size_t>(row * 512 + col)], static_cast<float>(layout.value(row, col)))
            << row << ", " << col;
      }
    }
  }
}

const std::string kModule = "model.layers.0.mlp.down_proj";

// A fixture with a change, as the error of reading one module.
std::string error_of(const std::string& fixture, const std::function<void(ModelCopy&)>& change) {
  ModelCopy copy = ModelCopy::of(kFixtures + fixture);
  change(copy);
  Opened at = open(copy.write("damaged"));
  if (at.reader == nullptr) return "not opened";
  const auto matrix = at.reader->matrix("layers.0.mlp.down_proj", 128, 512);
  return matrix.ok() ? "no error" : std::string(matrix.status().message());
}

std::function<void(ModelCopy&)> without(const std::string& suffix) {
  return [=](ModelCopy& c) { std::erase_if(c.tensors, [&](auto& t) { return t.name == kModule + suffix; }); };
}
std::function<void(ModelCopy&)> with_dtype(const std::string& suffix, Dtype dtype) {
  return [=](ModelCopy& c) {
    OwnedTensor& t = c.at(kModule + suffix);
    t.dtype = dtype;
    t.bytes.resize(static_cast<size_t>(t.view().elements() * dtype_bytes(dtype)));
  };
}
std::function<void(ModelCopy&)> with_shape(const std::string& suffix, std::vector<int64_t> shape) {
  return [=](ModelCopy& c) {
    OwnedTensor& t = c.at(kModule + suffix);
    t.shape = shape;
    t.bytes.resize(static_cast<size_t>(t.view().elements() * dtype_bytes(t.dtype)));
  };
}
std::function<void(ModelCopy&)> with_byte(const std::string& suffix, size_t at, int byte) {
  return [=](ModelCopy& c) { c.at(kModule + suffix).bytes[at] = static_cast<std::byte>(byte); };
}
std::function<void(ModelCopy&)> with_float(const std::string& suffix, float value) {
  return [=](ModelCopy& c) { std::memcpy(c.at(kModule + suffix).bytes.data(), &value, 4); };
}

// Protects: scales that are missing, of another shape or number format, or no numbers, each by the tensor's name.
TEST(StoredWeights, DamageIsNamed) {
  struct Case {
    const char* fixture;
    std::function<void(ModelCopy&)> change;
    const char* expected;
  };
  const std::vector<Case> cases = {
      {"fp8_block", without(".weight_scale_inv"), "no tensor 'model.layers.0.mlp.down_proj.weight_scale'"},
      {"fp8_block", with_shape(".weight_scale_inv", {1, 3}),
       "down_proj.weight_scale_inv' is F32 [1, 3]; it must be [1, 4]"},
      {"fp8_block", with_shape(".weight_scale_inv", {128, 1}), "it must be [1, 4]"},
      {"fp8_block", with_shape(".weight", {128, 256}), "it must be [128, 512]"},
      {"fp8_block", with_dtype(".weight_scale_inv", Dtype::kI32), "is I32 [1, 4]; it must be F32"},
      {"fp8_block", with_float(".weight_scale_inv", NAN), "value 0 of it is not a finite number"},
      {"fp8_tensor", without(".weight_scale"), "no tensor 'model.layers.0.mlp.down_proj.weight_scale'"},
      {"fp8_tensor", with_float(".weight_scale", INFINITY), "weight_scale' is F32 [], and value 0"},
      {"fp8_tensor", with_dtype(".weight", Dtype::kF8E5m2), "is F8_E5M2, which is not read as a weight"},
      {"nvfp4_modelopt", without(".weight_scale"), "no tensor 'model.layers.0.mlp.down_proj.weight_scale'"},
      {"nvfp4_modelopt", without(".weight_scale_2"), "no tensor 'model.layers.0.mlp.down_proj.weight_scale_2'"},
      {"nvfp4_modelopt", with_shape(".weight_scale", {128, 16}), "it must be [128, 32], one for 16 values"},
      {"nvfp4_modelopt", with_byte(".weight_scale", 5, 0x7f), "value 5 of it is not a finite number"},
      {"nvfp4_modelopt", with_dtype(".weight_scale", Dtype::kU8), "it must be F8_E4M3"},
      {"nvfp4_modelopt", with_shape(".weight_scale_2", {2}), "it must be one F32"},
      {"nvfp4_compressed_tensors", without(".weight_global_scale"),
       "no tensor 'model.layers.0.mlp.down_proj.weight_gl"},
      {"nvfp4_compressed_tensors", with_float(".weight_global_scale", 0), "by which weights are divided"},
      {"nvfp4_compressed_tensors", with_shape(".weight_packed", {128, 255}), "it must be [128, 256]"},
      {"exl3_mul1_3bit", without(".suh"), "no tensor 'model.layers.0.mlp.down_proj.suh'"},
      {"exl3_mul1_3bit", with_shape(".svh", {64}), "it must be F16 [128]"},
      {"exl3_mul1_3bit", with_byte(".svh", 1, 0x7e), "value 0 of it is not a finite number"},
      {"exl3_mul1_3bit", with_byte(".mul1", 0, 1), "the multiplier 0x83DCD12D"},
      {"exl3_mul1_3bit", with_shape(".trellis", {32, 8, 0}), "I16 [32, 8, 16 * bits]"},
      {"exl3_mul1_3bit", with_shape(".trellis", {32, 8, 50}), "I16 [32, 8, 16 * bits]"},
      {"exl3_mul1_3bit", with_shape(".trellis", {8, 32, 48}), "I16 [32, 8, 16 * bits]"},
      {"exl3_mcg_4bit", with_shape(".trellis", {32, 8, 56}), "I16 [32, 8, 16 * bits]"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(error_of(c.fixture, c.change), HasSubstr(c.expected)) << c.fixture;
  }
  for (const char* name : kStored) EXPECT_EQ(error_of(name, [](ModelCopy&) {}), "no error") << name;
}

// Protects: tensors that are not what config.json says.
TEST(StoredWeights, ContradictionsAreNamed) {
  const auto config = [](const std::string& text) {
    return [=](ModelCopy& c) {
      c.config = c.config.substr(0, c.config.find("\"quantization_config\"")) + "\"x\": 0" + text + "}";
    };
  };
  EXPECT_THAT(error_of("fp8_tensor", config("")), HasSubstr("by config.json weights are not quantised"));
  EXPECT_THAT(
      error_of("fp8_tensor", config(R"(,"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4"})")),
      HasSubstr("so that module is fp8; by config.json weights are nvfp4 or not quantised"));
  EXPECT_THAT(error_of("fp8_tensor", config(R"(,"quantization_config":{"quant_method":"modelopt","quant_algo":"FP8",
                                            "ignore":["*.mlp.down_proj"]})")),
              HasSubstr("config.json says that it is not quantised"));
  EXPECT_THAT(error_of("fp8_tensor", config(R"(,"quantization_config":{"quant_method":"modelopt","quantized_layers":
                  {"a.b":{"quant_algo":"FP8"},"model.layers.0.mlp.down_proj":{"quant_algo":"NVFP4"}}})")),
              HasSubstr("config.json says nvfp4"));
  EXPECT_THAT(error_of("exl3_mul1_3bit",
                       [](ModelCopy& c) {
                         OwnedTensor both = c.at(kModule + ".mul1");
                         both.name = kModule + ".mcg";
                         const uint32_t multiplier = 0xCBAC1FEDu;
                         std::memcpy(both.bytes.data(), &multiplier, 4);
                         c.tensors.push_back(both);
                       }),
              HasSubstr("both .mcg and .mul1"));
  // Named as quantised, stored plain.
  ModelCopy copy = ModelCopy::of(kFixtures + "fp8_tensor");
  config(R"(,"quantization_config":{"quant_method":"modelopt","quantized_layers":{"lm_head":{"quant_algo":"FP8"}}})")(
      copy);
  Opened at = open(copy.write("named"));
  EXPECT_THAT(std::string(at.reader->matrix("lm_head", 512, 128).status().message()),
              HasSubstr("'lm_head' is fp8, but tensor 'lm_head.weight' is BF16"));
}

// A source of one module: its values and scales, of shapes alone.
class OneModule : public TensorSource {
 public:
  OneModule(const std::string& module, const StoredModule& stored, Dtype values, std::vector<int64_t> shape,
            Dtype scales, std::vector<int64_t> scale_shape) {
    const auto size = [](Dtype dtype, const std::vector<int64_t>& dims) {
      int64_t count = dtype_bytes(dtype);
      for (const int64_t dim : dims) count *= dim;
      return static_cast<size_t>(count);
    };
    bytes_.resize(std::max(size(values, shape), size(scales, scale_shape)));
    const std::span<const std::byte> all = bytes_;
    values_ = {module + std::string(stored.values), values, shape, all.first(size(values, shape))};
    scales_ = {module + std::string(stored.scales), scales, scale_shape, all.first(size(scales, scale_shape))};
  }
  const std::string& dir() const override { return dir_; }
  const ModelConfig& config() const override { return config_; }
  std::string file_list() const override { return {}; }
  const TensorInfo* find(std::string_view name) const override {
    return name == values_.name ? &values_ : name == scales_.name ? &scales_ : nullptr;
  }
  const std::vector<std::string>& names() const override { return names_; }
  const TensorInfo& values() const { return values_; }

 private:
  std::vector<std::byte> bytes_;
  TensorInfo values_, scales_;
  std::string dir_;
  ModelConfig config_;
  std::vector<std::string> names_;
};

// Protects: what a GPU keeps of a matrix follows from how short its blocks and its slices are: 1, 2 or 4 bytes of
// scales for 16, 32 or 64 columns, or bf16. Slices that begin inside blocks are those of products that are summed over
// them.
TEST(StoredWeights, DeviceBytesFollowSlices) {
  const StoredModule fp4 = {.kind = StoredKind::kNvfp4, .values = ".weight", .scales = ".weight_scale"};
  const StoredModule fp8 = {.kind = StoredKind::kFp8, .values = ".weight", .scales = ".weight_scale_inv"};
  struct Case {
    const char* module;
    const StoredModule& stored;
    int64_t columns, block;
    int64_t stage;  // bytes of 64 columns of 16 rows; 2048: bf16
  };
  const Case cases[] = {
      {"mlp.up_proj", fp4, 512, 16, 592},      {"mlp.down_proj", fp4, 512, 16, 592},  // slices of 64
      {"mlp.down_proj", fp4, 192, 16, 656},                                           // of 24: begin at 8 of a block
      {"mlp.up_proj", fp4, 192, 16, 592},                                             // cut by rows
      {"mlp.down_proj", fp4, 96, 16, 2048},                                           // of 12
      {"self_attn.o_proj", fp4, 192, 16, 656},                                        // as any other that is summed
      {"mlp.up_proj", fp8, 512, 128, 1088},    {"mlp.up_proj", fp8, 512, 32, 1152},
      {"mlp.down_proj", fp8, 512, 128, 1088},  // slices of 64
      {"mlp.down_proj", fp8, 768, 128, 1152},  // of 96
      {"mlp.down_proj", fp8, 384, 128, 2048},  // of 48
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.module) + " of " + std::to_string(c.columns));
    const bool half = c.stored.kind == StoredKind::kNvfp4;
    for (const bool stacked : {false, true}) {  // experts in one tensor
      const auto shape = [stacked](int64_t rows, int64_t cols) {
        return stacked ? std::vector<int64_t>{2, rows / 2, cols} : std::vector<int64_t>{rows, cols};
      };
      const OneModule source(c.module, c.stored, half ? Dtype::kU8 : Dtype::kF8E4m3,
                             shape(32, half ? c.columns / 2 : c.columns), half ? Dtype::kF8E4m3 : Dtype::kF32,
                             shape(half ? 32 : 2, c.columns / c.block));
      EXPECT_EQ(stored_memory_bytes(source, c.module, c.stored, source.values(), MemoryOf::kCuda),
                32 * c.columns / 1024 * c.stage);
    }
  }
}

// Protects: a GPU keeps MLX affine as 4 or 8 bits, and as bf16 where scales are not bf16.
TEST(StoredWeights, DeviceBytesOfAffine) {
  constexpr int64_t kCount = 64 * 1024;
  EXPECT_EQ(affine_device_bytes({.bits = 4, .group = 64}, Dtype::kBf16, kCount), 64 * (512 + 64));
  EXPECT_EQ(affine_device_bytes({.bits = 4, .group = 32}, Dtype::kBf16, kCount), 64 * (512 + 128));
  EXPECT_EQ(affine_device_bytes({.bits = 8, .group = 128}, Dtype::kBf16, kCount), 64 * (1024 + 64));
  for (const int bits : {2, 3, 6}) {
    EXPECT_EQ(affine_device_bytes({.bits = bits, .group = 64}, Dtype::kBf16, kCount), 64 * (1024 + 64)) << bits;
  }
  EXPECT_EQ(affine_device_bytes({.bits = 4, .group = 64}, Dtype::kF16, kCount), 2 * kCount);
  const auto facts = inspect(kFixtures + "mlx_4bit");
  ASSERT_TRUE(facts.ok()) << facts.status();
  const auto plain = inspect(kFixtures + "fp8_tensor");
  EXPECT_LT(facts->device_memory_by_kind.at("mlp"), plain->device_memory_by_kind.at("mlp"));
}

// Protects: scales of activations are known and left unread; inspect counts stored weights as the numbers they stand
// for.
TEST(StoredWeights, InspectAndActivationScales) {
  const auto plain = inspect(kFixtures + "fp8_tensor");
  ASSERT_TRUE(plain.ok()) << plain.status();
  const std::vector<std::pair<const char*, const char*>> labels = {{"fp8_block", "fp8"},
                                                                   {"nvfp4_modelopt", "nvfp4 g16"},
                                                                   {"nvfp4_compressed_tensors", "nvfp4 g16"},
                                                                   {"exl3_mul1_3bit", "exl3 3-bit"}};
  for (const auto& [name, label] : labels) {
    const auto facts = inspect(kFixtures + name);
    ASSERT_TRUE(facts.ok()) << facts.status();
    EXPECT_EQ(facts->parameters, plain->parameters) << name;
    EXPECT_EQ(facts->bytes_by_format.count(label), 1u) << name;
  }
  // A byte a value and a scale a matrix in the file; on the CPU a scale for each row, on a device one for 64 columns.
  EXPECT_EQ(plain->bytes_by_kind.at("mlp"), 2 * 3 * (512 * 128 + 4));
  EXPECT_EQ(plain->memory_by_kind.at("mlp"), 2 * (3 * 512 * 128 + (512 + 512 + 128) * 4));
  EXPECT_EQ(plain->device_memory_by_kind.at("mlp"), 2 * 3 * 512 * 128 * 17 / 16);
  EXPECT_EQ(inspect(kFixtures + "nvfp4_modelopt")->bytes_by_format.at("activation scales, not used"), 14 * 4);
  Opened at = open(kFixtures + "nvfp4_modelopt");
  for (const std::string& name : at.reader->unused()) EXPECT_FALSE(name.ends_with(".input_scale")) << name;
}

}  // namespace
}  // namespace tensorfold
