// Matrix products. Included by the isa_*.cc files only.
//
// One order for everything: output (r, n) has 16 lanes, lane l adds w[n, 16 i + l] * x[r, 16 i + l] by fma for
// ascending i, then the lanes are folded by the fixed tree. Tiles, panels, threads and the number of rows decide only
// which outputs are computed together.
#pragma once

namespace tensorfold::TF_ISA {

// Readers of 16 weights of row `row` in k block `block` of a panel.
struct F32Reader {
  static constexpr int64_t kBlockBytes = kPanelBlockFloats * 4;
  static Vec load(const uint8_t* panel, int64_t block, int row) {
    return v_load(reinterpret_cast<const float*>(panel + block * kBlockBytes) + row * 16);
  }
};
struct Bf16Reader {
  static constexpr int64_t kBlockBytes = kPanelBlockFloats * 2;
  static Vec load(const uint8_t* panel, int64_t block, int row) {
    return v_load_bf16(reinterpret_cast<const uint16_t*>(panel + block * kBlockBytes) + row * 16);
  }
};
struct F16Reader {
  static constexpr int64_t kBlockBytes = kPanelBlockFloats * 2;
  static Vec load(const uint8_t* panel, int64_t block, int row) {
    return v_load_f16(reinterpret_cast<const uint16_t*>(panel + block * kBlockBytes) + row * 16);
  }
};

// The 16 codes of one row in one k block, lower plane first.
template <int Bits>
inline Vec load_codes(const uint8_t* p) {
  if constexpr (Bits == 8) return v_from_int(i_codes8(p));
  if constexpr (Bits == 6) return v_from_int(i_or(i_codes4(p), i_shl<4>(i_codes2(p + 8))));
  if constexpr (Bits == 5) return v_from_int(i_or(i_codes4(p), i_shl<4>(i_codes1(p + 8))));
  if constexpr (Bits == 4) return v_from_int(i_codes4(p));
  if constexpr (Bits == 3) return v_from_int(i_or(i_codes2(p), i_shl<2>(i_codes1(p + 4))));
  if constexpr (Bits == 2) return v_from_int(i_codes2(p));
}

// Scale (index 0..3) or bias (4..7) of a group's four rows.
template <bool kBf16>
inline float group_value(const uint8_t* group, int index) {
  uint32_t bits = 0;
  if constexpr (kBf16) {
    uint16_t half;
    __builtin_memcpy(&half, group + 2 * index, 2);
    bits = static_cast<uint32_t>(half) << 16;
  } else {
    __builtin_memcpy(&bits, group + 4 * index, 4);
  }
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// The outputs of one tile: acc[x * weights + w] -> out[x * stride + w], for the first `count` weights.
template <int Weights, int Inputs>
inline void store_tile(const Vec* acc, float* out, int64_t stride, int64_t count) {
  constexpr int kOutputs = Weights * Inputs;
  float sums[(kOutputs + 15) / 16 * 16];
  constexpr int kSixteens = kOutputs / 16 * 16;
  TF_UNROLL(2)
  for (int i = 0; i < kSixteens; i += 16) v_fold16(acc + i, sums + i);
  constexpr int kEights = kSixteens + (kOutputs - kSixteens) / 8 * 8;
  if constexpr (kEights > kSixteens) v_fold8(acc + kSixteens, sums + kSixteens);
  if constexpr (kOutputs - kEights >= 4) v_fold4(acc + kEights, sums + kEights);
  for (int i = kEights + (kOutputs - kEights) / 4 * 4; i < kOutputs; ++i) sums[i] = v_fold(acc[i]);
  for (int x = 0; x < Inputs; ++x) {
    if (count == Weights) {
      __builtin_memcpy(out + x * stride, sums + x * Weights, Weights * sizeof(float));
    } else {
      for (int64_t w = 0; w < count; ++w) out[x * stride + w] = sums[x * Weights + w];
    }
  }
}

// Rows [first, first + Rows) of a panel times `Inputs` input rows.
template <typename Reader, int Rows, int Inputs>
inline void run_tile(const uint8_t* panel, int first, int64_t cols, const float* x, int64_t x_stride, float* out,
                     int64_t out_stride, int64_t count) {
  Vec acc[Rows * Inputs];
  TF_UNROLL(32)  // a loop would put them in memory for good
  for (int a = 0; a < Rows * Inputs; ++a) acc[a] = v_zero();
  const int64_t full = cols / 16;
  for (int64_t i = 0; i < full; ++i) {
    Vec w[Rows];
    TF_UNROLL(4)
    for (int j = 0; j < Rows; ++j) w[j] = Reader::load(panel, i, first + j);
    // Panels follow one another, so this runs on into the next one.
    for (int64_t line = 0; line < Reader::kBlockBytes * Rows / kPanelRows; line += 64) {
      __builtin_prefetch(panel + i * Reader::kBlockBytes + first * (Reader::kBlockBytes / kPanelRows) + line +
                         kPrefetchBytes);
    }
    TF_UNROLL(8)
    for (int r = 0; r < Inputs; ++r) {
      const Vec xv = v_load(x + r * x_stride + 16 * i);
      TF_UNROLL(4)
      for (int j = 0; j < Rows; ++j) acc[r * Rows + j] = v_fma(w[j], xv, acc[r * Rows + j]);
    }
  }
  if (cols % 16 != 0) {  // the packed weights are zero there; the input must be too
    TF_UNROLL(8)
    for (int r = 0; r < Inputs; ++r) {
      const Vec xv = v_load_n(x + r * x_stride + 16 * full, cols % 16);
      TF_UNROLL(4)
      for (int j = 0; j < Rows; ++j)
        acc[r * Rows + j] = v_fma(Reader::load(panel, full, first + j), xv, acc[r * Rows + j]);
    }
  }
  store_tile<Rows, Inputs>(acc, out, out_stride, count);
}

// One panel times `Inputs` input rows, in register tiles of `Rows` weights.
template <typename Reader, int Rows, int Inputs>
inline void run_panel(const uint8_t* panel, int64_t cols, const float* x, int64_t x_stride, float* out,
                      int64_t out_stride, int64_t count) {
  for (int first = 0; first < kPanelRows && first < count; first += Rows) {
    const int64_t left = count - first;
    run_tile<Reader, Rows, Inputs>(panel, first, cols, x, x_stride, out + first, out_stride, left < Rows ? left : Rows);
  }
}

template <typename Reader>
inline void run_panel_inputs(int inputs, const uint8_t* panel, int64_t cols, const float* x, int64_t x_stride,
                             float* out, int64_t out_stride, int64_t count) {
  switch (inputs) {
    case 1:
      return run_panel<Reader, 4, 1>(panel, cols, x, x_stride, out, out_stride, count);
    case 2:
      return run_panel<Reader, kTileRows, 2>(panel, cols, x, x_stride, out, out_stride, count);
    default:
      break;
  }
  if constexpr (kTileInputs > 2) {
    switch (inputs) {
      case 3:
        return run_panel<Reader, 4, 3>(panel, cols, x, x_stride, out, out_stride, count);
      case 4:
        return run_panel<Reader, 4, 4>(panel, cols, x, x_stride, out, out_stride, count);
      case 5:
        return run_panel<Reader, 4, 5>(panel, cols, x, x_stride, out, out_stride, count);
      default:
        return run_panel<Reader, 4, 6>(panel, cols, x, x_stride, out, out_stride, count);
    }
  }
}

// Calls body(first_row, count) for input tiles of at most kTileInputs rows, as even as possible.
template <typename Body>
inline void for_input_tiles(int64_t rows, Body body) {
  const int64_t tiles = (rows + kTileInputs - 1) / kTileInputs;
  for (int64_t t = 0, first = 0; t < tiles; ++t) {
    const int64_t count = (rows - first + tiles - t - 1) / (tiles - t);
    body(first, count);
    first += count;
  }
}

inline int64_t panel_count(const PanelView& w, int64_t panel) {
  const int64_t left = w.rows - panel * kPanelRows;
  return left < kPanelRows ? left : kPanelRows;
}

// Panels [0, panels) at `base` times all input rows; `out` is at the first panel's first column. Each input tile
// (first-level cache) meets all panels (second-level cache) before the next.
template <typename Reader>
inline void run_panels(const PanelView& w, const uint8_t* base, int64_t panel_bytes, int64_t first_panel,
                       int64_t panels, const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride) {
  for_input_tiles(rows, [&](int64_t first, int64_t count) {
    for (int64_t p = 0; p < panels; ++p) {
      run_panel_inputs<Reader>(static_cast<int>(count), base + p * panel_bytes, w.cols, x + first * x_stride, x_stride,
                               out + first * out_stride + p * kPanelRows, out_stride, panel_count(w, first_panel + p));
    }
  });
}

// One affine panel times one input row.
template <int Bits, bool kBf16>
inline void affine_single(const PanelView& w, const uint8_t* panel, const float* x, float* out, int64_t count) {
  Vec acc[kPanelRows];
  for (Vec& a : acc) a = v_zero();
  for (int64_t block = 0; block < w.k_blocks; block += w.group_blocks, panel += w.group_bytes) {
    Vec scale[kPanelRows], bias[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) {
      scale[r] = v_set1(group_value<kBf16>(panel, r));
      bias[r] = v_set1(group_value<kBf16>(panel, r + 4));
    }
    const uint8_t* codes = panel + (kBf16 ? 16 : 32);
    for (int64_t i = 0; i < w.group_blocks; ++i, codes += 8 * Bits) {
      __builtin_prefetch(codes + kPrefetchBytes);
      const Vec xv = v_load(x + 16 * (block + i));
      TF_UNROLL(4)
      for (int r = 0; r < kPanelRows; ++r) {
        acc[r] = v_fma(v_fma(scale[r], load_codes<Bits>(codes + r * 2 * Bits), bias[r]), xv, acc[r]);
      }
    }
  }
  store_tile<kPanelRows, 1>(acc, out, 0, count);
}

// An affine panel's values as fp32, in the f32 panel layout.
template <int Bits, bool kBf16>
inline void decode_affine(const PanelView& w, const uint8_t* panel, float* out) {
  for (int64_t block = 0; block < w.k_blocks; block += w.group_blocks, panel += w.group_bytes) {
    const uint8_t* codes = panel + (kBf16 ? 16 : 32);
    for (int64_t i = 0; i < w.group_blocks; ++i) {
      for (int r = 0; r < kPanelRows; ++r, out += 16, codes += 2 * Bits) {
        const Vec scale = v_set1(group_value<kBf16>(panel, r)), bias = v_set1(group_value<kBf16>(panel, r + 4));
        v_store(out, v_fma(scale, load_codes<Bits>(codes), bias));
      }
    }
  }
}

struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

// Calls body with the constants of an affine view.
template <typename Body>
inline void with_affine(const PanelView& w, Body body) {
  const auto with_bits = [&](auto bf16) {
    switch (w.bits) {
      case 2:
        return body.template operator()<2, decltype(bf16)::value>();
      case 3:
        return body.template operator()<3, decltype(bf16)::value>();
      case 4:
        return body.template operator()<4, decltype(bf16)::value>();
      case 5:
        return body.template operator()<5, decltype(bf16)::value>();
      case 6:
        return body.template operator()<6, decltype(bf16)::value>();
      default:
        return body.template operator()<8, decltype(bf16)::value>();
    }
  };
  if (w.bf16_scales) {
    with_bits(Yes{});
  } else {
    with_bits(No{});
  }
}

// Up to here the tiles of a window meet one panel (first-level cache) after another.
inline constexpr int64_t kWindowRows = 12;
// Panels that more input rows meet together: as many as stay in the second-level cache beside the input.
inline constexpr int64_t kGroupBytes = 160 * 1024;
inline int64_t group_panels(int64_t panel_bytes) {
  const int64_t fit = kGroupBytes / panel_bytes;
  return fit < 1 ? 1 : (fit > 16 ? 16 : fit);
}
// Up to here FP8 and FP4 are decoded in registers, for each tile of rows again.
inline constexpr int64_t kDirectRows = 2 * kCodedInputs;
inline int64_t decoded_panel_floats(const PanelView& w) { return w.k_blocks * kPanelBlockFloats; }
inline bool is_plain_kind(PanelKind kind) {
  return kind == PanelKind::kF32 || kind == PanelKind::kBf16 || kind == PanelKind::kF16;
}
inline int64_t matmul_scratch_floats(const PanelView& w) {
  return is_plain_kind(w.kind) ? 1 : group_panels(4 * decoded_panel_floats(w)) * decoded_panel_floats(w);
}

// Plain formats are widened in registers; every panel's bytes come from memory once.
template <typename Reader>
inline void matmul_plain(const PanelView& w, int64_t panel_begin, int64_t panel_end, const float* x, int64_t x_stride,
                         int64_t rows, float* out, int64_t out_stride) {
  int64_t group = rows <= kWindowRows ? 1 : group_panels(w.panel_bytes);
  if (rows <= kTileInputs) group = panel_end - panel_begin;
  for (int64_t p = panel_begin; p < panel_end; p += group) {
    run_panels<Reader>(w, w.data + p * w.panel_bytes, w.panel_bytes, p, p + group < panel_end ? group : panel_end - p,
                       x, x_stride, rows, out + p * kPanelRows, out_stride);
  }
}

// Coded formats: up to `direct_rows` rows straight from the codes by direct(panel bytes, out, count), more rows from
// panels that are dequantised once by decode(panel bytes, floats).
template <typename Direct, typename Decode>
inline void matmul_coded(const PanelView& w, int64_t panel_begin, int64_t panel_end, const float* x, int64_t x_stride,
                         int64_t rows, float* out, int64_t out_stride, float* scratch, int64_t direct_rows,
                         Direct direct, Decode decode) {
  if (rows <= direct_rows) {
    for (int64_t p = panel_begin; p < panel_end; ++p) {
      direct(w.data + p * w.panel_bytes, out + p * kPanelRows, panel_count(w, p));
    }
    return;
  }
  const int64_t panel_floats = decoded_panel_floats(w),
                group = rows <= kWindowRows ? 1 : group_panels(4 * panel_floats);
  for (int64_t p = panel_begin; p < panel_end; p += group) {
    const int64_t panels = p + group < panel_end ? group : panel_end - p;
    for (int64_t i = 0; i < panels; ++i) decode(w.data + (p + i) * w.panel_bytes, scratch + i * panel_floats);
    run_panels<F32Reader>(w, reinterpret_cast<const uint8_t*>(scratch), panel_floats * 4, p, panels, x, x_stride, rows,
                          out + p * kPanelRows, out_stride);
  }
}

// One FP8 or FP4 panel times `inputs` input rows, at most kCodedInputs.
template <typename Format, int Inputs = kCodedInputs>
inline void small_float_panel(const PanelView& w, const uint8_t* panel, int64_t inputs, const float* x,
                              int64_t x_stride, float* out, int64_t out_stride, int64_t count) {
  if constexpr (Inputs > 1) {
    if (inputs < Inputs) {
      return small_float_panel<Format, Inputs - 1>(w, panel, inputs, x, x_stride, out, out_stride, count);
    }
  }
  Vec sums[kPanelRows * Inputs];
  small_float_sums<Format, Inputs>(w, panel, x, x_stride, sums);
  store_tile<kPanelRows, Inputs>(sums, out, out_stride, count);
}

// Which tiles are taken reads the row count; each output's arithmetic and its order are the same in all of them.
inline void matmul(const PanelView& w, int64_t panel_begin, int64_t panel_end, const float* x, int64_t x_stride,
                   int64_t rows, float* out, int64_t out_stride, float* scratch) {
  switch (w.kind) {
    case PanelKind::kF32:
      return matmul_plain<F32Reader>(w, panel_begin, panel_end, x, x_stride, rows, out, out_stride);
    case PanelKind::kBf16:
      return matmul_plain<Bf16Reader>(w, panel_begin, panel_end, x, x_stride, rows, out, out_stride);
    case PanelKind::kF16:
      return matmul_plain<F16Reader>(w, panel_begin, panel_end, x, x_stride, rows, out, out_stride);
    case PanelKind::kAffine:
      return with_affine(w, [&]<int Bits, bool kBf16>() {
        matmul_coded(
            w, panel_begin, panel_end, x, x_stride, rows, out, out_stride, scratch, 1,
            [&](const uint8_t* panel, float* to, int64_t count) { affine_single<Bits, kBf16>(w, panel, x, to, count); },
            [&](const uint8_t* panel, float* to) { decode_affine<Bits, kBf16>(w, panel, to); });
      });
    case PanelKind::kFp8:
    case PanelKind::kFp4:
      break;
  }
  with_small_float(w, [&](auto format) {
    using Format = decltype(format);
    matmul_coded(
        w, panel_begin, panel_end, x, x_stride, rows, out, out_stride, scratch, kDirectRows,
        [&](const uint8_t* panel, float* to, int64_t count) {
          for (int64_t first = 0, tiles = (rows + kCodedInputs - 1) / kCodedInputs; first < rows; --tiles) {
            const int64_t inputs = (rows - first + tiles - 1) / tiles;
            small_float_panel<Format>(w, panel, inputs, x + first * x_stride, x_stride, to + first * out_stride,
                                      out_stride, count);
            first += inputs;
          }
        },
        [&](const uint8_t* panel, float* to) { decode_small_floats<Format>(w, panel, to); });
  });
}

// One row of a weight as fp32.
inline void dequantise_row(const PanelView& w, int64_t row, float* out) {
  const uint8_t* panel = w.data + row / kPanelRows * w.panel_bytes;
  const int r = static_cast<int>(row % kPanelRows);
  const auto plain = [&](auto reader) {
    for_lanes(w.cols,
              [&](int64_t i, int64_t lanes) { store_part(out + i, decltype(reader)::load(panel, i / 16, r), lanes); });
  };
  switch (w.kind) {
    case PanelKind::kF32:
      return plain(F32Reader{});
    case PanelKind::kBf16:
      return plain(Bf16Reader{});
    case PanelKind::kF16:
      return plain(F16Reader{});
    case PanelKind::kAffine:
      return with_affine(w, [&]<int Bits, bool kBf16>() {
        for (int64_t i = 0; i < w.k_blocks; ++i) {
          const uint8_t* group = panel + i / w.group_blocks * w.group_bytes;
          const uint8_t* codes = group + (kBf16 ? 16 : 32) + (i % w.group_blocks) * 8 * Bits + r * 2 * Bits;
          const Vec scale = v_set1(group_value<kBf16>(group, r)), bias = v_set1(group_value<kBf16>(group, r + 4));
          v_store(out + 16 * i, v_fma(scale, load_codes<Bits>(codes), bias));
        }
      });
    case PanelKind::kFp8:
    case PanelKind::kFp4:
      break;
  }
  with_small_float(w, [&](auto format) { small_float_row<decltype(format)>(w, panel, r, out); });
}

}  // namespace tensorfold::TF_ISA
