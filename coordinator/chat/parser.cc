#include "coordinator/chat/parser.h"

#include <algorithm>
#include <iterator>

#include "coordinator/chat/expression_parser.h"
#include "coordinator/chat/unicode.h"

namespace tensorfold {
namespace {

constexpr std::string_view kBlockTags[] = {"set", "for", "if", "macro", "generation", "break", "continue"};

// The half of the parser that reads tags and text.
class TemplateParser : public ExpressionParser {
 public:
  TemplateParser(std::vector<Token> tokens, const TemplateLimits& limits)
      : ExpressionParser(std::move(tokens), limits) {}

  absl::StatusOr<std::shared_ptr<const Ast>> run() {
    ast_->root = parse_body({});
    if (status_.ok() && current().kind != TokenKind::kEnd) fail(fmt::format("unexpected {}", describe(current())));
    if (!status_.ok()) return status_;
    return std::shared_ptr<const Ast>(std::move(ast_));
  }

 private:
  // Statements up to a block tag named in `ends`, which becomes the current token; all of them if there is none.
  Body parse_body(std::vector<std::string_view> ends) {
    Body body;
    const Nest nest(*this);
    const int opened = current().line;
    while (status_.ok()) {
      const int line = current().line;
      if (current().kind == TokenKind::kEnd) {
        if (!ends.empty()) fail(fmt::format("the tag opened on line {} lacks its '{}'", opened, ends.back()));
        return body;
      }
      if (current().kind == TokenKind::kData) {
        Stmt* s = stmt(StmtKind::kData, line);
        s->data = next().text;
        body.push_back(s);
      } else if (current().kind == TokenKind::kVariableBegin) {
        next();
        Stmt* s = stmt(StmtKind::kOutput, line);
        s->expr = parse_tuple(true, {});
        expect(TokenKind::kVariableEnd, "'}}'");
        body.push_back(s);
      } else if (current().kind == TokenKind::kBlockBegin) {
        next();
        if (current().kind == TokenKind::kName && std::find(ends.begin(), ends.end(), current().text) != ends.end()) {
          return body;
        }
        if (const Stmt* s = parse_statement()) body.push_back(s);
        expect(TokenKind::kBlockEnd, "'%}'");
      } else {
        fail(fmt::format("unexpected {}", describe(current())));
      }
    }
    return body;
  }

  // The body of a tag: its "%}", statements, up to one of `ends` (left current).
  Body parse_tag_body(std::vector<std::string_view> ends) {
    skip_op(":");
    expect(TokenKind::kBlockEnd, "'%}'");
    return parse_body(std::move(ends));
  }

  const Stmt* parse_statement() {
    const Token tag = next();
    if (tag.kind != TokenKind::kName) {
      fail_at(tag.line, fmt::format("expected a tag name, found {}", describe(tag)));
      return nullptr;
    }
    if (tag.text == "set") return parse_set(tag.line);
    if (tag.text == "for") return parse_for(tag.line);
    if (tag.text == "if") return parse_if(tag.line);
    if (tag.text == "macro") return parse_macro(tag.line);
    if (tag.text == "generation") {
      Stmt* s = stmt(StmtKind::kGeneration, tag.line);
      s->body = parse_tag_body({"endgeneration"});
      next();
      return s;
    }
    if (tag.text == "break" || tag.text == "continue") {
      if (loops_ == 0) fail_at(tag.line, fmt::format("'{}' outside a loop", tag.text));
      return stmt(tag.text == "break" ? StmtKind::kBreak : StmtKind::kContinue, tag.line);
    }
    const bool stray = tag.text.starts_with("end") || tag.text == "else" || tag.text == "elif";
    fail_at(tag.line,
            stray ? fmt::format("tag '{}' without its opening tag", tag.text)
                  : fmt::format("tag '{}' is not supported; supported are {}", tag.text, fmt::join(kBlockTags, ", ")));
    return nullptr;
  }

  const Stmt* parse_set(int line) {
    Stmt* s = stmt(StmtKind::kSet, line);
    s->target = parse_target(true);
    if (skip_op("=")) {
      s->expr = parse_tuple(true, {});
      return s;
    }
    s->kind = StmtKind::kSetBlock;
    if (at_op("|")) s->expr = parse_filters(nullptr);
    s->body = parse_tag_body({"endset"});
    next();
    return s;
  }

  Target parse_target(bool with_namespace) {
    Target first = parse_single_target(with_namespace);
    if (!at_op(",")) return first;
    Target tuple;
    tuple.line = first.line;
    tuple.is_tuple = true;
    tuple.items.push_back(std::move(first));
    while (skip_op(",")) {
      if (current().kind != TokenKind::kName && !at_op("(")) break;
      if (at_name("in")) break;
      tuple.items.push_back(parse_single_target(with_namespace));
    }
    return tuple;
  }

  Target parse_single_target(bool with_namespace) {
    const Nest nest(*this);
    Target target;
    target.line = current().line;
    if (skip_op("(")) {
      target = parse_target(with_namespace);
      expect_op(")");
      return target;
    }
    const std::string name = expect_identifier("a name to assign to");
    static constexpr std::string_view kReserved[] = {"true", "false", "none", "True", "False", "None", "loop"};
    if (std::find(std::begin(kReserved), std::end(kReserved), name) != std::end(kReserved)) {
      fail_at(target.line, fmt::format("cannot assign to '{}'", name));
    }
    target.name_id = intern(name);
    if (with_namespace && skip_op(".")) target.attribute = expect_identifier("an attribute name");
    return target;
  }

  const Stmt* parse_for(int line) {
    Stmt* s = stmt(StmtKind::kFor, line);
    s->target = parse_target(false);
    if (!skip_name("in")) fail(fmt::format("expected 'in', found {}", describe(current())));
    s->expr = parse_tuple(false, {"recursive"});
    if (skip_name("if")) s->test = parse_expression(true);
    if (at_name("recursive")) fail("'recursive' loops are not supported");
    ++loops_;
    s->body = parse_tag_body({"else", "endfor"});
    --loops_;
    if (next().text == "else") {
      s->else_body = parse_tag_body({"endfor"});
      next();
    }
    return s;
  }

  const Stmt* parse_if(int line) {
    Stmt* s = stmt(StmtKind::kIf, line);
    while (status_.ok()) {
      const Expr* condition = parse_tuple(false, {});
      Body body = parse_tag_body({"elif", "else", "endif"});
      s->branches.emplace_back(condition, std::move(body));
      const Token tag = next();
      if (tag.text == "elif") continue;
      if (tag.text == "else") {
        s->else_body = parse_tag_body({"endif"});
        next();
      }
      break;
    }
    return s;
  }

  const Stmt* parse_macro(int line) {
    Stmt* s = stmt(StmtKind::kMacro, line);
    s->name = expect_identifier("the macro's name");
    s->name_id = intern(s->name);
    expect_op("(");
    while (status_.ok() && !at_op(")")) {
      if (!s->params.empty()) expect_op(",");
      if (at_op(")")) break;
      MacroParam param{-1, expect_identifier("a parameter name"), nullptr};
      param.name_id = intern(param.name);
      if (skip_op("=")) {
        param.fallback = parse_expression(true);
      } else if (!s->params.empty() && s->params.back().fallback != nullptr) {
        fail("a parameter without default follows one with a default");
      }
      s->params.push_back(std::move(param));
    }
    expect_op(")");
    const int loops = std::exchange(loops_, 0);  // a macro's body cannot leave its caller's loop
    s->body = parse_tag_body({"endmacro"});
    loops_ = loops;
    next();
    return s;
  }

  int loops_ = 0;  // around the current statement, inside its macro
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Ast>> parse_template(std::string_view source, const TemplateLimits& limits) {
  if (source.size() > limits.source_bytes) {
    return absl::InvalidArgumentError(
        fmt::format("the chat template has {} bytes; at most {} are read", source.size(), limits.source_bytes));
  }
  if (!is_whole_utf8(source)) return absl::InvalidArgumentError("the chat template is not valid UTF-8");
  absl::StatusOr<std::vector<Token>> tokens = lex_template(source, limits);
  if (!tokens.ok()) return tokens.status();
  return TemplateParser(*std::move(tokens), limits).run();
}

}  // namespace tensorfold
