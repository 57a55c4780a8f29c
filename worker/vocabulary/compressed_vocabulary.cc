#include "worker/vocabulary/compressed_vocabulary.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <optional>
#include <unordered_map>

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/vocabulary/folding.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr int64_t kMaxTokens = int64_t{4} << 20;

// GPT-2's alphabet: printable bytes are themselves, the others the characters from 256 on.
std::optional<uint8_t> byte_of(char32_t c) {
  static const std::vector<uint8_t> others = [] {
    std::vector<uint8_t> out;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
      if (!printable) out.push_back(static_cast<uint8_t>(b));
    }
    return out;
  }();
  if (c >= 256 && c - 256 < others.size()) return others[c - 256];
  if (c < 256 && std::find(others.begin(), others.end(), static_cast<uint8_t>(c)) == others.end()) {
    return static_cast<uint8_t>(c);
  }
  return std::nullopt;
}

// The text that a token stands for; one with a character outside the alphabet stands for itself.
std::string text_of(const std::string& token) {
  const std::optional<std::u32string> characters = code_points(token);
  if (!characters) return token;
  std::string bytes;
  for (const char32_t c : *characters) {
    const std::optional<uint8_t> byte = byte_of(c);
    if (!byte) return token;
    bytes.push_back(static_cast<char>(*byte));
  }
  return bytes;
}

bool is_white_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// What tokens of one class have in common.
std::string key_of(const std::string& token) {
  constexpr char32_t kNoCharacter = 0xFFFD;
  constexpr char32_t kOnlyBlank = 0xE000;  // stands for a text that is one blank while ends are cut
  const std::string text = text_of(token);
  const std::optional<std::u32string> characters = code_points(text);
  if (!characters || characters->find(kNoCharacter) != std::u32string::npos) return token;
  std::u32string line;
  for (const char32_t c : folded(*characters)) {
    const bool blank = c == ' ' || c == '\t' || c == '\r' || c == '\n';
    if (!blank) line.push_back(c);
    if (blank && (line.empty() || line.back() != ' ')) line.push_back(' ');
  }
  if (line == U" ") line = kOnlyBlank;
  const auto first = std::find_if_not(line.begin(), line.end(), is_white_space);
  const auto last = std::find_if_not(line.rbegin(), std::make_reverse_iterator(first), is_white_space).base();
  std::string key;
  for (auto at = first; at < last; ++at) append_code_point(*at == kOnlyBlank ? U' ' : *at, key);
  return key.empty() ? text : key;
}

class Tokens {
 public:
  explicit Tokens(const std::string& label) : label_(label) {}

  absl::Status add(const json::value& id, std::string_view token, const std::string& where, bool replaces) {
    const std::optional<int64_t> number = json_integer(id);
    if (!number || *number < 0 || *number >= kMaxTokens) {
      return absl::InvalidArgumentError(
          fmt::format("{}: {} has id {}; allowed: 0 to {}", label_, where, json_text(id), kMaxTokens - 1));
    }
    const auto at = static_cast<size_t>(*number);
    if (at >= tokens_.size()) tokens_.resize(at + 1);
    if (!replaces && tokens_[at]) {
      return absl::InvalidArgumentError(
          fmt::format("{}: {}: id {} is also that of {}", label_, where, at, quoted_name(*tokens_[at])));
    }
    tokens_[at] = std::string(token);
    return absl::OkStatus();
  }

  absl::StatusOr<CompressedVocabulary> compress() const {
    CompressedVocabulary out;
    std::unordered_map<std::string, int32_t> classes;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (!tokens_[id]) return absl::InvalidArgumentError(fmt::format("{}: no token has id {}", label_, id));
      const auto [at, added] = classes.emplace(key_of(*tokens_[id]), out.classes);
      out.classes += added ? 1 : 0;
      out.class_of.push_back(at->second);
    }
    return out;
  }

 private:
  std::string label_;
  std::vector<std::optional<std::string>> tokens_;
};

std::string_view view(json::string_view text) { return {text.data(), text.size()}; }

absl::Status add_model(const json::object& root, const std::string& label, Tokens& tokens) {
  const json::value* model = root.if_contains("model");
  const json::value* vocabulary =
      model != nullptr && model->is_object() ? model->get_object().if_contains("vocab") : nullptr;
  if (vocabulary == nullptr || !vocabulary->is_object()) {
    return absl::InvalidArgumentError(fmt::format("{}: model.vocab is missing or no object of tokens", label));
  }
  for (const auto& entry : vocabulary->get_object()) {
    const std::string_view token = view(entry.key());
    const std::string where = fmt::format("model.vocab.{}", quoted_name(std::string(token.substr(0, 60))));
    if (absl::Status s = tokens.add(entry.value(), token, where, false); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status add_added(const json::object& root, const std::string& label, Tokens& tokens) {
  const json::value* added = root.if_contains("added_tokens");
  if (added == nullptr || added->is_null()) return absl::OkStatus();
  if (!added->is_array()) return absl::InvalidArgumentError(fmt::format("{}: added_tokens is no list", label));
  for (const json::value& entry : added->get_array()) {
    const json::object* object = entry.if_object();
    const json::value* id = object == nullptr ? nullptr : object->if_contains("id");
    const json::value* content = object == nullptr ? nullptr : object->if_contains("content");
    if (id == nullptr || content == nullptr || !content->is_string()) {
      return absl::InvalidArgumentError(
          fmt::format("{}: added_tokens holds {}; each has an id and a content", label, json_text(entry)));
    }
    const std::string_view token = view(json::string_view(content->get_string()));
    if (absl::Status s = tokens.add(*id, token, "added_tokens", true); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// What turns a token into text: byte-level, alone or among others.
bool is_byte_level(const json::value* decoder, int depth = 0) {
  const json::object* object = decoder == nullptr ? nullptr : decoder->if_object();
  if (object == nullptr || depth > 4) return false;
  const json::value* type = object->if_contains("type");
  if (type != nullptr && type->is_string() && type->get_string() == "ByteLevel") return true;
  const json::value* parts = object->if_contains("decoders");
  if (parts == nullptr || !parts->is_array()) return false;
  const json::array& list = parts->get_array();
  return list.size() == 1 && is_byte_level(&list[0], depth + 1);
}

}  // namespace

absl::StatusOr<CompressedVocabulary> compress_vocabulary(std::string_view tokenizer_json, const std::string& label) {
  absl::StatusOr<json::object> root = parse_json_object(tokenizer_json, label);
  if (!root.ok()) return root.status();
  if (!is_byte_level(root->if_contains("decoder"))) {
    return absl::InvalidArgumentError(
        fmt::format("{}: decoder is not ByteLevel: texts of its tokens are not known", label));
  }
  Tokens tokens(label);
  if (absl::Status s = add_model(*root, label, tokens); !s.ok()) return s;
  if (absl::Status s = add_added(*root, label, tokens); !s.ok()) return s;
  return tokens.compress();
}

absl::StatusOr<CompressedVocabulary> read_compressed_vocabulary(const std::string& dir) {
  const std::string path = dir + "/tokenizer.json";
  absl::StatusOr<std::string> text = read_text_file(path, kMaxVocabularyBytes);
  if (!text.ok()) return text.status();
  return compress_vocabulary(*text, path);
}

}  // namespace tensorfold
