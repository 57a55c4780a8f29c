#include "kernels/ops/ops.h"

#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

int64_t scalar_bytes(WeightFormat format) {
  kernel_check(is_plain(format), "a quantised value has no byte size of its own");
  return format == WeightFormat::kF32 ? 4 : 2;
}

void no_latents(const char* op) { kernel_check(false, (std::string(op) + ": this backend has no latents").c_str()); }

}  // namespace

MatrixSource MatrixSource::slice_rows(int64_t first, int64_t count) const {
  kernel_check(first >= 0 && count >= 0 && first <= rows - count, "slice_rows: outside the matrix");
  MatrixSource part = *this;
  part.rows = count;
  if (!is_plain(format) && format != WeightFormat::kMlxAffine) {
    part.first_row += first;
    return part;
  }
  part.data += first * row_bytes;
  if (format == WeightFormat::kMlxAffine) {
    part.scales += first * scale_row_bytes;
    part.biases += first * scale_row_bytes;
  }
  return part;
}

MatrixSource MatrixSource::slice_cols(int64_t first, int64_t count) const {
  kernel_check(first >= 0 && count >= 0 && first <= cols - count, "slice_cols: outside the matrix");
  MatrixSource part = *this;
  part.cols = count;
  if (!is_plain(format) && format != WeightFormat::kMlxAffine) {
    part.first_col += first;
    return part;
  }
  if (format != WeightFormat::kMlxAffine) {
    part.data += first * scalar_bytes(format);
    return part;
  }
  kernel_check(first % group == 0 && count % group == 0, "slice_cols: not at a quantisation group");
  part.data += first * bits / 8;  // a group of 32 or more values is a whole number of 32-bit words
  part.scales += first / group * scalar_bytes(scale_format);
  part.biases += first / group * scalar_bytes(scale_format);
  return part;
}

std::unique_ptr<Weight> Ops::pack_gate_up(const MatrixSource& gate, const MatrixSource& up) {
  const MatrixSource blocks[] = {gate, up};
  return pack(blocks);
}

void Ops::matmul_silu_mul(const Weight& w, Tensor x, Tensor out) {
  const Tensor gate_up = scratch(x.rows, w.out_features());
  matmul(w, x, gate_up);
  silu_mul(gate_up, out);
}

void Ops::sum_tree(std::span<const Tensor> parts, std::span<const AddStep> steps, Tensor into) {
  std::vector<AddJob> jobs;
  for (const AddStep& step : steps) {
    const Tensor& sum = parts[static_cast<size_t>(step.dst)];
    jobs.push_back({sum, parts[static_cast<size_t>(step.src)], sum});
  }
  jobs.push_back({into, parts[0], into});
  add_many(jobs);
}

// Reached only by a caller that did not ask supports_experts(): load_model does.
std::unique_ptr<ExpertWeights> Ops::pack_experts(std::span<const ExpertSource>) {
  kernel_check(false, "pack_experts: this backend has no experts");
  return nullptr;
}

void Ops::route(const RouteArgs&) { kernel_check(false, "route: this backend has no experts"); }

void Ops::experts(const ExpertsArgs&) { kernel_check(false, "experts: this backend has no experts"); }

// Reached only by a caller that did not ask supports_latents().
void Ops::layer_norm(Tensor, const Vector&, const Vector&, float, Tensor) { no_latents("layer_norm"); }
void Ops::silu_mul_limited(Tensor, float, Tensor) { no_latents("silu_mul_limited"); }
void Ops::rope_pairs(Tensor, int64_t, int64_t, const RopeTable&, bool) { no_latents("rope_pairs"); }
void Ops::hyper_collapse(const HyperArgs&) { no_latents("hyper_collapse"); }
void Ops::hyper_expand(const HyperArgs&) { no_latents("hyper_expand"); }
void Ops::pool_rows(RowCache&, const PoolArgs&) { no_latents("pool_rows"); }
void Ops::select_rows(const RowCache&, const SelectArgs&) { no_latents("select_rows"); }
void Ops::latent_attention(const RowCache&, const LatentAttentionArgs&) { no_latents("latent_attention"); }
// Likewise for supports_shared_latents().
namespace {
void no_shared(bool never = false) { kernel_check(never, "this backend has no latents that layers share"); }
}  // namespace
void Ops::fake_quantise(Tensor, FakeFormat) { no_shared(); }
void Ops::pool_latents(const RowCache&, const PoolLatentsArgs&) { no_shared(); }
RopeTable Ops::window_rope_table(const RowBatch&, const Vector&, int64_t) {
  no_shared();
  return {};
}
void Ops::write_windows(RowCache&, int64_t, Tensor, const RowBatch&) { no_shared(); }
std::vector<int32_t> Ops::numbers_before(const RowCache&, int64_t, const RowBatch&, int64_t) {
  no_shared();
  return {};
}
// Likewise for supports_gated_streams().
namespace {
void no_streams(bool never = false) { kernel_check(never, "this backend has no gated streams and no chosen keys"); }
}  // namespace
void Ops::scaled_silu(Tensor, float) { no_streams(); }
void Ops::clear(Tensor) { no_streams(); }
void Ops::mix_streams(const MixStreamsArgs&) { no_streams(); }
void Ops::inject_streams(const InjectStreamsArgs&) { no_streams(); }
void Ops::gate_streams(const GateStreamsArgs&) { no_streams(); }
void Ops::short_conv(const ShortConvArgs&) { no_streams(); }
void Ops::embed_ngrams(const EmbedNgramsArgs&) { no_streams(); }
void Ops::pool_means(RowCache&, const PoolMeansArgs&) { no_streams(); }
void Ops::select_windows(const RowCache&, const SelectWindowsArgs&) { no_streams(); }
void Ops::sparse_attention(const KvCache&, int64_t, const AttentionArgs&, Tensor, int64_t) { no_streams(); }

// Likewise for supports_block_drafts().
namespace {
void no_blocks(bool never = false) { kernel_check(never, "this backend computes no blocks of drafted rows"); }
}  // namespace
void Ops::mean_streams(Tensor, int64_t, Tensor) { no_blocks(); }
void Ops::block_conv(const BlockConvArgs&) { no_blocks(); }
void Ops::block_attention(const KvCache&, int64_t, const BlockAttentionArgs&) { no_blocks(); }

std::string Ops::state_error(const StateShape& shape) const {
  if (std::holds_alternative<Mamba2Shape>(shape)) return "no Mamba2 layers";
  if (std::holds_alternative<ShortConvShape>(shape)) return "no dilated convolutions";
  return std::get<DeltaNetShape>(shape).channel_decay ? "no delta nets with decays of channels" : "";
}

// Likewise for state_error() and supports_row_caches().
void Ops::relu_squared(Tensor) { kernel_check(false, "relu_squared: this backend has no such operation"); }

void Ops::mamba2(const Mamba2Args&) { kernel_check(false, "mamba2: this backend has no Mamba2 layers"); }

std::unique_ptr<RowCache> Ops::make_row_cache(std::span<const RowCacheLayer>, int64_t) {
  kernel_check(false, "make_row_cache: this backend has no row caches");
  return nullptr;
}

void Ops::row_write(RowCache&, int64_t, Tensor, const RowBatch&) {
  kernel_check(false, "row_write: this backend has no row caches");
}

void Ops::qkv(KvCache& cache, int64_t layer, const QkvArgs& args) {
  if (args.q_norm != nullptr) rms_norm(args.q, args.heads, *args.q_norm, args.eps, args.q);
  if (args.k_norm != nullptr) rms_norm(args.k, args.kv_heads, *args.k_norm, args.eps, args.k);
  if (args.rope.cos.data != nullptr) {
    rope(args.q, args.heads, args.head_dim, args.rope);
    rope(args.k, args.kv_heads, args.head_dim, args.rope);
  }
  kv_write(cache, layer, args.k, args.v, args.rows);
}

}  // namespace tensorfold
