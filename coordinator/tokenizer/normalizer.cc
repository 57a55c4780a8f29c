#include "coordinator/tokenizer/normalizer.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "coordinator/tokenizer/unicode/ranges.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {
namespace {

struct CombiningRange {
  char32_t first, last;
  uint8_t combining_class;
};
struct Decomposition {
  char32_t code_point;
  uint16_t offset, length;  // into kDecompositionPool; full canonical decomposition
};
struct Composition {
  char32_t first, second, composed;
};

#include "coordinator/tokenizer/unicode/nfc_tables.inc"

// Hangul syllables compose by arithmetic: Unicode Standard 3.12.
constexpr char32_t kSBase = 0xAC00, kLBase = 0x1100, kVBase = 0x1161, kTBase = 0x11A7;
constexpr char32_t kLCount = 19, kVCount = 21, kTCount = 28, kSCount = kLCount * kVCount * kTCount;

// One character of a segment being normalized.
struct Mark {
  char32_t code_point;
  uint8_t combining_class;
  bool untrusted;
};

// Whether NFC may change `c`, move it, or join it to what stands before it. What is not active is a boundary: nothing
// before it has to do with anything after it.
bool is_active(char32_t c) {
  if (c < 0x300 || (c >= 0x3400 && c <= 0x9FFF) || (c >= 0xAC00 && c <= 0xD7A3)) return false;
  return in_ranges(kActiveRanges, c);
}

uint8_t combining_class(char32_t c) {
  if (c < 0x300) return 0;
  const auto* it = std::upper_bound(std::begin(kCombiningRanges), std::end(kCombiningRanges), c,
                                    [](char32_t at, const CombiningRange& range) { return at < range.first; });
  if (it == std::begin(kCombiningRanges)) return 0;
  --it;
  return c <= it->last ? it->combining_class : 0;
}

void decompose(char32_t c, bool untrusted, std::vector<Mark>& out) {
  if (c >= kSBase && c < kSBase + kSCount) {
    const char32_t s = c - kSBase;
    out.push_back({kLBase + s / (kVCount * kTCount), 0, untrusted});
    out.push_back({kVBase + s % (kVCount * kTCount) / kTCount, 0, untrusted});
    if (s % kTCount != 0) out.push_back({kTBase + s % kTCount, 0, untrusted});
    return;
  }
  const auto* it = std::lower_bound(std::begin(kDecompositions), std::end(kDecompositions), c,
                                    [](const Decomposition& d, char32_t at) { return d.code_point < at; });
  if (it == std::end(kDecompositions) || it->code_point != c) {
    out.push_back({c, combining_class(c), untrusted});
    return;
  }
  for (uint16_t i = 0; i < it->length; ++i) {
    const char32_t part = kDecompositionPool[it->offset + i];
    out.push_back({part, combining_class(part), untrusted});
  }
}

// The character that `first` and `second` make, or 0.
char32_t compose(char32_t first, char32_t second) {
  if (first >= kLBase && first < kLBase + kLCount && second >= kVBase && second < kVBase + kVCount) {
    return kSBase + ((first - kLBase) * kVCount + (second - kVBase)) * kTCount;
  }
  if (first >= kSBase && first < kSBase + kSCount && (first - kSBase) % kTCount == 0 && second > kTBase &&
      second < kTBase + kTCount) {
    return first + (second - kTBase);
  }
  const Composition key{first, second, 0};
  const auto* it = std::lower_bound(std::begin(kCompositions), std::end(kCompositions), key,
                                    [](const Composition& a, const Composition& b) {
                                      return a.first != b.first ? a.first < b.first : a.second < b.second;
                                    });
  if (it == std::end(kCompositions) || it->first != first || it->second != second) return 0;
  return it->composed;
}

// Canonical ordering, then canonical composition, in place: UAX 15 section 1.3.
void order_and_compose(std::vector<Mark>& marks) {
  for (size_t i = 0; i < marks.size();) {
    if (marks[i].combining_class == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < marks.size() && marks[end].combining_class != 0) ++end;
    std::stable_sort(marks.begin() + static_cast<std::ptrdiff_t>(i), marks.begin() + static_cast<std::ptrdiff_t>(end),
                     [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; });
    i = end;
  }
  size_t kept = 0;
  size_t starter = marks.size();  // index among the kept ones; none yet
  int last_class = -1;            // class of the last kept mark after the starter; -1 where none
  for (size_t i = 0; i < marks.size(); ++i) {
    const Mark mark = marks[i];
    const bool blocked = last_class >= 0 && (last_class == 0 || last_class >= mark.combining_class);
    if (starter != marks.size() && !blocked) {
      if (const char32_t composed = compose(marks[starter].code_point, mark.code_point); composed != 0) {
        marks[starter].code_point = composed;
        marks[starter].untrusted |= mark.untrusted;
        continue;
      }
    }
    marks[kept] = mark;
    if (mark.combining_class == 0) {
      starter = kept;
      last_class = -1;
    } else {
      last_class = mark.combining_class;
    }
    ++kept;
  }
  marks.resize(kept);
}

}  // namespace

bool is_quickly_nfc(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0xCC) {  // U+0300 is CC 80
      ++i;
      continue;
    }
    const Utf8Step step = utf8_step(text.substr(i));
    if (is_active(step.code_point)) return false;
    i += step.length;
  }
  return true;
}

std::string normalize_nfc(std::string_view text, UntrustedRanges& ranges) {
  std::string out;
  out.reserve(text.size() + text.size() / 8);
  UntrustedRanges out_ranges;
  size_t copied = 0;    // text before this is in `out`
  size_t boundary = 0;  // start of the last character seen
  std::vector<Mark> marks;
  for (size_t i = 0; i < text.size();) {
    Utf8Step step = utf8_step(text.substr(i));
    if (!is_active(step.code_point)) {
      boundary = i;
      i += step.length;
      continue;
    }
    // Everything up to the character before this one is final; from there to the next boundary is worked out.
    out_ranges.append_from(ranges, copied, boundary, out.size());
    out.append(text.substr(copied, boundary - copied));
    marks.clear();
    for (size_t j = boundary; j < text.size(); j += step.length) {
      step = utf8_step(text.substr(j));
      if (j > boundary && j >= i && !is_active(step.code_point)) {
        i = j;
        break;
      }
      decompose(step.code_point, ranges.overlaps(j, j + step.length), marks);
      if (j + step.length >= text.size()) i = text.size();
    }
    order_and_compose(marks);
    for (const Mark& mark : marks) {
      const size_t begin = out.size();
      append_utf8(mark.code_point, out);
      if (mark.untrusted) out_ranges.append(begin, out.size());
    }
    copied = boundary = i;
  }
  out_ranges.append_from(ranges, copied, text.size(), out.size());
  out.append(text.substr(copied));
  ranges = std::move(out_ranges);
  return out;
}

std::string normalize_nfc(std::string_view text) {
  UntrustedRanges none;
  return normalize_nfc(text, none);
}

}  // namespace tensorfold
