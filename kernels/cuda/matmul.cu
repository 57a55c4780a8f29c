#include <algorithm>
#include <utility>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/matmul_launch.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

const GpuFacts& gpu_facts() {
  static const GpuFacts facts = [] {
    GpuFacts f;
    int device = 0;
    cuda_ok(cudaGetDevice(&device), "matmul");
    cuda_ok(cudaDeviceGetAttribute(&f.multiprocessors, cudaDevAttrMultiProcessorCount, device), "matmul");
    cuda_ok(cudaDeviceGetAttribute(&f.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "matmul");
    if (f.multiprocessors < 1) f.multiprocessors = 1;
    return f;
  }();
  return facts;
}

bool launch(CudaWeightKind kind, int sets, MatmulArgs& args, cudaStream_t stream) {
  switch (kind) {
    case CudaWeightKind::kBf16:
      return launch_matmul_bf16(args, gpu_facts(), stream);
    case CudaWeightKind::kAffine4:
      return launch_matmul_affine4(args, sets, gpu_facts(), stream);
    case CudaWeightKind::kAffine8:
      return launch_matmul_affine8(args, sets, gpu_facts(), stream);
    case CudaWeightKind::kFp8:
    case CudaWeightKind::kFp4:
      return launch_matmul_small_floats(kind, sets, args, gpu_facts(), stream);
    case CudaWeightKind::kAffine4Wide:
    case CudaWeightKind::kAffine8Wide:
      return launch_matmul_wide(kind, sets, args, gpu_facts(), stream);
  }
  return false;
}

MatmulView view_of(const CudaWeightSegment& segment, const DeviceInput& x) {
  MatmulView view;
  view.weight = segment.data;
  view.x = x.data;
  view.x_stride = x.stride;
  view.tile_bytes = segment.tile_bytes();
  view.cols = static_cast<int32_t>(x.cols);
  view.stages = static_cast<int32_t>(segment.stages);
  view.tiles = static_cast<int32_t>(segment.tiles);
  return view;
}

bool input_fits(const CudaWeight& weight, const DeviceInput& x) {
  return x.cols == weight.in_features() && x.stride % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace

void cuda_matmul(cudaStream_t stream, std::span<const CudaMatmulJob> jobs) {
  if (jobs.empty() || jobs[0].x.rows == 0) return;
  for (const CudaMatmulJob& job : jobs) {
    if (job.weight->pairing() != CudaPairing::kNone || !input_fits(*job.weight, job.x) ||
        job.x.rows != jobs[0].x.rows || job.out.rows < job.x.rows || job.out.cols != job.weight->out_features()) {
      cuda_ok(cudaErrorInvalidValue, "matmul: shapes do not fit");
      return;
    }
  }
  constexpr std::pair<CudaWeightKind, int> kFormats[] = {
      {CudaWeightKind::kBf16, 0},        {CudaWeightKind::kAffine4, 1},     {CudaWeightKind::kAffine4, 2},
      {CudaWeightKind::kAffine8, 1},     {CudaWeightKind::kAffine8, 2},     {CudaWeightKind::kAffine4Wide, 1},
      {CudaWeightKind::kAffine4Wide, 2}, {CudaWeightKind::kAffine8Wide, 1}, {CudaWeightKind::kAffine8Wide, 2},
      {CudaWeightKind::kFp8, 1},         {CudaWeightKind::kFp8, 2},         {CudaWeightKind::kFp4, 1},
      {CudaWeightKind::kFp4, 2}};
  for (const auto& [kind, sets] : kFormats) {
    MatmulArgs args;
    args.rows = static_cast<int32_t>(jobs[0].x.rows);
    for (const CudaMatmulJob& job : jobs) {
      for (const CudaWeightSegment& segment : job.weight->segments()) {
        if (segment.kind != kind || segment.sets != sets) continue;
        if (args.view_count == kMaxMatmulViews) {
          if (!launch(kind, sets, args, stream)) return;
          args.view_count = 0;
        }
        MatmulView& view = args.views[args.view_count++];
        view = view_of(segment, job.x);
        view.out = job.out.data + segment.first_row;
        view.out_stride = job.out.stride;
        view.out_cols = static_cast<int32_t>(segment.rows);
      }
    }
    if (args.view_count > 0 && !launch(kind, sets, args, stream)) return;
  }
}

int cuda_matmul_sum(cudaStream_t stream, std::span<const CudaMatmulJob> jobs) {
  const size_t count = jobs.size();
  kernel_check(count == 2 || count == 4 || count == 8, "products to be added: 2, 4 or 8");
  const CudaMatmulJob& first = jobs[0];
  const auto alike = [&](const CudaMatmulJob& job) {
    if (job.weight->pairing() != CudaPairing::kNone || !input_fits(*job.weight, job.x) ||
        job.weight->segments().size() != 1) {
      return false;
    }
    const CudaWeightSegment& a = job.weight->segments()[0];
    const CudaWeightSegment& b = first.weight->segments()[0];
    return a.kind == b.kind && a.sets == b.sets && a.tiles == b.tiles && a.stages == b.stages && a.rows == b.rows &&
           job.x.rows == first.x.rows && job.out.rows >= job.x.rows && job.out.cols == job.weight->out_features() &&
           job.out.stride == first.out.stride;
  };
  if (first.x.rows <= kSkinnyRows || !std::all_of(jobs.begin(), jobs.end(), alike)) {
    cuda_matmul(stream, jobs);
    return 1;
  }
  const CudaWeightSegment& segment = first.weight->segments()[0];
  MatmulArgs args;
  args.rows = static_cast<int32_t>(first.x.rows);
  args.may_add = true;
  for (const CudaMatmulJob& job : jobs) {
    MatmulView& view = args.views[args.view_count++];
    view = view_of(job.weight->segments()[0], job.x);
    view.out = job.out.data;
    view.out_stride = job.out.stride;
    view.out_cols = static_cast<int32_t>(segment.rows);
  }
  launch(segment.kind, segment.sets, args, stream);
  return args.added;
}

void cuda_matmul_silu_mul(cudaStream_t stream, const CudaWeight& weight, DeviceInput x, DeviceInput out) {
  if (x.rows == 0) return;
  if (weight.pairing() != CudaPairing::kGateUp || !input_fits(weight, x) || out.rows < x.rows ||
      2 * out.cols != weight.out_features()) {
    cuda_ok(cudaErrorInvalidValue, "gate and up matmul: shapes do not fit");
    return;
  }
  const CudaWeightSegment& segment = weight.segments()[0];
  MatmulArgs args;
  args.rows = static_cast<int32_t>(x.rows);
  args.epilogue = MatmulEpilogue::kSiluMul;
  args.view_count = 1;
  args.views[0] = view_of(segment, x);
  args.views[0].out = out.data;
  args.views[0].out_stride = out.stride;
  args.views[0].out_cols = static_cast<int32_t>(out.cols);
  launch(segment.kind, segment.sets, args, stream);
}

}  // namespace tensorfold
