// One choice's events from the engine → what a client is shown: text split into content, reasoning and tool calls,
// tokens with their bytes. Both front ends use it, so that both show the same. One owner, not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/api/chat_reply.h"
#include "coordinator/api/generation.h"
#include "coordinator/chat/reply_parser.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace tensorfold {

struct ReplyPiece {
  std::string content;
  std::string reasoning;
  std::vector<ToolCallDelta> tool_calls;  // each whole: id, name and arguments at once
  std::vector<GeneratedToken> tokens;     // of this piece
  bool shows_something() const { return !content.empty() || !reasoning.empty() || !tool_calls.empty(); }
};

class ChoiceReader {
 public:
  /// `parser`: none for a plain completion, whose text is all content. `call_prefix` begins the ids of tool calls and
  /// is unlike that of any other choice.
  ChoiceReader(const std::optional<ReplyParser::Options>& parser, std::string call_prefix);

  ReplyPiece take(TokenEvent event);
  /// The reply's end. reason() is valid afterwards: a reply that ended by itself after tool calls says so.
  ReplyPiece take(FinishEvent& event);
  FinishReason reason() const { return reason_; }

 private:
  void add(std::vector<ReplyEvent> events, ReplyPiece* piece);

  std::optional<ReplyParser> parser_;
  std::string call_prefix_;
  uint32_t calls_ = 0;
  FinishReason reason_ = FinishReason::kStop;
};

/// The log-probabilities of `tokens`, with bytes for ids. Tokens without any are left out.
std::vector<TokenLogprob> token_logprobs(const Tokenizer& tokenizer, const std::vector<GeneratedToken>& tokens);
/// What a token shows: its bytes, or for a control token its name.
std::string shown_bytes(const Tokenizer& tokenizer, uint32_t id);

}  // namespace tensorfold
