#include "coordinator/tokenizer/pattern_translator.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/tokenizer/unicode/ranges.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {
namespace {

#include "coordinator/tokenizer/unicode/class_tables.inc"

// Unicode White_Space: Oniguruma's and Rust's \s. (PCRE2's \s adds U+180E.)
constexpr CodeRange kSpaces[] = {{0x09, 0x0D},     {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},
                                 {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F},
                                 {0x205F, 0x205F}, {0x3000, 0x3000}};

constexpr size_t kMaxGroups = 200;
constexpr unsigned kMaxRepeat = 1000;
constexpr size_t kMaxTranslation = 1 << 20;  // each \w or \p{L} grows to a list of ranges

bool is_letter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char32_t c) { return c >= '0' && c <= '9'; }

std::string code(char32_t c) {
  if (is_letter(c) || is_digit(c)) return std::string(1, static_cast<char>(c));
  return fmt::format("\\x{{{:x}}}", static_cast<uint32_t>(c));
}

std::string range_items(std::span<const CodeRange> ranges) {
  std::string out;
  for (const CodeRange& r : ranges)
    out += r.first == r.last ? code(r.first) : fmt::format("{}-{}", code(r.first), code(r.last));
  return out;
}

// The items of a class that match what is not in `ranges`.
std::string complement_items(std::span<const CodeRange> ranges) {
  std::vector<CodeRange> gaps;
  char32_t next = 0;
  for (const CodeRange& r : ranges) {
    if (r.first > next) gaps.push_back({next, r.first - 1});
    next = r.last + 1;
  }
  // Surrogates are no characters and PCRE2 refuses them as ends of a range, not inside one.
  gaps.push_back({next, 0x10FFFF});
  return range_items(gaps);
}

// Class items for the general categories whose names begin with `prefix` ("L", "Lu"); empty if there are none.
std::string category_items(std::string_view prefix) {
  std::string added;
  bool known = false;
  for (const NamedRanges& category : kNewByCategory) {
    if (!category.name.starts_with(prefix)) continue;
    known = true;
    added += range_items(category.ranges);
  }
  if (!known) return "";
  // The ASCII members first: PCRE2 answers those from a bitmap.
  std::string ascii;
  if (prefix == "L") ascii = "a-zA-Z";
  if (prefix == "Lu") ascii = "A-Z";
  if (prefix == "Ll") ascii = "a-z";
  if (prefix == "N" || prefix == "Nd") ascii = "0-9";
  return fmt::format("{}\\p{{{}}}{}", ascii, prefix, added);
}

std::string word_items() {
  return category_items("L") + category_items("M") + category_items("Nd") + category_items("Nl") +
         category_items("Pc") + range_items(kWordExtra);
}

// Long names of the properties that patterns use.
constexpr std::pair<std::string_view, std::string_view> kLongNames[] = {{"letter", "L"},
                                                                        {"mark", "M"},
                                                                        {"number", "N"},
                                                                        {"punctuation", "P"},
                                                                        {"punct", "P"},
                                                                        {"symbol", "S"},
                                                                        {"separator", "Z"},
                                                                        {"uppercaseletter", "Lu"},
                                                                        {"lowercaseletter", "Ll"},
                                                                        {"titlecaseletter", "Lt"},
                                                                        {"modifierletter", "Lm"},
                                                                        {"otherletter", "Lo"},
                                                                        {"decimalnumber", "Nd"},
                                                                        {"digit", "Nd"}};

// Reads the pattern from left to right and writes the translation.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> run() {
    while (!at_end()) {
      if (absl::Status status = element(); !status.ok()) return status;
      if (out_.size() > kMaxTranslation) return error(fmt::format("more than {} bytes of classes", kMaxTranslation));
    }
    if (!groups_.empty()) return error("a group that is never closed");
    return std::move(out_);
  }

 private:
  struct Flags {
    bool ignore_case = false, dot_all = false;
  };
  struct Group {
    size_t out_start;
    Flags outer;
    bool repeatable;
  };

  bool at_end() const { return pos_ == in_.size(); }
  char peek(size_t ahead = 0) const { return pos_ + ahead < in_.size() ? in_[pos_ + ahead] : '\0'; }
  bool looking_at(std::string_view text) const { return in_.substr(pos_).starts_with(text); }
  bool accept(std::string_view text) {
    if (!looking_at(text)) return false;
    pos_ += text.size();
    return true;
  }
  char32_t next_char() {
    const Utf8Step step = utf8_step(in_.substr(pos_));
    pos_ += step.length;
    return step.code_point;
  }
  absl::Status error(std::string_view what) const {
    return absl::InvalidArgumentError(fmt::format("regex '{}': {} before byte {}", in_.substr(0, 400), what, pos_));
  }

  void atom(std::string_view text) {
    atom_start_ = out_.size();
    out_ += text;
    last_literal_ = 0;
  }
  void not_an_atom(std::string_view text) {
    atom_start_.reset();
    out_ += text;
    last_literal_ = 0;
  }

  absl::Status element();
  absl::Status open_group();
  absl::Status close_group();
  absl::Status option_group();
  absl::Status quantifier(char32_t c);
  absl::Status interval();
  absl::Status literal(char32_t c);
  absl::Status escape();
  absl::Status bracket();
  absl::Status class_escape(std::string& items, std::optional<char32_t>& single);
  absl::StatusOr<std::pair<std::string, bool>> property();
  absl::StatusOr<char32_t> escaped_char(char32_t c);

  std::string_view in_;
  size_t pos_ = 0;
  std::string out_;
  Flags flags_;
  std::vector<Group> groups_;
  std::optional<size_t> atom_start_;  // where in out_ the thing a quantifier would repeat begins
  bool branch_start_ = true;          // at the start of the pattern or of a group, where (?i) means the same to both
  char32_t last_literal_ = 0;
};

absl::Status Translator::element() {
  const bool branch_start = branch_start_;
  if (looking_at("(")) {
    branch_start_ = branch_start;
    return open_group();
  }
  branch_start_ = false;
  if (looking_at("[")) return bracket();
  const char32_t c = next_char();
  switch (c) {
    case '\\':
      return escape();
    case ')':
      return close_group();
    case '|':
      not_an_atom("|");
      return absl::OkStatus();
    case '.':
      atom(flags_.dot_all ? "(?s:.)" : "[^\\n]");
      return absl::OkStatus();
    case '^':  // Ruby: at every line
      not_an_atom("(?m:^)");
      return absl::OkStatus();
    case '$':
      not_an_atom("(?m:$)");
      return absl::OkStatus();
    case '*':
    case '+':
    case '?':
      return quantifier(c);
    case '{':
      return interval();
    default:
      return literal(c);
  }
}

absl::Status Translator::open_group() {
  if (groups_.size() >= kMaxGroups) return error(fmt::format("more than {} nested groups", kMaxGroups));
  const Group group{out_.size(), flags_, true};
  const auto open = [&](std::string_view text, bool repeatable) {
    groups_.push_back({group.out_start, group.outer, repeatable});
    not_an_atom(text);
    branch_start_ = true;
    return absl::OkStatus();
  };
  if (!looking_at("(?")) {
    ++pos_;
    return open("(?:", true);  // a capture that nothing refers to
  }
  if (accept("(?:")) return open("(?:", true);
  if (accept("(?>")) return open("(?>", true);
  if (accept("(?=")) return open("(?=", false);
  if (accept("(?!")) return open("(?!", false);
  if (accept("(?<=")) return open("(?<=", false);
  if (accept("(?<!")) return open("(?<!", false);
  pos_ += 2;
  return option_group();
}

// After "(?": i and m, on and off, then ':' or ')'.
absl::Status Translator::option_group() {
  const size_t out_start = out_.size();
  const Flags outer = flags_;
  Flags flags = flags_;
  bool on = true;
  for (;; ++pos_) {
    const char c = peek();
    if (c == 'i') {
      flags.ignore_case = on;
    } else if (c == 'm') {
      flags.dot_all = on;
    } else if (c == '-' && on) {
      on = false;
    } else {
      break;
    }
  }
  const std::string_view open = flags.ignore_case ? "(?i:" : "(?-i:";
  if (accept(":")) {
    groups_.push_back({out_start, outer, true});
    flags_ = flags;
    not_an_atom(open);
    branch_start_ = true;
    return absl::OkStatus();
  }
  if (accept(")")) {
    if (!branch_start_) return error("an option such as (?i) that does not stand at the start of its group");
    flags_ = flags;
    not_an_atom(flags.ignore_case ? "(?i)" : "(?-i)");
    branch_start_ = true;
    return absl::OkStatus();
  }
  return error(fmt::format("the group '(?{}', where (?: (?i: (?m: (?= (?! (?<= (?<! (?> are read", peek()));
}

absl::Status Translator::close_group() {
  if (groups_.empty()) return error("')' without '('");
  const Group group = groups_.back();
  groups_.pop_back();
  flags_ = group.outer;
  not_an_atom(")");
  if (group.repeatable) atom_start_ = group.out_start;
  return absl::OkStatus();
}

absl::Status Translator::quantifier(char32_t c) {
  if (!atom_start_) return error(fmt::format("'{}' with nothing to repeat", static_cast<char>(c)));
  std::string text(1, static_cast<char>(c));
  if (accept("?")) {
    text += '?';
  } else if (accept("+")) {
    text += '+';
  }
  not_an_atom(text);
  return absl::OkStatus();
}

// After '{': an interval, or the brace itself.
absl::Status Translator::interval() {
  size_t end = pos_;
  const auto number = [&]() -> std::optional<unsigned> {
    std::optional<unsigned> value;
    while (end < in_.size() && is_digit(static_cast<unsigned char>(in_[end]))) {
      value = std::min(value.value_or(0) * 10 + static_cast<unsigned>(in_[end++] - '0'), 1000000u);
    }
    return value;
  };
  const std::optional<unsigned> low = number();
  std::optional<unsigned> high = low;
  bool comma = false;
  if (end < in_.size() && in_[end] == ',') {
    comma = true;
    ++end;
    high = number();
  }
  if (end >= in_.size() || in_[end] != '}' || (!low && !high)) return literal('{');
  pos_ = end + 1;
  if (!atom_start_) return error("'{' with nothing to repeat");
  const unsigned from = low.value_or(0);
  if (from > kMaxRepeat || (high && (*high > kMaxRepeat || *high < from))) {
    return error(fmt::format("a repeat count that is not between 0 and {} in rising order", kMaxRepeat));
  }
  const size_t start = *atom_start_;
  std::string text = !comma ? fmt::format("{{{}}}", from)
                     : high ? fmt::format("{{{},{}}}", from, *high)
                            : fmt::format("{{{},}}", from);
  // Ruby has no possessive interval: {1,3}+ repeats the repeat. And {2}? is an optional {2}.
  const bool again = looking_at("+") || (!comma && looking_at("?"));
  if (!again && accept("?")) text += '?';
  not_an_atom(text);
  if (again) {
    out_ = fmt::format("{}(?:{})", out_.substr(0, start), out_.substr(start));
    atom_start_ = start;
  }
  return absl::OkStatus();
}

absl::Status Translator::literal(char32_t c) {
  if (flags_.ignore_case) {
    if (c >= 0x80) return error("a character beyond ASCII where case is ignored");
    // Oniguruma also matches one character that folds to two: "ss" takes U+00DF, "st" U+FB05, "ff" "fi" "fl" the
    // ligatures.
    const char32_t before = last_literal_ | 0x20, now = c | 0x20;
    if (is_letter(c) && ((before == 's' && (now == 's' || now == 't')) ||
                         (before == 'f' && (now == 'f' || now == 'i' || now == 'l')))) {
      return error("two letters that case folding joins (ss, st, ff, fi, fl) where case is ignored");
    }
  }
  atom(code(c));
  last_literal_ = c;
  return absl::OkStatus();
}

// After "\p" or "\P" less the negation of the letter: the class items, and whether '^' negates them.
absl::StatusOr<std::pair<std::string, bool>> Translator::property() {
  if (!accept("{")) return error("\\p without '{'");
  const bool negated = accept("^");
  const size_t end = in_.find('}', pos_);
  if (end == std::string_view::npos || end - pos_ > 40) return error("\\p{ without '}'");
  const std::string_view name = in_.substr(pos_, end - pos_);
  pos_ = end + 1;
  std::string folded;
  for (const char c : name) {
    if (c == ' ' || c == '_' || c == '-') continue;
    folded += c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
  }
  for (const auto& [long_name, short_name] : kLongNames) {
    if (folded == long_name) folded = short_name;
  }
  std::string items;
  if (folded.size() == 1 || folded.size() == 2) {
    folded[0] = static_cast<char>(folded[0] & ~0x20);
    // C and Cn hold what a Unicode version has not assigned yet, so no two libraries agree on them.
    if (folded != "C") items = category_items(folded);
  } else {
    for (const NamedRanges& script : kScripts) {
      if (script.name == folded) items = range_items(script.ranges);
    }
  }
  if (items.empty()) {
    return error(
        fmt::format("the property '{}'; general categories other than C and Cn, and the scripts Han, Hiragana, "
                    "Katakana, Hangul, Bopomofo, Latin, Greek, Cyrillic, Arabic, Hebrew, Devanagari and Thai are "
                    "read",
                    name));
  }
  if (flags_.ignore_case) return error("a property where case is ignored");
  return std::pair(items, negated);
}

// The character that an escape of one character names; `c` follows the backslash.
absl::StatusOr<char32_t> Translator::escaped_char(char32_t c) {
  const auto hex = [&](size_t most) -> std::optional<char32_t> {
    char32_t value = 0;
    size_t digits = 0;
    for (; digits < most; ++digits, ++pos_) {
      const char d = peek();
      if (d >= '0' && d <= '9') {
        value = value * 16 + static_cast<char32_t>(d - '0');
      } else if ((d | 0x20) >= 'a' && (d | 0x20) <= 'f') {
        value = value * 16 + static_cast<char32_t>((d | 0x20) - 'a' + 10);
      } else {
        break;
      }
    }
    if (digits == 0 || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) return std::nullopt;
    return value;
  };
  switch (c) {
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    case 'f':
      return '\f';
    case 'v':
      return '\v';
    case 'a':
      return '\a';
    case 'e':
      return 0x1B;
    case 'x': {
      const bool braces = accept("{");
      const std::optional<char32_t> value = hex(braces ? 6 : 2);
      if (!value || (braces && !accept("}"))) return error("a broken \\x escape");
      if (!braces && *value >= 0x80) return error("\\x80 or above, which names a byte and not a character");
      return *value;
    }
    case 'u': {
      const size_t start = pos_;
      const std::optional<char32_t> value = hex(4);
      if (!value || pos_ - start != 4) return error("a broken \\u escape");
      return *value;
    }
    default:
      if (is_letter(c) || is_digit(c)) return error(fmt::format("the escape '\\{}'", static_cast<char>(c)));
      return c;
  }
}

absl::Status Translator::escape() {
  if (at_end()) return error("a backslash at the end");
  const char32_t c = next_char();
  const auto set = [&](const std::string& items, bool negated) {
    atom(fmt::format("[{}{}]", negated ? "^" : "", items));
    return absl::OkStatus();
  };
  switch (c) {
    case 's':
    case 'S':
      return set(range_items(kSpaces), c == 'S');
    case 'd':
    case 'D':
      return set(category_items("Nd"), c == 'D');
    case 'w':
    case 'W':
      if (flags_.ignore_case) return error("\\w where case is ignored");
      return set(word_items(), c == 'W');
    case 'h':
      return set("0-9a-fA-F", false);
    case 'p':
    case 'P': {
      absl::StatusOr<std::pair<std::string, bool>> found = property();
      if (!found.ok()) return found.status();
      return set(found->first, found->second != (c == 'P'));
    }
    case 'b':
    case 'B': {
      const std::string w = fmt::format("[{}]", word_items());
      not_an_atom(c == 'b' ? fmt::format("(?:(?<={0})(?!{0})|(?<!{0})(?={0}))", w)
                           : fmt::format("(?:(?<={0})(?={0})|(?<!{0})(?!{0}))", w));
      return absl::OkStatus();
    }
    case 'A':
    case 'z':
      not_an_atom(c == 'A' ? "\\A" : "\\z");
      return absl::OkStatus();
    case 'Z':
      not_an_atom("(?=\\n?\\z)");
      return absl::OkStatus();
    default: {
      absl::StatusOr<char32_t> single = escaped_char(c);
      if (!single.ok()) return single.status();
      return literal(*single);
    }
  }
}

// After a backslash inside [..]: class items, or one character.
absl::Status Translator::class_escape(std::string& items, std::optional<char32_t>& single) {
  if (at_end()) return error("a class that is never closed");
  const char32_t c = next_char();
  switch (c) {
    case 's':
      items += range_items(kSpaces);
      return absl::OkStatus();
    case 'S':
      if (flags_.ignore_case) return error("\\S in a class where case is ignored");
      items += complement_items(kSpaces);
      return absl::OkStatus();
    case 'd':
      items += category_items("Nd");
      return absl::OkStatus();
    case 'w':
      if (flags_.ignore_case) return error("\\w where case is ignored");
      items += word_items();
      return absl::OkStatus();
    case 'h':
      items += "0-9a-fA-F";
      return absl::OkStatus();
    case 'p':
    case 'P': {
      absl::StatusOr<std::pair<std::string, bool>> found = property();
      if (!found.ok()) return found.status();
      if (found->second != (c == 'P')) return error("a negated property inside a class");
      items += found->first;
      return absl::OkStatus();
    }
    case 'D':
    case 'W':
      return error(fmt::format("\\{} inside a class", static_cast<char>(c)));
    default: {
      absl::StatusOr<char32_t> value = escaped_char(c);
      if (!value.ok()) return value.status();
      single = *value;
      return absl::OkStatus();
    }
  }
}

absl::Status Translator::bracket() {
  ++pos_;
  const bool negated = accept("^");
  std::string items;
  bool first = true;
  for (;; first = false) {
    if (at_end()) return error("a class that is never closed");
    if (!first && accept("]")) break;
    if (looking_at("[")) return error("'[' inside a class ([:name:] or a class in a class; \\[ names the character)");
    if (items.size() > kMaxTranslation) return error(fmt::format("more than {} bytes of classes", kMaxTranslation));
    if (looking_at("&&")) return error("'&&' inside a class");
    std::optional<char32_t> from;
    const char32_t c = next_char();
    if (c == '\\') {
      if (absl::Status status = class_escape(items, from); !status.ok()) return status;
    } else {
      from = c;
    }
    if (!from) continue;
    std::optional<char32_t> to = from;
    if (peek() == '-' && peek(1) != ']' && pos_ + 1 < in_.size()) {
      ++pos_;
      if (looking_at("[")) return error("'[' as the end of a range");
      const char32_t end = next_char();
      to = end;
      if (end == '\\') {
        to.reset();
        if (absl::Status status = class_escape(items, to); !status.ok()) return status;
      }
      if (!to || *to < *from) return error("a range whose end is not a character at or after its start");
    }
    if (flags_.ignore_case && *to >= 0x80) return error("a character beyond ASCII where case is ignored");
    const CodeRange range{*from, *to};
    items += range_items({&range, 1});
  }
  atom(fmt::format("[{}{}]", negated ? "^" : "", items));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> translate_pattern(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        fmt::format("the regex has {} bytes, the limit is {}", pattern.size(), kMaxPatternBytes));
  }
  if (!is_valid_utf8(pattern)) return absl::InvalidArgumentError("the regex is not UTF-8");
  return Translator(pattern).run();
}

std::string literal_pattern(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text.substr(i));
    out += code(step.code_point);
    i += step.length;
  }
  return out;
}

std::string numeric_pattern() { return fmt::format("[{}{}]", category_items("N"), range_items(kNumericExtra)); }

std::string word_pattern() {
  // Alphabetic, M, Nd, Pc and Join_Control; Oniguruma's has the superscripts of Latin-1 and not the joiners.
  std::string extra;
  for (const CodeRange& r : kWordExtra) {
    if (r.first > 0xFF) extra += range_items({&r, 1});
  }
  return fmt::format("[{}{}{}{}{}{}\\x{{200c}}-\\x{{200d}}]", category_items("L"), category_items("M"),
                     category_items("Nd"), category_items("Nl"), category_items("Pc"), extra);
}

}  // namespace tensorfold
