#include "coordinator/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <string_view>

namespace tensorfold {
namespace {

void add_prefix_spaces(PreTokenizedText& in) {
  const auto has_space = [&](const auto& piece) { return in.text[piece.first] == ' '; };
  if (std::all_of(in.pieces.begin(), in.pieces.end(), has_space)) return;
  PreTokenizedText out;
  out.text.reserve(in.text.size() + in.pieces.size());
  out.pieces.reserve(in.pieces.size());
  for (const auto& piece : in.pieces) {
    const size_t begin = out.text.size();
    if (!has_space(piece)) out.text += ' ';
    out.untrusted.append_from(in.untrusted, piece.first, piece.second, out.text.size());
    out.text.append(in.text, piece.first, piece.second - piece.first);
    out.pieces.emplace_back(begin, out.text.size());
  }
  in = std::move(out);
}

}  // namespace

void apply_behavior(SplitBehavior behavior, const std::vector<RegexPiece>& pieces, size_t offset,
                    std::vector<std::pair<size_t, size_t>>& out) {
  const size_t start = out.size();
  const auto add = [&](const RegexPiece& piece) { out.emplace_back(piece.begin + offset, piece.end + offset); };
  const auto none_yet = [&] { return out.size() == start; };
  bool previous_match = false;
  switch (behavior) {
    case SplitBehavior::kIsolated:
      for (const RegexPiece& piece : pieces) add(piece);
      break;
    case SplitBehavior::kRemoved:
      for (const RegexPiece& piece : pieces) {
        if (!piece.is_match) add(piece);
      }
      break;
    case SplitBehavior::kContiguous:
    case SplitBehavior::kMergedWithPrevious:
      for (const RegexPiece& piece : pieces) {
        const bool join = behavior == SplitBehavior::kContiguous ? piece.is_match == previous_match
                                                                 : piece.is_match && !previous_match;
        if (join && !none_yet()) {
          out.back().second = piece.end + offset;
        } else {
          add(piece);
        }
        previous_match = piece.is_match;
      }
      break;
    case SplitBehavior::kMergedWithNext:
      for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
        if (piece->is_match && !previous_match && !none_yet()) {
          out.back().first = piece->begin + offset;
        } else {
          add(*piece);
        }
        previous_match = piece->is_match;
      }
      std::reverse(out.begin() + static_cast<std::ptrdiff_t>(start), out.end());
      break;
  }
  // Empty pieces vanish only after they have played their part above.
  out.erase(std::remove_if(out.begin() + static_cast<std::ptrdiff_t>(start), out.end(),
                           [](const auto& piece) { return piece.first == piece.second; }),
            out.end());
}

absl::Status PreTokenizer::run(PreTokenizedText& text, RegexScratch& scratch) const {
  text.pieces.clear();
  if (!text.text.empty()) text.pieces.emplace_back(0, text.text.size());
  std::vector<RegexPiece> matches;
  std::vector<std::pair<size_t, size_t>> next;
  for (const PreTokenizerStep& step : steps_) {
    if (step.add_prefix_space) add_prefix_spaces(text);
    if (step.regex == nullptr) continue;
    next.clear();
    for (const auto& [begin, end] : text.pieces) {
      matches.clear();
      const std::string_view piece = std::string_view(text.text).substr(begin, end - begin);
      if (absl::Status status = step.regex->split(piece, scratch, matches); !status.ok()) return status;
      if (step.invert) {
        for (RegexPiece& match : matches) match.is_match = !match.is_match;
      }
      apply_behavior(step.behavior, matches, begin, next);
    }
    text.pieces.swap(next);
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
