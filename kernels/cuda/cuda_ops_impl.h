// The CUDA backend's Ops object. Private to kernels/cuda; users include cuda_ops.h.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <tuple>

#include "kernels/cuda/arena.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/recurrent_state.h"
#include "kernels/cuda/rowwise.h"
#include "kernels/numerics/check.h"

namespace tensorfold {

inline constexpr int64_t kMostGraphRows = 64;
inline constexpr int64_t kMostNormColumns = 16384;        // rowwise_norm.cu
inline constexpr int64_t kBatchBytes = int64_t{8} << 20;  // of a kept run's rows and page tables

class CudaVector : public Vector {
 public:
  explicit CudaVector(std::span<const float> values) : size_(static_cast<int64_t>(values.size())) {
    data_ = static_cast<float*>(device_allocate(static_cast<int64_t>(values.size_bytes()), "a vector of weights"));
    if (data_ == nullptr) return;
    // A copy of pageable memory may return before the bytes have come, and passes have a stream that waits for no
    // other.
    if (cuda_ok(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "a vector of weights")) {
      cuda_ok(cudaStreamSynchronize(cudaStreamLegacy), "a vector of weights");
    }
  }
  ~CudaVector() override { device_free(data_); }
  int64_t size() const override { return size_; }
  const float* data() const { return data_; }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

inline const float* vector_data(const Vector* v) {
  return v == nullptr ? nullptr : static_cast<const CudaVector*>(v)->data();
}
inline const CudaWeight& cuda_weight(const Weight& w) { return static_cast<const CudaWeight&>(w); }

inline DeviceMatrix matrix_of(Tensor t) {
  kernel_check(!t.rounded, "an fp32 tensor was expected");
  return {t.data, t.rows, t.cols, t.stride};
}

inline DeviceInput input_of(Tensor t) {
  kernel_check(t.rounded, "a rounded tensor was expected");
  return {reinterpret_cast<__nv_bfloat16*>(t.data), t.rows, t.cols, t.stride};
}

inline const DeviceRows& device_rows(const RowBatch& rows) {
  kernel_check(rows.device != nullptr, "the batch was not made by Ops::run");
  return *static_cast<const DeviceRows*>(rows.device);
}

// Where the parts of a batch lie in one block of memory, the same on both sides of the copy.
struct BatchLayout {
  int64_t group_count = 0, tokens, positions, group_of, groups, states, pages, bytes;

  BatchLayout(int64_t rows, int64_t max_groups, int64_t layers, int64_t page_count) {
    int64_t at = 16;
    const auto place = [&at](int64_t size) {
      const int64_t here = at;
      at += (size + 15) / 16 * 16;
      return here;
    };
    tokens = place(rows * 4);
    positions = place(rows * 8);
    group_of = place(rows * 4);
    groups = place(max_groups * static_cast<int64_t>(sizeof(DeviceGroup)));
    states = place(layers * max_groups * 8);
    pages = place(page_count * 4);  // last: only this part's size is not known from the graph's key
    bytes = at;
  }
};

inline constexpr int kMostCudaDevices = 64;
inline std::array<std::atomic<int>, kMostCudaDevices> cuda_backends{};  // by device

class CudaOps : public Ops, public CudaStreamOps {
 public:
  CudaOps(const CudaOptions& options, const cudaDeviceProp& properties)
      : options_(options),
        arch_("sm_" + std::to_string(properties.major) + std::to_string(properties.minor)),
        name_(properties.name),
        multiprocessors_(properties.multiProcessorCount) {
    ++cuda_backends[static_cast<size_t>(options_.device)];
    use_device();
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    staging_.reserve();
  }
  ~CudaOps() override {
    use_device();
    cudaStreamSynchronize(stream_);
    CudaOps::forget_runs();
    for (float* memory : persistent_) device_free(memory);
    for (const auto& [heads, memory] : head_maps_) device_free(memory);
    device_free(kept_batch_);
    cudaStreamDestroy(stream_);
    --cuda_backends[static_cast<size_t>(options_.device)];
  }

  std::string describe() const override {
    return "cuda/" + arch_ + " (" + name_ + ", " + std::to_string(multiprocessors_) + " multiprocessors, GPU " +
           std::to_string(options_.device) + ", " + (options_.graphs ? "graphs" : "eager") + ", " + options_.kv_format +
           " keys and values)";
  }
  std::string fingerprint_name() const override {
    return "cuda/" + arch_ + (options_.kv_format == "bf16" ? "" : "/kv-" + options_.kv_format);
  }

  cudaStream_t stream() override { return stream_; }
  int device() const override { return options_.device; }
  const std::string& exchange() const override { return options_.exchange; }

  int64_t free_memory() override {
    use_device();
    size_t free = 0, total = 0;
    return cuda_ok(cudaMemGetInfo(&free, &total), "memory of the GPU") ? static_cast<int64_t>(free) : 0;
  }

  int64_t input_unit() const override { return 8; }  // 16 bytes
  Limits limits() const override;

  // Weights.
  std::unique_ptr<Weight> pack(std::span<const MatrixSource> blocks) override {
    return pack_with(blocks, CudaPairing::kNone);
  }
  std::unique_ptr<Weight> pack_gate_up(const MatrixSource& gate, const MatrixSource& up) override {
    const MatrixSource blocks[] = {gate, up};
    return pack_with(blocks, CudaPairing::kGateUp);
  }
  std::unique_ptr<Vector> pack_vector(std::span<const float> values) override {
    use_device();
    return std::make_unique<CudaVector>(values);
  }
  std::unique_ptr<Weight> view_rows(const Weight& w, int64_t first, int64_t count) override {
    return view_cuda_weight_rows(cuda_weight(w), first, count);
  }

  // Scratch.
  Tensor scratch(int64_t rows, int64_t cols) override {
    const int64_t stride = (cols + 15) / 16 * 16;
    return {static_cast<float*>(take(rows * stride * 4)), rows, cols, stride, false};
  }
  Tensor scratch_input(int64_t rows, int64_t cols) override {
    const int64_t stride = (cols + 15) / 16 * 16;
    return {static_cast<float*>(take(rows * stride * 2)), rows, cols, stride, true};
  }
  ScratchMark scratch_mark() override { return arena_->mark(); }
  void scratch_release(ScratchMark mark) override { arena_->release(mark); }
  void begin_pass() override {
    use_device();
    flush();
    cuda_ok(cudaStreamSynchronize(stream_), "the GPU");  // staged copies have left their memory
    pass_arena_.release({});
    staging_.reset();
  }
  std::string finish_pass() override {
    flush();
    cuda_ok(cudaStreamSynchronize(stream_), "the GPU");
    const std::string failure = cuda_failure();
    return failure.empty() ? failure : "GPU " + std::to_string(options_.device) + ": " + failure;
  }
  Tensor persistent(int64_t rows, int64_t cols) override {
    use_device();
    const int64_t stride = (cols + 15) / 16 * 16;
    auto* memory = static_cast<float*>(device_allocate(rows * stride * 4, "rows kept between passes"));
    persistent_.push_back(memory);
    return {memory, rows, cols, stride, false};
  }
  void upload(std::span<const float> host, Tensor dst) override {
    kernel_check(static_cast<int64_t>(host.size()) == dst.rows * dst.cols, "upload: size differs");
    if (host.empty()) return;
    flush();
    if (dst.rounded) {
      const Tensor whole = scratch(dst.rows, dst.cols);
      upload(host, whole);
      cuda_to_input(stream_, matrix_of(whole), input_of(dst));
      return;
    }
    void* staged = staging_.take(static_cast<int64_t>(host.size_bytes()));
    if (staged == nullptr) return;
    std::memcpy(staged, host.data(), host.size_bytes());
    const size_t width = static_cast<size_t>(dst.cols) * 4;
    cuda_ok(cudaMemcpy2DAsync(dst.data, static_cast<size_t>(dst.stride) * 4, staged, width, width,
                              static_cast<size_t>(dst.rows), cudaMemcpyHostToDevice, stream_),
            "upload");
  }
  void download(Tensor src, std::span<float> host) override {
    kernel_check(static_cast<int64_t>(host.size()) == src.rows * src.cols, "download: size differs");
    if (host.empty()) return;
    flush();
    if (src.rounded) {
      const Tensor whole = scratch(src.rows, src.cols);
      cuda_from_input(stream_, input_of(src), matrix_of(whole));
      src = whole;
    }
    const size_t width = static_cast<size_t>(src.cols) * 4;
    cuda_ok(cudaMemcpy2DAsync(host.data(), width, src.data, static_cast<size_t>(src.stride) * 4, width,
                              static_cast<size_t>(src.rows), cudaMemcpyDeviceToHost, stream_),
            "download");
    cuda_ok(cudaStreamSynchronize(stream_), "download");
  }
  float* host_data(Tensor /*t*/) override { return nullptr; }

  Tensor run(RunKind kind, const RowBatch& rows, Tensor input, bool keep, const RunBody& body) override;
  int64_t most_kept_rows() const override { return options_.graphs ? kMostGraphRows : 0; }
  void forget_runs() override {
    for (auto& [key, run] : kept_) destroy(run);
    kept_.clear();
  }

  // Arithmetic.
  void embed(const Weight& table, const RowBatch& rows, Tensor out) override {
    flush();
    cuda_embed(stream_, cuda_weight(table), device_rows(rows).tokens, matrix_of(out));
  }
  int64_t largest_exact_number() const override { return 256; }  // bf16
  void matmul(const Weight& w, Tensor x, Tensor out) override {
    const MatmulJob job{&w, x, out};
    matmul_many({&job, 1});
  }
  void matmul_many(std::span<const MatmulJob> jobs) override;  // and sums of outputs: cuda_sums.cc
  void matmul_silu_mul(const Weight& w, Tensor x, Tensor out) override {
    flush();
    cuda_matmul_silu_mul(stream_, cuda_weight(w), rounded(x), input_of(out));
  }
  void rms_norm(Tensor x, int64_t heads, const Vector& weight, float eps, Tensor out) override {
    const DeviceMatrix out_f = out.rounded ? DeviceMatrix{} : matrix_of(out);
    const DeviceInput out_b = out.rounded ? input_of(out) : DeviceInput{};
    const float* w = vector_data(&weight);
    kernel_check(x.cols == heads * weight.size() && out.cols == x.cols && out.rows == x.rows,
                 "rms_norm: shapes differ");
    if (held_ && heads == 1 && x.data == held_residual_.data && x.rows == held_residual_.rows &&
        x.cols == held_residual_.cols) {
      held_ = false;
      cuda_sum_norm(stream_, held_sum_, held_residual_, w, eps, out_f, out_b);
      return;
    }
    flush();
    cuda_rms_norm(stream_, matrix_of(x), heads, w, eps, out_f, out_b);
  }
  void add(Tensor a, Tensor b, Tensor out) override {
    flush();
    cuda_add(stream_, matrix_of(a), matrix_of(b), matrix_of(out));
  }
  void sum_tree(std::span<const Tensor> parts, std::span<const AddStep> steps, Tensor into) override;
  void fold(std::span<const Tensor> parts, std::span<const AddStep> steps, std::span<const int> roots,
            std::span<const Tensor> out) override;
  void host_step(std::function<void()> step) override {
    flush();
    if (capturing_ == nullptr) {
      cuda_ok(cudaStreamSynchronize(stream_), "the GPU");
      step();
      return;
    }
    end_segment();
    capturing_->segments.back().step = std::move(step);
    cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "capturing a pass");
  }
  void flush() override;
  void silu_mul(Tensor gate_up, Tensor out) override {
    flush();
    cuda_silu_mul(stream_, matrix_of(gate_up), out.rounded ? DeviceMatrix{} : matrix_of(out),
                  out.rounded ? input_of(out) : DeviceInput{});
  }
  void sigmoid_mul(Tensor x, Tensor gate) override {
    flush();
    cuda_sigmoid_mul(stream_, matrix_of(x), matrix_of(gate));
  }
  void relu_squared(Tensor x) override {
    flush();
    cuda_relu_squared(stream_, matrix_of(x));
  }
  void gather_rows(Tensor src, std::span<const int32_t> rows, Tensor dst) override {
    kernel_check(static_cast<int64_t>(rows.size()) == dst.rows && src.cols == dst.cols, "gather_rows: shapes differ");
    if (rows.empty()) return;
    flush();
    for (const int32_t row : rows) kernel_check(row >= 0 && row < src.rows, "gather_rows: no such row");
    void* staged = staging_.take(static_cast<int64_t>(rows.size_bytes()));
    auto* index = static_cast<int32_t*>(take(static_cast<int64_t>(rows.size_bytes())));
    if (staged == nullptr || index == nullptr) return;
    std::memcpy(staged, rows.data(), rows.size_bytes());
    cuda_ok(cudaMemcpyAsync(index, staged, rows.size_bytes(), cudaMemcpyHostToDevice, stream_), "row numbers");
    cuda_gather_rows(stream_, matrix_of(src), index, matrix_of(dst));
  }

  // Blocks of drafted rows (cuda_blocks.cc).
  bool supports_block_drafts() const override { return true; }
  void clear(Tensor x) override;
  void mean_streams(Tensor x, int64_t streams, Tensor out) override;
  void block_conv(const BlockConvArgs& in) override;
  void block_attention(const KvCache& cache, int64_t layer, const BlockAttentionArgs& in) override;

  // Experts.
  bool supports_experts() const override { return true; }
  std::unique_ptr<ExpertWeights> pack_experts(std::span<const ExpertSource> experts) override;
  void route(const RouteArgs& in) override;
  void experts(const ExpertsArgs& in) override;

  // Latents (cuda_latents.cc).
  bool supports_latents() const override { return true; }
  void layer_norm(Tensor x, const Vector& weight, const Vector& bias, float eps, Tensor out) override;
  void silu_mul_limited(Tensor gate_up, float limit, Tensor out) override;
  void rope_pairs(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table, bool back) override;
  void pool_rows(RowCache& cache, const PoolArgs& args) override;
  void select_rows(const RowCache& cache, const SelectArgs& args) override;
  void latent_attention(const RowCache& cache, const LatentAttentionArgs& args) override;

  // Positions.
  RopeTable rope_table(const RowBatch& rows, const Vector& inv_freq, double attention_factor) override {
    flush();
    const DeviceRows& batch = device_rows(rows);
    const RopeTable table{scratch(batch.rows, inv_freq.size()), scratch(batch.rows, inv_freq.size())};
    cuda_rope_table(stream_, batch.positions, batch.rows, vector_data(&inv_freq), inv_freq.size(), attention_factor,
                    table.cos.data, table.sin.data, table.cos.stride);
    return table;
  }
  void rope(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table) override {
    flush();
    cuda_rope(stream_, matrix_of(x), heads, head_dim, table.cos.data, table.sin.data, table.cos.cols, table.cos.stride);
  }

  // State.
  std::unique_ptr<KvCache> make_kv_cache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim) override {
    use_device();
    return CudaKvCache::create(layers, pages, kv_heads, head_dim,
                               options_.kv_format == "fp8" ? CudaKvFormat::kFp8 : CudaKvFormat::kBf16, stream_);
  }
  std::string state_error(const StateShape& shape) const override;
  std::unique_ptr<RecurrentState> make_recurrent_state(const StateShape& shape) override;
  void kv_write(KvCache& cache, int64_t layer, Tensor k, Tensor v, const RowBatch& rows) override {
    flush();
    CudaQkvArgs args;
    args.k = matrix_of(k);
    args.v = matrix_of(v);
    cuda_qkv(stream_, static_cast<CudaKvCache&>(cache), layer, device_rows(rows), args);
  }
  void qkv(KvCache& cache, int64_t layer, const QkvArgs& in) override {
    flush();
    CudaQkvArgs args;
    args.q = matrix_of(in.q);
    args.k = matrix_of(in.k);
    args.v = matrix_of(in.v);
    args.heads = in.heads;
    args.q_norm = vector_data(in.q_norm);
    args.k_norm = vector_data(in.k_norm);
    args.eps = in.eps;
    args.cos = in.rope.cos.data;
    args.sin = in.rope.sin.data;
    args.pairs = in.rope.cos.cols;
    args.table_stride = in.rope.cos.stride;
    cuda_qkv(stream_, static_cast<CudaKvCache&>(cache), layer, device_rows(in.rows), args);
  }
  void attention(const KvCache& cache, int64_t layer, const AttentionArgs& in) override {
    flush();
    const ScratchScope scope(*this);
    const DeviceRows& rows = device_rows(in.rows);
    CudaAttentionArgs args;
    args.q = matrix_of(in.q);
    if (in.gate.data != nullptr) args.gate = matrix_of(in.gate);
    args.out = input_of(in.out);
    args.heads = in.heads;
    args.head_dim = in.head_dim;
    args.kv_head_of = in.kv_head_of;
    args.scale = in.scale;
    args.workspace = static_cast<float*>(take(4 * cuda_attention_workspace(rows, in.heads, in.head_dim)));
    cuda_attention(stream_, static_cast<const CudaKvCache&>(cache), layer, rows, args);
  }
  void delta_net(const DeltaNetArgs& in) override;
  void mamba2(const Mamba2Args& in) override;

  // Paged rows, residuals of several streams, attention over chosen keys (cuda_streams.cc).
  bool supports_row_caches() const override { return true; }
  std::unique_ptr<RowCache> make_row_cache(std::span<const RowCacheLayer> layers, int64_t pages) override;
  void row_write(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows) override;
  bool supports_gated_streams() const override { return true; }
  void scaled_silu(Tensor x, float scale) override;
  void mix_streams(const MixStreamsArgs& in) override;
  void inject_streams(const InjectStreamsArgs& in) override;
  void gate_streams(const GateStreamsArgs& in) override;
  void short_conv(const ShortConvArgs& in) override;
  void embed_ngrams(const EmbedNgramsArgs& in) override;
  void pool_means(RowCache& cache, const PoolMeansArgs& in) override;
  void select_windows(const RowCache& cache, const SelectWindowsArgs& in) override;
  void sparse_attention(const KvCache& cache, int64_t layer, const AttentionArgs& in, Tensor selected,
                        int64_t tokens) override;
  void hyper_collapse(const HyperArgs& in) override;
  void hyper_expand(const HyperArgs& in) override;

  std::vector<std::vector<Candidate>> top_candidates(Tensor logits, int32_t first_id, int64_t n) override;
  std::vector<Candidate> best_draws(Tensor logits, int32_t first_id, std::span<const DrawKey> keys) override;

 private:
  // Launches up to a step of the host (the last segment has none).
  struct Segment {
    cudaGraphExec_t graph = nullptr;
    std::function<void()> step;
  };
  struct KeptRun {
    std::vector<Segment> segments;
    Tensor result;
    bool complete = true;
  };
  using RunKey = std::tuple<RunKind, int64_t, int64_t, int64_t>;  // rows, most groups, keys

  static void destroy(const KeptRun& run) {
    for (const Segment& segment : run.segments) cudaGraphExecDestroy(segment.graph);
  }
  // Ends the capture that is under way and keeps it.
  void end_segment() {
    Segment segment;
    cudaGraph_t graph = nullptr;
    bool kept = cuda_ok(cudaStreamEndCapture(stream_, &graph), "capturing a pass") && graph != nullptr;
    kept = kept && cuda_ok(cudaGraphInstantiate(&segment.graph, graph, 0), "instantiating a pass");
    if (graph != nullptr) cudaGraphDestroy(graph);
    capturing_->complete = capturing_->complete && kept;
    capturing_->segments.push_back(std::move(segment));
  }
  void use_device() { cuda_ok(cudaSetDevice(options_.device), "the GPU"); }
  void* take(int64_t bytes) {
    void* memory = arena_->take(bytes);
    kernel_check(memory != nullptr, "the GPU has no memory left for a pass: fewer KV pages or slots leave more");
    return memory;
  }
  /// Memory whose size follows from a context: in powers of two, for the arena gives nothing back, and contexts of
  /// every length come by.
  void* take_workspace(int64_t bytes) {
    return take(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(bytes, 16)))));
  }
  std::unique_ptr<Weight> pack_with(std::span<const MatrixSource> blocks, CudaPairing pairing) {
    use_device();
    std::string error;
    std::unique_ptr<CudaWeight> weight = pack_cuda_weight(blocks, pairing, &error);
    if (weight == nullptr) {
      if (error.empty()) error = "weights: " + cuda_failure();
      kernel_check(false, error.c_str());
    }
    return weight;
  }
  DeviceInput rounded(Tensor x) {
    if (x.rounded) return input_of(x);
    const Tensor copy = scratch_input(x.rows, x.cols);
    cuda_to_input(stream_, matrix_of(x), input_of(copy));
    return input_of(copy);
  }
  // Inputs that are neighbouring columns of one tensor, the heads of a row, are rounded together.
  std::vector<DeviceInput> rounded_inputs(std::span<const MatmulJob> jobs) {
    std::vector<DeviceInput> inputs;
    for (size_t first = 0, end = 0; first < jobs.size(); first = end) {
      Tensor all = jobs[first].x;
      for (end = first + 1; end < jobs.size() && !all.rounded; ++end) {
        const Tensor next = jobs[end].x;
        if (next.rounded || next.data != all.data + all.cols || next.rows != all.rows || next.stride != all.stride ||
            all.cols % 8 != 0) {
          break;
        }
        all.cols += next.cols;
      }
      DeviceInput part = rounded(all);
      for (size_t i = first; i < end; ++i) {
        part.cols = jobs[i].x.cols;
        inputs.push_back(part);
        part.data += part.cols;
      }
    }
    return inputs;
  }
  /// What is left to be added of a sum once nothing is held back.
  CudaTreeSum sum_of(std::span<const Tensor> parts, std::span<const AddStep> steps);
  const int32_t* head_map(const std::vector<int32_t>& heads) {
    int32_t*& memory = head_maps_[heads];
    if (memory == nullptr) {
      memory = static_cast<int32_t*>(device_allocate(static_cast<int64_t>(heads.size()) * 4, "a table of heads"));
      if (memory == nullptr) return nullptr;
      // In the order of the stream: a plain copy may return before the bytes have come, and this stream waits for no
      // other.
      void* staged = staging_.take(static_cast<int64_t>(heads.size()) * 4);
      if (staged == nullptr) return nullptr;
      std::memcpy(staged, heads.data(), heads.size() * 4);
      cuda_ok(cudaMemcpyAsync(memory, staged, heads.size() * 4, cudaMemcpyHostToDevice, stream_), "a table of heads");
    }
    return memory;
  }
  DeviceRows place_batch(RunKind kind, const RowBatch& rows, int64_t padded, int64_t max_groups, int64_t max_keys,
                         std::byte* memory, const BatchLayout& layout);

  const CudaOptions options_;
  const std::string arch_;
  const std::string name_;
  const int multiprocessors_;
  cudaStream_t stream_ = nullptr;

  DeviceArena pass_arena_;
  std::array<DeviceArena, kRunKinds> run_arenas_;
  DeviceArena* arena_ = &pass_arena_;
  PinnedArena staging_;
  std::vector<float*> persistent_;
  std::map<std::vector<int32_t>, int32_t*> head_maps_;

  // Products, and a sum over slices, that wait for the operation after them: one or the other.
  std::vector<CudaMatmulJob> held_products_;
  bool held_ = false;
  CudaTreeSum held_sum_;
  DeviceMatrix held_residual_;

  std::map<RunKey, KeptRun> kept_;
  KeptRun* capturing_ = nullptr;
  std::byte* kept_batch_ = nullptr;  // rows of the kept run that is under way; [kBatchBytes]
};

}  // namespace tensorfold
