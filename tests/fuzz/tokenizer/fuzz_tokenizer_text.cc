// Any bytes encode, and decode to the same text in form C; no untrusted byte becomes a control token; the stream
// decoder agrees with decode.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/tokenizer/normalizer.h"
#include "coordinator/tokenizer/stream_decoder.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

const tensorfold::Tokenizer& sprout() {
  static const std::unique_ptr<tensorfold::Tokenizer> tokenizer = [] {
    auto loaded = tensorfold::Tokenizer::load(TENSORFOLD_SOURCE_DIR "/deploy/models/sprout/tokenizer.json");
    check(loaded.ok(), "the tokenizer loads");
    return *std::move(loaded);
  }();
  return *tokenizer;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const tensorfold::Tokenizer& tokenizer = sprout();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::string normal = tensorfold::normalize_nfc(tensorfold::sanitize_utf8(text));
  check(tensorfold::normalize_nfc(normal) == normal, "form C is stable");

  tensorfold::EncodeOptions plain;
  plain.added_tokens = tensorfold::AddedTokens::kNone;
  const auto ids = tokenizer.encode(text, plain);
  check(ids.ok(), "plain text encodes");
  check(std::all_of(ids->begin(), ids->end(), [](int32_t id) { return id < 4087; }),
        "no control token from plain text");
  check(tokenizer.decode(*ids) == normal, "plain text comes back");

  // Two cuts; the middle is the user's.
  if (size >= 2) {
    const size_t a = data[0] % size, b = a + data[1] % (size - a);
    const std::vector<tensorfold::TextSegment> segments = {
        {text.substr(0, a), true}, {text.substr(a, b - a), false}, {text.substr(b), true}};
    check(tokenizer.encode_segments(segments).ok(), "segments encode");
  }

  // Bytes as ids, two a token.
  std::vector<int32_t> any;
  for (size_t i = 0; i + 1 < size; i += 2) any.push_back((data[i] << 8 | data[i + 1]) % 4100);
  tensorfold::StreamDecoder stream(tokenizer);
  std::string streamed;
  for (const int32_t id : any) {
    const std::string piece = stream.push(id);
    check(tensorfold::is_valid_utf8(piece), "each piece is whole characters");
    streamed += piece;
  }
  check(streamed + stream.flush() == tokenizer.decode(any), "streaming equals decode");
  return 0;
}
