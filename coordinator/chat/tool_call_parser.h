#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "boost/json.hpp"

namespace tensorfold {

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON text, an object if the model kept to its format
  bool operator==(const ToolCall&) const = default;
};

inline constexpr std::string_view kToolCallOpen = "<tool_call>";
inline constexpr std::string_view kToolCallClose = "</tool_call>";

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

// Whether a call begins here: `text` follows the opening tag. Nothing if it is too short to tell.
std::optional<bool> begins_tool_call(std::string_view text);

// {"name": …, "arguments": …}, or with "parameters". `closed`: the closing tag was there, so that one brace too few is
// a slip and not the end of the reply.
std::optional<ToolCall> parse_json_tool_call(std::string_view body, bool closed);
// <function=NAME><parameter=KEY>value</parameter>…</function>. Lenient: closing tags of parameters may lack; with
// `need_function_end` that of the function may not.
std::optional<ToolCall> parse_xml_tool_call(std::string_view body, const ToolSchemas& schemas);
std::optional<ToolCall> parse_xml_tool_call_leniently(std::string_view body, const ToolSchemas& schemas,
                                                      bool need_function_end);

// Finds the end of a call in text that grows. The closing tag may occur inside arguments, so that the end is where the
// call parses.
class ToolCallScanner {
 public:
  struct Result {
    size_t end = 0;                // bytes of `body` that the call, or the text that is none, takes
    std::optional<ToolCall> call;  // nothing: it is text
  };

  void reset() { *this = ToolCallScanner(); }
  // `body` follows the opening tag and begins as begins_tool_call wants; from call to call it may only grow. Nothing
  // while more text is needed, which is never with `final`.
  std::optional<Result> scan(std::string_view body, bool final, const ToolSchemas& schemas);

 private:
  std::optional<Result> scan_json(std::string_view body, bool final);
  std::optional<Result> scan_xml(std::string_view body, bool final, const ToolSchemas& schemas);

  size_t position_ = 0;
  bool in_string_ = false;
  bool escaped_ = false;
  int failed_ends_ = 0;
  size_t first_end_ = std::string_view::npos;  // the first closing tag that was no end
};

}  // namespace tensorfold
