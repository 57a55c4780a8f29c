#include "coordinator/tokenizer/added_tokens.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/tokenizer/pattern_translator.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {
namespace {

// Unicode White_Space.
bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// The start of the character that ends at `end` (> 0).
size_t previous_character(std::string_view text, size_t end) {
  --end;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return end;
}

}  // namespace

absl::Status AddedTokenMatcher::add(const AddedToken& token, std::string_view pattern) {
  if (token.single_word && word_ == nullptr) {
    absl::StatusOr<std::unique_ptr<SplitRegex>> word = SplitRegex::compile(word_pattern(), "\\w");
    if (!word.ok()) return word.status();
    word_ = *std::move(word);
  }
  uint32_t node = 0;
  for (const char c : pattern) {
    const uint64_t key = static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(c);
    const auto [it, added] = edges_.try_emplace(key, static_cast<uint32_t>(ends_.size()));
    if (added) ends_.push_back(kNone);
    node = it->second;
  }
  if (ends_[node] != kNone) {
    return absl::InvalidArgumentError(
        fmt::format("the added tokens {} ('{}') and {} ('{}') are looked for as the same text",
                    tokens_[ends_[node]].token.id, tokens_[ends_[node]].token.content, token.id, token.content));
  }
  ends_[node] = static_cast<uint32_t>(tokens_.size());
  first_byte_[static_cast<unsigned char>(pattern.front())] = true;
  tokens_.push_back({token, pattern.size()});
  return absl::OkStatus();
}

uint32_t AddedTokenMatcher::longest(std::string_view text, size_t at, size_t limit) const {
  uint32_t best = kNone;
  uint32_t node = 0;
  for (; at < limit; ++at) {
    const auto it = edges_.find(static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(text[at]));
    if (it == edges_.end()) break;
    node = it->second;
    if (ends_[node] != kNone) best = ends_[node];
  }
  return best;
}

absl::Status AddedTokenMatcher::stands_alone(std::string_view text, size_t begin, size_t end, RegexScratch& scratch,
                                             bool& alone) const {
  alone = true;
  std::vector<RegexPiece> pieces;
  const auto check = [&](std::string_view character) {
    pieces.clear();
    absl::Status status = word_->split(character, scratch, pieces);
    if (status.ok() && pieces.front().is_match) alone = false;
    return status;
  };
  if (begin > 0) {
    const size_t before = previous_character(text, begin);
    if (absl::Status status = check(text.substr(before, begin - before)); !status.ok()) return status;
  }
  if (end < text.size()) return check(text.substr(end, utf8_step(text.substr(end)).length));
  return absl::OkStatus();
}

absl::Status AddedTokenMatcher::find(std::string_view text, const UntrustedRanges& untrusted, AddedTokens mode,
                                     RegexScratch& scratch, std::vector<TextSpan>& out) const {
  size_t covered = 0;
  size_t trusted_end = 0;  // a match at or after `at` may reach up to here
  for (size_t at = 0; mode != AddedTokens::kNone && !tokens_.empty() && at < text.size();) {
    if (!first_byte_[static_cast<unsigned char>(text[at])]) {
      ++at;
      continue;
    }
    if (at >= trusted_end) trusted_end = untrusted.trusted_end(at, text.size());
    const uint32_t found = longest(text, at, trusted_end);
    if (found == kNone) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[found].token;
    size_t begin = at;
    size_t end = at + tokens_[found].pattern_size;
    at = end;
    if (mode == AddedTokens::kNonSpecial && token.special) continue;
    if (token.single_word) {
      bool alone = false;
      if (absl::Status status = stands_alone(text, begin, end, scratch, alone); !status.ok()) return status;
      if (!alone) continue;
    }
    if (token.lstrip) {
      const size_t floor = std::max(covered, untrusted.trusted_begin(begin));
      while (begin > floor) {
        const size_t before = previous_character(text, begin);
        if (before < floor || !is_space(utf8_step(text.substr(before)).code_point)) break;
        begin = before;
      }
      begin = std::max(begin, covered);
    }
    if (token.rstrip) {
      while (end < trusted_end) {
        const Utf8Step step = utf8_step(text.substr(end));
        if (!is_space(step.code_point)) break;
        end += step.length;
      }
    }
    if (covered < begin) out.push_back({covered, begin, -1});
    out.push_back({begin, end, token.id});
    covered = end;
  }
  if (covered < text.size()) out.push_back({covered, text.size(), -1});
  return absl::OkStatus();
}

}  // namespace tensorfold
