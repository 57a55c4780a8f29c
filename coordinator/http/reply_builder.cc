#include "coordinator/http/reply_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coordinator/api/chat_reply.h"
#include "coordinator/api/completion_reply.h"

namespace tensorfold {
namespace {

void append(std::vector<TokenLogprob>* out, std::vector<TokenLogprob> more) {
  std::move(more.begin(), more.end(), std::back_inserter(*out));
}

// Sorts events to choices, and counts; what a choice's pieces become is the subclass's.
class ChoicesBuilder : public ReplyBuilder {
 public:
  ChoicesBuilder(const Tokenizer& tokenizer, ReplyHead head, const std::optional<ReplyParser::Options>& parser,
                 uint32_t parts, uint32_t n, bool logprobs, bool stream)
      : ReplyBuilder(static_cast<size_t>(parts) * n),
        tokenizer_(tokenizer),
        head_(std::move(head)),
        n_(n),
        logprobs_(logprobs),
        stream_(stream),
        stats_(choices_) {
    const std::string stem = head_.id.substr(head_.id.find('-') + 1);
    for (size_t i = 0; i < choices_; ++i) readers_.emplace_back(parser, fmt::format("{}_{}", stem, i));
  }

  std::string take(uint32_t part, GenerationEvent event) final {
    if (done()) return "";
    if (const auto* read = std::get_if<ProgressEvent>(&event)) return progress(part * n_ + read->choice, *read);
    if (auto* tokens = std::get_if<TokenEvent>(&event)) {
      const uint32_t choice = part * n_ + tokens->choice;
      reply_tokens_ += tokens->tokens.size();
      return piece(choice, readers_[choice].take(std::move(*tokens)), /*last=*/false);
    }
    FinishEvent& end = std::get<FinishEvent>(event);
    const uint32_t choice = part * n_ + end.choice;
    if (end.error) {
      error_ = std::move(end.error);
      stats_[choice] = std::move(end.stats);
      cut_ = choice;
      return "";
    }
    ReplyPiece rest = readers_[choice].take(end);
    stats_[choice] = std::move(end.stats);
    ++finished_;
    std::string out = piece(choice, std::move(rest), /*last=*/true);
    return out + ended(choice, readers_[choice].reason());
  }

  std::string cut() final { return cut_reply_event(head_, *error_, stats_[cut_], reply_tokens_); }

 protected:
  virtual std::string piece(uint32_t choice, ReplyPiece piece, bool last) = 0;
  virtual std::string ended(uint32_t choice, FinishReason reason) = 0;
  virtual std::string progress(uint32_t choice, const ProgressEvent& event) = 0;

  std::vector<TokenLogprob> logprobs_of(const ReplyPiece& piece) const {
    return logprobs_ ? token_logprobs(tokenizer_, piece.tokens) : std::vector<TokenLogprob>();
  }

  const Tokenizer& tokenizer_;
  const ReplyHead head_;
  const uint32_t n_;
  const bool logprobs_;
  const bool stream_;
  std::vector<ChoiceReader> readers_;
  std::vector<GenerationStats> stats_;
  uint32_t cut_ = 0;  // the choice that failed
};

class ChatBuilder final : public ChoicesBuilder {
 public:
  ChatBuilder(const Tokenizer& tokenizer, ReplyHead head, const ReplyParser::Options& parser, uint32_t n, bool logprobs,
              bool stream)
      : ChoicesBuilder(tokenizer, std::move(head), parser, 1, n, logprobs, stream), whole_(n), pending_(n) {}

  std::string begin() override {
    std::string out;
    for (uint32_t i = 0; stream_ && i < n_; ++i) out += chat_role_event(head_, i);
    return out;
  }

  std::string finish() override {
    if (!stream_) return chat_reply_body(head_, whole_);
    std::string out;
    if (head_.include_usage) out += chat_usage_event(head_, stats_);
    return out + sse_done();
  }

 private:
  std::string piece(uint32_t choice, ReplyPiece piece, bool last) override {
    std::vector<TokenLogprob> logprobs = logprobs_of(piece);
    if (!stream_) {
      keep(&whole_[choice], std::move(piece), std::move(logprobs));
      return "";
    }
    // Tokens whose text is withheld wait for the text they belong to.
    append(&pending_[choice], std::move(logprobs));
    if (!piece.shows_something() && (!last || pending_[choice].empty())) return "";
    ChatDelta delta;
    if (!piece.content.empty()) delta.content = std::move(piece.content);
    if (!piece.reasoning.empty()) delta.reasoning_content = std::move(piece.reasoning);
    delta.tool_calls = std::move(piece.tool_calls);
    delta.logprobs = std::exchange(pending_[choice], {});
    return chat_delta_event(head_, choice, delta);
  }

  void keep(ChatChoice* whole, ReplyPiece piece, std::vector<TokenLogprob> logprobs) {
    whole->content += piece.content;
    if (!piece.reasoning.empty()) {
      if (!whole->reasoning_content) whole->reasoning_content.emplace();
      *whole->reasoning_content += piece.reasoning;
    }
    for (ToolCallDelta& call : piece.tool_calls) {
      whole->tool_calls.push_back({std::move(*call.id), std::move(*call.name), std::move(call.arguments)});
    }
    if (logprobs_) {
      if (!whole->logprobs) whole->logprobs.emplace();
      append(&*whole->logprobs, std::move(logprobs));
    }
  }

  std::string progress(uint32_t choice, const ProgressEvent& event) override {
    return stream_ ? chat_progress_event(head_, choice, event) : "";
  }

  std::string ended(uint32_t choice, FinishReason reason) override {
    if (stream_) return chat_finish_event(head_, choice, reason, stats_[choice]);
    whole_[choice].reason = reason;
    whole_[choice].stats = stats_[choice];
    return "";
  }

  std::vector<ChatChoice> whole_;
  std::vector<std::vector<TokenLogprob>> pending_;  // [choice], of a stream
};

class CompletionBuilder final : public ChoicesBuilder {
 public:
  CompletionBuilder(const Tokenizer& tokenizer, ReplyHead head, uint32_t prompts, uint32_t n, bool logprobs,
                    bool stream)
      : ChoicesBuilder(tokenizer, std::move(head), std::nullopt, prompts, n, logprobs, stream),
        whole_(choices_),
        pending_(choices_),
        offset_(choices_) {}

  std::string begin() override { return ""; }

  std::string finish() override {
    if (!stream_) return completion_reply_body(head_, whole_, usage());
    std::string out;
    if (head_.include_usage) out += completion_usage_event(head_, usage(), stats_[0]);
    return out + sse_done();
  }

 private:
  // The sum over prompts; the choices of one prompt count it once.
  Usage usage() const {
    Usage sum;
    for (size_t i = 0; i < stats_.size(); i += n_) {
      const Usage one = usage_of(std::span(stats_).subspan(i, n_));
      sum.prompt_tokens += one.prompt_tokens;
      sum.completion_tokens += one.completion_tokens;
      sum.cached_tokens += one.cached_tokens;
    }
    return sum;
  }

  std::string piece(uint32_t choice, ReplyPiece piece, bool last) override {
    std::vector<TokenLogprob> logprobs = logprobs_of(piece);
    if (!stream_) {
      whole_[choice].text += piece.content;
      if (logprobs_) {
        if (!whole_[choice].logprobs) whole_[choice].logprobs.emplace();
        append(&*whole_[choice].logprobs, std::move(logprobs));
      }
      return "";
    }
    append(&pending_[choice], std::move(logprobs));
    if (piece.content.empty() && (!last || pending_[choice].empty())) return "";
    const std::vector<TokenLogprob> shown = std::exchange(pending_[choice], {});
    const uint64_t offset = offset_[choice];
    for (const TokenLogprob& token : shown) {
      offset_[choice] += static_cast<uint64_t>(std::count_if(token.bytes.begin(), token.bytes.end(), [](char c) {
        return (static_cast<unsigned char>(c) & 0xC0) != 0x80;  // bytes that begin a character
      }));
    }
    return completion_delta_event(head_, choice, piece.content, shown, offset);
  }

  std::string progress(uint32_t choice, const ProgressEvent& event) override {
    return stream_ ? completion_progress_event(head_, choice, event) : "";
  }

  std::string ended(uint32_t choice, FinishReason reason) override {
    if (stream_) return completion_finish_event(head_, choice, reason, stats_[choice]);
    whole_[choice].reason = reason;
    whole_[choice].stats = stats_[choice];
    return "";
  }

  std::vector<CompletionChoice> whole_;
  std::vector<std::vector<TokenLogprob>> pending_;  // [choice], of a stream
  std::vector<uint64_t> offset_;                    // [choice], characters of the tokens shown
};

}  // namespace

std::unique_ptr<ReplyBuilder> make_chat_builder(const Tokenizer& tokenizer, ReplyHead head,
                                                const ReplyParser::Options& parser, uint32_t choices, bool logprobs,
                                                bool stream) {
  return std::make_unique<ChatBuilder>(tokenizer, std::move(head), parser, choices, logprobs, stream);
}

std::unique_ptr<ReplyBuilder> make_completion_builder(const Tokenizer& tokenizer, ReplyHead head, uint32_t prompts,
                                                      uint32_t choices, bool logprobs, bool stream) {
  return std::make_unique<CompletionBuilder>(tokenizer, std::move(head), prompts, choices, logprobs, stream);
}

}  // namespace tensorfold
