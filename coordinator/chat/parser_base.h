#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/chat/ast.h"
#include "coordinator/chat/lexer.h"
#include "fmt/format.h"

namespace tensorfold {

inline std::string describe(const Token& token) {
  switch (token.kind) {
    case TokenKind::kEnd:
      return "the end of the template";
    case TokenKind::kBlockEnd:
      return "'%}'";
    case TokenKind::kVariableEnd:
      return "'}}'";
    case TokenKind::kString:
      return "a string";
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return "a number";
    default:
      return fmt::format("'{}'", token.text);
  }
}

// What both halves of the parser share: tokens, nodes, limits and the first error. After it current() is the end, and
// every function returns null or nothing.
class ParserBase {
 protected:
  ParserBase(std::vector<Token> tokens, const TemplateLimits& limits)
      : tokens_(std::move(tokens)), limits_(limits), ast_(std::make_shared<Ast>()) {}

  // Depth guard of the recursion.
  class Nest {
   public:
    explicit Nest(ParserBase& parser) : parser_(parser) {
      // A pair of parentheses counts three times: in parse_expression, parse_not and parse_unary.
      if (++parser_.depth_ > 3 * parser_.limits_.nesting) parser_.too_deep();
    }
    ~Nest() { --parser_.depth_; }

   private:
    ParserBase& parser_;
  };

  const Token& current() const { return status_.ok() ? tokens_[pos_] : tokens_.back(); }
  const Token& peek() const { return tokens_[std::min(pos_ + 1, tokens_.size() - 1)]; }
  Token next() {
    Token token = current();
    if (pos_ + 1 < tokens_.size()) ++pos_;
    return token;
  }
  static bool token_is(const Token& t, TokenKind kind, std::string_view text) {
    return t.kind == kind && t.text == text;
  }
  bool at_op(std::string_view op) const { return token_is(current(), TokenKind::kOperator, op); }
  bool at_name(std::string_view name) const { return token_is(current(), TokenKind::kName, name); }
  bool skip_op(std::string_view op) { return at_op(op) && (next(), true); }
  bool skip_name(std::string_view name) { return at_name(name) && (next(), true); }
  void expect_op(std::string_view op) {
    if (!skip_op(op)) fail(fmt::format("expected '{}', found {}", op, describe(current())));
  }
  void expect(TokenKind kind, std::string_view what) {
    if (current().kind == kind) {
      next();
    } else {
      fail(fmt::format("expected {}, found {}", what, describe(current())));
    }
  }
  std::string expect_identifier(std::string_view what) {
    if (current().kind == TokenKind::kName) return next().text;
    fail(fmt::format("expected {}, found {}", what, describe(current())));
    return {};
  }

  const Expr* fail(std::string_view message) { return fail_at(current().line, message); }
  const Expr* fail_at(int line, std::string_view message) {
    if (status_.ok()) status_ = template_error(line, message);
    return nullptr;
  }
  void too_deep() { fail(fmt::format("the template is nested more than {} deep", limits_.nesting)); }

  int intern(const std::string& name) {
    const auto [it, added] = ids_.try_emplace(name, static_cast<int>(ast_->names.size()));
    if (added) ast_->names.push_back(name);
    return it->second;
  }

  Expr* expr(ExprKind kind, int line, std::vector<const Expr*> items = {}) {
    if (!count_node()) items.clear();
    Expr* e = &ast_->exprs.emplace_back();
    e->kind = kind;
    e->line = line;
    e->items = std::move(items);
    set_height(e);
    return e;
  }
  void set_height(Expr* e) {
    for (const Expr* item : e->items) {
      if (item != nullptr) e->height = std::max(e->height, item->height + 1);
    }
    for (const auto& keyword : e->keywords) {
      if (keyword.second != nullptr) e->height = std::max(e->height, keyword.second->height + 1);
    }
    if (e->height > limits_.nesting) too_deep();
  }
  Stmt* stmt(StmtKind kind, int line) {
    count_node();
    Stmt* s = &ast_->stmts.emplace_back();
    s->kind = kind;
    s->line = line;
    return s;
  }
  bool count_node() {
    if (ast_->exprs.size() + ast_->stmts.size() < limits_.nodes) return true;
    fail(fmt::format("the template has more than {} parts", limits_.nodes));
    return false;
  }

  const std::vector<Token> tokens_;
  const TemplateLimits& limits_;
  std::shared_ptr<Ast> ast_;
  std::map<std::string, int> ids_;
  size_t pos_ = 0;
  int depth_ = 0;
  absl::Status status_;
};

}  // namespace tensorfold
