// Packing the experts of a layer: their matrices as matmul_pack.cu packs any, in one piece of memory, and a table of
// them for the kernels.
#include <algorithm>

#include "kernels/cuda/experts.h"

namespace tensorfold {
namespace {

void add_format(std::vector<ExpertFormat>& formats, ExpertFormat format) {
  if (std::find(formats.begin(), formats.end(), format) == formats.end()) formats.push_back(format);
}

// Rows [first_row, first_row + rows) of a packed weight; they begin a tile. Null data: they do not lie in one segment.
ExpertMatrix matrix_of_rows(const CudaWeight& weight, int64_t first_row) {
  ExpertMatrix matrix;
  for (const CudaWeightSegment& segment : weight.segments()) {
    const int64_t row = first_row - segment.first_row;
    if (row < 0 || row >= segment.rows || row % kTileRows != 0) continue;
    matrix.data = segment.data + row / kTileRows * segment.tile_bytes();
    matrix.tile_bytes = static_cast<int32_t>(segment.tile_bytes());
    matrix.stages = static_cast<int32_t>(segment.stages);
    matrix.cols = static_cast<int32_t>(weight.in_features());
    matrix.format = {segment.kind, segment.sets};
  }
  return matrix;
}

std::string shape_error(std::span<const ExpertSource> sources) {
  if (sources.empty()) return "experts: there are none";
  const ExpertSource& first = sources.front();
  if (sources.size() > static_cast<size_t>(kMostCudaExperts) + 1) return "experts: more than 4096 for CUDA";
  if (first.down.empty() || first.down.size() > static_cast<size_t>(kMostExpertSlices)) {
    return "experts: 1 to 16 slices for CUDA";
  }
  for (const ExpertSource& source : sources) {
    int64_t columns = 0;
    for (const MatrixSource& down : source.down) {
      if (down.rows != first.up.cols || down.cols != source.down[0].cols) return "experts: slices of different shapes";
      columns += down.cols;
    }
    if (source.up.rows != columns || source.gate.rows != (first.gate.rows > 0 ? columns : 0) ||
        source.up.cols != first.up.cols || source.down.size() != first.down.size()) {
      return "experts: shapes differ";
    }
  }
  return {};
}

}  // namespace

std::unique_ptr<CudaExperts> CudaExperts::create(std::span<const ExpertSource> sources, std::string* error) {
  *error = shape_error(sources);
  if (!error->empty()) return nullptr;
  std::unique_ptr<CudaExperts> experts(new CudaExperts());
  experts->slices_ = static_cast<int64_t>(sources.front().down.size());
  experts->hidden_ = sources.front().up.cols;
  experts->gated_ = sources.front().gate.rows > 0;
  if (!experts->pack(sources, error) || !experts->make_table(sources, error)) return nullptr;
  return experts;
}

CudaExperts::~CudaExperts() { device_free(table_); }

// An expert's slices are one stacked weight where a slice begins a tile, else one each.
bool CudaExperts::pack(std::span<const ExpertSource> sources, std::string* error) {
  std::vector<CudaPackJob> jobs;
  const bool stacked = hidden_ % kTileRows == 0;
  for (const ExpertSource& source : sources) {
    first_weight_.push_back(jobs.size());
    if (gated_) {
      jobs.push_back({{source.gate, source.up}, CudaPairing::kGateUp});
    } else {
      jobs.push_back({{source.up}, CudaPairing::kNone});
    }
    if (stacked) {
      jobs.push_back({source.down, CudaPairing::kNone});
    } else {
      for (const MatrixSource& down : source.down) jobs.push_back({{down}, CudaPairing::kNone});
    }
  }
  weights_ = pack_cuda_weights(jobs, error);
  return !weights_.empty();
}

bool CudaExperts::make_table(std::span<const ExpertSource> sources, std::string* error) {
  const size_t count = sources.size(), slices = static_cast<size_t>(slices_);
  std::vector<ExpertMatrix> table(count * (1 + slices));
  for (size_t e = 0; e < count; ++e) {
    const size_t first = first_weight_[e];
    const CudaWeight& inner = *weights_[first];
    const int64_t columns = sources[e].up.rows;
    ExpertMatrix& matrix = table[e];
    matrix = matrix_of_rows(inner, 0);
    matrix.tiles = static_cast<int32_t>(gated_ ? (columns + 7) / 8 : (columns + kTileRows - 1) / kTileRows);
    matrix.out_cols = static_cast<int32_t>(columns);
    add_format(inner_formats_, matrix.format);
    inner_tiles_ = std::max<int64_t>(inner_tiles_, matrix.tiles);
    widest_ = std::max(widest_, columns);
    const size_t end = e + 1 < count ? first_weight_[e + 1] : weights_.size();
    int64_t bytes = inner.bytes();
    int64_t values = inner.out_features() * inner.in_features();
    for (size_t w = first + 1; w < end; ++w) {
      bytes += weights_[w]->bytes();
      values += weights_[w]->out_features() * weights_[w]->in_features();
    }
    bytes_.push_back(bytes);
    values_.push_back(values);
    int32_t column = 0;
    for (size_t s = 0; s < slices; ++s) {
      ExpertMatrix& outer = table[count + e * slices + s];
      const bool stacked = end - first == 2;
      outer = stacked ? matrix_of_rows(*weights_[first + 1], static_cast<int64_t>(s) * hidden_)
                      : matrix_of_rows(*weights_[first + 1 + s], 0);
      if (matrix.data == nullptr || outer.data == nullptr) {
        *error = "experts: a matrix is packed in pieces";
        return false;
      }
      outer.tiles = static_cast<int32_t>((hidden_ + kTileRows - 1) / kTileRows);
      outer.out_cols = static_cast<int32_t>(hidden_);
      outer.first_col = column;
      column += outer.cols;
      outer_tiles_ = outer.tiles;
      add_format(outer_formats_, outer.format);
    }
  }
  const auto bytes = static_cast<int64_t>(table.size() * sizeof(ExpertMatrix));
  table_ = static_cast<ExpertMatrix*>(device_allocate(bytes, "a table of experts"));
  // A plain copy may return before the bytes have come, and passes have a stream that waits for no other.
  return table_ != nullptr &&
         cuda_ok(cudaMemcpy(table_, table.data(), static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
                 "a table of experts") &&
         cuda_ok(cudaStreamSynchronize(cudaStreamLegacy), "a table of experts");
}

}  // namespace tensorfold
