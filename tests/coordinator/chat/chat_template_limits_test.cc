#include <chrono>
#include <string>

#include "coordinator/chat/chat_template.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tensorfold {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

std::string repeated(std::string_view s, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out += s;
  return out;
}

absl::Status render_status(const std::string& source, const json::object& variables = {}) {
  const absl::StatusOr<ChatTemplate> chat = ChatTemplate::parse(source, {}, {});
  if (!chat.ok()) return chat.status();
  return chat->render({}, nullptr, variables, true).status();
}

// Templates made to run for ever, or to take all memory, end with an error, soon.
TEST(ChatTemplateLimitsTest, HostileTemplatesEnd) {
  const std::string kRange = "range(100000)";
  const std::string kCases[] = {
      // time
      "{% for a in " + kRange + " %}{% for b in " + kRange + " %}{% for c in " + kRange +
          " %}{% endfor %}{% endfor %}{% endfor %}",
      "{% for a in " + kRange + " %}{% for b in " + kRange + " %}{{ a }}{% endfor %}{% endfor %}",
      "{% set l = " + kRange + " | list %}{% for a in l %}{% if 'x' in l %}{% endif %}{% endfor %}",
      "{% set l = " + kRange + " | list %}{{ (l | unique | list) | length }}",
      "{% set s = 'ab' * 1000000 %}{% for a in " + kRange + " %}{% if s.count('b') == 1 %}{% endif %}{% endfor %}",
      "{% set s = 'aé' * 1000000 %}{% for a in " + kRange + " %}{{ s[1000000] }}{% endfor %}",
      "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
      "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
      // memory
      "{{ 'x' * 100000000000 }}",
      "{{ [1] * 100000000000 }}",
      "{{ ('x' * 1000000) * 1000000 }}",
      "{% set ns = namespace(s='x' * 1000) %}{% for a in " + kRange + " %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
      "{% set ns = namespace(l=[1]) %}{% for a in " + kRange + " %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
      "{% set ns = namespace(l=[1]) %}{% for a in " + kRange + " %}{% set ns.l = [ns.l] %}{% endfor %}",
      "{% set ns = namespace(d={}) %}{% for a in " + kRange + " %}{% set ns.d = {'k': ns.d} %}{% endfor %}",
      "{% set s = 'x' * 1000000 %}{{ s | replace('', s) }}",
      "{% set s = 'x' * 1000000 %}{{ s | replace('x', s) }}",
      "{% set s = 'x' * 1000000 %}{{ (s | list) | join(s) }}",
      "{% set s = 'x\n' * 1000000 %}{{ s | indent(s) }}",
      "{% set s = '%s' * 1000000 %}{{ s % 'x' }}",
      "{% for a in " + kRange + " %}{% macro m() %}{% endmacro %}{% set x = 'y' * 10000 %}{% endfor %}",
      "{% set ns = namespace(n=0) %}{% for a in " + kRange +
          " %}{% set ns.n = namespace(a=ns.n, b='x' * 10000) %}{% endfor %}",
      // output
      "{% set s = 'x' * 1000000 %}{% for a in " + kRange + " %}{{ s }}{% endfor %}",
      "{% set s = 'x' * 1000000 %}{% set t %}{% for a in " + kRange + " %}{{ s }}{% endfor %}{% endset %}",
      "{{ range(100000000) | list }}",
      "{{ 9 ** 9 ** 9 }}{{ 170141183460469231731687303715884105727 }}",
      "{{ 10 ** 38 * 10 ** 38 }}",
  };
  for (const std::string& source : kCases) {
    SCOPED_TRACE(source);
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = render_status(source);
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("chat template line "));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }
}

// Deep nesting of any kind is refused before it meets the end of the stack.
TEST(ChatTemplateLimitsTest, DeepTemplatesAreRefused) {
  const size_t n = 20000;
  const std::string kCases[] = {
      "{{ " + repeated("(", n) + "1" + repeated(")", n) + " }}",
      "{{ " + repeated("[", n) + repeated("]", n) + " }}",
      "{{ " + repeated("{1:", n) + "1" + repeated("}", n) + " }}",
      "{{ " + repeated("not ", n) + "x }}",
      "{{ " + repeated("-", n) + "x }}",
      "{{ x" + repeated(".a", n) + " }}",
      "{{ x" + repeated("[0]", n) + " }}",
      "{{ x" + repeated("|trim", n) + " }}",
      "{{ x" + repeated("()", n) + " }}",
      "{{ 1" + repeated("+1", n) + " }}",
      "{{ 1" + repeated("**1", n) + " }}",
      "{{ a" + repeated(" or a", n) + " }}",
      "{{ a" + repeated(" if a else a", n) + " }}",
      "{{ a" + repeated(" if a", n) + " }}",
      "{{ a" + repeated(" is defined", n) + " }}",
      "{{ " + repeated("f(", n) + repeated(")", n) + " }}",
      "{% set " + repeated("(", n) + "a" + repeated(")", n) + " = 1 %}",
      repeated("{% if x %}", n) + repeated("{% endif %}", n),
      repeated("{% for x in y %}", n) + repeated("{% endfor %}", n),
      repeated("{% set x %}", n) + repeated("{% endset %}", n),
      repeated("{% generation %}", n) + repeated("{% endgeneration %}", n),
  };
  for (const std::string& source : kCases) {
    SCOPED_TRACE(source.substr(0, 40));
    const absl::Status status = render_status(source);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("line 1"));
  }
}

// Sizes are limited too, and what is long but flat is no problem.
TEST(ChatTemplateLimitsTest, SizesAreLimited) {
  EXPECT_THAT(std::string(render_status(std::string(2u << 20, 'x')).message()), HasSubstr("at most 1048576"));
  EXPECT_THAT(std::string(render_status(repeated("{{a}}", 200000)).message()), HasSubstr("more than 100000 parts"));
  EXPECT_TRUE(render_status(repeated("{% if x %}{% elif y %}{% endif %}", 5000)).ok());
  EXPECT_TRUE(render_status("{{ 'a'" + repeated(" ~ 'a'", 5000) + " }}").ok());
  EXPECT_TRUE(render_status("{% if a %}" + repeated("{% elif a %}", 5000) + "{% endif %}").ok());
}

// Nested request values are bounded as the template's own are.
TEST(ChatTemplateLimitsTest, DeepRequestValuesAreRefused) {
  json::value deep = json::array();
  for (int i = 0; i < 200; ++i) deep = json::array{deep};
  const absl::Status status = render_status("{{ x }}", {{"x", deep}});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("nested more than"));
  json::value wide = 1;
  for (int i = 0; i < 30; ++i) wide = json::array{wide};
  EXPECT_TRUE(render_status("{{ x | tojson }}{{ x }}{{ x == x }}", {{"x", wide}}).ok());
}

// A namespace that holds itself neither leaks nor sends printing and comparing round for ever.
TEST(ChatTemplateLimitsTest, NamespacesMayBeCyclic) {
  EXPECT_TRUE(render_status("{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns.me == ns.me }}").ok());
  EXPECT_FALSE(render_status("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns.me }}").ok());
  EXPECT_FALSE(render_status("{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns.me | tojson }}").ok());
}

// The message of raise_exception is cut, at a character.
TEST(ChatTemplateLimitsTest, RaisedMessagesAreCut) {
  const absl::Status status = render_status("{{ raise_exception('é' * 100000) }}");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message().size(), 4096u);
}

// A long conversation, as long as a model's context allows, stays well within the budgets.
TEST(ChatTemplateLimitsTest, LongConversationsFit) {
  const absl::StatusOr<ChatTemplate> chat = ChatTemplate::parse(
      "{% for m in messages %}{% if m.role == 'user' %}<|u|>{{ m.content | trim }}{% else %}<|a|>{{ "
      "m.content.split('x')[-1] }}"
      "{% endif %}{% endfor %}{% for m in messages[::-1] %}{% if m.content.startswith('y') %}{% endif %}{% endfor %}",
      {}, {});
  ASSERT_TRUE(chat.ok());
  json::array messages;
  for (int i = 0; i < 2000; ++i)
    messages.push_back({{"role", i % 2 ? "a" : "user"}, {"content", std::string(4000, 'z')}});
  const absl::StatusOr<Rendered> prompt = chat->render(messages, nullptr, {}, true);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->text().size(), 2000u * 4005);
}

}  // namespace
}  // namespace tensorfold
