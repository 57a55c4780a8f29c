// What the programs that time kernels share: ends on errors, device copies, random matrices in a checkpoint's form, and
// the time of a launch in a graph. These programs leave small memory to their end.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/bench/bench_cuda.h"
#include "kernels/cuda/device.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

inline constexpr int kLaunches = 20;  // of a graph
inline constexpr int kTurns = 5;      // of which the best counts

/// Ends the program on this error or on one that the backend remembers.
inline void must(cudaError_t error, const char* what) {
  const std::string failure = cuda_failure();
  if (error == cudaSuccess && failure.empty()) return;
  std::fprintf(stderr, "%s: %s %s\n", what, cudaGetErrorString(error), failure.c_str());
  std::exit(1);
}

template <typename T>
T* on_device(const std::vector<T>& values) {
  T* data = nullptr;
  must(cudaMalloc(&data, sizeof(T) * values.size()), "memory");
  must(cudaMemcpy(data, values.data(), sizeof(T) * values.size(), cudaMemcpyHostToDevice), "copy");
  return data;
}

/// Device memory that lives for a scope.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : count_(count) {
    must(cudaMalloc(&data_, sizeof(T) * static_cast<size_t>(std::max<int64_t>(1, count))), "memory");
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(static_cast<int64_t>(values.size())) {
    must(cudaMemcpy(data_, values.data(), sizeof(T) * values.size(), cudaMemcpyHostToDevice), "copy");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* data() const { return data_; }
  // Repeats a block of values.
  void fill(const std::vector<T>& block) {
    for (int64_t at = 0; at < count_; at += static_cast<int64_t>(block.size())) {
      const int64_t n = std::min(count_ - at, static_cast<int64_t>(block.size()));
      must(cudaMemcpy(data_ + at, block.data(), sizeof(T) * static_cast<size_t>(n), cudaMemcpyHostToDevice), "copy");
    }
  }

 private:
  T* data_ = nullptr;
  int64_t count_;
};

/// Seconds of a launch: launch(i) enqueues the i-th of kLaunches, which are captured into a graph; the best of several
/// runs after a first one.
inline double best_seconds(cudaStream_t stream, const char* what, const std::function<void(int)>& launch) {
  cudaEvent_t start = nullptr, end = nullptr;
  must(cudaEventCreate(&start), "event");
  must(cudaEventCreate(&end), "event");
  must(cudaDeviceSynchronize(), "copies");  // of inputs, made on another stream
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kLaunches; ++i) launch(i);
  cudaGraph_t graph = nullptr;
  must(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t exec = nullptr;
  must(cudaGraphInstantiate(&exec, graph, 0), "graph");
  float best = 1e30f;
  for (int turn = 0; turn <= kTurns; ++turn) {
    must(cudaEventRecord(start, stream), "event");
    must(cudaGraphLaunch(exec, stream), "graph");
    must(cudaEventRecord(end, stream), "event");
    must(cudaEventSynchronize(end), what);
    float ms = 0;
    must(cudaEventElapsedTime(&ms, start, end), "time");
    if (turn > 0) best = std::min(best, ms);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  return best * 1e-3 / kLaunches;
}

/// A random matrix in a checkpoint's form: MLX 4-bit in groups of 64, or bf16.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, bool affine) {
    std::mt19937_64 engine(rows * 31 + cols);
    const auto fill = [&](std::vector<uint64_t>& words, int64_t bytes, uint64_t keep, uint64_t set) {
      words.resize(static_cast<size_t>(bytes + 7) / 8);
      for (uint64_t& word : words) word = (engine() & keep) | set;
    };
    source.rows = rows;
    source.cols = cols;
    source.format = affine ? WeightFormat::kMlxAffine : WeightFormat::kBf16;
    source.row_bytes = affine ? cols / 2 : cols * 2;
    // bf16: about 2^-7.
    fill(data, rows * source.row_bytes, affine ? ~uint64_t{0} : 0x807f807f807f807f, affine ? 0 : 0x3c003c003c003c00);
    source.data = reinterpret_cast<const std::byte*>(data.data());
    if (!affine) return;
    source.bits = 4;
    source.group = 64;
    source.scale_row_bytes = cols / 64 * 2;
    fill(scales, rows * source.scale_row_bytes, 0x007f007f007f007f, 0x3b003b003b003b00);  // about 2^-9
    fill(biases, rows * source.scale_row_bytes, 0x007f007f007f007f, 0xbc803c80bc803c80);  // about 2^-6
    source.scales = reinterpret_cast<const std::byte*>(scales.data());
    source.biases = reinterpret_cast<const std::byte*>(biases.data());
  }
  MatrixSource source;
  std::vector<uint64_t> data, scales, biases;
};

}  // namespace tensorfold
