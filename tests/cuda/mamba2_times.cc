// mamba2_times [--seconds N]: times a Mamba2 layer of a published shape (Nemotron 3.5 Lightning: 64 heads of 64, states
// of 128, 8 groups, 4 taps) beside the read bandwidth measured in the same run. A row is the best of several runs of a
// CUDA graph of 20 launches that take turns on states which are together larger than the L2 cache. Bytes are those of
// the states, read and written once.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/mamba2.h"
#include "tests/cuda/times.h"

namespace tensorfold {
namespace {

float* random_on_device(int64_t count, float scale) {
  std::mt19937 engine(7);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(engine);
  return on_device(values);
}

// `sequences` sequences of `rows` rows each, of which so many are certain, after so many accepted ones. Memory is left
// to the end of the program.
struct Case {
  const char* name;
  int64_t sequences, rows, certain, accepted;
};

DeviceRows device_rows(const Case& one, const std::vector<float*>& states) {
  std::vector<int32_t> group_of;
  std::vector<DeviceGroup> groups(static_cast<size_t>(one.sequences));
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].first_row = static_cast<int32_t>(group_of.size());
    groups[g].rows = static_cast<int32_t>(one.rows);
    groups[g].accepted = static_cast<int32_t>(one.accepted);
    groups[g].certain = static_cast<int32_t>(one.certain);
    group_of.insert(group_of.end(), static_cast<size_t>(one.rows), static_cast<int32_t>(g));
  }
  DeviceRows rows;
  rows.rows = static_cast<int32_t>(group_of.size());
  rows.max_groups = static_cast<int32_t>(one.sequences);
  rows.group_count = on_device(std::vector<int32_t>{static_cast<int32_t>(one.sequences)});
  rows.group_of = on_device(group_of);
  rows.groups = on_device(groups);
  rows.states = on_device(states);
  return rows;
}

class Times {
 public:
  explicit Times(double seconds) {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    limits_ = measure_cuda_limits(seconds);
    std::printf("reads %.0f GB/s\n%-40s %6s %10s %8s %6s\n", limits_.bandwidth * 1e-9, "", "rows", "us", "GB/s", "%");
  }

  void measure(const Case& one) {
    const Mamba2Shape shape = {.heads = 64, .head_dim = 64, .groups = 8, .state = 128};
    std::vector<std::unique_ptr<CudaRecurrentState>> states;
    std::vector<float*> pointers;
    for (int64_t i = 0; i < kLaunches * one.sequences; ++i) {
      states.push_back(CudaRecurrentState::create(shape, stream_));
      must(cudaSuccess, "states");
      pointers.push_back(states.back()->data());
    }
    const DeviceRows rows = device_rows(one, pointers);
    const int64_t width = shape.width(), all = width + shape.channels() + shape.heads;
    float* in = random_on_device(rows.rows * all, 1.0f);
    CudaMamba2Args args;
    args.shape = &shape;
    args.z = {in, rows.rows, width, all};
    args.xbc = {in + width, rows.rows, shape.channels(), all};
    args.dt = {in + width + shape.channels(), rows.rows, shape.heads, all};
    args.conv = random_on_device(shape.channels() * shape.conv_kernel, 0.5f);
    args.conv_bias = random_on_device(shape.channels(), 0.5f);
    args.a_log = random_on_device(shape.heads, 0.5f);
    args.dt_bias = random_on_device(shape.heads, 0.5f);
    args.d = random_on_device(shape.heads, 0.5f);
    args.norm = random_on_device(width, 1.0f);
    args.most_step = 1e30f;
    args.out = {on_device(std::vector<__nv_bfloat16>(static_cast<size_t>(rows.rows * width))), rows.rows, width, width};
    args.workspace = random_on_device(cuda_mamba2_workspace(rows, shape), 1.0f);
    const double seconds = best_seconds(stream_, one.name, [&](int i) {
      args.layer = i;
      cuda_mamba2(stream_, rows, args);
    });
    const double bytes = 2.0 * static_cast<double>(one.sequences * width * shape.state * 4);
    std::printf("%-40s %6d %10.2f %8.0f %5.1f%%\n", one.name, rows.rows, seconds * 1e6, bytes / seconds * 1e-9,
                100 * bytes / seconds / limits_.bandwidth);
    std::fflush(stdout);
    must(cudaDeviceSynchronize(), "states");
  }

 private:
  cudaStream_t stream_ = nullptr;
  CudaLimits limits_;
};

}  // namespace
}  // namespace tensorfold

int main(int argc, char** argv) {
  double seconds = 1.0;
  if (argc == 3 && std::strcmp(argv[1], "--seconds") == 0) {
    seconds = std::atof(argv[2]);
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: mamba2_times [--seconds N]\n");
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device on this machine\n");
    return 1;
  }
  tensorfold::Times times(seconds);
  for (const tensorfold::Case& one : {tensorfold::Case{"one row", 1, 1, 1, 0},
                                      {"one sequence's window", 1, 8, 1, 0},
                                      {"… all accepted before", 1, 8, 1, 7},
                                      {"… of 16, all accepted before", 1, 16, 1, 15},
                                      {"16 sequences, a row each", 16, 1, 1, 0},
                                      {"a prompt", 1, 64, 64, 0},
                                      {"a prompt", 1, 512, 512, 0},
                                      {"a prompt", 1, 2048, 2048, 0},
                                      {"two prompts", 2, 1024, 1024, 0}}) {
    times.measure(one);
  }
  return 0;
}
