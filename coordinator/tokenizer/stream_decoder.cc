#include "coordinator/tokenizer/stream_decoder.h"

#include <string_view>
#include <utility>

#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return "";
  held_ += tokenizer_->token_bytes(id);
  std::string out;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Step step = utf8_step(rest);
    if (step.incomplete) break;
    append_utf8(step.code_point, out);
    rest.remove_prefix(step.length);
  }
  held_ = std::string(rest);
  return out;
}

std::string StreamDecoder::flush() { return sanitize_utf8(std::exchange(held_, "")); }

}  // namespace tensorfold
