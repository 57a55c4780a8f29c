// Which bytes of a text came from outside (a user, a tool, a document) and so must not become control tokens.
// A plain value; concurrent reads are safe.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace tensorfold {

class UntrustedRanges {
 public:
  // Marks [begin, end). Calls come in rising order of `begin`; an empty range marks nothing.
  void append(size_t begin, size_t end);

  bool empty() const { return ranges_.empty(); }
  bool overlaps(size_t begin, size_t end) const;

  // The end of the trusted stretch that holds `position`; `position` itself if that byte is untrusted.
  size_t trusted_end(size_t position, size_t text_size) const;

  // The begin of the trusted stretch that ends at `position` (exclusive); `position` if the byte before is untrusted.
  size_t trusted_begin(size_t position) const;

  // The marks of [begin, end), counted from `begin`.
  UntrustedRanges slice(size_t begin, size_t end) const;

  // Appends the marks of [begin, end) of `from`, moved so that `begin` lands on `at`.
  void append_from(const UntrustedRanges& from, size_t begin, size_t end, size_t at);

 private:
  // The first range that ends after `position`.
  size_t find(size_t position) const;

  std::vector<std::pair<size_t, size_t>> ranges_;  // disjoint, rising, never touching
};

}  // namespace tensorfold
