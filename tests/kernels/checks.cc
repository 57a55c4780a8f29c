#include "tests/kernels/checks.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace tensorfold {

void Checker::expect(bool ok, const std::string& what) {
  if (!ok) failures_.push_back(what);
}

std::span<const NamedCheck> all_checks() {
  static const std::vector<NamedCheck> checks = [] {
    std::vector<NamedCheck> all;
    for (const auto& part :
         {numerics_checks(), vector_math_checks(), matmul_checks(), small_float_checks(), rowwise_checks(),
          attention_checks(), delta_net_checks(), expert_checks(), state_checks(), mamba2_checks(), stream_checks(),
          latent_checks(), shared_latent_checks(), block_checks(), latent_block_checks(), golden_checks()}) {
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }();
  return checks;
}

uint64_t Random::bits() {
  state_ += 0x9E3779B97F4A7C15u;
  uint64_t x = state_;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

float Random::uniform() { return static_cast<float>(static_cast<int64_t>(bits() >> 40) - (1 << 23)) * 0x1p-23f; }

float Random::wide() {
  const float u = uniform();
  return std::ldexp(u, static_cast<int>(below(25)) - 12);
}

std::vector<float> Random::vector(int64_t n, bool is_wide) {
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = is_wide ? wide() : uniform();
  return v;
}

namespace {

void put_value(std::byte* at, float x, WeightFormat format) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (format == WeightFormat::kF32) {
    std::memcpy(at, &bits, 4);
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);  // bf16, truncated
  if (format == WeightFormat::kF16) {
    const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
    const uint32_t mantissa = bits >> 13 & 1023;
    const uint32_t magnitude = exponent <= 0    ? (exponent > -10 ? (1024 | mantissa) >> (1 - exponent) : 0)
                               : exponent >= 31 ? 0x7bffu
                                                : static_cast<uint32_t>(exponent) << 10 | mantissa;
    half = static_cast<uint16_t>((bits >> 16 & 0x8000) | magnitude);
  }
  std::memcpy(at, &half, 2);
}

int64_t value_bytes(WeightFormat format) { return format == WeightFormat::kF32 ? 4 : 2; }

}  // namespace

std::unique_ptr<OwnedMatrix> random_matrix(Random* random, int64_t rows, int64_t cols, WeightFormat format, int bits,
                                           int group, WeightFormat scale_format) {
  auto m = std::make_unique<OwnedMatrix>();
  MatrixSource& s = m->source;
  s = {format, rows, cols, nullptr, 0, bits, group, scale_format, nullptr, nullptr, 0};
  if (format == WeightFormat::kMlxAffine) {
    s.row_bytes = cols * bits / 8;
    s.scale_row_bytes = cols / group * value_bytes(scale_format);
    m->data.resize(static_cast<size_t>(rows * s.row_bytes));
    for (std::byte& b : m->data) b = static_cast<std::byte>(random->bits());
    for (std::vector<std::byte>* part : {&m->scales, &m->biases}) {
      part->resize(static_cast<size_t>(rows * s.scale_row_bytes));
      for (int64_t i = 0; i < rows * (cols / group); ++i) {
        put_value(part->data() + i * value_bytes(scale_format), random->uniform() * 0.25f, scale_format);
      }
    }
    s.scales = m->scales.data();
    s.biases = m->biases.data();
  } else {
    s.row_bytes = cols * value_bytes(format);
    m->data.resize(static_cast<size_t>(rows * s.row_bytes));
    for (int64_t i = 0; i < rows * cols; ++i)
      put_value(m->data.data() + i * value_bytes(format), random->wide(), format);
  }
  s.data = m->data.data();
  return m;
}

std::unique_ptr<OwnedMatrix> random_small_floats(Random* random, int64_t rows, int64_t cols, WeightFormat format,
                                                 WeightFormat scale_format, int64_t block_rows, int64_t block_cols,
                                                 float global_scale, bool divide) {
  auto m = std::make_unique<OwnedMatrix>();
  MatrixSource& s = m->source;
  s.format = format;
  s.rows = rows;
  s.cols = cols;
  s.row_bytes = format == WeightFormat::kE4m3 ? cols : (cols + 1) / 2;
  s.block_rows = block_rows;
  s.block_cols = block_cols;
  s.scale_format = scale_format;
  s.global_scale = global_scale;
  s.divide_by_global = divide;
  m->data.resize(static_cast<size_t>(rows * s.row_bytes));
  for (std::byte& b : m->data) {
    const uint64_t bits = random->bits();
    b = static_cast<std::byte>(format == WeightFormat::kE4m3 && (bits & 0x7f) == 0x7f ? bits ^ 1 : bits);
  }
  const bool bytes = scale_format == WeightFormat::kE4m3 || scale_format == WeightFormat::kE8m0;
  const int64_t across = (cols - 1) / block_cols + 1, scales = ((rows - 1) / block_rows + 1) * across;
  s.scale_row_bytes = across * (bytes ? 1 : value_bytes(scale_format));
  m->scales.resize(static_cast<size_t>(scales * (bytes ? 1 : value_bytes(scale_format))));
  for (int64_t i = 0; i < scales; ++i) {
    const uint64_t bits = random->bits();
    std::byte* at = m->scales.data() + i * (bytes ? 1 : value_bytes(scale_format));
    if (scale_format == WeightFormat::kE8m0) {
      // The ends of the range too: subnormal values, and large ones that a product still holds.
      *at = static_cast<std::byte>(bits % 8 == 0 ? bits / 8 % 12 : 90 + bits / 8 % 70);
    } else if (scale_format == WeightFormat::kE4m3) {
      *at = static_cast<std::byte>((bits & 0x7f) == 0x7f ? bits ^ 1 : bits);
    } else {
      put_value(at, random->wide(), scale_format);
    }
  }
  s.data = m->data.data();
  s.scales = m->scales.data();
  return m;
}

std::unique_ptr<OwnedMatrix> as_f32(const MatrixSource& source) {
  const RefMatrix values = ref_dequantise(source);
  auto m = std::make_unique<OwnedMatrix>();
  m->data.resize(values.v.size() * 4);
  for (size_t i = 0; i < values.v.size(); ++i) {
    put_value(m->data.data() + 4 * i, static_cast<float>(values.v[i]), WeightFormat::kF32);
  }
  m->source = {
      WeightFormat::kF32, source.rows, source.cols, m->data.data(), source.cols * 4, 0, 0, {}, nullptr, nullptr, 0};
  return m;
}

std::vector<Variant> all_variants(const std::vector<int>& threads) {
  std::vector<Variant> variants;
  for (const std::string& isa : available_isas()) {
    for (int count : threads) {
      std::string error;
      CpuOptions options;
      options.isa = isa;
      options.threads = count;
      variants.push_back({isa + "/" + std::to_string(count), make_cpu_ops(options, &error)});
    }
  }
  return variants;
}

Tensor upload(Ops& ops, int64_t rows, int64_t cols, const std::vector<float>& values) {
  const Tensor t = ops.scratch(rows, cols);
  ops.upload(values, t);
  return t;
}

std::vector<float> download(Ops& ops, Tensor t) {
  std::vector<float> values(static_cast<size_t>(t.rows * t.cols));
  ops.download(t, values);
  return values;
}

RefMatrix to_ref(int64_t rows, int64_t cols, const std::vector<float>& values) {
  RefMatrix m(rows, cols);
  m.v.assign(values.begin(), values.end());
  return m;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

uint64_t hash_bits(const std::vector<float>& values, uint64_t seed) {
  for (float x : values) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    for (int i = 0; i < 4; ++i) seed = (seed ^ (bits >> (8 * i) & 255)) * 0x100000001b3u;
  }
  return seed;
}

double relative_error(const std::vector<float>& a, const RefMatrix& b, double floor) {
  double worst = a.size() == b.v.size() ? 0.0 : HUGE_VAL;
  for (size_t i = 0; i < a.size() && i < b.v.size(); ++i) {
    const double error = std::abs(a[i] - b.v[i]) / (std::abs(b.v[i]) + floor);
    worst = error <= worst ? worst : error;  // a NaN is the worst
  }
  return worst;
}

}  // namespace tensorfold
