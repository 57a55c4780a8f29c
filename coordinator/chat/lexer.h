#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/chat/value.h"

namespace tensorfold {

enum class TokenKind : uint8_t {
  kData,           // text between tags
  kBlockBegin,     // {%
  kBlockEnd,       // %}
  kVariableBegin,  // {{
  kVariableEnd,    // }}
  kName,
  kString,  // unescaped
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  int line = 1;
  std::string text;
  TemplateInt integer = 0;
  double real = 0;
};

absl::Status template_error(int line, std::string_view message);

// Splits a template as jinja2's lexer does with trim_blocks and lstrip_blocks on: whitespace control, comments and raw
// blocks are settled here, so that the parser sees only data, tags and expression tokens. One trailing newline is
// dropped and \r\n counts as \n. The last token is kEnd. `source` must be valid UTF-8.
absl::StatusOr<std::vector<Token>> lex_template(std::string_view source, const TemplateLimits& limits);

}  // namespace tensorfold
