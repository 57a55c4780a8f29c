#include "worker/checkpoint/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "worker/checkpoint/safetensors_header.h"

namespace tensorfold {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian and read in place");

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<DtypeRow, 16> kDtypes = {{{Dtype::kBool, "BOOL", 1},
                                               {Dtype::kU8, "U8", 1},
                                               {Dtype::kI8, "I8", 1},
                                               {Dtype::kF8E5m2, "F8_E5M2", 1},
                                               {Dtype::kF8E4m3, "F8_E4M3", 1},
                                               {Dtype::kF8E8m0, "F8_E8M0", 1},
                                               {Dtype::kI16, "I16", 2},
                                               {Dtype::kU16, "U16", 2},
                                               {Dtype::kF16, "F16", 2},
                                               {Dtype::kBf16, "BF16", 2},
                                               {Dtype::kI32, "I32", 4},
                                               {Dtype::kU32, "U32", 4},
                                               {Dtype::kF32, "F32", 4},
                                               {Dtype::kI64, "I64", 8},
                                               {Dtype::kU64, "U64", 8},
                                               {Dtype::kF64, "F64", 8}}};

// Checks that tensors, sorted by their bytes, cover [0, data_bytes) exactly once: an overlap would let one tensor alias
// another, and bytes that belong to none mean that the header is not this file's.
absl::Status check_coverage(std::span<const HeaderTensor> sorted, uint64_t data_bytes, const std::string& label) {
  uint64_t covered = 0;
  const HeaderTensor* last = nullptr;
  for (const HeaderTensor& tensor : sorted) {
    if (tensor.end > data_bytes) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} has data_offsets [{}, {}], but the file has only {} bytes of data (cut short?)",
                      label, quoted_name(tensor.name), tensor.begin, tensor.end, data_bytes));
    }
    if (tensor.begin < covered) {
      return absl::InvalidArgumentError(fmt::format(
          "{}: tensor {} at data_offsets [{}, {}] overlaps {}, which ends at {}", label, quoted_name(tensor.name),
          tensor.begin, tensor.end, last != nullptr ? quoted_name(last->name) : "the start", covered));
    }
    if (tensor.begin > covered) {
      return absl::InvalidArgumentError(fmt::format("{}: bytes {} to {} before tensor {} belong to no tensor", label,
                                                    covered, tensor.begin, quoted_name(tensor.name)));
    }
    covered = tensor.end;
    last = &tensor;
  }
  if (covered != data_bytes) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: the tensors end at byte {} of the data, but the file has {} bytes of data", label, covered, data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view dtype_name(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }
int64_t dtype_bytes(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bytes; }
std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const DtypeRow& row : kDtypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

int64_t TensorInfo::elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

std::string shape_text(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::string quoted_name(std::string_view name) {
  constexpr size_t kShown = 160;
  std::string out = "'";
  for (char c : name.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || c == '\'' || c == '\\') {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (name.size() > kShown ? "...'" : "'");
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::parse(std::span<const std::byte> bytes, const std::string& label) {
  if (bytes.size() < 8) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} bytes; a safetensors file begins with 8 bytes of header length", label, bytes.size()));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  if (header_bytes > kMaxSafetensorsHeader) {
    return absl::InvalidArgumentError(fmt::format("{}: header of {} bytes; allowed are at most {} (is it safetensors?)",
                                                  label, header_bytes, kMaxSafetensorsHeader));
  }
  if (header_bytes > bytes.size() - 8) {
    return absl::InvalidArgumentError(
        fmt::format("{}: header of {} bytes in a file of {} bytes (cut short?)", label, header_bytes, bytes.size()));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, header_bytes);
  if (text.empty() || text.front() != '{') {
    return absl::InvalidArgumentError(fmt::format("{}: the header does not begin with '{{'", label));
  }
  absl::StatusOr<SafetensorsHeader> header = parse_safetensors_header(text, label);
  if (!header.ok()) return header.status();

  std::vector<HeaderTensor>& sorted = header->tensors;
  std::sort(sorted.begin(), sorted.end(), [](const HeaderTensor& a, const HeaderTensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  const std::span<const std::byte> data = bytes.subspan(8 + header_bytes);
  if (absl::Status status = check_coverage(sorted, data.size(), label); !status.ok()) return status;

  SafetensorsFile file;
  file.path_ = label;
  file.file_bytes_ = bytes.size();
  file.metadata_ = std::move(header->metadata);
  file.tensors_.reserve(sorted.size());
  for (HeaderTensor& tensor : sorted) {
    file.tensors_.push_back({std::move(tensor.name), tensor.dtype, std::move(tensor.shape),
                             data.subspan(tensor.begin, tensor.end - tensor.begin)});
  }
  file.by_name_.resize(file.tensors_.size());
  std::iota(file.by_name_.begin(), file.by_name_.end(), 0u);
  const auto& tensors = file.tensors_;
  std::sort(file.by_name_.begin(), file.by_name_.end(),
            [&](uint32_t a, uint32_t b) { return tensors[a].name < tensors[b].name; });
  for (size_t i = 1; i < file.by_name_.size(); ++i) {
    const std::string& name = tensors[file.by_name_[i]].name;
    if (name == tensors[file.by_name_[i - 1]].name) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} stands twice in the header", label, quoted_name(name)));
    }
  }
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    const std::string message = fmt::format("{}: {}", path, std::strerror(error));
    return error == ENOENT ? absl::NotFoundError(message) : absl::InvalidArgumentError(message);
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return absl::InvalidArgumentError(fmt::format("{}: not a regular file", path));
  }
  const auto size = static_cast<size_t>(info.st_size);
  if (size < 8) {
    ::close(fd);
    return absl::InvalidArgumentError(
        fmt::format("{}: {} bytes; a safetensors file begins with 8 bytes of header length", path, size));
  }
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (address == MAP_FAILED) {
    return absl::InvalidArgumentError(fmt::format("{}: cannot be mapped: {}", path, std::strerror(error)));
  }
  std::shared_ptr<const void> mapping(address, [size](const void* p) { ::munmap(const_cast<void*>(p), size); });
  absl::StatusOr<SafetensorsFile> file = parse({static_cast<const std::byte*>(address), size}, path);
  if (file.ok()) file->mapping_ = std::move(mapping);
  return file;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [&](uint32_t i, std::string_view wanted) { return tensors_[i].name < wanted; });
  return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
}

}  // namespace tensorfold
