// Reading one safetensors file. The file is hostile until proven otherwise: everything in its header is bounded and
// checked before it is believed (docs/formats/safetensors.md).
//
// Format: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets}, "__metadata__": {...}},
// then the tensors' bytes, which cover the rest of the file without holes or overlap.
//
// Thread-safety: a SafetensorsFile does not change once it is open, so any thread may read it. The file must not be
// truncated while it is mapped: the kernel answers a read past the new end with SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tensorfold {

/// Largest header that is read: 100 MB, the limit of the reference implementation.
inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;
/// Most dimensions a tensor may have.
inline constexpr size_t kMaxTensorRank = 8;

/// Element types of the format that have whole bytes. (The sub-byte types F4, F6_* are refused by name.)
enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5m2,
  kF8E4m3,
  kF8E8m0,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64
};

/// The name in the header: "BF16".
std::string_view dtype_name(Dtype dtype);
/// Bytes of one element.
int64_t dtype_bytes(Dtype dtype);
std::optional<Dtype> dtype_from_name(std::string_view name);

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // product(shape) * dtype_bytes(dtype) bytes, row-major; may be unaligned

  /// Product of the shape; 1 for a scalar.
  int64_t elements() const;
};

/// "[512, 64]", as error messages show shapes.
std::string shape_text(std::span<const int64_t> shape);
/// A name from a file, quoted for an error message: control characters escaped, long ones cut.
std::string quoted_name(std::string_view name);

class SafetensorsFile {
 public:
  SafetensorsFile() = default;
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  /// Maps a file and checks its header. Nothing of the data is read. Errors name the file, the tensor, what was found
  /// and what is allowed: NotFound if there is no such file, InvalidArgument for anything wrong in it.
  static absl::StatusOr<SafetensorsFile> open(const std::string& path);

  /// The same over bytes in memory, which must outlive the result. `label` stands for the path in messages.
  static absl::StatusOr<SafetensorsFile> parse(std::span<const std::byte> bytes, const std::string& label);

  /// In the order of their bytes in the file.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  /// nullptr if there is no such tensor. Pointers stay valid as long as the file object (moved or not) lives.
  const TensorInfo* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  uint64_t file_bytes() const { return file_bytes_; }

 private:
  std::string path_;
  uint64_t file_bytes_ = 0;
  std::shared_ptr<const void> mapping_;  // unmaps
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> by_name_;  // indices into tensors_, sorted by name
  std::map<std::string, std::string> metadata_;
};

}  // namespace tensorfold
