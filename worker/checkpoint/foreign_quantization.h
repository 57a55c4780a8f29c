// Quantisation methods other than MLX's, as their JSON objects state them: fp8, modelopt, compressed-tensors, exl3.
#pragma once

#include <boost/json/object.hpp>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/checkpoint/quantization.h"

namespace tensorfold {

/// "<label>: <where> asks for <found>, which is not read here. Read are: ...".
absl::Status refused_quantization(const std::string& label, const std::string& where, const std::string& found);

/// Unimplemented for a method, algorithm or scheme that is not read, by its name.
absl::StatusOr<QuantizationConfig> parse_foreign_quantization(const boost::json::object& object,
                                                              const std::string& label, const std::string& where);

/// `*` stands for any run of characters; everything else for itself. Linear in the product of the lengths.
bool glob_matches(std::string_view pattern, std::string_view text);

}  // namespace tensorfold
