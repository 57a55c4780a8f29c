// Reads a Hugging Face tokenizer.json.
//
// Bounds, checked before memory is spent: 64 MiB of JSON, 32 levels, 1 GiB of parsed values, 2 Mi vocabulary entries,
// 4 Mi merges, ids below 4 Mi, 64 Ki added tokens of 1 KiB. Errors name the JSON path and what was found there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/tokenizer/bpe.h"
#include "coordinator/tokenizer/pre_tokenizer.h"
#include "coordinator/tokenizer/token_types.h"

namespace tensorfold {

inline constexpr size_t kMaxTokenizerBytes = size_t{64} << 20;

struct TokenizerSpec {
  std::vector<VocabularyEntry> vocabulary;
  std::vector<std::pair<std::string, std::string>> merges;
  bool ignore_merges = false;
  std::vector<AddedToken> added_tokens;  // each id and each content once
  bool nfc = false;
  std::vector<PreTokenizerStep> pre_tokenizer;
  std::vector<int32_t> prefix, suffix;  // what add_special_tokens puts around a text
};

absl::StatusOr<TokenizerSpec> parse_tokenizer_json(std::string_view json);

}  // namespace tensorfold
