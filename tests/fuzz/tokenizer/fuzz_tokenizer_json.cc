// A hostile tokenizer.json gives an error or a tokenizer that works, and classes of its tokens or an error; never a
// crash, and never endless work.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/tokenizer/pattern_translator.h"
#include "coordinator/tokenizer/split_regex.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "coordinator/tokenizer/utf8.h"
#include "worker/vocabulary/compressed_vocabulary.h"

namespace {

// A full byte vocabulary around the fuzzer's pre-tokenizer, normalizer and added tokens, so that it gets past the
// loader.
std::string wrap(std::string_view parts) {
  std::string json = "{\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"merges\":[\"a b\"],\"vocab\":{\"ab\":256";
  char32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    json += ",\"";
    if (b == '"' || b == '\\') json += '\\';
    tensorfold::append_utf8(printable ? static_cast<char32_t>(b) : next++, json);
    json += "\":" + std::to_string(b);
  }
  json += "}},";
  json += parts;
  json += '}';
  return json;
}

void use(std::string_view json) {
  const auto classes = tensorfold::compress_vocabulary(json, "fuzz");
  if (classes.ok() && static_cast<size_t>(classes->classes) > classes->class_of.size()) std::abort();
  const auto tokenizer = tensorfold::Tokenizer::parse(json);
  if (!tokenizer.ok()) return;
  const auto ids = (*tokenizer)->encode("Hello, ab e\xCC\x81 12345 \xE4\xB8\xAD  \n<|x|> aaaaaaaaaaaaaaaaaaaa");
  if (ids.ok()) (void)(*tokenizer)->decode(*ids);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      use(text);
      break;
    case 1:
      use(wrap(text));
      break;
    default: {
      const auto pattern = tensorfold::translate_pattern(text);
      if (!pattern.ok()) break;
      const auto regex = tensorfold::SplitRegex::compile(*pattern, "fuzz");
      if (!regex.ok()) break;
      tensorfold::RegexScratch scratch(0);
      std::vector<tensorfold::RegexPiece> pieces;
      const std::string subject = tensorfold::sanitize_utf8(text);
      if (!(*regex)->split(subject, scratch, pieces).ok()) break;
      size_t at = 0;
      for (const auto& piece : pieces) {
        if (piece.begin != at || piece.end < piece.begin) std::abort();
        at = piece.end;
      }
      if (at != subject.size()) std::abort();
    }
  }
  return 0;
}
