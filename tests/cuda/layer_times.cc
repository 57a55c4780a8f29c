// kernel_times' layers: each row is a layer's launches up to and including one more of them, so that the difference to
// the row before is what that launch costs where it stands. One sequence's rows, as in a graph for one.
#include "kernels/cuda/attention.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/rowwise_norm.h"
#include "tests/cuda/kernel_times.h"

namespace tensorfold {
namespace {

constexpr int64_t kSlices = 8;

// What a layer of any kind has: [norm, projection] mixer [output, norm, gate and up, down].
struct LayerShape {
  int64_t hidden, intermediate;
  int64_t width;   // of the projection
  int64_t values;  // of the mixer's output
  bool affine;     // MLX 4-bit, else bf16
};

class LayerWeights {
 public:
  static constexpr int kCopies = 3;  // together larger than L2

  explicit LayerWeights(const LayerShape& shape) : shape_(shape), copies_(kCopies), norm_(shape.hidden) {
    const Matrix in(shape.width, shape.hidden, shape.affine), half(shape.intermediate, shape.hidden, shape.affine);
    const Matrix out(shape.hidden, shape.values / kSlices, shape.affine);
    const Matrix down(shape.hidden, shape.intermediate / kSlices, shape.affine);
    for (Copy& copy : copies_) {
      copy.in = pack({&in.source, 1}, CudaPairing::kNone);
      copy.gate_up = pack(std::vector<MatrixSource>(2, half.source), CudaPairing::kGateUp);
      for (int64_t s = 0; s < kSlices; ++s) {
        copy.out.push_back(pack({&out.source, 1}, CudaPairing::kNone));
        copy.down.push_back(pack({&down.source, 1}, CudaPairing::kNone));
      }
    }
  }

  struct Copy {
    std::unique_ptr<CudaWeight> in, gate_up;
    std::vector<std::unique_ptr<CudaWeight>> out, down;
  };
  const LayerShape& shape() const { return shape_; }
  const Copy& copy(int i) const { return copies_[static_cast<size_t>(i % kCopies)]; }
  const float* norm() const { return norm_.data(); }

 private:
  LayerShape shape_;
  std::vector<Copy> copies_;
  Floats norm_;
};

// A layer with so many rows.
class Layer {
 public:
  Layer(const LayerWeights& weights, int64_t rows)
      : weights_(weights),
        rows_(rows),
        projected_(rows * weights.shape().width),
        residual_(rows * weights.shape().hidden),
        parts_(kSlices * rows * weights.shape().hidden, 1e-3f),
        x_(rows * weights.shape().hidden),
        mixed_(rows * weights.shape().values),
        activated_(rows * weights.shape().intermediate) {
    sum_.part_count = kSlices;
    sum_.part_stride = weights.shape().hidden;
    for (int64_t p = 0; p < kSlices; ++p) sum_.parts[p] = parts_.data() + p * rows * weights.shape().hidden;
    for (const AddStep& step : fold_plan(kSlices, {0, kSlices})) sum_.steps[sum_.step_count++] = step;
  }
  // Columns of the projection's output.
  DeviceMatrix part(int64_t first, int64_t cols) const {
    return {projected_.data() + first, rows_, cols, weights_.shape().width};
  }
  DeviceInput mixed() const { return {mixed_.values(), rows_, weights_.shape().values, weights_.shape().values}; }

  // mixer: its launches by name; launch(i) enqueues one for the i-th layer.
  using Mixer = std::vector<std::pair<const char*, std::function<void(int)>>>;
  void time(Times* times, const std::string& name, const Mixer& mixer) const {
    const int64_t hidden = weights_.shape().hidden, intermediate = weights_.shape().intermediate;
    const DeviceInput x{x_.values(), rows_, hidden, hidden};
    const DeviceInput activated{activated_.values(), rows_, intermediate, intermediate};
    cudaStream_t stream = times->stream();
    const auto sum_norm = [&](int) {
      cuda_sum_norm(stream, sum_, {residual_.data(), rows_, hidden, hidden}, weights_.norm(), 1e-6f, {}, x);
    };
    Mixer steps;
    steps.emplace_back("sum_norm", sum_norm);
    steps.emplace_back("in", [&](int i) {
      const CudaMatmulJob job{weights_.copy(i).in.get(), x, part(0, weights_.shape().width)};
      cuda_matmul(stream, {&job, 1});
    });
    steps.insert(steps.end(), mixer.begin(), mixer.end());
    steps.emplace_back("out", [&](int i) { sliced(stream, weights_.copy(i).out, mixed()); });
    steps.emplace_back("sum_norm", sum_norm);
    steps.emplace_back("gate_up",
                       [&](int i) { cuda_matmul_silu_mul(stream, *weights_.copy(i).gate_up, x, activated); });
    steps.emplace_back("down", [&](int i) { sliced(stream, weights_.copy(i).down, activated); });
    for (size_t count = 1; count <= steps.size(); ++count) {
      times->row(name + " up to " + steps[count - 1].first, rows_, 0, 0, [&](int i) {
        for (size_t step = 0; step < count; ++step) steps[step].second(i);
      });
    }
  }

 private:
  void sliced(cudaStream_t stream, const std::vector<std::unique_ptr<CudaWeight>>& weights, DeviceInput input) const {
    const int64_t hidden = weights_.shape().hidden, cols = input.cols / kSlices;
    std::vector<CudaMatmulJob> jobs;
    for (int64_t s = 0; s < kSlices; ++s) {
      jobs.push_back({weights[static_cast<size_t>(s)].get(),
                      {input.data + s * cols, rows_, cols, input.stride},
                      {parts_.data() + s * rows_ * hidden, rows_, hidden, hidden}});
    }
    cuda_matmul(stream, jobs);
  }

  const LayerWeights& weights_;
  int64_t rows_;
  Floats projected_, residual_, parts_;
  Halves x_, mixed_, activated_;
  CudaTreeSum sum_;
};

void time_recurrent_layer(Times* times) {
  const std::string name = "layer";
  if (!times->wanted(name + " up to")) return;
  const DeltaNetCase model(times->stream());
  const LayerWeights weights({5120, 17408, model.width, model.values, true});
  for (int64_t rows : {1, 8, 16}) {
    const Pass pass(rows, 4096, 1, 0, model.pointers);
    const Layer layer(weights, rows);
    const Buffer<float> workspace(cuda_delta_net_workspace(pass.rows, model.shape));
    CudaDeltaNetArgs args = model.args(layer.part(0, model.width).data, rows, layer.mixed());
    args.workspace = workspace.data();
    layer.time(times, name, {{"delta net", [&](int i) {
                                args.layer = i;
                                cuda_delta_net(times->stream(), pass.rows, args);
                              }}});
  }
}

struct AttentionModel {
  const char* name;
  int64_t hidden, heads, kv_heads, head_dim, pairs, intermediate;
  bool affine;
  bool gated;  // q is followed by a gate as wide
};

void time_attention_layer(Times* times, const AttentionModel& m) {
  const std::string name = std::string(m.name) + " attention layer";
  if (!times->wanted(name)) return;
  constexpr int64_t kContext = 1024;
  const int64_t queries = m.heads * m.head_dim, keys = m.kv_heads * m.head_dim, gate = m.gated ? queries : 0;
  const LayerWeights weights({m.hidden, m.intermediate, queries + gate + 2 * keys, queries, m.affine});
  std::unique_ptr<CudaKvCache> cache =
      CudaKvCache::create(kLaunches, Pass::page_count(kContext), m.kv_heads, m.head_dim, CudaKvFormat::kBf16);
  must(cudaSuccess, "kernels");
  std::vector<int32_t> kv_head_of;
  for (int64_t h = 0; h < m.heads; ++h) kv_head_of.push_back(static_cast<int32_t>(h / (m.heads / m.kv_heads)));
  for (int64_t rows : {1, 8, 16}) {
    const Pass pass(rows, kContext, 1, 0);
    const Layer layer(weights, rows);
    const Floats cos(rows * m.pairs, 0.5f), sin(rows * m.pairs, 0.5f);
    const Buffer<float> workspace(cuda_attention_workspace(pass.rows, m.heads, m.head_dim));
    CudaQkvArgs qkv;
    qkv.q = layer.part(0, queries);
    qkv.k = layer.part(queries + gate, keys);
    qkv.v = layer.part(queries + gate + keys, keys);
    qkv.heads = m.heads;
    qkv.cos = cos.data();
    qkv.sin = sin.data();
    qkv.pairs = qkv.table_stride = m.pairs;
    CudaAttentionArgs attention;
    attention.q = qkv.q;
    if (m.gated) attention.gate = layer.part(queries, queries);
    attention.out = layer.mixed();
    attention.heads = m.heads;
    attention.head_dim = m.head_dim;
    attention.kv_head_of = kv_head_of;
    attention.scale = 0.0625f;
    attention.workspace = workspace.data();
    layer.time(times, name,
               {{"qkv step", [&](int i) { cuda_qkv(times->stream(), *cache, i, pass.rows, qkv); }},
                {"attention", [&](int i) { cuda_attention(times->stream(), *cache, i, pass.rows, attention); }}});
  }
}

}  // namespace

void time_layers(Times* times) {
  time_recurrent_layer(times);
  time_attention_layer(times, {"27b", 5120, 24, 4, 256, 32, 17408, true, true});
  time_attention_layer(times, {"8b", 4096, 32, 8, 128, 64, 14336, false, false});
}

}  // namespace tensorfold
