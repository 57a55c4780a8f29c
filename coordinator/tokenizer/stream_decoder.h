// Token ids, one by one → text that can be shown at once.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/tokenizer/tokenizer.h"

namespace tensorfold {

// All pushes and the flush together equal decode(all ids): a character that tokens share is held back until it is
// whole, and malformed bytes become U+FFFD where decode would put it. One reply, one thread; the tokenizer must outlive
// it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  // The text that `id` completes; may be empty.
  std::string push(int32_t id);

  // What was held back, at the end of the reply: empty, or U+FFFD for a character that was never finished.
  std::string flush();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string held_;  // at most 3 bytes between calls
};

}  // namespace tensorfold
