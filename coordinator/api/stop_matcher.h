// Finds stop strings in a stream of text. Text that might be the beginning of a stop string is withheld until it is
// known not to be; when a stop string is complete, the text ends exactly before it.
//
// The result does not depend on how the text was cut into pieces: the stop string that is complete first ends the text
// (of several at once, the longest). One Knuth-Morris-Pratt automaton a string: a byte costs O(strings), whatever the
// text. Fed whole characters, it hands out whole characters. One owner (a reply), not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tensorfold {

class StopMatcher {
 public:
  StopMatcher() = default;  // no stop strings: passes everything on at once
  // Empty strings are left out: they would end every reply at once (the front ends refuse them).
  explicit StopMatcher(std::span<const std::string> stops);

  // Takes the next piece; returns what may be shown now. After a stop was found, everything is dropped.
  std::string feed(std::string_view piece);
  // The reply ended otherwise: returns what was withheld.
  std::string finish();

  bool stopped() const { return stopped_; }
  // The stop string that was found; empty before.
  std::string_view found() const { return stopped_ ? std::string_view(stops_[found_].text) : std::string_view(); }
  size_t withheld() const { return pending_.size(); }

 private:
  struct Stop {
    std::string text;
    std::vector<uint32_t> fallback;  // [length]: the longest proper border of text[0..i]
    uint32_t matched = 0;            // bytes of `text` that the stream ends with
  };

  static void advance(Stop& stop, char byte);
  std::string take();

  std::vector<Stop> stops_;
  std::string pending_;  // withheld: the longest match in progress
  bool stopped_ = false;
  size_t found_ = 0;
};

}  // namespace tensorfold
