#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/chat/ast.h"
#include "coordinator/chat/evaluator.h"
#include "coordinator/chat/operators.h"

namespace tensorfold {

// Calls of filters and methods, and the string operations that both share. Errors go to `rt`.

// Binds arguments to parameters: afterwards args->positional has one value (or Value::absent()) for each parameter.
bool bind_arguments(Runtime& rt, std::string_view what, const std::vector<std::string_view>& params, Arguments* args);
Value call_filter(Runtime& rt, const FilterDef& filter, const Value& input, Arguments args);
// object.name(args), for the methods of strings, dicts and lists.
Value call_method(Runtime& rt, const Value& object, std::string_view name, Arguments args);

// range(), dict(), namespace(), raise_exception() and strftime_now().
Value call_function(Runtime& rt, Function function, Arguments args, const TemplateClock& clock);

// Sets a key of a dict in the making: one that is there keeps its place and gets the new value.
void put_key(Runtime& rt, std::vector<std::pair<Value, Value>>* items, Value key, Value value);
void set_namespace_attribute(Runtime& rt, Namespace* ns, const std::string& name, Value value);

// The (key, value) tuples of a dict.
Value dict_items(Runtime& rt, const Value& dict, SequenceKind kind);

// str.strip and its halves; `chars` absent or none strips whitespace.
Text strip_text(Runtime& rt, const Text& text, const Value& chars, bool left, bool right);
// str.replace; `count` absent or negative replaces all.
Value replace_text(Runtime& rt, const Text& text, const Text& from, const Text& to, const Value& count);
// str.split with a separator, at most `limit` cuts (all if negative).
std::vector<Text> split_text(const Text& text, std::string_view separator, int64_t limit);
std::vector<Text> split_lines(const Text& text, bool keep_ends);
// separator.join(map(str, map(key, items)))
Text join_text(Runtime& rt, const Text& separator, const std::vector<Value>& items,
               const std::function<Value(const Value&)>& key);

enum class CaseMap { kUpper, kLower, kCapitalize, kTitleFilter, kTitleMethod };
Text map_case(const Text& text, CaseMap map);

}  // namespace tensorfold
