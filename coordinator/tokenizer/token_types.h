// What a tokenizer says about its added tokens.
#pragma once

#include <cstdint>
#include <string>

namespace tensorfold {

// Which added tokens a text may turn into, by a match or by merging.
enum class AddedTokens {
  kAll,         // all of them: text written by the chat template
  kNonSpecial,  // those without the flag `special` (the library's encode_special_tokens=True)
  kNone,        // none: every byte is ordinary text
};

// A token outside the merges: control tokens, and words someone added.
struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
  bool normalized = false;   // looked for in the normalized text, in its normalized form
  bool special = false;      // decode leaves it out on request
};

}  // namespace tensorfold
