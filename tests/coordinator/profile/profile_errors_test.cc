// Every kind of error, with its exact place and words: the text is what a user has to work with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "coordinator/profile/document.h"
#include "coordinator/profile/profile.h"
#include "coordinator/profile/suggest.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::string_view kModel = "model:\n  path: m\n";  // lines 1 and 2 of most cases

std::string errors_of(std::string_view text) {
  const auto profile = parse_profile(text, "p.yaml");
  return profile.ok() ? "ok" : std::string(profile.status().message());
}

struct Case {
  const char* name;
  std::string text;
  std::string expected;
};

void PrintTo(const Case& each, std::ostream* out) { *out << each.name; }

class ErrorTest : public ::testing::TestWithParam<Case> {};

// Protects the place and the words of each error kind.
TEST_P(ErrorTest, HasExactPlaceAndWords) { EXPECT_EQ(errors_of(GetParam().text), GetParam().expected); }

std::string after_model(const std::string& text) { return std::string(kModel) + text; }

std::vector<Case> value_cases() {
  const std::string world = "; allowed: an integer from 1 to 8 (ranks)";
  const std::string timeout = "; allowed: a duration from 100ms to 1h, as in 500ms, 2s, 5m, 1h";
  const std::string size = "; allowed: a size from 1KiB to 1GiB, as in 64KiB, 512MiB, 8GiB";
  const std::string address = "; allowed: host:port with a port from 0 to 65535, as in 127.0.0.1:7070 or [::1]:7070";
  const std::string boolean = "; allowed: true or false";
  const auto cluster = [](const std::string& line) { return after_model("cluster:\n  " + line + "\n"); };
  const auto http = [](const std::string& line) { return after_model("http:\n  " + line + "\n"); };
  return {
      {"integer_above", cluster("world: 9"), "p.yaml:4:10: cluster.world: out of range: found \"9\"" + world},
      {"integer_below", cluster("world: -1"), "p.yaml:4:10: cluster.world: out of range: found \"-1\"" + world},
      {"integer_huge", cluster("world: 99999999999999999999"),
       "p.yaml:4:10: cluster.world: out of range: found \"99999999999999999999\"" + world},
      {"integer_word", cluster("world: two"), "p.yaml:4:10: cluster.world: wrong type: found \"two\"" + world},
      {"integer_octal", cluster("world: 02"), "p.yaml:4:10: cluster.world: wrong type: found \"02\"" + world},
      {"integer_fraction", cluster("world: 2.0"), "p.yaml:4:10: cluster.world: wrong type: found \"2.0\"" + world},
      {"integer_quoted", cluster("world: \"2\""),
       "p.yaml:4:10: cluster.world: wrong type: in quotes it is text: found \"2\"" + world + "; did you mean 2?"},
      {"integer_list", cluster("world: [2]"), "p.yaml:4:10: cluster.world: wrong type: found a list" + world},
      {"integer_map", cluster("world: {a: 2}"), "p.yaml:4:10: cluster.world: wrong type: found a map" + world},
      {"integer_nothing", cluster("world:"), "p.yaml:4:3: cluster.world: no value: found nothing" + world},
      {"number_above", after_model("sampling:\n  top_p: 1.5\n"),
       "p.yaml:4:10: sampling.top_p: out of range: found \"1.5\"; allowed: a number from 0 to 1 (probability)"},
      {"number_not", after_model("sampling:\n  top_p: .nan\n"),
       "p.yaml:4:10: sampling.top_p: wrong type: found \".nan\"; allowed: a number from 0 to 1 (probability)"},
      {"number_overflow", after_model("sampling:\n  top_p: 1e999\n"),
       "p.yaml:4:10: sampling.top_p: out of range: found \"1e999\"; allowed: a number from 0 to 1 (probability)"},
      {"bool_yes", cluster("allow_any_address: yes"),
       "p.yaml:4:22: cluster.allow_any_address: wrong type: found \"yes\"" + boolean + "; did you mean true?"},
      {"bool_quoted", cluster("allow_any_address: 'false'"),
       "p.yaml:4:22: cluster.allow_any_address: wrong type: in quotes it is text: found \"false\"" + boolean +
           "; did you mean false?"},
      {"choice", cluster("transport: uxc"),
       "p.yaml:4:14: cluster.transport: not one of the choices: found \"uxc\"; allowed: one of local, ucx; did you "
       "mean ucx?"},
      {"duration_unit", cluster("step_timeout: 5"),
       "p.yaml:4:17: cluster.step_timeout: a unit is missing: found \"5\"" + timeout + "; did you mean 5s?"},
      {"duration_fraction", cluster("step_timeout: 1.5s"),
       "p.yaml:4:17: cluster.step_timeout: whole numbers only: take a smaller unit: found \"1.5s\"" + timeout},
      {"duration_word", cluster("step_timeout: soon"),
       "p.yaml:4:17: cluster.step_timeout: wrong type: found \"soon\"" + timeout},
      {"duration_short", cluster("step_timeout: 1ms"),
       "p.yaml:4:17: cluster.step_timeout: out of range: found \"1ms\"" + timeout},
      {"duration_overflow", cluster("step_timeout: 9223372036854775807h"),
       "p.yaml:4:17: cluster.step_timeout: out of range: found \"9223372036854775807h\"" + timeout},
      {"size_decimal", http("max_body_bytes: 16MB"),
       "p.yaml:4:19: http.max_body_bytes: units of 1000 are not accepted: found \"16MB\"" + size +
           "; did you mean 16MiB?"},
      {"size_unit", http("max_body_bytes: 16"),
       "p.yaml:4:19: http.max_body_bytes: a unit is missing: found \"16\"" + size + "; did you mean 16MiB?"},
      {"size_above", http("max_body_bytes: 2GiB"),
       "p.yaml:4:19: http.max_body_bytes: out of range: found \"2GiB\"" + size},
      {"rate", after_model("cluster:\n  ucx:\n    min_bandwidth: 1GiB\n"),
       "p.yaml:5:20: cluster.ucx.min_bandwidth: wrong type: found \"1GiB\"; allowed: a rate from 0B/s to 1TiB/s, as in "
       "10GiB/s"},
      {"address_port", http("listen: localhost"),
       "p.yaml:4:11: http.listen: the port is missing: found \"localhost\"" + address},
      {"address_port_word", http("listen: localhost:http"),
       "p.yaml:4:11: http.listen: the port is not a number: found \"localhost:http\"" + address},
      {"address_port_range", http("listen: localhost:65536"),
       "p.yaml:4:11: http.listen: port out of range: found \"localhost:65536\"" + address},
      {"address_brackets", http("listen: \"::1:8000\""),
       "p.yaml:4:11: http.listen: an IPv6 address needs brackets before its port: found \"::1:8000\"" + address},
      {"address_host", http("listen: 256.0.0.1:8000"),
       "p.yaml:4:11: http.listen: not a host name or address before the port: found \"256.0.0.1:8000\"" + address},
      {"address_number", http("listen: 0x7f.1:8000"),
       "p.yaml:4:11: http.listen: not a host name or address before the port: found \"0x7f.1:8000\"" + address},
      {"path_home", "model:\n  path: ~/m\n",
       "p.yaml:2:9: model.path: ~ is not expanded: write the path out, or relative to the profile's folder: found "
       "\"~/m\"; allowed: "
       "a path, absolute or relative to the profile's folder"},
      {"path_variable", "model:\n  path: $HOME/m\n",
       "p.yaml:2:9: model.path: variables are not expanded: write the path out, or relative to the profile's folder: "
       "found "
       "\"$HOME/m\"; allowed: a path, absolute or relative to the profile's folder"},
      {"pattern", "model:\n  path: m\n  served_name: my model\n",
       "p.yaml:3:16: model.served_name: not accepted: found \"my model\"; allowed: a name of letters, digits and . _ - "
       "/ : +, at "
       "most 200"},
      {"empty_text", "model:\n  path: m\n  served_name: ''\n",
       "p.yaml:3:16: model.served_name: empty: found \"\"; allowed: a name of letters, digits and . _ - / : +, at most "
       "200"},
      {"list_scalar", "model:\n  path: m\n  aliases: a\n",
       "p.yaml:3:12: model.aliases: wrong type: found \"a\"; allowed: a list, each entry a name of letters, digits and "
       ". _ - / : "
       "+, at most 200; did you mean [a]?"},
      {"list_entry", "model:\n  path: m\n  aliases: [a, {b: c}]\n",
       "p.yaml:3:16: model.aliases: wrong type in the list: found a map; allowed: a list, each entry a name of "
       "letters, digits and "
       ". _ - / : +, at most 200"},
      {"list_twice", "model:\n  path: m\n  aliases:\n    - a\n    - a\n",
       "p.yaml:5:7: model.aliases: listed twice: found \"a\"; allowed: a list, each entry a name of letters, digits "
       "and . _ - / : "
       "+, at most 200"},
      {"rank_missing", cluster("hosts: {0: a, 2: b}"),
       "p.yaml:4:20: cluster.hosts: rank 2 does not fit 2 entries: ranks count from 0 and none may be left out: found "
       "\"b\"; "
       "allowed: a list in rank order, or a map from rank to entry; each entry a host name or address: letters, digits "
       "and . _ - :"},
      {"rank_word", cluster("hosts: {zero: a}"),
       "p.yaml:4:17: cluster.hosts: \"zero\" is not a rank: found \"a\"; allowed: a list in rank order, or a map from "
       "rank to "
       "entry; each entry a host name or address: letters, digits and . _ - :"},
      {"secret_not_shown", cluster("token: hunter2"),
       "p.yaml:4:10: cluster.token: not accepted: found (not shown); allowed: 16 to 256 printable characters without "
       "spaces"},
      {"folder_name", "model:\n  path: my model\n",
       "p.yaml:2:9: model.served_name: not set, and the folder's name cannot be a model name: found \"my model\"; "
       "allowed: a name "
       "of letters, digits and . _ - / : +, at most 200"},
  };
}

std::vector<Case> structure_cases() {
  return {
      {"unknown_key", after_model("cluster:\n  trasport: ucx\n"),
       "p.yaml:4:3: cluster.trasport: unknown key; did you mean cluster.transport?"},
      {"unknown_section", after_model("clutser:\n  world: 2\n"),
       "p.yaml:3:1: clutser: unknown key; did you mean cluster?"},
      {"other_section", after_model("world: 2\n"), "p.yaml:3:1: world: unknown key; did you mean cluster.world?"},
      {"unlike_anything", after_model("qqqqqqqq: 2\n"), "p.yaml:3:1: qqqqqqqq: unknown key"},
      {"odd_key", after_model("\"a\\nb\": 2\n"), "p.yaml:3:1: \"a\\nb\": unknown key"},
      {"section_scalar", after_model("cluster: 2\n"),
       "p.yaml:3:1: cluster: wrong type: found \"2\"; allowed: a section: its options, indented below it"},
      {"required", "http:\n  threads: 1\n",
       "p.yaml:1:1: model.path: required and not set; allowed: a path, absolute or relative to the profile's folder"},
      {"required_in_section", "http:\nmodel:\n",
       "p.yaml:2:1: model.path: required and not set; allowed: a path, absolute or relative to the profile's folder"},
      {"empty_file", "",
       "p.yaml:1:1: model.path: required and not set; allowed: a path, absolute or relative to the profile's folder"},
      {"not_a_map", "- a\n", "p.yaml:1:1: not a profile: found a list; allowed: sections such as model: and cluster:"},
      {"duplicate_key", after_model("cluster:\n  world: 1\n  world: 1\n"),
       "p.yaml:5:3: cluster.world: duplicate key, already set on line 4"},
      {"duplicate_section", after_model("http:\n  threads: 1\nmodel:\n  path: n\n"),
       "p.yaml:5:1: model: duplicate key, already set on line 1"},
      {"alias", "model: &m\n  path: x\nhttp: *m\n",
       "p.yaml:1:8: model: YAML anchors (&name) are not accepted; allowed: write the value out where it is needed\n"
       "p.yaml:3:7: http: YAML aliases (*name) are not accepted; allowed: write the value out"},
      {"tag", "model:\n  path: !!str m\n",
       "p.yaml:2:9: model.path: YAML tags are not accepted: found \"tag:yaml.org,2002:str\"; allowed: the value "
       "without a tag"},
      {"key_list", after_model("? [a]\n: 1\n"),
       "p.yaml:3:3: a key must be plain text: found a list; allowed: key: value"},
      {"documents", after_model("---\na: 1\n"),
       "p.yaml:3:1: a second YAML document; allowed: one document a file: remove the --- line"},
      {"depth", "[[[[[[[[[]]]]]]]]]", "p.yaml:1:9: nested too deeply; allowed: at most 8 levels of maps and lists"},
      {"not_yaml", "model:\n  path: [m\n", "p.yaml:3:1: not valid YAML: \"end of sequence flow not found\""},
      {"open_quote", "model:\n  path: \"m\nhttp:\n  listen: 'x'\n",
       "p.yaml:2:9: the quote is never closed; allowed: the same quote at the end of the text"},
      {"open_single_quote", "model:\n  path: 'it''s\n",
       "p.yaml:2:9: the quote is never closed; allowed: the same quote at the end of the text"},
      {"not_utf8", "model:\n  path: é\xE9\n",
       "p.yaml:2:10: the file is not UTF-8: found byte 0xe9; allowed: UTF-8 text"},
      {"overlong_utf8", "a: \xC0\xAF", "p.yaml:1:4: the file is not UTF-8: found byte 0xc0; allowed: UTF-8 text"},
      {"utf16",
       std::string("\xFF\xFE"
                   "a\0",
                   4),
       "p.yaml:1:1: the file is not UTF-8: found byte 0xff; allowed: UTF-8 text"},
      {"nul", std::string("a: b\0c", 6), "p.yaml:1:5: control character: found byte 0x00; allowed: printable text"},
      {"too_large", std::string((1 << 20) + 1, '#'),
       "p.yaml:1:1: the file is too large: found 1048577 bytes; allowed: at most 1048576 bytes"},
      {"column_in_characters", "model: {path: é/m, pth: b}\n",
       "p.yaml:1:20: model.pth: unknown key; did you mean model.path?"},
  };
}

const auto kNameOf = [](const ::testing::TestParamInfo<Case>& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Values, ErrorTest, ::testing::ValuesIn(value_cases()), kNameOf);
INSTANTIATE_TEST_SUITE_P(Structure, ErrorTest, ::testing::ValuesIn(structure_cases()), kNameOf);

// Protects against stopping at the first error: all are reported, in file order.
TEST(ProfileErrors, AllAtOnceInFileOrder) {
  const std::string text = errors_of("cluster:\n  world: 9\nmodel:\n  pth: m\nhttp:\n  threads: x\n");
  EXPECT_THAT(text, StartsWith("p.yaml:2:10: cluster.world: out of range"));
  EXPECT_THAT(
      text,
      HasSubstr("\np.yaml:4:3: model.pth: unknown key; did you mean model.path?\np.yaml:6:12: http.threads: wrong"));
  // The misspelt key is the required one: one message is enough.
  EXPECT_THAT(text, ::testing::Not(HasSubstr("required")));
}

// Protects the bound on the report.
TEST(ProfileErrors, StopAtTwentyWithACount) {
  std::string text(kModel);
  for (int i = 0; i < 25; ++i) text += "zzzzzzzz" + std::to_string(i) + ": 1\n";
  const std::string message = errors_of(text);
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 20);
  EXPECT_THAT(message, ::testing::EndsWith("\np.yaml: and 5 more errors"));
}

// Protects against long values and escapes in messages.
TEST(ProfileErrors, FoundValueIsShortenedAndEscaped) {
  const std::string message = errors_of(after_model("cluster:\n  world: \"\\e[31m" + std::string(5000, 'x') + "\"\n"));
  EXPECT_THAT(message, HasSubstr("found \"\\x1b[31mxxx"));
  EXPECT_LT(message.size(), 300u);
}

// Protects memory and time on hostile files: each ends at once with an error.
TEST(ProfileErrors, HostileFilesAreRefused) {
  std::string bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n";
  for (char c = 'b'; c < 'z'; ++c) {
    std::string line = std::string(1, c) + ": &" + c + " [";
    for (int i = 0; i < 9; ++i) line += std::string(i == 0 ? "*" : ", *") + static_cast<char>(c - 1);
    bomb += line + "]\n";
  }
  EXPECT_THAT(errors_of(bomb), HasSubstr("aliases (*name) are not accepted"));
  std::string many = "a: [";
  for (int i = 0; i < 30000; ++i) many += "1,";
  EXPECT_THAT(errors_of(many + "]"), HasSubstr("too many values"));
  for (const char* piece :
       {"[", "{", "- ", "? ", "a: {", "&a ", "!a ", "[?", "{?", "\"", "'", "|\n", "%", "a:\n ", "*a "}) {
    std::string text;
    while (text.size() < 200000) text += piece;
    EXPECT_NE(errors_of(text), "ok") << piece;
  }
}

// Protects did-you-mean: swaps count once, and far words suggest nothing.
TEST(ProfileSuggest, NearestName) {
  EXPECT_EQ(edit_distance("world", "wrold"), 1);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(nearest_name("ucs", {"local", "ucx"}), "ucx");
  EXPECT_EQ(nearest_name("x", {"ab", "c"}), "");
  EXPECT_EQ(suggest_profile_key("cluster.ucx.min_bandwith"), "cluster.ucx.min_bandwidth");
  EXPECT_EQ(suggest_profile_key("http.temperature"), "sampling.temperature");
  EXPECT_EQ(suggest_profile_key("clustr"), "cluster");
  EXPECT_EQ(suggest_profile_key("model.xyzzy"), "");
}

}  // namespace
}  // namespace tensorfold
