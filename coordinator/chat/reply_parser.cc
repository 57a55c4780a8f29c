#include "coordinator/chat/reply_parser.h"

#include <algorithm>

namespace tensorfold {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr std::string_view kThinkOpen = "<think>";
constexpr std::string_view kThinkClose = "</think>";
constexpr size_t npos = std::string_view::npos;
// Damaged calls in one reply after which tags are taken as text: bounds the work on text made to be slow.
constexpr int kMaxDamaged = 64;

// Length of the longest end of `s` that a marker could go on from.
size_t partial_marker(std::string_view s, std::initializer_list<std::string_view> markers) {
  size_t longest = 0;
  for (const std::string_view marker : markers) {
    for (size_t n = std::min(marker.size() - 1, s.size()); n > longest; --n) {
      if (s.ends_with(marker.substr(0, n))) longest = n;
    }
  }
  return longest;
}

}  // namespace

ReplyFormat detect_reply_format(std::string_view source) {
  ReplyFormat format;
  format.reasoning = source.find(kThinkClose) != npos;
  if (source.find(kDsmlOpen) != npos) {
    format.tools = ToolSyntax::kDsml;
  } else if (source.find(kToolCallOpen) != npos) {
    format.tools = source.find("<arg_key>") != npos ? ToolSyntax::kArgumentKeys : ToolSyntax::kTagged;
  }
  return format;
}

bool ends_in_reasoning(std::string_view prompt_end) {
  const size_t last = prompt_end.find_last_not_of(kSpace);
  return last != npos && prompt_end.substr(0, last + 1).ends_with(kThinkOpen);
}

ReplyParser::ReplyParser(const Options& options)
    : format_(options.format),
      schemas_(options.tools),
      marker_(tool_marker(options.format.tools)),
      mode_(options.format.reasoning ? Mode::kStart : Mode::kContent),
      scanner_(options.format.tools) {
  if (options.starts_in_reasoning) {
    mode_ = Mode::kReasoning;
    skip_space_ = reasoning_begins_ = true;
  }
}

std::vector<ReplyEvent> ReplyParser::feed(std::string_view text) {
  buffer_.append(text);
  process(false);
  return std::exchange(events_, {});
}

std::vector<ReplyEvent> ReplyParser::finish() {
  process(true);
  return std::exchange(events_, {});
}

void ReplyParser::process(bool final) {
  bool more = true;
  while (more && !buffer_.empty()) {
    switch (mode_) {
      case Mode::kStart:
        more = step_start(final);
        break;
      case Mode::kReasoning:
        more = step_reasoning(final);
        break;
      case Mode::kContent:
        more = step_content(final);
        break;
      case Mode::kCall:
        more = step_call(final);
        break;
    }
  }
}

void ReplyParser::consume(size_t bytes) {
  buffer_.erase(0, bytes);
  scanned_ = 0;
}

void ReplyParser::emit(ReplyEvent::Kind kind, size_t bytes) {
  if (bytes > 0) {
    if (events_.empty() || events_.back().kind != kind) events_.push_back({kind, {}, {}});
    events_.back().text.append(buffer_, 0, bytes);
  }
  consume(bytes);
}

void ReplyParser::emit_safe(std::initializer_list<std::string_view> markers, ReplyEvent::Kind kind, bool final) {
  if (final) return emit(kind, buffer_.size());
  size_t end = buffer_.size() - partial_marker(buffer_, markers);
  while (end > 0 && kSpace.find(buffer_[end - 1]) != npos) --end;
  emit(kind, end);
}

bool ReplyParser::skip_whitespace() {
  if (skip_space_) {
    consume(std::min(buffer_.find_first_not_of(kSpace), buffer_.size()));
    skip_space_ = buffer_.empty();
  }
  return !buffer_.empty();
}

bool ReplyParser::step_start(bool final) {
  const size_t text = buffer_.find_first_not_of(kSpace);
  const std::string_view rest = text == npos ? std::string_view() : std::string_view(buffer_).substr(text);
  if (rest.starts_with(kThinkOpen)) {
    consume(text + kThinkOpen.size());
    mode_ = Mode::kReasoning;
    skip_space_ = true;
    return true;
  }
  if (!final && kThinkOpen.starts_with(rest)) return false;
  mode_ = Mode::kContent;
  return true;
}

bool ReplyParser::step_reasoning(bool final) {
  if (!skip_whitespace()) return false;
  if (reasoning_begins_) {
    // Some models open the block again that the prompt has opened.
    const std::string_view rest = buffer_;
    if (!final && rest.size() < kThinkOpen.size() && kThinkOpen.starts_with(rest)) return false;
    reasoning_begins_ = false;
    if (rest.starts_with(kThinkOpen)) {
      consume(kThinkOpen.size());
      skip_space_ = true;
      return true;
    }
  }
  const size_t close = buffer_.find(kThinkClose);
  const size_t call = has_calls() ? buffer_.find(marker_) : npos;
  if (call < close) return step_reasoning_call(call, final);
  if (close == npos) {
    if (has_calls()) {
      emit_safe({kThinkClose, marker_}, ReplyEvent::Kind::kReasoning, final);
    } else {
      emit_safe({kThinkClose}, ReplyEvent::Kind::kReasoning, final);
    }
    return false;
  }
  size_t end = close;
  while (end > 0 && kSpace.find(buffer_[end - 1]) != npos) --end;
  emit(ReplyEvent::Kind::kReasoning, end);
  consume(close - end + kThinkClose.size());
  mode_ = Mode::kContent;
  skip_space_ = true;
  return true;
}

// A call's tag inside the block: it counts only if the block never closes, so what follows is held back until that is
// known.
bool ReplyParser::step_reasoning_call(size_t at, bool final) {
  const std::optional<bool> begins =
      begins_tool_call(format_.tools, std::string_view(buffer_).substr(at + marker_.size()));
  if (begins == false || (final && !begins)) {
    emit(ReplyEvent::Kind::kReasoning, at + marker_.size());
    return true;
  }
  if (begins == true) {
    const size_t close = buffer_.find(kThinkClose, std::max(scanned_, at));
    if (close != npos) {
      size_t end = close;
      while (end > 0 && kSpace.find(buffer_[end - 1]) != npos) --end;
      emit(ReplyEvent::Kind::kReasoning, end);
      return true;
    }
    if (final) {
      mode_ = Mode::kContent;
      plain_ = ReplyEvent::Kind::kReasoning;
      return true;
    }
  }
  size_t end = at;
  while (end > 0 && kSpace.find(buffer_[end - 1]) != npos) --end;
  if (end > 0) emit(ReplyEvent::Kind::kReasoning, end);
  scanned_ = buffer_.size() - std::min(buffer_.size(), kThinkClose.size() - 1);
  return false;
}

bool ReplyParser::step_content(bool final) {
  if (!skip_whitespace()) return false;
  if (!has_calls() || damaged_ >= kMaxDamaged) {
    emit(plain_, buffer_.size());
    return false;
  }
  const size_t at = buffer_.find(marker_);
  if (at == npos) {
    emit_safe({marker_}, plain_, final);
    return false;
  }
  const std::optional<bool> begins =
      begins_tool_call(format_.tools, std::string_view(buffer_).substr(at + marker_.size()));
  if (begins == false || (final && !begins)) {
    emit(plain_, at + marker_.size());
    return true;
  }
  // Whitespace before the tag waits: it is markup if this is a call.
  size_t end = at;
  while (end > 0 && kSpace.find(buffer_[end - 1]) != npos) --end;
  emit(plain_, end);
  if (!begins) return false;
  call_at_ = at - end;
  scanner_.reset();
  mode_ = Mode::kCall;
  return true;
}

bool ReplyParser::step_call(bool final) {
  const size_t begin = call_at_ + marker_.size();
  std::optional<ToolCallScanner::Result> result =
      scanner_.scan(std::string_view(buffer_).substr(begin), final, schemas_);
  if (!result) return false;
  mode_ = Mode::kContent;
  if (!result->calls.empty()) {
    for (ToolCall& call : result->calls) events_.push_back({ReplyEvent::Kind::kToolCall, {}, std::move(call)});
    consume(begin + result->end);
    skip_space_ = true;
  } else {
    ++damaged_;
    emit(plain_, begin + result->end);
  }
  return true;
}

}  // namespace tensorfold
