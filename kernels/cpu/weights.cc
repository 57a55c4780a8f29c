#include "kernels/cpu/weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/code_planes.h"
#include "kernels/numerics/check.h"
#include "kernels/ops/dequantise.h"
#include "kernels/ops/small_floats.h"

namespace tensorfold {
namespace {

int64_t element_bytes(WeightFormat format) { return format == WeightFormat::kF32 ? 4 : 2; }

void check_source(const MatrixSource& s) {
  kernel_check(s.data != nullptr, "pack: empty matrix");
  const std::string error = source_error(s);
  kernel_check(error.empty(), error.c_str());
}

PanelView make_view(const MatrixSource& s, ThreadPool* pool) {
  if (kept_as_stored(s, pool)) return small_float_view(s);
  PanelView v;
  v.rows = s.rows;
  v.cols = s.cols;
  v.k_blocks = (s.cols + 15) / 16;
  if (s.format != WeightFormat::kMlxAffine) {
    // What no kernel reads as it is stored is kept as its values, in bf16 where that loses nothing.
    v.kind = s.format == WeightFormat::kF16 ? PanelKind::kF16 : exact_in_bf16(s) ? PanelKind::kBf16 : PanelKind::kF32;
    v.panel_bytes = v.k_blocks * kPanelRows * 16 * (v.kind == PanelKind::kF32 ? 4 : 2);
    return v;
  }
  v.kind = PanelKind::kAffine;
  v.bits = s.bits;
  v.group_blocks = s.group / 16;
  v.bf16_scales = s.scale_format == WeightFormat::kBf16;
  v.group_bytes = 2 * kPanelRows * (v.bf16_scales ? 2 : 4) + v.group_blocks * kPanelRows * 2 * s.bits;
  v.panel_bytes = s.cols / s.group * v.group_bytes;
  return v;
}

// Dequantised values, in the layout of plain ones.
void pack_dequantised_panel(const MatrixSource& s, const PanelView& v, int64_t panel, WeightView& view, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(v.panel_bytes));
  const int64_t element = v.kind == PanelKind::kF32 ? 4 : 2;
  std::vector<float> values(static_cast<size_t>(v.cols));
  for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < v.rows; ++r) {
    view.dequantise(s, panel * kPanelRows + r, 0, v.cols, values.data());
    for (int64_t c = 0; c < v.cols; ++c) {
      uint8_t* at = out + ((c / 16 * kPanelRows + r) * 16 + c % 16) * element;
      if (element == 4) {
        std::memcpy(at, &values[static_cast<size_t>(c)], 4);
      } else {
        const uint16_t half = bf16_of_float(values[static_cast<size_t>(c)]);
        std::memcpy(at, &half, 2);
      }
    }
  }
}

// Plain formats: 32 or 64 bytes of each row a k block; the last block of a row may be short.
void pack_plain_panel(const MatrixSource& s, const PanelView& v, int64_t panel, uint8_t* out) {
  const int64_t element = element_bytes(s.format), run = 16 * element;
  for (int64_t r = 0; r < kPanelRows; ++r) {
    const int64_t row = panel * kPanelRows + r;
    uint8_t* at = out + r * run;
    if (row >= v.rows) {
      for (int64_t i = 0; i < v.k_blocks; ++i, at += kPanelRows * run) std::memset(at, 0, static_cast<size_t>(run));
      continue;
    }
    const std::byte* from = s.data + row * s.row_bytes;
    const int64_t total = v.cols * element;
    for (int64_t i = 0; i < v.k_blocks; ++i, at += kPanelRows * run) {
      const int64_t have = std::min(run, total - i * run);
      std::memcpy(at, from + i * run, static_cast<size_t>(have));
      if (have < run) std::memset(at + have, 0, static_cast<size_t>(run - have));
    }
  }
}

// The 16 codes of columns 16 * block … of one row: an LSB-first bit stream (32-bit little-endian words are the same
// bytes).
void read_codes(const std::byte* row, int bits, int64_t block, uint8_t* codes) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(row) + block * 2 * bits;  // 16 * bits / 8
  for (int l = 0; l < 16; ++l) {
    const int first = l * bits, byte = first / 8;
    uint32_t word = p[byte];
    if (first % 8 + bits > 8) word |= static_cast<uint32_t>(p[byte + 1]) << 8;
    codes[l] = static_cast<uint8_t>((word >> (first % 8)) & ((1u << bits) - 1));
  }
}

void write_scale(const MatrixSource& s, const std::byte* from, int64_t index, bool bf16, uint8_t* out) {
  if (bf16) {
    std::memcpy(out, from + 2 * index, 2);
  } else if (s.scale_format == WeightFormat::kF32) {
    std::memcpy(out, from + 4 * index, 4);
  } else {
    uint16_t half;
    std::memcpy(&half, from + 2 * index, 2);
    const float value = float_of_f16(half);
    std::memcpy(out, &value, 4);
  }
}

void pack_affine_panel(const MatrixSource& s, const PanelView& v, int64_t panel, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(v.panel_bytes));
  const int64_t scale_bytes = v.bf16_scales ? 2 : 4, codes_at = 2 * kPanelRows * scale_bytes;
  for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < v.rows; ++r) {
    const int64_t row = panel * kPanelRows + r;
    const std::byte* data = s.data + row * s.row_bytes;
    const std::byte* scales = s.scales + row * s.scale_row_bytes;
    const std::byte* biases = s.biases + row * s.scale_row_bytes;
    for (int64_t g = 0; g < v.cols / s.group; ++g) {
      uint8_t* group = out + g * v.group_bytes;
      write_scale(s, scales, g, v.bf16_scales, group + r * scale_bytes);
      write_scale(s, biases, g, v.bf16_scales, group + (kPanelRows + r) * scale_bytes);
      for (int64_t i = 0; i < v.group_blocks; ++i) {
        uint8_t codes[16];
        read_codes(data, s.bits, g * v.group_blocks + i, codes);
        write_codes(codes, s.bits, group + codes_at + (i * kPanelRows + r) * 2 * s.bits);
      }
    }
  }
}

}  // namespace

const CpuWeight::Segment& CpuWeight::segment_of_row(int64_t row) const {
  kernel_check(row >= 0 && row < rows_, "weight: no such row");
  size_t i = segments_.size() - 1;
  while (segments_[i].first_row > row) --i;
  return segments_[i];
}

std::unique_ptr<CpuWeight> pack_weight(std::span<const MatrixSource> blocks, BlockArena* arena, ThreadPool* pool,
                                       Fp4Tables* tables) {
  kernel_check(!blocks.empty(), "pack: no blocks");
  auto weight = std::make_unique<CpuWeight>();
  weight->cols_ = blocks[0].cols;
  for (const MatrixSource& source : blocks) {
    check_source(source);
    kernel_check(source.cols == weight->cols_, "pack: stacked blocks must have equal columns");
    if (source.rows == 0) continue;
    CpuWeight::Segment segment;
    segment.view = make_view(source, pool);
    segment.first_row = weight->rows_;
    segment.first_panel = weight->panels_;
    segment.panels = (source.rows + kPanelRows - 1) / kPanelRows;
    segment.memory = arena->take(segment.panels * segment.view.panel_bytes);
    uint8_t* data = reinterpret_cast<uint8_t*>(segment.memory.data);
    segment.view.data = data;
    if (segment.view.kind == PanelKind::kFp4) {
      segment.values = tables->table(source, &weight->bytes_);
      segment.view.values = segment.values->floats();
    }
    const PanelView& view = segment.view;
    // 32 panels: the band of rows that EXL3 decodes together.
    pool->parallel_for(segment.panels, 32, [&](int64_t begin, int64_t end, int) {
      WeightView values;
      for (int64_t p = begin; p < end; ++p) {
        uint8_t* out = data + p * view.panel_bytes;
        if (view.kind == PanelKind::kAffine) {
          pack_affine_panel(source, view, p, out);
        } else if (view.kind == PanelKind::kFp8 || view.kind == PanelKind::kFp4) {
          pack_small_float_panel(source, view, p, out);
        } else if (!is_plain(source.format)) {
          pack_dequantised_panel(source, view, p, values, out);
        } else {
          pack_plain_panel(source, view, p, out);
        }
      }
    });
    weight->rows_ += source.rows;
    weight->panels_ += segment.panels;
    weight->bytes_ += segment.panels * view.panel_bytes;
    weight->segments_.push_back(std::move(segment));
  }
  kernel_check(weight->rows_ > 0, "pack: no rows");
  return weight;
}

std::unique_ptr<CpuWeight> view_weight_rows(const CpuWeight& weight, int64_t first, int64_t count) {
  kernel_check(first >= 0 && count > 0 && first <= weight.rows_ - count, "view_rows: outside the matrix");
  auto view = std::make_unique<CpuWeight>();
  view->cols_ = weight.cols_;
  for (const CpuWeight::Segment& segment : weight.segments_) {
    const int64_t begin = std::max(first - segment.first_row, int64_t{0});
    const int64_t end = std::min(first + count - segment.first_row, segment.view.rows);
    if (begin >= end) continue;
    if (begin % kPanelRows != 0 || (end % kPanelRows != 0 && end != segment.view.rows)) return nullptr;
    CpuWeight::Segment part = segment;
    part.view.rows = end - begin;
    part.view.data += begin / kPanelRows * segment.view.panel_bytes;
    part.first_row = view->rows_;
    part.first_panel = view->panels_;
    part.panels = (end - begin + kPanelRows - 1) / kPanelRows;
    view->rows_ += part.view.rows;
    view->panels_ += part.panels;
    view->bytes_ += part.panels * part.view.panel_bytes;
    view->segments_.push_back(std::move(part));
  }
  return view;
}

CpuVector::CpuVector(std::span<const float> values)
    : size_(static_cast<int64_t>(values.size())), memory_(static_cast<int64_t>(values.size_bytes())) {
  std::copy(values.begin(), values.end(), memory_.floats());
}

const float* CpuVector::transposed(int64_t inner) const {
  std::call_once(once_, [&] {
    kernel_check(inner >= 1 && size_ % inner == 0, "vector: not a whole number of rows");
    const int64_t outer = size_ / inner;
    transposed_ = std::make_unique<MemoryBlock>(size_ * 4);
    inner_ = inner;
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t i = 0; i < inner; ++i) transposed_->floats()[i * outer + o] = data()[o * inner + i];
    }
  });
  kernel_check(inner == inner_, "vector: transposed with another width before");
  return transposed_->floats();
}

}  // namespace tensorfold
