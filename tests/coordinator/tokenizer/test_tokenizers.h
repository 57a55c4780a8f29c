// Tokenizers for the unit tests.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/tokenizer/tokenizer.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {

inline std::string data_path(std::string_view name) {
  return fmt::format("{}/tests/coordinator/tokenizer/data/{}.json", TENSORFOLD_SOURCE_DIR, name);
}

inline std::string sprout_path() { return std::string(TENSORFOLD_SOURCE_DIR) + "/deploy/models/sprout/tokenizer.json"; }

// GPT-2's alphabet as vocabulary entries 0..255, in byte order: "!" is not 0 here but byte 0x21's place.
inline std::string alphabet_vocabulary() {
  std::string out;
  char32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    std::string character;
    append_utf8(printable ? static_cast<char32_t>(b) : next++, character);
    const bool escape = b == '"' || b == '\\';
    out += fmt::format("{}\"{}{}\":{}", b == 0 ? "" : ",", escape ? "\\" : "", character, b);
  }
  return out;
}

// The parts of a small tokenizer.json; a test replaces what it is about.
struct TokenizerParts {
  std::string extra_vocabulary;  // such as ,"ab":256
  std::string merges;            // such as "a b"
  std::string model_options;     // such as ,"ignore_merges":true
  std::string added_tokens;
  std::string normalizer = "null";
  std::string pre_tokenizer = R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})";
  std::string post_processor = "null";
  std::string decoder = R"({"type":"ByteLevel"})";

  std::string json() const {
    return fmt::format(
        R"({{"version":"1.0","added_tokens":[{}],"normalizer":{},"pre_tokenizer":{},"post_processor":{},"decoder":{},)"
        R"("model":{{"type":"BPE"{},"vocab":{{{}{}}},"merges":[{}]}}}})",
        added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model_options, alphabet_vocabulary(),
        extra_vocabulary, merges);
  }
};

inline std::string added_token(int id, std::string_view content, std::string_view flags = "") {
  const auto flag = [&](std::string_view name) { return flags.find(name) != std::string_view::npos; };
  return fmt::format(
      R"({{"id":{},"content":"{}","single_word":{},"lstrip":{},"rstrip":{},"normalized":{},"special":{}}})", id,
      content, flag("single_word"), flag("lstrip"), flag("rstrip"), flag("normalized"), flag("special"));
}

using Ids = std::vector<int32_t>;

}  // namespace tensorfold
