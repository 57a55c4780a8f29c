// Calls as GLM writes them: NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>…
#include <algorithm>

#include "coordinator/chat/tool_call_forms.h"

namespace tensorfold {
namespace {

using namespace tool_text;  // NOLINT(google-build-using-namespace): its own helpers

constexpr std::string_view kKeyOpen = "<arg_key>";
constexpr std::string_view kKeyClose = "</arg_key>";
constexpr std::string_view kValueOpen = "<arg_value>";
constexpr size_t npos = std::string_view::npos;
constexpr size_t kLongestName = 256;

// Behind the closing tag of the value that begins at `pos`, when each tag is there: the next argument or the end
// follows. Values may hold closing tags themselves.
// A key on a line of its own says that the value before it was left open.
size_t strict_value_end(std::string_view s, size_t pos) {
  const size_t next_key = s.find("\n<arg_key>", pos);
  for (size_t end = s.find(kArgumentValueClose, pos); end != npos; end = s.find(kArgumentValueClose, end + 1)) {
    const size_t next = skip_space(s, end + kArgumentValueClose.size());
    if (next == s.size() || starts_at(s, next, kKeyOpen)) return end < next_key ? end : npos;
  }
  return npos;
}

size_t lenient_value_end(std::string_view s, size_t pos) {
  return std::min({s.find(kArgumentValueClose, pos), s.find(kKeyOpen, pos), s.size()});
}

}  // namespace

std::optional<bool> begins_keyed_tool_call(std::string_view rest) {
  const size_t end = rest.find_first_of("<\n");
  if (end == npos) return rest.size() > kLongestName ? std::optional<bool>(false) : std::nullopt;
  if (end > kLongestName || trim(rest.substr(0, end)).empty()) return false;
  const std::string_view next = rest.substr(skip_space(rest, end));
  if (next.starts_with(kKeyOpen) || next.starts_with(kToolCallClose)) return true;
  if (kKeyOpen.starts_with(next) || kToolCallClose.starts_with(next)) return std::nullopt;
  return false;
}

std::optional<ToolCall> parse_keyed_tool_call(std::string_view body, const ToolSchemas& schemas, bool strict,
                                              bool need_value_end) {
  const size_t name_end = std::min(body.find(kKeyOpen), body.size());
  const std::string name(trim(body.substr(0, name_end)));
  if (name.empty() || name.size() > kLongestName || name.find_first_of("<\n") != std::string::npos) return std::nullopt;
  ArgumentList arguments;
  size_t pos = name_end;
  while (pos < body.size()) {
    if (!starts_at(body, pos, kKeyOpen)) return std::nullopt;
    pos += kKeyOpen.size();
    const size_t value_tag = body.find(kValueOpen, pos);
    if (value_tag == npos) return std::nullopt;
    std::string_view key = trim(body.substr(pos, value_tag - pos));
    if (key.ends_with(kKeyClose)) {
      key = trim(key.substr(0, key.size() - kKeyClose.size()));
    } else if (strict) {
      return std::nullopt;
    }
    if (key.empty() || key.find_first_of("<\n") != npos) return std::nullopt;
    pos = value_tag + kValueOpen.size();
    const size_t end = strict ? strict_value_end(body, pos) : lenient_value_end(body, pos);
    if (end == npos) return std::nullopt;
    const bool closed = starts_at(body, end, kArgumentValueClose);
    if (!closed && end == body.size() && need_value_end) return std::nullopt;
    std::string_view value = body.substr(pos, end - pos);
    if (!closed) value = trim(value);  // line breaks before the next tag, which no closing tag set apart
    arguments.set(std::string(key), schemas.argument(name, std::string(key), value));
    pos = skip_space(body, closed ? end + kArgumentValueClose.size() : end);
  }
  return ToolCall{name, arguments.text()};
}

}  // namespace tensorfold
