// Rows of an embedding table: the values that a product with the same weight multiplies by, widened to fp32.
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"

namespace tensorfold {
namespace {

constexpr int kMaxEmbedSegments = 8;

struct EmbedSegment {
  const uint8_t* data = nullptr;
  int64_t tile_bytes = 0;
  int32_t first_row = 0;
  int32_t kind = 0;
  int32_t sets = 0;
};

struct EmbedArgs {
  EmbedSegment segments[kMaxEmbedSegments];
  int32_t segment_count = 0;
  int32_t cols = 0;
  const int32_t* tokens = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
};

// The 8 values of a lane's piece: row g or g + 8 (upper), half `half` of a stage.
__device__ void piece_values(CudaWeightKind kind, int sets, const uint8_t* stage, int half, int upper, int lane,
                             Bf16x2 (&values)[4]) {
  if (kind == CudaWeightKind::kBf16) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int at = bf16_offset(half, w / 2, lane) + 8 * (w % 2) + 4 * upper;
      values[w] = *reinterpret_cast<const Bf16x2*>(stage + at);
    }
    return;
  }
  if (kind == CudaWeightKind::kFp4) {
    const Fp4Parts parts(*reinterpret_cast<const uint32_t*>(stage + fp4_scale_offset(sets, lane)),
                         *reinterpret_cast<const uint4*>(stage + fp4_factors_offset(sets)), half);
    parts.of(*reinterpret_cast<const uint32_t*>(stage + affine4_offset(half, upper, lane)), upper != 0, values);
    return;
  }
  const int set = sets == 2 ? half : 0;
  const uint32_t scale = *reinterpret_cast<const uint32_t*>(stage + scale_offset(kind, sets, set, lane / 4, upper));
  if (kept_bits(kind) == 4) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(stage + affine4_offset(half, upper, lane));
    if (has_wide_scales(kind)) {
      AffineValues<CudaWeightKind::kAffine4Wide>(scale).of(codes, values);
    } else {
      AffineValues<CudaWeightKind::kAffine4>(scale).of(codes, values);
    }
  } else {
    const uint2 codes = *reinterpret_cast<const uint2*>(stage + affine8_offset(half, upper, lane));
    if (kind == CudaWeightKind::kFp8) {
      AffineValues<CudaWeightKind::kFp8>(scale).of(codes, values);
    } else if (has_wide_scales(kind)) {
      AffineValues<CudaWeightKind::kAffine8Wide>(scale).of(codes, values);
    } else {
      AffineValues<CudaWeightKind::kAffine8>(scale).of(codes, values);
    }
  }
}

// A block a token, 8 columns a thread.
__global__ void embed_kernel(const __grid_constant__ EmbedArgs args) {
  pdl_launch();
  pdl_wait();
  const int token = args.tokens[blockIdx.x];
  int s = 0;
  while (s + 1 < args.segment_count && token >= args.segments[s + 1].first_row) ++s;
  const EmbedSegment& segment = args.segments[s];
  const auto kind = static_cast<CudaWeightKind>(segment.kind);
  const int row = token - segment.first_row, bytes = stage_bytes(kind, segment.sets);
  const uint8_t* tile = segment.data + row / kTileRows * segment.tile_bytes;
  const int g = row % 8, upper = row / 8 % 2;
  float* out = args.out + blockIdx.x * args.out_stride;
  for (int col = 8 * threadIdx.x; col < args.cols; col += 8 * blockDim.x) {
    Bf16x2 values[4];
    piece_values(kind, segment.sets, tile + static_cast<int64_t>(col / kStageColumns) * bytes, col / 32 % 2, upper,
                 g * 4 + col / 8 % 4, values);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      out[col + 2 * w] = __uint_as_float(values[w] << 16);
      out[col + 2 * w + 1] = __uint_as_float(values[w] & 0xffff0000u);
    }
  }
}

}  // namespace

void cuda_embed(cudaStream_t stream, const CudaWeight& table, const int32_t* tokens, DeviceMatrix out) {
  if (out.rows == 0) return;
  const std::vector<CudaWeightSegment>& segments = table.segments();
  if (table.pairing() != CudaPairing::kNone || segments.size() > kMaxEmbedSegments || out.cols != table.in_features()) {
    cuda_ok(cudaErrorInvalidValue, "embed: shapes do not fit");
    return;
  }
  EmbedArgs args;
  for (const CudaWeightSegment& segment : segments) {
    args.segments[args.segment_count++] = {segment.data, segment.tile_bytes(), static_cast<int32_t>(segment.first_row),
                                           static_cast<int32_t>(segment.kind), segment.sets};
  }
  args.cols = static_cast<int32_t>(out.cols);
  args.tokens = tokens;
  args.out = out.data;
  args.out_stride = out.stride;
  launch_kernel(embed_kernel, dim3(static_cast<unsigned>(out.rows)), dim3(128), 0, stream, "embed", args);
}

}  // namespace tensorfold
