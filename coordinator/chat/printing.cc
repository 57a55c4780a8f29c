#include <algorithm>
#include <charconv>
#include <cmath>

#include "coordinator/chat/operators.h"
#include "coordinator/chat/unicode.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

void append_hex_escape(std::string* out, uint32_t unit) { out->append(fmt::format("\\u{:04x}", unit)); }

// The body of a JSON string.
void append_json_escaped(std::string_view s, bool ensure_ascii, std::string* out) {
  for (size_t pos = 0; pos < s.size();) {
    const size_t begin = pos;
    const char32_t c = next_code_point(s, &pos);
    static constexpr std::string_view kFrom = "\"\\\n\r\t\f\b";
    static constexpr std::string_view kTo = "\"\\nrtfb";
    const size_t k = c < 0x80 ? kFrom.find(static_cast<char>(c)) : std::string_view::npos;
    if (k != std::string_view::npos) {
      out->push_back('\\');
      out->push_back(kTo[k]);
    } else if (c < 0x20 || (ensure_ascii && c >= 0x7F && c < 0x10000)) {
      append_hex_escape(out, c);
    } else if (ensure_ascii && c >= 0x10000) {
      append_hex_escape(out, 0xD800 + ((c - 0x10000) >> 10));
      append_hex_escape(out, 0xDC00 + ((c - 0x10000) & 0x3FF));
    } else {
      out->append(s.substr(begin, pos - begin));
    }
  }
}

void append_html_escaped(const Text& text, Text* out) {
  text.for_each_run([&](std::string_view piece, bool trusted) {
    std::string escaped;
    for (const char c : piece) {
      static constexpr std::string_view kFrom = "&<>'\"";
      static constexpr std::string_view kTo[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
      const size_t k = kFrom.find(c);
      k == std::string_view::npos ? escaped.push_back(c) : static_cast<void>(escaped.append(kTo[k]));
    }
    out->append(escaped, trusted);
  });
}

bool is_printable(char32_t c) {
  if (c < 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0xAD) return false;
  if (is_python_space(c)) return c == ' ';
  return !(c >= 0x200B && c <= 0x200F) && !(c >= 0x202A && c <= 0x202E) && !(c >= 0x2060 && c <= 0x206F) &&
         !(c >= 0xE000 && c <= 0xF8FF) && c != 0xFEFF && !(c >= 0xFFF0 && c <= 0xFFFB) && c < 0xE0000;
}

void append_repr_escaped(std::string_view s, char quote, std::string* out) {
  for (size_t pos = 0; pos < s.size();) {
    const size_t begin = pos;
    const char32_t c = next_code_point(s, &pos);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out->push_back('\\');
      out->push_back(static_cast<char>(c));
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out->append(c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t");
    } else if (is_printable(c)) {
      out->append(s.substr(begin, pos - begin));
    } else if (c < 0x100) {
      out->append(fmt::format("\\x{:02x}", static_cast<uint32_t>(c)));
    } else if (c < 0x10000) {
      append_hex_escape(out, c);
    } else {
      out->append(fmt::format("\\U{:08x}", static_cast<uint32_t>(c)));
    }
  }
}

void append_repr(Runtime& rt, const Value& v, Text* out);

void append_repr_text(const Text& text, Text* out) {
  const std::string& bytes = text.bytes();
  const bool has_single = bytes.find('\'') != std::string::npos;
  const char quote = has_single && bytes.find('"') == std::string::npos ? '"' : '\'';
  out->append(std::string_view(&quote, 1), text.all_trusted());
  text.for_each_run([&](std::string_view piece, bool trusted) {
    std::string escaped;
    append_repr_escaped(piece, quote, &escaped);
    out->append(escaped, trusted);
  });
  out->append(std::string_view(&quote, 1), text.all_trusted());
}

void append_repr_items(Runtime& rt, const Value& v, std::string_view open, std::string_view close, Text* out) {
  out->append(open, v.trusted());
  bool first = true;
  for (const Value& item : v.sequence().items) {
    if (!rt.fits(out->footprint())) return;
    if (!first) out->append(", ", v.trusted());
    first = false;
    append_repr(rt, item, out);
  }
  out->append(close, v.trusted());
}

void append_repr_dict(Runtime& rt, const Value& v, Text* out) {
  out->append("{", v.trusted());
  bool first = true;
  for (const auto& [key, value] : v.dict().items) {
    if (!rt.fits(out->footprint())) return;
    if (!first) out->append(", ", v.trusted());
    first = false;
    append_repr(rt, key, out);
    out->append(": ", v.trusted());
    append_repr(rt, value, out);
  }
  out->append("}", v.trusted());
}

void append_repr(Runtime& rt, const Value& v, Text* out) {
  const DepthGuard guard(rt);
  if (!guard.ok() || !rt.step()) return;
  if (v.is_text()) {
    append_repr_text(v.text(), out);
  } else if (v.is_undefined()) {
    out->append("Undefined", true);
  } else {
    append_str(rt, v, out);
  }
}

struct JsonWriter {
  Runtime& rt;
  const JsonStyle& style;
  Text* out;

  // Text of the style between the parts of a container: it is as trusted as the container that calls for it.
  void punctuation(const Text& text, bool trusted) {
    if (trusted) {
      out->append(text);
    } else {
      out->append(text.bytes(), false);
    }
  }

  void line(int depth, bool trusted) {
    if (!style.indented) return;
    out->append("\n", trusted);
    for (int i = 0; i < depth; ++i) punctuation(style.indent, trusted);
  }

  void string(const Text& text) {
    out->append("\"", text.all_trusted());
    text.for_each_run([&](std::string_view piece, bool trusted) {
      std::string escaped;
      append_json_escaped(piece, style.ensure_ascii, &escaped);
      out->append(escaped, trusted);
    });
    out->append("\"", text.all_trusted());
  }

  void scalar(const Value& v) {
    if (v.is_none()) {
      out->append("null", v.trusted());
    } else if (v.is(Kind::kBool)) {
      out->append(v.as_bool() ? "true" : "false", v.trusted());
    } else if (v.is(Kind::kInt)) {
      out->append(int_text(v.as_int()), v.trusted());
    } else {
      const double f = v.as_double();
      out->append(std::isnan(f)   ? "NaN"
                  : std::isinf(f) ? (f < 0 ? "-Infinity" : "Infinity")
                                  : python_float(f),
                  v.trusted());
    }
  }

  void key(const Value& v, bool trusted) {
    if (v.is_text()) return string(v.text());
    out->append("\"", trusted);
    if (v.is_none() || v.is_number()) {
      scalar(v);
    } else {
      rt.fail(fmt::format("a '{}' is no JSON key", type_name(v)));
    }
    out->append("\"", trusted);
  }

  void array(const Value& v, int depth) {
    const std::vector<Value>& items = v.sequence().items;
    if (items.empty()) return out->append("[]", v.trusted());
    out->append("[", v.trusted());
    for (size_t i = 0; i < items.size() && rt.fits(out->footprint()); ++i) {
      if (i != 0) punctuation(style.item_separator, v.trusted());
      line(depth + 1, v.trusted());
      write(items[i], depth + 1);
    }
    line(depth, v.trusted());
    out->append("]", v.trusted());
  }

  // The items in the order that they are written; empty after an error.
  std::vector<const std::pair<Value, Value>*> ordered(const DictObject& dict) {
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    if (!style.sort_keys) return items;
    if (!std::all_of(items.begin(), items.end(), [](const auto* item) { return item->first.is_text(); })) {
      rt.fail("tojson(sort_keys) needs strings as keys");
      return {};
    }
    std::sort(items.begin(), items.end(),
              [](const auto* a, const auto* b) { return a->first.bytes() < b->first.bytes(); });
    return items;
  }

  void object(const Value& v, int depth) {
    if (v.dict().items.empty()) return out->append("{}", v.trusted());
    const auto items = ordered(v.dict());
    out->append("{", v.trusted());
    for (size_t i = 0; i < items.size() && rt.fits(out->footprint()); ++i) {
      if (i != 0) punctuation(style.item_separator, v.trusted());
      line(depth + 1, v.trusted());
      key(items[i]->first, v.trusted());
      punctuation(style.key_separator, v.trusted());
      write(items[i]->second, depth + 1);
    }
    line(depth, v.trusted());
    out->append("}", v.trusted());
  }

  void write(const Value& v, int depth) {
    const DepthGuard guard(rt);
    if (!guard.ok() || !rt.step()) return;
    if (v.is_text()) return string(v.text());
    if (v.is_none() || v.is_number()) return scalar(v);
    if (v.is(Kind::kDict)) return object(v, depth);
    if (v.is_sequence(SequenceKind::kList) || v.is_sequence(SequenceKind::kTuple)) return array(v, depth);
    rt.fail(v.is_undefined() ? fmt::format("tojson of an undefined value: {}", v.undefined_message())
                             : fmt::format("a '{}' cannot be written as JSON", type_name(v)));
  }
};

}  // namespace

std::string int_text(TemplateInt i) {
  if (i == 0) return "0";
  std::string digits;
  for (TemplateInt rest = i; rest != 0; rest /= 10) {
    const auto digit = static_cast<int>(rest % 10);
    digits.push_back(static_cast<char>('0' + (digit < 0 ? -digit : digit)));
  }
  if (i < 0) digits.push_back('-');
  std::reverse(digits.begin(), digits.end());
  return digits;
}

// repr(float): the shortest digits that read back as the same number, without exponent between 1e-4 and 1e16.
std::string python_float(double f) {
  if (std::isnan(f)) return "nan";
  if (std::isinf(f)) return f < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), f, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t e = text.find('e');
  int exponent = 0;
  std::from_chars(text.data() + e + (text[e + 1] == '+' ? 2 : 1), text.data() + text.size(), exponent);
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits.push_back(c);
  }
  std::string out;
  if (text[0] == '-') out.push_back('-');
  const auto count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out.push_back(digits[0]);
    if (count > 1) out.append(".").append(digits, 1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) {
    out.append("0.").append(static_cast<size_t>(-exponent - 1), '0').append(digits);
  } else if (count <= exponent + 1) {
    out.append(digits).append(static_cast<size_t>(exponent + 1 - count), '0').append(".0");
  } else {
    const auto whole = static_cast<size_t>(exponent) + 1;
    out.append(digits, 0, whole).append(".").append(digits, whole);
  }
  return out;
}

std::string json_quote(std::string_view utf8) {
  std::string out;
  out.push_back('"');
  append_json_escaped(utf8, false, &out);
  out.push_back('"');
  return out;
}

void append_str(Runtime& rt, const Value& v, Text* out) {
  if (rt.failed()) return;
  switch (v.kind()) {
    case Kind::kText:
      return out->append(v.text());
    case Kind::kNone:
      return out->append("None", v.trusted());
    case Kind::kBool:
      return out->append(v.as_bool() ? "True" : "False", v.trusted());
    case Kind::kInt:
      return out->append(int_text(v.as_int()), v.trusted());
    case Kind::kFloat:
      return out->append(python_float(v.as_double()), v.trusted());
    case Kind::kSequence:
      if (v.is_sequence(SequenceKind::kList)) return append_repr_items(rt, v, "[", "]", out);
      if (v.is_sequence(SequenceKind::kTuple)) {
        return append_repr_items(rt, v, "(", v.sequence().items.size() == 1 ? ",)" : ")", out);
      }
      break;
    case Kind::kDict:
      return append_repr_dict(rt, v, out);
    case Kind::kUndefined:
      return;
    default:
      break;
  }
  rt.fail(fmt::format("a '{}' cannot be printed", type_name(v)));
}

Text to_str(Runtime& rt, const Value& v) {
  Text out;
  append_str(rt, v, &out);
  return out;
}

Value join_values(Runtime& rt, const std::vector<Value>& values) {
  Text out;
  for (const Value& v : values) {
    if (!rt.fits(out.footprint() + (v.is_text() ? v.text().footprint() : 0))) return {};
    append_str(rt, v, &out);
  }
  return rt.failed() ? Value() : rt.text(std::move(out));
}

Value add_texts(Runtime& rt, const Value& a, const Value& b) {
  const bool markup = a.is_markup() || b.is_markup();
  if (!rt.fits(a.text().footprint() + b.text().footprint())) return {};
  Text out;
  for (const Value* v : {&a, &b}) {
    if (markup && !v->is_markup()) {
      append_html_escaped(v->text(), &out);
    } else {
      out.append(v->text());
    }
  }
  return rt.text(std::move(out), markup);
}

void append_json(Runtime& rt, const Value& v, const JsonStyle& style, Text* out) {
  JsonWriter{rt, style, out}.write(v, 0);
}

}  // namespace tensorfold
