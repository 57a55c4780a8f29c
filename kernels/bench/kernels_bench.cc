// kernels_bench [isa [threads [seconds]]]: the kernels against this machine's measured limits, and the formats of
// weights beside one another, for so many seconds each.
#include <cstdio>
#include <cstdlib>

#include "kernels/bench/bench_cpu.h"

namespace tensorfold {
namespace {

// The same products in every format that is read as it is stored. Between two turns of a case
// the others read far more than caches hold, so each reads memory.
void print_formats(const CpuOptions& options, double seconds) {
  std::vector<MatmulCase> cases;
  for (const StoredFormat& format : stored_formats()) {
    for (int64_t rows : {1, 2, 4, 8, 64}) cases.push_back({format.name, {{"", 4096, 4096, 1}}, rows, format});
  }
  const CpuReport report = measure_cpu(options, cases, seconds);
  std::printf("reads %.1f GB/s\n%-16s %5s %10s %10s %8s %6s %9s\n", report.limits.bandwidth * 1e-9, "4096 x 4096",
              "rows", "MB read", "ms", "GB/s", "%", "roofline");
  for (size_t i = 0; i < cases.size(); ++i) {
    const MatmulTimes& t = report.times[i];
    std::printf("%-16s %5lld %10.1f %10.3f %8.1f %5.0f%% %8.0f%%\n", cases[i].name.c_str(),
                static_cast<long long>(cases[i].rows), t.bytes * 1e-6, t.seconds * 1e3, t.bytes / t.seconds * 1e-9,
                100 * t.of_bandwidth(report.limits), 100 * t.of_roofline(report.limits));
  }
}

}  // namespace
}  // namespace tensorfold

int main(int argc, char** argv) {
  using namespace tensorfold;
  CpuOptions options;
  if (argc > 1) options.isa = argv[1];
  if (argc > 2) options.threads = std::atoi(argv[2]);
  const double seconds = argc > 3 ? std::atof(argv[3]) : 10.0;
  std::string error;
  const auto ops = make_cpu_ops(options, &error);
  if (ops == nullptr) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return 1;
  }
  std::vector<MatmulCase> cases;
  for (int64_t rows : {1, 2, 4, 8, 16}) cases.push_back({"pass", small_llama_shapes(30, true), rows});
  // A prompt's rows need no logits; one layer, so that a turn is short.
  for (int64_t rows : {64, 512}) cases.push_back({"prompt layer", small_llama_shapes(1, false), rows});
  for (const MatmulShape& shape : small_llama_shapes(1, true)) cases.push_back({shape.name, {shape}, 512});
  cases.back().rows = 8;
  const CpuReport report = measure_cpu(options, cases, seconds);
  std::printf("%s: reads %.1f GB/s, %.0f GFLOP/s fp32 fma\n", ops->describe().c_str(), report.limits.bandwidth * 1e-9,
              report.limits.fma_rate * 1e-9);
  std::printf("%-16s %5s %10s %8s %6s %9s %6s %9s\n", "135M llama, bf16", "rows", "ms", "GB/s", "%", "GFLOP/s", "%",
              "roofline");
  for (size_t i = 0; i < cases.size(); ++i) {
    const MatmulTimes& t = report.times[i];
    std::printf("%-16s %5lld %10.3f %8.1f %5.0f%% %9.0f %5.0f%% %8.0f%%\n", cases[i].name.c_str(),
                static_cast<long long>(cases[i].rows), t.seconds * 1e3, t.bytes / t.seconds * 1e-9,
                100 * t.of_bandwidth(report.limits), t.operations / t.seconds * 1e-9,
                100 * t.of_fma_rate(report.limits), 100 * t.of_roofline(report.limits));
  }
  print_formats(options, seconds);
  return 0;
}
