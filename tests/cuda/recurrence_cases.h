// What the tests of recurrent layers (the gated delta net, Mamba2) share: windows of tokens as rows of a pass, outputs
// whose edges are watched, and comparisons of rows and states bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/recurrent_state.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {

using Row = std::vector<uint16_t>;  // bf16

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, 4);
  return value;
}

/// What one sequence has in a pass: ids of tokens, of which `certain` are, after `accepted` of its last window.
struct Window {
  CudaRecurrentState* state = nullptr;
  std::vector<int> tokens;
  int accepted = 0;
  int certain = 0;
};

/// Ids [first, first + count).
inline std::vector<int> token_range(int first, int count) {
  std::vector<int> ids;
  for (int i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

/// An input of a pass: a row a token, wider than it need be; all but the tokens' own values is NaN.
class InputRows {
 public:
  explicit InputRows(int64_t stride) : stride_(stride) {}
  void append(const std::vector<float>& values) {
    rows_.insert(rows_.end(), values.begin(), values.end());
    rows_.resize(rows_.size() + static_cast<size_t>(stride_) - values.size(), kNan);
  }
  /// Padding to `rows` rows, copied to the device.
  DeviceArray<float> on_device(int rows) {
    rows_.resize(static_cast<size_t>(rows * stride_), kNan);
    return DeviceArray<float>(rows_);
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  int64_t stride_;
  std::vector<float> rows_;
};

/// The rows of a pass over windows, in order, then `padding` rows that belong to nobody. `spare`: groups that there
/// might be, but are not. The states are those of layer 1 of 2.
class WindowRows {
 public:
  WindowRows(const std::vector<Window>& windows, int padding, int spare)
      : real_(count(windows)),
        rows_(real_ + padding),
        groups_(static_cast<int>(windows.size()) + spare),
        group_of_(group_of(windows, rows_)),
        group_count_(std::vector<int32_t>{static_cast<int32_t>(windows.size())}),
        device_groups_(groups_of(windows, groups_)),
        states_(states_of(windows, groups_)) {}

  int real() const { return real_; }
  int rows() const { return rows_; }
  DeviceRows device() const {
    DeviceRows device;
    device.rows = rows_;
    device.max_groups = groups_;
    device.group_count = group_count_.data();
    device.group_of = group_of_.data();
    device.groups = device_groups_.data();
    device.states = states_.data();
    return device;
  }

 private:
  static int count(const std::vector<Window>& windows) {
    int rows = 0;
    for (const Window& w : windows) rows += static_cast<int>(w.tokens.size());
    return rows;
  }
  static std::vector<int32_t> group_of(const std::vector<Window>& windows, int rows) {
    std::vector<int32_t> all;
    for (size_t g = 0; g < windows.size(); ++g) all.insert(all.end(), windows[g].tokens.size(), static_cast<int>(g));
    all.resize(static_cast<size_t>(rows), -1);
    return all;
  }
  static std::vector<DeviceGroup> groups_of(const std::vector<Window>& windows, int groups) {
    std::vector<DeviceGroup> all(static_cast<size_t>(groups));
    int row = 0;
    for (size_t g = 0; g < windows.size(); ++g) {
      all[g].first_row = row;
      all[g].rows = static_cast<int32_t>(windows[g].tokens.size());
      all[g].accepted = windows[g].accepted;
      all[g].certain = windows[g].certain;
      row += all[g].rows;
    }
    return all;
  }
  static std::vector<float*> states_of(const std::vector<Window>& windows, int groups) {
    std::vector<float*> all(2 * static_cast<size_t>(groups), nullptr);
    for (size_t g = 0; g < windows.size(); ++g) all[static_cast<size_t>(groups) + g] = windows[g].state->data();
    return all;
  }

  int real_, rows_, groups_;
  DeviceArray<int32_t> group_of_, group_count_;
  DeviceArray<DeviceGroup> device_groups_;
  DeviceArray<float*> states_;
};

/// Outputs [rows, width] of a pass, poisoned around.
class OutputRows {
 public:
  OutputRows(int rows, int64_t width)
      : rows_(rows), width_(width), stride_(width + 8), out_(static_cast<size_t>((rows + 1) * stride_)) {
    out_.poison();
  }
  DeviceInput device() const { return {reinterpret_cast<__nv_bfloat16*>(out_.data()), rows_, width_, stride_}; }
  /// The first `real` rows. All of their elements are written, padding rows are zeros, nothing is between rows or after
  /// the last.
  std::vector<Row> get(int real) const {
    constexpr uint16_t kPoison = 0xffff;
    const std::vector<uint16_t> all = out_.get();
    std::vector<Row> out;
    for (int r = 0; r <= rows_; ++r) {
      const uint16_t* row = all.data() + r * stride_;
      for (int64_t c = r < rows_ ? width_ : 0; c < stride_; ++c) {
        if (row[c] != kPoison) ADD_FAILURE() << "written outside: row " << r << " col " << c;
      }
      for (int64_t c = 0; r >= real && r < rows_ && c < width_; ++c) {
        if (row[c] != 0) ADD_FAILURE() << "a row of nobody is not zero: row " << r << " col " << c;
      }
      if (r < real) out.emplace_back(row, row + width_);
    }
    return out;
  }

 private:
  int rows_;
  int64_t width_, stride_;
  DeviceArray<uint16_t> out_;
};

/// Scratch memory of exactly `floats`, watched behind its end.
class WatchedWorkspace {
 public:
  explicit WatchedWorkspace(int64_t floats) : floats_(static_cast<size_t>(floats)), memory_(floats_ + 64) {
    memory_.poison();
  }
  float* data() const { return memory_.data(); }
  void check() const {
    const std::vector<float> work = memory_.get();
    for (size_t i = floats_; i < work.size(); ++i) {
      EXPECT_TRUE(std::isnan(work[i])) << "workspace written beyond its end, float " << i - floats_;
    }
  }

 private:
  size_t floats_;
  DeviceArray<float> memory_;
};

/// What `launch` enqueues on the stream, captured and run as a graph.
template <typename Launch>
void run_as_graph(cudaStream_t stream, const Launch& launch) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  launch();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

/// Tokens [0, count) in passes of `chunk` rows; the state is left in `state`.
template <typename Runner>
std::vector<Row> run_serial(Runner& runner, CudaRecurrentState* state, int count, int chunk, int spare = 0,
                            int padding = 0) {
  std::vector<Row> all;
  for (int at = 0; at < count; at += chunk) {
    const int rows = std::min(chunk, count - at);
    for (Row& row : runner.pass({{state, token_range(at, rows), 0, rows}}, padding, spare)) {
      all.push_back(std::move(row));
    }
  }
  return all;
}

inline std::vector<std::byte> bytes_of(const CudaRecurrentState& state) {
  std::vector<std::byte> bytes(static_cast<size_t>(state.bytes()));
  state.save(bytes);
  return bytes;
}

/// Empty if equal bit for bit, else where and what.
inline std::string difference(const Row& got, const Row& want) {
  if (got.size() != want.size()) return "sizes differ";
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    char text[96];
    std::snprintf(text, sizeof text, "col %zu: %g (%04x) instead of %g (%04x)", i, double{from_bf16(got[i])}, got[i],
                  double{from_bf16(want[i])}, want[i]);
    return text;
  }
  return {};
}
inline void expect_same(const std::vector<Row>& got, const std::vector<Row>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t r = 0; r < got.size(); ++r) {
    const std::string wrong = difference(got[r], want[r]);
    ASSERT_EQ(wrong, "") << what << ", row " << r;
  }
}
inline void expect_same_state(const CudaRecurrentState& got, const CudaRecurrentState& want, const std::string& what) {
  const auto a = bytes_of(got), b = bytes_of(want);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(a[i], b[i]) << what << ": state differs at float " << i / 4;
}

}  // namespace tensorfold
