#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "boost/json.hpp"
#include "coordinator/chat/tool_call_parser.h"

namespace tensorfold {

// How the replies of a model are marked up.
struct ReplyFormat {
  bool reasoning = false;  // <think>…</think> before the answer
  ToolSyntax tools = ToolSyntax::kNone;
};

// Reads the format off a chat template: a model writes what its template shows it.
ReplyFormat detect_reply_format(std::string_view template_source);

// Whether a prompt with this end leaves a <think> block open for the model to fill.
bool ends_in_reasoning(std::string_view prompt_end);

struct ReplyEvent {
  enum class Kind { kReasoning, kContent, kToolCall };
  Kind kind = Kind::kContent;
  std::string text;  // of kReasoning and kContent: append it to what came before
  ToolCall call;     // of kToolCall
  bool operator==(const ReplyEvent&) const = default;
};

// Splits generated text into reasoning, content and tool calls while it streams. The events joined do not depend on how
// the text was cut into pieces. Markers never appear in the events, nor do parts of markers; text that looks like a
// call and is none comes out as the text it is, whole.
//
//   - Whitespace around markers is markup and dropped: inside the ends of a <think> block, after it, around calls.
//   - A call inside a <think> block counts if the block is never closed; in a closed block it is reasoning.
//   - A call that ends with the reply instead of its closing tag counts if it is complete.
// Not thread-safe. Memory: the text held back, which is at most one reply.
class ReplyParser {
 public:
  struct Options {
    ReplyFormat format;
    bool starts_in_reasoning = false;  // the prompt has opened the block (Rendered::opens_reasoning)
    // The request's tools, for the types of arguments. An array or null; calls of tools not listed are parsed as well.
    boost::json::value tools;
  };

  explicit ReplyParser(const Options& options);

  // Takes the next piece of the reply.
  std::vector<ReplyEvent> feed(std::string_view text);
  // The reply has ended. Call once, last.
  std::vector<ReplyEvent> finish();

 private:
  enum class Mode { kStart, kReasoning, kContent, kCall };

  bool has_calls() const { return format_.tools != ToolSyntax::kNone; }
  void process(bool final);
  // One step each: false when more text is needed.
  bool step_start(bool final);
  bool step_reasoning(bool final);
  bool step_content(bool final);
  bool step_call(bool final);
  bool skip_whitespace();
  bool step_reasoning_call(size_t at, bool final);
  // Emits what can be no part of `markers` nor whitespace before one.
  void emit_safe(std::initializer_list<std::string_view> markers, ReplyEvent::Kind kind, bool final);
  void emit(ReplyEvent::Kind kind, size_t bytes);
  void consume(size_t bytes);

  const ReplyFormat format_;
  const ToolSchemas schemas_;
  const std::string_view marker_;  // of a call
  Mode mode_;
  ReplyEvent::Kind plain_ = ReplyEvent::Kind::kContent;  // of text outside calls, outside reasoning mode
  bool skip_space_ = false;
  bool reasoning_begins_ = false;
  std::string buffer_;  // text not yet given out
  size_t scanned_ = 0;  // of buffer_, already searched without success
  size_t call_at_ = 0;  // where the call's marker is in buffer_
  ToolCallScanner scanner_;
  int damaged_ = 0;  // calls that were none
  std::vector<ReplyEvent> events_;
};

}  // namespace tensorfold
