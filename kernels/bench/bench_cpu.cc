#include "kernels/bench/bench_cpu.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr size_t kLine = 8;  // doubles a cache line

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Something to measure: one turn of it, and the shortest turn so far.
struct Probe {
  std::function<void()> turn;
  double best = 1e30;
};

// A matrix of a format with its bytes: codes and scales that are ordinary numbers, all different.
struct StoredMatrix {
  MatrixSource source;
  std::vector<uint16_t> data, scales;

  StoredMatrix(const StoredFormat& format, int64_t rows, int64_t cols) : source(format.source) {
    MatrixSource& s = source;
    s.rows = rows;
    s.cols = cols;
    const bool affine = s.format == WeightFormat::kMlxAffine;
    const bool fp4 = s.format == WeightFormat::kE2m1, fp8 = s.format == WeightFormat::kE4m3;
    s.row_bytes = affine                           ? cols * s.bits / 8
                  : fp4                            ? cols / 2
                  : fp8                            ? cols
                  : s.format == WeightFormat::kF32 ? 4 * cols
                                                   : 2 * cols;
    data.resize(static_cast<size_t>(rows * s.row_bytes / 2));
    for (size_t i = 0; i < data.size(); ++i) {
      const auto bits = static_cast<uint16_t>(i * 2654435761u >> 7);
      // Numbers near 1, any code of FP4 and integers, and FP8 codes below 2, which none of NaN is.
      data[i] = fp8 ? bits & 0xbfbf : fp4 || affine ? bits : static_cast<uint16_t>(0x3c00 + bits % 512);
    }
    s.data = reinterpret_cast<const std::byte*>(data.data());
    if (!affine && !fp4 && !fp8) return;
    const bool bytes = s.scale_format == WeightFormat::kE4m3 || s.scale_format == WeightFormat::kE8m0;
    const int64_t across = affine ? cols / s.group : (cols - 1) / s.block_cols + 1;
    s.scale_row_bytes = across * (bytes ? 1 : s.scale_format == WeightFormat::kF32 ? 4 : 2);
    // As many for each row are enough for every block's rows. 0x3c3c is a number near 1 in each of these formats but
    // e8m0, where it is tiny.
    scales.assign(static_cast<size_t>(rows * s.scale_row_bytes / 2 + 1), 0x3c3c);
    s.scales = s.biases = reinterpret_cast<const std::byte*>(scales.data());
  }
};

// The products of a case, packed and ready.
class Products {
 public:
  Products(Ops* ops, const MatmulCase& one) : ops_(ops) {
    for (const MatmulShape& shape : one.shapes) {
      const StoredMatrix matrix(one.format, shape.out, shape.cols);
      const Tensor x = ops->persistent(one.rows, shape.cols), out = ops->persistent(one.rows, shape.out);
      ops->upload(std::vector<float>(static_cast<size_t>(one.rows * shape.cols), 0.5f), x);
      for (int64_t i = 0; i < shape.copies; ++i) {
        calls_.push_back({ops->pack(std::span<const MatrixSource>(&matrix.source, 1)), x, out});
        times_.bytes += static_cast<double>(calls_.back().weight->bytes());
        times_.operations += 2.0 * static_cast<double>(one.rows * shape.out * shape.cols);
      }
    }
  }
  void run() {
    for (const Call& call : calls_) ops_->matmul(*call.weight, call.x, call.out);
  }
  const MatmulTimes& times() const { return times_; }

 private:
  struct Call {
    std::unique_ptr<Weight> weight;
    Tensor x, out;
  };
  Ops* ops_;
  std::vector<Call> calls_;
  MatmulTimes times_;
};

}  // namespace

class LimitProbe::Bandwidth {
 public:
  explicit Bandwidth(ThreadPool* pool) : pool_(pool), memory_(kPiece * kPieces * 4) {
    pool_->parallel_for(kPieces, 1, [&](int64_t begin, int64_t end, int) {
      std::memset(memory_.floats() + begin * kPiece, 0, static_cast<size_t>((end - begin) * kPiece) * 4);
    });
  }
  void run(const KernelTable& kernels) {
    pool_->parallel_for(kPieces, 16, [&](int64_t begin, int64_t end, int) {
      volatile float sum = kernels.read_all(memory_.floats() + begin * kPiece, (end - begin) * kPiece);
      static_cast<void>(sum);
    });
  }
  double bytes() const { return static_cast<double>(memory_.size()); }

 private:
  static constexpr int64_t kPiece = 65536, kPieces = 1024;  // 256 MiB
  ThreadPool* pool_;
  MemoryBlock memory_;
};

LimitProbe::LimitProbe(const CpuOptions& options) : kernels_(kernels_for(options.isa)), pool_(options.pool) {
  kernel_check(kernels_ != nullptr, "LimitProbe: no such instruction set");
  if (pool_ == nullptr) {
    const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    pool_ = std::make_shared<ThreadPool>(options.threads > 0 ? options.threads : cores);
  }
  bandwidth_ = std::make_unique<Bandwidth>(pool_.get());
  operations_.resize(static_cast<size_t>(pool_->threads()) * kLine);
}

LimitProbe::~LimitProbe() = default;

void LimitProbe::turn() {
  constexpr int64_t kRuns = 64, kSteps = 20000;
  double start = now();
  bandwidth_->run(*kernels_);
  limits_.bandwidth = std::max(limits_.bandwidth, bandwidth_->bytes() / (now() - start));
  start = now();
  pool_->parallel_for(kRuns, 1, [&](int64_t, int64_t, int worker) {
    float sink;
    operations_[static_cast<size_t>(worker) * kLine] = kernels_->burn_fma(kSteps, &sink);
  });
  const double one = *std::max_element(operations_.begin(), operations_.end());
  limits_.fma_rate = std::max(limits_.fma_rate, one * kRuns / (now() - start));
}

double MatmulTimes::of_roofline(const CpuLimits& limits) const {
  return std::max(bytes / limits.bandwidth, operations / limits.fma_rate) / seconds;
}

CpuReport measure_cpu(const CpuOptions& options, std::span<const MatmulCase> cases, double seconds) {
  CpuOptions own = options;
  if (own.pool == nullptr) {
    const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    own.pool = std::make_shared<ThreadPool>(options.threads > 0 ? options.threads : cores);
  }
  std::string error;
  const std::unique_ptr<Ops> ops = make_cpu_ops(own, &error);
  kernel_check(ops != nullptr, error.c_str());

  LimitProbe limits(own);
  std::vector<Probe> probes;
  std::vector<std::unique_ptr<Products>> products;
  for (const MatmulCase& one : cases) {
    products.push_back(std::make_unique<Products>(ops.get(), one));
    probes.push_back({[p = products.back().get()] { p->run(); }});
  }

  const double end = now() + seconds;
  for (int turn = 0; turn < 3 || now() < end; ++turn) {
    limits.turn();
    for (Probe& probe : probes) {
      const double start = now();
      probe.turn();
      probe.best = std::min(probe.best, now() - start);
    }
  }

  CpuReport report;
  report.limits = limits.limits();
  for (size_t i = 0; i < products.size(); ++i) {
    report.times.push_back(products[i]->times());
    report.times.back().seconds = probes[i].best;
  }
  return report;
}

std::vector<StoredFormat> stored_formats() {
  const auto blocks = [](WeightFormat format, WeightFormat scale, int64_t rows, int64_t cols, float global = 1.0f) {
    MatrixSource s;
    s.format = format;
    s.scale_format = scale;
    s.block_rows = rows;
    s.block_cols = cols;
    s.global_scale = global;
    s.divide_by_global = global != 1.0f;
    return s;
  };
  constexpr WeightFormat kFp8 = WeightFormat::kE4m3, kFp4 = WeightFormat::kE2m1, kE8m0 = WeightFormat::kE8m0;
  return {{"f32", {.format = WeightFormat::kF32}},
          {"bf16", {.format = WeightFormat::kBf16}},
          {"affine 4 g64", {.format = WeightFormat::kMlxAffine, .bits = 4, .group = 64}},
          {"fp8 a row", blocks(kFp8, WeightFormat::kF32, 1, MatrixSource::kWhole)},
          {"fp8 128x128", blocks(kFp8, WeightFormat::kF32, 128, 128)},
          {"mxfp8", blocks(kFp8, kE8m0, 1, 32)},
          {"nvfp4", blocks(kFp4, WeightFormat::kE4m3, 1, 16, 1347.0f)},
          {"mxfp4", blocks(kFp4, kE8m0, 1, 32)}};
}

std::vector<MatmulShape> small_llama_shapes(int64_t layers, bool head) {
  std::vector<MatmulShape> shapes = {{"qkv_proj", 960, 576, layers},
                                     {"o_proj", 576, 576, layers},
                                     {"gate_up_proj", 3072, 576, layers},
                                     {"down_proj slices", 576, 192, 8 * layers}};
  if (head) shapes.push_back({"lm_head", 49152, 576, 1});
  return shapes;
}

}  // namespace tensorfold
