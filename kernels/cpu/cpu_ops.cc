#include "kernels/cpu/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/isa.h"
#include "kernels/numerics/check.h"
#include "kernels/numerics/gumbel.h"
#include "kernels/numerics/math64.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace tensorfold {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kFewRows = 8;

int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

const CpuWeight& cpu_weight(const Weight& w) { return static_cast<const CpuWeight&>(w); }
const CpuVector& cpu_vector(const Vector& v) { return static_cast<const CpuVector&>(v); }

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(const CpuOptions& options, std::string* error) {
  const KernelTable* kernels = kernels_for(options.isa);
  if (kernels == nullptr) {
    std::string have = "auto";
    for (const std::string& isa : available_isas()) have += ", " + isa;
    *error = "instruction set '" + options.isa + "' is not available: this build on this machine has " + have;
    return nullptr;
  }
  if (options.threads < 0 || options.threads > kMaxThreads) {
    *error =
        "threads must be 0 (one a core) to " + std::to_string(kMaxThreads) + ", not " + std::to_string(options.threads);
    return nullptr;
  }
  std::shared_ptr<ThreadPool> pool = options.pool;
  if (pool == nullptr) pool = std::make_shared<ThreadPool>(options.threads == 0 ? usable_cores() : options.threads);
  return std::make_unique<CpuOps>(kernels, std::move(pool));
}

CpuOps::CpuOps(const KernelTable* kernels, std::shared_ptr<ThreadPool> pool)
    : kernels_(kernels), pool_(std::move(pool)), worker_scratch_(static_cast<size_t>(pool_->threads())) {}

std::unique_ptr<Weight> CpuOps::pack(std::span<const MatrixSource> blocks) {
  return pack_weight(blocks, &weights_, pool_.get(), &fp4_tables_);
}

std::unique_ptr<Vector> CpuOps::pack_vector(std::span<const float> values) {
  return std::make_unique<CpuVector>(values);
}

std::unique_ptr<Weight> CpuOps::view_rows(const Weight& w, int64_t first, int64_t count) {
  return view_weight_rows(cpu_weight(w), first, count);
}

Tensor CpuOps::scratch(int64_t rows, int64_t cols) {
  const int64_t stride = round_up(cols, 16);
  return {pass_.take(rows * stride), rows, cols, stride};
}

void CpuOps::begin_pass() { pass_.reset(); }

Tensor CpuOps::persistent(int64_t rows, int64_t cols) {
  const int64_t stride = round_up(cols, 16);
  persistent_.push_back(std::make_unique<MemoryBlock>(rows * stride * 4));
  return {persistent_.back()->floats(), rows, cols, stride};
}

void CpuOps::upload(std::span<const float> host, Tensor dst) {
  kernel_check(static_cast<int64_t>(host.size()) == dst.rows * dst.cols, "upload: size differs");
  for (int64_t r = 0; r < dst.rows; ++r) {
    std::memcpy(dst.data + r * dst.stride, host.data() + r * dst.cols, static_cast<size_t>(dst.cols) * 4);
  }
}

void CpuOps::download(Tensor src, std::span<float> host) {
  kernel_check(static_cast<int64_t>(host.size()) == src.rows * src.cols, "download: size differs");
  for (int64_t r = 0; r < src.rows; ++r) {
    std::memcpy(host.data() + r * src.cols, src.data + r * src.stride, static_cast<size_t>(src.cols) * 4);
  }
}

void CpuOps::embed(const Weight& table, const RowBatch& rows, Tensor out) {
  const CpuWeight& w = cpu_weight(table);
  const std::span<const int32_t> ids = rows.tokens;
  kernel_check(static_cast<int64_t>(ids.size()) == out.rows && out.cols == w.in_features(), "embed: shapes differ");
  for_pieces(out.rows, std::min(out.cols, kPieceColumns), [&](int64_t r, int64_t, int64_t) {
    const CpuWeight::Segment& segment = w.segment_of_row(ids[static_cast<size_t>(r)]);
    kernels_->dequantise_row(segment.view, ids[static_cast<size_t>(r)] - segment.first_row, out.data + r * out.stride);
  });
}

// Work is cut by outputs only: blocks of input rows (that stay in the second-level cache) times runs of panels, of at
// least 64 KiB when few rows make memory the limit. Every segment of every job is split between the threads alike, so
// that what follows (the sum over slices, gate times up) finds its columns in the caches of the thread that made them.
struct CpuOps::MatmulTask {
  int32_t job = 0;
  int32_t segment = 0;
  int64_t panel_begin = 0;  // of the segment
  int64_t panel_end = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};

void CpuOps::cut_matmul(const MatmulJob& job, int32_t index, int64_t part, std::vector<MatmulTask>* tasks) const {
  constexpr int64_t kInputBytes = 384 * 1024, kRunBytes = 64 * 1024;
  const CpuWeight& w = cpu_weight(*job.weight);
  const int64_t threads = pool_->threads();
  const int64_t row_block = std::clamp<int64_t>(kInputBytes / (w.in_features() * 4) / 12 * 12, 24, 240);
  for (size_t i = 0; i < w.segments().size(); ++i) {
    const CpuWeight::Segment& segment = w.segments()[i];
    // The same number of runs in every part keeps part and thread together; a run may be empty.
    const int64_t most = (segment.panels + threads - 1) / threads;
    const int64_t share = w.panels() / (threads * 4);
    const int64_t longest = job.x.rows <= kFewRows ? std::max<int64_t>({share, kRunBytes / segment.view.panel_bytes, 1})
                                                   : std::clamp<int64_t>(share, 1, 16);
    const int64_t runs = (most + longest - 1) / longest;
    const int64_t begin = segment.panels * part / threads, panels = segment.panels * (part + 1) / threads - begin;
    for (int64_t first = 0; first < job.x.rows; first += row_block) {
      for (int64_t run = 0; run < runs; ++run) {
        tasks->push_back({index, static_cast<int32_t>(i), begin + panels * run / runs,
                          begin + panels * (run + 1) / runs, first, std::min(row_block, job.x.rows - first)});
      }
    }
  }
}

void CpuOps::run_matmul(const MatmulJob& job, const MatmulTask& task, int worker) {
  if (task.panel_begin >= task.panel_end) return;
  const CpuWeight::Segment& s = cpu_weight(*job.weight).segments()[static_cast<size_t>(task.segment)];
  std::unique_ptr<MemoryBlock>& scratch = worker_scratch_[static_cast<size_t>(worker)];
  const int64_t bytes = kernels_->matmul_scratch_floats(s.view) * 4;
  if (scratch == nullptr || scratch->size() < bytes) scratch = std::make_unique<MemoryBlock>(bytes);
  const Tensor x = job.x.row_range(task.first_row, task.rows), out = job.out.row_range(task.first_row, task.rows);
  kernels_->matmul(s.view, task.panel_begin, task.panel_end, x.data, x.stride, x.rows, out.data + s.first_row,
                   out.stride, scratch->floats());
}

void CpuOps::matmul(const Weight& weight, Tensor x, Tensor out) {
  const MatmulJob job{&weight, x, out};
  matmul_many({&job, 1});
}

// One parallel region for all jobs, so that small ones (the slices of a projection) share its cost.
void CpuOps::matmul_many(std::span<const MatmulJob> jobs) {
  std::vector<MatmulTask> tasks;
  tasks.reserve(64);
  for (int64_t part = 0; part < pool_->threads(); ++part) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      const MatmulJob& job = jobs[i];
      kernel_check(job.x.cols == job.weight->in_features() && job.out.cols == job.weight->out_features() &&
                       job.x.rows == job.out.rows,
                   "matmul: shapes differ");
      cut_matmul(job, static_cast<int32_t>(i), part, &tasks);
    }
  }
  pool_->parallel_for(static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) {
      const MatmulTask& task = tasks[static_cast<size_t>(i)];
      run_matmul(jobs[static_cast<size_t>(task.job)], task, worker);
    }
  });
}

void CpuOps::rms_norm(Tensor x, int64_t heads, const Vector& weight, float eps, Tensor out) {
  const CpuVector& w = cpu_vector(weight);
  kernel_check(x.cols == heads * w.size() && out.cols == x.cols && out.rows == x.rows, "rms_norm: shapes differ");
  pool_->parallel_for(x.rows, std::max<int64_t>(1, kPieceElements / x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      kernels_->rms_norm(x.data + r * x.stride, heads, w.size(), w.data(), eps, out.data + r * out.stride);
    }
  });
}

void CpuOps::add(Tensor a, Tensor b, Tensor out) {
  kernel_check(a.rows == b.rows && a.cols == b.cols && a.rows == out.rows && a.cols == out.cols, "add: shapes differ");
  for_pieces(a.rows, a.cols, [&](int64_t r, int64_t c, int64_t n) {
    kernels_->add(a.data + r * a.stride + c, b.data + r * b.stride + c, out.data + r * out.stride + c, n);
  });
}

void CpuOps::add_many(std::span<const AddJob> jobs) {
  if (jobs.empty()) return;
  const Tensor shape = jobs[0].out;
  for (const AddJob& job : jobs) {
    kernel_check(job.a.rows == shape.rows && job.a.cols == shape.cols && job.b.rows == shape.rows &&
                     job.b.cols == shape.cols && job.out.rows == shape.rows && job.out.cols == shape.cols,
                 "add_many: shapes differ");
  }
  for_columns(shape.rows, shape.cols, static_cast<int64_t>(jobs.size()), [&](int64_t r, int64_t c, int64_t n) {
    for (const AddJob& job : jobs) {
      kernels_->add(job.a.data + r * job.a.stride + c, job.b.data + r * job.b.stride + c,
                    job.out.data + r * job.out.stride + c, n);
    }
  });
}

void CpuOps::silu_mul(Tensor gate_up, Tensor out) {
  kernel_check(gate_up.rows == out.rows && gate_up.cols == 2 * out.cols, "silu_mul: shapes differ");
  for_columns(out.rows, out.cols, 4, [&](int64_t r, int64_t c, int64_t n) {
    const float* gate = gate_up.data + r * gate_up.stride + c;
    kernels_->silu_mul(gate, gate + out.cols, out.data + r * out.stride + c, n);
  });
}

void CpuOps::relu_squared(Tensor x) {
  for_pieces(x.rows, x.cols, [&](int64_t r, int64_t c, int64_t n) {
    float* at = x.data + r * x.stride + c;
    kernels_->relu_squared(at, at, n);
  });
}
void CpuOps::sigmoid_mul(Tensor x, Tensor gate) {
  kernel_check(x.rows == gate.rows && x.cols == gate.cols, "sigmoid_mul: shapes differ");
  for_pieces(x.rows, x.cols, [&](int64_t r, int64_t c, int64_t n) {
    kernels_->sigmoid_mul(x.data + r * x.stride + c, gate.data + r * gate.stride + c, n);
  });
}

void CpuOps::gather_rows(Tensor src, std::span<const int32_t> rows, Tensor dst) {
  kernel_check(static_cast<int64_t>(rows.size()) == dst.rows && src.cols == dst.cols, "gather_rows: shapes differ");
  for (int64_t i = 0; i < dst.rows; ++i) {
    const int64_t from = rows[static_cast<size_t>(i)];
    kernel_check(from >= 0 && from < src.rows, "gather_rows: no such row");
    std::memcpy(dst.data + i * dst.stride, src.data + from * src.stride, static_cast<size_t>(src.cols) * 4);
  }
}

RopeTable CpuOps::rope_table(const RowBatch& batch, const Vector& frequencies, double attention_factor) {
  const std::span<const int64_t> positions = batch.positions;
  const int64_t rows = static_cast<int64_t>(positions.size()), pairs = frequencies.size();
  const float* inv_freq = cpu_vector(frequencies).data();
  RopeTable table{scratch(rows, pairs), scratch(rows, pairs)};
  pool_->parallel_for(rows, std::max<int64_t>(1, 256 / std::max<int64_t>(pairs, 1)),
                      [&](int64_t begin, int64_t end, int) {
                        for (int64_t r = begin; r < end; ++r) {
                          const double position = static_cast<double>(positions[static_cast<size_t>(r)]);
                          for (int64_t i = 0; i < pairs; ++i) {
                            double sine, cosine;
                            sincos64(position * static_cast<double>(inv_freq[i]), &sine, &cosine);
                            table.cos.data[r * table.cos.stride + i] = static_cast<float>(cosine * attention_factor);
                            table.sin.data[r * table.sin.stride + i] = static_cast<float>(sine * attention_factor);
                          }
                        }
                      });
  return table;
}

void CpuOps::rope(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table) {
  const int64_t pairs = table.cos.cols;
  kernel_check(x.cols == heads * head_dim && 2 * pairs <= head_dim && table.cos.rows == x.rows, "rope: shapes differ");
  pool_->parallel_for(x.rows, std::max<int64_t>(1, kPieceElements / x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      kernels_->rope(x.data + r * x.stride, heads, head_dim, pairs, table.cos.data + r * table.cos.stride,
                     table.sin.data + r * table.sin.stride);
    }
  });
}

std::vector<std::vector<Candidate>> CpuOps::top_candidates(Tensor logits, int32_t first_id, int64_t n) {
  constexpr int64_t kChunk = 8192;
  kernel_check(n >= 0, "top_candidates: negative count");
  const int64_t chunks = (logits.cols + kChunk - 1) / kChunk;
  std::vector<std::vector<Candidate>> part(static_cast<size_t>(logits.rows * chunks));
  pool_->parallel_for(logits.rows * chunks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; n > 0 && item < end; ++item) {
      const float* x = logits.data + item / chunks * logits.stride;
      const int64_t from = item % chunks * kChunk, to = std::min(from + kChunk, logits.cols);
      std::vector<Candidate>& heap = part[static_cast<size_t>(item)];  // the worst of the best in front
      const int64_t first = std::min(to, from + n);
      for (int64_t i = from; i < first; ++i) heap.push_back({x[i], static_cast<int32_t>(first_id + i)});
      std::make_heap(heap.begin(), heap.end(), candidate_before);
      for (int64_t i = first; i < to; ++i) {
        // Ids ascend, so only a larger logit can displace one; before a NaN comes every number.
        const float worst = heap.front().logit;
        if (worst == worst) i = kernels_->find_greater(x, i, to, worst);
        if (i >= to) break;
        const Candidate next{x[i], static_cast<int32_t>(first_id + i)};
        if (!candidate_before(next, heap.front())) continue;
        std::pop_heap(heap.begin(), heap.end(), candidate_before);
        heap.back() = next;
        std::push_heap(heap.begin(), heap.end(), candidate_before);
      }
    }
  });
  std::vector<std::vector<Candidate>> rows(static_cast<size_t>(logits.rows));
  for (int64_t r = 0; r < logits.rows; ++r) {
    std::vector<Candidate>& all = rows[static_cast<size_t>(r)];
    for (int64_t c = 0; c < chunks; ++c) {
      const std::vector<Candidate>& more = part[static_cast<size_t>(r * chunks + c)];
      all.insert(all.end(), more.begin(), more.end());
    }
    std::sort(all.begin(), all.end(), candidate_before);
    if (static_cast<int64_t>(all.size()) > n) all.resize(static_cast<size_t>(n));
  }
  return rows;
}

std::vector<Candidate> CpuOps::best_draws(Tensor logits, int32_t first_id, std::span<const DrawKey> keys) {
  constexpr int64_t kChunk = 4096;
  kernel_check(static_cast<int64_t>(keys.size()) == logits.rows, "best_draws: a key a row");
  const int64_t chunks = (logits.cols + kChunk - 1) / kChunk;
  struct Part {
    KeyedDraw draw;
    int64_t broken = -1;  // the first column that is not finite
  };
  std::vector<Part> parts(static_cast<size_t>(logits.rows * chunks));
  pool_->parallel_for(logits.rows * chunks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const DrawKey& key = keys[static_cast<size_t>(item / chunks)];
      if (key.temperature == 0.0) continue;
      const float* x = logits.data + item / chunks * logits.stride;
      const int64_t from = item % chunks * kChunk, to = std::min(from + kChunk, logits.cols);
      Part& part = parts[static_cast<size_t>(item)];
      for (int64_t i = from; i < to; ++i) {
        if (!std::isfinite(x[i])) {
          part.broken = i;
          break;
        }
        const double logit = static_cast<double>(x[i]);
        part.draw.offer(key.key, logit / key.temperature, logit, static_cast<uint32_t>(first_id + i));
      }
    }
  });
  std::vector<Candidate> rows(static_cast<size_t>(logits.rows), Candidate{0.0f, -1});
  for (int64_t r = 0; r < logits.rows; ++r) {
    KeyedDraw best;
    int64_t broken = -1;
    for (int64_t c = 0; c < chunks; ++c) {
      const Part& part = parts[static_cast<size_t>(r * chunks + c)];
      best.merge(part.draw);
      if (broken < 0) broken = part.broken;
    }
    Candidate& row = rows[static_cast<size_t>(r)];
    if (best.any) row = {static_cast<float>(best.logit), static_cast<int32_t>(best.id)};
    if (broken >= 0) row = {logits.data[r * logits.stride + broken], static_cast<int32_t>(first_id + broken)};
  }
  return rows;
}

}  // namespace tensorfold
