#include "worker/checkpoint/foreign_quantization.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/safetensors.h"

namespace tensorfold {
namespace {

using boost::json::object;
using boost::json::value;

constexpr size_t kMaxPatterns = 1u << 20;

struct Algo {
  std::string_view name;
  StoredKind kind;
};
constexpr std::array<Algo, 6> kAlgos = {{{"NVFP4", StoredKind::kNvfp4},
                                         {"W4A16_NVFP4", StoredKind::kNvfp4},
                                         {"FP8", StoredKind::kFp8},
                                         {"FP8_PB_WO", StoredKind::kFp8},
                                         {"FP8_PER_CHANNEL_PER_TOKEN", StoredKind::kFp8},
                                         {"MXFP8", StoredKind::kMxfp8}}};

std::string_view text_of(const object& o, const char* key) {
  const value* v = o.if_contains(key);
  const auto* text = v == nullptr ? nullptr : v->if_string();
  return text == nullptr ? std::string_view() : std::string_view(text->data(), text->size());
}

bool present(const object& o, const char* key) {
  const value* v = o.if_contains(key);
  return v != nullptr && !v->is_null();
}

std::string shown(const object& o, const char* key) {
  const value* v = o.if_contains(key);
  return v == nullptr ? "absent" : json_text(*v);
}

// One reading of one object.
struct Parser {
  std::string label;
  std::string where;
  QuantizationConfig out;

  absl::Status refused(const std::string& found) const { return refused_quantization(label, where, found); }
  absl::Status malformed(const char* key, const object& o, std::string_view allowed) const {
    return absl::InvalidArgumentError(
        fmt::format("{}: {}.{} is {}; allowed: {}", label, where, key, shown(o, key), allowed));
  }

  absl::Status ignored(const object& o) {
    for (const char* key : {"ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"}) {
      if (!present(o, key)) continue;
      const boost::json::array* list = o.at(key).if_array();
      if (list == nullptr || list->size() > kMaxPatterns) return malformed(key, o, "a list of module names");
      for (const value& entry : *list) {
        if (!entry.is_string()) return malformed(key, o, "a list of module names");
        const std::string_view pattern(entry.get_string().data(), entry.get_string().size());
        if (!pattern.starts_with("re:")) out.ignored.emplace_back(strip_prefixes(pattern));
      }
    }
    std::sort(out.ignored.begin(), out.ignored.end());
    out.ignored.erase(std::unique(out.ignored.begin(), out.ignored.end()), out.ignored.end());
    return absl::OkStatus();
  }

  absl::Status name_module(std::string_view path, StoredKind kind) {
    const auto [at, added] = out.stored_modules.emplace(std::string(strip_prefixes(path)), kind);
    if (added || at->second == kind) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("{}: {} names module {} twice, with different formats", label, where, quoted_name(at->first)));
  }

  absl::Status group_size(const object& o, StoredKind kind) const {
    if (!present(o, "group_size")) return absl::OkStatus();
    const int64_t group = json_integer(o.at("group_size")).value_or(0);
    const int64_t needed = kind == StoredKind::kNvfp4 ? 16 : 32;
    if (kind == StoredKind::kFp8 || group == needed) return absl::OkStatus();
    return refused(fmt::format("{} with group_size {}", stored_kind_name(kind), shown(o, "group_size")));
  }

  absl::StatusOr<StoredKind> algo(const object& o) const {
    const std::string_view name = text_of(o, "quant_algo");
    const auto at = std::find_if(kAlgos.begin(), kAlgos.end(), [&](const Algo& row) { return row.name == name; });
    if (at == kAlgos.end()) return refused(fmt::format("modelopt with quant_algo {}", shown(o, "quant_algo")));
    if (absl::Status s = group_size(o, at->kind); !s.ok()) return s;
    return at->kind;
  }

  // The weights of one entry of config_groups.
  absl::StatusOr<StoredKind> scheme(const object& weights) {
    const int64_t bits = present(weights, "num_bits") ? json_integer(weights.at("num_bits")).value_or(0) : 0;
    const std::string_view type = text_of(weights, "type"), strategy = text_of(weights, "strategy");
    const std::string found =
        fmt::format("weights of type {}, {} bits, strategy {}, group_size {}", shown(weights, "type"),
                    shown(weights, "num_bits"), shown(weights, "strategy"), shown(weights, "group_size"));
    if (present(weights, "symmetric") && weights.at("symmetric") == value(false)) return refused("asymmetric " + found);
    const int64_t group = present(weights, "group_size") ? json_integer(weights.at("group_size")).value_or(-1) : 0;
    if (type == "float" && bits == 4 && group == 16) return StoredKind::kNvfp4;
    if (type == "float" && bits == 4 && group == 32) return StoredKind::kMxfp4;
    if (type == "float" && bits == 8 && group == 32) return StoredKind::kMxfp8;
    const bool whole = strategy.empty() || strategy == "tensor" || strategy == "channel" || strategy == "block";
    if (type != "float" || bits != 8 || group > 0 || !whole) return refused(found);
    if (strategy == "block" && present(weights, "block_structure")) {
      if (absl::Status s = block(weights, "block_structure"); !s.ok()) return s;
    }
    return StoredKind::kFp8;
  }

  absl::Status block(const object& o, const char* key) {
    const boost::json::array* list = o.at(key).if_array();
    std::array<int64_t, 2> size = {0, 0};
    for (size_t i = 0; list != nullptr && list->size() == 2 && i < 2; ++i)
      size[i] = json_integer((*list)[i]).value_or(0);
    if (size[0] < 1 || size[1] < 1 || size[0] > 65536 || size[1] > 65536) {
      return malformed(key, o, "two whole numbers from 1 to 65536");
    }
    const std::pair<int64_t, int64_t> found = {size[0], size[1]};
    if (out.fp8_block && *out.fp8_block != found) return refused("FP8 with blocks of two sizes");
    out.fp8_block = found;
    return absl::OkStatus();
  }

  absl::Status groups(const object& o) {
    const object* list = o.at("config_groups").if_object();
    if (list == nullptr || list->empty()) return malformed("config_groups", o, "an object with one group or more");
    for (const auto& entry : *list) {
      const object* group = entry.value().if_object();
      const value* weights = group == nullptr ? nullptr : group->if_contains("weights");
      if (weights == nullptr || !weights->is_object()) return refused("a group without quantised weights");
      absl::StatusOr<StoredKind> kind = scheme(weights->get_object());
      if (!kind.ok()) return kind.status();
      out.kinds.insert(*kind);
      const value* targets = group->if_contains("targets");
      if (targets == nullptr || !targets->is_array()) continue;
      for (const value& target : targets->get_array()) {
        const std::string_view name = target.is_string()
                                          ? std::string_view(target.get_string().data(), target.get_string().size())
                                          : std::string_view();
        // A class of modules ("Linear") or a pattern names none of them.
        if (name.find('.') == std::string_view::npos || name.starts_with("re:") || name.find('*') != name.npos)
          continue;
        if (absl::Status s = name_module(name, *kind); !s.ok()) return s;
      }
    }
    return absl::OkStatus();
  }

  absl::Status modelopt(const object& o) {
    out.method = "modelopt";
    if (const value* layers = o.if_contains("quantized_layers"); layers != nullptr && !layers->is_null()) {
      if (!layers->is_object()) return malformed("quantized_layers", o, "an object");
      for (const auto& entry : layers->get_object()) {
        if (!entry.value().is_object()) return malformed("quantized_layers", o, "an object of objects");
        absl::StatusOr<StoredKind> kind = algo(entry.value().get_object());
        if (!kind.ok()) return kind.status();
        out.kinds.insert(*kind);
        const std::string_view path(entry.key().data(), entry.key().size());
        if (path.find('*') != path.npos) continue;
        if (absl::Status s = name_module(path, *kind); !s.ok()) return s;
      }
    }
    const bool mixed = text_of(o, "quant_algo") == "MIXED_PRECISION";
    if (!mixed && present(o, "quant_algo")) {
      absl::StatusOr<StoredKind> kind = algo(o);
      if (!kind.ok()) return kind.status();
      out.kinds.insert(*kind);
    }
    if (present(o, "config_groups")) {
      if (absl::Status s = groups(o); !s.ok()) return s;
    }
    if (mixed && out.kinds.empty()) out.kinds = {StoredKind::kNvfp4, StoredKind::kFp8, StoredKind::kMxfp8};
    if (out.kinds.empty()) return refused("modelopt with quant_algo " + shown(o, "quant_algo"));
    return absl::OkStatus();
  }

  absl::Status compressed_tensors(const object& o) {
    out.method = "compressed-tensors";
    for (const char* key : {"transform_config", "sparsity_config"}) {
      const value* extra = o.if_contains(key);
      if (extra == nullptr || extra->is_null() || (extra->is_object() && extra->get_object().empty())) continue;
      if (extra->is_object() && text_of(extra->get_object(), "format") == "dense") continue;
      return refused(fmt::format("compressed-tensors with {}", key));
    }
    static constexpr std::array<std::string_view, 6> kFormats = {"nvfp4-pack-quantized", "mxfp4-pack-quantized",
                                                                 "mxfp8-quantized",      "float-quantized",
                                                                 "naive-quantized",      "mixed-precision"};
    const std::string_view format = text_of(o, "format");
    if (std::find(kFormats.begin(), kFormats.end(), format) == kFormats.end() && present(o, "format")) {
      return refused(fmt::format("compressed-tensors with format {}", shown(o, "format")));
    }
    if (!present(o, "config_groups")) return refused("compressed-tensors without config_groups");
    return groups(o);
  }

  absl::Status fp8(const object& o) {
    out.method = "fp8";
    out.kinds = {StoredKind::kFp8};
    for (const char* key : {"fmt", "format"}) {
      if (present(o, key) && text_of(o, key) != "e4m3")
        return refused(fmt::format("fp8 with {} {}", key, shown(o, key)));
    }
    return present(o, "weight_block_size") ? block(o, "weight_block_size") : absl::OkStatus();
  }

  absl::Status parse(const object& o) {
    const std::string_view method = text_of(o, "quant_method");
    absl::Status status;
    if (method == "fp8") {
      status = fp8(o);
    } else if (method == "compressed-tensors") {
      status = compressed_tensors(o);
    } else if (method == "exl3") {
      out.method = "exl3";
      out.kinds = {StoredKind::kExl3};
    } else if (method == "modelopt" || method == "modelopt_fp4" || method == "modelopt_mixed" ||
               (!present(o, "quant_method") && present(o, "quant_algo"))) {
      status = modelopt(o);
    } else {
      status = unknown(o);
    }
    return status.ok() ? ignored(o) : status;
  }

  absl::Status unknown(const object& o) const {
    for (const char* key : {"quant_method", "quant_algo", "format", "load_in_4bit", "load_in_8bit", "config_groups"}) {
      if (!present(o, key)) continue;
      std::string found = fmt::format("{} {}", key, shown(o, key));
      if (std::string_view(key) == "quant_method" && present(o, "quant_algo")) {
        found += " with quant_algo " + shown(o, "quant_algo");
      }
      return refused(found);
    }
    return refused("an unnamed method");
  }
};

}  // namespace

absl::Status refused_quantization(const std::string& label, const std::string& where, const std::string& found) {
  return absl::UnimplementedError(
      fmt::format("{}: {} asks for {}, which is not read here. Read are: {}", label, where, found, formats_read()));
}

absl::StatusOr<QuantizationConfig> parse_foreign_quantization(const object& o, const std::string& label,
                                                              const std::string& where) {
  Parser parser = {label, where, {}};
  if (absl::Status status = parser.parse(o); !status.ok()) return status;
  return std::move(parser.out);
}

absl::StatusOr<QuantizationConfig> parse_hf_quant_config(const object& file, const std::string& label) {
  const value* inner = file.if_contains("quantization");
  const object* o = inner != nullptr ? inner->if_object() : &file;
  if (o == nullptr) {
    return absl::InvalidArgumentError(
        fmt::format("{}: quantization is {}; allowed: an object", label, json_text(*inner)));
  }
  return parse_foreign_quantization(*o, label, "quantization");
}

// The last star is the only one that need be tried again, so this is quadratic at worst.
bool glob_matches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace tensorfold
