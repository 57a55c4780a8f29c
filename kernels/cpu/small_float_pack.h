// Packs FP8 and FP4 weights as they are stored (layout: weights.h), and says which matrices can be.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// Whether a matrix is kept as it is stored; otherwise it is kept as its values. A rule of the matrix alone, and of no
/// consequence for any bit. FP8 and FP4 whose blocks are a multiple of 16 columns (or the whole row) wide, with
///   FP8: no codes of NaN, finite scales below 2^120, and no global scale;
///   FP4: scales of e4m3 or e8m0 that are numbers, and a finite global scale that is not divided by when 0.
/// Reads scales, and codes of FP8. The source must be one without source_error().
bool kept_as_stored(const MatrixSource& source, ThreadPool* pool);

/// What FP4 codes stand for under each scale that a byte can be: [256][8] fp32, by the weight view. Weights with the
/// same scale format and global scale share one table. Thread-safe.
class Fp4Tables {
 public:
  static constexpr int64_t kBytes = 256 * 8 * 4;
  /// The table of a source, made if no weight has it; then `added` grows by its bytes.
  std::shared_ptr<const MemoryBlock> table(const MatrixSource& source, int64_t* added);

 private:
  using Key = std::tuple<WeightFormat, uint32_t, bool>;  // format of the scales, the global scale's bits, divided by it
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<const MemoryBlock>> tables_;
};

/// The view of a matrix that is kept_as_stored(), without data and values.
PanelView small_float_view(const MatrixSource& source);

/// Fills a panel of view.panel_bytes. The view has its values.
void pack_small_float_panel(const MatrixSource& source, const PanelView& view, int64_t panel, uint8_t* out);

}  // namespace tensorfold
