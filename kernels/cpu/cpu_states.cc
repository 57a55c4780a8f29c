// States of recurrent layers: one memory that is zeroed, copied, put away and brought back as a whole.
#include "kernels/cpu/cpu_states.h"

#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"

namespace tensorfold {

void CpuStateMemory::reset() {
  std::memset(memory_.data(), 0, static_cast<size_t>(memory_.size()));
  kept = 0;
}

void CpuStateMemory::copy_from(const RecurrentState& other) {
  const auto& from = static_cast<const CpuStateMemory&>(other);
  kernel_check(from.memory_.size() == memory_.size(), "recurrent state: copy of one of another shape");
  std::memcpy(memory_.data(), from.memory_.data(), static_cast<size_t>(memory_.size()));
  kept = from.kept;
}

void CpuStateMemory::save(std::span<std::byte> into) const {
  kernel_check(static_cast<int64_t>(into.size()) == bytes(), "recurrent state: save into another size");
  std::memcpy(into.data(), &kept, sizeof(kept));
  std::memcpy(into.data() + sizeof(kept), memory_.data(), static_cast<size_t>(memory_.size()));
}

bool CpuStateMemory::load(std::span<const std::byte> from, int64_t tentative) {
  int64_t rows = 0;
  if (static_cast<int64_t>(from.size()) != bytes()) return false;
  std::memcpy(&rows, from.data(), sizeof(rows));
  if (rows != tentative || rows < 0 || rows > max_window_) return false;
  kept = rows;
  std::memcpy(memory_.data(), from.data() + sizeof(kept), static_cast<size_t>(memory_.size()));
  return true;
}

namespace {

int64_t mamba2_floats(const Mamba2Shape& s) {
  return s.heads * s.state * round_up(s.head_dim, 16) + (s.conv_kernel - 1) * s.channels() +
         s.max_window * (s.channels() + s.heads);
}

struct StateMaker {
  std::unique_ptr<RecurrentState> operator()(const DeltaNetShape& shape) const {
    return std::make_unique<CpuRecurrentState>(shape);
  }
  std::unique_ptr<RecurrentState> operator()(const Mamba2Shape& shape) const {
    return std::make_unique<CpuMamba2State>(shape);
  }
  std::unique_ptr<RecurrentState> operator()(const ShortConvShape& shape) const {
    return std::make_unique<CpuShortConvState>(shape);
  }
};

}  // namespace

CpuMamba2State::CpuMamba2State(const Mamba2Shape& shape)
    : CpuStateMemory(mamba2_floats(shape), shape.max_window), shape_(shape) {
  kernel_check(shape.groups > 0 && shape.heads % shape.groups == 0 && shape.conv_kernel >= 1 && shape.conv_kernel <= 16,
               "mamba2: heads must be a multiple of groups, with at most 16 taps");
  history_ = floats() + shape.heads * shape.state * stride();
  kept_ = history_ + (shape.conv_kernel - 1) * shape.channels();
}

CpuShortConvState::CpuShortConvState(const ShortConvShape& shape)
    : CpuStateMemory(shape.state_values(), shape.max_window), shape_(shape) {
  kernel_check(shape.taps >= 1 && shape.taps <= 16 && shape.dilation >= 1 && shape.context >= 0,
               "short convolution: 1 to 16 taps, a dilation from 1");
  tokens_ = floats() + shape.history() * shape.channels;
  kept_ = tokens_ + shape.context;
}

std::unique_ptr<RecurrentState> CpuOps::make_recurrent_state(const StateShape& shape) {
  return std::visit(StateMaker{}, shape);
}

}  // namespace tensorfold
