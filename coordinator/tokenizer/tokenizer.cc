#include "coordinator/tokenizer/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "coordinator/tokenizer/added_tokens.h"
#include "coordinator/tokenizer/bpe.h"
#include "coordinator/tokenizer/normalizer.h"
#include "coordinator/tokenizer/pre_tokenizer.h"
#include "coordinator/tokenizer/tokenizer_json.h"
#include "coordinator/tokenizer/untrusted_ranges.h"

namespace tensorfold {
namespace {

// Words up to this length are remembered within one encode call.
constexpr size_t kCachedWordBytes = 64;

absl::string_view absl_view(std::string_view s) { return {s.data(), s.size()}; }

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(BytePairEncoder encoder, std::vector<PreTokenizerStep> steps)
      : bpe(std::move(encoder)), pre_tokenizer(std::move(steps)) {}

  struct Entry {
    std::string text;   // as the file writes it
    std::string bytes;  // what it decodes to
    bool exists = false, special = false;
  };

  absl::Status add(const AddedToken& token);
  void set_entry(int32_t id, const std::string& text, const std::string& decoded, bool special);

  BytePairEncoder bpe;
  PreTokenizer pre_tokenizer;
  bool nfc = false;
  AddedTokenMatcher raw_matcher, normalized_matcher;
  std::vector<AddedToken> added_tokens;
  std::vector<Entry> entries;  // by id
  absl::flat_hash_map<std::string, int32_t> ids;
  std::vector<int32_t> prefix, suffix;
};

namespace {

// The words of one encode call so far: where their ids stand in the output.
using WordCache = absl::flat_hash_map<absl::string_view, std::pair<size_t, size_t>>;

}  // namespace

// `decoded` differs from `text` for an added token that is looked for in its normalized form.
void Tokenizer::Impl::set_entry(int32_t id, const std::string& text, const std::string& decoded, bool special) {
  const auto at = static_cast<size_t>(id);
  if (entries.size() <= at) entries.resize(at + 1);
  Entry& entry = entries[at];
  entry.text = text;
  entry.exists = true;
  entry.special = special;
  // The library's decoder: a token with a character outside the byte alphabet stands for itself.
  if (!alphabet_to_bytes(decoded, entry.bytes)) entry.bytes = decoded;
  ids[text] = id;
}

absl::Status Tokenizer::Impl::add(const AddedToken& token) {
  const std::string pattern = token.normalized && nfc ? normalize_nfc(token.content) : token.content;
  set_entry(token.id, token.content, pattern, token.special);
  bpe.add_token(token);
  added_tokens.push_back(token);
  return (token.normalized ? normalized_matcher : raw_matcher).add(token, pattern);
}

namespace {

// One encode call: its scratch memory and its output.
struct EncodeCall {
  explicit EncodeCall(size_t text_bytes) : scratch(text_bytes) {}

  RegexScratch scratch;
  std::deque<PreTokenizedText> texts;  // the caches point into these
  WordCache trusted_words, untrusted_words;
  std::vector<int32_t> ids;

  void encode_words(const BytePairEncoder& bpe, const PreTokenizedText& text, AddedTokens mode) {
    for (const auto& [begin, end] : text.pieces) {
      const std::string_view word = std::string_view(text.text).substr(begin, end - begin);
      const bool untrusted = text.untrusted.overlaps(begin, end);
      const AddedTokens reachable = untrusted ? AddedTokens::kNone : mode;
      if (word.size() > kCachedWordBytes) {
        bpe.encode(word, reachable, ids);
        continue;
      }
      WordCache& cache = untrusted ? untrusted_words : trusted_words;
      const auto [it, added] = cache.try_emplace(absl_view(word), ids.size(), 0);
      if (added) {
        bpe.encode(word, reachable, ids);
        it->second.second = ids.size() - it->second.first;
        continue;
      }
      const auto [start, count] = it->second;
      for (size_t i = 0; i < count; ++i) ids.push_back(ids[start + i]);
    }
  }
};

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(fmt::format("cannot open the tokenizer file '{}'", path));
  std::string text;
  char buffer[65536];
  while (file.read(buffer, sizeof buffer), file.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(file.gcount()));
    if (text.size() > kMaxTokenizerBytes) {
      return absl::InvalidArgumentError(
          fmt::format("the tokenizer file '{}' has more than {} bytes", path, kMaxTokenizerBytes));
    }
  }
  if (file.bad()) return absl::DataLossError(fmt::format("cannot read the tokenizer file '{}'", path));
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = parse(text);
  if (!tokenizer.ok()) {
    return absl::Status(tokenizer.status().code(),
                        fmt::format("the tokenizer file '{}': {}", path, std::string(tokenizer.status().message())));
  }
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::parse(std::string_view json) {
  absl::StatusOr<TokenizerSpec> spec = parse_tokenizer_json(json);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<BytePairEncoder> bpe = BytePairEncoder::create(spec->vocabulary, spec->merges, spec->ignore_merges);
  if (!bpe.ok()) return bpe.status();
  auto impl = std::make_unique<Impl>(*std::move(bpe), std::move(spec->pre_tokenizer));
  impl->nfc = spec->nfc;
  for (const VocabularyEntry& entry : spec->vocabulary) impl->set_entry(entry.id, entry.text, entry.text, false);
  for (const AddedToken& token : spec->added_tokens) {
    if (absl::Status status = impl->add(token); !status.ok()) return status;
  }
  impl->prefix = std::move(spec->prefix);
  impl->suffix = std::move(spec->suffix);
  for (const std::vector<int32_t>* ids : {&impl->prefix, &impl->suffix}) {
    for (const int32_t id : *ids) {
      if (static_cast<size_t>(id) >= impl->entries.size() || !impl->entries[static_cast<size_t>(id)].exists) {
        return absl::InvalidArgumentError(fmt::format("post_processor: token {} is not in the vocabulary", id));
      }
    }
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::encode(std::string_view utf8, const EncodeOptions& options) const {
  // Text that may hold no added token is what encode_segments calls untrusted.
  const TextSegment segment{utf8, options.added_tokens != AddedTokens::kNone};
  return encode_segments({&segment, 1}, options);
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::encode_segments(std::span<const TextSegment> segments,
                                                                const EncodeOptions& options) const {
  const size_t limit = std::min(options.max_bytes, kMaxEncodeBytes);
  size_t total = 0;
  for (const TextSegment& segment : segments) {
    if (segment.text.size() > limit - total) {
      return absl::ResourceExhaustedError(
          fmt::format("the text has more than {} bytes, the limit for one text", limit));
    }
    total += segment.text.size();
  }
  std::string text;
  text.reserve(total);
  UntrustedRanges untrusted;
  for (const TextSegment& segment : segments) {
    const size_t begin = text.size();
    if (is_valid_utf8(segment.text)) {
      text += segment.text;
    } else {
      text += sanitize_utf8(segment.text);
    }
    if (!segment.trusted) untrusted.append(begin, text.size());
  }

  EncodeCall call(text.size());
  if (options.add_special_tokens) call.ids = impl_->prefix;
  std::vector<TextSpan> raw_spans, spans;
  absl::Status status = impl_->raw_matcher.find(text, untrusted, options.added_tokens, call.scratch, raw_spans);
  if (!status.ok()) return status;
  for (const TextSpan& raw : raw_spans) {
    if (raw.id >= 0) {
      call.ids.push_back(raw.id);
      continue;
    }
    std::string part = text.substr(raw.begin, raw.end - raw.begin);
    UntrustedRanges part_untrusted = untrusted.slice(raw.begin, raw.end);
    if (impl_->nfc && !is_quickly_nfc(part)) part = normalize_nfc(part, part_untrusted);
    spans.clear();
    status = impl_->normalized_matcher.find(part, part_untrusted, options.added_tokens, call.scratch, spans);
    if (!status.ok()) return status;
    for (const TextSpan& span : spans) {
      if (span.id >= 0) {
        call.ids.push_back(span.id);
        continue;
      }
      PreTokenizedText& piece = call.texts.emplace_back();
      piece.text = part.substr(span.begin, span.end - span.begin);
      piece.untrusted = part_untrusted.slice(span.begin, span.end);
      status = impl_->pre_tokenizer.run(piece, call.scratch);
      if (!status.ok()) return status;
      call.encode_words(impl_->bpe, piece, options.added_tokens);
    }
  }
  if (options.add_special_tokens) call.ids.insert(call.ids.end(), impl_->suffix.begin(), impl_->suffix.end());
  return std::move(call.ids);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (skip_special && is_special(id)) continue;
    bytes += token_bytes(id);
  }
  return sanitize_utf8(bytes);
}

int Tokenizer::missing_bytes() const { return impl_->bpe.missing_bytes(); }

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->entries.size()); }

std::optional<std::string> Tokenizer::id_to_token(int32_t id) const {
  if (id < 0 || id >= vocab_size() || !impl_->entries[static_cast<size_t>(id)].exists) return std::nullopt;
  return impl_->entries[static_cast<size_t>(id)].text;
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  const auto it = impl_->ids.find(absl_view(token));
  if (it == impl_->ids.end()) return std::nullopt;
  return it->second;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return impl_->entries[static_cast<size_t>(id)].bytes;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->entries[static_cast<size_t>(id)].special;
}

const std::vector<AddedToken>& Tokenizer::added_tokens() const { return impl_->added_tokens; }
std::span<const int32_t> Tokenizer::prefix_ids() const { return impl_->prefix; }
std::span<const int32_t> Tokenizer::suffix_ids() const { return impl_->suffix; }

}  // namespace tensorfold
