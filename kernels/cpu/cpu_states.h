// Memory of the recurrent layers' states. Private to kernels/cpu.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cpu/memory.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// A state of some floats, all zero before any token, the inputs of at most `max_window` tentative rows among them.
class CpuStateMemory : public RecurrentState {
 public:
  CpuStateMemory(int64_t floats, int64_t max_window)
      : max_window_(max_window), memory_(floats * static_cast<int64_t>(sizeof(float))) {}
  int64_t bytes() const override { return memory_.size() + static_cast<int64_t>(sizeof(int64_t)); }
  void reset() override;
  void copy_from(const RecurrentState& other) override;
  void save(std::span<std::byte> into) const override;
  bool load(std::span<const std::byte> from, int64_t tentative) override;

  int64_t max_window() const { return max_window_; }
  int64_t kept = 0;  // tentative rows of the last window

 protected:
  float* floats() { return memory_.floats(); }

 private:
  int64_t max_window_;
  MemoryBlock memory_;
};

class CpuMamba2State : public CpuStateMemory {
 public:
  explicit CpuMamba2State(const Mamba2Shape& shape);

  const Mamba2Shape& shape() const { return shape_; }
  int64_t stride() const { return (shape_.head_dim + 15) / 16 * 16; }
  float* head(int64_t h) { return floats() + h * shape_.state * stride(); }                  // S [state, stride]
  float* history(int64_t i) { return history_ + i * shape_.channels(); }                     // oldest first
  float* kept_xbc(int64_t row) { return kept_ + row * (shape_.channels() + shape_.heads); }  // [channels]
  float* kept_dt(int64_t row) { return kept_xbc(row) + shape_.channels(); }                  // [heads]

 private:
  Mamba2Shape shape_;
  float* history_ = nullptr;
  float* kept_ = nullptr;
};

/// Inputs and tokens of the last rows of a dilated convolution. A token is kept as its number + 1, so that 0 is none.
class CpuShortConvState : public CpuStateMemory {
 public:
  explicit CpuShortConvState(const ShortConvShape& shape);

  const ShortConvShape& shape() const { return shape_; }
  float* history(int64_t i) { return floats() + i * shape_.channels; }  // oldest first
  float* tokens() { return tokens_; }                                   // [context], oldest first
  float* kept_row(int64_t row) { return kept_ + row * (shape_.channels + 1); }
  float* kept_token(int64_t row) { return kept_row(row) + shape_.channels; }

 private:
  ShortConvShape shape_;
  float* tokens_ = nullptr;
  float* kept_ = nullptr;
};

}  // namespace tensorfold
