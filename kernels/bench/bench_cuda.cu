#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>

#include "kernels/bench/bench_cuda.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.cuh"

namespace tensorfold {
namespace {

constexpr size_t kMostBytes = size_t{2} << 30;
constexpr int kReadThreads = 512;
constexpr int kReadUnroll = 8;
constexpr size_t kReadPiece = static_cast<size_t>(kReadThreads) * kReadUnroll * sizeof(uint4);  // of a block's turn
constexpr int kMmaThreads = 256;
constexpr int kMmaChains = 8;  // independent accumulators of a warp
constexpr int kMmaSteps = 4096;
constexpr int kNodes = 100;

__global__ void fill_random(uint32_t* words, size_t count) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + 12345u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    words[i] = x;
  }
}

// Pieces of the buffer, each block every gridDim-th; the sum is written only in a case that the compiler cannot rule
// out.
__global__ void __launch_bounds__(kReadThreads) read_all(const uint4* data, size_t pieces, uint32_t* sink) {
  uint32_t sum = 0;
  for (size_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const uint4* from = data + piece * (kReadThreads * kReadUnroll) + threadIdx.x;
    uint4 v[kReadUnroll];
#pragma unroll
    for (int i = 0; i < kReadUnroll; ++i) v[i] = __ldg(from + i * kReadThreads);
#pragma unroll
    for (int i = 0; i < kReadUnroll; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two bf16 of random sign and fraction with magnitudes in [0.5, 2).
__device__ __forceinline__ uint32_t random_pair(uint32_t seed) {
  uint32_t x = seed * 2654435761u + 97u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  return (x & 0x80ff80ffu) | 0x3f003f00u;
}

__global__ void __launch_bounds__(kMmaThreads) multiply(int steps, float* sink) {
  const uint32_t seed = (blockIdx.x * kMmaThreads + threadIdx.x) * 64;
  uint32_t a[2][4], b[kMmaChains][2];
  float d[kMmaChains][4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = random_pair(seed + i);
#pragma unroll
  for (int i = 0; i < 2 * kMmaChains; ++i) b[i / 2][i % 2] = random_pair(seed + 8 + i);
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < kMmaChains; ++c) mma(d[c], a[half], b[c][0], b[c][1]);
    }
  }
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kMmaChains; ++c) sum += d[c][0] + d[c][1] + d[c][2] + d[c][3];
  if (sum == 1.2345e-33f) *sink = sum;
}

__global__ void nothing() {
  pdl_launch();
  pdl_wait();
}

// Device memory, events and a graph that go with the scope.
class Bench {
 public:
  ~Bench() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    if (start_ != nullptr) cudaEventDestroy(start_);
    if (end_ != nullptr) cudaEventDestroy(end_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaFree(data_);
  }

  bool prepare() {
    int device = 0;
    size_t available = 0, total = 0;
    const bool ok = cuda_ok(cudaGetDevice(&device), "bench: device") &&
                    cuda_ok(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device), "bench: device") &&
                    cuda_ok(cudaMemGetInfo(&available, &total), "bench: free memory") &&
                    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "bench: stream") &&
                    cuda_ok(cudaEventCreate(&start_), "bench: event") &&
                    cuda_ok(cudaEventCreate(&end_), "bench: event");
    if (!ok) return false;
    pieces_ = std::max<size_t>(1, std::min(kMostBytes, available / 4) / kReadPiece);
    if (!cuda_ok(cudaMalloc(&data_, pieces_ * kReadPiece), "bench: memory to read")) return false;
    fill_random<<<static_cast<unsigned>(8 * sms_), 256, 0, stream_>>>(data_, pieces_ * kReadPiece / 4);
    return cuda_launched("bench: fill") && capture();
  }

  // Bytes a second, by as many blocks as the SMs hold or by a block a piece.
  double read(bool resident) {
    const unsigned blocks = static_cast<unsigned>(resident ? static_cast<size_t>(4 * sms_) : pieces_);
    const double seconds = time(
        [&] { read_all<<<blocks, kReadThreads, 0, stream_>>>(reinterpret_cast<const uint4*>(data_), pieces_, data_); });
    return static_cast<double>(pieces_ * kReadPiece) / seconds;
  }
  double mma() {  // operations a second
    const int blocks = 2 * sms_;
    const double seconds = time([&] {
      multiply<<<static_cast<unsigned>(blocks), kMmaThreads, 0, stream_>>>(kMmaSteps, reinterpret_cast<float*>(data_));
    });
    return 2.0 * 16 * 8 * 16 * 2 * kMmaChains * kMmaSteps * (kMmaThreads / 32) * blocks / seconds;
  }
  double node() {
    return time([&] { cuda_ok(cudaGraphLaunch(graph_, stream_), "bench: graph"); }) / kNodes;
  }

 private:
  bool capture() {
    if (!cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "bench: capture")) return false;
    for (int i = 0; i < kNodes; ++i) launch_kernel(nothing, dim3(1), dim3(32), 0, stream_, "bench: empty kernel");
    cudaGraph_t graph = nullptr;
    if (!cuda_ok(cudaStreamEndCapture(stream_, &graph), "bench: capture")) return false;
    const bool ok = cuda_ok(cudaGraphInstantiate(&graph_, graph, 0), "bench: graph");
    cudaGraphDestroy(graph);
    return ok;
  }
  double time(const std::function<void()>& work) {
    cuda_ok(cudaEventRecord(start_, stream_), "bench: event");
    work();
    cuda_launched("bench: launch");
    cuda_ok(cudaEventRecord(end_, stream_), "bench: event");
    float ms = 0;
    const bool ok = cuda_ok(cudaEventSynchronize(end_), "bench: wait") &&
                    cuda_ok(cudaEventElapsedTime(&ms, start_, end_), "bench: time");
    return ok ? std::max(1e-9, ms * 1e-3) : 1e30;
  }

  int sms_ = 0;
  size_t pieces_ = 0;
  uint32_t* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

CudaLimits measure_cuda_limits(double seconds) {
  Bench bench;
  CudaLimits limits;
  if (!bench.prepare()) return limits;
  limits.node_seconds = 1.0;
  const double end = now() + seconds;
  for (int turn = 0; turn < 4 || now() < end; ++turn) {
    const double bandwidth = std::max(bench.read(true), bench.read(false)), rate = bench.mma(), node = bench.node();
    if (turn == 0) continue;  // warms up clocks and caches of code
    limits.bandwidth = std::max(limits.bandwidth, bandwidth);
    limits.mma_rate = std::max(limits.mma_rate, rate);
    limits.node_seconds = std::min(limits.node_seconds, node);
  }
  return limits;
}

}  // namespace tensorfold
