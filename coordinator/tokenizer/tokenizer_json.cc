#include "coordinator/tokenizer/tokenizer_json.h"

#include <fmt/format.h>

#include <boost/container/pmr/memory_resource.hpp>
#include <boost/json.hpp>
#include <exception>
#include <new>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "coordinator/tokenizer/pattern_translator.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxParsedBytes = size_t{1} << 30;
constexpr size_t kMaxVocabulary = size_t{2} << 20;
constexpr size_t kMaxMerges = size_t{4} << 20;
constexpr int64_t kMaxId = int64_t{4} << 20;
constexpr size_t kMaxAddedTokens = size_t{64} << 10;
constexpr size_t kMaxAddedTokenBytes = 1024;
constexpr size_t kMaxSteps = 64;
constexpr size_t kMaxTemplateIds = 64;

// The GPT-2 regex that ByteLevel applies with use_regex.
constexpr std::string_view kByteLevelRegex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Heap memory up to a limit.
class BoundedResource final : public boost::container::pmr::memory_resource {
 public:
  explicit BoundedResource(size_t limit) : left_(limit) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t) override {
    if (bytes > left_) throw std::bad_alloc();
    void* memory = ::operator new(bytes);
    left_ -= bytes;
    return memory;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t) override {
    left_ += bytes;
    ::operator delete(memory);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  size_t left_;
};

std::string_view view(const json::string& s) { return {s.data(), s.size()}; }
std::string_view view(json::string_view s) { return {s.data(), s.size()}; }

std::string describe(const json::value* value) {
  if (value == nullptr) return "nothing";
  if (const json::string* s = value->if_string()) {
    const bool whole = s->size() <= 60;
    return fmt::format("'{}'{}", view(*s).substr(0, 60), whole ? "" : "...");
  }
  if (value->is_object()) {
    if (const json::value* type = value->as_object().if_contains("type"); type != nullptr && type->is_string()) {
      return fmt::format("an object of type '{}'", view(type->as_string()).substr(0, 60));
    }
    return "an object";
  }
  if (value->is_array()) return fmt::format("an array of {}", value->as_array().size());
  return std::string(json::serialize(*value));
}

absl::Status refused(std::string_view path, const json::value* found, std::string_view wanted) {
  return absl::InvalidArgumentError(fmt::format("{}: found {}; {}", path, describe(found), wanted));
}

// A missing key and null are the same to the library.
const json::value* member(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(json::string_view(key.data(), key.size()));
  return value == nullptr || value->is_null() ? nullptr : value;
}

absl::StatusOr<bool> boolean(const json::object& object, std::string_view path, std::string_view key,
                             std::optional<bool> missing) {
  const json::value* value = member(object, key);
  if (value == nullptr && missing) return *missing;
  if (value == nullptr || !value->is_bool())
    return refused(fmt::format("{}.{}", path, key), value, "true or false is read");
  return value->as_bool();
}

// An array member that may be missing.
absl::StatusOr<const json::array*> array(const json::object& object, std::string_view path, std::string_view key,
                                         size_t most) {
  const std::string where = path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
  const json::value* value = member(object, key);
  if (value == nullptr) return nullptr;
  if (!value->is_array()) return refused(where, value, "an array is read");
  if (value->as_array().size() > most) return refused(where, value, fmt::format("at most {} are read", most));
  return &value->as_array();
}

// The type of a component such as {"type": "NFC"}.
absl::StatusOr<std::string_view> type_of(const json::value& value, std::string_view path) {
  if (!value.is_object()) return refused(path, &value, "an object with a type is read");
  const json::value* type = member(value.as_object(), "type");
  if (type == nullptr || !type->is_string()) return refused(fmt::format("{}.type", path), type, "a string is read");
  return view(type->as_string());
}

absl::StatusOr<int32_t> token_id(const json::value* value, std::string_view path) {
  int64_t id = -1;
  if (value != nullptr && value->is_int64()) id = value->as_int64();
  if (id < 0 || id >= kMaxId) return refused(path, value, fmt::format("a token id from 0 to {} is read", kMaxId - 1));
  return static_cast<int32_t>(id);
}

// Reads one file; the parts fill `spec_`.
class SpecReader {
 public:
  absl::StatusOr<TokenizerSpec> read(const json::value& root) {
    if (!root.is_object()) return refused("tokenizer.json", &root, "an object is read");
    const json::object& object = root.as_object();
    if (const json::value* version = member(object, "version");
        version != nullptr && !(version->is_string() && view(version->as_string()) == "1.0")) {
      return refused("version", version, "'1.0' is read");
    }
    const json::value* model_value = member(object, "model");
    if (model_value == nullptr || !model_value->is_object())
      return refused("model", model_value, "a BPE model is read");
    if (absl::Status status = model(model_value->as_object()); !status.ok()) return status;
    if (absl::Status status = added_tokens(object); !status.ok()) return status;
    if (const json::value* value = member(object, "normalizer")) {
      if (absl::Status status = normalizer(*value, "normalizer"); !status.ok()) return status;
    }
    const json::value* pre = member(object, "pre_tokenizer");
    if (pre != nullptr) {
      if (absl::Status status = pre_tokenizer(*pre, "pre_tokenizer"); !status.ok()) return status;
    }
    if (!byte_level_) return refused("pre_tokenizer", pre, "ByteLevel, alone or last in a Sequence, is read");
    if (const json::value* value = member(object, "post_processor")) {
      if (absl::Status status = post_processor(*value, "post_processor"); !status.ok()) return status;
    }
    const json::value* decoder_value = member(object, "decoder");
    if (decoder_value == nullptr) return refused("decoder", decoder_value, "ByteLevel is read");
    if (absl::Status status = decoder(*decoder_value, "decoder"); !status.ok()) return status;
    return std::move(spec_);
  }

 private:
  absl::Status model(const json::object& object);
  absl::Status model_options(const json::object& object);
  absl::Status vocabulary(const json::object& object);
  absl::Status merges(const json::object& object);
  absl::Status added_tokens(const json::object& object);
  absl::StatusOr<AddedToken> added_token(const json::value& value, const std::string& path);
  absl::Status normalizer(const json::value& value, const std::string& path);
  absl::Status pre_tokenizer(const json::value& value, const std::string& path);
  absl::Status split(const json::object& object, const std::string& path);
  absl::Status byte_level(const json::object& object, const std::string& path);
  absl::Status digits(const json::object& object, const std::string& path);
  absl::Status add_step(const std::string& pattern, std::string shown, SplitBehavior behavior, bool invert,
                        const std::string& path);
  absl::Status post_processor(const json::value& value, const std::string& path);
  absl::Status template_processing(const json::object& object, const std::string& path);
  absl::Status decoder(const json::value& value, const std::string& path);

  TokenizerSpec spec_;
  absl::flat_hash_map<std::string, int32_t> ids_;  // vocabulary and added tokens
  bool byte_level_ = false;
};

absl::Status SpecReader::model(const json::object& object) {
  if (const json::value* type = member(object, "type");
      type != nullptr && !(type->is_string() && view(type->as_string()) == "BPE")) {
    return refused("model.type", type, "'BPE' is read");
  }
  if (absl::Status status = model_options(object); !status.ok()) return status;
  if (absl::Status status = vocabulary(object); !status.ok()) return status;
  return merges(object);
}

absl::Status SpecReader::model_options(const json::object& object) {
  if (const json::value* dropout = member(object, "dropout"); dropout != nullptr) {
    const bool zero = dropout->is_number() && dropout->to_number<double>() == 0.0;
    if (!zero) return refused("model.dropout", dropout, "null or 0 is read: encoding must not be random");
  }
  for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json::value* value = member(object, key);
    const bool empty = value == nullptr || (value->is_string() && value->as_string().empty());
    if (!empty)
      return refused(fmt::format("model.{}", key), value, "null or '' is read: a byte-level vocabulary has none");
  }
  absl::StatusOr<bool> byte_fallback = boolean(object, "model", "byte_fallback", false);
  if (!byte_fallback.ok()) return byte_fallback.status();
  if (*byte_fallback) {
    return refused("model.byte_fallback", member(object, "byte_fallback"),
                   "false is read: a byte-level vocabulary has all bytes, SentencePiece vocabularies are not read");
  }
  absl::StatusOr<bool> ignore_merges = boolean(object, "model", "ignore_merges", false);
  if (!ignore_merges.ok()) return ignore_merges.status();
  spec_.ignore_merges = *ignore_merges;
  return absl::OkStatus();
}

absl::Status SpecReader::vocabulary(const json::object& object) {
  const json::value* value = member(object, "vocab");
  if (value == nullptr || !value->is_object()) return refused("model.vocab", value, "an object of ids is read");
  const json::object& vocab = value->as_object();
  if (vocab.size() > kMaxVocabulary) {
    return absl::InvalidArgumentError(
        fmt::format("model.vocab: {} entries; at most {} are read", vocab.size(), kMaxVocabulary));
  }
  absl::flat_hash_map<int32_t, std::string_view> by_id;
  by_id.reserve(vocab.size());
  spec_.vocabulary.reserve(vocab.size());
  ids_.reserve(vocab.size());
  for (const auto& entry : vocab) {
    const std::string_view text = view(entry.key());
    absl::StatusOr<int32_t> id = token_id(&entry.value(), fmt::format("model.vocab['{}']", text.substr(0, 60)));
    if (!id.ok()) return id.status();
    const auto [it, added] = by_id.emplace(*id, text);
    if (!added) {
      return absl::InvalidArgumentError(fmt::format("model.vocab: id {} belongs to both '{}' and '{}'", *id,
                                                    it->second.substr(0, 60), text.substr(0, 60)));
    }
    spec_.vocabulary.push_back({std::string(text), *id});
    ids_.emplace(std::string(text), *id);
  }
  return absl::OkStatus();
}

absl::Status SpecReader::merges(const json::object& object) {
  absl::StatusOr<const json::array*> list = array(object, "model", "merges", kMaxMerges);
  if (!list.ok()) return list.status();
  if (*list == nullptr) return refused("model.merges", nullptr, "an array is read");
  spec_.merges.reserve((*list)->size());
  for (size_t i = 0; i < (*list)->size(); ++i) {
    const json::value& value = (**list)[i];
    if (const json::string* s = value.if_string()) {
      const std::string_view text = view(*s);
      if (text.starts_with("#version")) continue;
      const size_t blank = text.find(' ');
      if (blank != std::string_view::npos && text.find(' ', blank + 1) == std::string_view::npos) {
        spec_.merges.emplace_back(text.substr(0, blank), text.substr(blank + 1));
        continue;
      }
    } else if (value.is_array() && value.as_array().size() == 2 && value.as_array()[0].is_string() &&
               value.as_array()[1].is_string()) {
      spec_.merges.emplace_back(view(value.as_array()[0].as_string()), view(value.as_array()[1].as_string()));
      continue;
    }
    return refused(fmt::format("model.merges[{}]", i), &value, "'a b' or ['a', 'b'] is read");
  }
  return absl::OkStatus();
}

absl::StatusOr<AddedToken> SpecReader::added_token(const json::value& value, const std::string& path) {
  if (!value.is_object()) return refused(path, &value, "an object is read");
  const json::object& object = value.as_object();
  AddedToken token;
  absl::StatusOr<int32_t> id = token_id(member(object, "id"), path + ".id");
  if (!id.ok()) return id.status();
  token.id = *id;
  const json::value* content = member(object, "content");
  if (content == nullptr || !content->is_string() || content->as_string().size() > kMaxAddedTokenBytes) {
    return refused(path + ".content", content,
                   fmt::format("a string of at most {} bytes is read", kMaxAddedTokenBytes));
  }
  token.content = view(content->as_string());
  const std::pair<std::string_view, bool*> flags[] = {{"single_word", &token.single_word},
                                                      {"lstrip", &token.lstrip},
                                                      {"rstrip", &token.rstrip},
                                                      {"normalized", &token.normalized},
                                                      {"special", &token.special}};
  for (const auto& [name, flag] : flags) {
    absl::StatusOr<bool> set = boolean(object, path, name, std::nullopt);
    if (!set.ok()) return set.status();
    *flag = *set;
  }
  return token;
}

// The library takes an id from the vocabulary, or else counts on from its size, and only warns where the file says
// something else. The model was trained with one of the two, so a difference is an error here.
absl::Status SpecReader::added_tokens(const json::object& object) {
  absl::StatusOr<const json::array*> list = array(object, "", "added_tokens", kMaxAddedTokens);
  if (!list.ok()) return list.status();
  if (*list == nullptr) return absl::OkStatus();
  auto next_id = static_cast<int32_t>(spec_.vocabulary.size());
  absl::flat_hash_map<int32_t, size_t> place;  // id → index in added_tokens
  for (size_t i = 0; i < (*list)->size(); ++i) {
    const std::string path = fmt::format("added_tokens[{}]", i);
    absl::StatusOr<AddedToken> token = added_token((**list)[i], path);
    if (!token.ok()) return token.status();
    if (token->content.empty()) continue;
    const auto [known, added] = ids_.try_emplace(token->content, next_id);
    if (added) ++next_id;
    if (known->second != token->id) {
      return absl::InvalidArgumentError(fmt::format(
          "{}.id: found {} for '{}'; the tokenizers library gives it {} ({})", path, token->id, token->content,
          known->second, added ? "ids count on from the vocabulary's size" : "its id in model.vocab"));
    }
    const auto [at, first] = place.try_emplace(token->id, spec_.added_tokens.size());
    if (first) {
      spec_.added_tokens.push_back(*std::move(token));
    } else {
      spec_.added_tokens[at->second] = *std::move(token);
    }
  }
  return absl::OkStatus();
}

absl::Status SpecReader::normalizer(const json::value& value, const std::string& path) {
  absl::StatusOr<std::string_view> type = type_of(value, path);
  if (!type.ok()) return type.status();
  if (*type == "NFC") {
    spec_.nfc = true;
    return absl::OkStatus();
  }
  if (*type == "Sequence") {
    absl::StatusOr<const json::array*> list = array(value.as_object(), path, "normalizers", kMaxSteps);
    if (!list.ok()) return list.status();
    if (*list == nullptr) return refused(path + ".normalizers", nullptr, "an array is read");
    for (size_t i = 0; i < (*list)->size(); ++i) {
      absl::Status status = normalizer((**list)[i], fmt::format("{}.normalizers[{}]", path, i));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  return refused(path, &value, "null, NFC and Sequence are read");
}

absl::Status SpecReader::pre_tokenizer(const json::value& value, const std::string& path) {
  absl::StatusOr<std::string_view> type = type_of(value, path);
  if (!type.ok()) return type.status();
  const json::object& object = value.as_object();
  if (*type == "Sequence") {
    absl::StatusOr<const json::array*> list = array(object, path, "pretokenizers", kMaxSteps);
    if (!list.ok()) return list.status();
    if (*list == nullptr) return refused(path + ".pretokenizers", nullptr, "an array is read");
    for (size_t i = 0; i < (*list)->size(); ++i) {
      absl::Status status = pre_tokenizer((**list)[i], fmt::format("{}.pretokenizers[{}]", path, i));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  if (byte_level_) {
    return refused(path, &value, "nothing is read after ByteLevel, which has turned the text into its byte alphabet");
  }
  if (spec_.pre_tokenizer.size() >= kMaxSteps)
    return refused(path, &value, fmt::format("at most {} are read", kMaxSteps));
  if (*type == "Split") return split(object, path);
  if (*type == "Digits") return digits(object, path);
  if (*type == "ByteLevel") return byte_level(object, path);
  return refused(path, &value, "Split, Digits, ByteLevel and Sequence are read");
}

absl::Status SpecReader::add_step(const std::string& pattern, std::string shown, SplitBehavior behavior, bool invert,
                                  const std::string& path) {
  absl::StatusOr<std::unique_ptr<SplitRegex>> regex = SplitRegex::compile(pattern, std::move(shown));
  if (!regex.ok()) {
    return absl::Status(regex.status().code(), fmt::format("{}: {}", path, std::string(regex.status().message())));
  }
  PreTokenizerStep step;
  step.regex = *std::move(regex);
  step.behavior = behavior;
  step.invert = invert;
  spec_.pre_tokenizer.push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status SpecReader::split(const json::object& object, const std::string& path) {
  const json::value* behavior = member(object, "behavior");
  constexpr std::pair<std::string_view, SplitBehavior> kBehaviors[] = {
      {"Isolated", SplitBehavior::kIsolated},
      {"Removed", SplitBehavior::kRemoved},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous}};
  std::optional<SplitBehavior> chosen;
  for (const auto& [name, value] : kBehaviors) {
    if (behavior != nullptr && behavior->is_string() && view(behavior->as_string()) == name) chosen = value;
  }
  if (!chosen) {
    return refused(path + ".behavior", behavior,
                   "Isolated, Removed, MergedWithPrevious, MergedWithNext and Contiguous are read");
  }
  absl::StatusOr<bool> invert = boolean(object, path, "invert", std::nullopt);
  if (!invert.ok()) return invert.status();
  const json::value* pattern = member(object, "pattern");
  const json::object* kind = pattern == nullptr ? nullptr : pattern->if_object();
  const json::value* regex = kind == nullptr ? nullptr : member(*kind, "Regex");
  const json::value* literal = kind == nullptr ? nullptr : member(*kind, "String");
  if (literal != nullptr && literal->is_string() && literal->as_string().size() <= kMaxPatternBytes) {
    const std::string_view text = view(literal->as_string());
    return add_step(literal_pattern(text), std::string(text.substr(0, 400)), *chosen, *invert,
                    path + ".pattern.String");
  }
  if (regex == nullptr || !regex->is_string()) {
    return refused(path + ".pattern", pattern, "{'Regex': '...'} or {'String': '...'} is read");
  }
  const std::string_view text = view(regex->as_string());
  absl::StatusOr<std::string> translated = translate_pattern(text);
  if (!translated.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{}.pattern.Regex: cannot read the {}", path, std::string(translated.status().message())));
  }
  return add_step(*std::move(translated), std::string(text.substr(0, 400)), *chosen, *invert, path + ".pattern.Regex");
}

absl::Status SpecReader::digits(const json::object& object, const std::string& path) {
  absl::StatusOr<bool> individual = boolean(object, path, "individual_digits", false);
  if (!individual.ok()) return individual.status();
  return add_step(numeric_pattern(), "one digit", *individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous,
                  false, path);
}

absl::Status SpecReader::byte_level(const json::object& object, const std::string& path) {
  byte_level_ = true;
  absl::StatusOr<bool> prefix = boolean(object, path, "add_prefix_space", true);
  if (!prefix.ok()) return prefix.status();
  absl::StatusOr<bool> use_regex = boolean(object, path, "use_regex", true);
  if (!use_regex.ok()) return use_regex.status();
  if (*use_regex) {
    absl::StatusOr<std::string> pattern = translate_pattern(kByteLevelRegex);
    if (!pattern.ok()) return pattern.status();
    absl::Status status =
        add_step(*std::move(pattern), std::string(kByteLevelRegex), SplitBehavior::kIsolated, false, path);
    if (!status.ok()) return status;
    spec_.pre_tokenizer.back().add_prefix_space = *prefix;
  } else if (*prefix) {
    PreTokenizerStep step;
    step.add_prefix_space = true;
    spec_.pre_tokenizer.push_back(std::move(step));
  }
  return absl::OkStatus();
}

absl::Status SpecReader::post_processor(const json::value& value, const std::string& path) {
  absl::StatusOr<std::string_view> type = type_of(value, path);
  if (!type.ok()) return type.status();
  if (*type == "ByteLevel") return absl::OkStatus();  // it moves offsets, which nobody reads here
  if (*type == "Sequence") {
    absl::StatusOr<const json::array*> list = array(value.as_object(), path, "processors", kMaxSteps);
    if (!list.ok()) return list.status();
    if (*list == nullptr) return refused(path + ".processors", nullptr, "an array is read");
    for (size_t i = 0; i < (*list)->size(); ++i) {
      absl::Status status = post_processor((**list)[i], fmt::format("{}.processors[{}]", path, i));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  if (*type == "TemplateProcessing") return template_processing(value.as_object(), path);
  return refused(path, &value, "null, ByteLevel, TemplateProcessing and Sequence are read");
}

absl::Status SpecReader::template_processing(const json::object& object, const std::string& path) {
  if (!spec_.prefix.empty() || !spec_.suffix.empty()) {
    return absl::InvalidArgumentError(fmt::format("{}: a second TemplateProcessing; one is read", path));
  }
  absl::StatusOr<const json::array*> single = array(object, path, "single", kMaxTemplateIds);
  if (!single.ok()) return single.status();
  if (*single == nullptr) return refused(path + ".single", nullptr, "an array is read");
  const json::value* tokens = member(object, "special_tokens");
  bool seen_text = false;
  for (size_t i = 0; i < (*single)->size(); ++i) {
    const json::value& piece = (**single)[i];
    const std::string where = fmt::format("{}.single[{}]", path, i);
    const json::object* o = piece.if_object();
    const json::value* sequence = o == nullptr ? nullptr : member(*o, "Sequence");
    const json::value* special = o == nullptr ? nullptr : member(*o, "SpecialToken");
    if (sequence != nullptr && sequence->is_object()) {
      const json::value* id = member(sequence->as_object(), "id");
      if (seen_text || id == nullptr || !id->is_string() || view(id->as_string()) != "A") {
        return refused(where + ".Sequence.id", id, "'A', once, is read");
      }
      seen_text = true;
      continue;
    }
    const json::value* name = special != nullptr && special->is_object() ? member(special->as_object(), "id") : nullptr;
    if (name == nullptr || !name->is_string()) return refused(where, &piece, "Sequence or SpecialToken is read");
    const json::value* entry = tokens != nullptr && tokens->is_object()
                                   ? tokens->as_object().if_contains(json::string_view(name->as_string()))
                                   : nullptr;
    const std::string ids_path = fmt::format("{}.special_tokens['{}']", path, view(name->as_string()).substr(0, 60));
    if (entry == nullptr || !entry->is_object()) return refused(ids_path, entry, "an object is read");
    absl::StatusOr<const json::array*> ids = array(entry->as_object(), ids_path, "ids", kMaxTemplateIds);
    if (!ids.ok()) return ids.status();
    if (*ids == nullptr) return refused(ids_path + ".ids", nullptr, "an array is read");
    for (const json::value& value : **ids) {
      absl::StatusOr<int32_t> id = token_id(&value, ids_path + ".ids");
      if (!id.ok()) return id.status();
      (seen_text ? spec_.suffix : spec_.prefix).push_back(*id);
    }
  }
  if (!seen_text) return absl::InvalidArgumentError(fmt::format("{}.single: the text (Sequence A) is missing", path));
  return absl::OkStatus();
}

absl::Status SpecReader::decoder(const json::value& value, const std::string& path) {
  absl::StatusOr<std::string_view> type = type_of(value, path);
  if (!type.ok()) return type.status();
  if (*type == "ByteLevel") return absl::OkStatus();
  if (*type == "Sequence") {
    absl::StatusOr<const json::array*> list = array(value.as_object(), path, "decoders", kMaxSteps);
    if (!list.ok()) return list.status();
    if (*list != nullptr && (*list)->size() == 1) return decoder((**list)[0], path + ".decoders[0]");
  }
  return refused(path, &value, "ByteLevel is read");
}

}  // namespace

absl::StatusOr<TokenizerSpec> parse_tokenizer_json(std::string_view text) {
  if (text.size() > kMaxTokenizerBytes) {
    return absl::InvalidArgumentError(
        fmt::format("{} bytes of JSON; at most {} are read", text.size(), kMaxTokenizerBytes));
  }
  try {
    BoundedResource bounded(kMaxParsedBytes);
    json::monotonic_resource arena(size_t{1} << 20, json::storage_ptr{&bounded});
    json::parse_options options;
    options.max_depth = kMaxDepth;
    boost::system::error_code error;
    const json::value root = json::parse(json::string_view(text.data(), text.size()), error, &arena, options);
    if (error) return absl::InvalidArgumentError(fmt::format("not JSON: {}", error.message()));
    return SpecReader().read(root);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        fmt::format("the JSON needs more than {} MiB when parsed", kMaxParsedBytes >> 20));
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(fmt::format("not JSON: {}", e.what()));
  }
}

}  // namespace tensorfold
