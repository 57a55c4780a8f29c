#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "coordinator/chat/ast.h"
#include "coordinator/chat/value.h"

namespace tensorfold {

// Python's operators on template values, with jinja2's rules for undefined ones. Each reports errors through `rt` and
// returns an undefined value (or false) after one.

// "dict object", "int", … as jinja2's messages name a type.
std::string type_name(const Value& v);

bool truthy(const Value& v);
bool equal(Runtime& rt, const Value& a, const Value& b);
// a < b; an error for types that Python does not order.
bool less(Runtime& rt, const Value& a, const Value& b);
bool contains(Runtime& rt, const Value& container, const Value& item);
bool compare(Runtime& rt, Operator op, const Value& a, const Value& b);
Value binary(Runtime& rt, Operator op, const Value& a, const Value& b);
Value negate(Runtime& rt, const Value& v);

// obj.name: a method or attribute first, then the key.
Value get_attribute(Runtime& rt, const Value& object, std::string_view name);
// obj[key]: the item first, then a method of that name.
Value get_item(Runtime& rt, const Value& object, const Value& key);
// obj[start:stop:step]; absent parts are Value::absent().
Value slice(Runtime& rt, const Value& object, const Value& start, const Value& stop, const Value& step);
// The value of a key, or null. For dict values only.
const Value* find_key(Runtime& rt, const Value& dict, const Value& key);
// Whether a value can be a key of a dict; an error if not.
bool check_hashable(Runtime& rt, const Value& key);

// What iterating gives: items of a sequence, keys of a dict, characters of a string. Null after an error.
std::shared_ptr<const SequenceObject> iterate(Runtime& rt, const Value& v);
// len(v), or -1 after an error.
int64_t length(Runtime& rt, const Value& v);

// str(v), appended.
void append_str(Runtime& rt, const Value& v, Text* out);
Text to_str(Runtime& rt, const Value& v);

// The values as strings, joined: the operator ~, which ignores markup.
Value join_values(Runtime& rt, const std::vector<Value>& values);
// a + b for strings. If one of them is markup, the other is HTML-escaped and the sum is markup.
Value add_texts(Runtime& rt, const Value& a, const Value& b);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool indented = false;
  Text indent;
  Text item_separator = Text(", ", true);
  Text key_separator = Text(": ", true);
};
// json.dumps(v), appended. Strings keep their provenance; so do scalars.
void append_json(Runtime& rt, const Value& v, const JsonStyle& style, Text* out);
// A JSON string literal as json.dumps(ensure_ascii=False) writes it, with its quotes.
std::string json_quote(std::string_view utf8);
std::string python_float(double f);
std::string int_text(TemplateInt i);

// An integer argument; `fallback` if absent. Clamped to ±2^62.
int64_t int_argument(Runtime& rt, const Value& v, int64_t fallback, std::string_view what);

}  // namespace tensorfold
