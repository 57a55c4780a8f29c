// Classes of tokens whose texts read alike: " The", "the" and "THÉ" are one. deepseek_v41 hashes n-grams of classes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

struct CompressedVocabulary {
  std::vector<int32_t> class_of;  // by token id
  int32_t classes = 0;            // numbered in the order of their first tokens
};

/// Largest tokenizer.json that is read.
inline constexpr uint64_t kMaxVocabularyBytes = 64u << 20;

/// From the text of a Hugging Face tokenizer.json of byte-level BPE: each token's own text, folded (folding.h), runs of
/// blanks, tabs and line ends made one blank, white space at both ends taken off unless that is all; a token whose
/// bytes are no whole characters is a class of its own by the name that the file gives it. InvalidArgument names the
/// key and what was found there, or an id without a token.
absl::StatusOr<CompressedVocabulary> compress_vocabulary(std::string_view tokenizer_json, const std::string& label);

/// The same of `dir`/tokenizer.json.
absl::StatusOr<CompressedVocabulary> read_compressed_vocabulary(const std::string& dir);

}  // namespace tensorfold
