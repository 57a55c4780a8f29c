#include "coordinator/commands/verify/trace_recorder.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

namespace tensorfold {

void TraceRecorder::begin_pass(std::span<const int64_t> positions, std::span<const uint32_t> slots) {
  positions_.assign(positions.begin(), positions.end());
  slots_.assign(slots.begin(), slots.end());
}

void TraceRecorder::record(int layer, const char* op, Tensor value, int64_t first_unit, int64_t units) {
  const auto [at, fresh] = order_.try_emplace({layer, op}, 0);
  if (fresh) at->second = static_cast<int>(order_.size());
  const int64_t width = value.cols / units;
  std::vector<float> row(static_cast<size_t>(value.cols));
  for (int64_t r = 0; r < value.rows; ++r) {
    const uint32_t slot = slots_[static_cast<size_t>(r)];
    if (slot != slot_ && slot != other_) continue;
    ops_.download(value.row_range(r, 1), row);
    for (int64_t unit = 0; unit < units; ++unit) {
      const uint64_t hash = XXH64(row.data() + unit * width, static_cast<size_t>(width) * sizeof(float), 0);
      values_[{positions_[static_cast<size_t>(r)], layer, at->second, op, first_unit + unit}] = hash;
    }
  }
}

std::string first_difference(const std::vector<const TraceRecorder*>& reference,
                             const std::vector<const TraceRecorder*>& run) {
  std::map<TraceRecorder::Key, uint64_t> expected;
  for (const TraceRecorder* rank : reference) expected.insert(rank->values().begin(), rank->values().end());
  // A position's values come from its last computation; the order of ops inside a layer is the same in every run.
  for (const auto& [key, hash] : expected) {
    // Replicated values are on every rank, and each must have the bits.
    const auto differs = [&key = key, &hash = hash](const TraceRecorder* rank) {
      const auto other = rank->values().find(key);
      return other != rank->values().end() && other->second != hash;
    };
    if (std::none_of(run.begin(), run.end(), differs)) continue;
    return fmt::format("position {}, {}, {}{}", key.position,
                       key.layer < 0 ? std::string("embedding") : fmt::format("layer {}", key.layer), key.op,
                       key.unit == 0 ? std::string() : fmt::format(" (unit {})", key.unit));
  }
  return "";
}

}  // namespace tensorfold
