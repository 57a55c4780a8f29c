#include "kernels/cuda/cuda_ops.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>

#include "kernels/cuda/arena.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/delta_net.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/rowwise.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int64_t kMostGraphRows = 64;
constexpr int64_t kBatchBytes = int64_t{8} << 20;  // of a kept run's rows and page tables

int64_t row_bucket(int64_t rows) {
  int64_t bucket = 1;
  while (bucket < rows) bucket *= 2;
  return bucket;
}

int64_t context_bucket(int64_t keys) {
  int64_t bucket = Ops::kKeptContext;
  while (bucket < keys) bucket *= 4;
  return bucket;
}

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

const float* vector_data(const Vector* v) { return v == nullptr ? nullptr : static_cast<const CudaVector*>(v)->data(); }
const CudaWeight& cuda_weight(const Weight& w) { return static_cast<const CudaWeight&>(w); }

DeviceMatrix matrix_of(Tensor t) {
  kernel_check(!t.rounded, "an fp32 tensor was expected");
  return {t.data, t.rows, t.cols, t.stride};
}

DeviceInput input_of(Tensor t) {
  kernel_check(t.rounded, "a rounded tensor was expected");
  return {reinterpret_cast<__nv_bfloat16*>(t.data), t.rows, t.cols, t.stride};
}

const DeviceRows& device_rows(const RowBatch& rows) {
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

constexpr int kMostDevices = 64;
std::array<std::atomic<int>, kMostDevices> backends{};  // by device

class CudaOps : public Ops, public CudaStreamOps {
 public:
  CudaOps(const CudaOptions& options, const cudaDeviceProp& properties)
      : options_(options),
        arch_("sm_" + std::to_string(properties.major) + std::to_string(properties.minor)),
        name_(properties.name),
        multiprocessors_(properties.multiProcessorCount) {
    ++backends[static_cast<size_t>(options_.device)];
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
    --backends[static_cast<size_t>(options_.device)];
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
  void matmul(const Weight& w, Tensor x, Tensor out) override {
    const MatmulJob job{&w, x, out};
    matmul_many({&job, 1});
  }
  void matmul_many(std::span<const MatmulJob> jobs) override {
    flush();
    std::array<CudaMatmulJob, 8> launch;
    for (size_t first = 0; first < jobs.size(); first += launch.size()) {
      const size_t count = std::min(launch.size(), jobs.size() - first);
      for (size_t i = 0; i < count; ++i) {
        const MatmulJob& job = jobs[first + i];
        kernel_check(job.x.cols == job.weight->in_features() && job.out.cols == job.weight->out_features() &&
                         job.x.rows == job.out.rows,
                     "matmul: shapes differ");
        launch[i] = {&cuda_weight(*job.weight), rounded(job.x), matrix_of(job.out)};
      }
      cuda_matmul(stream_, std::span<const CudaMatmulJob>(launch.data(), count));
    }
  }
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
  // Held back until the next operation: mostly it is the norm of the sum, and both are one launch then.
  void sum_tree(std::span<const Tensor> parts, std::span<const AddStep> steps, Tensor into) override {
    flush();
    held_sum_ = tree_of(parts, steps);
    held_residual_ = matrix_of(into);
    held_ = true;
  }
  void fold(std::span<const Tensor> parts, std::span<const AddStep> steps, std::span<const int> roots,
            std::span<const Tensor> out) override {
    flush();
    std::array<DeviceMatrix, 16> outs;
    kernel_check(roots.size() == out.size() && out.size() <= outs.size(), "fold: too many roots");
    for (size_t i = 0; i < out.size(); ++i) outs[i] = matrix_of(out[i]);
    cuda_fold(stream_, tree_of(parts, steps), parts[0].rows, parts[0].cols, roots.data(),
              static_cast<int>(roots.size()), outs.data());
  }
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
  void flush() override {
    if (!held_) return;
    held_ = false;
    cuda_sum_norm(stream_, held_sum_, held_residual_, nullptr, 0, {}, {});
  }
  void silu_mul(Tensor gate_up, Tensor out) override {
    flush();
    cuda_silu_mul(stream_, matrix_of(gate_up), out.rounded ? DeviceMatrix{} : matrix_of(out),
                  out.rounded ? input_of(out) : DeviceInput{});
  }
  void sigmoid_mul(Tensor x, Tensor gate) override {
    flush();
    cuda_sigmoid_mul(stream_, matrix_of(x), matrix_of(gate));
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
  std::unique_ptr<RecurrentState> make_recurrent_state(const StateShape& shape) override {
    use_device();
    std::unique_ptr<RecurrentState> state = CudaRecurrentState::create(std::get<DeltaNetShape>(shape), stream_);
    if (state == nullptr) kernel_check(false, cuda_failure().c_str());
    return state;
  }
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
  void delta_net(const DeltaNetArgs& in) override {
    flush();
    const ScratchScope scope(*this);
    const DeviceRows& rows = device_rows(in.rows);
    CudaDeltaNetArgs args;
    args.shape = in.shape;
    args.layer = in.layer;
    args.qkv = matrix_of(in.qkv);
    args.z = matrix_of(in.z);
    args.b = matrix_of(in.b);
    args.a = matrix_of(in.a);
    args.conv = vector_data(in.conv);
    args.a_log = vector_data(in.a_log);
    args.dt_bias = vector_data(in.dt_bias);
    args.norm = vector_data(in.norm);
    args.k_head_of = head_map(in.shape->k_head_of);
    args.eps = in.eps;
    args.out = input_of(in.out);
    args.workspace = static_cast<float*>(take(4 * cuda_delta_net_workspace(rows, *in.shape)));
    cuda_delta_net(stream_, rows, args);
  }

  std::vector<std::vector<Candidate>> top_candidates(Tensor logits, int32_t first_id, int64_t n) override;

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
  using RunKey = std::tuple<RunKind, int64_t, int64_t>;  // rows, keys

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
  static CudaTreeSum tree_of(std::span<const Tensor> parts, std::span<const AddStep> steps) {
    CudaTreeSum sum;
    kernel_check(parts.size() <= std::size(sum.parts) && steps.size() <= std::size(sum.steps), "sum: too many parts");
    for (const Tensor& part : parts) {
      kernel_check(part.stride == parts[0].stride, "sum: strides differ");
      sum.parts[sum.part_count++] = matrix_of(part).data;
    }
    sum.part_stride = parts[0].stride;
    for (const AddStep& step : steps) sum.steps[sum.step_count++] = step;
    return sum;
  }
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
  DeviceRows place_batch(const RowBatch& rows, int64_t padded, int64_t max_groups, int64_t max_keys, std::byte* memory,
                         const BatchLayout& layout);

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

  // A sum over slices that waits for the operation after it.
  bool held_ = false;
  CudaTreeSum held_sum_;
  DeviceMatrix held_residual_;

  std::map<RunKey, KeptRun> kept_;
  KeptRun* capturing_ = nullptr;
  std::byte* kept_batch_ = nullptr;  // rows of the kept run that is under way; [kBatchBytes]
};

// Copies the batch to `memory` and says where its parts lie.
DeviceRows CudaOps::place_batch(const RowBatch& rows, int64_t padded, int64_t max_groups, int64_t max_keys,
                                std::byte* memory, const BatchLayout& layout) {
  DeviceRows out;
  out.rows = static_cast<int32_t>(padded);
  out.max_groups = static_cast<int32_t>(max_groups);
  out.max_keys = max_keys;
  out.group_count = reinterpret_cast<int32_t*>(memory + layout.group_count);
  out.tokens = reinterpret_cast<int32_t*>(memory + layout.tokens);
  out.positions = reinterpret_cast<int64_t*>(memory + layout.positions);
  out.group_of = reinterpret_cast<int32_t*>(memory + layout.group_of);
  out.groups = reinterpret_cast<DeviceGroup*>(memory + layout.groups);
  out.states = reinterpret_cast<float**>(memory + layout.states);
  out.pages = reinterpret_cast<int32_t*>(memory + layout.pages);

  auto* staged = static_cast<std::byte*>(staging_.take(layout.bytes));
  if (staged == nullptr) return out;
  std::memset(staged, 0, static_cast<size_t>(layout.bytes));
  *reinterpret_cast<int32_t*>(staged + layout.group_count) = static_cast<int32_t>(rows.groups.size());
  std::copy(rows.tokens.begin(), rows.tokens.end(), reinterpret_cast<int32_t*>(staged + layout.tokens));
  std::copy(rows.positions.begin(), rows.positions.end(), reinterpret_cast<int64_t*>(staged + layout.positions));
  auto* group_of = reinterpret_cast<int32_t*>(staged + layout.group_of);
  std::fill_n(group_of, padded, -1);
  auto* groups = reinterpret_cast<DeviceGroup*>(staged + layout.groups);
  auto* pages = reinterpret_cast<int32_t*>(staged + layout.pages);
  int32_t page = 0;
  for (size_t i = 0; i < rows.groups.size(); ++i) {
    const RowGroup& group = rows.groups[i];
    const int64_t needed = (group.first_position + group.rows + kPageTokens - 1) / kPageTokens;
    kernel_check(group.first_row >= 0 && group.rows >= 0 && group.first_row + group.rows <= padded,
                 "row group outside the pass");
    kernel_check(static_cast<int64_t>(group.pages.size()) >= needed, "row group: page table too short");
    groups[i].first_position = group.first_position;
    groups[i].first_row = static_cast<int32_t>(group.first_row);
    groups[i].rows = static_cast<int32_t>(group.rows);
    groups[i].accepted = static_cast<int32_t>(group.accepted);
    groups[i].certain = static_cast<int32_t>(group.certain);
    groups[i].first_page = page;
    groups[i].page_count = static_cast<int32_t>(needed);
    std::copy_n(group.pages.begin(), needed, pages + page);
    page += static_cast<int32_t>(needed);
    std::fill_n(group_of + group.first_row, group.rows, static_cast<int32_t>(i));
  }
  auto* states = reinterpret_cast<float**>(staged + layout.states);
  for (size_t layer = 0; layer < rows.recurrent.size(); ++layer) {
    for (size_t i = 0; i < rows.recurrent[layer].size(); ++i) {
      states[layer * static_cast<size_t>(max_groups) + i] =
          static_cast<CudaRecurrentState*>(rows.recurrent[layer][i])->data();
    }
  }
  cuda_ok(cudaMemcpyAsync(memory, staged, static_cast<size_t>(layout.bytes), cudaMemcpyHostToDevice, stream_),
          "rows of a pass");
  return out;
}

Tensor CudaOps::run(RunKind kind, const RowBatch& rows, Tensor input, bool keep, const RunBody& body) {
  flush();
  const int64_t count = rows.rows(), layers = static_cast<int64_t>(rows.recurrent.size());
  int64_t keys = std::max<int64_t>(rows.least_keys, 1), page_count = 0;
  for (const RowGroup& group : rows.groups) {
    keys = std::max(keys, group.first_position + group.rows);
    page_count += (group.first_position + group.rows + kPageTokens - 1) / kPageTokens;
  }
  const int64_t padded = row_bucket(count);
  const BatchLayout kept_layout(padded, padded, layers, page_count);
  RowBatch batch = rows;
  if (!options_.graphs || !keep || count == 0 || count > kMostGraphRows || kept_layout.bytes > kBatchBytes) {
    const int64_t groups = static_cast<int64_t>(rows.groups.size());
    const BatchLayout layout(count, groups, layers, page_count);
    auto* memory = static_cast<std::byte*>(take(layout.bytes));
    const DeviceRows device = place_batch(rows, count, groups, keys, memory, layout);
    batch.device = &device;
    const Tensor result = body(batch, input);
    flush();
    return result;
  }

  if (kept_batch_ == nullptr) {
    kept_batch_ = static_cast<std::byte*>(device_allocate(kBatchBytes, "rows of kept launches"));
    kernel_check(kept_batch_ != nullptr, "the GPU has no memory left for the rows of kept launches");
  }
  const int64_t context = context_bucket(keys);
  const DeviceRows device = place_batch(rows, padded, padded, context, kept_batch_, kept_layout);
  std::vector<int32_t> tokens(rows.tokens.begin(), rows.tokens.end());
  std::vector<int64_t> positions(rows.positions.begin(), rows.positions.end());
  tokens.resize(static_cast<size_t>(padded));
  positions.resize(static_cast<size_t>(padded));
  batch.tokens = tokens;
  batch.positions = positions;
  batch.device = &device;

  arena_ = &run_arenas_[static_cast<size_t>(kind)];
  arena_->release({});
  Tensor padded_input;
  if (input.data != nullptr) {
    padded_input = scratch(padded, input.cols);
    const size_t width = static_cast<size_t>(input.cols) * 4;
    cuda_ok(cudaMemcpy2DAsync(padded_input.data, static_cast<size_t>(padded_input.stride) * 4, input.data,
                              static_cast<size_t>(input.stride) * 4, width, static_cast<size_t>(count),
                              cudaMemcpyDeviceToDevice, stream_),
            "input rows");
  }
  const ScratchMark begin = arena_->mark();
  const RunKey key{kind, padded, context};
  Tensor result;
  if (const auto kept = kept_.find(key); kept != kept_.end()) {
    for (const Segment& segment : kept->second.segments) {
      cuda_ok(cudaGraphLaunch(segment.graph, stream_), "launching a kept pass");
      if (!segment.step) continue;
      cuda_ok(cudaStreamSynchronize(stream_), "the GPU");
      segment.step();
    }
    result = kept->second.result;
  } else {
    // Once as it is: this pass needs the result, and every kernel is loaded afterwards. Then for the graph.
    result = body(batch, padded_input);
    flush();
    arena_->release(begin);
    KeptRun run;
    run.result = result;
    if (cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "capturing a pass")) {
      capturing_ = &run;
      body(batch, padded_input);
      flush();
      end_segment();
      capturing_ = nullptr;
      if (run.complete) {
        kept_[key] = std::move(run);
      } else {
        destroy(run);
      }
    }
  }
  arena_ = &pass_arena_;
  return result.data == nullptr ? result : result.row_range(0, count);
}

std::vector<std::vector<Candidate>> CudaOps::top_candidates(Tensor logits, int32_t first_id, int64_t n) {
  flush();
  std::vector<std::vector<Candidate>> rows(static_cast<size_t>(logits.rows));
  n = std::min(n, logits.cols);
  if (n <= 0 || logits.rows == 0) return rows;
  const auto better = [](const Candidate& a, const Candidate& b) {
    const bool a_nan = a.logit != a.logit, b_nan = b.logit != b.logit;
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && a.logit != b.logit) return a.logit > b.logit;
    return a.id < b.id;
  };
  if (n > kMaxCudaCandidates) {  // whole rows are wanted anyway
    std::vector<float> host(static_cast<size_t>(logits.cols));
    for (int64_t r = 0; r < logits.rows; ++r) {
      download(logits.row_range(r, 1), host);
      std::vector<Candidate>& row = rows[static_cast<size_t>(r)];
      for (size_t i = 0; i < host.size(); ++i) row.push_back({host[i], first_id + static_cast<int32_t>(i)});
      std::partial_sort(row.begin(), row.begin() + n, row.end(), better);
      row.resize(static_cast<size_t>(n));
    }
    return rows;
  }
  const ScratchScope scope(*this);
  const size_t bytes = static_cast<size_t>(logits.rows * n) * sizeof(Candidate);
  void* workspace = take(cuda_candidates_workspace(logits.rows, logits.cols, n));
  auto* best = static_cast<Candidate*>(take(static_cast<int64_t>(bytes)));
  auto* host = static_cast<Candidate*>(staging_.take(static_cast<int64_t>(bytes)));
  if (host == nullptr) return rows;
  cuda_candidates(stream_, matrix_of(logits), first_id, n, workspace, best);
  cuda_ok(cudaMemcpyAsync(host, best, bytes, cudaMemcpyDeviceToHost, stream_), "candidates");
  if (!cuda_ok(cudaStreamSynchronize(stream_), "candidates")) return rows;
  for (int64_t r = 0; r < logits.rows; ++r) {
    for (int64_t i = 0; i < n; ++i) rows[static_cast<size_t>(r)].push_back(host[r * n + i]);
  }
  return rows;
}

}  // namespace

int cuda_backends_on(int device) {
  return device < 0 || device >= kMostDevices ? 0 : backends[static_cast<size_t>(device)].load();
}

int cuda_device_count() {
  // Several ranks of one process on one GPU wait for each other: each needs a hardware queue of its own. Read by the
  // driver at its first call.
  // And a kernel that is loaded at its first launch may wait for what waits for that launch.
  static const int set = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) + setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  static_cast<void>(set);
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options, std::string* error) {
  const int count = cuda_device_count();
  if (options.device < 0 || options.device >= std::min(count, kMostDevices)) {
    *error = count == 0 ? "no CUDA device: this machine has no GPU, or its driver is missing or older than CUDA 13"
                        : "GPU " + std::to_string(options.device) + " does not exist: this machine has " +
                              std::to_string(count) + ", counted from 0";
    return nullptr;
  }
  if (options.kv_format != "bf16" && options.kv_format != "fp8") {
    *error = "keys and values can be kept as bf16 or fp8, not '" + options.kv_format + "'";
    return nullptr;
  }
  cudaDeviceProp properties;
  if (const cudaError_t failed = cudaGetDeviceProperties(&properties, options.device); failed != cudaSuccess) {
    *error = "GPU " + std::to_string(options.device) + ": " + cudaGetErrorString(failed);
    return nullptr;
  }
  if (properties.major < 8) {
    *error = std::string(properties.name) + " has no bf16 matrix instructions (compute capability " +
             std::to_string(properties.major) + "." + std::to_string(properties.minor) + "; 8.0 or newer is needed)";
    return nullptr;
  }
  return std::make_unique<CudaOps>(options, properties);
}

CudaStreamOps* cuda_stream_ops(Ops& ops) { return dynamic_cast<CudaStreamOps*>(&ops.undecorated()); }

}  // namespace tensorfold
