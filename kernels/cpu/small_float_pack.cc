#include "kernels/cpu/small_float_pack.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/code_planes.h"
#include "kernels/numerics/check.h"
#include "kernels/ops/dequantise.h"
#include "kernels/ops/weight_scales.h"

namespace tensorfold {
namespace {

// Where the columns of a part lie in its blocks: column 0 is `offset` columns into block `first`.
struct Place {
  int64_t first = 0;
  int64_t offset = 0;
  int64_t blocks = 0;  // that the columns reach
};

Place place_of(const MatrixSource& s) {
  const ScaleRange range = scales_of(s);
  return {range.first_col, s.first_col % s.block_cols, range.end_col - range.first_col};
}

bool scales_below(const MatrixSource& s, float limit) {
  const ScaleRange range = scales_of(s);
  for (int64_t row = range.first_row; row < range.end_row; ++row) {
    for (int64_t block = range.first_col; block < range.end_col; ++block) {
      // Not true of NaN.
      if (!(std::fabs(number_at(s.scales + row * s.scale_row_bytes, s.scale_format, block)) < limit)) return false;
    }
  }
  return true;
}

bool has_nan_codes(const MatrixSource& s, ThreadPool* pool) {
  std::atomic<bool> found{false};
  pool->parallel_for(s.rows, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      if (row_has_nan_code(s, row)) found.store(true, std::memory_order_relaxed);
    }
  });
  return found.load();
}

}  // namespace

bool kept_as_stored(const MatrixSource& s, ThreadPool* pool) {
  const bool fp8 = s.format == WeightFormat::kE4m3, fp4 = s.format == WeightFormat::kE2m1;
  if ((!fp8 && !fp4) || s.block_cols % 16 != 0 || s.rows == 0) return false;
  if (fp4) {
    const bool bytes = s.scale_format == WeightFormat::kE4m3 || s.scale_format == WeightFormat::kE8m0;
    const bool global = std::isfinite(s.global_scale) && !(s.divide_by_global && s.global_scale == 0);
    return bytes && global && scales_below(s, HUGE_VALF);
  }
  return s.global_scale == 1.0f && scales_below(s, 0x1p120f) && !has_nan_codes(s, pool);
}

std::shared_ptr<const MemoryBlock> Fp4Tables::table(const MatrixSource& source, int64_t* added) {
  const Key key{source.scale_format, std::bit_cast<uint32_t>(source.global_scale), source.divide_by_global};
  const std::lock_guard lock(mutex_);
  if (std::shared_ptr<const MemoryBlock> have = tables_[key].lock()) return have;
  // A matrix of the eight magnitudes in each row, whose scales are all bytes in turn.
  std::byte codes[256][4], scales[256];
  for (int row = 0; row < 256; ++row) {
    for (int i = 0; i < 4; ++i) codes[row][i] = static_cast<std::byte>(2 * i | (2 * i + 1) << 4);
    scales[row] = static_cast<std::byte>(row);
  }
  MatrixSource all;
  all.format = WeightFormat::kE2m1;
  all.rows = 256;
  all.cols = 8;
  all.data = codes[0];
  all.row_bytes = 4;
  all.block_cols = 8;
  all.scale_format = source.scale_format;
  all.scales = scales;
  all.scale_row_bytes = 1;
  all.global_scale = source.global_scale;
  all.divide_by_global = source.divide_by_global;
  auto made = std::make_shared<MemoryBlock>(kBytes);
  WeightView view;
  for (int64_t row = 0; row < 256; ++row) view.dequantise(all, row, 0, 8, made->floats() + 8 * row);
  tables_[key] = made;
  *added += kBytes;
  return made;
}

PanelView small_float_view(const MatrixSource& s) {
  const bool fp4 = s.format == WeightFormat::kE2m1;
  PanelView v;
  v.kind = fp4 ? PanelKind::kFp4 : PanelKind::kFp8;
  v.rows = s.rows;
  v.cols = s.cols;
  v.k_blocks = (s.cols + 15) / 16;
  v.byte_scales = fp4 || s.scale_format == WeightFormat::kE8m0;
  const Place place = place_of(s);
  if (place.blocks == 1) {
    v.group_blocks = v.k_blocks;
    v.groups = 1;
  } else {
    v.group_blocks = s.block_cols / 16;
    v.lead_blocks = place.offset / 16;
    v.split_lane = static_cast<int>((16 - place.offset % 16) % 16);
    // A last k block that reaches over the matrix' end may reach into one block more.
    v.groups = (place.offset + 16 * v.k_blocks - 1) / s.block_cols + 1;
  }
  v.codes_at = round_up(v.groups * kPanelRows * (v.byte_scales ? 1 : 4), 16);
  v.panel_bytes = round_up(v.codes_at + v.k_blocks * kPanelRows * (fp4 ? 8 : 16), 16);
  return v;
}

namespace {

// A row's scales, one for each group; a group beyond the matrix has the last one's.
void pack_scales(const MatrixSource& s, const PanelView& v, const Place& place, int64_t row, uint8_t* out) {
  const std::byte* scales = s.scales + (s.first_row + row) / s.block_rows * s.scale_row_bytes;
  for (int64_t g = 0; g < v.groups; ++g) {
    const int64_t block = place.first + std::min(g, place.blocks - 1), at = g * kPanelRows + row % kPanelRows;
    if (v.byte_scales) {
      out[at] = static_cast<uint8_t>(scales[block]);
    } else {
      const float scale = number_at(scales, s.scale_format, block) * 0x1p8f;
      std::memcpy(out + 4 * at, &scale, 4);
    }
  }
}

// The code of zero that is +0 under a row's last scale. Columns beyond the matrix must be that, as in every other
// format: a product of -0 would leave a lane at -0.
uint8_t padding_code(const MatrixSource& s, const PanelView& v, const Place& place, int64_t row) {
  const int64_t last = place.first + place.blocks - 1;
  const std::byte* scales = s.scales + (s.first_row + row) / s.block_rows * s.scale_row_bytes;
  if (v.kind == PanelKind::kFp4) return std::signbit(v.values[8 * std::to_integer<int64_t>(scales[last])]) ? 8 : 0;
  return std::signbit(number_at(scales, s.scale_format, last)) ? 0x80 : 0;
}

}  // namespace

void pack_small_float_panel(const MatrixSource& s, const PanelView& v, int64_t panel, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(v.panel_bytes));
  const Place place = place_of(s);
  const bool fp4 = v.kind == PanelKind::kFp4;
  for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < v.rows; ++r) {
    const int64_t row = panel * kPanelRows + r;
    pack_scales(s, v, place, row, out);
    const uint8_t padding = padding_code(s, v, place, row);
    const auto* from = reinterpret_cast<const uint8_t*>(s.data + (s.first_row + row) * s.row_bytes);
    for (int64_t i = 0; i < v.k_blocks; ++i) {
      uint8_t codes[16];
      for (int64_t l = 0; l < 16; ++l) {
        const int64_t at = s.first_col + 16 * i + l;
        codes[l] = 16 * i + l >= s.cols ? padding
                   : fp4                ? static_cast<uint8_t>(from[at / 2] >> (at % 2 * 4) & 15)
                                        : from[at];
      }
      write_codes(codes, fp4 ? 4 : 8, out + v.codes_at + (i * kPanelRows + r) * (fp4 ? 8 : 16));
    }
  }
}

}  // namespace tensorfold
