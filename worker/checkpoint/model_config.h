// config.json as typed, checked facts. Everything here is decided before any weight file is opened.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/quantization.h"

namespace tensorfold {

enum class Family : uint8_t {
  kLlama,
  kQwen3,
  kQwen3Moe,
  kQwen3Next,
  kQwen3_5,
  kQwen3_5Moe,
  kNemotronH,
  kQwen4Exp,
  kGlm5Next,
  kDeepseekV4,
  kDeepseekV41
};
std::string_view family_name(Family family);
/// Gated delta net layers between gated attention layers: qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp.
bool is_hybrid(Family family);
/// Attention over latents and residuals of several streams: glm5_next, deepseek_v4, deepseek_v41.
bool is_latent(Family family);
/// Mixtures of experts in some or all layers.
bool has_experts(Family family);

/// deepseek_v4 and deepseek_v41, whose layers have much in common.
bool is_deepseek(Family family);

/// What activations are where a family rounds some of them as part of its definition (deepseek_v41): rounded so, or
/// left as they are. In all other families both are the same.
enum class Precision : uint8_t { kCheckpoint, kFull };
/// "checkpoint", "full".
std::string_view precision_name(Precision precision);
/// InvalidArgument with the allowed names.
absl::StatusOr<Precision> parse_precision(std::string_view name);

/// What mixes tokens in a layer; kNone in a block that is an MLP or experts alone. deepseek_v4's: a window of the last
/// tokens; the window and chosen pooled rows; the window and all pooled rows.
enum class LayerKind : uint8_t {
  kFullAttention,
  kLinearAttention,
  kMamba2,
  kNone,
  kWindow,
  kWindowAndChosen,
  kWindowAndPooled
};

enum class MlpKind : uint8_t { kDense, kExperts, kNone };

enum class RopeType : uint8_t { kDefault, kLinear, kLlama3, kYarn };

/// Rotary positions of the first `dims` dims of each head: inverse frequency i is theta^(-2i / dims), then scaled.
struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  int64_t dims = 0;     // even; head_dim * partial_rotary_factor
  double factor = 1.0;  // linear: frequencies / factor; llama3 and yarn: the same for the slow ones
  // llama3 only: wavelengths over original / low are slowed, those under original / high kept, between: a mix.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_positions = 0;  // llama3 and yarn
  // yarn only: dims that turn more than beta_fast times in the original context are kept, those that turn less than
  // beta_slow times are slowed, between: a mix by dim. Cosines and sines are multiplied by the attention factor.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;           // the two bounds are rounded outwards to whole dims
  double attention_factor = 0.0;  // 0: from the factor and the two below
  double mscale = 0.0;
  double mscale_all_dim = 0.0;
};

/// Gated delta net layers.
struct LinearAttentionConfig {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t conv_kernel = 0;
  bool fused = false;         // in_proj_qkvz and in_proj_ba, interleaved by key head (qwen3_next)
  bool sigmoid_gate = false;  // the output's gate is a sigmoid, not silu
  double decay_floor = 0.0;   // below 0: a decay for each key channel, its logarithm at least this (glm5_next)
};

/// Attention over chosen keys: windows of `tokens` tokens, whose mean index keys are scored; all 0 where every key is
/// attended to.
struct IndexerConfig {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t tokens = 0;  // of a window; divides a page
  int64_t budget = 0;  // most tokens of whole windows, a multiple of `tokens`
};

/// A residual of several streams, mixed into each block's input by gates of low rank; all 0 with a plain residual.
struct GatedStreamsConfig {
  int64_t count = 0;
  int64_t rank = 0;
};

/// Hashed n-grams: tables of embeddings that some layers add to the residual.
struct NgramConfig {
  std::vector<int64_t> layers;  // indices, ascending; empty: none
  int64_t embed_dim = 0;        // of all heads together
  int64_t size = 0;             // longest n-gram, from 2
  int64_t heads_per_size = 0;
  int64_t table_base = 0;     // table sizes are the primes from here on
  int64_t table_divisor = 1;  // all tables together are padded to a multiple
  int64_t shards = 0;         // tensors that the tables are stored in
  int64_t seed = 0;
  int64_t conv_kernel = 0;
  int64_t end_token = 0;  // stands for what was before the start of a text
  int64_t heads() const { return (size - 1) * heads_per_size; }
};

/// Mamba2 layers.
struct Mamba2Config {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t groups = 0;  // divides heads
  int64_t state = 0;
  int64_t conv_kernel = 0;
  bool conv_bias = false;
  double least_step = 0.0;  // bounds of the time step
  double most_step = 0.0;   // may be infinity
};

/// Mixture-of-experts layers; all 0 in a dense family.
struct ExpertsConfig {
  int64_t count = 0;
  int64_t per_token = 0;                 // at most count
  int64_t intermediate_size = 0;         // columns of one expert
  int64_t shared_intermediate_size = 0;  // of the shared expert; 0: there is none
  bool shared_gate = true;               // the shared expert has a sigmoid gate
  bool renormalise = false;              // the chosen experts' weights are divided by their sum
  bool sigmoid = false;                  // scores are sigmoids of the router's logits, not a softmax
  bool sqrt_softplus = false;            // or square roots of their softplus
  bool choice_bias = false;              // a bias is added to the scores for the choice alone
  double scale = 1.0;                    // of the routed experts' weights
  bool gated = true;                     // silu(gate x) * (up x); else relu(up x)^2
};

/// Attention whose keys and values are one latent row a token, chosen by an indexer.
struct LatentConfig {
  int64_t q_rank = 0;   // of the queries' latent
  int64_t kv_rank = 0;  // of the cached latent
  int64_t key_dim = 0;  // of a query head before it is taken to the latent's space
  // Indexer, whose keys are pooled over `index_tokens` tokens: the `index_windows` best of those are attended to.
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t index_tokens = 0;
  int64_t index_windows = 0;
  std::vector<bool> shared_choice;  // by layer: takes the choice of the attention layer before it
  // deepseek_v4. A layer attends to the last `window` tokens and to pooled rows of index_tokens (kWindowAndChosen) or
  // pooled_tokens (kWindowAndPooled) tokens each.
  int64_t window = 0;
  int64_t pooled_tokens = 0;
  int64_t out_groups = 0;  // of heads, each with a projection of its own to out_rank values
  int64_t out_rank = 0;
  RopeConfig pooled_rope;              // in layers that have pooled rows; else ModelConfig::rope
  std::vector<bool> experts_by_token;  // by layer: a table gives each token's experts
};

/// Pooled rows, and the choice of them, that layers share with later ones (deepseek_v41). By layer; empty elsewhere.
struct SharedLatentsConfig {
  std::vector<int64_t> tokens;        // of a pooled row; 0: the layer attends to its window alone
  std::vector<int64_t> kv_source;     // the layer that makes the pooled rows; -1: none
  std::vector<int64_t> index_source;  // the layer that chooses among them; -1: none
  // This layer also chooses blocks of pooled rows, inside which later layers choose; -1: none does.
  int64_t candidate_layer = -1;
  int64_t candidate_blocks = 0;
  int64_t candidate_block = 0;  // pooled rows of one

  bool makes_rows(int64_t layer) const { return kv_source[static_cast<size_t>(layer)] == layer; }
  bool chooses(int64_t layer) const { return index_source[static_cast<size_t>(layer)] == layer; }
};

/// Hashed n-grams of token classes: tables that some layers add to their streams (deepseek_v41).
struct EngramConfig {
  std::vector<int64_t> layers;      // ascending; empty: none
  std::vector<int64_t> table_rows;  // of each of them, all heads together
  int64_t size = 0;                 // longest n-gram, from 2
  int64_t heads_per_size = 0;
  int64_t head_dim = 0;
  int64_t table_base = 0;  // tables have distinct primes of rows, from here on
  int64_t pad_token = 0;   // stands for what was before the start of a text
  int64_t classes = 0;     // of tokens
  /// A token's class, from tokenizer.json; null until a loader has read it.
  std::shared_ptr<const std::vector<int32_t>> class_of;
  int64_t heads() const { return (size - 1) * heads_per_size; }
};

/// The block drafter that a DeepSeek checkpoint brings along under `mtp.*` (DSpark): layers of the family that see a
/// window of rows made of the model's own, and a whole block of drafted rows.
struct DsparkConfig {
  int64_t stages = 0;                  // layers of it; 0: none
  int64_t block_size = 0;              // rows of a block, each of which guesses the token behind it
  int32_t noise_token_id = 0;          // stands behind the anchor
  std::vector<int64_t> target_layers;  // whose outputs are read, in this order
  int64_t markov_rank = 0;
  int64_t experts = 0;  // routed, of a stage
  int64_t experts_per_token = 0;
};

/// A residual of several streams that hyper-connections mix.
struct StreamsConfig {
  int64_t count = 0;  // 0: a plain residual
  double eps = 0.0;
  int64_t iterations = 0;  // of the balancing of the mixing matrix
};

struct ModelConfig {
  Family family = Family::kLlama;
  std::string model_type;  // as in the file: "qwen3_5_text"
  std::string dtype;       // as in the file; the tensors say what they are themselves
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;  // of dense layers; may be 0 where every layer has experts
  int64_t vocab_size = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;
  double rms_norm_eps = 0.0;
  int64_t max_positions = 0;
  RopeConfig rope;
  std::vector<LayerKind> layers;
  std::vector<MlpKind> mlps;  // one a layer; an MTP layer has experts where the family has them
  ExpertsConfig experts;
  LinearAttentionConfig linear;  // all 0 without linear layers
  Mamba2Config mamba2;           // all 0 without Mamba2 layers
  IndexerConfig indexer;
  GatedStreamsConfig gated_streams;
  NgramConfig ngrams;
  LatentConfig latent;  // all 0 in families of plain attention; head_dim is then that of the values
  StreamsConfig streams;
  SharedLatentsConfig shared_latents;
  EngramConfig engram;
  DsparkConfig dspark;                           // drafts alone: no part of canonical_text
  Precision precision = Precision::kCheckpoint;  // the loader's choice, not the file's: no part of canonical_text
  double swiglu_limit = 0.0;                     // over 0: gates and ups of MLPs and experts are clamped
  bool attn_output_gate = false;                 // q_proj holds a gate beside each head's query
  bool qk_norm = false;                          // q_norm and k_norm before the rotation
  bool zero_centred_norms = false;  // the family stores gamma - 1, unless a converter added the 1 (names.h)
  int64_t mtp_layers = 0;           // 0 or 1; the weights may still lack it (names.h)
  bool tie_word_embeddings = false;
  bool tie_levels_disagree = false;    // top level and text_config say different things: the weights decide
  std::vector<int32_t> eos_token_ids;  // of config.json and generation_config.json, each once, sorted
  std::optional<int32_t> bos_token_id;
  std::optional<int32_t> pad_token_id;
  QuantizationConfig quantization;

  int64_t layer_count() const { return static_cast<int64_t>(layers.size()); }
  int64_t count(LayerKind kind) const;
  int64_t count(MlpKind kind) const;
};

/// Every field above as text, one form for one meaning: it enters checkpoint hashes.
std::string canonical_text(const ModelConfig& config);

/// The folder's configuration, from config.json and, if present, generation_config.json. Never opens a weight file;
/// looks only whether there are some. Refuses by name: an unknown model_type or architecture, quantisation that is not
/// read, features that would change the numbers (NotFound, InvalidArgument, or Unimplemented for what is known and not
/// read).
absl::StatusOr<ModelConfig> read_config(const std::string& dir);

/// The same from texts; `generation_json` may be empty.
absl::StatusOr<ModelConfig> parse_config(std::string_view config_json, std::string_view generation_json,
                                         const std::string& label = "config.json");

}  // namespace tensorfold
