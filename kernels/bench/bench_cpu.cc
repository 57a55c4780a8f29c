#include "kernels/bench/bench_cpu.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::unique_ptr<Ops> must_make(const CpuOptions& options) {
  std::string error;
  std::unique_ptr<Ops> ops = make_cpu_ops(options, &error);
  kernel_check(ops != nullptr, error.c_str());
  return ops;
}

std::shared_ptr<ThreadPool> pool_of(const CpuOptions& options) {
  if (options.pool != nullptr) return options.pool;
  const int threads = options.threads > 0 ? options.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::make_shared<ThreadPool>(threads);
}

// Runs `body` until `seconds` have passed, at least three times; the shortest time.
template <typename Body>
double best_time(double seconds, const Body& body) {
  double best = 1e30;
  const double end = now() + seconds;
  for (int i = 0; i < 3 || now() < end; ++i) {
    const double start = now();
    body();
    best = std::min(best, now() - start);
  }
  return best;
}

}  // namespace

CpuLimits measure_limits(const CpuOptions& options, double seconds) {
  const KernelTable* kernels = kernels_for(options.isa);
  kernel_check(kernels != nullptr, "measure_limits: no such instruction set");
  const std::shared_ptr<ThreadPool> pool = pool_of(options);
  const int64_t threads = pool->threads();
  CpuLimits limits;

  constexpr int64_t kPiece = 65536, kPieces = 1024;  // 256 MiB
  MemoryBlock memory(kPiece * kPieces * 4);
  pool->parallel_for(kPieces, 1, [&](int64_t begin, int64_t end, int) {
    std::memset(memory.floats() + begin * kPiece, 0, static_cast<size_t>((end - begin) * kPiece) * 4);
  });
  std::vector<float> sums(static_cast<size_t>(threads) * 16);
  const double read = best_time(seconds, [&] {
    pool->parallel_for(kPieces, 16, [&](int64_t begin, int64_t end, int worker) {
      sums[static_cast<size_t>(worker) * 16] += kernels->read_all(memory.floats() + begin * kPiece, (end - begin) * kPiece);
    });
  });
  limits.bandwidth = static_cast<double>(memory.size()) / read;

  std::vector<double> operations(static_cast<size_t>(threads) * 8);
  constexpr int64_t kRuns = 64, kSteps = 20000;
  const double burn = best_time(seconds, [&] {
    pool->parallel_for(kRuns, 1, [&](int64_t, int64_t, int worker) {
      operations[static_cast<size_t>(worker) * 8] = kernels->burn_fma(kSteps, &sums[static_cast<size_t>(worker) * 16]);
    });
  });
  limits.fma_rate = *std::max_element(operations.begin(), operations.end()) * kRuns / burn;
  return limits;
}

double MatmulTimes::of_roofline(const CpuLimits& limits) const {
  return std::max(bytes / limits.bandwidth, operations / limits.fma_rate) / seconds;
}

MatmulTimes measure_matmuls(const CpuOptions& options, std::span<const MatmulShape> shapes, int64_t rows, double seconds) {
  const std::unique_ptr<Ops> ops = must_make(options);
  struct Call {
    std::unique_ptr<Weight> weight;
    Tensor x, out;
  };
  std::vector<Call> calls;
  MatmulTimes times;
  for (const MatmulShape& shape : shapes) {
    std::vector<uint16_t> values(static_cast<size_t>(shape.out * shape.cols));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3c00 + i * 2654435761u % 512);
    MatrixSource source;
    source.format = WeightFormat::kBf16;
    source.rows = shape.out;
    source.cols = shape.cols;
    source.data = reinterpret_cast<const std::byte*>(values.data());
    source.row_bytes = shape.cols * 2;
    const Tensor x = ops->persistent(rows, shape.cols), out = ops->persistent(rows, shape.out);
    ops->upload(std::vector<float>(static_cast<size_t>(rows * shape.cols), 0.5f), x);
    for (int64_t i = 0; i < shape.copies; ++i) {
      calls.push_back({ops->pack(std::span<const MatrixSource>(&source, 1)), x, out});
      times.bytes += static_cast<double>(calls.back().weight->bytes());
      times.operations += 2.0 * static_cast<double>(rows * shape.out * shape.cols);
    }
  }
  times.seconds = best_time(seconds, [&] {
    for (const Call& call : calls) ops->matmul(*call.weight, call.x, call.out);
  });
  return times;
}

std::vector<MatmulShape> small_llama_shapes() {
  return {{"qkv_proj", 960, 576, 30},
          {"o_proj", 576, 576, 30},
          {"gate_up_proj", 3072, 576, 30},
          {"down_proj slice", 576, 192, 240},
          {"lm_head", 49152, 576, 1}};
}

}  // namespace tensorfold
