#include "coordinator/chat/evaluator.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>

#include "coordinator/chat/calls.h"
#include "coordinator/chat/operators.h"
#include "fmt/format.h"

namespace tensorfold {

struct Scope;

// A macro and the scope that it was defined in, which it sees when it is called.
struct Macro {
  const Stmt* stmt;
  Scope* scope;
};

// The items of a for loop. They are drawn one by one, because the loop's condition may depend on what the body did.
struct LoopState {
  std::shared_ptr<const SequenceObject> items;
  size_t position = 0;        // of the next item to test
  std::optional<Value> next;  // drawn ahead, for loop.last and loop.nextitem
  Value current, previous;
  int64_t index0 = -1;
  int64_t length = -1;  // counted when it is asked for
  bool tested = false;  // the items left have passed the condition
};

// Variables of a block. Blocks see the variables around them and assign to their own, as in jinja2.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<int, Value>> variables;  // by name_id; few
  LoopState* loop = nullptr;
  const Stmt* loop_stmt = nullptr;
  bool captured = false;  // a macro may look into it later: it must outlive its block
};

namespace {

enum class Flow { kNext, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(const Ast& ast, const TemplateLimits& limits, const TemplateClock& clock)
      : ast_(ast), clock_(clock), rt_(limits) {}

  absl::StatusOr<Text> run(const TemplateVariables& variables) {
    Scope* globals = push_scope(nullptr);
    for (auto& [name, value] : variables(rt_)) {
      const auto it = std::find(ast_.names.begin(), ast_.names.end(), name);
      if (it != ast_.names.end()) set_variable(globals, static_cast<int>(it - ast_.names.begin()), std::move(value));
    }
    Scope* root = push_scope(globals);
    run_body(ast_.root, root);
    if (rt_.failed()) return rt_.status();
    return std::move(out_);
  }

 private:
  // --- scopes ---

  Scope* push_scope(Scope* parent) {
    if (free_scopes_.empty()) {
      rt_.charge(sizeof(Scope));
      scopes_.emplace_back();
      free_scopes_.push_back(&scopes_.back());
    }
    Scope* scope = free_scopes_.back();
    free_scopes_.pop_back();
    scope->parent = parent;
    return scope;
  }

  // Ends a block. Its variables stay if a macro may still read them, and count as memory from then on.
  void pop_scope(Scope* scope) {
    scope->loop = nullptr;
    if (scope->captured) {
      rt_.charge(scope->variables.capacity() * sizeof(scope->variables[0]));
      return;
    }
    scope->variables.clear();
    free_scopes_.push_back(scope);
  }

  static const Value* find_variable(const Scope* scope, int id) {
    for (; scope != nullptr; scope = scope->parent) {
      for (const auto& [name, value] : scope->variables) {
        if (name == id) return &value;
      }
    }
    return nullptr;
  }

  static void set_variable(Scope* scope, int id, Value value) {
    for (auto& [name, old] : scope->variables) {
      if (name == id) {
        old = std::move(value);
        return;
      }
    }
    scope->variables.emplace_back(id, std::move(value));
  }

  Value load(const Expr& e, const Scope* scope) {
    if (const Value* value = find_variable(scope, e.name_id)) return *value;
    static constexpr std::pair<std::string_view, Function> kGlobals[] = {{"range", Function::kRange},
                                                                         {"dict", Function::kDict},
                                                                         {"namespace", Function::kNamespace},
                                                                         {"raise_exception", Function::kRaiseException},
                                                                         {"strftime_now", Function::kStrftimeNow}};
    for (const auto& [name, function] : kGlobals) {
      if (name == e.name) return Value::function(function);
    }
    return rt_.undefined(fmt::format("'{}' is undefined", e.name));
  }

  // --- output ---

  void emit(std::string_view bytes, bool trusted) {
    if (!fits_output(bytes.size())) return;
    out_.append(bytes, trusted);
  }

  void emit(const Value& v) {
    if (v.is_text()) {
      if (fits_output(v.text().size())) out_.append(v.text());
      return;
    }
    const Text text = to_str(rt_, v);
    if (fits_output(text.size())) out_.append(text);
  }

  bool fits_output(size_t bytes) {
    if (!rt_.step(1 + static_cast<int64_t>(bytes / 64))) return false;
    if (out_.size() + bytes > rt_.limits().output_bytes) {
      rt_.exhausted(fmt::format("the prompt is longer than {} bytes", rt_.limits().output_bytes));
      return false;
    }
    return rt_.fits(out_.footprint() + bytes);
  }

  // Runs `body` and returns what it printed as a string.
  Value capture(const Body& body, Scope* scope) {
    Text outer = std::exchange(out_, Text());
    // The outer output waits: it counts as memory meanwhile.
    const size_t waiting = outer.footprint();
    const bool charged = rt_.charge(waiting);
    run_body(body, scope);
    if (charged) rt_.release(waiting);
    Text inner = std::exchange(out_, std::move(outer));
    return rt_.text(std::move(inner));
  }

  // --- statements ---

  Flow run_body(const Body& body, Scope* scope) {
    for (const Stmt* s : body) {
      const Flow flow = run_stmt(*s, scope);
      if (rt_.failed()) return Flow::kNext;
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  Flow run_stmt(const Stmt& s, Scope* scope) {
    const DepthGuard guard(rt_);
    rt_.set_line(s.line);
    if (!guard.ok() || !rt_.step()) return Flow::kNext;
    switch (s.kind) {
      case StmtKind::kData:
        emit(s.data, true);
        break;
      case StmtKind::kOutput: {
        const Value v = eval(*s.expr, scope);
        rt_.set_line(s.line);
        if (!rt_.failed()) emit(v);
        break;
      }
      case StmtKind::kSet:
        assign(s.target, eval(*s.expr, scope), scope);
        break;
      case StmtKind::kSetBlock:
        run_set_block(s, scope);
        break;
      case StmtKind::kFor:
        run_for(s, scope);
        break;
      case StmtKind::kIf:
        return run_if(s, scope);
      case StmtKind::kMacro:
        define_macro(s, scope);
        break;
      case StmtKind::kGeneration: {
        // Marks what the assistant generated; it changes nothing but is a block of its own for variables.
        Scope* inner = push_scope(scope);
        const Flow flow = run_body(s.body, inner);
        pop_scope(inner);
        return flow;
      }
      case StmtKind::kBreak:
        return Flow::kBreak;
      case StmtKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  Flow run_if(const Stmt& s, Scope* scope) {
    for (const auto& [condition, body] : s.branches) {
      if (truthy(eval(*condition, scope))) return run_body(body, scope);
      if (rt_.failed()) return Flow::kNext;
    }
    return run_body(s.else_body, scope);
  }

  void run_set_block(const Stmt& s, Scope* scope) {
    Scope* inner = push_scope(scope);
    Value v = capture(s.body, inner);
    pop_scope(inner);
    if (s.expr != nullptr) v = apply_filter(*s.expr, scope, &v);
    assign(s.target, std::move(v), scope);
  }

  void define_macro(const Stmt& s, Scope* scope) {
    if (!rt_.charge(sizeof(Macro))) return;
    macros_.push_back({&s, scope});
    for (Scope* outer = scope; outer != nullptr && !outer->captured; outer = outer->parent) outer->captured = true;
    set_variable(scope, s.name_id, Value::macro(&macros_.back()));
  }

  void assign(const Target& target, Value value, Scope* scope) {
    if (rt_.failed()) return;
    rt_.set_line(target.line);
    if (target.is_tuple) {
      const auto items = iterate(rt_, value);
      if (!items) return;
      if (items->items.size() != target.items.size()) {
        rt_.fail(fmt::format("cannot unpack {} values into {} names", items->items.size(), target.items.size()));
        return;
      }
      for (size_t i = 0; i < target.items.size(); ++i) assign(target.items[i], items->items[i], scope);
      return;
    }
    if (target.attribute.empty()) return set_variable(scope, target.name_id, std::move(value));
    const Value* ns = find_variable(scope, target.name_id);
    if (ns == nullptr || !ns->is(Kind::kNamespace)) {
      rt_.fail(fmt::format("'{}' is no namespace: its attributes cannot be set",
                           ast_.names[static_cast<size_t>(target.name_id)]));
      return;
    }
    set_namespace_attribute(rt_, ns->space(), target.attribute, std::move(value));
  }

  // --- loops ---

  // Draws the next item that passes the loop's condition into loop->next.
  bool draw(const Stmt& s, LoopState* loop, Scope* outer) {
    if (loop->next) return true;
    while (loop->position < loop->items->items.size() && rt_.step()) {
      const Value& item = loop->items->items[loop->position++];
      if (s.test != nullptr && !loop->tested) {
        Scope* scope = push_scope(outer);
        assign(s.target, item, scope);
        const bool passed = truthy(eval(*s.test, scope));
        pop_scope(scope);
        if (rt_.failed()) return false;
        if (!passed) continue;
      }
      loop->next = item;
      return true;
    }
    return false;
  }

  void run_for(const Stmt& s, Scope* outer) {
    const Value iterable = eval(*s.expr, outer);
    LoopState loop;
    loop.items = iterate(rt_, iterable);
    if (!loop.items) return;
    bool completed = false;
    while (draw(s, &loop, outer)) {
      loop.previous = std::exchange(loop.current, *std::exchange(loop.next, std::nullopt));
      ++loop.index0;
      // A new scope for each round: what the body assigns is gone in the next.
      Scope* scope = push_scope(outer);
      scope->loop = &loop;
      scope->loop_stmt = &s;
      assign(s.target, loop.current, scope);
      const Flow flow = rt_.failed() ? Flow::kNext : run_body(s.body, scope);
      pop_scope(scope);
      if (rt_.failed() || flow == Flow::kBreak) break;
      // As in jinja2, only a round that reaches the body's end keeps `else` from running.
      completed |= flow == Flow::kNext;
    }
    if (completed || rt_.failed()) return;
    Scope* scope = push_scope(outer);
    run_body(s.else_body, scope);
    pop_scope(scope);
  }

  Value loop_attribute(const Expr& e, Scope* scope) {
    while (scope != nullptr && scope->loop == nullptr) scope = scope->parent;
    if (scope == nullptr) return rt_.fail("'loop' is undefined");
    LoopState* loop = scope->loop;
    const std::string& name = e.name;
    if (name == "index0") return Value::integer(loop->index0);
    if (name == "index") return Value::integer(loop->index0 + 1);
    if (name == "first") return Value::boolean(loop->index0 == 0);
    if (name == "previtem") return loop->index0 == 0 ? rt_.undefined("there is no previous item") : loop->previous;
    if (name == "last") return Value::boolean(!draw(*scope->loop_stmt, loop, scope->parent));
    if (name == "nextitem") {
      return draw(*scope->loop_stmt, loop, scope->parent) ? *loop->next : rt_.undefined("there is no next item");
    }
    if (!count_loop(*scope->loop_stmt, loop, scope->parent)) return {};
    if (name == "length") return Value::integer(loop->length);
    return Value::integer(loop->length - loop->index0 - (name == "revindex0" ? 1 : 0));
  }

  // Sets loop->length. With a condition this draws all items that are left.
  bool count_loop(const Stmt& s, LoopState* loop, Scope* outer) {
    if (loop->length >= 0) return true;
    if (s.test == nullptr) {
      loop->length = static_cast<int64_t>(loop->items->items.size());
      return true;
    }
    std::vector<Value> rest;
    while (draw(s, loop, outer)) rest.push_back(*std::exchange(loop->next, std::nullopt));
    if (rt_.failed()) return false;
    loop->length = loop->index0 + 1 + static_cast<int64_t>(rest.size());
    const Value list = rt_.sequence(std::move(rest));
    if (rt_.failed()) return false;
    loop->items = list.shared_sequence();
    loop->position = 0;
    loop->tested = true;
    return true;
  }

  // --- expressions ---

  Value eval(const Expr& e, Scope* scope) {
    const DepthGuard guard(rt_);
    if (!guard.ok() || !rt_.step()) return {};
    rt_.set_line(e.line);
    switch (e.kind) {
      case ExprKind::kConstant:
        return e.constant;
      case ExprKind::kName:
        return load(e, scope);
      case ExprKind::kLoop:
        return loop_attribute(e, scope);
      case ExprKind::kTuple:
      case ExprKind::kList:
        return rt_.sequence(eval_items(e, 0, scope),
                            e.kind == ExprKind::kTuple ? SequenceKind::kTuple : SequenceKind::kList);
      case ExprKind::kDict:
        return eval_dict(e, scope);
      case ExprKind::kGetattr:
        return get_attribute(rt_, eval_item(e, 0, scope), e.name);
      case ExprKind::kGetitem: {
        const Value object = eval_item(e, 0, scope);
        return get_item(rt_, object, eval_item(e, 1, scope));
      }
      case ExprKind::kSlice: {
        const std::vector<Value> v = eval_items(e, 0, scope);
        return rt_.failed() ? Value() : slice(rt_, v[0], v[1], v[2], v[3]);
      }
      case ExprKind::kCall:
        return eval_call(e, scope);
      case ExprKind::kMethod:
        return eval_method(e, scope);
      case ExprKind::kFilter:
        return apply_filter(e, scope, nullptr);
      case ExprKind::kTest:
        return eval_test(e, scope);
      case ExprKind::kNot:
        return Value::boolean(!truthy(eval_item(e, 0, scope)));
      case ExprKind::kNegative:
        return negate(rt_, eval_item(e, 0, scope));
      case ExprKind::kPositive:
        return negate(rt_, negate(rt_, eval_item(e, 0, scope)));
      case ExprKind::kBinary: {
        const Value left = eval_item(e, 0, scope);
        return binary(rt_, e.op, left, eval_item(e, 1, scope));
      }
      case ExprKind::kConcat:
        return eval_concat(e, scope);
      case ExprKind::kAnd:
      case ExprKind::kOr: {
        Value left = eval_item(e, 0, scope);
        return truthy(left) == (e.kind == ExprKind::kAnd) ? eval_item(e, 1, scope) : left;
      }
      case ExprKind::kCompare:
        return eval_compare(e, scope);
      case ExprKind::kConditional:
        if (truthy(eval_item(e, 1, scope))) return eval_item(e, 0, scope);
        if (e.items[2] != nullptr) return eval_item(e, 2, scope);
        return rt_.undefined("the inline if-expression was false and has no else");
    }
    return {};
  }

  // Evaluates a part, and makes this expression's line the current one again.
  Value eval_item(const Expr& e, size_t i, Scope* scope) {
    Value v = e.items[i] == nullptr ? Value::absent() : eval(*e.items[i], scope);
    rt_.set_line(e.line);
    return v;
  }

  std::vector<Value> eval_items(const Expr& e, size_t from, Scope* scope) {
    std::vector<Value> out;
    for (size_t i = from; i < e.items.size() && !rt_.failed(); ++i) out.push_back(eval_item(e, i, scope));
    return out;
  }

  Arguments eval_arguments(const Expr& e, Scope* scope) {
    Arguments args;
    args.positional = eval_items(e, 1, scope);
    for (const auto& [name, value] : e.keywords) args.keyword.emplace_back(name, eval(*value, scope));
    rt_.set_line(e.line);
    return args;
  }

  Value eval_dict(const Expr& e, Scope* scope) {
    std::vector<std::pair<Value, Value>> items;
    for (size_t i = 0; i + 1 < e.items.size(); i += 2) {
      Value key = eval_item(e, i, scope);
      Value value = eval_item(e, i + 1, scope);
      if (rt_.failed() || !check_hashable(rt_, key)) return {};
      put_key(rt_, &items, std::move(key), std::move(value));
    }
    return rt_.dict(std::move(items));
  }

  Value eval_test(const Expr& e, Scope* scope) {
    const Value subject = eval_item(e, 0, scope);
    const std::vector<Value> args = eval_items(e, 1, scope);
    return rt_.failed() ? Value() : Value::boolean(e.test->apply(rt_, subject, args));
  }

  Value eval_concat(const Expr& e, Scope* scope) {
    const std::vector<Value> values = eval_items(e, 0, scope);
    return rt_.failed() ? Value() : join_values(rt_, values);
  }

  Value eval_compare(const Expr& e, Scope* scope) {
    Value left = eval_item(e, 0, scope);
    for (size_t i = 0; i < e.ops.size(); ++i) {
      Value right = eval_item(e, i + 1, scope);
      if (rt_.failed() || !compare(rt_, e.ops[i], left, right)) return Value::boolean(false);
      left = std::move(right);
    }
    return Value::boolean(true);
  }

  // A chain of filters; the innermost one of a set block is given its input.
  Value apply_filter(const Expr& e, Scope* scope, const Value* block) {
    Value input;
    if (e.items[0] == nullptr) {
      input = *block;
    } else if (block != nullptr && e.items[0]->kind == ExprKind::kFilter) {
      const DepthGuard guard(rt_);
      if (!guard.ok()) return {};
      input = apply_filter(*e.items[0], scope, block);
    } else {
      input = eval_item(e, 0, scope);
    }
    rt_.set_line(e.line);
    Arguments args = eval_arguments(e, scope);
    return rt_.failed() ? Value() : call_filter(rt_, *e.filter, input, std::move(args));
  }

  Value eval_method(const Expr& e, Scope* scope) {
    const Value object = eval_item(e, 0, scope);
    Arguments args = eval_arguments(e, scope);
    if (rt_.failed()) return {};
    if (object.is(Kind::kNamespace)) return call(get_attribute(rt_, object, e.name), std::move(args));
    return call_method(rt_, object, e.name, std::move(args));
  }

  Value eval_call(const Expr& e, Scope* scope) {
    const Value callee = eval_item(e, 0, scope);
    Arguments args = eval_arguments(e, scope);
    if (rt_.failed()) return {};
    Value result = call(callee, std::move(args));
    rt_.set_line(e.line);
    return result;
  }

  Value call(const Value& callee, Arguments args) {
    if (callee.is(Kind::kMacro)) return call_macro(*callee.macro(), std::move(args));
    if (callee.is_undefined()) return rt_.fail(callee.undefined_message());
    if (!callee.is(Kind::kFunction)) return rt_.fail(fmt::format("a '{}' cannot be called", type_name(callee)));
    return call_function(rt_, callee.function(), std::move(args), clock_);
  }

  Value call_macro(const Macro& macro, Arguments args) {
    const DepthGuard guard(rt_);
    if (!guard.ok()) return {};
    const Stmt& s = *macro.stmt;
    std::vector<std::string_view> names;
    for (const MacroParam& param : s.params) names.push_back(param.name);
    if (!bind_arguments(rt_, s.name, names, &args)) return {};
    Scope* scope = push_scope(macro.scope);
    for (size_t i = 0; i < s.params.size() && !rt_.failed(); ++i) {
      const MacroParam& param = s.params[i];
      Value value = args.positional[i];
      if (value.is_absent()) {
        value = param.fallback != nullptr ? eval(*param.fallback, scope)
                                          : rt_.undefined(fmt::format("parameter '{}' was not provided", param.name));
      }
      set_variable(scope, param.name_id, std::move(value));
    }
    Value result = rt_.failed() ? Value() : capture(s.body, scope);
    pop_scope(scope);
    return result;
  }

  // The order matters: values return their bytes to rt_ when they die, so it is first to be made and last to go.
  const Ast& ast_;
  const TemplateClock& clock_;
  Runtime rt_;
  std::deque<Scope> scopes_;
  std::vector<Scope*> free_scopes_;
  std::deque<Macro> macros_;
  Text out_;
};

}  // namespace

absl::StatusOr<Text> evaluate_template(const Ast& ast, const TemplateLimits& limits, const TemplateClock& clock,
                                       const TemplateVariables& variables) {
  return Evaluator(ast, limits, clock).run(variables);
}

}  // namespace tensorfold
