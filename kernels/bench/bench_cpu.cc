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

// The products of a case, packed and ready.
class Products {
 public:
  Products(Ops* ops, const MatmulCase& one) : ops_(ops) {
    for (const MatmulShape& shape : one.shapes) {
      std::vector<uint16_t> values(static_cast<size_t>(shape.out * shape.cols));
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3c00 + i * 2654435761u % 512);
      MatrixSource source;
      source.format = WeightFormat::kBf16;
      source.rows = shape.out;
      source.cols = shape.cols;
      source.data = reinterpret_cast<const std::byte*>(values.data());
      source.row_bytes = shape.cols * 2;
      const Tensor x = ops->persistent(one.rows, shape.cols), out = ops->persistent(one.rows, shape.out);
      ops->upload(std::vector<float>(static_cast<size_t>(one.rows * shape.cols), 0.5f), x);
      for (int64_t i = 0; i < shape.copies; ++i) {
        calls_.push_back({ops->pack(std::span<const MatrixSource>(&source, 1)), x, out});
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

std::vector<MatmulShape> small_llama_shapes(int64_t layers, bool head) {
  std::vector<MatmulShape> shapes = {{"qkv_proj", 960, 576, layers},
                                     {"o_proj", 576, 576, layers},
                                     {"gate_up_proj", 3072, 576, layers},
                                     {"down_proj slices", 576, 192, 8 * layers}};
  if (head) shapes.push_back({"lm_head", 49152, 576, 1});
  return shapes;
}

}  // namespace tensorfold
