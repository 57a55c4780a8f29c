// Hashes of the intermediate values of one sequence, to name the first row, layer and op that two runs disagree on.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/ops/ops.h"
#include "worker/model/slice_sum.h"

namespace tensorfold {

/// One rank's recorder. Rows that are computed again (rejected drafts) keep their last value: the one that counts.
class TraceRecorder : public Trace {
 public:
  /// Records the sequence in `slot`, or in `other` while it is there; `ops` reads tensors.
  TraceRecorder(Ops& ops, uint32_t slot, uint32_t other) : ops_(ops), slot_(slot), other_(other) {}

  void begin_pass(std::span<const int64_t> positions, std::span<const uint32_t> slots) override;
  void record(int layer, const char* op, Tensor value, int64_t first_unit, int64_t units) override;

  struct Key {
    int64_t position = 0;
    int layer = 0;
    int order = 0;  // of the op within its layer
    std::string op;
    int64_t unit = 0;
    auto operator<=>(const Key&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 sees a null pointer
  };
  const std::map<Key, uint64_t>& values() const { return values_; }

 private:
  Ops& ops_;
  const uint32_t slot_;
  const uint32_t other_;
  std::vector<int64_t> positions_;
  std::vector<uint32_t> slots_;
  std::map<std::pair<int, std::string>, int> order_;
  std::map<Key, uint64_t> values_;
};

/// "position 17, layer 2, attention.o_proj (unit 5)", of the first value in `run` that differs from `reference`; empty
/// if none does. Ranks' recorders are taken together.
std::string first_difference(const std::vector<const TraceRecorder*>& reference,
                             const std::vector<const TraceRecorder*>& run);

}  // namespace tensorfold
