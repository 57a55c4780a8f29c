// Byte-level byte pair encoding: the bytes of one pre-token → token ids.
//
// Source: Sennrich et al. 2016, with GPT-2's alphabet, which writes each byte as a printable character; merged in the
// order of the Hugging Face library (models/bpe).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "coordinator/tokenizer/token_types.h"

namespace tensorfold {

// A vocabulary entry, in the alphabet of the file ("Ġthe").
struct VocabularyEntry {
  std::string text;
  int32_t id;
};

// The bytes that `text` stands for in GPT-2's alphabet. False if a character is not in it.
bool alphabet_to_bytes(std::string_view text, std::string& bytes);

// Immutable after create; thread-safe.
class BytePairEncoder {
 public:
  // `merges` are pairs of token texts, best first; each must merge two tokens of `vocabulary` into a third. Every
  // printable ASCII byte must have a token; other bytes without one are left out of texts (missing_bytes).
  // `whole_words` (ignore_merges): a pre-token that is itself in the vocabulary is not merged. Errors name the entry by
  // its place in the file.
  static absl::StatusOr<BytePairEncoder> create(const std::vector<VocabularyEntry>& vocabulary,
                                                const std::vector<std::pair<std::string, std::string>>& merges,
                                                bool whole_words);

  // Tells the encoder that `token` is an added token, so that merges and whole words of a text that may not turn into
  // it stay clear of its id. A token of a single byte stays reachable: that byte has no other.
  void add_token(const AddedToken& token);

  // Bytes that can occur in UTF-8 and have no token: text loses them, as it does in the library.
  int missing_bytes() const { return missing_bytes_; }

  // Appends the ids of `bytes` (UTF-8) to `out`; `reachable` says which added tokens merging may make. O(n log n).
  void encode(std::string_view bytes, AddedTokens reachable, std::vector<int32_t>& out) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t id;
  };

  const Merge* find_merge(int32_t left, int32_t right, AddedTokens reachable) const;
  bool is_reachable(int32_t id, AddedTokens reachable) const;

  int missing_bytes_ = 0;
  std::vector<int32_t> byte_ids_;                          // [256], -1: no token
  absl::flat_hash_map<uint64_t, Merge> merges_;            // left id << 32 | right id
  absl::flat_hash_map<std::string, int32_t> whole_words_;  // bytes → id; empty unless ignore_merges
  enum class Kind : uint8_t { kOrdinary, kAdded, kSpecial };
  std::vector<Kind> kinds_;  // by id; what lies past the end is ordinary
};

}  // namespace tensorfold
