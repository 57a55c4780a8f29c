// The recurrence of the gated delta net, one step a row in position order.
//
// S' = g S; r = S'^T k; d = (v - r) beta; S = S' + k d^T; y = S^T q.
//
// Multiplying S by g in each step would be a fourth of the work, so it is not done: the kernel holds U = S / G, where G
// is the product of the decays, and three fused multiply-adds an element and step remain (update, y, next step's r).
// The clock N = -log2 of the product of all decays since the sequence began is an integer with 40 fraction bits: sums
// of integers have no order, so it is a function of the row's history alone, and a scan may compute it. G = 2^-(N mod
// 64), in (2^-64, 1]; where N passes a multiple of 64 octaves U is multiplied by 2^-64 (exactly; by 0 if it passes more
// than one). State blocks hold U and N.
//
// Order of a step, the same for any number of rows, chunks and units a warp:
//   a column's dk rows are cut into 8 segments j of rows {32 m + 4 j + e}; per segment, e ascending, then m ascending:
//     U = fma(k, d, U);  y[m odd] = fma(q, U, y[m odd]);  r[m odd] = fma(k of the next row, U, r[m odd])
//   r: even + odd m, then the 8 segments as ((0+1)+(2+3))+((4+5)+(6+7)); y likewise, times G;
//   d = fma(-beta * scale, r, v * (beta / G)), scale being 1 or the factor of this step's rescaling.
//
// A block has 4 warps that step and 4 that feed them: those load k, q and v some chunks ahead, run the convolution of v
// and the clock's scan, and add up and store the y of the chunk before. One barrier a chunk joins them. Warps that step
// do nothing but loads from shared memory, multiply-adds and three shuffles a column.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/delta_net_params.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kStages = 3;  // chunks in flight
constexpr int kThreads = 64 * kDeltaWarps;
constexpr int kFeeders = 32 * kDeltaWarps;

// Floats of each part of the dynamic shared memory, in order. All are multiples of 4.
template <int DK, int Units, int Chunk>
struct Shared {
  static constexpr int kBlockUnits = kDeltaWarps * Units;
  static constexpr int kKq = 0;                                            // [stage][step][q, next k][DK]
  static constexpr int kKqFloats = Chunk * 2 * DK;                         // of a stage
  static constexpr int kFirstK = kKq + kStages * kKqFloats;                // [DK]
  static constexpr int kParts = kFirstK + DK;                              // [2][unit][step][column][segment]
  static constexpr int kPartsFloats = kBlockUnits * Chunk * 32;            // of a buffer
  static constexpr int kValues = kParts + 2 * kPartsFloats;                // [2][unit][step][column]{v beta/G, beta}
  static constexpr int kValuesFloats = kBlockUnits * Chunk * 8;            // of a buffer
  static constexpr int kDecay = kValues + 2 * kValuesFloats;               // [2][head][step]{G, beta/G, beta, scale}
  static constexpr int kDecayFloats = kBlockUnits * Chunk * 4;             // of a buffer
  static constexpr int kGates = kDecay + 2 * kDecayFloats;                 // [stage][head][step] DeltaGate
  static constexpr int kGatesFloats = kBlockUnits * Chunk * 4;             // of a stage
  static constexpr int kClock = kGates + kStages * kGatesFloats;           // uint64 [head]
  static constexpr int kRescale = kClock + 2 * kBlockUnits;                // uint32 [2][head]: steps that rescale
  static constexpr int kWeights = kRescale + 2 * kBlockUnits;              // [unit][tap][column]
  static constexpr int kRaw = kWeights + kBlockUnits * 4 * kDeltaMaxTaps;  // [stage][unit][taps - 1 + step][column]
  __host__ __device__ static constexpr int raw_floats(int taps) { return kBlockUnits * (Chunk + taps - 1) * 4; }
  static constexpr int bytes(int taps) { return 4 * (kRaw + kStages * raw_floats(taps)); }
};

__device__ __forceinline__ void copy16(void* shared, const void* global) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_wait_all_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
__device__ __forceinline__ void feeders_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kFeeders) : "memory"); }

__device__ __forceinline__ void store_release(int32_t* at, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// What all threads of a block know.
struct Work {
  DeviceGroup group;
  int g;           // group
  float* state;    // its state block
  int first_unit;  // units [first_unit, first_unit + units) are the block's
  int units;
  int first_head;  // value head of the first unit
  int heads;       // value heads the units touch
  int unit_heads;  // units a head has
  int k_head;
  int count;   // steps
  int commit;  // leading steps that advance the committed state
};

// The stepping warps' side: U, k and r of `Units` units in registers.
template <int DK, int Units, int Chunk>
struct Stepper {
  using S = Shared<DK, Units, Chunk>;
  static constexpr int kM = DK / 32;

  float* shared;
  int lane, column, segment, part;
  int unit0;  // in the block
  float u[Units][kM][4];
  float k[kM][4];
  float r[Units];  // the lane's part of the next step's r

  __device__ __forceinline__ Stepper(float* memory, int warp, int lane_index)
      : shared(memory),
        lane(lane_index),
        column(delta_lane_column(lane_index)),
        segment(delta_lane_segment(lane_index)),
        part(delta_lane_column(lane_index) * 8 + delta_lane_segment(lane_index)),
        unit0(warp * Units) {}

  __device__ __forceinline__ static void load4(float (&to)[4], const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x;
    to[1] = x.y;
    to[2] = x.z;
    to[3] = x.w;
  }

  __device__ __forceinline__ void load_state(const Work& work) {
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      const float* from = work.state + static_cast<int64_t>(work.first_unit + unit0 + i) * kDeltaUnit * DK;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (unit0 + i < work.units) {
          load4(u[i][m], from + delta_lane_offset(lane, m, 0));
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) u[i][m][e] = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void store_state(const Work& work) const {
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      float* to = work.state + static_cast<int64_t>(work.first_unit + unit0 + i) * kDeltaUnit * DK;
      if (unit0 + i >= work.units) continue;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        *reinterpret_cast<float4*>(to + delta_lane_offset(lane, m, 0)) =
            make_float4(u[i][m][0], u[i][m][1], u[i][m][2], u[i][m][3]);
      }
    }
  }

  __device__ __forceinline__ static float across_segments(float sum) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 4));
    return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
  }

  // The chains of even and odd m.
  __device__ __forceinline__ static float both(const float (&sum)[2]) {
    return kM > 1 ? __fadd_rn(sum[0], sum[1]) : sum[0];
  }

  // r of the first step, in the order in which pass() computes that of the next.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int m = 0; m < kM; ++m) load4(k[m], shared + S::kFirstK + 32 * m + 4 * segment);
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      float sum[2];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          sum[m & 1] = m < 2 && e == 0 ? __fmul_rn(k[m][e], u[i][m][e]) : __fmaf_rn(k[m][e], u[i][m][e], sum[m & 1]);
        }
      }
      r[i] = both(sum);
    }
  }

  // What a step reads from shared memory, apart from v.
  struct Rows {
    float q[kM][4], next[kM][4];
  };
  __device__ __forceinline__ static void load_rows(Rows& rows, const float* kq, int s) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      load4(rows.q[m], kq + s * 2 * DK + 32 * m);
      load4(rows.next[m], kq + s * 2 * DK + DK + 32 * m);
    }
  }
  __device__ __forceinline__ void take_next(const Rows& rows) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) k[m][e] = rows.next[m][e];
    }
  }

  // A step of one unit: U, the lane's parts of y (returned) and of the next r. `between` is called after the first and
  // the third quarter with 0 and 1.
  template <bool Rescale, typename Between>
  __device__ __forceinline__ float pass(int i, const Rows& rows, float d, float scale, const Between& between) {
    float y[2], sum[2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float& x = u[i][m][e];
        x = __fmaf_rn(k[m][e], d, Rescale ? __fmul_rn(x, scale) : x);
        y[m & 1] = m < 2 && e == 0 ? __fmul_rn(rows.q[m][e], x) : __fmaf_rn(rows.q[m][e], x, y[m & 1]);
        sum[m & 1] = m < 2 && e == 0 ? __fmul_rn(rows.next[m][e], x) : __fmaf_rn(rows.next[m][e], x, sum[m & 1]);
      }
      if (e % 2 == 0) between(e / 2);
    }
    r[i] = both(sum);
    return both(y);
  }

  // Step `s` of the chunk. Rescale: multiplies by the steps' scale, which is 1 where the clock passes nothing.
  template <bool Rescale>
  __device__ __forceinline__ void step(const float* kq, const float* values, const float* const (&decay)[Units],
                                       float* parts, int s) {
    Rows rows;
    load_rows(rows, kq, s);
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      const float2 v = *reinterpret_cast<const float2*>(values + i * Chunk * 8 + s * 8);
      const float d = __fmaf_rn(-v.y, across_segments(r[i]), v.x);
      const float scale = Rescale ? decay[i][s * 4 + 3] : 1.0f;
      parts[(i * Chunk + s) * 32] = pass<Rescale>(i, rows, d, scale, [](int) {});
    }
    take_next(rows);
  }

  // 4 * fours steps without rescaling.
  __device__ __forceinline__ void calm_steps(const float* kq, const float* values, const float* const (&decay)[Units],
                                             float* parts, int s, int fours) {
    if constexpr (Units == 3) {
      // A unit's sum over the segments takes as long as the passes of the two others: it runs beneath them, one
      // exchange in each half of a pass.
      const auto exchange = [](float sum, int distance) { return __shfl_xor_sync(0xffffffffu, sum, distance); };
      float whole = across_segments(r[0]);              // of the unit whose pass comes next
      float half = __fadd_rn(r[1], exchange(r[1], 2));  // of the one after it
      float far = exchange(half, 4);
#pragma unroll 1
      for (; fours > 0; --fours) {
#pragma unroll
        for (int j = 0; j < 4; ++j, ++s) {
          Rows rows;
          load_rows(rows, kq, s);
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            const float2 v = *reinterpret_cast<const float2*>(values + i * Chunk * 8 + s * 8);
            const float d = __fmaf_rn(-v.y, whole, v.x);
            const float last = r[(i + 2) % 3];
            float fresh = 0.0f, fresh_far = 0.0f;
            parts[(i * Chunk + s) * 32] = pass<false>(i, rows, d, 1.0f, [&](int quarter) {
              if (quarter == 0) {
                fresh_far = exchange(last, 2);
                half = __fadd_rn(half, far);
                far = exchange(half, 8);
              } else {
                fresh = __fadd_rn(last, fresh_far);
                fresh_far = exchange(fresh, 4);
                whole = __fadd_rn(half, far);
              }
            });
            half = fresh;
            far = fresh_far;
          }
          take_next(rows);
        }
      }
    } else {
#pragma unroll 1
      for (; fours > 0; --fours) {
#pragma unroll
        for (int j = 0; j < 4; ++j, ++s) step<false>(kq, values, decay, parts, s);
      }
    }
  }

  __device__ __forceinline__ void chunk(const Work& work, int c) {
    const int buffer = c & 1;
    const float* kq = shared + S::kKq + c % kStages * S::kKqFloats + 4 * segment;
    const float* values = shared + S::kValues + buffer * S::kValuesFloats + unit0 * Chunk * 8 + column * 2;
    float* parts = shared + S::kParts + buffer * S::kPartsFloats + unit0 * Chunk * 32 + part;
    const float* decay[Units];
    unsigned rescale = 0;
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      const int unit = unit0 + i < work.units ? unit0 + i : 0;
      const int head = (work.first_unit + unit) / work.unit_heads - work.first_head;
      decay[i] = shared + S::kDecay + buffer * S::kDecayFloats + head * Chunk * 4;
      rescale |= reinterpret_cast<const unsigned*>(shared + S::kRescale)[buffer * S::kBlockUnits + head];
    }
    const int n = min(Chunk, work.count - c * Chunk);
    const int commit = work.commit - c * Chunk;
    int s = 0;
    while (s < n) {
      const int limit = s < commit ? min(commit, n) : n;
      while (s < limit) {
        const unsigned ahead = rescale >> s;
        const int calm = ahead == 0 ? limit - s : min(limit - s, __ffs(static_cast<int>(ahead)) - 1);
        calm_steps(kq, values, decay, parts, s, calm / 4);
        s += calm / 4 * 4;
        const int stop = min(s + 4, limit);
#pragma unroll 1
        for (; s < stop; ++s) step<true>(kq, values, decay, parts, s);
      }
      if (s == commit) store_state(work);
    }
  }
};

// The feeding warps' side.
template <int DK, int Units, int Chunk>
struct Feeder {
  using S = Shared<DK, Units, Chunk>;

  const DeltaParams& p;
  const Work& work;
  float* shared;
  int thread;
  int heads[Units];  // of the warp's units, counted from the block's first

  __device__ __forceinline__ Feeder(const DeltaParams& params, const Work& block_work, float* memory, int index)
      : p(params), work(block_work), shared(memory), thread(index) {
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      const int unit = index / 32 * Units + i;
      heads[i] = unit < work.units ? (work.first_unit + unit) / work.unit_heads - work.first_head : 0;
    }
  }

  // Starts the loads of chunk c (beyond the last one: none, but a group all the same, so that waits count right).
  __device__ __forceinline__ void load(int c) const {
    const int base = c * Chunk;
    // All that the chunk reads are rows of this pass, one after another.
    if (base - (p.taps - 1) >= work.group.accepted && base + Chunk < work.count) {
      load_rows<true>(c % kStages, base);
    } else {
      load_rows<false>(c % kStages, base);
    }
    copies_commit();
  }

  template <bool Plain>
  __device__ __forceinline__ void load_rows(int stage, int base) const {
    constexpr int kPieces = DK / 4;                    // of 16 bytes, of q or k
    constexpr int kStride = kFeeders / (2 * kPieces);  // steps that all feeders load at once
    const int side = thread / kPieces % 2;             // q of this row, k of the next
    const int64_t width = 2 * static_cast<int64_t>(p.k_heads) * DK;
    const int64_t column = (side == 0 ? work.k_head : p.k_heads + work.k_head) * DK + thread % kPieces * 4;
    float* kq = shared + S::kKq + stage * S::kKqFloats + thread * 4;
    const int first = base + thread / (2 * kPieces) + side;
    const int64_t plain_row = static_cast<int64_t>(work.group.first_row) - work.group.accepted;
    const float* from = p.qk + (plain_row + first) * width + column;
#pragma unroll
    for (int s = 0; s < Chunk; s += kStride) {
      if constexpr (Plain) {
        copy16(kq + s * 2 * DK, from);
        from += kStride * width;
      } else if (first + s < work.count) {
        copy16(kq + s * 2 * DK, p.qk + delta_slot(p, work.group, work.g, first + s) * width + column);
      }
    }
    const int raw_rows = Chunk + p.taps - 1;
    float* raw = shared + S::kRaw + stage * S::raw_floats(p.taps);
    const int64_t v0 = width + work.first_unit * kDeltaUnit;
    for (int piece = thread; piece < raw_rows * S::kBlockUnits; piece += kFeeders) {
      const int row = piece / S::kBlockUnits, unit = piece % S::kBlockUnits;
      const int i = base + row - (p.taps - 1);
      if (unit >= work.units || (!Plain && i >= work.count)) continue;
      const float* inputs =
          Plain ? p.qkv.data + (plain_row + i) * p.qkv.stride : delta_raw_row(p, work.group, work.state, i);
      copy16(raw + (unit * raw_rows + row) * 4, inputs + v0 + unit * kDeltaUnit);
    }
    float* gates = shared + S::kGates + stage * S::kGatesFloats;
    for (int piece = thread; piece < work.heads * Chunk; piece += kFeeders) {
      const int head = piece / Chunk, i = base + piece % Chunk;
      if (!Plain && i >= work.count) continue;
      const int64_t slot = Plain ? plain_row + i : delta_slot(p, work.group, work.g, i);
      copy16(gates + piece * 4, p.gates + slot * p.v_heads + work.first_head + head);
    }
  }

  // k of the first row, the convolution's weights, and the clocks. Before the first feeders_sync().
  __device__ __forceinline__ void begin() const {
    const int64_t width = 2 * static_cast<int64_t>(p.k_heads) * DK;
    const float* k = p.qk + delta_slot(p, work.group, work.g, 0) * width + (p.k_heads + work.k_head) * DK;
    for (int piece = thread; piece < DK / 4; piece += kFeeders) copy16(shared + S::kFirstK + piece * 4, k + piece * 4);
    for (int i = thread; i < work.units * 4 * p.taps; i += kFeeders) {
      const int column = i % 4, tap = i / 4 % p.taps, unit = i / (4 * p.taps);
      const int64_t channel = width + (work.first_unit + unit) * kDeltaUnit + column;
      shared[S::kWeights + i] = p.conv[channel * p.taps + tap];
    }
    auto* clock = reinterpret_cast<unsigned long long*>(shared + S::kClock);
    const auto* kept = reinterpret_cast<const unsigned long long*>(work.state + p.state.clock);
    for (int head = thread; head < work.heads; head += kFeeders) {
      clock[head] = kept[max(work.first_unit, (work.first_head + head) * work.unit_heads)];
    }
  }

  // The clock over chunk c: what each of its steps multiplies by.
  __device__ __forceinline__ void scan(int c) const {
    constexpr int kHeads = 32 / Chunk;  // a warp does side by side
    const int lane = thread & 31, s = lane % Chunk;
    const int i = c * Chunk + s;
    auto* clock = reinterpret_cast<unsigned long long*>(shared + S::kClock);
    for (int base = thread / 32 * kHeads; base < work.heads; base += kDeltaWarps * kHeads) {
      const int head = base + lane / Chunk;
      const bool valid = head < work.heads && i < work.count;
      DeltaGate gate;
      if (valid) {
        gate = reinterpret_cast<const DeltaGate*>(shared + S::kGates + c % kStages * S::kGatesFloats)[head * Chunk + s];
      }
      const unsigned long long own = valid ? gate.octaves : 0;
      const unsigned long long start = head < work.heads ? clock[head] : 0;
      unsigned long long sum = own;
#pragma unroll
      for (int d = 1; d < Chunk; d *= 2) {
        const unsigned long long below = __shfl_up_sync(0xffffffffu, sum, d, Chunk);
        if (s >= d) sum += below;
      }
      const unsigned long long now = start + sum;
      const unsigned long long rounds =
          ((now >> kDeltaRescaleBits) - ((now - own) >> kDeltaRescaleBits)) & (~0ull >> kDeltaRescaleBits);
      const float scale = rounds == 0 ? 1.0f : rounds == 1 ? 0x1p-64f : 0.0f;
      const unsigned long long offset = now & ((1ull << kDeltaRescaleBits) - 1);
      const int whole = static_cast<int>(offset >> kDeltaClockBits);
      const float part = static_cast<float>(static_cast<unsigned>(offset >> (kDeltaClockBits - 32))) * 0x1p-32f;
      const float decay = exp2f(-part) * power_of_two(-whole);
      const float inverse = exp2f(part) * power_of_two(whole);
      const unsigned flags = __ballot_sync(0xffffffffu, valid && scale != 1.0f);
      __syncwarp();
      if (head >= work.heads) continue;
      float* to = shared + S::kDecay + (c & 1) * S::kDecayFloats + (head * Chunk + s) * 4;
      *reinterpret_cast<float4*>(to) = make_float4(decay, gate.beta * inverse, gate.beta * scale, scale);
      if (s == 0) {
        reinterpret_cast<unsigned*>(shared + S::kRescale)[(c & 1) * S::kBlockUnits + head] =
            flags >> (lane / Chunk * Chunk) & ((1u << Chunk) - 1);
      }
      if (s == Chunk - 1) clock[head] = now;
      if (i == work.commit - 1) keep_clock(head, now);
    }
  }

  __device__ __forceinline__ void keep_clock(int head, unsigned long long now) const {
    auto* kept = reinterpret_cast<unsigned long long*>(work.state + p.state.clock);
    const int begin = max(work.first_unit, (work.first_head + head) * work.unit_heads);
    const int end = min(work.first_unit + work.units, (work.first_head + head + 1) * work.unit_heads);
    for (int unit = begin; unit < end; ++unit) kept[unit] = now;
  }

  // v of chunk c: convolution and silu, times beta / G.
  __device__ __forceinline__ void values(int c) const {
    if (p.taps == 4) {
      convolve<4>(c);
    } else {
      convolve<0>(c);
    }
  }

  // Taps: their number, or 0 for any. The same chain for both.
  template <int Taps>
  __device__ __forceinline__ void convolve(int c) const {
    const int taps = Taps > 0 ? Taps : p.taps;
    const int lane = thread & 31, warp = thread / 32;
    const int column = lane & 3;
    const int s = (lane >> 2) * (Chunk / 8);
    const int raw_rows = Chunk + taps - 1;
    const float* raw = shared + S::kRaw + c % kStages * S::raw_floats(taps);
    float* to = shared + S::kValues + (c & 1) * S::kValuesFloats;
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      const int unit = warp * Units + i;
      const float* decay = shared + S::kDecay + (c & 1) * S::kDecayFloats + heads[i] * Chunk * 4;
      const float* weights = shared + S::kWeights + unit * taps * 4 + column;
      const float* x = raw + (unit * raw_rows + s) * 4 + column;
#pragma unroll
      for (int j = 0; j < Chunk / 8; ++j) {
        float sum = __fmul_rn(weights[0], x[j * 4]);
#pragma unroll
        for (int t = 1; t < taps; ++t) sum = __fmaf_rn(weights[t * 4], x[(j + t) * 4], sum);
        const float4 d = *reinterpret_cast<const float4*>(decay + (s + j) * 4);
        // Units beyond the block's hold whatever is there; nothing of theirs is stored.
        *reinterpret_cast<float2*>(to + ((unit * Chunk + s + j) * 4 + column) * 2) =
            make_float2(__fmul_rn(silu(sum), d.y), d.z);
      }
    }
  }

  // y of chunk c: adds the segments, multiplies by G, stores the rows of this pass.
  __device__ __forceinline__ void finish(int c) const {
    const int lane = thread & 31, warp = thread / 32;
    const int column = lane & 3;
    const float* parts = shared + S::kParts + (c & 1) * S::kPartsFloats;
    const int width = p.v_heads * p.dv;
    const int first = c * Chunk + (lane >> 2);
    float* to = p.y + (static_cast<int64_t>(work.group.first_row) + first - work.group.accepted) * width +
                (work.first_unit + warp * Units) * kDeltaUnit + column;
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      const int unit = warp * Units + i;
      if (unit >= work.units) continue;
      const float* decay = shared + S::kDecay + (c & 1) * S::kDecayFloats + heads[i] * Chunk * 4;
#pragma unroll
      for (int j = 0; j < Chunk / 8; ++j) {
        const int s = j * 8 + (lane >> 2);
        if (first + j * 8 < work.group.accepted || first + j * 8 >= work.count) continue;
        const float4* part = reinterpret_cast<const float4*>(parts + (unit * Chunk + s) * 32 + column * 8);
        const float4 low = part[0], high = part[1];
        const float sum = __fadd_rn(__fadd_rn(__fadd_rn(low.x, low.y), __fadd_rn(low.z, low.w)),
                                    __fadd_rn(__fadd_rn(high.x, high.y), __fadd_rn(high.z, high.w)));
        to[static_cast<int64_t>(j * 8) * width + i * kDeltaUnit] = __fmul_rn(sum, decay[s * 4]);
      }
    }
  }
};

template <int DK, int Units, int Chunk>
__global__ void __launch_bounds__(kThreads, Units == 1 ? 2 : 1)
    delta_steps_kernel(const __grid_constant__ DeltaParams p) {
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  // First wait, then let the last kernel in: it looks at this one's progress before it ends, and must find the counters
  // already cleared by the kernel before this one.
  pdl_wait();
  pdl_launch();
  const int g = static_cast<int>(blockIdx.y), block = static_cast<int>(blockIdx.x);
  if (g >= *p.group_count) return;

  Work work;
  work.group = p.groups[g];
  work.g = g;
  work.state = p.states[g];
  work.first_unit = delta_block_first(p.split, block);
  work.units = delta_block_count(p.split, block);
  work.unit_heads = p.dv / kDeltaUnit;
  work.first_head = work.first_unit / work.unit_heads;
  work.heads = (work.first_unit + work.units - 1) / work.unit_heads - work.first_head + 1;
  work.k_head = p.k_head_of[work.first_head];
  work.count = work.group.accepted + work.group.rows;
  work.commit = work.group.accepted + work.group.certain;
  if (work.count <= 0) return;
  const int chunks = (work.count + Chunk - 1) / Chunk;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  if (warp < kDeltaWarps) {
    Stepper<DK, Units, Chunk> stepper(shared, warp, static_cast<int>(threadIdx.x) % 32);
    stepper.load_state(work);
    for (int c = 0; c < chunks; ++c) {
      __syncthreads();
      if (c == 0) stepper.begin();
      stepper.chunk(work, c);
    }
    __syncthreads();
    return;
  }

  const Feeder<DK, Units, Chunk> feeder(p, work, shared, static_cast<int>(threadIdx.x) - 32 * kDeltaWarps);
  int32_t* progress = p.progress + static_cast<int64_t>(g) * p.split.blocks + block;
  feeder.begin();
  feeder.load(0);
  feeder.load(1);
  for (int c = 0; c <= chunks; ++c) {
    // Now chunk c - 1 has been stepped, and c is being stepped (before the loop: nothing, so c = 0 is prepared here).
    if (c == 0) {
      copies_wait_all_but_one();
      feeders_sync();
      feeder.scan(0);
      feeders_sync();
      feeder.values(0);
    }
    __syncthreads();
    feeder.load(c + 2);
    if (c > 0) feeder.finish(c - 1);
    copies_wait_all_but_one();  // chunk c + 1 is here
    feeders_sync();             // for all; and finish() has read what scan() overwrites
    if (c > 0 && feeder.thread == 0) {
      __threadfence();
      store_release(progress, min(c * Chunk, work.count));
    }
    if (c + 1 >= chunks) continue;
    feeder.scan(c + 1);
    feeders_sync();
    feeder.values(c + 1);
  }
}

template <int DK, int Units, int Chunk>
void launch_steps(cudaStream_t stream, const DeltaParams& params) {
  const auto kernel = delta_steps_kernel<DK, Units, Chunk>;
  const int bytes = Shared<DK, Units, Chunk>::bytes(params.taps);
  // Once a device would do, but it is cheap, and a rank may own any device.
  if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "delta net steps")) {
    return;
  }
  const dim3 grid(static_cast<unsigned>(params.split.blocks), static_cast<unsigned>(params.max_groups));
  launch_kernel(kernel, grid, dim3(kThreads), static_cast<size_t>(bytes), stream, "delta net steps", params);
}

}  // namespace

int64_t delta_steps_shared(int64_t dk, const DeltaPlan& plan, int64_t taps) {
  const int t = static_cast<int>(taps);
  if (plan.units_per_warp == 3) {
    return plan.chunk == 16 ? Shared<128, 3, 16>::bytes(t) : Shared<128, 3, 8>::bytes(t);
  }
  if (dk == 128) return Shared<128, 1, 8>::bytes(t);
  return dk == 64 ? Shared<64, 1, 8>::bytes(t) : Shared<32, 1, 8>::bytes(t);
}

void cuda_delta_steps(cudaStream_t stream, const DeltaParams& params, const DeltaPlan& plan) {
  if (plan.units_per_warp == 3 && params.dk == 128) {
    return plan.chunk == 16 ? launch_steps<128, 3, 16>(stream, params) : launch_steps<128, 3, 8>(stream, params);
  }
  if (params.dk == 128) return launch_steps<128, 1, 8>(stream, params);
  if (params.dk == 64) return launch_steps<64, 1, 8>(stream, params);
  kernel_check(params.dk == 32, "delta net: key heads must have 32, 64 or 128 dims");
  launch_steps<32, 1, 8>(stream, params);
}

}  // namespace tensorfold
