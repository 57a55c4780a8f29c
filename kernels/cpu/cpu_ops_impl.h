// The CPU backend's Ops object. Private to kernels/cpu; users include cpu_ops.h.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_states.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/weights.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

// [layer][page][kv head][key block of 16]{keys [head_dim][16], values [16][value_stride]}, fp32. Keys lie transposed,
// so that the 16 keys of a block are the 16 lanes of a score.
class CpuKvCache : public KvCache {
 public:
  CpuKvCache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim);
  int64_t bytes() const override { return memory_.size(); }
  int64_t page_bytes() const override { return layers_ * page_floats() * static_cast<int64_t>(sizeof(float)); }
  void copy_page(int32_t from, int32_t to) override;
  void save_page(int32_t page, std::span<std::byte> into) const override;
  void load_page(int32_t page, std::span<const std::byte> from) override;
  float* layer(int64_t index) { return memory_.floats() + index * pages_ * page_floats(); }
  const float* layer(int64_t index) const { return memory_.floats() + index * pages_ * page_floats(); }
  int64_t layers() const { return layers_; }
  int64_t pages() const { return pages_; }
  int64_t kv_heads() const { return kv_heads_; }
  int64_t head_dim() const { return head_dim_; }
  int64_t value_stride() const { return round_up(head_dim_, 16); }
  int64_t block_floats() const { return kKeyBlock * (head_dim_ + value_stride()); }
  int64_t head_floats() const { return kPageTokens / kKeyBlock * block_floats(); }
  int64_t page_floats() const { return kv_heads_ * head_floats(); }

 private:
  int64_t layers_, pages_, kv_heads_, head_dim_;
  MemoryBlock memory_;
};

// [layer][page][kPageTokens / tokens][width], fp32.
class CpuRowCache : public RowCache {
 public:
  CpuRowCache(std::span<const RowCacheLayer> layers, int64_t pages);
  int64_t bytes() const override { return memory_.size(); }
  int64_t page_bytes() const override;
  void copy_page(int32_t from, int32_t to) override;
  void save_page(int32_t page, std::span<std::byte> into) const override;
  void load_page(int32_t page, std::span<const std::byte> from) override;
  int64_t pages() const { return pages_; }
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  const RowCacheLayer& shape(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  int64_t page_floats(int64_t layer) const { return kPageTokens / shape(layer).tokens * shape(layer).width; }
  // The row that holds `position`: [width].
  float* row(int64_t layer, std::span<const int32_t> table, int64_t position) {
    return memory_.floats() + offset(layer, table, position);
  }
  const float* row(int64_t layer, std::span<const int32_t> table, int64_t position) const {
    return memory_.floats() + offset(layer, table, position);
  }

 private:
  int64_t offset(int64_t layer, std::span<const int32_t> table, int64_t position) const {
    return starts_[static_cast<size_t>(layer)] +
           table[static_cast<size_t>(position / kPageTokens)] * page_floats(layer) +
           position % kPageTokens / shape(layer).tokens * shape(layer).width;
  }
  std::vector<RowCacheLayer> layers_;
  std::vector<int64_t> starts_;  // of each layer, floats
  int64_t pages_;
  MemoryBlock memory_;
};

class CpuRecurrentState : public CpuStateMemory {
 public:
  explicit CpuRecurrentState(const DeltaNetShape& shape);

  int64_t value_stride() const { return round_up(dv_, 16); }
  int64_t head_floats() const { return dk_ * value_stride(); }
  float* head(int64_t v_head) { return floats() + v_head * head_floats(); }  // S [dk, value_stride]
  float* history(int64_t i) { return history_ + i * channels_; }             // [taps - 1, channels], oldest first
  float* kept_qkv(int64_t row) { return kept_ + row * (channels_ + v_heads_ + decays_); }  // [channels]
  float* kept_b(int64_t row) { return kept_qkv(row) + channels_; }                         // [v_heads]
  float* kept_a(int64_t row) { return kept_b(row) + v_heads_; }                            // [decays]

 private:
  friend class CpuOps;
  int64_t dk_, dv_, v_heads_, channels_, decays_, taps_;
  float* history_ = nullptr;
  float* kept_ = nullptr;
};

// Checks a group against tensors of `rows` rows and a cache of `pages` pages: a wrong page would read another
// sequence's keys.
void check_group(const RowGroup& g, int64_t rows, int64_t pages);
// The same of a block of drafts (block_ops.h), whose own rows have no place in the cache.
void check_block(const RowGroup& g, int64_t rows, int64_t pages);

class CpuOps : public Ops {
 public:
  CpuOps(const KernelTable* kernels, std::shared_ptr<ThreadPool> pool);

  std::string describe() const override { return std::string("cpu/") + kernels_->name; }
  std::string fingerprint_name() const override { return "cpu"; }

  std::unique_ptr<Weight> pack(std::span<const MatrixSource> blocks) override;
  std::unique_ptr<Vector> pack_vector(std::span<const float> values) override;
  std::unique_ptr<Weight> view_rows(const Weight& w, int64_t first, int64_t count) override;
  Tensor scratch(int64_t rows, int64_t cols) override;
  ScratchMark scratch_mark() override { return pass_.mark(); }
  void scratch_release(ScratchMark mark) override { pass_.release(mark); }
  void begin_pass() override;
  Tensor persistent(int64_t rows, int64_t cols) override;
  void upload(std::span<const float> host, Tensor dst) override;
  void download(Tensor src, std::span<float> host) override;

  void embed(const Weight& table, const RowBatch& rows, Tensor out) override;
  void matmul(const Weight& w, Tensor x, Tensor out) override;
  void matmul_many(std::span<const MatmulJob> jobs) override;
  void rms_norm(Tensor x, int64_t heads, const Vector& weight, float eps, Tensor out) override;
  void add(Tensor a, Tensor b, Tensor out) override;
  void add_many(std::span<const AddJob> jobs) override;
  void silu_mul(Tensor gate_up, Tensor out) override;
  void sigmoid_mul(Tensor x, Tensor gate) override;
  void relu_squared(Tensor x) override;
  void gather_rows(Tensor src, std::span<const int32_t> rows, Tensor dst) override;
  bool supports_experts() const override { return true; }
  std::unique_ptr<ExpertWeights> pack_experts(std::span<const ExpertSource> experts) override;
  void route(const RouteArgs& args) override;
  void experts(const ExpertsArgs& args) override;
  RopeTable rope_table(const RowBatch& rows, const Vector& inv_freq, double attention_factor) override;
  void rope(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table) override;

  std::unique_ptr<KvCache> make_kv_cache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim) override;
  std::unique_ptr<RecurrentState> make_recurrent_state(const StateShape& shape) override;
  std::string state_error(const StateShape&) const override { return {}; }
  bool supports_row_caches() const override { return true; }
  std::unique_ptr<RowCache> make_row_cache(std::span<const RowCacheLayer> layers, int64_t pages) override;
  void row_write(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows) override;
  void kv_write(KvCache& cache, int64_t layer, Tensor k, Tensor v, const RowBatch& rows) override;
  void attention(const KvCache& cache, int64_t layer, const AttentionArgs& args) override;
  void delta_net(const DeltaNetArgs& args) override;
  bool supports_latents() const override { return true; }
  void layer_norm(Tensor x, const Vector& weight, const Vector& bias, float eps, Tensor out) override;
  void silu_mul_limited(Tensor gate_up, float limit, Tensor out) override;
  void rope_pairs(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table, bool back) override;
  void hyper_collapse(const HyperArgs& args) override;
  void hyper_expand(const HyperArgs& args) override;
  void pool_rows(RowCache& cache, const PoolArgs& args) override;
  void select_rows(const RowCache& cache, const SelectArgs& args) override;
  void latent_attention(const RowCache& cache, const LatentAttentionArgs& args) override;
  bool supports_shared_latents() const override { return true; }
  void fake_quantise(Tensor x, FakeFormat format) override;
  void pool_latents(const RowCache& cache, const PoolLatentsArgs& args) override;
  RopeTable window_rope_table(const RowBatch& rows, const Vector& inv_freq, int64_t tokens) override;
  void write_windows(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows) override;
  std::vector<int32_t> numbers_before(const RowCache& cache, int64_t layer, const RowBatch& rows,
                                      int64_t count) override;
  void mamba2(const Mamba2Args& args) override;
  bool supports_gated_streams() const override { return true; }
  void scaled_silu(Tensor x, float scale) override;
  void clear(Tensor x) override;
  void mix_streams(const MixStreamsArgs& args) override;
  void inject_streams(const InjectStreamsArgs& args) override;
  void gate_streams(const GateStreamsArgs& args) override;
  void short_conv(const ShortConvArgs& args) override;
  void embed_ngrams(const EmbedNgramsArgs& args) override;
  void pool_means(RowCache& cache, const PoolMeansArgs& args) override;
  void select_windows(const RowCache& cache, const SelectWindowsArgs& args) override;
  void sparse_attention(const KvCache& cache, int64_t layer, const AttentionArgs& args, Tensor selected,
                        int64_t tokens) override;
  bool supports_block_drafts() const override { return true; }
  void mean_streams(Tensor x, int64_t streams, Tensor out) override;
  void block_conv(const BlockConvArgs& args) override;
  void block_attention(const KvCache& cache, int64_t layer, const BlockAttentionArgs& args) override;
  std::vector<std::vector<Candidate>> top_candidates(Tensor logits, int32_t first_id, int64_t n) override;
  std::vector<Candidate> best_draws(Tensor logits, int32_t first_id, std::span<const DrawKey> keys) override;

 private:
  struct AttentionPlan;
  struct DeltaRun;
  struct Mamba2Run;
  struct SparseItem;
  struct BlockItem;
  struct ExpertGroups;

  // A piece of a product: some rows of its input times some panels of its weight.
  struct MatmulTask;

  // body(row, first column, columns) over a [rows, cols] tensor, in pieces that are worth a thread.
  template <typename Body>
  void for_pieces(int64_t rows, int64_t cols, const Body& body);
  // The same for what follows a product: each thread takes the columns that it made. `passes`: how often an element is
  // touched, about.
  template <typename Body>
  void for_columns(int64_t rows, int64_t cols, int64_t passes, const Body& body);
  // Appends the tasks of one thread's part of a product.
  void cut_matmul(const MatmulJob& job, int32_t index, int64_t part, std::vector<MatmulTask>* tasks) const;
  void run_matmul(const MatmulJob& job, const MatmulTask& task, int worker);
  void mix_values(const KvCache& cache, int64_t layer, const AttentionArgs& args);  // attention before the gate
  void expert_inner(const ExpertsArgs& args, const ExpertGroups& groups, Tensor inner);
  void expert_outer(const ExpertsArgs& args, const ExpertGroups& groups, Tensor inner);
  AttentionPlan plan_attention(const CpuKvCache& cache, int64_t layer, const AttentionArgs& args);
  DeltaRun start_delta_run(const DeltaNetArgs& args);
  void delta_inputs(const DeltaNetArgs& args, const DeltaRun& run);
  void delta_heads(const DeltaNetArgs& args, const DeltaRun& run);
  void latent_item(const LatentAttentionArgs& args, int64_t r, int64_t first_head, int heads,
                   const std::vector<const float*>& list, float* memory);
  Mamba2Run start_mamba2_run(const Mamba2Args& args);
  void mamba2_inputs(const Mamba2Args& args, const Mamba2Run& run);
  void mamba2_heads(const Mamba2Args& args, const Mamba2Run& run);
  void attend_chosen(const CpuKvCache& cache, int64_t layer, const AttentionArgs& args, const SparseItem& item,
                     float* gathered, float* states);
  void attend_block(const CpuKvCache& cache, int64_t layer, const BlockAttentionArgs& args, const BlockItem& item,
                    float* memory);

  const KernelTable* kernels_;
  std::shared_ptr<ThreadPool> pool_;
  BlockArena weights_;
  Fp4Tables fp4_tables_;
  ScratchArena pass_;
  std::vector<std::unique_ptr<MemoryBlock>> persistent_;
  std::vector<std::unique_ptr<MemoryBlock>> worker_scratch_;  // one a thread
};

/// Columns of a tensor handled at once by elementwise operations; work below this stays on the calling thread.
inline constexpr int64_t kPieceColumns = 4096;
inline constexpr int64_t kPieceElements = 16384;

template <typename Body>
void CpuOps::for_pieces(int64_t rows, int64_t cols, const Body& body) {
  const int64_t across = (cols + kPieceColumns - 1) / kPieceColumns;
  const int64_t columns = across <= 1 ? cols : kPieceColumns;
  const int64_t grain = columns < 1 ? 1 : (kPieceElements + columns - 1) / columns;
  pool_->parallel_for(rows * across, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % across * columns;
      body(i / across, first, cols - first < columns ? cols - first : columns);
    }
  });
}

template <typename Body>
void CpuOps::for_columns(int64_t rows, int64_t cols, int64_t passes, const Body& body) {
  constexpr int64_t kFewElements = 8192;  // below, a second thread costs more than it does
  const int64_t parts = rows * cols * passes < kFewElements ? 1 : pool_->threads();
  const int64_t blocks = (cols + 15) / 16;
  const int64_t row_run = std::max<int64_t>(1, kPieceElements * parts / std::max<int64_t>(cols, 1));
  const int64_t row_runs = (rows + row_run - 1) / row_run;
  pool_->parallel_for(parts * row_runs, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i / row_runs, first_row = i % row_runs * row_run;
      const int64_t first = blocks * part / parts * 16;
      const int64_t last = std::min(blocks * (part + 1) / parts * 16, cols);
      for (int64_t r = first_row; r < std::min(first_row + row_run, rows) && first < last; ++r) {
        body(r, first, last - first);
      }
    }
  });
}

}  // namespace tensorfold
