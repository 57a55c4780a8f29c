#include "coordinator/chat/tool_call_parser.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "coordinator/chat/operators.h"
#include "coordinator/chat/tool_call_forms.h"

namespace tensorfold {
namespace {

namespace json = boost::json;
using namespace tool_text;  // NOLINT(google-build-using-namespace): its own helpers

constexpr std::string_view kFunctionOpen = "<function=";
constexpr std::string_view kFunctionClose = "</function>";
constexpr std::string_view kParameterOpen = "<parameter=";
constexpr std::string_view kParameterClose = "</parameter>";
constexpr size_t npos = std::string_view::npos;
std::string_view view(const json::string& s) { return {s.data(), s.size()}; }

// Behind the JSON string that begins at `pos`; the text's end if it never closes.
size_t string_end(std::string_view s, size_t pos) {
  for (++pos; pos < s.size() && s[pos] != '"'; ++pos) {
    if (s[pos] == '\\') ++pos;
  }
  return std::min(pos + 1, s.size());
}

// Behind the JSON value at `pos`: where its brackets are closed.
size_t value_end(std::string_view s, size_t pos) {
  int depth = 0;
  while (pos < s.size()) {
    const char c = s[pos];
    if (c == '"') {
      pos = string_end(s, pos);
      if (depth == 0) return pos;
      continue;
    }
    if (depth == 0 && (c == ',' || c == '}' || c == ']')) return pos;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    ++pos;
    if (depth == 0 && (c == '}' || c == ']')) return pos;
  }
  return pos;
}

// The text of a member's value in a valid JSON object: as the model wrote it, so that sending it back gives the same
// tokens.
std::string_view member_text(std::string_view object, std::string_view key) {
  std::string_view found;
  size_t pos = object.find('{') + 1;
  while (pos < object.size()) {
    pos = skip_space(object, pos);
    if (pos >= object.size() || object[pos] != '"') break;
    const size_t key_end = string_end(object, pos);
    const std::string_view name = object.substr(pos + 1, key_end - pos - 2);
    const size_t value = skip_space(object, std::min(object.find(':', key_end), object.size() - 1) + 1);
    const size_t end = value_end(object, value);
    if (name == key) found = trim(object.substr(value, end - value));
    pos = std::min(object.find_first_of(",}", end), object.size() - 1) + 1;
  }
  return found;
}

// Models write line breaks into JSON strings; JSON wants them escaped.
std::string escape_control_characters(std::string_view s) {
  std::string out;
  bool in_string = false, escaped = false;
  for (const char c : s) {
    if (in_string && static_cast<unsigned char>(c) < 0x20) {
      const std::string quoted = json_quote(std::string_view(&c, 1));
      out.append(quoted, 1, quoted.size() - 2);
      escaped = false;
      continue;
    }
    if (c == '"' && !escaped) in_string = !in_string;
    escaped = in_string && c == '\\' && !escaped;
    out.push_back(c);
  }
  return out;
}

std::optional<ToolCall> call_from_json(const std::string& text) {
  const std::optional<json::value> parsed = parse_json(text);
  if (!parsed || !parsed->is_object()) return std::nullopt;
  const json::object& object = parsed->get_object();
  const json::value* name = object.if_contains("name");
  if (name == nullptr || !name->is_string() || trim(view(name->get_string())).empty()) return std::nullopt;
  ToolCall call;
  call.name = view(name->get_string());
  const char* key = object.contains("arguments") ? "arguments" : "parameters";
  const json::value* arguments = object.if_contains(key);
  if (arguments == nullptr || arguments->is_null()) {
    call.arguments = "{}";
  } else if (arguments->is_string()) {
    call.arguments = trim(view(arguments->get_string()));
    if (call.arguments.empty()) call.arguments = "{}";
  } else {
    call.arguments = member_text(text, key);
  }
  return call;
}

// A function's or parameter's name, from behind "=" to ">". Moves `*pos` behind it.
std::optional<std::string> tag_name(std::string_view s, size_t* pos) {
  const size_t end = s.find('>', *pos);
  if (end == npos) return std::nullopt;
  const std::string_view name = trim(s.substr(*pos, end - *pos));
  if (name.empty() || name.find('\n') != npos) return std::nullopt;
  *pos = end + 1;
  return std::string(name);
}

// Where the value that begins at `pos` ends: at the closing tag that a next parameter or the function's end follows.
// Values may hold closing tags themselves.
size_t strict_value_end(std::string_view s, size_t pos) {
  for (size_t end = s.find(kParameterClose, pos); end != npos; end = s.find(kParameterClose, end + 1)) {
    const size_t next = skip_space(s, end + kParameterClose.size());
    if (starts_at(s, next, kParameterOpen)) return end;
    if (starts_at(s, next, kFunctionClose) && skip_space(s, next + kFunctionClose.size()) == s.size()) return end;
  }
  return npos;
}

size_t lenient_value_end(std::string_view s, size_t pos) {
  return std::min({s.find(kParameterClose, pos), s.find("\n<parameter=", pos), s.find(kFunctionClose, pos), s.size()});
}

std::optional<ToolCall> parse_xml(std::string_view body, const ToolSchemas& schemas, bool strict,
                                  bool need_function_end) {
  size_t pos = skip_space(body, 0);
  if (!starts_at(body, pos, kFunctionOpen)) return std::nullopt;
  pos += kFunctionOpen.size();
  std::optional<std::string> name = tag_name(body, &pos);
  if (!name) return std::nullopt;
  ArgumentList arguments;
  while (true) {
    pos = skip_space(body, pos);
    if (starts_at(body, pos, kFunctionClose)) {
      pos = skip_space(body, pos + kFunctionClose.size());
      break;
    }
    if (pos == body.size() && !strict && !need_function_end) break;
    if (!starts_at(body, pos, kParameterOpen)) return std::nullopt;
    pos += kParameterOpen.size();
    std::optional<std::string> key = tag_name(body, &pos);
    if (!key) return std::nullopt;
    const size_t end = strict ? strict_value_end(body, pos) : lenient_value_end(body, pos);
    if (end == npos) return std::nullopt;
    std::string value = schemas.argument(*name, *key, without_line_breaks(body.substr(pos, end - pos)));
    arguments.set(*std::move(key), std::move(value));
    pos = starts_at(body, end, kParameterClose) ? end + kParameterClose.size() : end;
  }
  if (pos != body.size()) return std::nullopt;
  return ToolCall{*std::move(name), arguments.text()};
}

}  // namespace

namespace tool_text {

std::string_view trim(std::string_view s) {
  const size_t begin = s.find_first_not_of(kSpace);
  if (begin == npos) return {};
  return s.substr(begin, s.find_last_not_of(kSpace) + 1 - begin);
}

std::optional<json::value> parse_json(std::string_view text) {
  json::error_code error;
  json::parse_options options;
  options.max_depth = 64;
  json::value v = json::parse(json::string_view(text.data(), text.size()), error, {}, options);
  if (error) return std::nullopt;
  return v;
}

std::string_view without_line_breaks(std::string_view s) {
  if (s.starts_with("\r\n")) {
    s.remove_prefix(2);
  } else if (s.starts_with('\n')) {
    s.remove_prefix(1);
  }
  if (s.ends_with('\n')) s.remove_suffix(1);
  if (s.ends_with('\r')) s.remove_suffix(1);
  return s;
}

std::string_view without_cut_tag(std::string_view s, std::string_view tag) {
  for (size_t n = std::min(tag.size() - 1, s.size()); n > 0; --n) {
    if (s.ends_with(tag.substr(0, n))) return s.substr(0, s.size() - n);
  }
  return s;
}

}  // namespace tool_text

void ArgumentList::set(std::string name, std::string json) {
  const auto old = std::find_if(arguments_.begin(), arguments_.end(), [&](const auto& a) { return a.first == name; });
  if (old != arguments_.end()) {
    old->second = std::move(json);
  } else {
    arguments_.emplace_back(std::move(name), std::move(json));
  }
}

std::string ArgumentList::text() const {
  std::string out;
  for (const auto& [name, value] : arguments_) {
    out.append(out.empty() ? "{" : ", ").append(json_quote(name)).append(": ").append(value);
  }
  return out.append(out.empty() ? "{}" : "}");
}

ToolCallScanner::Result scan_result(size_t end, std::optional<ToolCall> call) {
  ToolCallScanner::Result result;
  result.end = end;
  if (call) result.calls.push_back(*std::move(call));
  return result;
}

ToolSchemas::ToolSchemas(const json::value& tools) {
  if (!tools.is_array()) return;
  for (const json::value& tool : tools.get_array()) {
    const json::object* object = tool.if_object();
    if (object == nullptr) continue;
    if (const json::value* function = object->if_contains("function"); function != nullptr && function->is_object()) {
      object = &function->get_object();
    }
    const json::value* name = object->if_contains("name");
    const json::value* parameters = object->if_contains("parameters");
    if (name == nullptr || !name->is_string() || parameters == nullptr || !parameters->is_object()) continue;
    auto& types = tools_[std::string(view(name->get_string()))];
    const json::value* properties = parameters->get_object().if_contains("properties");
    if (properties == nullptr || !properties->is_object()) continue;
    for (const auto& property : properties->get_object()) {
      types[std::string(property.key().data(), property.key().size())] = types_of(property.value(), 0);
    }
  }
}

ToolSchemas::Types ToolSchemas::types_of(const json::value& schema, int depth) {
  Types types;
  const json::object* object = schema.if_object();
  if (object == nullptr || depth > 4) return types;
  const auto add = [&](const json::value& type) {
    if (!type.is_string()) return;
    const std::string_view name = view(type.get_string());
    types.string |= name == "string";
    types.null |= name == "null";
    types.boolean |= name == "boolean";
    types.other |= name != "string" && name != "null" && name != "boolean";
  };
  if (const json::value* type = object->if_contains("type")) {
    add(*type);
    if (type->is_array()) {
      for (const json::value& t : type->get_array()) add(t);
    }
  }
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const json::value* options = object->if_contains(key);
    if (options == nullptr || !options->is_array()) continue;
    for (const json::value& option : options->get_array()) {
      const Types inner = types_of(option, depth + 1);
      types.string |= inner.string;
      types.null |= inner.null;
      types.boolean |= inner.boolean;
      types.other |= inner.other;
    }
  }
  return types;
}

std::string ToolSchemas::argument(const std::string& tool, const std::string& parameter, std::string_view text) const {
  Types types;
  if (const auto it = tools_.find(tool); it != tools_.end()) {
    if (const auto type = it->second.find(parameter); type != it->second.end()) types = type->second;
  }
  const std::string_view trimmed = trim(text);
  if (types.null && (trimmed == "null" || trimmed == "None")) return "null";
  if (types.string || !(types.null || types.boolean || types.other)) return json_quote(text);
  if (types.boolean && (trimmed == "True" || trimmed == "False")) return trimmed == "True" ? "true" : "false";
  return parse_json(trimmed) ? std::string(trimmed) : json_quote(text);
}

std::optional<bool> begins_tool_call(ToolSyntax syntax, std::string_view text) {
  if (syntax == ToolSyntax::kDsml) return begins_dsml(text);
  const size_t pos = skip_space(text, 0);
  const std::string_view rest = text.substr(pos);
  if (rest.starts_with('{') || rest.starts_with(kFunctionOpen)) return true;
  if (kFunctionOpen.starts_with(rest)) return std::nullopt;  // also when it is empty
  return syntax == ToolSyntax::kArgumentKeys ? begins_keyed_tool_call(rest) : false;
}

std::optional<ToolCall> parse_json_tool_call(std::string_view body, bool closed) {
  const std::string text = escape_control_characters(trim(body));
  if (std::optional<ToolCall> call = call_from_json(text)) return call;
  const size_t end = value_end(text, 0);
  if (end < text.size() && text.find_first_not_of("} \t\r\n", end) == npos) return call_from_json(text.substr(0, end));
  return closed ? call_from_json(text + "}") : std::nullopt;
}

std::optional<ToolCall> parse_xml_tool_call(std::string_view body, const ToolSchemas& schemas) {
  return parse_xml(body, schemas, true, true);
}

std::optional<ToolCall> parse_xml_tool_call_leniently(std::string_view body, const ToolSchemas& schemas,
                                                      bool need_function_end) {
  return parse_xml(body, schemas, false, need_function_end);
}

std::optional<ToolCallScanner::Result> ToolCallScanner::scan(std::string_view body, bool final,
                                                             const ToolSchemas& schemas) {
  static constexpr TagForm kFunctionForm = {parse_xml_tool_call, parse_xml_tool_call_leniently, kFunctionClose};
  static constexpr TagForm kKeyedForm = {
      [](std::string_view text, const ToolSchemas& s) { return parse_keyed_tool_call(text, s, true, true); },
      [](std::string_view text, const ToolSchemas& s, bool need_end) {
        return parse_keyed_tool_call(text, s, false, need_end);
      },
      kArgumentValueClose};
  if (syntax_ == ToolSyntax::kDsml) return scan_dsml(body, final, schemas);
  const size_t first = skip_space(body, 0);
  if (starts_at(body, first, "{")) return scan_json(body, final);
  const bool function = syntax_ == ToolSyntax::kTagged || starts_at(body, first, kFunctionOpen);
  return scan_tags(function ? kFunctionForm : kKeyedForm, body, final, schemas);
}

std::optional<ToolCallScanner::Result> ToolCallScanner::scan_json(std::string_view body, bool final) {
  for (; position_ < body.size(); ++position_) {
    const char c = body[position_];
    if (in_string_) {
      // A JSON string has no line break: one that does was not closed, and must not hide the closing tag.
      if (c == '\n' || (c == '"' && !escaped_)) in_string_ = false;
      escaped_ = c == '\\' && !escaped_;
      continue;
    }
    if (c == '"') {
      in_string_ = true;
      escaped_ = false;
    } else if (c == '<') {
      const std::string_view rest = body.substr(position_);
      if (rest.starts_with(kToolCallClose)) {
        return scan_result(position_ + kToolCallClose.size(), parse_json_tool_call(body.substr(0, position_), true));
      }
      // The next call begins before this one ended.
      if (rest.starts_with(kToolCallOpen)) {
        return scan_result(position_, parse_json_tool_call(body.substr(0, position_), false));
      }
      if (!final && (kToolCallClose.starts_with(rest) || kToolCallOpen.starts_with(rest))) return std::nullopt;
    }
  }
  if (!final) return std::nullopt;
  if (std::optional<ToolCall> call = parse_json_tool_call(without_cut_tag(body, kToolCallClose), false)) {
    return scan_result(body.size(), std::move(call));
  }
  const size_t end = body.find(kToolCallClose);
  return scan_result(end == npos ? body.size() : end + kToolCallClose.size(), std::nullopt);
}

std::optional<ToolCallScanner::Result> ToolCallScanner::scan_tags(const TagForm& form, std::string_view body,
                                                                  bool final, const ToolSchemas& schemas) {
  while (true) {
    const size_t end = body.find(kToolCallClose, position_);
    if (end == npos) break;
    const std::string_view inside = body.substr(0, end);
    const size_t behind = end + kToolCallClose.size();
    if (std::optional<ToolCall> call = form.strict(inside, schemas)) return scan_result(behind, std::move(call));
    if (inside.find(form.last_tag) != npos) {
      if (std::optional<ToolCall> call = form.lenient(inside, schemas, true)) {
        return scan_result(behind, std::move(call));
      }
    }
    // Either an argument holds the tag, or the call is damaged. It is, if the next call follows.
    const std::string_view next = body.substr(skip_space(body, behind));
    if (!final && !next.starts_with(kToolCallOpen) && kToolCallOpen.starts_with(next)) return std::nullopt;
    if (first_end_ == npos) first_end_ = end;
    position_ = behind;
    if (next.starts_with(kToolCallOpen) || ++failed_ends_ >= kMaxFailedEnds) {
      return scan_result(first_end_ + kToolCallClose.size(), form.lenient(body.substr(0, first_end_), schemas, false));
    }
  }
  if (!final) {
    // Look at the last bytes again: the tag may be cut.
    position_ = std::max(position_, body.size() - std::min(body.size(), kToolCallClose.size() - 1));
    return std::nullopt;
  }
  if (first_end_ != npos) {
    return scan_result(first_end_ + kToolCallClose.size(), form.lenient(body.substr(0, first_end_), schemas, false));
  }
  return scan_result(body.size(), form.lenient(without_cut_tag(body, kToolCallClose), schemas, true));
}

}  // namespace tensorfold
