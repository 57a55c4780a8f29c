// Text ↔ token ids, equal to the Hugging Face `tokenizers` library for byte-level BPE.
//
// Format: tokenizer.json 1.0 (see README.md for what is read). Text is UTF-8; malformed bytes count as U+FFFD, as
// Python's bytes.decode('utf-8', 'replace') makes them. Ids are int32, from 0 to vocab_size() - 1.
//
// Control tokens and text from outside: a chat prompt is part template, part user text, and user text must never become
// a control token. Pass the prompt as segments and mark as trusted only what the template wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/tokenizer/token_types.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {

inline constexpr size_t kMaxEncodeBytes = size_t{64} << 20;

struct EncodeOptions {
  // Added tokens that the text (of encode_segments: its trusted segments) may turn into.
  AddedTokens added_tokens = AddedTokens::kAll;
  // Put the post-processor's tokens (such as <|begin_of_text|>) around the text. Chat templates write their own.
  bool add_special_tokens = false;
  // Longer texts are an error (ResourceExhausted). At most kMaxEncodeBytes.
  size_t max_bytes = kMaxEncodeBytes;
};

struct TextSegment {
  std::string_view text;
  bool trusted = false;  // false: AddedTokens::kNone, whatever the options say
};

// Immutable after load: any number of threads may call every const member at once, and a long text may be encoded on a
// thread of its own. Encoding takes about 0.1 s a megabyte of prose and holds no lock.
class Tokenizer {
 public:
  // InvalidArgument names the file, the JSON path and what was found there; NotFound if there is no such file.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> load(const std::string& path);
  static absl::StatusOr<std::unique_ptr<Tokenizer>> parse(std::string_view json);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // ResourceExhausted: the text is longer than allowed, or makes the pre-tokenizer's regex backtrack without end.
  absl::StatusOr<std::vector<int32_t>> encode(std::string_view utf8, const EncodeOptions& options = {}) const;

  // The ids of the segments' concatenation, but no added token comes from a byte of an untrusted segment. Where no
  // added token stands between two segments they are one text: words, merges and normalization run across.
  absl::StatusOr<std::vector<int32_t>> encode_segments(std::span<const TextSegment> segments,
                                                       const EncodeOptions& options = {}) const;

  // The text of `ids`; malformed UTF-8 becomes U+FFFD, unknown ids are left out (as the library does). See
  // StreamDecoder for decoding token by token.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // One more than the greatest id. The model's logits may have more rows (padding).
  int32_t vocab_size() const;

  // A token as the file writes it ("Ġthe"); nothing for an id without a token.
  std::optional<std::string> id_to_token(int32_t id) const;
  std::optional<int32_t> token_to_id(std::string_view token) const;

  // The bytes that a token stands for (" the"), not always whole characters; empty for an id without a token. Valid as
  // long as the tokenizer.
  std::string_view token_bytes(int32_t id) const;

  // Whether decode(skip_special) leaves the token out.
  bool is_special(int32_t id) const;

  // In the order of the file.
  const std::vector<AddedToken>& added_tokens() const;

  // How many byte values have no token, so that text loses them (rare control bytes in some vocabularies); 0 normally.
  int missing_bytes() const;

  // What add_special_tokens puts before and after a text.
  std::span<const int32_t> prefix_ids() const;
  std::span<const int32_t> suffix_ids() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorfold
