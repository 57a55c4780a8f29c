#include <algorithm>
#include <iterator>
#include <map>

#include "coordinator/chat/calls.h"
#include "coordinator/chat/unicode.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

using MethodFn = Value (*)(Runtime& rt, const Value& self, Arguments& args);

struct Method {
  MethodFn apply;
  std::vector<std::string_view> params;
  bool variadic = false;
};

// A string argument, or null after an error.
const Text* need_text(Runtime& rt, const Value& v, std::string_view what) {
  if (v.is_text()) return &v.text();
  rt.fail(v.is_undefined() && !v.is_absent() ? v.undefined_message() : fmt::format("{} must be a string", what));
  return nullptr;
}

Value list_of(Runtime& rt, const std::vector<Text>& parts) {
  std::vector<Value> items;
  for (const Text& part : parts) {
    items.push_back(rt.text(part));
    if (rt.failed()) return {};
  }
  return rt.sequence(std::move(items));
}

// str.split() without separator: runs of whitespace part, none at the ends.
std::vector<Text> split_whitespace(const Text& text, int64_t limit) {
  std::vector<Text> parts;
  const std::string_view bytes = text.bytes();
  size_t pos = bytes.size() - strip_left(bytes).size();
  while (pos < bytes.size()) {
    if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
      parts.push_back(text.sub(pos, bytes.size()));
      break;
    }
    size_t end = pos;
    while (end < bytes.size()) {
      size_t next = end;
      if (is_python_space(next_code_point(bytes, &next))) break;
      end = next;
    }
    parts.push_back(text.sub(pos, end));
    pos = bytes.size() - strip_left(bytes.substr(end)).size();
  }
  return parts;
}

std::vector<Text> split_whitespace_right(const Text& text, int64_t limit) {
  std::vector<Text> parts;
  const std::string_view bytes = text.bytes();
  size_t end = strip_right(bytes).size();
  while (end > 0) {
    if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
      parts.push_back(text.sub(0, end));
      break;
    }
    size_t begin = end;
    while (begin > 0) {
      const size_t previous = previous_boundary(bytes, begin);
      size_t pos = previous;
      if (is_python_space(next_code_point(bytes, &pos))) break;
      begin = previous;
    }
    parts.push_back(text.sub(begin, end));
    end = strip_right(bytes.substr(0, begin)).size();
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<Text> split_text_right(const Text& text, std::string_view separator, int64_t limit) {
  std::vector<Text> parts;
  const std::string& bytes = text.bytes();
  size_t end = bytes.size();
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t at = end < separator.size() ? std::string::npos : bytes.rfind(separator, end - separator.size());
    if (at == std::string::npos) break;
    parts.push_back(text.sub(at + separator.size(), end));
    end = at;
  }
  parts.push_back(text.sub(0, end));
  std::reverse(parts.begin(), parts.end());
  return parts;
}

Value split(Runtime& rt, const Value& self, const Arguments& args, bool from_right) {
  const int64_t limit = int_argument(rt, args.positional[1], -1, "maxsplit");
  const Value& separator = args.positional[0];
  if (!rt.step(static_cast<int64_t>(self.text().size() / 16))) return {};
  if (separator.is_absent() || separator.is_none()) {
    return list_of(rt, from_right ? split_whitespace_right(self.text(), limit) : split_whitespace(self.text(), limit));
  }
  const Text* by = need_text(rt, separator, "the separator of split");
  if (by == nullptr) return {};
  if (by->empty()) return rt.fail("the separator of split is empty");
  return list_of(
      rt, from_right ? split_text_right(self.text(), by->bytes(), limit) : split_text(self.text(), by->bytes(), limit));
}

Value text_split(Runtime& rt, const Value& self, Arguments& args) { return split(rt, self, args, false); }
Value text_rsplit(Runtime& rt, const Value& self, Arguments& args) { return split(rt, self, args, true); }
Value text_strip(Runtime& rt, const Value& self, Arguments& args) {
  return rt.text(strip_text(rt, self.text(), args.positional[0], true, true), self.is_markup());
}
Value text_lstrip(Runtime& rt, const Value& self, Arguments& args) {
  return rt.text(strip_text(rt, self.text(), args.positional[0], true, false), self.is_markup());
}
Value text_rstrip(Runtime& rt, const Value& self, Arguments& args) {
  return rt.text(strip_text(rt, self.text(), args.positional[0], false, true), self.is_markup());
}

Value affix(Runtime& rt, const Value& self, const Value& affixes, bool front) {
  const auto matches = [&](const Value& v) {
    const Text* text = need_text(rt, v, "the argument of startswith or endswith");
    if (text == nullptr) return false;
    return front ? self.bytes().starts_with(text->bytes()) : self.bytes().ends_with(text->bytes());
  };
  if (!affixes.is_sequence(SequenceKind::kTuple)) return Value::boolean(matches(affixes));
  const auto& items = affixes.sequence().items;
  return Value::boolean(std::any_of(items.begin(), items.end(), matches));
}
Value text_startswith(Runtime& rt, const Value& self, Arguments& args) {
  return affix(rt, self, args.positional[0], true);
}
Value text_endswith(Runtime& rt, const Value& self, Arguments& args) {
  return affix(rt, self, args.positional[0], false);
}

Value text_replace(Runtime& rt, const Value& self, Arguments& args) {
  const Text* from = need_text(rt, args.positional[0], "the first argument of replace");
  const Text* to = need_text(rt, args.positional[1], "the second argument of replace");
  return from != nullptr && to != nullptr ? replace_text(rt, self.text(), *from, *to, args.positional[2]) : Value();
}

Value text_upper(Runtime& rt, const Value& self, Arguments&) { return rt.text(map_case(self.text(), CaseMap::kUpper)); }
Value text_lower(Runtime& rt, const Value& self, Arguments&) { return rt.text(map_case(self.text(), CaseMap::kLower)); }
Value text_title(Runtime& rt, const Value& self, Arguments&) {
  return rt.text(map_case(self.text(), CaseMap::kTitleMethod));
}
Value text_capitalize(Runtime& rt, const Value& self, Arguments&) {
  return rt.text(map_case(self.text(), CaseMap::kCapitalize));
}

// Characters before byte `at`, or -1 for none.
Value character_index(const std::string& bytes, size_t at) {
  if (at == std::string::npos) return Value::integer(-1);
  return Value::integer(static_cast<int64_t>(count_code_points(std::string_view(bytes).substr(0, at))));
}

Value text_find(Runtime& rt, const Value& self, Arguments& args) {
  const Text* part = need_text(rt, args.positional[0], "the argument of find");
  if (part == nullptr || !rt.step(static_cast<int64_t>(self.text().size() / 64))) return {};
  return character_index(self.bytes(), self.bytes().find(part->bytes()));
}

Value text_rfind(Runtime& rt, const Value& self, Arguments& args) {
  const Text* part = need_text(rt, args.positional[0], "the argument of rfind");
  if (part == nullptr || !rt.step(static_cast<int64_t>(self.text().size() / 64))) return {};
  return character_index(self.bytes(), self.bytes().rfind(part->bytes()));
}

Value text_count(Runtime& rt, const Value& self, Arguments& args) {
  const Text* part = need_text(rt, args.positional[0], "the argument of count");
  if (part == nullptr || !rt.step(static_cast<int64_t>(self.text().size() / 16))) return {};
  if (part->empty()) return Value::integer(static_cast<int64_t>(count_code_points(self.bytes())) + 1);
  int64_t count = 0;
  for (size_t at = self.bytes().find(part->bytes()); at != std::string::npos;
       at = self.bytes().find(part->bytes(), at + part->size())) {
    ++count;
  }
  return Value::integer(count);
}

Value text_join(Runtime& rt, const Value& self, Arguments& args) {
  const auto sequence = iterate(rt, args.positional[0]);
  if (!sequence) return {};
  for (const Value& item : sequence->items) {
    if (need_text(rt, item, "each item that join joins") == nullptr) return {};
  }
  return rt.text(join_text(rt, self.text(), sequence->items, [](const Value& item) { return item; }));
}

Value text_splitlines(Runtime& rt, const Value& self, Arguments& args) {
  const bool keep = !args.positional[0].is_absent() && truthy(args.positional[0]);
  if (!rt.step(static_cast<int64_t>(self.text().size() / 16))) return {};
  return list_of(rt, split_lines(self.text(), keep));
}

Value text_removeprefix(Runtime& rt, const Value& self, Arguments& args) {
  const Text* prefix = need_text(rt, args.positional[0], "the argument of removeprefix");
  if (prefix == nullptr) return {};
  return rt.text(self.text().sub(self.bytes().starts_with(prefix->bytes()) ? prefix->size() : 0, self.text().size()));
}

Value text_removesuffix(Runtime& rt, const Value& self, Arguments& args) {
  const Text* suffix = need_text(rt, args.positional[0], "the argument of removesuffix");
  if (suffix == nullptr) return {};
  const bool cut = self.bytes().ends_with(suffix->bytes());
  return rt.text(self.text().sub(0, self.text().size() - (cut ? suffix->size() : 0)));
}

Value text_isdigit(Runtime&, const Value& self, Arguments&) {
  const std::string& s = self.bytes();
  return Value::boolean(!s.empty() && std::all_of(s.begin(), s.end(), [](char c) { return c >= '0' && c <= '9'; }));
}

// The argument that a replacement field "{}", "{2}" or "{name}" names; absent after an error.
Value format_field(Runtime& rt, std::string_view field, const Arguments& args, size_t* automatic) {
  size_t index = 0;
  const bool digits = std::all_of(field.begin(), field.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (digits && field.size() < 4) {
    if (field.empty()) index = (*automatic)++;
    for (const char c : field) index = index * 10 + static_cast<size_t>(c - '0');
    if (index < args.positional.size()) return args.positional[index];
  }
  for (const auto& [name, value] : args.keyword) {
    if (name == field) return value;
  }
  rt.fail(fmt::format("format has no argument for '{{{}}}', or its form is not supported", field));
  return Value::absent();
}

Value text_format(Runtime& rt, const Value& self, Arguments& args) {
  const Text& text = self.text();
  const std::string& bytes = text.bytes();
  Text out;
  size_t automatic = 0;
  for (size_t i = 0; i < bytes.size();) {
    const size_t brace = std::min(bytes.find_first_of("{}", i), bytes.size());
    out.append(text, i, brace);
    if (brace == bytes.size()) break;
    if (brace + 1 < bytes.size() && bytes[brace + 1] == bytes[brace]) {
      out.append(text, brace, brace + 1);
      i = brace + 2;
      continue;
    }
    const size_t close = bytes.find('}', brace);
    if (bytes[brace] == '}' || close == std::string::npos) return rt.fail("a brace in a format string has no partner");
    const Value v = format_field(rt, std::string_view(bytes).substr(brace + 1, close - brace - 1), args, &automatic);
    append_str(rt, v, &out);
    if (!rt.fits(out.footprint())) return {};
    i = close + 1;
  }
  return rt.text(std::move(out));
}

Value dict_get(Runtime& rt, const Value& self, Arguments& args) {
  if (!check_hashable(rt, args.positional[0])) return {};
  if (const Value* found = find_key(rt, self, args.positional[0])) return *found;
  return args.positional[1].is_absent() ? Value::none() : args.positional[1];
}

Value dict_items_method(Runtime& rt, const Value& self, Arguments&) {
  return dict_items(rt, self, SequenceKind::kView);
}

Value dict_keys(Runtime& rt, const Value& self, Arguments&) {
  std::vector<Value> out;
  for (const auto& item : self.dict().items) out.push_back(item.first);
  return rt.sequence(std::move(out), SequenceKind::kView).with_trust(self.trusted());
}

Value dict_values(Runtime& rt, const Value& self, Arguments&) {
  std::vector<Value> out;
  for (const auto& item : self.dict().items) out.push_back(item.second);
  return rt.sequence(std::move(out), SequenceKind::kView).with_trust(self.trusted());
}

Value copy(Runtime&, const Value& self, Arguments&) { return self; }  // values are immutable

Value list_count(Runtime& rt, const Value& self, Arguments& args) {
  const auto& items = self.sequence().items;
  return Value::integer(
      std::count_if(items.begin(), items.end(), [&](const Value& v) { return equal(rt, v, args.positional[0]); }));
}

Value list_index(Runtime& rt, const Value& self, Arguments& args) {
  const auto& items = self.sequence().items;
  const auto it =
      std::find_if(items.begin(), items.end(), [&](const Value& v) { return equal(rt, v, args.positional[0]); });
  return it == items.end() ? rt.fail("the item is not in the list") : Value::integer(it - items.begin());
}

using MethodTable = std::map<std::string_view, Method>;

const MethodTable& text_methods() {
  static const auto* const table = new MethodTable{
      {"capitalize", {text_capitalize, {}}},
      {"count", {text_count, {"sub"}}},
      {"endswith", {text_endswith, {"suffix"}}},
      {"find", {text_find, {"sub"}}},
      {"format", {text_format, {}, true}},
      {"isdigit", {text_isdigit, {}}},
      {"join", {text_join, {"iterable"}}},
      {"lower", {text_lower, {}}},
      {"lstrip", {text_lstrip, {"chars"}}},
      {"removeprefix", {text_removeprefix, {"prefix"}}},
      {"removesuffix", {text_removesuffix, {"suffix"}}},
      {"replace", {text_replace, {"old", "new", "count"}}},
      {"rfind", {text_rfind, {"sub"}}},
      {"rsplit", {text_rsplit, {"sep", "maxsplit"}}},
      {"rstrip", {text_rstrip, {"chars"}}},
      {"split", {text_split, {"sep", "maxsplit"}}},
      {"splitlines", {text_splitlines, {"keepends"}}},
      {"startswith", {text_startswith, {"prefix"}}},
      {"strip", {text_strip, {"chars"}}},
      {"title", {text_title, {}}},
      {"upper", {text_upper, {}}},
  };
  return *table;
}

const MethodTable& dict_methods() {
  static const auto* const table = new MethodTable{
      {"copy", {copy, {}}},      {"get", {dict_get, {"key", "default"}}}, {"items", {dict_items_method, {}}},
      {"keys", {dict_keys, {}}}, {"values", {dict_values, {}}},
  };
  return *table;
}

const MethodTable& list_methods() {
  static const auto* const table = new MethodTable{
      {"copy", {copy, {}}},
      {"count", {list_count, {"value"}}},
      {"index", {list_index, {"value"}}},
  };
  return *table;
}

bool is_line_end(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

}  // namespace

bool is_known_method(std::string_view name) {
  return text_methods().count(name) + dict_methods().count(name) + list_methods().count(name) > 0;
}

Value call_method(Runtime& rt, const Value& object, std::string_view name, Arguments args) {
  if (rt.failed()) return {};
  if (object.is_undefined()) return rt.fail(object.undefined_message());
  const MethodTable* table = nullptr;
  if (object.is_text()) table = &text_methods();
  if (object.is(Kind::kDict)) table = &dict_methods();
  if (object.is_sequence(SequenceKind::kList) || object.is_sequence(SequenceKind::kTuple)) table = &list_methods();
  const auto method = table == nullptr ? MethodTable::const_iterator() : table->find(name);
  if (table == nullptr || method == table->end()) {
    return rt.fail(fmt::format("'{}' has no method '{}'", type_name(object), name));
  }
  if (!method->second.variadic) {
    if (!bind_arguments(rt, name, method->second.params, &args)) return {};
    static constexpr std::string_view kOptional[] = {"default", "maxsplit", "sep", "chars", "count", "keepends"};
    for (size_t i = 0; i < args.positional.size(); ++i) {
      const std::string_view param = method->second.params[i];
      const bool optional = std::find(std::begin(kOptional), std::end(kOptional), param) != std::end(kOptional);
      if (args.positional[i].is_absent() && !optional)
        return rt.fail(fmt::format("'{}' needs the argument '{}'", name, param));
    }
  }
  Value result = method->second.apply(rt, object, args);
  return rt.failed() ? Value() : result;
}

Value dict_items(Runtime& rt, const Value& dict, SequenceKind kind) {
  std::vector<Value> out;
  for (const auto& [key, value] : dict.dict().items) {
    out.push_back(rt.sequence({key, value}, SequenceKind::kTuple).with_trust(dict.trusted()));
    if (rt.failed()) return {};
  }
  return rt.sequence(std::move(out), kind).with_trust(dict.trusted());
}

Text strip_text(Runtime& rt, const Text& text, const Value& chars, bool left, bool right) {
  const std::string_view bytes = text.bytes();
  if (chars.is_absent() || chars.is_none()) {
    const size_t begin = left ? bytes.size() - strip_left(bytes).size() : 0;
    const size_t end = right ? strip_right(bytes).size() : bytes.size();
    return begin < end ? text.sub(begin, end) : Text();
  }
  const Text* set = need_text(rt, chars, "the characters to strip");
  if (set == nullptr) return {};
  const auto strips = [&](size_t begin, size_t end) {
    const std::string_view c = bytes.substr(begin, end - begin);
    for (size_t pos = 0; pos < set->size();) {
      const size_t from = pos;
      next_code_point(set->bytes(), &pos);
      if (std::string_view(set->bytes()).substr(from, pos - from) == c) return true;
    }
    return false;
  };
  size_t begin = 0, end = bytes.size();
  while (left && begin < end && rt.step()) {
    size_t next = begin;
    next_code_point(bytes, &next);
    if (!strips(begin, next)) break;
    begin = next;
  }
  while (right && begin < end && rt.step()) {
    const size_t previous = previous_boundary(bytes, end);
    if (!strips(previous, end)) break;
    end = previous;
  }
  return text.sub(begin, end);
}

Value replace_text(Runtime& rt, const Text& text, const Text& from, const Text& to, const Value& count) {
  int64_t left = int_argument(rt, count, -1, "the count of replace");
  const std::string& bytes = text.bytes();
  Text out;
  size_t pos = 0;
  while (left != 0 && rt.fits(out.footprint())) {
    size_t at = from.empty() ? pos : bytes.find(from.bytes(), pos);
    if (at == std::string::npos) break;
    out.append(text, pos, at);
    out.append(to);
    --left;
    if (!from.empty()) {
      pos = at + from.size();
      continue;
    }
    // An empty pattern matches before every character and at the end.
    if (at == bytes.size()) return rt.text(std::move(out));
    next_code_point(bytes, &at);
    out.append(text, pos, at);
    pos = at;
  }
  out.append(text, pos, bytes.size());
  return rt.text(std::move(out));
}

std::vector<Text> split_text(const Text& text, std::string_view separator, int64_t limit) {
  std::vector<Text> parts;
  const std::string& bytes = text.bytes();
  size_t pos = 0;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t at = bytes.find(separator, pos);
    if (at == std::string::npos) break;
    parts.push_back(text.sub(pos, at));
    pos = at + separator.size();
  }
  parts.push_back(text.sub(pos, bytes.size()));
  return parts;
}

std::vector<Text> split_lines(const Text& text, bool keep_ends) {
  std::vector<Text> lines;
  const std::string& bytes = text.bytes();
  size_t begin = 0;
  for (size_t pos = 0; pos < bytes.size();) {
    const size_t end = pos;
    const char32_t c = next_code_point(bytes, &pos);
    if (!is_line_end(c)) continue;
    if (c == '\r' && pos < bytes.size() && bytes[pos] == '\n') ++pos;
    lines.push_back(text.sub(begin, keep_ends ? pos : end));
    begin = pos;
  }
  if (begin < bytes.size()) lines.push_back(text.sub(begin, bytes.size()));
  return lines;
}

Text join_text(Runtime& rt, const Text& separator, const std::vector<Value>& items,
               const std::function<Value(const Value&)>& key) {
  Text out;
  for (size_t i = 0; i < items.size() && rt.fits(out.footprint()) && rt.step(); ++i) {
    if (i != 0) out.append(separator);
    append_str(rt, key(items[i]), &out);
  }
  return out;
}

Text map_case(const Text& text, CaseMap map) {
  Text out;
  // The state runs on over changes of provenance: they do not part words.
  bool begins_word = true;
  text.for_each_run([&](std::string_view piece, bool trusted) {
    std::string mapped;
    for (size_t pos = 0; pos < piece.size();) {
      const char32_t c = next_code_point(piece, &pos);
      const bool upper = map == CaseMap::kUpper || (map != CaseMap::kLower && begins_word);
      upper ? append_upper(&mapped, c) : append_lower(&mapped, c);
      if (map == CaseMap::kCapitalize) {
        begins_word = false;
      } else if (map == CaseMap::kTitleMethod) {
        begins_word = !is_cased(c);
      } else {
        begins_word = is_python_space(c) ||
                      (c < 0x80 && std::string_view("-({[<").find(static_cast<char>(c)) != std::string_view::npos);
      }
    }
    out.append(mapped, trusted);
  });
  return out;
}

}  // namespace tensorfold
