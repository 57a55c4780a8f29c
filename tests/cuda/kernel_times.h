// What the parts of kernel_times share: rows of the table, tensors, a pass's rows.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/delta_net.h"
#include "tests/cuda/times.h"

namespace tensorfold {

inline constexpr size_t kBlock = 1000003;  // prime: rows of repeated values differ

struct Floats : Buffer<float> {
  explicit Floats(int64_t count, float scale = 1.0f) : Buffer<float>(count) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> block(static_cast<size_t>(std::min<int64_t>(count, kBlock)));
    for (float& x : block) x = normal(engine);
    fill(block);
  }
};

// bf16 values of random sign and fraction, 2^-2 in size.
struct Halves : Buffer<uint16_t> {
  explicit Halves(int64_t count) : Buffer<uint16_t>(count) {
    std::mt19937 engine(8);
    std::vector<uint16_t> block(static_cast<size_t>(std::min<int64_t>(count, kBlock)));
    for (uint16_t& x : block) x = static_cast<uint16_t>(0x3e80 | (engine() & 0x807f));
    fill(block);
  }
  __nv_bfloat16* values() const { return reinterpret_cast<__nv_bfloat16*>(data()); }
};

class Times {
 public:
  Times(std::string only, double seconds) : only_(std::move(only)) {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    limits_ = measure_cuda_limits(seconds);
    must(cudaSuccess, "kernels");
    std::printf("reads %.0f GB/s, mma %.0f TFLOP/s, an empty kernel in a graph %.2f us\n", limits_.bandwidth * 1e-9,
                limits_.mma_rate * 1e-12, limits_.node_seconds * 1e6);
    std::printf("%-34s %6s %10s %8s %6s %8s %6s\n", "kernel", "rows", "us", "GB/s", "%", "TFLOP/s", "%");
  }
  ~Times() { cudaStreamDestroy(stream_); }
  cudaStream_t stream() const { return stream_; }
  bool wanted(const std::string& name) const { return name.find(only_) != std::string::npos; }

  // launch(i) enqueues the i-th launch. Bytes and operations of one launch; 0: not told.
  void row(const std::string& name, int64_t rows, double bytes, double operations,
           const std::function<void(int)>& launch) {
    const double seconds = best_seconds(stream_, name.c_str(), launch);
    std::printf("%-34s %6lld %10.2f", name.c_str(), static_cast<long long>(rows), seconds * 1e6);
    if (bytes > 0) {
      std::printf(" %8.0f %5.1f%%", bytes / seconds * 1e-9, 100 * bytes / seconds / limits_.bandwidth);
    } else {
      std::printf(" %8s %6s", "", "");
    }
    if (operations > 0) {
      std::printf(" %8.1f %5.1f%%", operations / seconds * 1e-12, 100 * operations / seconds / limits_.mma_rate);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  std::string only_;
  cudaStream_t stream_ = nullptr;
  CudaLimits limits_;
};

inline std::unique_ptr<CudaWeight> pack(std::span<const MatrixSource> blocks, CudaPairing pairing) {
  std::string error;
  std::unique_ptr<CudaWeight> weight = pack_cuda_weight(blocks, pairing, &error);
  if (weight == nullptr) {
    std::fprintf(stderr, "pack: %s%s\n", error.c_str(), cuda_failure().c_str());
    std::exit(1);
  }
  return weight;
}

// One sequence's rows at the end of a context.
struct Pass {
  Pass(int64_t count, int64_t context, int64_t certain, int64_t accepted, const std::vector<float*>& recurrent = {})
      : group_count(std::vector<int32_t>{1}),
        tokens(std::vector<int32_t>(static_cast<size_t>(count), 1)),
        positions(positions_of(count, context)),
        group_of(std::vector<int32_t>(static_cast<size_t>(count), 0)),
        groups(std::vector<DeviceGroup>{group(count, context, certain, accepted)}),
        pages(page_table(context)),
        states(recurrent) {
    rows.rows = static_cast<int32_t>(count);
    rows.max_groups = 1;
    rows.max_keys = context;
    rows.group_count = group_count.data();
    rows.tokens = tokens.data();
    rows.positions = positions.data();
    rows.group_of = group_of.data();
    rows.groups = groups.data();
    rows.pages = pages.data();
    rows.states = states.data();
  }
  static int64_t page_count(int64_t context) { return (context + kPageTokens - 1) / kPageTokens; }
  static std::vector<int64_t> positions_of(int64_t count, int64_t context) {
    std::vector<int64_t> all(static_cast<size_t>(count));
    std::iota(all.begin(), all.end(), context - count);
    return all;
  }
  static DeviceGroup group(int64_t count, int64_t context, int64_t certain, int64_t accepted) {
    DeviceGroup group;
    group.first_position = context - count;
    group.rows = static_cast<int32_t>(count);
    group.certain = static_cast<int32_t>(certain);
    group.accepted = static_cast<int32_t>(accepted);
    group.page_count = static_cast<int32_t>(page_count(context));
    return group;
  }
  // Pages of a sequence lie anywhere; the same order for every length, so that earlier rows find theirs.
  static std::vector<int32_t> page_table(int64_t context) {
    std::vector<int32_t> all(static_cast<size_t>(page_count(context)));
    for (size_t i = 0; i < all.size(); ++i)
      all[i] = static_cast<int32_t>(i ^ 1) < static_cast<int32_t>(all.size()) ? static_cast<int32_t>(i ^ 1)
                                                                              : static_cast<int32_t>(i);
    return all;
  }

  Buffer<int32_t> group_count, tokens;
  Buffer<int64_t> positions;
  Buffer<int32_t> group_of;
  Buffer<DeviceGroup> groups;
  Buffer<int32_t> pages;
  Buffer<float*> states;
  DeviceRows rows;
};

/// The gated delta net of a 27B model: a state a launch, weights, and where a projection's columns lie.
class DeltaNetCase {
 public:
  explicit DeltaNetCase(cudaStream_t stream)
      : shape(model_shape()),
        channels(shape.channels()),
        values(shape.v_heads * shape.dv),
        width(channels + values + 2 * shape.v_heads),
        conv_(channels * shape.conv_kernel, 0.5f),
        a_log_(shape.v_heads, 0.5f),
        dt_bias_(shape.v_heads, 0.5f),
        norm_(shape.dv),
        k_head_of_(shape.k_head_of) {
    for (int i = 0; i < kLaunches; ++i) {
      states_.push_back(CudaRecurrentState::create(shape, stream));
      must(cudaSuccess, "kernels");
      pointers.push_back(states_.back()->data());
    }
  }
  /// `projected`: [rows, width]. Without layer and workspace.
  CudaDeltaNetArgs args(float* projected, int64_t rows, DeviceInput out) const {
    CudaDeltaNetArgs args;
    args.shape = &shape;
    args.qkv = {projected, rows, channels, width};
    args.z = {projected + channels, rows, values, width};
    args.b = {projected + channels + values, rows, shape.v_heads, width};
    args.a = {projected + channels + values + shape.v_heads, rows, shape.v_heads, width};
    args.conv = conv_.data();
    args.a_log = a_log_.data();
    args.dt_bias = dt_bias_.data();
    args.norm = norm_.data();
    args.k_head_of = k_head_of_.data();
    args.out = out;
    return args;
  }

  const DeltaNetShape shape;
  const int64_t channels, values, width;
  std::vector<float*> pointers;

 private:
  static DeltaNetShape model_shape() {
    DeltaNetShape shape;
    shape.k_heads = 16;
    shape.v_heads = 48;
    shape.dk = shape.dv = 128;
    for (int32_t v = 0; v < 48; ++v) shape.k_head_of.push_back(v / 3);
    return shape;
  }
  std::vector<std::unique_ptr<CudaRecurrentState>> states_;
  Floats conv_, a_log_, dt_bias_, norm_;
  Buffer<int32_t> k_head_of_;
};

/// Layers' launches in their order (layer_times.cc).
void time_layers(Times* times);

}  // namespace tensorfold
