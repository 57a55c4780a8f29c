#include "worker/checkpoint/generated.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <boost/json.hpp>
#include <cmath>
#include <cstring>

#include "worker/checkpoint/json_fields.h"

namespace tensorfold {
namespace {

constexpr size_t kLargeBlock = 64u << 20;  // weights, words
constexpr size_t kSmallBlock = 8u << 20;   // scales, biases
constexpr size_t kAlignment = 256;         // of a tensor in its block
constexpr size_t kMaxTensor = size_t{1} << 40;
constexpr int64_t kMaxTaps = int64_t{1} << 28;  // of all convolutions, which are made one by one
constexpr float kDeviation = 0.02f;

// `key` and `value` are what a config.json of this format has beside the shape. Embedding, head and routers stay bf16
// in released checkpoints that are not MLX's.
struct Format {
  std::string_view name;
  std::string_view key = {};
  std::string_view value = {};
};
constexpr std::array<Format, 5> kFormats = {
    Format{"bf16"}, Format{"mlx-4bit", "quantization", R"({"group_size": 64, "bits": 4, "mode": "affine"})"},
    Format{"mlx-8bit", "quantization", R"({"group_size": 64, "bits": 8, "mode": "affine"})"},
    Format{"nvfp4", "quantization_config",
           R"({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
               "ignore": ["lm_head", "*embed_tokens", "*mlp.gate", "*mixer.gate", "*embeddings", "*shared_expert_gate"]})"},
    Format{"fp8", "quantization_config",
           R"({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
               "modules_to_not_convert": ["lm_head", "*embed_tokens", "*mlp.gate", "*mixer.gate", "*embeddings", "*shared_expert_gate"]})"}};

// splitmix64, by counter: any number without those before it.
uint64_t mixed(uint64_t seed, uint64_t index) {
  uint64_t x = seed + (index + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t seed_of(uint64_t seed, std::string_view name) {
  uint64_t hash = seed ^ 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return mixed(hash, 0);
}

float uniform(uint64_t bits, float low, float high) {
  return low + (high - low) * (static_cast<float>(bits >> 40) * 0x1p-24f);
}

uint16_t bf16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

template <typename Number, typename Make>
void fill_with(std::span<std::byte> block, const Make& make) {
  for (size_t i = 0; i < block.size() / sizeof(Number); ++i) {
    const Number value = make(i);
    std::memcpy(block.data() + i * sizeof(Number), &value, sizeof(Number));
  }
}

// Near normal: the sum of four uniform numbers.
void fill_weights(std::span<std::byte> block, uint64_t seed) {
  constexpr float kFactor = kDeviation * 1.7320508f / 65536.0f;  // a sum of four has a deviation of 65536 / sqrt(3)
  fill_with<uint16_t>(block, [&](size_t i) {
    const uint64_t x = mixed(seed, i);
    const int sum = static_cast<int>(x & 0xFFFF) + static_cast<int>((x >> 16) & 0xFFFF) +
                    static_cast<int>((x >> 32) & 0xFFFF) + static_cast<int>(x >> 48);
    return bf16_bits(static_cast<float>(sum - 2 * 65535) * kFactor);
  });
}

// Groups that reach about three deviations to either side of 0.
uint16_t scale_bits(uint64_t seed, size_t index, int bits) {
  const float middle = 2 * 3 * kDeviation / static_cast<float>((1 << bits) - 1);
  return bf16_bits(middle * uniform(mixed(seed, index), 0.75f, 1.25f));
}

// A random number of e4m3 without its NaNs.
uint8_t e4m3_bits(uint64_t seed, size_t index) {
  const auto bits = static_cast<uint8_t>(mixed(seed, index));
  return (bits & 0x7f) == 0x7f ? static_cast<uint8_t>(bits ^ 1) : bits;
}
// Random codes of e2m1 and of e4m3 have deviations of 2.9 and 119.
constexpr float kFp4Scale = kDeviation / (2.9f * 250.0f);  // times block scales of 128 to 416
constexpr float kFp8Scale = kDeviation / 119.0f;
constexpr int kFp4Group = 16, kFp8Block = 128;

}  // namespace

std::vector<std::string> generated_formats() {
  std::vector<std::string> names;
  for (const Format& format : kFormats) names.emplace_back(format.name);
  return names;
}

absl::StatusOr<ModelConfig> read_shape(const std::string& path) {
  absl::StatusOr<std::string> text = read_text_file(path, kMaxConfigBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<ModelConfig> config = parse_config(*text, "", path);
  if (config.ok() && config->quantization.any()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: a shape file states no quantisation: the format is chosen with the bench's --format", path));
  }
  return config;
}

absl::StatusOr<std::unique_ptr<GeneratedCheckpoint>> GeneratedCheckpoint::create(const ModelConfig& config,
                                                                                 std::string_view format,
                                                                                 const std::string& label,
                                                                                 uint64_t seed) {
  const auto found = std::find_if(kFormats.begin(), kFormats.end(), [&](const Format& f) { return f.name == format; });
  if (found == kFormats.end()) {
    return absl::InvalidArgumentError(
        fmt::format("format {}: there are {}", quoted_name(format), fmt::join(generated_formats(), ", ")));
  }
  const bool nemotron = config.family == Family::kNemotronH;
  const bool single_mixers = config.count(LayerKind::kMamba2) > 0 || config.count(LayerKind::kNone) > 0;
  if ((single_mixers && !nemotron) || config.gated_streams.count > 0 || is_latent(config.family)) {
    return absl::UnimplementedError(
        fmt::format("{}: weights of {} are not made up here, only read", label, family_name(config.family)));
  }
  const LinearAttentionConfig& linear = config.linear;
  const Mamba2Config& mamba = config.mamba2;
  const int64_t channels = nemotron ? mamba.heads * mamba.head_dim + 2 * mamba.groups * mamba.state
                                    : 2 * linear.key_heads * linear.key_dim + linear.value_heads * linear.value_dim;
  const int64_t taps = nemotron ? mamba.conv_kernel : linear.conv_kernel;
  if (channels * taps * config.layer_count() > kMaxTaps) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} layers with convolutions of {} channels; allowed are {} taps "
                    "in all",
                    label, config.layer_count(), channels, kMaxTaps));
  }
  std::unique_ptr<GeneratedCheckpoint> out(new GeneratedCheckpoint());
  out->label_ = label;
  out->config_ = config;
  out->config_.quantization = {};
  out->config_.tie_levels_disagree = false;
  out->format_ = static_cast<size_t>(found - kFormats.begin());
  if (!found->key.empty()) {
    const auto quantization =
        parse_quantization(boost::json::object{{found->key, boost::json::parse(found->value)}}, nullptr, label);
    if (!quantization.ok()) return quantization.status();
    out->config_.quantization = *quantization;
  }
  out->seed_ = seed;
  out->list_tensors();
  if (absl::Status status = out->map_windows(); !status.ok()) return status;
  out->sort_by_name();
  return out;
}

std::string GeneratedCheckpoint::with_quantization(const std::string& shape_text) const {
  boost::json::object config = boost::json::parse(shape_text).as_object();
  const Format& format = kFormats[format_];
  if (!format.key.empty()) config[format.key] = boost::json::parse(format.value);
  return boost::json::serialize(config);
}

const TensorInfo* GeneratedCheckpoint::find(std::string_view name) const {
  const auto at = std::lower_bound(names_.begin(), names_.end(), name,
                                   [](const std::string& a, std::string_view b) { return a < b; });
  return at != names_.end() && *at == name ? &tensors_[static_cast<size_t>(at - names_.begin())] : nullptr;
}

void GeneratedCheckpoint::list_tensors() {
  if (config_.family == Family::kNemotronH) return list_nemotron();
  add_linear("model.embed_tokens", config_.vocab_size, config_.hidden_size);
  add_norm("model.norm", config_.hidden_size);
  if (!config_.tie_word_embeddings) add_linear("lm_head", config_.vocab_size, config_.hidden_size);
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    list_layer(fmt::format("model.layers.{}", i), config_.layers[i], config_.mlps[i]);
  }
  if (config_.mtp_layers > 0) list_mtp();
}

void GeneratedCheckpoint::list_mlp(const std::string& prefix, int64_t columns) {
  add_linear(prefix + ".gate_proj", columns, config_.hidden_size);
  add_linear(prefix + ".up_proj", columns, config_.hidden_size);
  add_linear(prefix + ".down_proj", config_.hidden_size, columns);
}

void GeneratedCheckpoint::list_experts(const std::string& prefix) {
  const ExpertsConfig& experts = config_.experts;
  add_linear(prefix + ".gate", experts.count, config_.hidden_size);
  for (int64_t i = 0; i < experts.count; ++i) {
    list_mlp(fmt::format("{}.experts.{}", prefix, i), experts.intermediate_size);
  }
  if (experts.shared_intermediate_size == 0) return;
  list_mlp(prefix + ".shared_expert", experts.shared_intermediate_size);
  add_linear(prefix + ".shared_expert_gate", 1, config_.hidden_size);
}

void GeneratedCheckpoint::list_layer(const std::string& prefix, LayerKind kind, MlpKind mlp) {
  const ModelConfig& c = config_;
  add_norm(prefix + ".input_layernorm", c.hidden_size);
  add_norm(prefix + ".post_attention_layernorm", c.hidden_size);
  if (mlp == MlpKind::kExperts) {
    list_experts(prefix + ".mlp");
  } else {
    list_mlp(prefix + ".mlp", c.intermediate_size);
  }
  if (kind == LayerKind::kFullAttention) {
    const std::string at = prefix + ".self_attn";
    add_linear(at + ".q_proj", c.heads * c.head_dim * (c.attn_output_gate ? 2 : 1), c.hidden_size);
    add_linear(at + ".k_proj", c.kv_heads * c.head_dim, c.hidden_size);
    add_linear(at + ".v_proj", c.kv_heads * c.head_dim, c.hidden_size);
    add_linear(at + ".o_proj", c.hidden_size, c.heads * c.head_dim);
    if (c.qk_norm) add_norm(at + ".q_norm", c.head_dim);
    if (c.qk_norm) add_norm(at + ".k_norm", c.head_dim);
    return;
  }
  const std::string at = prefix + ".linear_attn";
  const LinearAttentionConfig& l = c.linear;
  const int64_t values = l.value_heads * l.value_dim;
  const int64_t channels = 2 * l.key_heads * l.key_dim + values;
  if (l.fused) {
    add_linear(at + ".in_proj_qkvz", channels + values, c.hidden_size);
    add_linear(at + ".in_proj_ba", 2 * l.value_heads, c.hidden_size);
  } else {
    add_linear(at + ".in_proj_qkv", channels, c.hidden_size);
    add_linear(at + ".in_proj_z", values, c.hidden_size);
    add_linear(at + ".in_proj_b", l.value_heads, c.hidden_size);
    add_linear(at + ".in_proj_a", l.value_heads, c.hidden_size);
  }
  add_linear(at + ".out_proj", c.hidden_size, values);
  const bool mlx = c.quantization.standard.has_value();
  add_values(at + ".conv1d.weight", Dtype::kBf16,
             mlx ? std::vector<int64_t>{channels, l.conv_kernel, 1} : std::vector<int64_t>{channels, 1, l.conv_kernel},
             -0.5f, 0.5f);
  add_values(at + ".A_log", Dtype::kF32, {l.value_heads}, 0.0f, 2.77f);      // rates from 1 to 16
  add_values(at + ".dt_bias", Dtype::kBf16, {l.value_heads}, -6.9f, -2.2f);  // steps from 0.001 to 0.1
  add_norm(at + ".norm", l.value_dim, /*plain=*/true);
}

void GeneratedCheckpoint::list_mtp() {
  add_linear("mtp.fc", config_.hidden_size, 2 * config_.hidden_size);
  add_norm("mtp.norm", config_.hidden_size);
  add_norm("mtp.pre_fc_norm_embedding", config_.hidden_size);
  add_norm("mtp.pre_fc_norm_hidden", config_.hidden_size);
  list_layer("mtp.layers.0", LayerKind::kFullAttention,
             config_.experts.count > 0 ? MlpKind::kExperts : MlpKind::kDense);
}

void GeneratedCheckpoint::list_nemotron() {
  add_linear("backbone.embeddings", config_.vocab_size, config_.hidden_size);
  add_norm("backbone.norm_f", config_.hidden_size);
  if (!config_.tie_word_embeddings) add_linear("lm_head", config_.vocab_size, config_.hidden_size);
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    list_nemotron_block(fmt::format("backbone.layers.{}", i), config_.layers[i], config_.mlps[i]);
  }
  if (config_.mtp_layers == 0) return;
  add_linear("mtp.layers.0.eh_proj", config_.hidden_size, 2 * config_.hidden_size);
  add_norm("mtp.layers.0.enorm", config_.hidden_size);
  add_norm("mtp.layers.0.hnorm", config_.hidden_size);
  list_nemotron_block("mtp.layers.0", LayerKind::kFullAttention, MlpKind::kNone);
  list_nemotron_block("mtp.layers.1", LayerKind::kNone, MlpKind::kExperts);
  add_norm("mtp.layers.1.final_layernorm", config_.hidden_size);
}

// One mixer.
void GeneratedCheckpoint::list_nemotron_block(const std::string& prefix, LayerKind kind, MlpKind mlp) {
  const ModelConfig& c = config_;
  const std::string at = prefix + ".mixer";
  add_norm(prefix + ".norm", c.hidden_size);
  const auto add_mlp = [&](const std::string& module, int64_t columns) {
    add_linear(module + ".up_proj", columns, c.hidden_size);
    add_linear(module + ".down_proj", c.hidden_size, columns);
  };
  if (kind == LayerKind::kFullAttention) {
    add_linear(at + ".q_proj", c.heads * c.head_dim, c.hidden_size);
    add_linear(at + ".k_proj", c.kv_heads * c.head_dim, c.hidden_size);
    add_linear(at + ".v_proj", c.kv_heads * c.head_dim, c.hidden_size);
    add_linear(at + ".o_proj", c.hidden_size, c.heads * c.head_dim);
  } else if (kind == LayerKind::kMamba2) {
    list_mamba2(at);
  } else if (mlp == MlpKind::kExperts) {
    add_linear(at + ".gate", c.experts.count, c.hidden_size);
    add_values(at + ".gate.e_score_correction_bias", Dtype::kF32, {c.experts.count}, -0.01f, 0.01f);
    for (int64_t i = 0; i < c.experts.count; ++i) {
      add_mlp(fmt::format("{}.experts.{}", at, i), c.experts.intermediate_size);
    }
    add_mlp(at + ".shared_experts", c.experts.shared_intermediate_size);
  } else {
    add_mlp(at, c.intermediate_size);
  }
}

void GeneratedCheckpoint::list_mamba2(const std::string& prefix) {
  const Mamba2Config& m = config_.mamba2;
  const int64_t width = m.heads * m.head_dim, channels = width + 2 * m.groups * m.state, taps = m.conv_kernel;
  add_linear(prefix + ".in_proj", width + channels + m.heads, config_.hidden_size);
  add_linear(prefix + ".out_proj", config_.hidden_size, width);
  const bool mlx = config_.quantization.standard.has_value();
  add_values(prefix + ".conv1d.weight", Dtype::kBf16,
             mlx ? std::vector<int64_t>{channels, taps, 1} : std::vector<int64_t>{channels, 1, taps}, -0.5f, 0.5f);
  if (m.conv_bias) add_values(prefix + ".conv1d.bias", Dtype::kBf16, {channels}, -0.5f, 0.5f);
  add_values(prefix + ".A_log", Dtype::kF32, {m.heads}, 0.0f, 2.77f);      // rates from 1 to 16
  add_values(prefix + ".dt_bias", Dtype::kBf16, {m.heads}, -6.9f, -2.2f);  // steps from 0.001 to 0.1
  add_values(prefix + ".D", Dtype::kF32, {m.heads}, 0.5f, 1.5f);
  add_norm(prefix + ".norm", width, /*plain=*/true);
}

void GeneratedCheckpoint::add_linear(const std::string& module, int64_t rows, int64_t cols) {
  const size_t offset = seed_of(seed_, module);
  const QuantizationConfig& quantization = config_.quantization;
  if (quantization.kinds.contains(StoredKind::kNvfp4) && !quantization.ignores(module) && cols % kFp4Group == 0) {
    add_window(module + ".weight", Dtype::kU8, {rows, cols / 2}, Content::kWords, offset);
    add_window(module + ".weight_scale", Dtype::kF8E4m3, {rows, cols / kFp4Group}, Content::kScales, offset);
    add_values(module + ".weight_scale_2", Dtype::kF32, {}, 0.99f * kFp4Scale, 1.01f * kFp4Scale);
    return;
  }
  if (quantization.kinds.contains(StoredKind::kFp8) && !quantization.ignores(module)) {
    add_window(module + ".weight", Dtype::kF8E4m3, {rows, cols}, Content::kCodes, offset);
    add_values(module + ".weight_scale_inv", Dtype::kF32,
               {(rows + kFp8Block - 1) / kFp8Block, (cols + kFp8Block - 1) / kFp8Block}, 0.8f * kFp8Scale,
               1.2f * kFp8Scale);
    return;
  }
  const std::optional<AffineFormat>& format = quantization.standard;
  if (!format || cols % format->group != 0) {
    add_window(module + ".weight", Dtype::kBf16, {rows, cols}, Content::kWeights, offset);
    return;
  }
  const int64_t groups = cols / format->group;
  add_window(module + ".weight", Dtype::kU32, {rows, cols * format->bits / 32}, Content::kWords, offset);
  // The same offset for both, so that a bias is its scale's.
  add_window(module + ".scales", Dtype::kBf16, {rows, groups}, Content::kScales, offset);
  add_window(module + ".biases", Dtype::kBf16, {rows, groups}, Content::kBiases, offset);
}

void GeneratedCheckpoint::add_window(std::string name, Dtype dtype, std::vector<int64_t> shape, Content content,
                                     size_t offset) {
  const bool small = is_small(content);
  offset = offset % (small ? kSmallBlock : kLargeBlock) / kAlignment * kAlignment;
  TensorInfo& tensor = tensors_.emplace_back();
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  windows_.push_back({tensors_.size() - 1, content, offset,
                      static_cast<size_t>(tensor.elements()) * static_cast<size_t>(dtype_bytes(dtype))});
}

void GeneratedCheckpoint::add_values(std::string name, Dtype dtype, std::vector<int64_t> shape, float low, float high) {
  TensorInfo& tensor = tensors_.emplace_back();
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  const size_t bytes = static_cast<size_t>(tensor.elements()) * static_cast<size_t>(dtype_bytes(dtype));
  const std::span<std::byte> to(values_.emplace_back(std::make_unique<std::byte[]>(bytes)).get(), bytes);
  const uint64_t seed = seed_of(seed_, tensor.name);
  const auto value = [&](size_t i) { return uniform(mixed(seed, i), low, high); };
  if (dtype == Dtype::kF32) fill_with<float>(to, value);
  if (dtype == Dtype::kBf16) fill_with<uint16_t>(to, [&](size_t i) { return bf16_bits(value(i)); });
  tensor.data = to;
}

void GeneratedCheckpoint::add_norm(const std::string& module, int64_t size, bool plain) {
  // Hugging Face's qwen3_5 stores gamma - 1; MLX's conversion has added the 1 (names.h).
  const bool zero_centred = config_.zero_centred_norms && !config_.quantization.standard && !plain;
  const float centre = zero_centred ? 0.0f : 1.0f;
  add_values(module + ".weight", Dtype::kBf16, {size}, centre - 0.1f, centre + 0.1f);
}

absl::Status GeneratedCheckpoint::map_windows() {
  const int bits = config_.quantization.standard ? config_.quantization.standard->bits : 0;
  const uint64_t weights_seed = mixed(seed_, 0), words_seed = mixed(seed_, 1), scales_seed = mixed(seed_, 2);
  const std::array<std::function<void(std::span<std::byte>)>, kContents> fills = {
      [&](std::span<std::byte> block) { fill_weights(block, weights_seed); },
      [&](std::span<std::byte> block) { fill_with<uint64_t>(block, [&](size_t i) { return mixed(words_seed, i); }); },
      [&](std::span<std::byte> block) {
        if (bits > 0) {
          fill_with<uint16_t>(block, [&](size_t i) { return scale_bits(scales_seed, i, bits); });
        } else {  // e4m3 from 128 to 416
          fill_with<uint8_t>(block, [&](size_t i) { return static_cast<uint8_t>(0x70 + mixed(scales_seed, i) % 14); });
        }
      },
      [&](std::span<std::byte> block) {  // half the range below 0; a power of two times a bf16 number is one
        fill_with<uint16_t>(block, [&](size_t i) {
          const float scale = std::bit_cast<float>(static_cast<uint32_t>(scale_bits(scales_seed, i, bits)) << 16);
          return bf16_bits(scale * -static_cast<float>(1 << (bits - 1)));
        });
      },
      [&](std::span<std::byte> block) {
        fill_with<uint8_t>(block, [&](size_t i) { return e4m3_bits(words_seed, i); });
      }};
  for (size_t content = 0; content < kContents; ++content) {
    size_t length = 0;
    for (const Window& window : windows_) {
      if (window.content != static_cast<Content>(content)) continue;
      if (window.bytes > kMaxTensor) {
        return absl::InvalidArgumentError(fmt::format("{}: tensor {} would have {} bytes; allowed are at most {}",
                                                      label_, quoted_name(tensors_[window.tensor].name), window.bytes,
                                                      kMaxTensor));
      }
      length = std::max(length, window.offset + window.bytes);
    }
    if (length == 0) continue;
    const bool small = is_small(static_cast<Content>(content));
    auto block = RepeatedBlock::create(small ? kSmallBlock : kLargeBlock, length, fills[content]);
    if (!block.ok()) return block.status();
    blocks_[content] = *std::move(block);
  }
  for (const Window& window : windows_) {
    const RepeatedBlock& block = *blocks_[static_cast<size_t>(window.content)];
    tensors_[window.tensor].data = block.bytes().subspan(window.offset, window.bytes);
  }
  return absl::OkStatus();
}

void GeneratedCheckpoint::sort_by_name() {
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  for (const TensorInfo& tensor : tensors_) names_.push_back(tensor.name);
}

}  // namespace tensorfold
