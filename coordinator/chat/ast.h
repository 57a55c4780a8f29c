#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/chat/value.h"

namespace tensorfold {

// Arguments of a filter, test, method or function call, evaluated.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
};

// A filter. `params` names its parameters; the call binds positional and keyword arguments to them, and absent ones are
// Value::absent(). A variadic filter gets the arguments unbound.
struct FilterDef {
  std::string_view name;
  Value (*apply)(Runtime& rt, const Value& input, Arguments& args);
  std::vector<std::string_view> params;
  bool variadic = false;
};

struct TestDef {
  std::string_view name;
  bool (*apply)(Runtime& rt, const Value& input, const std::vector<Value>& args);
  size_t args;  // how many it takes
};

const FilterDef* find_filter(std::string_view name);
const TestDef* find_test(std::string_view name);
// Whether any type has a method of this name that templates may call.
bool is_known_method(std::string_view name);

enum class ExprKind : uint8_t {
  kConstant,
  kName,
  kLoop,     // loop.<name>
  kTuple,    // items
  kList,     // items
  kDict,     // items: key, value, key, value, …
  kGetattr,  // items[0].name
  kGetitem,  // items[0][items[1]]
  kSlice,    // items[0][items[1]:items[2]:items[3]], each of 1..3 may be null
  kCall,     // items[0](items[1..], keywords)
  kMethod,   // items[0].name(items[1..], keywords)
  kFilter,   // items[0] | filter(items[1..], keywords); items[0] is null in the filters of a set block
  kTest,     // items[0] is test(items[1..])
  kNot,
  kNegative,
  kPositive,
  kBinary,  // items[0] op items[1]
  kConcat,  // items joined by ~
  kAnd,
  kOr,
  kCompare,      // items[0] ops[0] items[1] ops[1] items[2] …
  kConditional,  // items[0] if items[1] else items[2], which may be null
};

enum class Operator : uint8_t {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,
};

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  int line = 1;
  int height = 1;
  int name_id = -1;  // kName
  std::string name;
  Value constant;
  std::vector<const Expr*> items;
  std::vector<std::pair<std::string, const Expr*>> keywords;
  Operator op = Operator::kAdd;
  std::vector<Operator> ops;
  const FilterDef* filter = nullptr;
  const TestDef* test = nullptr;
};

// Where an assignment goes: a name, namespace.attribute, or a tuple of targets.
struct Target {
  int line = 1;
  int name_id = -1;
  std::string attribute;      // set for namespace.attribute; name_id is the namespace
  std::vector<Target> items;  // a tuple if is_tuple
  bool is_tuple = false;
};

enum class StmtKind : uint8_t { kData, kOutput, kSet, kSetBlock, kFor, kIf, kMacro, kGeneration, kBreak, kContinue };

struct Stmt;
using Body = std::vector<const Stmt*>;

struct MacroParam {
  int name_id;
  std::string name;
  const Expr* fallback;  // null: without one
};

struct Stmt {
  StmtKind kind = StmtKind::kData;
  int line = 1;
  int height = 1;
  std::string data;
  const Expr* expr = nullptr;  // kOutput, kSet, kFor: the iterable; kSetBlock: the filters or null
  const Expr* test = nullptr;  // kFor: the condition or null
  Target target;
  Body body;
  Body else_body;
  std::vector<std::pair<const Expr*, Body>> branches;  // kIf
  int name_id = -1;                                    // kMacro
  std::string name;
  std::vector<MacroParam> params;
};

// A parsed template; it owns all nodes. Immutable once made.
struct Ast {
  std::deque<Expr> exprs;
  std::deque<Stmt> stmts;
  Body root;
  std::vector<std::string> names;  // by name_id
};

}  // namespace tensorfold
