// Packing: rows go through two pinned buffers (the bound on host memory) into two device buffers, and a kernel puts
// them in the order of cuda_weight.h. The next buffer is filled while the one before it is copied and permuted.
#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul_pack_piece.h"
#include "kernels/cuda/matmul_pack_rows.h"

namespace tensorfold {
namespace {

constexpr int64_t kBufferBytes = int64_t{16} << 20;

// Staged rows (16 a tile) to tiles, 16 bytes of output a thread.
__global__ void pack_kernel(const uint8_t* staged, uint8_t* out, CudaWeightKind kind, int sets, uint4 factors,
                            int64_t tiles, int64_t stages) {
  const int64_t total = tiles * stages * (stage_bytes(kind, sets) / 16);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += int64_t{gridDim.x} * blockDim.x) {
    reinterpret_cast<uint4*>(out)[i] = packed_piece(staged, kind, sets, factors, tiles, stages, i);
  }
}

// Buffers that packing on one device goes through; made once and kept, since pinning memory is slow.
struct Stager {
  cudaStream_t stream = nullptr;
  uint8_t* host[2] = {};
  uint8_t* device[2] = {};
  cudaEvent_t done[2] = {};
  std::mutex mutex;

  bool open() {
    if (stream != nullptr) return true;
    for (int i = 0; i < 2; ++i) {
      if (host[i] == nullptr && !cuda_ok(cudaMallocHost(&host[i], kBufferBytes), "pack: pinned memory")) return false;
      if (device[i] == nullptr && !cuda_ok(cudaMalloc(&device[i], kBufferBytes), "pack: device memory")) return false;
      if (done[i] == nullptr && !cuda_ok(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming), "pack")) {
        return false;
      }
    }
    return cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "pack: stream");
  }
};

Stager& stager_of_device(int device) {
  static std::mutex mutex;
  // Never destroyed: at exit the driver may be gone before it.
  static auto* stagers = new std::map<int, std::unique_ptr<Stager>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Stager>& stager = (*stagers)[device];
  if (stager == nullptr) stager = std::make_unique<Stager>();
  return *stager;
}

// Rows [begin, end) split over threads.
template <typename Body>
void on_threads(int64_t rows, const Body& body) {
  const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 8);
  const int64_t share = (rows + threads - 1) / threads;
  std::vector<std::thread> others;
  for (int64_t begin = share; begin < rows; begin += share) {
    others.emplace_back([&body, begin, end = std::min(begin + share, rows)] { body(begin, end); });
  }
  body(0, std::min(share, rows));
  for (std::thread& thread : others) thread.join();
}

// The blocks of one segment and where its packed rows come from.
struct SegmentSource {
  std::vector<MatrixSource> blocks;
  CudaPairing pairing = CudaPairing::kNone;
  PackFormat format;

  int64_t rows() const {
    int64_t rows = 0;
    for (const MatrixSource& block : blocks) rows += block.rows;
    return rows;
  }
  int64_t tiles() const {
    return pairing == CudaPairing::kGateUp ? (blocks[0].rows + 7) / 8 : (rows() + kTileRows - 1) / kTileRows;
  }
  /// Block and row of a packed row; null where there is none.
  std::pair<const MatrixSource*, int64_t> row_at(int64_t packed) const {
    if (pairing == CudaPairing::kGateUp) {
      const int64_t row = packed / kTileRows * 8 + packed % 8;
      if (row >= blocks[0].rows) return {nullptr, 0};
      return {&blocks[packed % kTileRows < 8 ? 0 : 1], row};
    }
    for (const MatrixSource& block : blocks) {
      if (packed < block.rows) return {&block, packed};
      packed -= block.rows;
    }
    return {nullptr, 0};
  }
};

// Enqueues the packing of a segment at `memory`; the host's buffers are free again when it returns, the device's work
// goes on.
bool pack_segment(const SegmentSource& source, Stager& stager, const CudaWeightSegment& segment, uint8_t* memory) {
  const int64_t stages = segment.stages;
  const int64_t row_bytes = staged_row_bytes(segment.kind, stages);
  const int64_t scale_bytes = staged_scale_bytes(segment.sets, stages);
  const int64_t tiles_a_buffer = kBufferBytes / (kTileRows * (row_bytes + scale_bytes));
  const uint4 factors = factors_piece(source.format.factors[0], source.format.factors[1]);
  int turn = 0;
  for (int64_t tile = 0; tile < segment.tiles; tile += tiles_a_buffer, turn ^= 1) {
    const int64_t tiles = std::min(tiles_a_buffer, segment.tiles - tile), rows = tiles * kTileRows;
    // Not used yet, or its copy and kernel of two turns ago are done.
    if (!cuda_ok(cudaEventSynchronize(stager.done[turn]), "pack")) return false;
    uint8_t* codes = stager.host[turn];
    uint8_t* scales = codes + rows * row_bytes;
    on_threads(rows, [&](int64_t begin, int64_t end) {
      WeightView views[2];  // of gate and up, whose rows alternate
      for (int64_t r = begin; r < end; ++r) {
        const auto [block, row] = source.row_at(tile * kTileRows + r);
        if (block != nullptr) {
          stage_row(*block, row, source.format, stages, codes + r * row_bytes, scales + r * scale_bytes,
                    views[source.pairing == CudaPairing::kGateUp && r % kTileRows >= 8]);
        } else {
          std::fill_n(codes + r * row_bytes, row_bytes, uint8_t{0});
          std::fill_n(scales + r * scale_bytes, scale_bytes, uint8_t{0});
        }
      }
    });
    if (!cuda_ok(cudaMemcpyAsync(stager.device[turn], codes, static_cast<size_t>(rows * (row_bytes + scale_bytes)),
                                 cudaMemcpyHostToDevice, stager.stream),
                 "pack: copy")) {
      return false;
    }
    pack_kernel<<<1024, 256, 0, stager.stream>>>(stager.device[turn], memory + tile * segment.tile_bytes(),
                                                 segment.kind, segment.sets, factors, tiles, stages);
    if (!cuda_launched("pack") || !cuda_ok(cudaEventRecord(stager.done[turn], stager.stream), "pack")) return false;
  }
  return true;
}

// One format for the two matrices of a pair, which lie row by row beside each other. Affine codes of 4 bits can be kept
// as 8, small scales as wide ones, and a set of 64 columns as two of 32; FP4's factors are kept for both. What has no
// such format is kept as bf16. The values are the same.
PackFormat shared_format(PackFormat a, PackFormat b) {
  const auto small_float = [](PackFormat f) {
    return f.kind == CudaWeightKind::kFp8 || f.kind == CudaWeightKind::kFp4;
  };
  if (a.kind == b.kind && small_float(a) && a.factors[0].multiplier == b.factors[0].multiplier) {
    return {a.kind, std::max(a.sets, b.sets), {a.factors[0], b.factors[1]}};
  }
  if (a == b) return a;
  if (a.sets == 0 || b.sets == 0 || small_float(a) || small_float(b)) return {};
  const bool eight = kept_bits(a.kind) == 8 || kept_bits(b.kind) == 8;
  const bool wide = has_wide_scales(a.kind) || has_wide_scales(b.kind);
  const CudaWeightKind four_kind = wide ? CudaWeightKind::kAffine4Wide : CudaWeightKind::kAffine4;
  const CudaWeightKind eight_kind = wide ? CudaWeightKind::kAffine8Wide : CudaWeightKind::kAffine8;
  return {eight ? eight_kind : four_kind, std::max(a.sets, b.sets), {}};
}

// Formats of stacked blocks. Slices of one FP8 or FP4 matrix that begin at different places of its blocks take the
// finer sets of all of them, so that they stay one segment and one launch.
std::vector<PackFormat> formats_of(std::span<const MatrixSource> blocks) {
  std::vector<PackFormat> formats;
  for (const MatrixSource& block : blocks) formats.push_back(block.rows > 0 ? pack_format(block) : PackFormat{});
  for (PackFormat& format : formats) {
    if (format.kind != CudaWeightKind::kFp8 && format.kind != CudaWeightKind::kFp4) continue;
    for (const PackFormat& other : formats) {
      if (other.kind == format.kind) format.sets = std::max(format.sets, other.sets);
    }
  }
  return formats;
}

// Groups blocks that are stacked in one format; an error sentence if that cannot be.
std::vector<SegmentSource> plan_segments(std::span<const MatrixSource> blocks, CudaPairing pairing,
                                         std::string* error) {
  std::vector<SegmentSource> plan;
  if (blocks.empty()) *error = "an empty matrix cannot be packed";
  for (const MatrixSource& block : blocks) {
    if (error->empty()) *error = pack_source_error(block);
    if (error->empty() && block.cols != blocks[0].cols) *error = "stacked matrices must have equal columns";
    if (!error->empty()) return {};
  }
  const std::vector<PackFormat> formats = formats_of(blocks);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const MatrixSource& block = blocks[i];
    if (block.rows == 0) continue;
    PackFormat format = formats[i];
    if (pairing == CudaPairing::kGateUp && !plan.empty()) {
      format = plan.back().format = shared_format(plan.back().format, format);
    }
    if (plan.empty() || plan.back().format != format) plan.push_back({{}, pairing, format});
    plan.back().blocks.push_back(block);
  }
  if (plan.empty()) *error = "an empty matrix cannot be packed";
  if (pairing == CudaPairing::kGateUp && error->empty()) {
    if (blocks.size() != 2 || blocks[0].rows != blocks[1].rows)
      *error = "gate and up must be two matrices of equal rows";
  }
  return plan;
}

std::vector<CudaWeightSegment> segments_of(const std::vector<SegmentSource>& plan, int64_t cols) {
  std::vector<CudaWeightSegment> segments;
  int64_t rows = 0;
  for (const SegmentSource& source : plan) {
    CudaWeightSegment& segment = segments.emplace_back();
    segment.kind = source.format.kind;
    segment.sets = source.format.sets;
    segment.first_row = rows;
    segment.rows = source.rows();
    segment.tiles = source.tiles();
    segment.stages = (cols + kStageColumns - 1) / kStageColumns;
    rows += segment.rows;
  }
  return segments;
}

// What a segment takes of the memory that it shares with others.
int64_t placed_bytes(const CudaWeightSegment& segment) { return (segment.bytes() + 255) / 256 * 256; }

}  // namespace

std::unique_ptr<CudaWeight> pack_cuda_weight(std::span<const MatrixSource> blocks, CudaPairing pairing,
                                             std::string* error) {
  const CudaPackJob job{{blocks.begin(), blocks.end()}, pairing};
  std::vector<std::unique_ptr<CudaWeight>> weights = pack_cuda_weights({&job, 1}, error);
  return weights.empty() ? nullptr : std::move(weights[0]);
}

std::vector<std::unique_ptr<CudaWeight>> pack_cuda_weights(std::span<const CudaPackJob> jobs, std::string* error) {
  error->clear();
  std::vector<std::vector<SegmentSource>> plans;
  std::vector<std::vector<CudaWeightSegment>> packed;
  int64_t bytes = 0;
  for (const CudaPackJob& job : jobs) {
    const std::vector<SegmentSource>& plan = plans.emplace_back(plan_segments(job.blocks, job.pairing, error));
    if (!error->empty()) return {};
    packed.push_back(segments_of(plan, job.blocks[0].cols));
    for (const CudaWeightSegment& segment : packed.back()) bytes += placed_bytes(segment);
  }
  int device = 0;
  if (!cuda_ok(cudaGetDevice(&device), "pack")) return {};
  Stager& stager = stager_of_device(device);
  const std::lock_guard lock(stager.mutex);
  uint8_t* at = nullptr;
  if (!stager.open() || !cuda_ok(cudaMalloc(&at, static_cast<size_t>(bytes)), "pack: device memory")) return {};
  const std::shared_ptr<void> memory(at, [](void* p) { cudaFree(p); });
  std::vector<std::unique_ptr<CudaWeight>> weights;
  bool good = true;
  for (size_t i = 0; i < jobs.size() && good; ++i) {
    int64_t rows = 0;
    for (size_t s = 0; s < packed[i].size() && good; ++s) {
      CudaWeightSegment& segment = packed[i][s];
      segment.memory = memory;
      segment.data = at;
      good = pack_segment(plans[i][s], stager, segment, at);
      at += placed_bytes(segment);
      rows += segment.rows;
    }
    weights.push_back(
        std::make_unique<CudaWeight>(rows, jobs[i].blocks[0].cols, jobs[i].pairing, std::move(packed[i])));
  }
  // Also before memory is given back: nothing may still write into it.
  good = cuda_ok(cudaStreamSynchronize(stager.stream), "pack") && good;
  if (!good) weights.clear();
  return weights;
}

std::unique_ptr<CudaWeight> view_cuda_weight_rows(const CudaWeight& weight, int64_t first, int64_t count) {
  const std::vector<CudaWeightSegment>& segments = weight.segments();
  if (weight.pairing() != CudaPairing::kNone || segments.size() != 1 || first < 0 || count < 1 ||
      first > weight.out_features() - count || first % kTileRows != 0 ||
      (count % kTileRows != 0 && first + count != weight.out_features())) {
    return nullptr;
  }
  CudaWeightSegment segment = segments[0];
  segment.data += first / kTileRows * segment.tile_bytes();
  segment.rows = count;
  segment.tiles = (count + kTileRows - 1) / kTileRows;
  return std::make_unique<CudaWeight>(count, weight.in_features(), CudaPairing::kNone,
                                      std::vector<CudaWeightSegment>{std::move(segment)});
}

}  // namespace tensorfold
