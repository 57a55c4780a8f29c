#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/chat/parser_base.h"

namespace tensorfold {

// The half of the parser that reads expressions, by recursive descent. Internal to parser.cc.
class ExpressionParser : public ParserBase {
 protected:
  using ParserBase::ParserBase;

  // An expression, or several with commas between them: a tuple. `ends` are names that end it.
  const Expr* parse_tuple(bool conditional, const std::vector<std::string_view>& ends, bool parentheses = false) {
    const int line = current().line;
    std::vector<const Expr*> items;
    bool is_tuple = false;
    while (status_.ok()) {
      if (!items.empty()) expect_op(",");
      if (at_tuple_end(ends)) break;
      items.push_back(parse_expression(conditional));
      if (!at_op(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && items.size() == 1) return items[0];
    if (items.empty() && !parentheses)
      return fail(fmt::format("expected an expression, found {}", describe(current())));
    return expr(ExprKind::kTuple, line, std::move(items));
  }

  bool at_tuple_end(const std::vector<std::string_view>& ends) const {
    const TokenKind kind = current().kind;
    if (kind == TokenKind::kVariableEnd || kind == TokenKind::kBlockEnd || kind == TokenKind::kEnd || at_op(")"))
      return true;
    return kind == TokenKind::kName && std::find(ends.begin(), ends.end(), current().text) != ends.end();
  }

  const Expr* parse_expression(bool conditional) {
    const Nest nest(*this);
    if (!status_.ok()) return nullptr;
    if (!conditional) return parse_or();
    int line = current().line;
    const Expr* value = parse_or();
    while (status_.ok() && skip_name("if")) {
      const Expr* condition = parse_or();
      const Expr* other = skip_name("else") ? parse_expression(true) : nullptr;
      value = expr(ExprKind::kConditional, line, {value, condition, other});
      line = current().line;
    }
    return value;
  }

  const Expr* parse_or() {
    const int line = current().line;
    const Expr* left = parse_and();
    while (status_.ok() && skip_name("or")) {
      const Expr* right = parse_and();
      left = expr(ExprKind::kOr, line, {left, right});
    }
    return left;
  }

  const Expr* parse_and() {
    const int line = current().line;
    const Expr* left = parse_not();
    while (status_.ok() && skip_name("and")) {
      const Expr* right = parse_not();
      left = expr(ExprKind::kAnd, line, {left, right});
    }
    return left;
  }

  const Expr* parse_not() {
    const Nest nest(*this);
    const int line = current().line;
    if (status_.ok() && skip_name("not")) {
      const Expr* operand = parse_not();
      return expr(ExprKind::kNot, line, {operand});
    }
    return parse_compare();
  }

  const Expr* parse_compare() {
    static const std::map<std::string_view, Operator> kOperators = {
        {"==", Operator::kEqual},     {"!=", Operator::kNotEqual}, {"<", Operator::kLess},
        {"<=", Operator::kLessEqual}, {">", Operator::kGreater},   {">=", Operator::kGreaterEqual}};
    const int line = current().line;
    std::vector<const Expr*> items = {parse_sum()};
    std::vector<Operator> ops;
    while (status_.ok()) {
      const auto op = kOperators.find(current().text);
      if (current().kind == TokenKind::kOperator && op != kOperators.end()) {
        next();
        ops.push_back(op->second);
      } else if (skip_name("in")) {
        ops.push_back(Operator::kIn);
      } else if (at_name("not") && token_is(peek(), TokenKind::kName, "in")) {
        next();
        next();
        ops.push_back(Operator::kNotIn);
      } else {
        break;
      }
      items.push_back(parse_sum());
    }
    if (ops.empty()) return items[0];
    Expr* e = expr(ExprKind::kCompare, line, std::move(items));
    e->ops = std::move(ops);
    return e;
  }

  using Level = const Expr* (ExpressionParser::*)();
  const Expr* parse_binary(Level operand, const std::map<std::string_view, Operator>& operators) {
    const int line = current().line;
    const Expr* left = (this->*operand)();
    while (status_.ok() && current().kind == TokenKind::kOperator) {
      const auto op = operators.find(current().text);
      if (op == operators.end()) break;
      next();
      const Expr* right = (this->*operand)();
      Expr* e = expr(ExprKind::kBinary, line, {left, right});
      e->op = op->second;
      left = e;
    }
    return left;
  }

  const Expr* parse_sum() {
    static const std::map<std::string_view, Operator> kOps = {{"+", Operator::kAdd}, {"-", Operator::kSubtract}};
    return parse_binary(&ExpressionParser::parse_concat, kOps);
  }

  const Expr* parse_concat() {
    const int line = current().line;
    std::vector<const Expr*> items = {parse_product()};
    while (status_.ok() && skip_op("~")) items.push_back(parse_product());
    if (items.size() == 1) return items[0];
    return expr(ExprKind::kConcat, line, std::move(items));
  }

  const Expr* parse_product() {
    static const std::map<std::string_view, Operator> kOps = {
        {"*", Operator::kMultiply}, {"/", Operator::kDivide}, {"//", Operator::kFloorDivide}, {"%", Operator::kModulo}};
    return parse_binary(&ExpressionParser::parse_power, kOps);
  }

  // jinja2 groups powers from the left, unlike Python.
  const Expr* parse_power() {
    static const std::map<std::string_view, Operator> kOps = {{"**", Operator::kPower}};
    return parse_binary(&ExpressionParser::parse_filtered_unary, kOps);
  }

  const Expr* parse_filtered_unary() { return parse_unary(true); }

  const Expr* parse_unary(bool with_filter) {
    const Nest nest(*this);
    if (!status_.ok()) return nullptr;
    const int line = current().line;
    const Expr* node = nullptr;
    if (at_op("-") || at_op("+")) {
      const ExprKind kind = next().text == "-" ? ExprKind::kNegative : ExprKind::kPositive;
      const Expr* operand = parse_unary(false);
      node = expr(kind, line, {operand});
    } else {
      node = parse_primary();
    }
    node = parse_postfix(node);
    return with_filter ? parse_filter_chain(node) : node;
  }

  const Expr* constant(int line, Value value) {
    Expr* e = expr(ExprKind::kConstant, line);
    e->constant = std::move(value);
    return e;
  }

  const Expr* parse_primary() {
    const Token token = current();
    const int line = token.line;
    if (token.kind == TokenKind::kName) {
      next();
      return parse_name(token);
    }
    if (token.kind == TokenKind::kString) {
      std::string text;
      while (current().kind == TokenKind::kString) text += next().text;
      return constant(line, Value::constant(text));
    }
    if (token.kind == TokenKind::kInteger) return next(), constant(line, Value::integer(token.integer));
    if (token.kind == TokenKind::kFloat) return next(), constant(line, Value::real(token.real));
    if (skip_op("(")) {
      const Expr* inner = parse_tuple(true, {}, true);
      expect_op(")");
      return inner;
    }
    if (skip_op("[")) return parse_list(line);
    if (skip_op("{")) return parse_dict(line);
    return fail(fmt::format("unexpected {}", describe(token)));
  }

  const Expr* parse_name(const Token& token) {
    const std::string& name = token.text;
    if (name == "true" || name == "True") return constant(token.line, Value::boolean(true));
    if (name == "false" || name == "False") return constant(token.line, Value::boolean(false));
    if (name == "none" || name == "None") return constant(token.line, Value::none());
    if (std::find(std::begin(kRefusedNames), std::end(kRefusedNames), name) != std::end(kRefusedNames)) {
      return fail_at(token.line, fmt::format("'{}' is not supported", name));
    }
    if (name == "loop") return parse_loop(token.line);
    Expr* e = expr(ExprKind::kName, token.line);
    e->name = name;
    e->name_id = intern(name);
    return e;
  }

  // The loop object is no value: only its attributes can be read.
  const Expr* parse_loop(int line) {
    static constexpr std::string_view kAttributes[] = {"first",    "last",      "index",    "index0",  "length",
                                                       "revindex", "revindex0", "previtem", "nextitem"};
    if (!skip_op(".")) return fail_at(line, "'loop' can only be used as loop.<attribute>");
    Expr* e = expr(ExprKind::kLoop, line);
    e->name = expect_identifier("an attribute of loop");
    if (std::find(std::begin(kAttributes), std::end(kAttributes), e->name) == std::end(kAttributes)) {
      fail_at(line, fmt::format("'loop.{}' is not supported", e->name));
    }
    return e;
  }

  const Expr* parse_list(int line) {
    std::vector<const Expr*> items;
    while (status_.ok() && !at_op("]")) {
      if (!items.empty()) expect_op(",");
      if (at_op("]")) break;
      items.push_back(parse_expression(true));
    }
    expect_op("]");
    return expr(ExprKind::kList, line, std::move(items));
  }

  const Expr* parse_dict(int line) {
    std::vector<const Expr*> items;
    while (status_.ok() && !at_op("}")) {
      if (!items.empty()) expect_op(",");
      if (at_op("}")) break;
      items.push_back(parse_expression(true));
      expect_op(":");
      items.push_back(parse_expression(true));
    }
    expect_op("}");
    return expr(ExprKind::kDict, line, std::move(items));
  }

  const Expr* parse_postfix(const Expr* node) {
    while (status_.ok()) {
      const int line = current().line;
      if (skip_op(".")) {
        node = parse_attribute(node, line);
      } else if (skip_op("[")) {
        node = parse_subscript(node, line);
      } else if (at_op("(")) {
        node = parse_call(node, line);
      } else {
        break;
      }
    }
    return node;
  }

  const Expr* parse_attribute(const Expr* node, int line) {
    if (current().kind == TokenKind::kInteger) {
      const Expr* index = constant(line, Value::integer(next().integer));
      return expr(ExprKind::kGetitem, line, {node, index});
    }
    Expr* e = expr(ExprKind::kGetattr, line, {node});
    e->name = expect_identifier("an attribute name");
    return e;
  }

  const Expr* parse_subscript(const Expr* node, int line) {
    const Expr* parts[3] = {nullptr, nullptr, nullptr};
    int colons = 0;
    while (status_.ok() && !at_op("]")) {
      if (skip_op(":")) {
        if (++colons > 2) fail("a slice has more than two ':'");
      } else {
        if (parts[colons] != nullptr) fail(fmt::format("expected ']', found {}", describe(current())));
        parts[colons] = parse_expression(true);
      }
    }
    expect_op("]");
    if (colons == 0 && parts[0] == nullptr) return fail_at(line, "a subscript is empty");
    if (colons == 0) return expr(ExprKind::kGetitem, line, {node, parts[0]});
    return expr(ExprKind::kSlice, line, {node, parts[0], parts[1], parts[2]});
  }

  // Appends the arguments in parentheses to e->items and e->keywords.
  void parse_arguments(Expr* e) {
    expect_op("(");
    for (bool first = true; status_.ok() && !at_op(")"); first = false) {
      if (!first) expect_op(",");
      if (at_op(")")) break;
      if (at_op("*") || at_op("**")) fail("'*' and '**' arguments are not supported");
      if (current().kind == TokenKind::kName && token_is(peek(), TokenKind::kOperator, "=")) {
        std::string name = next().text;
        next();
        for (const auto& keyword : e->keywords) {
          if (keyword.first == name) fail(fmt::format("argument '{}' is given twice", name));
        }
        const Expr* value = parse_expression(true);
        e->keywords.emplace_back(std::move(name), value);
      } else {
        if (!e->keywords.empty()) fail("a positional argument follows a keyword argument");
        e->items.push_back(parse_expression(true));
      }
    }
    expect_op(")");
    set_height(e);
  }

  const Expr* parse_call(const Expr* callee, int line) {
    if (callee == nullptr) return nullptr;
    if (callee->kind == ExprKind::kGetattr) {
      if (!is_known_method(callee->name)) {
        return fail_at(line, fmt::format("method '{}' is not supported", callee->name));
      }
      Expr* e = expr(ExprKind::kMethod, line, {callee->items[0]});
      e->name = callee->name;
      parse_arguments(e);
      return e;
    }
    if (callee->kind == ExprKind::kLoop) return fail_at(line, fmt::format("loop.{}() is not supported", callee->name));
    Expr* e = expr(ExprKind::kCall, line, {callee});
    parse_arguments(e);
    return e;
  }

  const Expr* parse_filter_chain(const Expr* node) {
    while (status_.ok()) {
      if (at_op("|")) {
        node = parse_filters(node);
      } else if (skip_name("is")) {
        node = parse_test(node);
      } else if (at_op("(")) {
        node = parse_call(node, current().line);
      } else {
        break;
      }
    }
    return node;
  }

  const Expr* parse_filters(const Expr* node) {
    while (status_.ok() && skip_op("|")) {
      const int line = current().line;
      const std::string name = expect_identifier("a filter name");
      Expr* e = expr(ExprKind::kFilter, line, {node});
      e->name = name;
      e->filter = find_filter(name);
      if (status_.ok() && e->filter == nullptr) return fail_at(line, fmt::format("filter '{}' is not supported", name));
      if (at_op("(")) parse_arguments(e);
      check_named_argument(e);
      node = e;
    }
    return node;
  }

  // map('upper'), select('defined'), selectattr('role', 'equalto', …) name a filter or test: refuse unknown ones at
  // load.
  void check_named_argument(const Expr* e) {
    const bool attr = e->name == "selectattr" || e->name == "rejectattr";
    const bool test = attr || e->name == "select" || e->name == "reject";
    if (!status_.ok() || (!test && e->name != "map")) return;
    const size_t index = attr ? 2 : 1;
    if (e->items.size() <= index || e->items[index]->kind != ExprKind::kConstant) return;
    const Value& name = e->items[index]->constant;
    if (!name.is_text()) return;
    if (test ? find_test(name.bytes()) == nullptr : find_filter(name.bytes()) == nullptr) {
      fail_at(e->line, fmt::format("{} '{}' is not supported", test ? "test" : "filter", name.bytes()));
    }
  }

  const Expr* parse_test(const Expr* node) {
    const int line = current().line;
    const bool negated = skip_name("not");
    const std::string name = expect_identifier("a test name");
    Expr* e = expr(ExprKind::kTest, line, {node});
    e->name = name;
    e->test = find_test(name);
    if (status_.ok() && e->test == nullptr) return fail_at(line, fmt::format("test '{}' is not supported", name));
    if (at_op("(")) {
      parse_arguments(e);
    } else if (at_test_argument()) {
      if (at_name("is")) return fail("tests with 'is' cannot be chained");
      const Expr* argument = parse_primary();
      e->items.push_back(parse_postfix(argument));
      set_height(e);
    }
    if (!status_.ok()) return nullptr;
    if (!e->keywords.empty() || e->items.size() != e->test->args + 1) {
      return fail_at(line, fmt::format("test '{}' takes {} arguments", name, e->test->args));
    }
    return negated ? expr(ExprKind::kNot, line, {e}) : e;
  }

  bool at_test_argument() const {
    switch (current().kind) {
      case TokenKind::kName:
        return !at_name("else") && !at_name("or") && !at_name("and");
      case TokenKind::kString:
      case TokenKind::kInteger:
      case TokenKind::kFloat:
        return true;
      default:
        return at_op("(") || at_op("[") || at_op("{");
    }
  }

 private:
  // Names of jinja2 that a template could expect and that this subset lacks.
  static constexpr std::string_view kRefusedNames[] = {"lipsum",  "cycler", "joiner", "caller",
                                                       "varargs", "kwargs", "self",   "super"};
};

}  // namespace tensorfold
