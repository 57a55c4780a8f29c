// Mixtures of experts on the GPU: the router's choice, and the experts' products over rows grouped by expert.
//
// A pair is a row and one of its slots, numbered row * slots + slot. First the inner values of each pair, rounded to
// bf16: silu(gate x) * (up x), or relu(up x)^2; then for each slice that the rank owns the pair's output down_s inner;
// then of each row the weighted sum over its slots. Products are the chains of matmul.h: the same atom, the same
// operands at the same places, K ascending from +0. So an expert's output for a row has the bits of matmul, whichever
// rows share the launch.
//
// Nothing waits for the host: which experts there is work for is found on the device, in lists, and launches are as
// large as the worst case; blocks beyond the lists end at once. Three ways, one sum:
//   few pairs   each pair by itself, and a warp adds a row's slots one after the other (kRows);
//   otherwise   the pairs of an expert lie together in a list (a counting sort, rows ascending), cut into chunks of 8,
//               16 or 64 rows (kGrouped), whose outputs go to memory and are added by a kernel of their own.
// The sum is the same: slots ascending, the first product rounded, the others added by fma.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/experts_views.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// Most slices of an expert that a rank can own.
inline constexpr int kMostExpertSlices = 16;

/// The packed experts of a layer. Immutable; may be used by several streams of its device.
class CudaExperts : public ExpertWeights {
 public:
  /// Null with a sentence in `error`. All experts' weights lie in one piece of device memory.
  static std::unique_ptr<CudaExperts> create(std::span<const ExpertSource> sources, std::string* error);
  ~CudaExperts() override;

  int64_t count() const override { return static_cast<int64_t>(bytes_.size()); }
  int64_t slices() const override { return slices_; }
  int64_t hidden() const override { return hidden_; }
  int64_t bytes(int64_t expert) const override { return bytes_[static_cast<size_t>(expert)]; }
  int64_t values(int64_t expert) const override { return values_[static_cast<size_t>(expert)]; }

  bool gated() const { return gated_; }
  /// Most inner values of an expert.
  int64_t widest() const { return widest_; }
  /// Most tiles of 16 packed rows of an expert's inner matrix, and of an outer one.
  int64_t inner_tiles() const { return inner_tiles_; }
  int64_t outer_tiles() const { return outer_tiles_; }
  /// The formats that there are; mostly one.
  const std::vector<ExpertFormat>& inner_formats() const { return inner_formats_; }
  const std::vector<ExpertFormat>& outer_formats() const { return outer_formats_; }
  const ExpertMatrix* inner() const { return table_; }            // device, [count]
  const ExpertMatrix* outer() const { return table_ + count(); }  // device, [count][slices]

 private:
  CudaExperts() = default;
  bool pack(std::span<const ExpertSource> sources, std::string* error);
  bool make_table(std::span<const ExpertSource> sources, std::string* error);

  int64_t slices_ = 0, hidden_ = 0, widest_ = 0, inner_tiles_ = 0, outer_tiles_ = 0;
  bool gated_ = true;
  std::vector<int64_t> bytes_, values_;
  std::vector<std::unique_ptr<CudaWeight>> weights_;
  std::vector<size_t> first_weight_;  // of each expert: inner, then outer matrices
  std::vector<ExpertFormat> inner_formats_, outer_formats_;
  ExpertMatrix* table_ = nullptr;
};

/// RouteArgs of ops.h on the device. Rows of no sequence (group_of -1) get ids of -1, which no other function gives
/// work to, and weights of 0. Softmax: a lane of a warp adds experts lane, lane + 32, … ascending, then the lanes are
/// folded by a butterfly.
struct CudaRouteArgs {
  DeviceMatrix logits;
  const float* shared_gate = nullptr;  // [rows], shared_stride apart
  int64_t shared_stride = 0;
  bool shared = false;
  bool given = false;
  RouterScore score = RouterScore::kSoftmax;
  const float* bias = nullptr;
  bool renormalise = false;
  float scale = 1.0f;
  DeviceMatrix ids;
  DeviceMatrix weights;
  const int32_t* group_of = nullptr;  // [rows], or null: all rows count
};
/// Most experts of a layer, the shared one not counted.
inline constexpr int64_t kMostCudaExperts = 4096;
void cuda_route(cudaStream_t stream, const CudaRouteArgs& args);

/// Which way is taken: by rows and slots alone (kChosen), or as a test says.
enum class ExpertsWay : uint8_t { kChosen, kRows, kGrouped };

struct CudaExpertsArgs {
  const CudaExperts* experts = nullptr;
  DeviceInput x;                          // [rows, hidden]
  DeviceMatrix ids;                       // [rows, slots]; an id that is no expert's adds nothing
  DeviceMatrix weights;                   // [rows, slots]
  std::span<const DeviceMatrix> partial;  // [slices], of one stride
  float limit = 0.0f;
  ExpertsWay way = ExpertsWay::kChosen;
  void* workspace = nullptr;  // cuda_experts_workspace() bytes
};
int64_t cuda_experts_workspace(const CudaExperts& experts, int64_t rows, int64_t slots);
void cuda_experts(cudaStream_t stream, const CudaExpertsArgs& args);

}  // namespace tensorfold
