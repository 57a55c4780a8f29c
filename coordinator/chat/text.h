#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tensorfold {

// A UTF-8 string whose every byte knows where it came from: from the chat template (trusted) or from the request
// (untrusted). The tokenizer may turn only trusted text into control tokens, so the bit has to survive every operation
// of the template interpreter: concatenation, slicing, stripping, replacing, joining, JSON output.
//
// Provenance is kept as runs; a string of one origin has one run. Runs begin and end at character boundaries.
// Not thread-safe while it is written; reading is.
class Text {
 public:
  struct Run {
    size_t end;  // bytes; the run begins where the one before it ends
    bool trusted;
  };

  Text() = default;
  Text(std::string_view bytes, bool trusted) { append(bytes, trusted); }

  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  const std::vector<Run>& runs() const { return runs_; }
  bool all_trusted() const { return runs_.empty() || (runs_.size() == 1 && runs_[0].trusted); }
  // Memory held, in bytes.
  size_t footprint() const { return bytes_.size() + runs_.size() * sizeof(Run); }

  void append(std::string_view bytes, bool trusted);
  void append(const Text& other) { append(other, 0, other.size()); }
  // Appends the bytes [from, to) of `other`, with their provenance. Out-of-range ends are clamped.
  void append(const Text& other, size_t from, size_t to);
  Text sub(size_t from, size_t to) const;
  bool trusted_at(size_t pos) const;

  // Calls fn(std::string_view piece, bool trusted) for each run.
  template <typename Fn>
  void for_each_run(Fn fn) const {
    size_t begin = 0;
    for (const Run& run : runs_) {
      fn(std::string_view(bytes_).substr(begin, run.end - begin), run.trusted);
      begin = run.end;
    }
  }

 private:
  std::string bytes_;
  std::vector<Run> runs_;
};

}  // namespace tensorfold
