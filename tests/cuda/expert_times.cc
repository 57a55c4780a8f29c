// expert_times [--rows N,N…]: times the experts of one layer of a published shape (Qwen3-30B-A3B: hidden 2,048, 128
// experts of 768 columns, 8 a row; MLX 4-bit, groups of 64: 4 slices; and bf16, 8 slices), each way, beside the read
// bandwidth and matrix rate measured in the same run. Launches take turns on choices of experts that are together
// larger than the L2 cache; bytes are those of the different experts that a launch's rows chose.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/cuda/experts.h"
#include "tests/cuda/times.h"

namespace tensorfold {
namespace {

constexpr int64_t kHidden = 2048, kColumns = 768, kExperts = 128, kChosen = 8;

// Random choices of different experts, as many launches as take turns; how many different experts each launch has.
std::vector<float*> choices(int64_t rows, double* different) {
  std::mt19937 engine(11);
  std::vector<float*> all;
  for (int i = 0; i < kLaunches; ++i) {
    std::vector<float> ids;
    std::set<int> chosen;
    for (int64_t r = 0; r < rows; ++r) {
      std::set<int> row;
      while (row.size() < kChosen) row.insert(static_cast<int>(engine() % kExperts));
      ids.insert(ids.end(), row.begin(), row.end());
      chosen.insert(row.begin(), row.end());
    }
    *different += static_cast<double>(chosen.size()) / kLaunches;
    all.push_back(on_device(ids));
  }
  return all;
}

void time_experts(cudaStream_t stream, const CudaLimits& limits, bool affine, const std::vector<int64_t>& rows_list) {
  const int64_t slices = affine ? 4 : 8, part = kColumns / slices;
  const Matrix inner(kColumns, kHidden, affine), outer(kHidden, kColumns, affine);
  ExpertSource source{inner.source, inner.source, {}};
  for (int64_t s = 0; s < slices; ++s) source.down.push_back(outer.source.slice_cols(s * part, part));
  const std::vector<ExpertSource> sources(static_cast<size_t>(kExperts), source);
  std::string error;
  const std::unique_ptr<CudaExperts> experts = CudaExperts::create(sources, &error);
  if (experts == nullptr) {
    std::fprintf(stderr, "%s %s\n", error.c_str(), cuda_failure().c_str());
    std::exit(1);
  }
  for (const int64_t rows : rows_list) {
    double different = 0;
    const std::vector<float*> ids = choices(rows, &different);
    const std::vector<uint16_t> halves(static_cast<size_t>(rows * kHidden), 0x3c80);
    CudaExpertsArgs args;
    args.experts = experts.get();
    args.x = {reinterpret_cast<__nv_bfloat16*>(on_device(halves)), rows, kHidden, kHidden};
    const std::vector<float> weights(static_cast<size_t>(rows * kChosen), 0.125f);
    args.weights = {on_device(weights), rows, kChosen, kChosen};
    std::vector<DeviceMatrix> partial;
    const std::vector<float> zeros(static_cast<size_t>(rows * kHidden));
    for (int64_t s = 0; s < slices; ++s) partial.push_back({on_device(zeros), rows, kHidden, kHidden});
    args.partial = partial;
    void* workspace = nullptr;
    must(cudaMalloc(&workspace, static_cast<size_t>(cuda_experts_workspace(*experts, rows, kChosen))), "memory");
    args.workspace = workspace;
    const double bytes = different * static_cast<double>(experts->bytes(0));
    const double operations = 2.0 * static_cast<double>(rows * kChosen * experts->values(0));
    for (const ExpertsWay way : {ExpertsWay::kRows, ExpertsWay::kGrouped}) {
      if (way == ExpertsWay::kRows && rows > 16) continue;
      args.way = way;
      const double seconds = best_seconds(stream, "experts", [&](int i) {
        args.ids = {ids[static_cast<size_t>(i)], rows, kChosen, kChosen};
        cuda_experts(stream, args);
      });
      std::printf("%-5s %-8s %5lld rows %7.1f experts %9.2f us %7.0f GB/s %5.1f%% %7.1f TFLOP/s %5.1f%%\n",
                  affine ? "4-bit" : "bf16", way == ExpertsWay::kRows ? "by rows" : "grouped",
                  static_cast<long long>(rows), different, seconds * 1e6, bytes / seconds * 1e-9,
                  100 * bytes / seconds / limits.bandwidth, operations / seconds * 1e-12,
                  100 * operations / seconds / limits.mma_rate);
      std::fflush(stdout);
    }
    cudaFree(workspace);
  }
}

// The router's kernel alone.
void time_route(cudaStream_t stream, int64_t rows) {
  std::vector<float> logits(static_cast<size_t>(rows * kExperts));
  std::mt19937 engine(3);
  for (float& x : logits) x = static_cast<float>(engine() % 1000) * 0.01f;
  const std::vector<float> out(static_cast<size_t>(rows * kChosen));
  CudaRouteArgs args;
  args.logits = {on_device(logits), rows, kExperts, kExperts};
  args.renormalise = true;
  args.ids = {on_device(out), rows, kChosen, kChosen};
  args.weights = {on_device(out), rows, kChosen, kChosen};
  const double seconds = best_seconds(stream, "router", [&](int) { cuda_route(stream, args); });
  std::printf("router %5lld rows %9.2f us\n", static_cast<long long>(rows), seconds * 1e6);
}

int run(const std::vector<int64_t>& rows_list) {
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const CudaLimits limits = measure_cuda_limits(0.5);
  std::printf("reads %.0f GB/s, mma %.0f TFLOP/s\n", limits.bandwidth * 1e-9, limits.mma_rate * 1e-12);
  for (const int64_t rows : {int64_t{1}, int64_t{16}, int64_t{512}}) time_route(stream, rows);
  time_experts(stream, limits, true, rows_list);
  time_experts(stream, limits, false, rows_list);
  return 0;
}

}  // namespace
}  // namespace tensorfold

int main(int argc, char** argv) {
  std::vector<int64_t> rows;
  if (argc == 3 && std::strcmp(argv[1], "--rows") == 0) {
    for (char* at = argv[2]; *at != 0;) {
      const long long value = std::strtoll(at, &at, 10);
      if (value < 1 || value > 8192) return 2;
      rows.push_back(value);
      if (*at == ',') ++at;
    }
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: expert_times [--rows N,N...]\n");
    return 2;
  }
  if (rows.empty()) rows = {1, 2, 4, 8, 16, 64, 512, 2048};
  return tensorfold::run(rows);
}
