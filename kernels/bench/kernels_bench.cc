// kernels_bench [isa [threads [seconds]]]: the kernels against this machine's measured limits.
#include <cstdio>
#include <cstdlib>

#include "kernels/bench/bench_cpu.h"

int main(int argc, char** argv) {
  using namespace tensorfold;
  CpuOptions options;
  if (argc > 1) options.isa = argv[1];
  if (argc > 2) options.threads = std::atoi(argv[2]);
  const double seconds = argc > 3 ? std::atof(argv[3]) : 1.0;
  std::string error;
  const auto ops = make_cpu_ops(options, &error);
  if (ops == nullptr) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return 1;
  }
  const CpuLimits limits = measure_limits(options, seconds);
  std::printf("%s: reads %.1f GB/s, %.0f GFLOP/s fp32 fma\n", ops->describe().c_str(), limits.bandwidth * 1e-9,
              limits.fma_rate * 1e-9);
  const std::vector<MatmulShape> shapes = small_llama_shapes();
  std::printf("%-16s %5s %10s %8s %6s %9s %6s %9s\n", "135M llama, bf16", "rows", "ms", "GB/s", "%", "GFLOP/s", "%", "roofline");
  const auto print = [&](const char* name, int64_t rows, const MatmulTimes& t) {
    std::printf("%-16s %5lld %10.3f %8.1f %5.0f%% %9.0f %5.0f%% %8.0f%%\n", name, static_cast<long long>(rows),
                t.seconds * 1e3, t.bytes / t.seconds * 1e-9, 100 * t.of_bandwidth(limits),
                t.operations / t.seconds * 1e-9, 100 * t.of_fma_rate(limits), 100 * t.of_roofline(limits));
    std::fflush(stdout);
  };
  for (int64_t rows : {1, 2, 4, 8, 16, 64, 512}) print("all", rows, measure_matmuls(options, shapes, rows, seconds));
  for (const MatmulShape& shape : shapes) {
    for (int64_t rows : {1, 8, 512}) {
      print(shape.name.c_str(), rows, measure_matmuls(options, std::span<const MatmulShape>(&shape, 1), rows, seconds));
    }
  }
  return 0;
}
