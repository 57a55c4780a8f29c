// FP8 and FP4 weights, read as they are stored. Included by the isa_*.cc files only, before impl_matmul.h.
//
// A value must have the bits of WeightView::dequantise: the exact value of the formula, rounded once.
//   FP8   one fp32 product. A code times 2^-8 and a scale times 2^8 are exact, so the product's rounding is the only
//   one. FP4   looked up: the packer asks the weight view for all 8 magnitudes under each of the 256 scales that a byte
//   can
//         be, so nothing is computed here but the sign.
#pragma once

namespace tensorfold::TF_ISA {

inline constexpr int64_t kPanelBlockFloats = kPanelRows * 16;

struct Fp8Floats {
  using Scale = Vec;
  static constexpr int64_t kRowBytes = 16;  // of 16 codes
  static Scale scale(const PanelView&, const uint8_t* panel, int64_t index) {
    float value;
    __builtin_memcpy(&value, panel + 4 * index, 4);
    return v_set1(value);
  }
  static Vec values(const uint8_t* codes, Scale scale) { return v_mul(v_load_e4m3(codes), scale); }
};

struct Fp8Bytes {
  using Scale = Vec;
  static constexpr int64_t kRowBytes = 16;
  static Scale scale(const PanelView&, const uint8_t* panel, int64_t index) {
    // 2^(code - 127) times 2^8; no subnormal is left.
    return v_bits(i_set1((static_cast<int32_t>(panel[index]) + 8) << 23));
  }
  static Vec values(const uint8_t* codes, Scale scale) { return v_mul(v_load_e4m3(codes), scale); }
};

struct Fp4 {
  using Scale = const float*;
  static constexpr int64_t kRowBytes = 8;
  static Scale scale(const PanelView& w, const uint8_t* panel, int64_t index) {
    return w.values + 8 * int64_t{panel[index]};
  }
  static Vec values(const uint8_t* codes, Scale scale) { return v_pick_signed(scale, i_codes4(codes)); }
};

template <typename Body>
inline void with_small_float(const PanelView& w, Body body) {
  if (w.kind == PanelKind::kFp4) return body(Fp4{});
  if (w.byte_scales) return body(Fp8Bytes{});
  body(Fp8Floats{});
}

// Calls whole(group, first block, end block) for the k blocks that lie in one group, and split(group, block) for one
// whose lanes from split_lane on are the next group's.
template <typename Whole, typename Split>
inline void for_scale_groups(const PanelView& w, Whole whole, Split split) {
  int64_t group_end = w.group_blocks - w.lead_blocks;
  for (int64_t group = 0, block = 0; block < w.k_blocks; ++group, group_end += w.group_blocks) {
    const bool cut = w.split_lane != 0 && group_end <= w.k_blocks;
    const int64_t end = cut ? group_end - 1 : (group_end < w.k_blocks ? group_end : w.k_blocks);
    whole(group, block, end);
    if (cut) split(group, end);
    block = end + (cut ? 1 : 0);
  }
}

// 16 values of a row in a block that two groups share.
template <typename Format>
inline Vec split_values(const PanelView& w, const uint8_t* panel, int64_t group, int64_t block, int64_t row) {
  const uint8_t* codes = panel + w.codes_at + (block * kPanelRows + row) * Format::kRowBytes;
  return v_select(m_first(w.split_lane), Format::values(codes, Format::scale(w, panel, group * kPanelRows + row)),
                  Format::values(codes, Format::scale(w, panel, (group + 1) * kPanelRows + row)));
}

// The lanes' sums of a panel's rows times `Inputs` input rows: sums[input * kPanelRows + row].
template <typename Format, int Inputs>
inline void small_float_sums(const PanelView& w, const uint8_t* panel, const float* x, int64_t x_stride, Vec* sums) {
  constexpr int64_t kBlockBytes = kPanelRows * Format::kRowBytes;
  Vec acc[kPanelRows * Inputs];
  TF_UNROLL(16)
  for (int a = 0; a < kPanelRows * Inputs; ++a) acc[a] = v_zero();
  const auto add = [&](int64_t block, const Vec* values) {
    const int64_t left = w.cols - 16 * block;
    TF_UNROLL(4)
    for (int i = 0; i < Inputs; ++i) {
      const float* at = x + i * x_stride + 16 * block;
      const Vec xv = left >= 16 ? v_load(at) : v_load_n(at, left);
      TF_UNROLL(4)
      for (int r = 0; r < kPanelRows; ++r) acc[i * kPanelRows + r] = v_fma(values[r], xv, acc[i * kPanelRows + r]);
    }
  };
  for_scale_groups(
      w,
      [&](int64_t group, int64_t begin, int64_t end) {
        typename Format::Scale scale[kPanelRows];
        TF_UNROLL(4)
        for (int r = 0; r < kPanelRows; ++r) scale[r] = Format::scale(w, panel, group * kPanelRows + r);
        for (int64_t block = begin; block < end; ++block) {
          const uint8_t* codes = panel + w.codes_at + block * kBlockBytes;
          __builtin_prefetch(codes + kPrefetchBytes);
          Vec values[kPanelRows];
          TF_UNROLL(4)
          for (int r = 0; r < kPanelRows; ++r) values[r] = Format::values(codes + r * Format::kRowBytes, scale[r]);
          add(block, values);
        }
      },
      [&](int64_t group, int64_t block) {
        Vec values[kPanelRows];
        TF_UNROLL(4)
        for (int r = 0; r < kPanelRows; ++r) values[r] = split_values<Format>(w, panel, group, block, r);
        add(block, values);
      });
  TF_UNROLL(16)
  for (int a = 0; a < kPanelRows * Inputs; ++a) sums[a] = acc[a];
}

// A panel's values as fp32, in the f32 panel layout.
template <typename Format>
inline void decode_small_floats(const PanelView& w, const uint8_t* panel, float* out) {
  for_scale_groups(
      w,
      [&](int64_t group, int64_t begin, int64_t end) {
        typename Format::Scale scale[kPanelRows];
        for (int r = 0; r < kPanelRows; ++r) scale[r] = Format::scale(w, panel, group * kPanelRows + r);
        const uint8_t* codes = panel + w.codes_at + begin * kPanelRows * Format::kRowBytes;
        float* to = out + begin * kPanelBlockFloats;
        for (int64_t i = begin; i < end; ++i) {
          TF_UNROLL(4)
          for (int r = 0; r < kPanelRows; ++r, codes += Format::kRowBytes, to += 16) {
            v_store(to, Format::values(codes, scale[r]));
          }
        }
      },
      [&](int64_t group, int64_t block) {
        for (int r = 0; r < kPanelRows; ++r) {
          v_store(out + block * kPanelBlockFloats + 16 * r, split_values<Format>(w, panel, group, block, r));
        }
      });
}

// Row `row` of a panel as fp32.
template <typename Format>
inline void small_float_row(const PanelView& w, const uint8_t* panel, int row, float* out) {
  const auto put = [&](int64_t block, Vec values) {
    const int64_t left = w.cols - 16 * block;
    store_part(out + 16 * block, values, left < 16 ? left : 16);
  };
  for_scale_groups(
      w,
      [&](int64_t group, int64_t begin, int64_t end) {
        const typename Format::Scale scale = Format::scale(w, panel, group * kPanelRows + row);
        for (int64_t i = begin; i < end; ++i) {
          put(i, Format::values(panel + w.codes_at + (i * kPanelRows + row) * Format::kRowBytes, scale));
        }
      },
      [&](int64_t group, int64_t block) { put(block, split_values<Format>(w, panel, group, block, row)); });
}

}  // namespace tensorfold::TF_ISA
