// Windows of cached rows pooled into one. A block a row of the pass, idle unless the row ends a window; a thread a
// channel: the largest logit, then the sums of weights and of weighted keys in one go, tokens ascending. Sum of squares
// for the norm: a chain a thread over channels thread, thread + 128, ..., a butterfly over a warp's lanes, the four
// warps ascending.
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kThreads = 128;
constexpr int kMostWidth = 2048;

struct Params {
  DeviceRows rows;
  CudaPoolArgs args;
};

// One channel of the window that begins at `first`: the rows of `offset` + channel, and where keys overlap those of the
// window before too.
__device__ __forceinline__ float pool_channel(const CudaPoolArgs& a, const int32_t* pages, int64_t first, int channel) {
  const int half = a.from.width / 2, tokens = static_cast<int>(a.tokens);
  const bool before = a.overlap && first > 0;
  const int count = before ? 2 * tokens : tokens, own = a.overlap ? a.into.width : 0;
  const auto visit = [&](const auto& body) {  // body(key, logit) of each token, ascending
    for (int j = 0; j < count; ++j) {
      const bool earlier = before && j < tokens;
      const int64_t position = before ? first - tokens + j : first + j;
      const int offset = (earlier ? 0 : own) + channel;
      const float* row = latent_row(a.from, pages, position);
      body(row[offset], __fadd_rn(row[half + offset], a.bias[j % tokens * half + offset]));
    }
  };
  float most = -__builtin_huge_valf();
  visit([&](float, float logit) { most = fmaxf(most, logit); });
  float total = 0.0f, sum = 0.0f;
  visit([&](float key, float logit) {
    const float weight = __expf(__fsub_rn(logit, most));
    total = __fadd_rn(total, weight);
    sum = __fmaf_rn(weight, key, sum);
  });
  return __fdiv_rn(sum, total);
}

// blockIdx.x: row of the pass.
__global__ void __launch_bounds__(kThreads) pool_kernel(const __grid_constant__ Params p) {
  __shared__ float pooled[kMostWidth];
  __shared__ float squares[kThreads / 32];
  pdl_launch();
  pdl_wait();
  const CudaPoolArgs& a = p.args;
  const int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), g = p.rows.group_of[r];
  if (g < 0) return;
  const int64_t last = p.rows.positions[r];
  if ((last + 1) % a.tokens != 0) return;
  const int32_t* pages = p.rows.pages + p.rows.groups[g].first_page;
  const int64_t first = last + 1 - a.tokens;
  const int width = a.into.width;
  float* out = latent_row(a.into, pages, last);
  float sum = 0.0f;
  for (int channel = thread; channel < width; channel += kThreads) {
    const float x = pool_channel(a, pages, first, channel);
    pooled[channel] = x;
    sum = __fmaf_rn(x, x, sum);
  }
  float factor = 1.0f;
  if (a.norm != nullptr) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    if (thread % 32 == 0) squares[thread / 32] = sum;
    __syncthreads();
    float all = squares[0];
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) all = __fadd_rn(all, squares[w]);
    factor = rsqrtf(__fadd_rn(__fdiv_rn(all, static_cast<float>(width)), a.eps));
  }
  __syncthreads();
  const auto normed = [&](int channel) {
    const float x = pooled[channel];
    return a.norm == nullptr ? x : __fmul_rn(__fmul_rn(x, factor), a.norm[channel]);
  };
  const int turned = width - 2 * static_cast<int>(a.pairs);  // channels from here on are rotated
  for (int channel = thread; channel < width; channel += kThreads) {
    if (channel < turned) {
      out[channel] = normed(channel);
      continue;
    }
    const int pair = (channel - turned) / 2, odd = (channel - turned) % 2;
    double s, c;
    sincos(__dmul_rn(static_cast<double>(first), static_cast<double>(a.inv_freq[pair])), &s, &c);
    const float cosine = static_cast<float>(c), sine = static_cast<float>(s);
    const float x = normed(channel - odd), y = normed(channel - odd + 1);
    out[channel] = odd == 0 ? __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine))
                            : __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
  }
}

}  // namespace

void cuda_pool_rows(cudaStream_t stream, const DeviceRows& rows, const CudaPoolArgs& args) {
  const int64_t width = args.into.width, half = args.from.width / 2;
  kernel_check(args.from.tokens == 1 && args.from.width == 2 * half && half == width * (args.overlap ? 2 : 1) &&
                   args.tokens >= args.into.tokens && args.tokens % args.into.tokens == 0 && 2 * args.pairs <= width &&
                   width <= kMostWidth,
               "pool_rows: shapes differ, or rows of more than 2048 values");
  if (rows.rows <= 0) return;
  launch_kernel(pool_kernel, dim3(static_cast<unsigned>(rows.rows)), dim3(kThreads), 0, stream, "pooled rows",
                Params{rows, args});
}

}  // namespace tensorfold
