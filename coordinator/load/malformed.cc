#include "coordinator/load/malformed.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "coordinator/load/conversation.h"
#include "coordinator/load/random.h"

namespace tensorfold {
namespace {

constexpr uint64_t kStream = 0xBAD;
constexpr const char* kChatPath = "/v1/chat/completions";
constexpr int64_t kMostBytes = int64_t{12} << 20;  // of an over-long prompt: below the size where bodies are refused

std::string repeated(int64_t tokens, double tokens_per_word) {
  constexpr std::string_view kWord = "word ";
  const double words = static_cast<double>(tokens) / std::min(tokens_per_word, 1.0);
  const int64_t count = std::min<int64_t>(std::llround(words), kMostBytes / static_cast<int64_t>(kWord.size()));
  std::string out;
  out.reserve(static_cast<size_t>(count) * kWord.size());
  for (int64_t i = 0; i < count; ++i) out += kWord;
  return out;
}

std::string chat(std::string_view content, std::string_view more) {
  return fmt::format(R"({{"messages":[{{"role":"user","content":"{}"}}],"stream":true{}}})", content, more);
}

std::string body_of(MalformedKind kind, const ConversationOptions& options, LoadRandom& random) {
  switch (kind) {
    case MalformedKind::kBrokenJson: {
      const std::string whole = chat(load_text(random, 8), "");
      return whole.substr(0, 1 + random.below(whole.size() - 1));
    }
    case MalformedKind::kWrongType:
      return chat(load_text(random, 8), R"(,"max_tokens":"many")");
    case MalformedKind::kUnknownField:
      return chat(load_text(random, 8), R"(,"no_such_field":1)");
    case MalformedKind::kUnknownModel:
      return chat(load_text(random, 8), R"(,"model":"no-such-model")");
    case MalformedKind::kOverlongPrompt:
      return chat(repeated(options.overlong_tokens, options.tokens_per_word), "");
    default:
      return chat(load_text(random, 8), "");
  }
}

}  // namespace

std::string_view malformed_kind_name(MalformedKind kind) {
  constexpr std::array<std::string_view, kMalformedKinds> kNames = {
      "broken JSON",      "wrong type",   "unknown field", "unknown model",
      "over-long prompt", "unknown path", "not HTTP",      "cut body"};
  return kNames[static_cast<size_t>(kind)];
}

std::string post_head(const LoadOptions& options, std::string_view path, size_t length) {
  std::string out = fmt::format(
      "POST {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: tensorfold-bench\r\nContent-Type: application/json\r\nAccept: "
      "text/event-stream\r\n",
      path, options.url.authority());
  if (!options.api_key.empty()) out += fmt::format("Authorization: Bearer {}\r\n", options.api_key);
  return out + fmt::format("Content-Length: {}\r\n\r\n", length);
}

MalformedRequest malformed_request(const LoadOptions& options, uint64_t index) {
  LoadRandom random(options.conversation.seed ^ kStream, index + 1);
  MalformedRequest out;
  out.kind = static_cast<MalformedKind>(random.below(kMalformedKinds));
  std::string body = body_of(out.kind, options.conversation, random);
  const char* const path = out.kind == MalformedKind::kUnknownPath ? "/v1/no/such/path" : kChatPath;
  if (out.kind == MalformedKind::kNotHttp) {
    out.bytes = fmt::format("\x16\x03\x01 {} {}\r\n\r\n", random.next(), load_text(random, 4));
    out.may_be_silent = true;
  } else if (out.kind == MalformedKind::kCutBody) {
    out.bytes = post_head(options, path, body.size() * 2) + body;
    out.ends_after = true;
    out.may_be_silent = true;
  } else {
    out.bytes = post_head(options, path, body.size()) + body;
  }
  return out;
}

}  // namespace tensorfold
