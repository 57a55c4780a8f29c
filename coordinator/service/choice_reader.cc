#include "coordinator/service/choice_reader.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

namespace tensorfold {

ChoiceReader::ChoiceReader(const std::optional<ReplyParser::Options>& parser, std::string call_prefix)
    : call_prefix_(std::move(call_prefix)) {
  if (parser) parser_.emplace(*parser);
}

void ChoiceReader::add(std::vector<ReplyEvent> events, ReplyPiece* piece) {
  for (ReplyEvent& event : events) {
    switch (event.kind) {
      case ReplyEvent::Kind::kContent:
        piece->content += event.text;
        break;
      case ReplyEvent::Kind::kReasoning:
        piece->reasoning += event.text;
        break;
      case ReplyEvent::Kind::kToolCall:
        piece->tool_calls.push_back({.index = calls_,
                                     .id = fmt::format("call_{}_{}", call_prefix_, calls_),
                                     .name = std::move(event.call.name),
                                     .arguments = std::move(event.call.arguments)});
        ++calls_;
        break;
    }
  }
}

ReplyPiece ChoiceReader::take(TokenEvent event) {
  ReplyPiece piece;
  if (parser_) {
    add(parser_->feed(event.text), &piece);
  } else {
    piece.content = std::move(event.text);
  }
  piece.tokens = std::move(event.tokens);
  return piece;
}

ReplyPiece ChoiceReader::take(FinishEvent& event) {
  ReplyPiece piece;
  if (parser_) {
    add(parser_->feed(event.text), &piece);
    add(parser_->finish(), &piece);
  } else {
    piece.content = std::move(event.text);
  }
  reason_ = event.reason == FinishReason::kStop && calls_ > 0 ? FinishReason::kToolCalls : event.reason;
  return piece;
}

std::string shown_bytes(const Tokenizer& tokenizer, uint32_t id) {
  const auto token = static_cast<int32_t>(id);
  const std::string_view bytes = tokenizer.token_bytes(token);
  if (!bytes.empty()) return std::string(bytes);
  return tokenizer.id_to_token(token).value_or("");
}

std::vector<TokenLogprob> token_logprobs(const Tokenizer& tokenizer, const std::vector<GeneratedToken>& tokens) {
  std::vector<TokenLogprob> out;
  for (const GeneratedToken& token : tokens) {
    if (!token.logprobs) continue;
    TokenLogprob entry{.bytes = shown_bytes(tokenizer, token.id), .logprob = token.logprobs->chosen.logprob, .top = {}};
    for (const IdLogprob& other : token.logprobs->top) {
      entry.top.emplace_back(shown_bytes(tokenizer, other.id), other.logprob);
    }
    out.push_back(std::move(entry));
  }
  return out;
}

}  // namespace tensorfold
