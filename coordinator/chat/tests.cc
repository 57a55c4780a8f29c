#include <map>

#include "coordinator/chat/ast.h"
#include "coordinator/chat/operators.h"
#include "coordinator/chat/unicode.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

using Args = std::vector<Value>;

bool is_sequence(Runtime&, const Value& v, const Args&) {
  if (v.is(Kind::kSequence)) return v.sequence().kind <= SequenceKind::kRange;
  return v.is_text() || v.is(Kind::kDict);
}

bool is_iterable(Runtime&, const Value& v, const Args&) {
  return v.is(Kind::kSequence) || v.is_text() || v.is(Kind::kDict) || v.is_undefined();
}

// Python's `is`: the same object. Small numbers are not told apart from equal ones.
bool is_same(Runtime&, const Value& v, const Args& args) {
  if (v.kind() != args[0].kind()) return false;
  if (v.is_none()) return true;
  if (v.is_integral()) return v.as_int() == args[0].as_int();
  if (v.is(Kind::kNamespace)) return v.space() == args[0].space();
  return v.identity() != nullptr && v.identity() == args[0].identity();
}

// The remainder of two integers, or nothing for other types.
bool has_remainder(Runtime& rt, const Value& a, const Value& b, TemplateInt wanted) {
  const Value rest = binary(rt, Operator::kModulo, a, b);
  return rest.is_number() && equal(rt, rest, Value::integer(wanted));
}

bool has_case(Runtime& rt, const Value& v, bool upper) {
  const std::string text = to_str(rt, v).bytes();
  return text == (upper ? to_upper(text) : to_lower(text)) && to_upper(text) != to_lower(text);
}

const std::map<std::string_view, TestDef>& tests() {
  static const auto* const table = [] {
    const TestDef defs[] = {
        {"defined", [](Runtime&, const Value& v, const Args&) { return !v.is_undefined(); }, 0},
        {"undefined", [](Runtime&, const Value& v, const Args&) { return v.is_undefined(); }, 0},
        {"none", [](Runtime&, const Value& v, const Args&) { return v.is_none(); }, 0},
        {"string", [](Runtime&, const Value& v, const Args&) { return v.is_text(); }, 0},
        {"mapping", [](Runtime&, const Value& v, const Args&) { return v.is(Kind::kDict); }, 0},
        {"iterable", is_iterable, 0},
        {"sequence", is_sequence, 0},
        {"number", [](Runtime&, const Value& v, const Args&) { return v.is_number(); }, 0},
        {"integer", [](Runtime&, const Value& v, const Args&) { return v.is(Kind::kInt); }, 0},
        {"float", [](Runtime&, const Value& v, const Args&) { return v.is(Kind::kFloat); }, 0},
        {"boolean", [](Runtime&, const Value& v, const Args&) { return v.is(Kind::kBool); }, 0},
        {"true", [](Runtime&, const Value& v, const Args&) { return v.is(Kind::kBool) && v.as_bool(); }, 0},
        {"false", [](Runtime&, const Value& v, const Args&) { return v.is(Kind::kBool) && !v.as_bool(); }, 0},
        {"callable", [](Runtime&, const Value& v, const Args&) { return v.is(Kind::kMacro) || v.is(Kind::kFunction); },
         0},
        {"lower", [](Runtime& rt, const Value& v, const Args&) { return has_case(rt, v, false); }, 0},
        {"upper", [](Runtime& rt, const Value& v, const Args&) { return has_case(rt, v, true); }, 0},
        {"odd", [](Runtime& rt, const Value& v, const Args&) { return has_remainder(rt, v, Value::integer(2), 1); }, 0},
        {"even", [](Runtime& rt, const Value& v, const Args&) { return has_remainder(rt, v, Value::integer(2), 0); },
         0},
        {"divisibleby", [](Runtime& rt, const Value& v, const Args& args) { return has_remainder(rt, v, args[0], 0); },
         1},
        {"sameas", is_same, 1},
        {"in", [](Runtime& rt, const Value& v, const Args& args) { return contains(rt, args[0], v); }, 1},
        {"eq", [](Runtime& rt, const Value& v, const Args& args) { return equal(rt, v, args[0]); }, 1},
        {"ne", [](Runtime& rt, const Value& v, const Args& args) { return !equal(rt, v, args[0]); }, 1},
        {"lt", [](Runtime& rt, const Value& v, const Args& args) { return compare(rt, Operator::kLess, v, args[0]); },
         1},
        {"le",
         [](Runtime& rt, const Value& v, const Args& args) { return compare(rt, Operator::kLessEqual, v, args[0]); },
         1},
        {"gt",
         [](Runtime& rt, const Value& v, const Args& args) { return compare(rt, Operator::kGreater, v, args[0]); }, 1},
        {"ge",
         [](Runtime& rt, const Value& v, const Args& args) { return compare(rt, Operator::kGreaterEqual, v, args[0]); },
         1},
    };
    auto* map = new std::map<std::string_view, TestDef>;
    for (const TestDef& def : defs) map->emplace(def.name, def);
    static constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
        {"equalto", "eq"}, {"==", "eq"}, {"!=", "ne"}, {"lessthan", "lt"},   {"<", "lt"},
        {"<=", "le"},      {">", "gt"},  {">=", "ge"}, {"greaterthan", "gt"}};
    for (const auto& [alias, name] : kAliases) map->emplace(alias, map->at(name));
    return map;
  }();
  return *table;
}

}  // namespace

const TestDef* find_test(std::string_view name) {
  const auto it = tests().find(name);
  return it == tests().end() ? nullptr : &it->second;
}

}  // namespace tensorfold
