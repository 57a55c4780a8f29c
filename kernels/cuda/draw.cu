// Drawing a token from each row: argmax of logit / T + noise in float64, the very operations of the host
// (kernels/numerics/gumbel.h), so the very bits. This file is compiled without contraction (CMakeLists.txt). The best
// of two tokens is a total order (score, then the lower id), so there is no order of work to keep.
//
// A block draws from 2,048 columns of a row, then one block a row takes the best of those. A GPU with few float64 units
// (GB10) computes a division, a bound and, where the bound cannot rule the token out, two logarithms a token.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise.h"
#include "kernels/numerics/check.h"
#include "kernels/numerics/gumbel.h"

namespace tensorfold {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;  // columns a thread
constexpr int kColumns = kThreads * kEach;
constexpr int kNone = 0x7fffffff;

struct Part {
  KeyedDraw draw;
  int broken = kNone;  // the first column that is not finite
};

struct DrawArgs {
  const float* logits = nullptr;
  int64_t stride = 0;
  int cols = 0;
  int first_id = 0;
  int parts = 0;
  const DrawKey* keys = nullptr;
  Part* found = nullptr;  // [rows][parts]
  Candidate* out = nullptr;
};

// The best of all threads' parts, for thread 0.
__device__ Part best_of_block(Part mine, Part* exchange) {
  exchange[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
      Part& a = exchange[threadIdx.x];
      const Part& b = exchange[threadIdx.x + half];
      a.draw.merge(b.draw);
      a.broken = min(a.broken, b.broken);
    }
    __syncthreads();
  }
  return exchange[0];
}

__global__ void __launch_bounds__(kThreads) draw_from_part(const __grid_constant__ DrawArgs a) {
  __shared__ __align__(8) unsigned char memory[kThreads * sizeof(Part)];
  auto* const exchange = reinterpret_cast<Part*>(memory);
  pdl_launch();
  pdl_wait();
  const int64_t row = blockIdx.y;
  const DrawKey key = a.keys[row];
  Part part;
  if (key.temperature != 0.0) {
    const float* const x = a.logits + row * a.stride;
    for (int i = 0; i < kEach; ++i) {
      const int column = static_cast<int>(blockIdx.x) * kColumns + i * kThreads + static_cast<int>(threadIdx.x);
      if (column >= a.cols) break;
      const float value = x[column];
      if (!isfinite(value)) {
        part.broken = min(part.broken, column);
        continue;
      }
      const double logit = static_cast<double>(value);
      part.draw.offer(key.key, logit / key.temperature, logit, static_cast<uint32_t>(a.first_id + column));
    }
  }
  const Part best = best_of_block(part, exchange);
  if (threadIdx.x == 0) a.found[row * a.parts + blockIdx.x] = best;
}

__global__ void __launch_bounds__(kThreads) draw_from_parts(const __grid_constant__ DrawArgs a) {
  __shared__ __align__(8) unsigned char memory[kThreads * sizeof(Part)];
  auto* const exchange = reinterpret_cast<Part*>(memory);
  pdl_launch();
  pdl_wait();
  const int64_t row = blockIdx.x;
  Part part;
  for (int i = threadIdx.x; i < a.parts; i += kThreads) {
    const Part& other = a.found[row * a.parts + i];
    part.draw.merge(other.draw);
    part.broken = min(part.broken, other.broken);
  }
  const Part best = best_of_block(part, exchange);
  if (threadIdx.x != 0) return;
  Candidate out{0.0f, -1};
  if (best.draw.any) out = {static_cast<float>(best.draw.logit), static_cast<int32_t>(best.draw.id)};
  if (best.broken != kNone) out = {a.logits[row * a.stride + best.broken], a.first_id + best.broken};
  a.out[row] = out;
}

int64_t part_count(int64_t cols) { return (cols + kColumns - 1) / kColumns; }

}  // namespace

int64_t cuda_draws_workspace(int64_t rows, int64_t cols) {
  return rows * part_count(cols) * static_cast<int64_t>(sizeof(Part));
}

void cuda_draws(cudaStream_t stream, DeviceMatrix logits, int32_t first_id, const DrawKey* keys, void* workspace,
                Candidate* out) {
  kernel_check(logits.rows <= 65535 && logits.cols <= INT32_MAX - kColumns, "draws: too many logits");
  if (logits.rows == 0 || logits.cols == 0) return;
  DrawArgs args;
  args.logits = logits.data;
  args.stride = logits.stride;
  args.cols = static_cast<int>(logits.cols);
  args.first_id = first_id;
  args.parts = static_cast<int>(part_count(logits.cols));
  args.keys = keys;
  args.found = static_cast<Part*>(workspace);
  args.out = out;
  const unsigned rows = static_cast<unsigned>(logits.rows);
  launch_kernel(draw_from_part, dim3(static_cast<unsigned>(args.parts), rows), dim3(kThreads), 0, stream, "draws",
                args);
  launch_kernel(draw_from_parts, dim3(rows), dim3(kThreads), 0, stream, "draws", args);
}

}  // namespace tensorfold
