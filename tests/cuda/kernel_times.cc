// kernel_times [--only NAME] [--seconds N] [--copies N]: times each kernel of the backend at the shapes of a 27B model
// (MLX 4-bit, groups of 64) and of an 8B one (bf16), beside the read bandwidth and matrix rate measured in the same
// run. A row is the best of several runs of a CUDA graph of 20 launches that take turns on copies of the weights,
// caches or states which are together larger than the L2 cache. --only: rows whose name contains NAME. --copies: so
// many copies of products' weights instead; 1 keeps small ones in L2, which shows what a kernel costs when memory is no
// limit.
#include "tests/cuda/kernel_times.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/delta_net.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/rowwise_norm.h"
#include "kernels/ops/block_ops.h"

namespace tensorfold {
namespace {

constexpr int64_t kRotateBytes = int64_t{256} << 20;  // several times the L2 cache of any GPU here
int64_t forced_copies = 0;                            // --copies

// The same weight in memory of its own.
std::unique_ptr<CudaWeight> copy_of(const CudaWeight& weight) {
  std::vector<CudaWeightSegment> segments = weight.segments();
  for (CudaWeightSegment& segment : segments) {
    void* memory = nullptr;
    must(cudaMalloc(&memory, static_cast<size_t>(segment.bytes())), "memory");
    must(cudaMemcpy(memory, segment.data, static_cast<size_t>(segment.bytes()), cudaMemcpyDeviceToDevice), "copy");
    segment.memory = std::shared_ptr<void>(memory, [](void* p) { cudaFree(p); });
    segment.data = static_cast<const uint8_t*>(memory);
  }
  return std::make_unique<CudaWeight>(weight.out_features(), weight.in_features(), weight.pairing(),
                                      std::move(segments));
}

struct MatmulShape {
  std::string name;
  int64_t out = 0;
  int64_t cols = 0;
  int64_t slices = 1;  // so many matrices, each with columns of its own
  bool gate_up = false;
};

void time_matmul(Times* times, const MatmulShape& shape, bool affine, const std::vector<int64_t>& rows_list) {
  if (!times->wanted(shape.name)) return;
  std::vector<std::vector<std::unique_ptr<CudaWeight>>> copies(1);
  int64_t bytes = 0;
  {
    const Matrix matrix(shape.gate_up ? shape.out / 2 : shape.out, shape.cols, affine);
    const std::vector<MatrixSource> blocks(shape.gate_up ? 2 : 1, matrix.source);
    copies[0].push_back(pack(blocks, shape.gate_up ? CudaPairing::kGateUp : CudaPairing::kNone));
    while (static_cast<int64_t>(copies[0].size()) < shape.slices) copies[0].push_back(copy_of(*copies[0][0]));
    for (const auto& weight : copies[0]) bytes += weight->bytes();
  }
  const int64_t wanted =
      forced_copies > 0 ? forced_copies : std::clamp<int64_t>(kRotateBytes / bytes + 1, 2, kLaunches);
  while (static_cast<int64_t>(copies.size()) < wanted) {
    copies.emplace_back();
    for (const auto& weight : copies[0]) copies.back().push_back(copy_of(*weight));
  }
  for (int64_t rows : rows_list) {
    const int64_t in = shape.cols * shape.slices;
    const Halves x(rows * in);
    const Floats out(shape.gate_up ? 1 : rows * shape.out * shape.slices);
    const Halves activated(shape.gate_up ? rows * shape.out / 2 : 8);
    const double operations = 2.0 * static_cast<double>(rows * shape.out * in);
    const auto jobs = [&](int i) {
      const auto& weights = copies[static_cast<size_t>(i) % copies.size()];
      std::vector<CudaMatmulJob> all;
      for (int64_t s = 0; s < shape.slices; ++s) {
        all.push_back({weights[static_cast<size_t>(s)].get(),
                       {x.values() + s * shape.cols, rows, shape.cols, in},
                       {out.data() + s * rows * shape.out, rows, shape.out, shape.out}});
      }
      return all;
    };
    times->row(shape.name, rows, static_cast<double>(bytes), rows >= 64 ? operations : 0, [&](int i) {
      if (!shape.gate_up) return cuda_matmul(times->stream(), jobs(i));
      cuda_matmul_silu_mul(times->stream(), *copies[static_cast<size_t>(i) % copies.size()][0],
                           {x.values(), rows, in, in}, {activated.values(), rows, shape.out / 2, shape.out / 2});
    });
    if (shape.slices > 1 && rows > 64) {
      times->row(shape.name + ", added up", rows, static_cast<double>(bytes), operations,
                 [&](int i) { cuda_matmul_sum(times->stream(), jobs(i)); });
    }
  }
}

constexpr int64_t kHeads = 24, kKvHeads = 4, kHeadDim = 256, kPairs = 32;
constexpr int64_t kQkvWidth = 2 * kHeads * kHeadDim + 2 * kKvHeads * kHeadDim;  // q, gate, k, v

// What attention reads and writes besides the cache.
struct AttentionTensors {
  explicit AttentionTensors(int64_t rows)
      : rows(rows),
        qkv(rows * kQkvWidth),
        cos(rows * kPairs, 0.5f),
        sin(rows * kPairs, 0.5f),
        norm(std::vector<float>(kHeadDim, 1.0f)),
        out(rows * kHeads * kHeadDim) {}
  DeviceMatrix part(int64_t first, int64_t cols) const { return {qkv.data() + first, rows, cols, kQkvWidth}; }
  CudaQkvArgs qkv_args() const {
    CudaQkvArgs args;
    args.q = part(0, kHeads * kHeadDim);
    args.k = part(2 * kHeads * kHeadDim, kKvHeads * kHeadDim);
    args.v = part(2 * kHeads * kHeadDim + kKvHeads * kHeadDim, kKvHeads * kHeadDim);
    args.heads = kHeads;
    args.q_norm = args.k_norm = norm.data();
    args.cos = cos.data();
    args.sin = sin.data();
    args.pairs = args.table_stride = kPairs;
    return args;
  }
  int64_t rows;
  Floats qkv, cos, sin;
  Buffer<float> norm;
  Halves out;
};

// A block of drafted rows over the whole context, and over a window of it.
void time_block(Times* times, const std::string& name, const CudaKvCache& cache, int64_t layers, const Pass& pass,
                const AttentionTensors& tensors, const CudaAttentionArgs& attention) {
  CudaBlockAttentionArgs args;
  args.common = attention;
  args.common.gate = {};
  args.k = tensors.part(2 * kHeads * kHeadDim, kKvHeads * kHeadDim);
  args.v = tensors.part(2 * kHeads * kHeadDim + kKvHeads * kHeadDim, kKvHeads * kHeadDim);
  for (const int64_t window : {int64_t{0}, int64_t{4096}}) {
    const Buffer<float> workspace(cuda_block_attention_workspace(pass.rows, kHeads, kHeadDim, window));
    args.common.workspace = workspace.data();
    args.window = window;
    const int64_t keys = window > 0 ? std::min(window, pass.rows.max_keys) : pass.rows.max_keys;
    const double bytes = static_cast<double>(keys * cache.page_bytes() / cache.layers() / kPageTokens);
    const double operations = 4.0 * static_cast<double>(tensors.rows * keys * kHeads * kHeadDim);
    times->row(name + (window > 0 ? " window" : ""), tensors.rows, bytes, operations,
               [&](int i) { cuda_block_attention(times->stream(), cache, i % layers, pass.rows, args); });
  }
}

void time_attention(Times* times, int64_t context, CudaKvFormat format, const std::vector<int64_t>& rows_list) {
  const bool fp8 = format == CudaKvFormat::kFp8;
  std::string suffix = std::to_string(context / 1024);
  suffix.append(fp8 ? "k fp8" : "k bf16");
  if (!times->wanted("qkv step" + suffix) && !times->wanted("attention" + suffix)) return;
  const int64_t layer_bytes = context * kKvHeads * kHeadDim * 2 * (fp8 ? 1 : 2);
  const int64_t layers = std::clamp<int64_t>(kRotateBytes / layer_bytes, 1, kLaunches);
  std::unique_ptr<CudaKvCache> cache =
      CudaKvCache::create(layers, Pass::page_count(context), kKvHeads, kHeadDim, format);
  must(cudaSuccess, "kernels");
  {
    const int64_t chunk = std::min<int64_t>(context, 2048);
    const AttentionTensors tensors(chunk);
    for (int64_t end = chunk; end <= context; end += chunk) {
      const Pass pass(chunk, end, chunk, 0);
      const Buffer<int32_t> pages(Pass::page_table(context));
      DeviceRows rows = pass.rows;
      rows.pages = pages.data();
      must(cudaDeviceSynchronize(), "copies");
      for (int64_t layer = 0; layer < layers; ++layer) {
        cuda_qkv(times->stream(), *cache, layer, rows, tensors.qkv_args());
      }
      must(cudaStreamSynchronize(times->stream()), "filling the cache");
    }
  }
  std::vector<int32_t> kv_head_of;
  for (int64_t h = 0; h < kHeads; ++h) kv_head_of.push_back(static_cast<int32_t>(h / (kHeads / kKvHeads)));
  for (int64_t rows : rows_list) {
    const AttentionTensors tensors(rows);
    const Pass pass(rows, context, rows > 16 ? rows : 1, 0);
    if (times->wanted("qkv step" + suffix)) {
      times->row("qkv step" + suffix, rows, 0, 0,
                 [&](int i) { cuda_qkv(times->stream(), *cache, i % layers, pass.rows, tensors.qkv_args()); });
    }
    if (!times->wanted("attention" + suffix)) continue;
    const Buffer<float> workspace(cuda_attention_workspace(pass.rows, kHeads, kHeadDim));
    CudaAttentionArgs args;
    args.q = tensors.part(0, kHeads * kHeadDim);
    args.gate = tensors.part(kHeads * kHeadDim, kHeads * kHeadDim);
    args.out = {tensors.out.values(), rows, kHeads * kHeadDim, kHeads * kHeadDim};
    args.heads = kHeads;
    args.head_dim = kHeadDim;
    args.kv_head_of = kv_head_of;
    args.scale = 0.0625f;
    args.workspace = workspace.data();
    const double keys =
        static_cast<double>(rows) * (static_cast<double>(context) - 0.5 * static_cast<double>(rows - 1));
    const double operations = 4.0 * keys * kHeads * kHeadDim;
    times->row("attention" + suffix, rows, static_cast<double>(layer_bytes), rows > 1 ? operations : 0,
               [&](int i) { cuda_attention(times->stream(), *cache, i % layers, pass.rows, args); });
    if (rows == kMostBlockRows) time_block(times, "block attention" + suffix, *cache, layers, pass, tensors, args);
  }
}

void time_delta_net(Times* times) {
  if (!times->wanted("delta_net")) return;
  const DeltaNetCase model(times->stream());
  const int64_t state_bytes = model.shape.v_heads * model.shape.dk * model.shape.dv * 4;
  for (int64_t rows : {1, 8, 16, 2048}) {
    const bool prompt = rows > model.shape.max_window;
    const Pass pass(rows, 4096, prompt ? rows : 1, prompt || rows == 1 ? 0 : rows - 1, model.pointers);
    const Floats in(rows * model.width);
    const Halves out(rows * model.values);
    const Buffer<float> workspace(cuda_delta_net_workspace(pass.rows, model.shape));
    CudaDeltaNetArgs args = model.args(in.data(), rows, {out.values(), rows, model.values, model.values});
    args.workspace = workspace.data();
    times->row(prompt      ? "delta_net"
               : rows == 1 ? "delta_net"
                           : "delta_net, all accepted before",
               rows, prompt ? 0 : 2.0 * static_cast<double>(state_bytes), 0, [&](int i) {
                 args.layer = i;
                 cuda_delta_net(times->stream(), pass.rows, args);
               });
  }
}

void time_sum_norm(Times* times, int64_t parts_count, const std::vector<int64_t>& rows_list) {
  constexpr int64_t kHidden = 5120;
  const std::string name = "sum_norm " + std::to_string(parts_count) + " x 5120";
  if (!times->wanted(name)) return;
  const Floats weight(kHidden);
  for (int64_t rows : rows_list) {
    const Floats parts(parts_count * rows * kHidden, 1e-3f), residual(rows * kHidden);
    const Halves out(rows * kHidden);
    CudaTreeSum sum;
    sum.part_count = static_cast<int>(parts_count);
    sum.part_stride = kHidden;
    for (int64_t p = 0; p < parts_count; ++p) sum.parts[p] = parts.data() + p * rows * kHidden;
    for (const AddStep& step : fold_plan(parts_count, {0, parts_count})) sum.steps[sum.step_count++] = step;
    const double bytes = static_cast<double>(rows * kHidden * (parts_count * 4 + 4 + 4 + 2));
    for (const auto& [path, how] :
         {std::pair(NormPath::kCluster, ", clusters"), std::pair(NormPath::kBlock, ", blocks")}) {
      times->row(name + how, rows, bytes, 0, [&, path = path](int) {
        cuda_sum_norm_by(path, times->stream(), sum, {residual.data(), rows, kHidden, kHidden}, weight.data(), 1e-6f,
                         {}, {out.values(), rows, kHidden, kHidden});
      });
    }
  }
}

void time_candidates(Times* times) {
  constexpr int64_t kColumns = 248320;
  if (!times->wanted("candidates")) return;
  for (int64_t n : {1, 20, 64, 1000}) {
    for (int64_t rows : {1, 8, 16}) {
      const Floats logits(rows * kColumns, 3.0f);
      const Buffer<uint8_t> workspace(cuda_candidates_workspace(rows, kColumns, n));
      const Buffer<Candidate> out(rows * n);
      times->row("candidates, best " + std::to_string(n), rows, static_cast<double>(rows * kColumns * 4), 0, [&](int) {
        cuda_candidates(times->stream(), {logits.data(), rows, kColumns, kColumns}, 0, n, workspace.data(), out.data());
      });
    }
  }
}

void time_all(Times* times) {
  const std::vector<int64_t> all = {1, 2, 4, 8, 16, 64, 2048}, decode = {1, 2, 4, 8, 16, 64};
  time_matmul(times, {"27b in 16480x5120", 16480, 5120}, true, all);
  time_matmul(times, {"27b qkv 14336x5120", 14336, 5120}, true, all);
  time_matmul(times, {"27b out 8 x 5120x768", 5120, 768, 8}, true, all);
  time_matmul(times, {"27b gate_up 34816x5120", 34816, 5120, 1, true}, true, all);
  time_matmul(times, {"27b down 8 x 5120x2176", 5120, 2176, 8}, true, all);
  time_matmul(times, {"27b head 248320x5120", 248320, 5120}, true, decode);
  time_matmul(times, {"8b qkv 6144x4096 bf16", 6144, 4096}, false, {1, 8, 16, 2048});
  time_matmul(times, {"8b out 8 x 4096x512 bf16", 4096, 512, 8}, false, {1, 8, 16, 2048});
  time_matmul(times, {"8b gate_up 28672x4096 bf16", 28672, 4096, 1, true}, false, {1, 8, 16, 2048});
  time_matmul(times, {"8b down 8 x 4096x1792 bf16", 4096, 1792, 8}, false, {1, 8, 16, 2048});
  time_matmul(times, {"8b head 128256x4096 bf16", 128256, 4096}, false, {1, 8, 16});
  if (forced_copies > 0) {  // small enough for L2
    time_matmul(times, {"warm in 16480x1024", 16480, 1024}, true, {1, 8, 16});
    time_matmul(times, {"warm in 16480x2048", 16480, 2048}, true, {1, 8, 16});
    time_matmul(times, {"warm gate_up 34816x1024", 34816, 1024, 1, true}, true, {1, 8, 16});
    time_matmul(times, {"warm 4224x5120", 4224, 5120}, true, {1, 8, 16});
  }
  time_sum_norm(times, 8, all);
  time_sum_norm(times, 4, {2048});  // what products that are added up leave
  time_attention(times, 1024, CudaKvFormat::kBf16, {1, 8, 16});
  time_attention(times, 8192, CudaKvFormat::kBf16, {1, 8, 16, 2048});
  time_attention(times, 32768, CudaKvFormat::kBf16, {1, 8, 16});
  time_attention(times, 32768, CudaKvFormat::kFp8, {1, 8, 16});
  time_attention(times, 262144, CudaKvFormat::kBf16, {1, 8, 16});
  time_delta_net(times);
  time_layers(times);
  time_candidates(times);
}

}  // namespace
}  // namespace tensorfold

int main(int argc, char** argv) {
  std::string only;
  double seconds = 1.0;
  for (int i = 1; i < argc; ++i) {
    if (i + 1 < argc && std::strcmp(argv[i], "--only") == 0) {
      only = argv[++i];
    } else if (i + 1 < argc && std::strcmp(argv[i], "--seconds") == 0) {
      seconds = std::atof(argv[++i]);
    } else if (i + 1 < argc && std::strcmp(argv[i], "--copies") == 0) {
      tensorfold::forced_copies = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: kernel_times [--only NAME] [--seconds N] [--copies N]\n");
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device on this machine\n");
    return 1;
  }
  tensorfold::Times times(only, seconds);
  tensorfold::time_all(&times);
  return 0;
}
