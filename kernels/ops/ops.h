// The Ops seam: what model families call and backends implement.
//
// A family is written once against this interface; a backend (kernels/cpu, kernels/cuda) implements it. All activations
// are fp32 tensors in backend memory. Every operation keeps the exactness contract: the bits of a result row depend on
// that row's inputs and on weights, never on the number of rows, the row's place in the pass, threads or rank.
//
// Thread-safety: an Ops object and the tensors it hands out are used by one thread (the pass runner's). Backends may
// use threads inside an operation. Weights, once packed, are immutable and may be shared between Ops objects of one
// backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/numerics/tree.h"
#include "kernels/ops/matrix_source.h"
#include "kernels/ops/states.h"

namespace tensorfold {

/// A [rows, cols] view in backend memory; rows are `stride` values apart. Not owning. Values are fp32, or, where
/// `rounded` is set, what the backend's products take (bf16 on CUDA; a CPU has no such tensors).
struct Tensor {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  bool rounded = false;

  Tensor columns(int64_t first, int64_t count) const { return {at(first), rows, count, stride, rounded}; }
  Tensor row_range(int64_t first, int64_t count) const { return {at(first * stride), count, cols, stride, rounded}; }
  float* at(int64_t values) const {
    return rounded ? reinterpret_cast<float*>(reinterpret_cast<uint16_t*>(data) + values) : data + values;
  }
};

/// A packed weight matrix [out_features, in_features]; belongs to the backend that packed it.
class Weight {
 public:
  virtual ~Weight() = default;
  virtual int64_t out_features() const = 0;
  virtual int64_t in_features() const = 0;
  /// Bytes that one pass reads.
  virtual int64_t bytes() const = 0;
};

/// One expert's part on a rank: gate and up [columns, hidden], and down [hidden, columns of a slice] for each slice
/// that the rank owns, ascending; the slices' columns together are `columns`. Without a gate (gate.rows 0, for all
/// experts of a layer) the inner values are relu(up x)^2.
struct ExpertSource {
  MatrixSource gate;
  MatrixSource up;
  std::vector<MatrixSource> down;
};

/// The packed experts of one layer; belong to the backend that packed them. Experts may differ in their columns (a
/// shared expert beside routed ones), never in the number of slices.
class ExpertWeights {
 public:
  virtual ~ExpertWeights() = default;
  virtual int64_t count() const = 0;
  virtual int64_t slices() const = 0;
  virtual int64_t hidden() const = 0;
  /// Bytes and values of one expert's matrices.
  virtual int64_t bytes(int64_t expert) const = 0;
  virtual int64_t values(int64_t expert) const = 0;
};

/// A packed fp32 vector (norm weights, biases, decay parameters).
class Vector {
 public:
  virtual ~Vector() = default;
  virtual int64_t size() const = 0;
};

/// Consecutive rows of one sequence in a pass.
struct RowGroup {
  int64_t first_row = 0;  // index of its first row in the pass
  int64_t rows = 0;
  int64_t first_position = 0;      // absolute position of its first row
  int64_t accepted = 0;            // tentative rows of this sequence's previous window that are now committed
  int64_t certain = 0;             // leading rows that cannot be rejected (all of a prompt, 1 of a verify window)
  std::span<const int32_t> pages;  // page table: pages[p / kPageTokens] holds position p
};

/// The rows of one forward pass, and what lasts of their sequences. Host data of the caller, valid during the call;
/// an op takes the batch that Ops::run handed to its body.
struct RowBatch {
  std::span<const int32_t> tokens;     // [rows]
  std::span<const int64_t> positions;  // [rows]
  std::span<const RowGroup> groups;
  std::span<const std::vector<RecurrentState*>> recurrent;  // [recurrent layer][group]
  int64_t least_keys = 0;                                   // launches are made for contexts of at least so many tokens
  bool of_one = false;           // without groups: launches are made for rows of one sequence, where a backend has such
  const void* device = nullptr;  // the backend's own copy

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
};

/// What a body given to Ops::run computes: bodies of one kind launch the same operations for equally many rows. Rows of
/// kBlock are blocks of drafts (block_ops.h), whose page tables need not reach behind what comes before a block.
enum class RunKind : uint8_t { kForward, kMtp, kMtpKeys, kBlock, kBlockContext };
inline constexpr int kRunKinds = 5;

/// cos and sin of each row's angles, fp32 [rows, pairs]; made once a pass.
struct RopeTable {
  Tensor cos;
  Tensor sin;
};

struct DeltaNetArgs {
  const DeltaNetShape* shape = nullptr;
  Tensor qkv;                       // [rows, channels] before the convolution: q heads | k heads | v heads
  Tensor z;                         // [rows, v_heads * dv]
  Tensor b;                         // [rows, v_heads]
  Tensor a;                         // [rows, v_heads], or [rows, v_heads * dk] with channel_decay
  const Vector* conv = nullptr;     // [channels * conv_kernel], kernel taps of one channel together, oldest first
  const Vector* a_log = nullptr;    // [v_heads]
  const Vector* dt_bias = nullptr;  // as wide as a row of `a`
  float decay_floor = 0.0f;         // channel_decay: decay = exp(floor * sigmoid(exp(a_log) * (a + dt_bias)))
  const Vector* norm = nullptr;     // [dv]
  float eps = 1e-6f;
  bool sigmoid_gate = false;  // there where supports_gated_streams() is
  /// [rows, v_heads * dv]: rms(y, norm) * silu(z), or * sigmoid(z) with sigmoid_gate or channel_decay.
  Tensor out;
  RowBatch rows;
  int64_t layer = 0;  // of rows.recurrent
};

struct Mamba2Args {
  const Mamba2Shape* shape = nullptr;
  Tensor z;                           // [rows, width]
  Tensor xbc;                         // [rows, channels] before the convolution: x heads | B groups | C groups
  Tensor dt;                          // [rows, heads]
  const Vector* conv = nullptr;       // [channels * conv_kernel], kernel taps of one channel together, oldest first
  const Vector* conv_bias = nullptr;  // [channels], or null
  const Vector* a_log = nullptr;      // [heads]
  const Vector* dt_bias = nullptr;    // [heads]
  const Vector* d = nullptr;          // [heads]
  const Vector* norm = nullptr;       // [width]
  float eps = 1e-5f;
  float least_step = 0.0f;  // bounds of the time step; infinity: none
  float most_step = 0.0f;
  Tensor out;  // [rows, width]: rms(y * silu(z)) of each group, times norm
  RowBatch rows;
  int64_t layer = 0;  // of rows.recurrent
};

/// One attention layer's step before attention: optional norms and rotation of each query and key head in place (none
/// where the table has no data), then keys and values into the cache.
struct QkvArgs {
  Tensor q;  // [rows, heads * head_dim]
  Tensor k;  // [rows, kv_heads * head_dim]
  Tensor v;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  const Vector* q_norm = nullptr;  // [head_dim] or null
  const Vector* k_norm = nullptr;
  float eps = 1e-6f;
  RopeTable rope;
  RowBatch rows;
};

struct AttentionArgs {
  Tensor q;     // [rows, heads * head_dim], normed and roped
  Tensor gate;  // the same shape, or no data: out *= sigmoid(gate)
  Tensor out;   // [rows, heads * head_dim]
  int64_t heads = 0;
  int64_t head_dim = 0;
  std::span<const int32_t> kv_head_of;  // [heads]: local key/value head of each local query head, ascending
  float scale = 1.0f;
  RowBatch rows;
};

/// How a router's logits become scores.
enum class RouterScore : uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

/// Most slots (chosen experts of a row, a shared one included) that a row may have.
inline constexpr int64_t kMostExpertSlots = 64;

/// Choosing experts. A row has `slots` = ids.cols slots, the last of them for the shared expert if there is one.
struct RouteArgs {
  Tensor logits;               // [rows, experts]
  Tensor shared_gate;          // [rows, 1], or no data: no shared expert, unless
  bool shared_always = false;  // there is one without a gate: weight 1
  bool given = false;          // ids holds the choice of the routed ones already; only weights are computed
  RouterScore score = RouterScore::kSoftmax;
  const Vector* bias = nullptr;  // [experts], added to the scores for the choice alone; null: none
  bool renormalise = false;      // divide a row's weights by their sum
  float scale = 1.0f;            // then multiply by this
  Tensor ids;                    // out [rows, slots]: expert numbers, as whole fp32 numbers
  Tensor weights;                // out [rows, slots]
  RowBatch rows;                 // where a backend pads a pass: rows of no sequence get no experts
};

/// A mixture of experts over rows whose experts are chosen.
struct ExpertsArgs {
  const ExpertWeights* experts = nullptr;
  Tensor x;                         // [rows, hidden]
  Tensor ids;                       // [rows, slots] of route()
  Tensor weights;                   // [rows, slots]
  std::span<const Tensor> partial;  // out, one [rows, hidden] for each slice that the rank owns
  float limit = 0.0f;               // over 0: gates are at most this, ups within +-this, before silu and product
};

// Arguments of operations on latents (latent_ops.h).
struct HyperArgs;
struct PoolArgs;
struct SelectArgs;
struct LatentAttentionArgs;
struct PoolLatentsArgs;
enum class FakeFormat : uint8_t;  // fake_quantise.h
// Arguments of operations on gated streams and of attention over chosen keys (stream_ops.h).
struct MixStreamsArgs;
struct InjectStreamsArgs;
struct GateStreamsArgs;
struct ShortConvArgs;
struct EmbedNgramsArgs;
struct PoolMeansArgs;
struct SelectWindowsArgs;
// Arguments of operations on blocks of drafted rows (block_ops.h).
struct BlockConvArgs;
struct BlockAttentionArgs;

/// One candidate of a vocabulary row.
struct Candidate {
  float logit = 0.0f;
  int32_t id = 0;
  bool operator==(const Candidate&) const = default;
};
/// The order of every choice by score, of tokens, experts and keys: larger first, NaN last, ties to the lower number
/// (contract, sections 4 and 5).
inline bool candidate_before(const Candidate& a, const Candidate& b) {
  const bool a_nan = a.logit != a.logit, b_nan = b.logit != b.logit;
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a.logit != b.logit) return a.logit > b.logit;
  return a.id < b.id;
}

/// What draws a row's token: the row's part of the noise (row_key of kernels/numerics/gumbel.h) and the temperature.
struct DrawKey {
  uint64_t key = 0;
  double temperature = 0.0;  // 0: nothing is drawn from this row
};

struct MatmulJob {
  const Weight* weight = nullptr;
  Tensor x;
  Tensor out;
};

struct AddJob {
  Tensor a;
  Tensor b;
  Tensor out;
};

/// A place in the pass arena.
struct ScratchMark {
  size_t block = 0;
  int64_t used = 0;
};

class Ops {
 public:
  virtual ~Ops() = default;

  /// Backend and instruction set, e.g. "cpu/avx512"; the part that enters the numeric fingerprint is
  /// fingerprint_name().
  virtual std::string describe() const = 0;
  /// The backend behind a test's decoration.
  virtual Ops& undecorated() { return *this; }
  /// "cpu" for every CPU instruction set (they are bit-equal); "cuda/sm_121" and so on elsewhere.
  virtual std::string fingerprint_name() const = 0;

  /// A product's inputs begin at columns that are multiples of this, and are as wide as one. Slices of a contraction
  /// that are not are refused at load.
  virtual int64_t input_unit() const { return 1; }
  /// What the kernels take at most, and in multiples of what. Models beyond are refused when they are loaded
  /// (worker/model/backend_limits.h): a kernel that meets such a size stops the program.
  struct Limits {
    int64_t norm_columns = INT64_MAX, norm_unit = 1;                             // rms_norm
    int64_t latent_columns = INT64_MAX, latent_unit = 1;                         // latent_attention
    int64_t index_columns = INT64_MAX, index_unit = 1, index_heads = INT64_MAX;  // select_rows
    int64_t chosen_windows = INT64_MAX;                                          // select_rows, select_windows
  };
  virtual Limits limits() const { return {}; }

  /// Bytes that the device has left; -1 where tensors are in host memory.
  virtual int64_t free_memory() { return -1; }

  // Weights. ------------------------------------------------------------------------------------------------------
  /// Stacks row blocks (all with equal cols, formats may differ) into one matrix [sum rows, cols]. Copies: the sources
  /// may go away afterwards.
  virtual std::unique_ptr<Weight> pack(std::span<const MatrixSource> blocks) = 0;
  /// gate over up [rows, cols] each, for matmul_silu_mul.
  virtual std::unique_ptr<Weight> pack_gate_up(const MatrixSource& gate, const MatrixSource& up);
  virtual std::unique_ptr<Vector> pack_vector(std::span<const float> values) = 0;
  /// Rows [first, first + count) of a packed matrix, sharing its memory, which then lives as long as either. Null when
  /// the backend cannot begin a view at that row: pack the rows instead, the bits are the same.
  virtual std::unique_ptr<Weight> view_rows(const Weight& /*w*/, int64_t /*first*/, int64_t /*count*/) {
    return nullptr;
  }

  // Scratch. ------------------------------------------------------------------------------------------------------
  /// A tensor from the pass arena; valid until the next begin_pass(). Contents undefined.
  virtual Tensor scratch(int64_t rows, int64_t cols) = 0;
  /// The same for what only products read: `rounded` where the backend rounds their inputs.
  virtual Tensor scratch_input(int64_t rows, int64_t cols) { return scratch(rows, cols); }
  /// What was taken from the arena since `mark` may be given out again (ScratchScope).
  virtual ScratchMark scratch_mark() = 0;
  virtual void scratch_release(ScratchMark mark) = 0;
  virtual void begin_pass() = 0;
  /// Waits for everything that was asked for. Empty, or what went wrong on the device since the last call.
  virtual std::string finish_pass() { return {}; }
  /// A tensor that lives until the Ops object dies (rows kept between passes).
  virtual Tensor persistent(int64_t rows, int64_t cols) = 0;
  virtual void upload(std::span<const float> host, Tensor dst) = 0;
  /// Copies rows to host memory, rows * cols floats; waits for the device.
  virtual void download(Tensor src, std::span<float> host) = 0;
  /// Where the host may read and write a tensor in place, or null if it lives in device memory.
  virtual float* host_data(Tensor t) { return t.data; }

  // Runs. ---------------------------------------------------------------------------------------------------------
  /// Runs `body` on the rows: body(batch to give to ops, input) -> a tensor of as many rows, valid until the next run
  /// of this kind. A backend may pad the rows, keep the launches and repeat them for another batch of about that size
  /// instead of calling the body again; `keep` false forbids it. The bits are the same. `input` has as many rows, or no
  /// data.
  using RunBody = std::function<Tensor(const RowBatch& rows, Tensor input)>;
  virtual Tensor run(RunKind /*kind*/, const RowBatch& rows, Tensor input, bool /*keep*/, const RunBody& body) {
    return body(rows, input);
  }
  /// Rows up to which a backend keeps launches; 0: it keeps none. They are kept for powers of two of rows, and for
  /// contexts of kKeptContext tokens times powers of four. Forward passes of 2 to kMostRowsOfOne rows are kept twice:
  /// for rows of one sequence, which can be cut better, and for rows of any.
  virtual int64_t most_kept_rows() const { return 0; }
  static constexpr int64_t kKeptContext = 1024;
  static constexpr int64_t kMostRowsOfOne = 16;
  /// Forgets kept launches: addresses that they use are no longer valid.
  virtual void forget_runs() {}

  // Arithmetic. ---------------------------------------------------------------------------------------------------
  /// out[r, :] = table[tokens[r], :], dequantised.
  virtual void embed(const Weight& table, const RowBatch& rows, Tensor out) = 0;
  /// Whole numbers up to here are exact as weights: what a table of numbers that embed() reads may hold.
  virtual int64_t largest_exact_number() const { return int64_t{1} << 24; }
  /// out[r, n] = sum_k w[n, k] x[r, k]; 16 lanes over k, folded by the fixed tree.
  virtual void matmul(const Weight& w, Tensor x, Tensor out) = 0;
  /// Independent matmuls, the same bits as one after another; a backend may run them as one launch.
  virtual void matmul_many(std::span<const MatmulJob> jobs) {
    for (const MatmulJob& job : jobs) matmul(*job.weight, job.x, job.out);
  }
  /// out [rows, n] = silu(gate x) * (up x) of a pack_gate_up weight [2n, k].
  virtual void matmul_silu_mul(const Weight& w, Tensor x, Tensor out);
  /// x [rows, heads * dim] seen as heads vectors of `dim`: out = x * rsqrt(mean(x^2) + eps) * weight[dim]. May alias.
  virtual void rms_norm(Tensor x, int64_t heads, const Vector& weight, float eps, Tensor out) = 0;
  /// out = a + b elementwise; may alias either.
  virtual void add(Tensor a, Tensor b, Tensor out) = 0;
  /// Additions of tensors of one shape, each element one job after another: a sum over slices as one launch.
  virtual void add_many(std::span<const AddJob> jobs) {
    for (const AddJob& job : jobs) add(job.a, job.b, job.out);
  }
  /// into += tree: `steps` in order, parts[dst] += parts[src], then into += parts[0]. The parts are used as scratch.
  /// All [rows, cols].
  virtual void sum_tree(std::span<const Tensor> parts, std::span<const AddStep> steps, Tensor into);
  /// gate_up [rows, 2 * n]: out[r, i] = silu(gate_up[r, i]) * gate_up[r, n + i].
  virtual void silu_mul(Tensor gate_up, Tensor out) = 0;
  /// x[r, i] *= sigmoid(gate[r, i]).
  virtual void sigmoid_mul(Tensor x, Tensor gate) = 0;
  /// x[r, i] = max(x[r, i], 0)^2, NaN kept. There where state_error(Mamba2Shape) is empty.
  virtual void relu_squared(Tensor x);
  /// dst[i, :] = src[rows[i], :].
  virtual void gather_rows(Tensor src, std::span<const int32_t> rows, Tensor dst) = 0;

  // Experts. ------------------------------------------------------------------------------------------------------
  /// Whether the three operations below are there; a model with experts is refused at load where they are not.
  virtual bool supports_experts() const { return false; }
  /// Packs the experts of one layer (at least one), number i from experts[i].
  virtual std::unique_ptr<ExpertWeights> pack_experts(std::span<const ExpertSource> experts);
  /// Scores: softmax over the row, exp(x - max) with 16 lanes folded by the fixed tree and one division; or the
  /// sigmoid, or sqrt(softplus). The choice goes by logit, or by score + bias where there is a bias: larger first, NaN
  /// last, ties to the lower number; slot order is that order. Weights are the chosen scores without the bias;
  /// renormalised: each divided by (their sum in ascending slot order + 1e-20); then each times `scale`. With a shared
  /// expert the last slot is expert number `experts` (logits.cols) with weight sigmoid(shared_gate), or 1 if it has no
  /// gate.
  virtual void route(const RouteArgs& args);
  /// partial[s][r] = sum over slots j, ascending, of weights[r, j] * y(j), the first product rounded, the others added
  /// by fma; y(j) = down_s(silu(gate x) * (up x)), or down_s(relu(up x)^2) where experts have no gate, of expert ids[r,
  /// j], each product in the order of matmul. Rows are
  /// grouped by expert as the backend likes: the bits do not tell.
  virtual void experts(const ExpertsArgs& args);

  // Latents: what attention over compressed rows, and residuals of several streams, are made of. ----------------------
  /// Whether the operations below, delta nets with channel_decay, limited silu and sqrt(softplus) are there; a model
  /// that wants them is refused at load where they are not. Arguments and arithmetic: latent_ops.h.
  virtual bool supports_latents() const { return false; }
  /// (x - mean) / sqrt(variance + eps) * weight + bias over each row.
  virtual void layer_norm(Tensor x, const Vector& weight, const Vector& bias, float eps, Tensor out);
  /// gate_up [rows, 2 * n]: silu(min(gate, limit)) * clamp(up, -limit, limit).
  virtual void silu_mul_limited(Tensor gate_up, float limit, Tensor out);
  /// Rotates the last 2 * pairs dims of each head in place, pairs (2 i, 2 i + 1); `back` by the negative angle.
  virtual void rope_pairs(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table, bool back);
  virtual void hyper_collapse(const HyperArgs& args);
  virtual void hyper_expand(const HyperArgs& args);
  virtual void pool_rows(RowCache& cache, const PoolArgs& args);
  virtual void select_rows(const RowCache& cache, const SelectArgs& args);
  virtual void latent_attention(const RowCache& cache, const LatentAttentionArgs& args);

  // Latents that layers share: pooled rows made in the pass and read by later layers (latent_ops.h).
  // --------------------
  /// Whether the operations below are there, and what HyperArgs and SelectArgs say of carried weights and candidates; a
  /// model that needs them is refused at load where they are not. Wants supports_latents().
  virtual bool supports_shared_latents() const { return false; }
  /// Rounds x in place, each fake_group(format) neighbouring columns by a scale of their own; cols a multiple of it.
  virtual void fake_quantise(Tensor x, FakeFormat format);
  virtual void pool_latents(const RowCache& cache, const PoolLatentsArgs& args);
  /// rope_table() at the first position of the window of `tokens` tokens that holds the row's.
  virtual RopeTable window_rope_table(const RowBatch& rows, const Vector& inv_freq, int64_t tokens);
  /// Writes the `values` [rows, width] of rows that end a window of `tokens` tokens into a layer with a row for as
  /// many.
  virtual void write_windows(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows);
  /// For each row the whole numbers of the `count` positions before its own in a layer of width 1, newest first, -1
  /// before the sequence's start; rows of this pass must have been written. Host work.
  virtual std::vector<int32_t> numbers_before(const RowCache& cache, int64_t layer, const RowBatch& rows,
                                              int64_t count);

  // Positions. ----------------------------------------------------------------------------------------------------
  /// angle = position * inv_freq[i] in float64, cos and sin correctly computed there, times attention_factor, rounded
  /// once.
  virtual RopeTable rope_table(const RowBatch& rows, const Vector& inv_freq, double attention_factor) = 0;
  /// Rotates the first 2 * pairs dims of each head in place, pairs (i, i + pairs) ("rotate half").
  virtual void rope(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table) = 0;

  // State. --------------------------------------------------------------------------------------------------------
  // Null where there is no memory left, or no such heads: finish_pass() says which.
  virtual std::unique_ptr<KvCache> make_kv_cache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim) = 0;
  virtual std::unique_ptr<RecurrentState> make_recurrent_state(const StateShape& shape) = 0;
  /// Empty where recurrent layers of this shape are there; else why not, as a sentence's end. A model that has one is
  /// refused at load.
  virtual std::string state_error(const StateShape& shape) const;
  /// Whether row caches are there; a model that wants one is refused at load where they are not.
  virtual bool supports_row_caches() const { return false; }
  virtual std::unique_ptr<RowCache> make_row_cache(std::span<const RowCacheLayer> layers, int64_t pages);
  /// Writes `values` [rows, width] at their rows' positions; for layers with a row a token.
  virtual void row_write(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows);
  /// Writes k and v [rows, kv_heads * head_dim] at their rows' positions.
  virtual void kv_write(KvCache& cache, int64_t layer, Tensor k, Tensor v, const RowBatch& rows) = 0;
  /// Norms, rope and kv_write of an attention layer.
  virtual void qkv(KvCache& cache, int64_t layer, const QkvArgs& args);
  /// Causal attention of each row over positions 0..its own.
  virtual void attention(const KvCache& cache, int64_t layer, const AttentionArgs& args) = 0;
  /// One step a token in position order: first the group's `accepted` kept inputs of the last window, then its certain
  /// rows (both advance the committed state), then its tentative rows, whose inputs are kept and whose state is not.
  virtual void delta_net(const DeltaNetArgs& args) = 0;
  /// The same steps of a Mamba2 layer. u = silu(conv(xbc) + bias), taps oldest first by fma, the bias added last;
  /// step = softplus(dt + dt_bias) within its bounds; S[n][c] = fma(step * x[c], B[n], exp(-exp(a_log) * step) *
  /// S[n][c]); y[c] = fma over n ascending of C[n] S[n][c], then + D x[c] by fma; then the gate, then the norm of each
  /// group.
  virtual void mamba2(const Mamba2Args& args);

  // Gated streams, and attention over chosen keys (stream_ops.h says what each computes). ---------------------------
  /// Whether the operations below are there; a model that needs them is refused at load where they are not.
  virtual bool supports_gated_streams() const { return false; }
  /// x[r, i] = silu(x[r, i] * scale).
  virtual void scaled_silu(Tensor x, float scale);
  /// x[r, i] = 0. There where supports_block_drafts() is, too.
  virtual void clear(Tensor x);
  virtual void mix_streams(const MixStreamsArgs& args);
  virtual void inject_streams(const InjectStreamsArgs& args);
  virtual void gate_streams(const GateStreamsArgs& args);
  virtual void short_conv(const ShortConvArgs& args);
  virtual void embed_ngrams(const EmbedNgramsArgs& args);
  virtual void pool_means(RowCache& cache, const PoolMeansArgs& args);
  virtual void select_windows(const RowCache& cache, const SelectWindowsArgs& args);
  /// attention() of each row over chosen positions: those of its windows in `selected` [rows, most] (select_windows),
  /// of `tokens` each, and those after its last whole window. The list is visited as attention visits positions 0, 1, 2
  /// …: a row that chose everything has attention's bits.
  virtual void sparse_attention(const KvCache& cache, int64_t layer, const AttentionArgs& args, Tensor selected,
                                int64_t tokens);

  // Blocks of drafted rows (block_ops.h says what each computes). ---------------------------------------------------
  /// Whether the operations below are there; a drafter that needs them is refused at load where they are not.
  virtual bool supports_block_drafts() const { return false; }
  /// x [rows, streams * width]: out [rows, width] = (sum over streams, ascending) * (1 / streams); of one stream a
  /// copy.
  virtual void mean_streams(Tensor x, int64_t streams, Tensor out);
  virtual void block_conv(const BlockConvArgs& args);
  virtual void block_attention(const KvCache& cache, int64_t layer, const BlockAttentionArgs& args);

  // Vocabulary. ---------------------------------------------------------------------------------------------------
  /// The n best of each row by (logit descending, id ascending); ids count from first_id. Rows may hold fewer than n.
  /// NaN logits sort last.
  virtual std::vector<std::vector<Candidate>> top_candidates(Tensor logits, int32_t first_id, int64_t n) = 0;
  /// The token of each row whose logit / temperature + noise is largest, in float64, ties to the lower id (contract,
  /// section 5); keys has a key a row. The first logit that is not finite, if a row has one. Id -1 where nothing is
  /// drawn. Every backend gives the same bits for the same logits.
  virtual std::vector<Candidate> best_draws(Tensor logits, int32_t first_id, std::span<const DrawKey> keys) = 0;
};

/// Gives back what was taken from the pass arena during its life.
class ScratchScope {
 public:
  explicit ScratchScope(Ops& ops) : ops_(ops), mark_(ops.scratch_mark()) {}
  ~ScratchScope() { ops_.scratch_release(mark_); }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

 private:
  Ops& ops_;
  const ScratchMark mark_;
};

}  // namespace tensorfold
