#include "worker/checkpoint/safetensors_write.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <cstring>
#include <tuple>

namespace tensorfold {
namespace {

absl::Status write_all(int fd, const void* data, size_t bytes, const std::string& path) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd, at, std::min(bytes, size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return absl::UnavailableError(fmt::format("{}: writing: {}", path, std::strerror(errno)));
    at += written;
    bytes -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

// The order of the bytes, or an error for tensors that no reader would take.
absl::Status sort_and_check(std::vector<const TensorInfo*>& order, const std::string& path) {
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::make_tuple(-dtype_bytes(a->dtype), std::string_view(a->name)) <
           std::make_tuple(-dtype_bytes(b->dtype), std::string_view(b->name));
  });
  std::vector<std::string_view> names;
  for (const TensorInfo* tensor : order) {
    int64_t bytes = dtype_bytes(tensor->dtype);
    for (int64_t dim : tensor->shape) {
      if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) bytes = -1;
      if (bytes < 0) break;
    }
    if (tensor->name.empty() || tensor->name == "__metadata__" || tensor->shape.size() > kMaxTensorRank || bytes < 0 ||
        static_cast<uint64_t>(bytes) != tensor->data.size()) {
      return absl::InvalidArgumentError(fmt::format("{}: tensor {} of {} {} cannot be written from {} bytes", path,
                                                    quoted_name(tensor->name), dtype_name(tensor->dtype),
                                                    shape_text(tensor->shape), tensor->data.size()));
    }
    names.push_back(tensor->name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    return absl::InvalidArgumentError(fmt::format("{}: tensor {} is given twice", path, quoted_name(*twice)));
  }
  return absl::OkStatus();
}

std::string header_text(std::span<const TensorInfo* const> order, const std::map<std::string, std::string>& metadata) {
  boost::json::object header;
  if (!metadata.empty()) {
    boost::json::object map;
    for (const auto& [key, value] : metadata) map[key] = value;
    header["__metadata__"] = std::move(map);
  }
  uint64_t begin = 0;
  for (const TensorInfo* tensor : order) {
    boost::json::array shape;
    for (int64_t dim : tensor->shape) shape.push_back(dim);
    const std::string_view dtype = dtype_name(tensor->dtype);
    boost::json::object entry;
    entry["dtype"] = boost::json::string(dtype.data(), dtype.size());
    entry["shape"] = std::move(shape);
    entry["data_offsets"] = {begin, begin + tensor->data.size()};
    header[tensor->name] = std::move(entry);
    begin += tensor->data.size();
  }
  std::string text = boost::json::serialize(header);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

absl::Status write_file(int fd, std::span<const TensorInfo* const> order, const std::string& header,
                        const std::string& path) {
  const uint64_t header_bytes = header.size();
  absl::Status status = write_all(fd, &header_bytes, 8, path);
  if (status.ok()) status = write_all(fd, header.data(), header.size(), path);
  for (const TensorInfo* tensor : order) {
    if (status.ok()) status = write_all(fd, tensor->data.data(), tensor->data.size(), path);
  }
  if (status.ok() && ::fsync(fd) != 0) {
    status = absl::UnavailableError(fmt::format("{}: flushing: {}", path, std::strerror(errno)));
  }
  return status;
}

}  // namespace

absl::Status write_safetensors(const std::string& path, std::span<const TensorInfo> tensors,
                               const std::map<std::string, std::string>& metadata) {
  std::vector<const TensorInfo*> order;
  for (const TensorInfo& tensor : tensors) order.push_back(&tensor);
  absl::Status status = sort_and_check(order, path);
  if (!status.ok()) return status;

  std::string temporary = path + ".XXXXXX";
  const int fd = ::mkstemp(temporary.data());
  if (fd < 0) return absl::InvalidArgumentError(fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
  ::fchmod(fd, 0644);
  status = write_file(fd, order, header_text(order, metadata), path);
  if (::close(fd) != 0 && status.ok()) {
    status = absl::UnavailableError(fmt::format("{}: closing: {}", path, std::strerror(errno)));
  }
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) {
    status = absl::InvalidArgumentError(fmt::format("{}: cannot be replaced: {}", path, std::strerror(errno)));
  }
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

TensorInfo tensor_view(std::string name, std::vector<int64_t> shape, std::span<const int64_t> values) {
  return {std::move(name), Dtype::kI64, std::move(shape), std::as_bytes(values)};
}
TensorInfo tensor_view(std::string name, std::vector<int64_t> shape, std::span<const float> values) {
  return {std::move(name), Dtype::kF32, std::move(shape), std::as_bytes(values)};
}

}  // namespace tensorfold
