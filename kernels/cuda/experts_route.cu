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

__device__ __forceinline__ uint64_t key_of(const CudaRouteArgs& a, const float* logits, const float* score, int e) {
  const float value = a.bias == nullptr ? logits[e] : __fadd_rn(score[e], a.bias[e]);
  return candidate_key(__float_as_uint(value), e);
}

// A lane's keys, largest first: those of experts lane, lane + 32, …; 0 where there is none. pop() takes the first away.
template <int kKeys>
struct KeysInRegisters {
  uint64_t keys[kKeys];
  __device__ __forceinline__ void fill(const CudaRouteArgs& a, const float* logits, const float* score, int lane) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int e = lane + 32 * i;
      keys[i] = e < a.logits.cols ? key_of(a, logits, score, e) : 0;
    }
#pragma unroll
    for (int end = kKeys - 1; end > 0; --end) {
#pragma unroll
      for (int i = 0; i < end; ++i) {
        const uint64_t low = min(keys[i], keys[i + 1]);
        keys[i] = max(keys[i], keys[i + 1]);
        keys[i + 1] = low;
      }
    }
  }
  __device__ __forceinline__ uint64_t first() const { return keys[0]; }
  __device__ __forceinline__ void pop() {
#pragma unroll
    for (int i = 0; i + 1 < kKeys; ++i) keys[i] = keys[i + 1];
    keys[kKeys - 1] = 0;
  }
};

// The same for any number of experts: the largest key below the one that was taken is looked for each time.
struct KeysInMemory {
  const CudaRouteArgs* args;
  const float* logits;
  const float* score;
  int lane;
  uint64_t best;
  __device__ __forceinline__ void fill(const CudaRouteArgs& a, const float* l, const float* s, int my_lane) {
    args = &a, logits = l, score = s, lane = my_lane;
    best = ~uint64_t{0};
    pop();
  }
  __device__ __forceinline__ uint64_t first() const { return best; }
  __device__ __forceinline__ void pop() {
    uint64_t next = 0;
    for (int e = lane; e < args->logits.cols; e += 32) {
      const uint64_t key = key_of(*args, logits, score, e);
      if (key < best && key > next) next = key;
    }
    best = next;
  }
};

__device__ __forceinline__ uint64_t largest(uint64_t key) {
  const unsigned high = static_cast<unsigned>(key >> 32);
  const unsigned best = __reduce_max_sync(kAll, high);
  const unsigned low = __reduce_max_sync(kAll, high == best ? static_cast<unsigned>(key) : 0u);
  return static_cast<uint64_t>(best) << 32 | low;
}

template <typename Keys>
__global__ void __launch_bounds__(32) route_kernel(const __grid_constant__ CudaRouteArgs a) {
  extern __shared__ float score[];  // [experts]; a lane reads its own
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
  make_scores(logits, experts, a.score, score, lane);
  if (!a.given) {
    // Each lane offers the first of its keys; the one that is taken offers its next.
    Keys keys;
    keys.fill(a, logits, score, lane);
    for (int j = 0; j < chosen; ++j) {
      const uint64_t best = largest(keys.first());
      if (lane == 0) ids[j] = static_cast<float>(candidate_column(best));
      if (keys.first() == best) {
        slot_score[j] = score[candidate_column(best)];
        keys.pop();
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
  const auto kernel = args.logits.cols <= 128   ? route_kernel<KeysInRegisters<4>>
                      : args.logits.cols <= 256 ? route_kernel<KeysInRegisters<8>>
                                                : route_kernel<KeysInMemory>;
  launch_kernel(kernel, dim3(static_cast<unsigned>(args.logits.rows)), dim3(32),
                static_cast<size_t>(args.logits.cols) * sizeof(float), stream, "route", args);
}

}  // namespace tensorfold
