// The router's choice: a warp a row, which decides everything of the row by itself.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/candidates_key.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// Logits to scores in `score`; each lane does experts lane, lane + 32, … (and reads no other's).
__device__ void make_scores(const float* logits, int experts, RouterScore kind, float* score, int lane) {
  if (kind == RouterScore::kSigmoid) {
    for (int e = lane; e < experts; e += 32) score[e] = sigmoid(logits[e]);
    return;
  }
  if (kind == RouterScore::kSqrtSoftplus) {
    for (int e = lane; e < experts; e += 32) score[e] = __fsqrt_rn(softplus(logits[e]));
    return;
  }
  float most = -INFINITY;
  for (int e = lane; e < experts; e += 32) most = fmaxf(most, logits[e]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, distance));
  float sum = 0.0f;
  for (int e = lane; e < experts; e += 32) {
    const float power = __expf(__fsub_rn(logits[e], most));
    score[e] = power;
    sum = __fadd_rn(sum, power);
  }
  // Lane l and lane l ^ distance add the same two numbers, so that all lanes have the same sum.
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, distance));
  for (int e = lane; e < experts; e += 32) score[e] = __fdiv_rn(score[e], sum);
}

// The largest of a lane's keys below `bound`; 0: none is left.
__device__ __forceinline__ uint64_t next_key(const uint64_t* keys, int experts, uint64_t bound, int lane) {
  uint64_t best = 0;
  for (int e = lane; e < experts; e += 32) {
    const uint64_t key = keys[e];
    if (key < bound && key > best) best = key;
  }
  return best;
}

__device__ __forceinline__ uint64_t largest(uint64_t key) {
  const unsigned high = static_cast<unsigned>(key >> 32);
  const unsigned best = __reduce_max_sync(kAll, high);
  const unsigned low = __reduce_max_sync(kAll, high == best ? static_cast<unsigned>(key) : 0u);
  return static_cast<uint64_t>(best) << 32 | low;
}

__global__ void __launch_bounds__(32) route_kernel(const __grid_constant__ CudaRouteArgs a) {
  extern __shared__ uint64_t keys[];  // [experts], then the scores
  __shared__ float slot_score[kMostExpertSlots];
  pdl_launch();
  pdl_wait();
  const int lane = threadIdx.x, experts = static_cast<int>(a.logits.cols), slots = static_cast<int>(a.ids.cols);
  const int chosen = slots - (a.shared ? 1 : 0);
  const int64_t row = blockIdx.x;
  float* ids = a.ids.data + row * a.ids.stride;
  float* weights = a.weights.data + row * a.weights.stride;
  if (a.group_of != nullptr && a.group_of[row] < 0) {  // a row of no sequence
    for (int j = lane; j < slots; j += 32) ids[j] = -1.0f, weights[j] = 0.0f;
    return;
  }
  const float* logits = a.logits.data + row * a.logits.stride;
  auto* score = reinterpret_cast<float*>(keys + experts);
  make_scores(logits, experts, a.score, score, lane);
  if (!a.given) {
    for (int e = lane; e < experts; e += 32) {
      const float value = a.bias == nullptr ? logits[e] : __fadd_rn(score[e], a.bias[e]);
      keys[e] = candidate_key(__float_as_uint(value), e);
    }
    // Each lane offers the best of its own keys that are left; the one that is taken looks for its next.
    uint64_t offer = next_key(keys, experts, ~uint64_t{0}, lane);
    for (int j = 0; j < chosen; ++j) {
      const uint64_t best = largest(offer);
      if (lane == 0) ids[j] = static_cast<float>(candidate_column(best));
      if (offer == best) {
        slot_score[j] = score[candidate_column(best)];
        offer = next_key(keys, experts, best, lane);
      }
    }
  } else {
    __syncwarp();
    for (int j = lane; j < chosen; j += 32) {
      // A number that is no expert's must show: the row becomes NaN.
      const float id = ids[j];
      const bool there = id >= 0.0f && id < static_cast<float>(experts);
      slot_score[j] = there ? score[static_cast<int>(id)] : NAN;
      if (!there) ids[j] = 0.0f;
    }
  }
  __syncwarp();
  float sum = 0.0f;
  for (int j = 0; j < chosen; ++j) sum = __fadd_rn(sum, slot_score[j]);
  for (int j = lane; j < chosen; j += 32) {
    float weight = slot_score[j];
    if (a.renormalise) weight = __fdiv_rn(weight, __fadd_rn(sum, 1e-20f));
    weights[j] = __fmul_rn(weight, a.scale);
  }
  if (a.shared && lane == 0) {
    ids[chosen] = static_cast<float>(experts);
    weights[chosen] = a.shared_gate == nullptr ? 1.0f : sigmoid(a.shared_gate[row * a.shared_stride]);
  }
}

}  // namespace

void cuda_route(cudaStream_t stream, const CudaRouteArgs& args) {
  if (args.logits.rows == 0) return;
  kernel_check(args.logits.cols <= kMostCudaExperts, "route: at most 4096 experts");
  const size_t shared = static_cast<size_t>(args.logits.cols) * (sizeof(uint64_t) + sizeof(float));
  if (shared > 48 * 1024 - 1024) {
    if (!cuda_ok(
            cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
            "route")) {
      return;
    }
  }
  launch_kernel(route_kernel, dim3(static_cast<unsigned>(args.logits.rows)), dim3(32), shared, stream, "route", args);
}

}  // namespace tensorfold
