// Calls as DeepSeek V4 writes them, and V4.1 with a space before each word:
//   <｜DSML｜tool_calls>
//   <｜DSML｜invoke name="NAME">
//   <｜DSML｜parameter name="KEY" string="true|false">value</｜DSML｜parameter>
//   </｜DSML｜invoke>
//   </｜DSML｜tool_calls>
#include <algorithm>
#include <array>

#include "coordinator/chat/operators.h"
#include "coordinator/chat/tool_call_forms.h"

namespace tensorfold {
namespace {

using namespace tool_text;  // NOLINT(google-build-using-namespace): its own helpers

constexpr size_t npos = std::string_view::npos;
constexpr std::array<std::string_view, 3> kBlockNames = {"tool_calls", "calls", "function_calls"};
constexpr std::string_view kInvoke = "invoke";
constexpr std::string_view kParameter = "parameter";
constexpr size_t kLongestTag = 20;  // behind its marker: " function_calls>"

// Behind `opening` and the word `name` at `pos`, with or without a space between; npos if they are not there.
size_t behind_tag(std::string_view s, size_t pos, std::string_view opening, std::string_view name) {
  if (!starts_at(s, pos, opening)) return npos;
  pos += opening.size();
  if (starts_at(s, pos, " ")) ++pos;
  if (!starts_at(s, pos, name)) return npos;
  return pos + name.size();
}

// Behind the closing tag of `name` at `pos`, or npos.
size_t behind_close(std::string_view s, size_t pos, std::string_view name) {
  const size_t end = behind_tag(s, pos, kDsmlClose, name);
  return end != npos && starts_at(s, end, ">") ? end + 1 : npos;
}

size_t behind_block_close(std::string_view s, size_t pos) {
  for (const std::string_view name : kBlockNames) {
    if (const size_t end = behind_close(s, pos, name); end != npos) return end;
  }
  return npos;
}

// Whether the reply ended inside a block's closing tag.
bool is_cut_block_close(std::string_view s) {
  if (kDsmlClose.starts_with(s)) return true;
  if (!s.starts_with(kDsmlClose)) return false;
  s.remove_prefix(kDsmlClose.size());
  if (s.starts_with(' ')) s.remove_prefix(1);
  return std::any_of(kBlockNames.begin(), kBlockNames.end(),
                     [&](std::string_view name) { return name.starts_with(s); });
}

// The value of attribute `name` in `attributes` (what stands between a tag's word and its ">").
std::optional<std::string_view> attribute(std::string_view attributes, std::string_view name) {
  size_t pos = 0;
  while (true) {
    pos = skip_space(attributes, pos);
    const size_t equals = attributes.find('=', pos);
    if (equals == npos) return std::nullopt;
    const std::string_view key = trim(attributes.substr(pos, equals - pos));
    const size_t quote = skip_space(attributes, equals + 1);
    if (quote >= attributes.size() || attributes[quote] != '"') return std::nullopt;
    const size_t end = attributes.find('"', quote + 1);
    if (end == npos) return std::nullopt;
    if (key == name) return attributes.substr(quote + 1, end - quote - 1);
    pos = end + 1;
  }
}

// An opening tag's attributes; moves `*pos`, which is behind its word, behind its ">". A ">" inside quotes is none.
std::optional<std::string_view> attributes_at(std::string_view s, size_t* pos) {
  bool quoted = false;
  for (size_t i = *pos; i < s.size(); ++i) {
    if (s[i] == '"') quoted = !quoted;
    if (s[i] == '\n') return std::nullopt;
    if (s[i] != '>' || quoted) continue;
    const std::string_view inside = s.substr(*pos, i - *pos);
    *pos = i + 1;
    return inside;
  }
  return std::nullopt;
}

// Whether a value may end at `pos`, where its closing tag would be or is missing: a parameter or the call's end
// follows.
bool value_may_end(std::string_view s, size_t pos) {
  pos = skip_space(s, pos);
  return behind_tag(s, pos, kDsmlOpen, kParameter) != npos || behind_close(s, pos, kInvoke) != npos;
}

struct Value {
  size_t end = npos;     // of its text
  size_t behind = npos;  // its closing tag
};

// The value that begins at `pos`: up to a closing tag that a parameter or the call's end follows, since values may hold
// closing tags themselves; or, where a closing tag lacks, up to the next of our tags. How far a closing tag is looked
// for behind such a tag is limited, which bounds the work on text made to be slow.
Value find_value(std::string_view s, size_t pos) {
  constexpr size_t kLookBehind = 4096;
  Value next;
  for (size_t at = s.find('<', pos); at != npos; at = s.find('<', at + 1)) {
    if (next.end != npos && at > next.end + kLookBehind) break;
    const size_t behind = behind_close(s, at, kParameter);
    if (behind != npos && value_may_end(s, behind)) return {at, behind};
    const bool ours = behind_tag(s, at, kDsmlOpen, kParameter) != npos || behind_close(s, at, kInvoke) != npos;
    if (ours && next.end == npos) next = {at, at};
    // On a line of its own it says that the value before it was left open.
    if (ours && at > pos && s[at - 1] == '\n') break;
  }
  return next;
}

// The text of a parameter as JSON. The tag says whether it is a string; where it does not, the tool's schema does.
std::string argument_json(const ToolSchemas& schemas, const std::string& tool, const std::string& key,
                          std::optional<std::string_view> is_string, std::string_view text) {
  if (is_string == "true") return json_quote(text);
  if (is_string == "false") return parse_json(trim(text)) ? std::string(trim(text)) : json_quote(text);
  return schemas.argument(tool, key, text);
}

// One call from its opening tag; moves `*pos` behind it. Nothing, and `*pos` as it was, if it is damaged or cut.
std::optional<ToolCall> parse_invoke(std::string_view s, size_t* pos, const ToolSchemas& schemas) {
  size_t at = behind_tag(s, *pos, kDsmlOpen, kInvoke);
  if (at == npos) return std::nullopt;
  const std::optional<std::string_view> attributes = attributes_at(s, &at);
  const std::optional<std::string_view> name = attributes ? attribute(*attributes, "name") : std::nullopt;
  if (!name || trim(*name).empty()) return std::nullopt;
  ToolCall call;
  call.name = trim(*name);
  ArgumentList arguments;
  while (true) {
    at = skip_space(s, at);
    if (const size_t end = behind_close(s, at, kInvoke); end != npos) {
      *pos = end;
      call.arguments = arguments.text();
      return call;
    }
    at = behind_tag(s, at, kDsmlOpen, kParameter);
    if (at == npos) return std::nullopt;
    const std::optional<std::string_view> of = attributes_at(s, &at);
    const std::optional<std::string_view> key = of ? attribute(*of, "name") : std::nullopt;
    if (!key || trim(*key).empty()) return std::nullopt;
    const Value value = find_value(s, at);
    if (value.end == npos) return std::nullopt;
    const std::string_view text =
        value.end == value.behind ? trim(s.substr(at, value.end - at)) : s.substr(at, value.end - at);
    const std::string key_text(trim(*key));
    arguments.set(key_text, argument_json(schemas, call.name, key_text, attribute(*of, "string"), text));
    at = value.behind;
  }
}

// The calls of a block whose text, from behind kDsmlOpen, is `body`. `end`: behind the last whole call or the block's
// closing tag.
ToolCallScanner::Result parse_block(std::string_view body, const ToolSchemas& schemas) {
  ToolCallScanner::Result result;
  // The first tag is cut at its front; an invoke without a block around it needs it whole.
  std::string whole(kDsmlOpen);
  whole.append(body);
  const std::string_view s = whole;
  size_t pos = 0;
  for (const std::string_view name : kBlockNames) {
    const size_t behind = behind_tag(s, 0, kDsmlOpen, name);
    if (behind != npos && starts_at(s, behind, ">")) pos = behind + 1;
  }
  const bool wrapped = pos > 0;
  while (true) {
    const size_t at = skip_space(s, pos);
    if (const size_t close = behind_block_close(s, at); close != npos && !result.calls.empty()) {
      pos = close;
      break;
    }
    size_t next = at;
    std::optional<ToolCall> call = parse_invoke(s, &next, schemas);
    if (!call) break;
    result.calls.push_back(*std::move(call));
    pos = next;
    if (!wrapped && behind_tag(s, skip_space(s, pos), kDsmlOpen, kInvoke) == npos &&
        behind_block_close(s, skip_space(s, pos)) == npos) {
      break;
    }
  }
  result.end = result.calls.empty() ? body.size() : pos - kDsmlOpen.size();
  return result;
}

}  // namespace

std::optional<bool> begins_dsml(std::string_view text) {
  const std::string_view rest = text.starts_with(' ') ? text.substr(1) : text;
  if (rest.empty()) return std::nullopt;
  for (const std::string_view name : kBlockNames) {
    if (rest.starts_with(name) && rest.size() > name.size() && rest[name.size()] == '>') return true;
    if (name.starts_with(rest)) return std::nullopt;
  }
  if (rest.starts_with(kInvoke) && rest.size() > kInvoke.size()) return rest[kInvoke.size()] == ' ';
  if (kInvoke.starts_with(rest)) return std::nullopt;
  return false;
}

// A block ends at its closing tag where what is before it parses; arguments may hold the tag.
std::optional<ToolCallScanner::Result> ToolCallScanner::scan_dsml(std::string_view body, bool final,
                                                                  const ToolSchemas& schemas) {
  while (true) {
    const size_t at = body.find(kDsmlClose, position_);
    if (at == npos) break;
    const size_t behind = behind_block_close(body, at);
    if (behind == npos) {
      // A tag that is cut is looked at again.
      if (!final && body.size() - at < kDsmlClose.size() + kLongestTag) return std::nullopt;
      position_ = at + 1;
      continue;
    }
    position_ = at + 1;
    Result result = parse_block(body.substr(0, behind), schemas);
    if (!result.calls.empty() && result.end == behind) return result;
    if (first_end_ == npos) first_end_ = behind;
    if (++failed_ends_ >= kMaxFailedEnds) return result.calls.empty() ? scan_result(first_end_, std::nullopt) : result;
  }
  if (!final) {
    position_ = std::max(position_, body.size() - std::min(body.size(), kDsmlClose.size() - 1));
    return std::nullopt;
  }
  // The reply ended inside the block, or the block is damaged: whole calls count.
  Result result = parse_block(body, schemas);
  if (!result.calls.empty() && is_cut_block_close(body.substr(skip_space(body, result.end)))) result.end = body.size();
  if (result.calls.empty() && first_end_ != npos) result.end = first_end_;
  return result;
}

}  // namespace tensorfold
