#include "coordinator/chat/lexer.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "coordinator/chat/unicode.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_name_char(char c) { return is_name_start(c) || is_digit(c); }

std::string normalize_newlines(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '\r') {
      out.push_back('\n');
      if (i + 1 < s.size() && s[i + 1] == '\n') ++i;
    } else {
      out.push_back(s[i]);
    }
  }
  return out;
}

class Lexer {
 public:
  Lexer(std::string_view source, const TemplateLimits& limits) : source_(normalize_newlines(source)), limits_(limits) {
    if (!source_.empty() && source_.back() == '\n') source_.pop_back();
  }

  absl::StatusOr<std::vector<Token>> run() {
    while (status_.ok() && pos_ < source_.size()) lex_root();
    if (!status_.ok()) return status_;
    push(TokenKind::kEnd);
    return std::move(tokens_);
  }

 private:
  char at(size_t pos) const { return pos < source_.size() ? source_[pos] : '\0'; }
  bool matches(size_t pos, std::string_view s) const { return source_.compare(pos, s.size(), s) == 0; }
  size_t skip_space(size_t pos) const {
    return source_.size() - strip_left(std::string_view(source_).substr(std::min(pos, source_.size()))).size();
  }
  void fail(std::string_view message) {
    if (status_.ok()) status_ = template_error(line_, message);
  }
  Token* push(TokenKind kind) {
    // Each token becomes at most a few nodes: this bounds the tokens before the parser bounds the nodes.
    if (tokens_.size() > 8 * limits_.nodes) fail("the template has too many tokens");
    tokens_.push_back({kind, line_, {}, 0, 0});
    return &tokens_.back();
  }
  void advance(size_t to) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<ptrdiff_t>(pos_), source_.begin() + static_cast<ptrdiff_t>(to), '\n'));
    pos_ = to;
  }

  // Pushes the text before a tag at `tag`, cut as the tag's sign and lstrip_blocks say.
  void push_data(size_t tag, char sign, bool block) {
    std::string_view text = std::string_view(source_).substr(pos_, tag - pos_);
    if (sign == '-') {
      text = strip_right(text);
    } else if (sign != '+' && block) {
      const size_t newline = text.rfind('\n');
      const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
      const bool line_starting = pos_ == 0 || source_[pos_ - 1] == '\n';
      if ((line_begin > 0 || line_starting) && strip_left(text.substr(line_begin)).empty()) {
        text = text.substr(0, line_begin);
      }
    }
    if (!text.empty()) push(TokenKind::kData)->text = text;
    advance(tag);
  }

  char sign_at(size_t pos) const { return at(pos) == '-' || at(pos) == '+' ? source_[pos] : '\0'; }

  // Where the tag end at `pos` ends: "-%}" eats whitespace, "%}" one newline, "+%}" nothing. nullopt if there is none.
  std::optional<size_t> block_end(size_t pos, std::string_view close, bool plus, bool trim) const {
    if (at(pos) == '-' && matches(pos + 1, close)) return skip_space(pos + 1 + close.size());
    if (plus && at(pos) == '+' && matches(pos + 1, close)) return pos + 1 + close.size();
    if (!matches(pos, close)) return std::nullopt;
    pos += close.size();
    return trim && at(pos) == '\n' ? pos + 1 : pos;
  }

  void lex_root() {
    size_t tag = pos_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos) {
        push(TokenKind::kData)->text = source_.substr(pos_);
        advance(source_.size());
        return;
      }
      const char c = at(tag + 1);
      if (c == '%' || c == '{' || c == '#') break;
      ++tag;
    }
    const char kind = source_[tag + 1];
    const char sign = sign_at(tag + 2);
    const size_t inside = tag + 2 + (sign != '\0');
    push_data(tag, sign, kind != '{');
    if (kind == '#') {
      lex_comment(inside);
    } else if (kind == '{') {
      push(TokenKind::kVariableBegin);
      advance(inside);
      lex_tag("}}", TokenKind::kVariableEnd);
    } else if (std::optional<size_t> raw = raw_begin(inside)) {
      lex_raw(*raw);
    } else {
      push(TokenKind::kBlockBegin);
      advance(inside);
      lex_tag("%}", TokenKind::kBlockEnd);
    }
  }

  void lex_comment(size_t inside) {
    for (size_t pos = inside; pos < source_.size(); ++pos) {
      if (std::optional<size_t> end = block_end(pos, "#}", true, true)) {
        advance(*end);
        return;
      }
    }
    fail("a comment is not closed");
  }

  // Where the text of a raw block begins, if the block tag is "raw".
  std::optional<size_t> raw_begin(size_t inside) const {
    const size_t word = skip_space(inside);
    if (!matches(word, "raw")) return std::nullopt;
    return block_end(skip_space(word + 3), "%}", false, false);
  }

  void lex_raw(size_t text) {
    advance(text);
    for (size_t tag = source_.find("{%", text); tag != std::string::npos; tag = source_.find("{%", tag + 1)) {
      const char sign = sign_at(tag + 2);
      const size_t word = skip_space(tag + 2 + (sign != '\0'));
      if (!matches(word, "endraw")) continue;
      const std::optional<size_t> end = block_end(skip_space(word + 6), "%}", true, true);
      if (!end) continue;
      push_data(tag, sign, true);
      advance(*end);
      return;
    }
    fail("a raw block is not closed");
  }

  void lex_tag(std::string_view close, TokenKind end_kind) {
    std::string open;  // the brackets that wait for their partner
    const bool block = end_kind == TokenKind::kBlockEnd;
    while (status_.ok()) {
      if (open.empty()) {
        if (std::optional<size_t> end = block_end(pos_, close, block, block)) {
          push(end_kind);
          advance(*end);
          return;
        }
      }
      if (pos_ >= source_.size()) return fail("a tag is not closed");
      const size_t text = skip_space(pos_);
      if (text != pos_) {
        advance(text);
      } else if (is_digit(source_[pos_])) {
        lex_number();
      } else if (is_name_start(source_[pos_])) {
        size_t end = pos_;
        while (is_name_char(at(end))) ++end;
        push(TokenKind::kName)->text = source_.substr(pos_, end - pos_);
        advance(end);
      } else if (source_[pos_] == '\'' || source_[pos_] == '"') {
        lex_string();
      } else {
        lex_operator(&open);
      }
    }
  }

  void lex_operator(std::string* open) {
    static constexpr std::string_view kTwo[] = {"//", "**", "==", "!=", ">=", "<="};
    static constexpr std::string_view kOne = "+-/*%~[](){}><=.:|,;";
    for (std::string_view op : kTwo) {
      if (matches(pos_, op)) {
        push(TokenKind::kOperator)->text.append(op);
        return advance(pos_ + 2);
      }
    }
    const char c = source_[pos_];
    if (kOne.find(c) == std::string_view::npos) {
      size_t end = pos_;
      next_code_point(source_, &end);
      return fail(fmt::format("unexpected character '{}'", source_.substr(pos_, end - pos_)));
    }
    if (c == '(' || c == '[' || c == '{') {
      open->push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    } else if (c == ')' || c == ']' || c == '}') {
      if (open->empty() || open->back() != c) return fail(fmt::format("unexpected '{}'", c));
      open->pop_back();
    }
    push(TokenKind::kOperator)->text.push_back(c);
    advance(pos_ + 1);
  }

  // The end of digits, which may be parted by single underscores.
  template <typename Pred>
  size_t digits_end(size_t pos, Pred is) const {
    while (is(at(pos)) || (at(pos) == '_' && is(at(pos + 1)))) ++pos;
    return pos;
  }

  void lex_number() {
    const size_t whole = digits_end(pos_, is_digit);
    size_t end = whole;
    // `x.0.1` is two subscripts, not a float.
    const bool after_dot = pos_ > 0 && source_[pos_ - 1] == '.';
    if (!after_dot) {
      if (at(end) == '.' && is_digit(at(end + 1))) end = digits_end(end + 1, is_digit);
      if (at(end) == 'e' || at(end) == 'E') {
        const size_t digits = end + 1 + (at(end + 1) == '+' || at(end + 1) == '-');
        if (is_digit(at(digits))) end = digits_end(digits, is_digit);
      }
    }
    return end == whole ? lex_integer(whole) : lex_float(end);
  }

  std::string digits(size_t from, size_t to) const {
    std::string out = source_.substr(from, to - from);
    out.erase(std::remove(out.begin(), out.end(), '_'), out.end());
    return out;
  }

  void lex_float(size_t end) {
    const std::string text = digits(pos_, end);
    double value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc()) return fail(fmt::format("the number {} is out of range", text));
    push(TokenKind::kFloat)->real = value;
    advance(end);
  }

  void lex_integer(size_t end) {
    size_t begin = pos_;
    int base = 10;
    if (source_[pos_] == '0') {
      const char kind = static_cast<char>(at(pos_ + 1) | 0x20);
      base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
      if (base != 10) {
        begin = pos_ + 2;
        end = digits_end(begin, [&](char c) {
          if (is_digit(c)) return c - '0' < base;
          return base == 16 && (c | 0x20) >= 'a' && (c | 0x20) <= 'f';
        });
        if (end == begin) return fail("a number has no digits");
      } else {
        end = digits_end(pos_, [](char c) { return c == '0'; });
      }
    }
    const std::string text = digits(begin, end);
    int64_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (result.ec != std::errc()) return fail(fmt::format("the number {} is out of range", text));
    push(TokenKind::kInteger)->integer = value;
    advance(end);
  }

  void lex_string() {
    const char quote = source_[pos_];
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) return fail("a string is not closed");
    std::string text;
    if (!unescape(std::string_view(source_).substr(pos_ + 1, end - pos_ - 1), &text)) return;
    push(TokenKind::kString)->text = std::move(text);
    advance(end + 1);
  }

  bool unescape(std::string_view s, std::string* out) {
    for (size_t i = 0; i < s.size();) {
      if (s[i] != '\\') {
        out->push_back(s[i++]);
        continue;
      }
      static constexpr std::string_view kFrom = "ntrabfv\\'\"";
      static constexpr std::string_view kTo = "\n\t\r\a\b\f\v\\'\"";
      const char c = s[i + 1];  // a backslash never ends the string: lex_string stepped over its partner
      i += 2;
      if (const size_t k = kFrom.find(c); k != std::string_view::npos) {
        out->push_back(kTo[k]);
      } else if (c == '\n') {
        // a line that goes on
      } else if (c >= '0' && c <= '7') {
        char32_t value = static_cast<char32_t>(c - '0');
        for (int n = 1; n < 3 && i < s.size() && s[i] >= '0' && s[i] <= '7'; ++n) value = value * 8 + (s[i++] - '0');
        append_utf8(out, value);
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t length = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        uint32_t value = 0;
        const std::string_view hex = s.substr(i, length);
        const auto result = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
        if (hex.size() < length || result.ptr != hex.data() + length || value > 0x10FFFF ||
            (value >= 0xD800 && value < 0xE000)) {
          fail(fmt::format("\\{} in a string is no character", c));
          return false;
        }
        append_utf8(out, value);
        i += length;
      } else if (c == 'N') {
        fail("\\N{...} in a string is not supported");
        return false;
      } else {
        out->push_back('\\');
        out->push_back(c);
      }
    }
    return true;
  }

  std::string source_;
  const TemplateLimits& limits_;
  size_t pos_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
  absl::Status status_;
};

}  // namespace

absl::Status template_error(int line, std::string_view message) {
  return absl::InvalidArgumentError(fmt::format("chat template line {}: {}", line, message));
}

absl::StatusOr<std::vector<Token>> lex_template(std::string_view source, const TemplateLimits& limits) {
  return Lexer(source, limits).run();
}

}  // namespace tensorfold
