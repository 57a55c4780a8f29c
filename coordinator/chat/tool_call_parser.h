#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "boost/json.hpp"

namespace tensorfold {

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON text, an object if the model kept to its format
  bool operator==(const ToolCall&) const = default;
};

// How a model writes its calls.
enum class ToolSyntax : uint8_t {
  kNone,
  kTagged,        // <tool_call> around JSON (Hermes, Qwen 2.5/3) or around <function=…> (Qwen 3.5, Nemotron 3)
  kArgumentKeys,  // <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call> (GLM); also kTagged's two
  kDsml,  // <｜DSML｜tool_calls><｜DSML｜invoke name="…">… (DeepSeek V4; V4.1 has a space before each word)
};

inline constexpr std::string_view kToolCallOpen = "<tool_call>";
inline constexpr std::string_view kToolCallClose = "</tool_call>";
inline constexpr std::string_view kDsmlOpen = "<｜DSML｜";
inline constexpr std::string_view kDsmlClose = "</｜DSML｜";

// What a call, or several in one block, begins with.
constexpr std::string_view tool_marker(ToolSyntax syntax) {
  return syntax == ToolSyntax::kDsml ? kDsmlOpen : kToolCallOpen;
}

// What the schemas of a request's tools say of each parameter, for formats that write arguments without types.
class ToolSchemas {
 public:
  // `tools` as in the OpenAI API; anything else in it is passed over.
  explicit ToolSchemas(const boost::json::value& tools);

  // The JSON text of an argument that the model wrote as plain text: as it is for parameters that are no strings, if it
  // is JSON; a JSON string otherwise.
  std::string argument(const std::string& tool, const std::string& parameter, std::string_view text) const;

 private:
  struct Types {
    bool string = false, null = false, boolean = false, other = false;
  };
  static Types types_of(const boost::json::value& schema, int depth);

  std::map<std::string, std::map<std::string, Types>> tools_;
};

// Whether a call begins here: `text` follows the marker. Nothing if it is too short to tell.
std::optional<bool> begins_tool_call(ToolSyntax syntax, std::string_view text);

// {"name": …, "arguments": …}, or with "parameters". `closed`: the closing tag was there, so that one brace too few is
// a slip and not the end of the reply.
std::optional<ToolCall> parse_json_tool_call(std::string_view body, bool closed);
// <function=NAME><parameter=KEY>value</parameter>…</function>. Lenient: closing tags of parameters may lack; with
// `need_function_end` that of the function may not.
std::optional<ToolCall> parse_xml_tool_call(std::string_view body, const ToolSchemas& schemas);
std::optional<ToolCall> parse_xml_tool_call_leniently(std::string_view body, const ToolSchemas& schemas,
                                                      bool need_function_end);

// NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>… `strict`: every tag is there; otherwise a closing tag may
// lack where the next one tells the end, and with `need_value_end` only that of the last value may not.
std::optional<ToolCall> parse_keyed_tool_call(std::string_view body, const ToolSchemas& schemas, bool strict,
                                              bool need_value_end);

// Finds the end of a call in text that grows. The closing tag may occur inside arguments, so that the end is where the
// call parses.
class ToolCallScanner {
 public:
  struct Result {
    size_t end = 0;               // bytes of `body` that the calls, or the text that is none, take
    std::vector<ToolCall> calls;  // empty: it is text
  };

  explicit ToolCallScanner(ToolSyntax syntax) : syntax_(syntax) {}
  void reset() { *this = ToolCallScanner(syntax_); }
  // `body` follows the marker and begins as begins_tool_call wants; from call to call it may only grow. Nothing while
  // more text is needed, which is never with `final`.
  std::optional<Result> scan(std::string_view body, bool final, const ToolSchemas& schemas);

 private:
  using Lenient = std::optional<ToolCall>(std::string_view body, const ToolSchemas& schemas, bool need_end);
  struct TagForm {
    std::optional<ToolCall> (*strict)(std::string_view body, const ToolSchemas& schemas);
    Lenient* lenient;
    std::string_view last_tag;  // what a call whose arguments are all there has in it
  };

  std::optional<Result> scan_json(std::string_view body, bool final);
  std::optional<Result> scan_tags(const TagForm& form, std::string_view body, bool final, const ToolSchemas& schemas);
  std::optional<Result> scan_dsml(std::string_view body, bool final, const ToolSchemas& schemas);

  ToolSyntax syntax_;
  size_t position_ = 0;
  bool in_string_ = false;
  bool escaped_ = false;
  int failed_ends_ = 0;
  size_t first_end_ = std::string_view::npos;  // the first closing tag that was no end
};

// A call that is in `call`, or text.
ToolCallScanner::Result scan_result(size_t end, std::optional<ToolCall> call);

// Name and JSON text of each argument, in the order in which they were written; a name written twice keeps its last
// value.
class ArgumentList {
 public:
  void set(std::string name, std::string json);
  std::string text() const;  // a JSON object

 private:
  std::vector<std::pair<std::string, std::string>> arguments_;
};

// What the parsers of all forms share.
namespace tool_text {

inline constexpr std::string_view kSpace = " \t\r\n";
// Closing tags tried before a call counts as damaged: bounds the work on text made to be slow.
inline constexpr int kMaxFailedEnds = 32;

std::string_view trim(std::string_view s);
inline size_t skip_space(std::string_view s, size_t pos) {
  const size_t found = s.find_first_not_of(kSpace, pos);
  return found == std::string_view::npos ? s.size() : found;
}
inline bool starts_at(std::string_view s, size_t pos, std::string_view what) {
  return pos <= s.size() && s.substr(pos, what.size()) == what;
}
std::optional<boost::json::value> parse_json(std::string_view text);
// One line break after the opening tag and one before the closing tag belong to the markup.
std::string_view without_line_breaks(std::string_view s);
// `s` without the beginning of `tag` that it ends in: the reply ended inside the tag.
std::string_view without_cut_tag(std::string_view s, std::string_view tag);

}  // namespace tool_text

}  // namespace tensorfold
