#include "worker/checkpoint/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <limits>
#include <optional>
#include <utility>

namespace tensorfold {
namespace {

namespace json = boost::json;
using ErrorCode = boost::system::error_code;

constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxMetadataBytes = 16u << 20;

// Receives the events of Boost's parser and accepts exactly the header's grammar. Any step outside it ends the parse
// with a message in `problem`.
struct HeaderHandler {
  static constexpr size_t max_object_size = std::numeric_limits<size_t>::max();
  static constexpr size_t max_array_size = std::numeric_limits<size_t>::max();
  static constexpr size_t max_key_size = std::numeric_limits<size_t>::max();
  static constexpr size_t max_string_size = std::numeric_limits<size_t>::max();

  enum class At { kStart, kTop, kTensor, kMetadata, kShape, kOffsets, kEnd };

  At at = At::kStart;
  SafetensorsHeader header;
  HeaderTensor tensor;
  std::string key;   // the key whose value comes next
  std::string text;  // pieces of the key or string being read
  std::vector<uint64_t> offsets;
  bool has_metadata = false, has_dtype = false, has_shape = false, has_offsets = false;
  size_t metadata_bytes = 0;
  std::string problem;

  bool fail(ErrorCode& ec, std::string message) {
    problem = std::move(message);
    ec = json::make_error_code(json::error::syntax);
    return false;
  }
  bool unexpected(ErrorCode& ec, std::string_view found) {
    switch (at) {
      case At::kStart:
        return fail(ec, fmt::format("the header is {}, not a JSON object", found));
      case At::kTop:
        return fail(ec, fmt::format("{} is {}; allowed is an object with dtype, shape and data_offsets",
                                    quoted_name(key), found));
      case At::kMetadata:
        return fail(ec, fmt::format("__metadata__ {} is {}; allowed is a string", quoted_name(key), found));
      case At::kTensor:
        return fail(ec, fmt::format("tensor {}: {} is {}; allowed are dtype: a string, shape and data_offsets: arrays "
                                    "of whole numbers",
                                    quoted_name(tensor.name), quoted_name(key), found));
      case At::kShape:
      case At::kOffsets:
        return fail(ec, fmt::format("tensor {}: {} holds {}; allowed are whole numbers from 0 to 2^63 - 1",
                                    quoted_name(tensor.name), at == At::kShape ? "shape" : "data_offsets", found));
      case At::kEnd:
        break;
    }
    return fail(ec, fmt::format("{} after the end of the header", found));
  }

  bool on_document_begin(ErrorCode&) { return true; }
  bool on_document_end(ErrorCode&) { return true; }

  bool on_object_begin(ErrorCode& ec) {
    if (at == At::kStart) {
      at = At::kTop;
      return true;
    }
    if (at != At::kTop) return unexpected(ec, "an object");
    if (key == "__metadata__") {
      if (has_metadata) return fail(ec, "__metadata__ stands twice in the header");
      has_metadata = true;
      at = At::kMetadata;
      return true;
    }
    at = At::kTensor;
    tensor = HeaderTensor{};
    tensor.name = key;
    has_dtype = has_shape = has_offsets = false;
    return true;
  }

  bool on_object_end(size_t, ErrorCode& ec) {
    if (at == At::kTop) {
      at = At::kEnd;
    } else if (at == At::kMetadata) {
      at = At::kTop;
    } else {
      at = At::kTop;
      return finish_tensor(ec);
    }
    return true;
  }

  bool finish_tensor(ErrorCode& ec) {
    const std::string name = quoted_name(tensor.name);
    if (!has_dtype || !has_shape || !has_offsets) {
      return fail(
          ec, fmt::format("tensor {} has no {}", name, !has_dtype ? "dtype" : (!has_shape ? "shape" : "data_offsets")));
    }
    if (offsets.size() != 2) {
      return fail(ec, fmt::format("tensor {}: data_offsets has {} numbers; allowed are 2", name, offsets.size()));
    }
    tensor.begin = offsets[0];
    tensor.end = offsets[1];
    if (tensor.begin > tensor.end) {
      return fail(
          ec, fmt::format("tensor {}: data_offsets [{}, {}] end before they begin", name, tensor.begin, tensor.end));
    }
    int64_t bytes = dtype_bytes(tensor.dtype);
    for (int64_t dim : tensor.shape) {
      if (__builtin_mul_overflow(bytes, dim, &bytes)) {
        return fail(ec, fmt::format("tensor {}: shape {} of {} is more than 2^63 - 1 bytes", name,
                                    shape_text(tensor.shape), dtype_name(tensor.dtype)));
      }
    }
    if (tensor.end - tensor.begin != static_cast<uint64_t>(bytes)) {
      return fail(ec, fmt::format("tensor {}: shape {} of {} is {} bytes, but data_offsets [{}, {}] hold {}", name,
                                  shape_text(tensor.shape), dtype_name(tensor.dtype), bytes, tensor.begin, tensor.end,
                                  tensor.end - tensor.begin));
    }
    header.tensors.push_back(std::move(tensor));
    return true;
  }

  bool on_array_begin(ErrorCode& ec) {
    if (at != At::kTensor || (key != "shape" && key != "data_offsets")) return unexpected(ec, "an array");
    if (key == "shape") {
      if (has_shape) return repeated(ec);
      has_shape = true;
      at = At::kShape;
    } else {
      if (has_offsets) return repeated(ec);
      has_offsets = true;
      offsets.clear();
      at = At::kOffsets;
    }
    return true;
  }
  bool on_array_end(size_t, ErrorCode&) {
    at = At::kTensor;
    return true;
  }
  bool repeated(ErrorCode& ec) {
    return fail(ec, fmt::format("tensor {}: {} stands twice", quoted_name(tensor.name), key));
  }

  bool append(ErrorCode& ec, json::string_view piece) {
    const size_t limit = at == At::kMetadata ? kMaxMetadataBytes : kMaxNameBytes;
    if (text.size() + piece.size() > limit) {
      return fail(ec, fmt::format("a name or string of more than {} bytes, beginning {}", limit, quoted_name(text)));
    }
    text.append(piece.data(), piece.size());
    return true;
  }
  bool on_key_part(json::string_view piece, size_t, ErrorCode& ec) { return append(ec, piece); }
  bool on_key(json::string_view piece, size_t, ErrorCode& ec) {
    if (!append(ec, piece)) return false;
    key = std::exchange(text, {});
    if (at == At::kTensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      return fail(ec, fmt::format("tensor {} has a field {}; allowed are dtype, shape, data_offsets",
                                  quoted_name(tensor.name), quoted_name(key)));
    }
    if (at == At::kTop && key.empty()) return fail(ec, "a tensor without a name");
    return true;
  }
  bool on_string_part(json::string_view piece, size_t, ErrorCode& ec) { return append(ec, piece); }
  bool on_string(json::string_view piece, size_t, ErrorCode& ec) {
    if (!append(ec, piece)) return false;
    std::string value = std::exchange(text, {});
    if (at == At::kMetadata) {
      metadata_bytes += key.size() + value.size();
      if (metadata_bytes > kMaxMetadataBytes) {
        return fail(ec, fmt::format("__metadata__ is larger than {} bytes", kMaxMetadataBytes));
      }
      if (!header.metadata.emplace(key, std::move(value)).second) {
        return fail(ec, fmt::format("__metadata__ {} stands twice", quoted_name(key)));
      }
      return true;
    }
    if (at != At::kTensor || key != "dtype") return unexpected(ec, "a string");
    if (has_dtype) return repeated(ec);
    has_dtype = true;
    const std::optional<Dtype> dtype = dtype_from_name(value);
    if (!dtype) {
      return fail(ec, fmt::format("tensor {}: unknown dtype {}; known are BOOL, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, "
                                  "I16, U16, F16, BF16, I32, U32, F32, I64, U64, F64",
                                  quoted_name(tensor.name), quoted_name(value)));
    }
    tensor.dtype = *dtype;
    return true;
  }

  bool on_number_part(json::string_view, ErrorCode&) { return true; }
  bool on_int64(int64_t value, json::string_view, ErrorCode& ec) {
    if ((at != At::kShape && at != At::kOffsets) || value < 0) return unexpected(ec, fmt::format("{}", value));
    if (at == At::kShape) {
      if (tensor.shape.size() == kMaxTensorRank) {
        return fail(ec, fmt::format("tensor {} has more than {} dimensions", quoted_name(tensor.name), kMaxTensorRank));
      }
      tensor.shape.push_back(value);
    } else {
      if (offsets.size() == 2) {
        return fail(ec, fmt::format("tensor {}: data_offsets has more than 2 numbers", quoted_name(tensor.name)));
      }
      offsets.push_back(static_cast<uint64_t>(value));
    }
    return true;
  }
  bool on_uint64(uint64_t value, json::string_view, ErrorCode& ec) {
    if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return on_int64(static_cast<int64_t>(value), {}, ec);
    }
    return unexpected(ec, fmt::format("{}", value));
  }
  bool on_double(double value, json::string_view, ErrorCode& ec) { return unexpected(ec, fmt::format("{}", value)); }
  bool on_bool(bool value, ErrorCode& ec) { return unexpected(ec, value ? "true" : "false"); }
  bool on_null(ErrorCode& ec) { return unexpected(ec, "null"); }
  bool on_comment_part(json::string_view, ErrorCode&) { return true; }
  bool on_comment(json::string_view, ErrorCode&) { return true; }
};

}  // namespace

absl::StatusOr<SafetensorsHeader> parse_safetensors_header(std::string_view text, const std::string& label) {
  json::parse_options options;
  options.max_depth = 4;
  json::basic_parser<HeaderHandler> parser(options);
  ErrorCode ec;
  const size_t read = parser.write_some(false, text.data(), text.size(), ec);
  HeaderHandler& handler = parser.handler();
  if (ec) {
    if (!handler.problem.empty()) return absl::InvalidArgumentError(fmt::format("{}: {}", label, handler.problem));
    return absl::InvalidArgumentError(
        fmt::format("{}: the header is not JSON: {} at byte {} of {}", label, ec.message(), read, text.size()));
  }
  if (read != text.size() || handler.at != HeaderHandler::At::kEnd) {
    return absl::InvalidArgumentError(
        fmt::format("{}: the header is not one JSON object: byte {} of {}", label, read, text.size()));
  }
  return std::move(handler.header);
}

}  // namespace tensorfold
