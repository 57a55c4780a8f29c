// Attention over chosen keys: which windows of pooled index keys a row sees.
#pragma once

#include <functional>

#include "kernels/cuda/device.h"
#include "kernels/cuda/row_cache.h"
#include "kernels/numerics/host_device.h"

namespace tensorfold {

/// Windows that one block looks through, and the most that a row may choose: half of them, so that a choice among the
/// choices of several blocks is smaller than what it began with.
inline constexpr int kChoiceItems = 8192;
inline constexpr int64_t kMostChosen = kChoiceItems / 2;

/// The order of scores as one number: larger for larger scores, both zeros equal, NaN below all; never 0, which stands
/// for "none". Equal keys are told apart by the window's number.
TF_HOST_DEVICE inline uint32_t score_key(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 1;
  return magnitude != 0 && bits != magnitude ? ~bits : magnitude | 0x80000000u;
}

/// Enqueues the scores of `count` rows from `first_row` on: score_key() of window w of the i-th at keys[i * stride +
/// w], for the windows that end at or before the row's position; rows that have at most as many as they may choose need
/// none. False if that failed.
using ScoreWindows = std::function<bool(int64_t first_row, int64_t count, uint32_t* keys, int64_t stride)>;
/// The choice by (score descending, window ascending, NaN last) for out [rows, most], most at most kMostChosen; rows of
/// no group choose nothing.
void cuda_choose_windows(cudaStream_t stream, const DeviceRows& rows, int64_t window_tokens, DeviceMatrix out,
                         void* workspace, const ScoreWindows& score);

/// Ops::select_windows. out [rows, most], most at most kMostChosen; rows of no group choose nothing.
struct CudaSelectWindows {
  DeviceRowLayer layer;  // of pooled keys
  int64_t heads = 0;
  DeviceMatrix q;  // [rows, heads * width of a key]
  float scale = 1.0f;
  DeviceMatrix out;
  void* workspace = nullptr;  // at least cuda_select_workspace() bytes, aligned to 16
};
int64_t cuda_select_workspace(const DeviceRows& rows, int64_t window_tokens, int64_t most);
void cuda_select_windows(cudaStream_t stream, const DeviceRows& rows, const CudaSelectWindows& args);

}  // namespace tensorfold
