// Builds one reply out of the engine's events: four kinds, chat or completion, streamed or whole, behind one interface.
// One owner, not thread-safe; no sockets.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/api/generation.h"
#include "coordinator/api/reply_parts.h"
#include "coordinator/service/choice_reader.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace tensorfold {

class ReplyBuilder {
 public:
  virtual ~ReplyBuilder() = default;

  /// What a stream begins with; empty for a whole reply.
  virtual std::string begin() = 0;
  /// The next event of engine request `part`. Returns what a stream sends now.
  virtual std::string take(uint32_t part, GenerationEvent event) = 0;
  /// Once done() without an error: the end of a stream, or the whole body.
  virtual std::string finish() = 0;

  /// After an error: how the stream says so, before its last event.
  virtual std::string cut() = 0;

  /// Every choice has finished, or one has failed.
  bool done() const { return error_.has_value() || finished_ == choices_; }
  const std::optional<ApiError>& error() const { return error_; }
  uint64_t reply_tokens() const { return reply_tokens_; }

 protected:
  explicit ReplyBuilder(size_t choices) : choices_(choices) {}

  size_t choices_;
  size_t finished_ = 0;
  uint64_t reply_tokens_ = 0;
  std::optional<ApiError> error_;
};

/// `parser`: how the model marks up its replies. `choices`: n.
std::unique_ptr<ReplyBuilder> make_chat_builder(const Tokenizer& tokenizer, ReplyHead head,
                                                const ReplyParser::Options& parser, uint32_t choices, bool logprobs,
                                                bool stream);
/// Choice p * n + i is choice i of prompt p, which is engine request p.
std::unique_ptr<ReplyBuilder> make_completion_builder(const Tokenizer& tokenizer, ReplyHead head, uint32_t prompts,
                                                      uint32_t choices, bool logprobs, bool stream);

}  // namespace tensorfold
