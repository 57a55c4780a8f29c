#include "coordinator/api/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "coordinator/api/json_writer.h"

namespace tensorfold {
namespace {

struct Outcome {
  std::string text;
  bool stopped;
  bool operator==(const Outcome&) const = default;
};

// The definition: the first moment at which the text ends with a stop string; of several, the longest.
Outcome plain(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t cut = 0;
    for (const std::string& stop : stops) {
      if (end >= stop.size() && text.compare(end - stop.size(), stop.size(), stop) == 0)
        cut = std::max(cut, stop.size());
    }
    if (cut > 0) return {text.substr(0, end - cut), true};
  }
  return {text, false};
}

Outcome run(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops);
  std::string text;
  for (const std::string& piece : pieces) text += matcher.feed(piece);
  const bool stopped = matcher.stopped();
  return {text + matcher.finish(), stopped};
}

// Protects the cut at every split position, with stop strings that overlap themselves and one another.
TEST(StopMatcher, EverySplit) {
  const struct {
    std::vector<std::string> stops;
    std::string text;
  } cases[] = {
      {{"stop"}, "go on and stop here"}, {{"stop"}, "ssstostostop"}, {{"aab"}, "aaaaab"},
      {{"abab", "ba"}, "xxaababab"},     {{"abc", "b"}, "zabc"},     {{"\n\n", "\n"}, "a\n\nb"},
      {{"END", "ENDING"}, "the ENDING"}, {{"é"}, "caf\xc3\xa8 é"},   {{"😀x"}, "a😀😀x"},
      {{"never"}, "neve neve nev"},      {{"aa", "aaa"}, "baaa"},    {{"xyz", "yz"}, "wxyz"},
  };
  for (const auto& c : cases) {
    const Outcome expected = plain(c.stops, c.text);
    for (size_t i = 0; i <= c.text.size(); ++i) {
      for (size_t j = i; j <= c.text.size(); ++j) {
        ASSERT_EQ(run(c.stops, {c.text.substr(0, i), c.text.substr(i, j - i), c.text.substr(j)}), expected)
            << c.text << " " << i << " " << j;
      }
    }
  }
}

// Protects the same on random texts of few letters, where matches in progress abound.
TEST(StopMatcher, RandomTexts) {
  std::mt19937 rng(1);
  for (int i = 0; i < 5000; ++i) {
    const auto word = [&](size_t most) {
      std::string w;
      const size_t size = 1 + rng() % most;
      for (size_t j = 0; j < size; ++j) w.push_back(static_cast<char>('a' + rng() % 2));
      return w;
    };
    std::vector<std::string> stops;
    for (size_t j = 0; j < 1 + rng() % 3; ++j) stops.push_back(word(6));
    std::vector<std::string> pieces;
    std::string text;
    for (size_t j = 0; j < 1 + rng() % 6; ++j) {
      pieces.push_back(word(4));
      text += pieces.back();
    }
    ASSERT_EQ(run(stops, pieces), plain(stops, text)) << text;
  }
}

// Protects streaming: no more is withheld than may still become a stop string, and what comes out is whole characters.
TEST(StopMatcher, WithholdsOnlyWhatItMust) {
  StopMatcher matcher(std::vector<std::string>{"</s>", "é"});
  EXPECT_EQ(matcher.feed("abc"), "abc");
  EXPECT_EQ(matcher.feed("d<"), "d");
  EXPECT_EQ(matcher.withheld(), 1u);
  EXPECT_EQ(matcher.feed("/"), "");
  EXPECT_EQ(matcher.feed("p"), "</p");
  EXPECT_TRUE(json_is_utf8(matcher.feed("è€")));
  EXPECT_EQ(matcher.withheld(), 0u);
  EXPECT_EQ(matcher.feed("x</"), "x");
  EXPECT_EQ(matcher.feed("s>tail"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.found(), "</s>");
  EXPECT_EQ(matcher.feed("more"), "");
  EXPECT_EQ(matcher.finish(), "");
}

// Protects the usual case, and the end of a reply inside a match.
TEST(StopMatcher, NoneAndUnfinished) {
  StopMatcher none;
  EXPECT_EQ(none.feed("abc"), "abc");
  EXPECT_EQ(none.finish(), "");
  StopMatcher empty(std::vector<std::string>{""});
  EXPECT_EQ(empty.feed("abc"), "abc");
  StopMatcher matcher(std::vector<std::string>{"abc"});
  EXPECT_EQ(matcher.feed("xab"), "x");
  EXPECT_EQ(matcher.feed(""), "");
  EXPECT_EQ(matcher.finish(), "ab");
  EXPECT_FALSE(matcher.stopped());
}

}  // namespace
}  // namespace tensorfold
