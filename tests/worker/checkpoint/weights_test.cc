// Weights by meaning: layouts of both conversions, norm conventions, MLX matrices, and every contradiction named.
#include "worker/checkpoint/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/checkpoint.h"

namespace tensorfold {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

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

std::string layout_error(const std::string& dir) {
  auto checkpoint = Checkpoint::open(dir);
  if (!checkpoint.ok()) return "not opened: " + std::string(checkpoint.status().message());
  const auto layout = Layout::detect(**checkpoint);
  return layout.ok() ? "no error" : std::string(layout.status().message());
}

template <typename T>
std::string message(const absl::StatusOr<T>& result) {
  return result.ok() ? "no error" : std::string(result.status().message());
}

// Everything a qwen3_5 loader reads, as one list of floats: two layouts of one model must give the same.
std::vector<float> read_all_qwen3_5(WeightReader& reader) {
  std::vector<float> all;
  const auto add = [&](const absl::StatusOr<std::vector<float>>& values) {
    ASSERT_TRUE(values.ok()) << values.status();
    all.insert(all.end(), values->begin(), values->end());
  };
  const auto matrix = [&](const std::string& module, int64_t rows, int64_t cols) {
    const auto source = reader.matrix(module, rows, cols);
    ASSERT_TRUE(source.ok()) << source.status();
    ASSERT_EQ(source->format, WeightFormat::kBf16);
    const auto count = static_cast<size_t>(rows * cols);
    add(read_floats({module, Dtype::kBf16, {rows, cols}, {source->data, count * 2}}));
  };
  const auto block = [&](const std::string& at, bool full) {
    add(reader.norm(at + "input_layernorm", 64));
    add(reader.norm(at + "post_attention_layernorm", 64));
    matrix(at + "mlp.gate_proj", 256, 64);
    matrix(at + "mlp.up_proj", 256, 64);
    matrix(at + "mlp.down_proj", 64, 256);
    if (full) {
      matrix(at + "self_attn.q_proj", 512, 64);
      matrix(at + "self_attn.k_proj", 128, 64);
      matrix(at + "self_attn.v_proj", 128, 64);
      matrix(at + "self_attn.o_proj", 64, 256);
      add(reader.norm(at + "self_attn.q_norm", 32));
      add(reader.norm(at + "self_attn.k_norm", 32));
    } else {
      matrix(at + "linear_attn.in_proj_qkv", 512, 64);
      matrix(at + "linear_attn.in_proj_z", 256, 64);
      matrix(at + "linear_attn.in_proj_b", 8, 64);
      matrix(at + "linear_attn.in_proj_a", 8, 64);
      matrix(at + "linear_attn.out_proj", 64, 256);
      add(reader.convolution(at + "linear_attn.conv1d", 512, 4));
      add(reader.vector(at + "linear_attn.A_log", 8));
      add(reader.vector(at + "linear_attn.dt_bias", 8));
      add(reader.norm(at + "linear_attn.norm", 32));
    }
  };
  matrix("embed_tokens", 512, 64);
  matrix("lm_head", 512, 64);
  add(reader.norm("norm", 64));
  for (int i = 0; i < 4; ++i) block("layers." + std::to_string(i) + ".", i == 3);
  if (reader.layout().has_mtp()) {
    matrix("mtp.fc", 64, 128);
    block("mtp.layers.0.", true);
    for (const char* name : {"mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"})
      add(reader.norm(name, 64));
  }
  EXPECT_THAT(reader.unused(), IsEmpty());
  return all;
}

bool is_centred_norm(const std::string& name) {
  return name.find("norm") != std::string::npos && name.find("linear_attn.norm") == std::string::npos &&
         name.find("visual") == std::string::npos;
}

// The MLX converter's work: names, convolution layout, and 1 added to the norms (kept in fp32, so that values compare).
ModelCopy mlx_conversion(bool add_one_to_mtp) {
  ModelCopy copy = ModelCopy::of(kFixtures + "qwen3_5");
  const std::string hf = "model.language_model.";
  for (OwnedTensor& tensor : copy.tensors) {
    const bool mtp = tensor.name.starts_with("mtp.");
    if (is_centred_norm(tensor.name) && (!mtp || add_one_to_mtp)) {
      std::vector<float> values = *read_floats(tensor.view());
      for (float& value : values) value += 1.0f;
      tensor.set_floats(values);
    }
    if (tensor.name.ends_with("conv1d.weight")) std::swap(tensor.shape[1], tensor.shape[2]);
    if (tensor.name.starts_with(hf))
      tensor.name = "language_model.model." + tensor.name.substr(hf.size());
    else if (tensor.name.starts_with("model.visual."))
      tensor.name = "vision_tower." + tensor.name.substr(13);
    else
      tensor.name = "language_model." + tensor.name;
  }
  return copy;
}

// Protects: the released layout is read, vision tensors are skipped by name and counted, gamma gets its 1.
TEST(Weights, Qwen35HuggingFace) {
  Opened at = open(kFixtures + "qwen3_5");
  const std::vector<float> all = read_all_qwen3_5(*at.reader);
  EXPECT_EQ(at.reader->layout().main_prefix(), "model.language_model.");
  EXPECT_TRUE(at.reader->layout().main_norms().zero_centred);
  EXPECT_TRUE(at.reader->layout().mtp_norms().zero_centred);
  EXPECT_EQ(at.reader->layout().vision_tensors(), 21);
  EXPECT_TRUE(at.reader->check_all_used().ok());
  // The gated norm is plain: as stored.
  const auto stored = *read_floats(*at.checkpoint->find("model.language_model.layers.0.linear_attn.norm.weight"));
  EXPECT_EQ(*at.reader->norm("layers.0.linear_attn.norm", 32), stored);
  const auto raw = *read_floats(*at.checkpoint->find("model.language_model.norm.weight"));
  EXPECT_EQ((*at.reader->norm("norm", 64))[3], raw[3] + 1.0f);
}

// Protects: an MLX conversion of the same model gives the same numbers, whichever way its MTP norms were stored.
TEST(Weights, Qwen35MlxLayoutIsEqual) {
  const std::vector<float> expected = read_all_qwen3_5(*open(kFixtures + "qwen3_5").reader);
  for (bool add_one_to_mtp : {false, true}) {
    Opened at = open(mlx_conversion(add_one_to_mtp).write("mlx"));
    EXPECT_EQ(read_all_qwen3_5(*at.reader), expected);
    EXPECT_EQ(at.reader->layout().main_prefix(), "language_model.model.");
    EXPECT_FALSE(at.reader->layout().main_norms().zero_centred);
    EXPECT_EQ(at.reader->layout().mtp_norms().zero_centred, !add_one_to_mtp);
    EXPECT_THAT(at.reader->layout().mtp_norms().reason, HasSubstr("median"));
    EXPECT_EQ(at.reader->layout().vision_tensors(), 21);
  }
}

// Protects: names with only "model.", and with no prefix at all, give the same numbers.
TEST(Weights, OtherPrefixesAreEqual) {
  const std::vector<float> expected = read_all_qwen3_5(*open(kFixtures + "qwen3_5").reader);
  for (const std::string prefix : {"model.", "", "language_model."}) {
    ModelCopy copy = ModelCopy::of(kFixtures + "qwen3_5");
    const std::string hf = "model.language_model.";
    for (OwnedTensor& tensor : copy.tensors) {
      if (tensor.name.starts_with(hf)) tensor.name = prefix + tensor.name.substr(hf.size());
    }
    Opened at = open(copy.write("prefix"));
    EXPECT_EQ(read_all_qwen3_5(*at.reader), expected) << prefix;
  }
}

// Protects: a conversion that dropped the MTP layer loads without it; half of one does not.
TEST(Weights, MtpAbsentOrPartial) {
  ModelCopy copy = ModelCopy::of(kFixtures + "qwen3_5");
  std::erase_if(copy.tensors,
                [](const OwnedTensor& t) { return t.name.starts_with("mtp.") && t.name != "mtp.norm.weight"; });
  EXPECT_THAT(layout_error(copy.write("half_mtp")), HasSubstr("'mtp.norm.weight' but no mtp.fc.weight"));
  std::erase_if(copy.tensors, [](const OwnedTensor& t) { return t.name.starts_with("mtp."); });
  Opened at = open(copy.write("no_mtp"));
  EXPECT_FALSE(at.reader->layout().has_mtp());
  read_all_qwen3_5(*at.reader);
  ModelCopy uncounted = ModelCopy::of(kFixtures + "qwen3_5");
  uncounted.replace_in_config("\"mtp_num_hidden_layers\": 1", "\"mtp_num_hidden_layers\": 0");
  Opened without = open(uncounted.write("uncounted"));
  EXPECT_FALSE(without.reader->layout().has_mtp());
  read_all_qwen3_5(*without.reader);
}

// Protects: a mixture of two conversions is refused: half of the norms would be wrong.
TEST(Weights, MixedConvolutions) {
  ModelCopy copy = ModelCopy::of(kFixtures + "qwen3_5");
  OwnedTensor& conv = copy.at("model.language_model.layers.1.linear_attn.conv1d.weight");
  conv.shape = {512, 4, 1};
  EXPECT_THAT(layout_error(copy.write("mixed")), HasSubstr("two conversions in one checkpoint"));
  conv.shape = {512, 2, 2};
  EXPECT_THAT(layout_error(copy.write("odd")), HasSubstr("is [512, 2, 2]; allowed"));
}

// Protects: the demo model, tied and sharded: the head is the embedding.
TEST(Weights, SproutTiedHead) {
  Opened at = open(kSprout);
  const auto head = at.reader->matrix("lm_head", 4096, 256);
  const auto embedding = at.reader->matrix("embed_tokens", 4096, 256);
  ASSERT_TRUE(head.ok() && embedding.ok());
  EXPECT_EQ(head->data, embedding->data);
  EXPECT_TRUE(at.reader->layout().has_mtp());
}

// Protects: tied, untied, stored copies, and levels that disagree.
TEST(Weights, HeadVariants) {
  ModelCopy untied = ModelCopy::of(kFixtures + "llama");
  untied.replace_in_config("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
  EXPECT_THAT(layout_error(untied.write("untied")), HasSubstr("no tensor lm_head.weight"));
  ModelCopy stored = ModelCopy::of(kFixtures + "llama");
  OwnedTensor copy = stored.at("model.embed_tokens.weight");
  copy.name = "lm_head.weight";
  stored.tensors.push_back(copy);
  Opened at = open(stored.write("stored"));
  EXPECT_TRUE(at.reader->layout().tied_head());
  EXPECT_THAT(at.reader->unused(), Not(Contains("lm_head.weight")));
  ModelCopy disagree = ModelCopy::of(kFixtures + "qwen3_5");
  disagree.replace_in_config("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
  EXPECT_FALSE(open(disagree.write("disagree")).reader->layout().tied_head());
}

// Protects: models without any known embedding, or with two, say what was looked for.
TEST(Weights, PrefixErrors) {
  ModelCopy copy = ModelCopy::of(kFixtures + "llama");
  OwnedTensor& embedding = copy.at("model.embed_tokens.weight");
  embedding.name = "transformer.wte.weight";
  EXPECT_THAT(layout_error(copy.write("none")), HasSubstr("no embedding: none of the tensors"));
  embedding.name = "model.embed_tokens.weight";
  OwnedTensor second = embedding;
  second.name = "embed_tokens.weight";
  copy.tensors.push_back(second);
  EXPECT_THAT(layout_error(copy.write("two")), HasSubstr("two language models"));
}

// Protects: missing tensors, wrong shapes and types are named with what is expected.
TEST(Weights, TensorErrors) {
  Opened at = open(kFixtures + "llama");
  EXPECT_THAT(message(at.reader->matrix("layers.9.mlp.down_proj", 64, 256)),
              HasSubstr("no tensor 'model.layers.9.mlp.down_proj.weight' in 'model.safetensors'"));
  EXPECT_THAT(message(at.reader->matrix("layers.0.mlp.down_proj", 256, 64)),
              HasSubstr("is BF16 [64, 256]; by config.json it must be [256, 64]"));
  EXPECT_THAT(message(at.reader->norm("norm", 65)), HasSubstr("is BF16 [64]; by config.json it must be [65]"));
  ModelCopy copy = ModelCopy::of(kFixtures + "llama");
  copy.at("model.norm.weight").dtype = Dtype::kI16;
  copy.at("model.layers.0.mlp.up_proj.weight").dtype = Dtype::kU16;
  Opened typed = open(copy.write("types"));
  EXPECT_THAT(message(typed.reader->norm("norm", 64)), HasSubstr("is I16; allowed are F32, F16, BF16"));
  EXPECT_THAT(message(typed.reader->matrix("layers.0.mlp.up_proj", 256, 64)),
              HasSubstr("is U16, which is not read as a weight"));
}

// Protects: a tensor that nobody reads, such as a bias, is an error by name; what a loader leaves on purpose is not.
TEST(Weights, UnusedTensors) {
  ModelCopy copy = ModelCopy::of(kFixtures + "llama");
  OwnedTensor bias = copy.at("model.norm.weight");
  bias.name = "model.layers.0.self_attn.q_proj.bias";
  copy.tensors.push_back(bias);
  bias.name = "model.layers.0.self_attn.rotary_emb.inv_freq";
  copy.tensors.push_back(bias);
  Opened at = open(copy.write("unused"));
  at.reader->leave("embed_tokens");
  at.reader->leave("norm");
  for (int i = 1; i < 4; ++i) at.reader->leave("layers." + std::to_string(i) + ".");
  at.reader->leave("layers.0.mlp.");
  EXPECT_THAT(at.reader->unused(), Contains("model.layers.0.self_attn.q_proj.bias"));
  EXPECT_THAT(at.reader->unused(), Not(Contains("model.layers.0.self_attn.rotary_emb.inv_freq")));
  EXPECT_THAT(std::string(at.reader->check_all_used().message()), HasSubstr("q_proj.bias"));
}

// Protects: MLX affine matrices with their override, and the same as slices.
TEST(Weights, MlxMatrices) {
  Opened at = open(kFixtures + "mlx_4bit");
  const auto four = at.reader->matrix("layers.0.mlp.down_proj", 128, 512);
  ASSERT_TRUE(four.ok()) << four.status();
  EXPECT_EQ(four->format, WeightFormat::kMlxAffine);
  EXPECT_EQ(four->bits, 4);
  EXPECT_EQ(four->group, 64);
  EXPECT_EQ(four->row_bytes, 256);
  EXPECT_EQ(four->scale_row_bytes, 16);
  EXPECT_EQ(four->scale_format, WeightFormat::kBf16);
  const auto eight = at.reader->matrix("layers.1.mlp.down_proj", 128, 512);
  ASSERT_TRUE(eight.ok()) << eight.status();
  EXPECT_EQ(eight->bits, 8);
  EXPECT_EQ(eight->row_bytes, 512);
  const MatrixSource part = four->slice_rows(3, 5).slice_cols(64, 128);
  EXPECT_EQ(part.data, four->data + 3 * 256 + 32);
  EXPECT_EQ(part.scales, four->scales + 3 * 16 + 2);
  ASSERT_TRUE(at.reader->matrix("embed_tokens", 512, 128).ok());
  ASSERT_TRUE(at.reader->matrix("lm_head", 512, 128).ok());
}

// Protects: config and tensors that contradict each other are named with both sides.
TEST(Weights, MlxContradictions) {
  const auto error = [](const std::function<void(ModelCopy&)>& change) {
    ModelCopy copy = ModelCopy::of(kFixtures + "mlx_4bit");
    change(copy);
    Opened at = open(copy.write("contradiction"));
    return message(at.reader->matrix("layers.0.mlp.down_proj", 128, 512));
  };
  const std::string module = "model.layers.0.mlp.down_proj";
  const auto config = [](ModelCopy& copy, const std::string& quantization) {
    copy.config.resize(copy.config.find(",\n  \"quantization\""));
    copy.config += quantization + "}";
  };
  EXPECT_EQ(error([](ModelCopy&) {}), "no error");
  EXPECT_THAT(error([&](ModelCopy& c) { config(c, R"(,"quantization":{"bits":8,"group_size":64})"); }),
              HasSubstr("config.json says 8 bits in groups of 64"));
  EXPECT_THAT(error([&](ModelCopy& c) { config(c, R"(,"quantization":{"bits":4,"group_size":32})"); }),
              HasSubstr("(4 bits in groups of 64)"));
  EXPECT_THAT(error([&](ModelCopy& c) { config(c, ""); }), HasSubstr("is not quantised"));
  EXPECT_THAT(error([&](ModelCopy& c) {
                config(c, R"(,"quantization":{"bits":4,"group_size":64,"layers.0.mlp.down_proj":false})");
              }),
              HasSubstr("is not quantised"));
  EXPECT_THAT(
      error([&](ModelCopy& c) { std::erase_if(c.tensors, [&](auto& t) { return t.name == module + ".biases"; }); }),
      HasSubstr("no tensor 'model.layers.0.mlp.down_proj.biases'"));
  EXPECT_THAT(
      error([&](ModelCopy& c) { std::erase_if(c.tensors, [&](auto& t) { return t.name == module + ".scales"; }); }),
      HasSubstr("no tensor 'model.layers.0.mlp.down_proj.scales'"));
  EXPECT_THAT(error([&](ModelCopy& c) { c.at(module + ".weight").dtype = Dtype::kI32; }),
              HasSubstr("holds weight I32"));
  EXPECT_THAT(error([&](ModelCopy& c) { c.at(module + ".scales").dtype = Dtype::kI16; }), HasSubstr("scales I16"));
}

// Protects: a module that the config quantises by name but the file does not.
TEST(Weights, MlxNamedButFloat) {
  ModelCopy copy = ModelCopy::of(kFixtures + "qwen3");
  copy.config.resize(copy.config.rfind('}'));
  copy.config += R"(,"quantization":{"bits":4,"group_size":64,"model.layers.0.mlp.up_proj":{"bits":8}}})";
  Opened at = open(copy.write("named"));
  EXPECT_THAT(message(at.reader->matrix("layers.0.mlp.up_proj", 256, 64)), HasSubstr("without .scales"));
  EXPECT_TRUE(at.reader->matrix("layers.0.mlp.gate_proj", 256, 64).ok());  // the converter leaves some alone
}

// Protects: a file may place tensors at odd bytes; kernels still get aligned elements with the same values.
TEST(Weights, OddAddresses) {
  const std::string dir = ModelCopy::fresh_dir("odd_address");
  const ModelCopy copy = ModelCopy::of(kFixtures + "llama");
  std::ofstream(dir + "/config.json") << copy.config;
  copy.write_part(dir + "/model.safetensors", 0, copy.tensors.size());
  std::ifstream in(dir + "/model.safetensors", std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  bytes.insert(8 + header, " ");
  ++header;
  std::memcpy(bytes.data(), &header, 8);
  std::ofstream(dir + "/model.safetensors", std::ios::binary) << bytes;
  Opened odd = open(dir), even = open(kFixtures + "llama");
  const auto a = odd.reader->matrix("layers.2.mlp.up_proj", 256, 64),
             b = even.reader->matrix("layers.2.mlp.up_proj", 256, 64);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a->data) % 2, 0u);
  EXPECT_EQ(std::memcmp(a->data, b->data, 256 * 64 * 2), 0);
  EXPECT_EQ(*odd.reader->norm("norm", 64), *even.reader->norm("norm", 64));
}

}  // namespace
}  // namespace tensorfold
