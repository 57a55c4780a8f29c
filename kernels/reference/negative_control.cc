#include "kernels/reference/negative_control.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/ops/stream_ops.h"

namespace tensorfold {
namespace {

class SplitWeight : public Weight {
 public:
  std::unique_ptr<Weight> whole;
  std::unique_ptr<Weight> first;   // columns [0, cut); null when the matrix is too narrow to cut
  std::unique_ptr<Weight> second;  // columns [cut, cols)
  int64_t cut = 0;

  int64_t out_features() const override { return whole->out_features(); }
  int64_t in_features() const override { return whole->in_features(); }
  int64_t bytes() const override { return whole->bytes(); }
};

class NegativeControl : public Ops {
 public:
  explicit NegativeControl(std::unique_ptr<Ops> inner) : inner_(std::move(inner)) {}

  std::string describe() const override { return "negative-control/" + inner_->describe(); }
  int64_t input_unit() const override { return inner_->input_unit(); }
  Limits limits() const override { return inner_->limits(); }
  int64_t free_memory() override { return inner_->free_memory(); }
  Ops& undecorated() override { return inner_->undecorated(); }
  std::string fingerprint_name() const override { return "negative-control"; }

  std::unique_ptr<Weight> pack(std::span<const MatrixSource> blocks) override {
    auto weight = std::make_unique<SplitWeight>();
    weight->whole = inner_->pack(blocks);
    int64_t unit = 8;  // what every backend can begin a product at
    for (const MatrixSource& block : blocks) unit = std::max(unit, block.column_unit());  // powers of two
    const int64_t cols = blocks.front().cols, cut = cols / 2 / unit * unit;
    if (cut == 0) return weight;
    std::vector<MatrixSource> left, right;
    for (const MatrixSource& block : blocks) {
      left.push_back(block.slice_cols(0, cut));
      right.push_back(block.slice_cols(cut, cols - cut));
    }
    weight->first = inner_->pack(left);
    weight->second = inner_->pack(right);
    weight->cut = cut;
    return weight;
  }

  void matmul(const Weight& w, Tensor x, Tensor out) override {
    const auto& weight = static_cast<const SplitWeight&>(w);
    if (x.rows <= 1 || weight.first == nullptr) return inner_->matmul(*weight.whole, x, out);
    const Tensor other = inner_->scratch(out.rows, out.cols);
    inner_->matmul(*weight.first, x.columns(0, weight.cut), out);
    inner_->matmul(*weight.second, x.columns(weight.cut, x.cols - weight.cut), other);
    inner_->add(out, other, out);
  }

  void embed(const Weight& table, const RowBatch& rows, Tensor out) override {
    inner_->embed(*static_cast<const SplitWeight&>(table).whole, rows, out);
  }

  std::unique_ptr<Vector> pack_vector(std::span<const float> values) override { return inner_->pack_vector(values); }
  Tensor scratch(int64_t rows, int64_t cols) override { return inner_->scratch(rows, cols); }
  Tensor scratch_input(int64_t rows, int64_t cols) override { return inner_->scratch_input(rows, cols); }
  ScratchMark scratch_mark() override { return inner_->scratch_mark(); }
  void scratch_release(ScratchMark mark) override { inner_->scratch_release(mark); }
  void begin_pass() override { inner_->begin_pass(); }
  std::string finish_pass() override { return inner_->finish_pass(); }
  float* host_data(Tensor t) override { return inner_->host_data(t); }
  Tensor run(RunKind kind, const RowBatch& rows, Tensor input, bool keep, const RunBody& body) override {
    return inner_->run(kind, rows, input, keep, body);
  }
  int64_t most_kept_rows() const override { return inner_->most_kept_rows(); }
  void forget_runs() override { inner_->forget_runs(); }
  Tensor persistent(int64_t rows, int64_t cols) override { return inner_->persistent(rows, cols); }
  void upload(std::span<const float> host, Tensor dst) override { inner_->upload(host, dst); }
  void download(Tensor src, std::span<float> host) override { inner_->download(src, host); }
  void rms_norm(Tensor x, int64_t heads, const Vector& weight, float eps, Tensor out) override {
    inner_->rms_norm(x, heads, weight, eps, out);
  }
  void add(Tensor a, Tensor b, Tensor out) override { inner_->add(a, b, out); }
  void sum_tree(std::span<const Tensor> parts, std::span<const AddStep> steps, Tensor into) override {
    inner_->sum_tree(parts, steps, into);
  }
  void silu_mul(Tensor gate_up, Tensor out) override { inner_->silu_mul(gate_up, out); }
  void sigmoid_mul(Tensor x, Tensor gate) override { inner_->sigmoid_mul(x, gate); }
  void relu_squared(Tensor x) override { inner_->relu_squared(x); }
  void gather_rows(Tensor src, std::span<const int32_t> rows, Tensor dst) override {
    inner_->gather_rows(src, rows, dst);
  }
  bool supports_experts() const override { return inner_->supports_experts(); }
  std::unique_ptr<ExpertWeights> pack_experts(std::span<const ExpertSource> experts) override {
    return inner_->pack_experts(experts);
  }
  void route(const RouteArgs& args) override { inner_->route(args); }
  void experts(const ExpertsArgs& args) override { inner_->experts(args); }
  RopeTable rope_table(const RowBatch& rows, const Vector& inv_freq, double attention_factor) override {
    return inner_->rope_table(rows, inv_freq, attention_factor);
  }
  void rope(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table) override {
    inner_->rope(x, heads, head_dim, table);
  }
  std::unique_ptr<KvCache> make_kv_cache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim) override {
    return inner_->make_kv_cache(layers, pages, kv_heads, head_dim);
  }
  std::unique_ptr<RecurrentState> make_recurrent_state(const StateShape& shape) override {
    return inner_->make_recurrent_state(shape);
  }
  std::string state_error(const StateShape& shape) const override { return inner_->state_error(shape); }
  bool supports_row_caches() const override { return inner_->supports_row_caches(); }
  std::unique_ptr<RowCache> make_row_cache(std::span<const RowCacheLayer> layers, int64_t pages) override {
    return inner_->make_row_cache(layers, pages);
  }
  void row_write(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows) override {
    inner_->row_write(cache, layer, values, rows);
  }
  void kv_write(KvCache& cache, int64_t layer, Tensor k, Tensor v, const RowBatch& rows) override {
    inner_->kv_write(cache, layer, k, v, rows);
  }
  void qkv(KvCache& cache, int64_t layer, const QkvArgs& args) override { inner_->qkv(cache, layer, args); }
  void attention(const KvCache& cache, int64_t layer, const AttentionArgs& args) override {
    inner_->attention(cache, layer, args);
  }
  void delta_net(const DeltaNetArgs& args) override { inner_->delta_net(args); }
  int64_t largest_exact_number() const override { return inner_->largest_exact_number(); }
  bool supports_latents() const override { return inner_->supports_latents(); }
  void layer_norm(Tensor x, const Vector& weight, const Vector& bias, float eps, Tensor out) override {
    inner_->layer_norm(x, weight, bias, eps, out);
  }
  void silu_mul_limited(Tensor gate_up, float limit, Tensor out) override {
    inner_->silu_mul_limited(gate_up, limit, out);
  }
  void rope_pairs(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table, bool back) override {
    inner_->rope_pairs(x, heads, head_dim, table, back);
  }
  void hyper_collapse(const HyperArgs& args) override { inner_->hyper_collapse(args); }
  void hyper_expand(const HyperArgs& args) override { inner_->hyper_expand(args); }
  void pool_rows(RowCache& cache, const PoolArgs& args) override { inner_->pool_rows(cache, args); }
  void select_rows(const RowCache& cache, const SelectArgs& args) override { inner_->select_rows(cache, args); }
  void latent_attention(const RowCache& cache, const LatentAttentionArgs& args) override {
    inner_->latent_attention(cache, args);
  }
  bool supports_shared_latents() const override { return inner_->supports_shared_latents(); }
  void fake_quantise(Tensor x, FakeFormat format) override { inner_->fake_quantise(x, format); }
  void pool_latents(const RowCache& cache, const PoolLatentsArgs& args) override { inner_->pool_latents(cache, args); }
  RopeTable window_rope_table(const RowBatch& rows, const Vector& inv_freq, int64_t tokens) override {
    return inner_->window_rope_table(rows, inv_freq, tokens);
  }
  void write_windows(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows) override {
    inner_->write_windows(cache, layer, values, rows);
  }
  std::vector<int32_t> numbers_before(const RowCache& cache, int64_t layer, const RowBatch& rows,
                                      int64_t count) override {
    return inner_->numbers_before(cache, layer, rows, count);
  }
  void mamba2(const Mamba2Args& args) override { inner_->mamba2(args); }
  bool supports_gated_streams() const override { return inner_->supports_gated_streams(); }
  void scaled_silu(Tensor x, float scale) override { inner_->scaled_silu(x, scale); }
  void clear(Tensor x) override { inner_->clear(x); }
  void mix_streams(const MixStreamsArgs& args) override { inner_->mix_streams(args); }
  void inject_streams(const InjectStreamsArgs& args) override { inner_->inject_streams(args); }
  void gate_streams(const GateStreamsArgs& args) override { inner_->gate_streams(args); }
  void short_conv(const ShortConvArgs& args) override { inner_->short_conv(args); }
  void embed_ngrams(const EmbedNgramsArgs& args) override {
    std::vector<const Weight*> whole;
    for (const Weight* table : args.tables) whole.push_back(static_cast<const SplitWeight*>(table)->whole.get());
    EmbedNgramsArgs inner = args;
    inner.tables = whole;
    inner_->embed_ngrams(inner);
  }
  void pool_means(RowCache& cache, const PoolMeansArgs& args) override { inner_->pool_means(cache, args); }
  bool supports_block_drafts() const override { return inner_->supports_block_drafts(); }
  void mean_streams(Tensor x, int64_t streams, Tensor out) override { inner_->mean_streams(x, streams, out); }
  void block_conv(const BlockConvArgs& args) override { inner_->block_conv(args); }
  void block_attention(const KvCache& cache, int64_t layer, const BlockAttentionArgs& args) override {
    inner_->block_attention(cache, layer, args);
  }
  void select_windows(const RowCache& cache, const SelectWindowsArgs& args) override {
    inner_->select_windows(cache, args);
  }
  void sparse_attention(const KvCache& cache, int64_t layer, const AttentionArgs& args, Tensor selected,
                        int64_t tokens) override {
    inner_->sparse_attention(cache, layer, args, selected, tokens);
  }
  std::vector<std::vector<Candidate>> top_candidates(Tensor logits, int32_t first_id, int64_t n) override {
    return inner_->top_candidates(logits, first_id, n);
  }
  std::vector<Candidate> best_draws(Tensor logits, int32_t first_id, std::span<const DrawKey> keys) override {
    return inner_->best_draws(logits, first_id, keys);
  }

 private:
  std::unique_ptr<Ops> inner_;
};

}  // namespace

std::unique_ptr<Ops> make_negative_control(std::unique_ptr<Ops> inner) {
  return std::make_unique<NegativeControl>(std::move(inner));
}

}  // namespace tensorfold
