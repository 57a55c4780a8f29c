#include "coordinator/draft/acceptance.h"

#include <algorithm>

namespace tensorfold {
namespace {

constexpr double kFade = 0.97;  // a window counts e times less after about 33 others
constexpr double kPriorStrength = 4.0;

// First guesses, before anything is measured: optimistic enough to be tried.
double first_guess(DraftSource source) {
  switch (source) {
    case DraftSource::kMtp:
    case DraftSource::kBlock:
      return 0.7;
    case DraftSource::kCopyShort:
      return 0.4;
    case DraftSource::kCopyMedium:
      return 0.7;
    case DraftSource::kCopyLong:
      return 0.9;
  }
  return 0.5;
}

}  // namespace

void DepthRates::record(size_t drafted, size_t accepted, double fade) {
  accepted = std::min(accepted, drafted);
  for (size_t d = 1; d <= drafted && d <= accepted + 1; ++d) {
    Counter& counter = depths_[std::min(d, kMaxDraftDepth) - 1];
    counter.tried = counter.tried * fade + 1.0;
    counter.kept = counter.kept * fade + (d <= accepted ? 1.0 : 0.0);
  }
}

double DepthRates::rate(size_t depth, double prior, double strength) const {
  const Counter& counter = depths_[std::clamp<size_t>(depth, 1, kMaxDraftDepth) - 1];
  return (counter.kept + prior * strength) / (counter.tried + strength);
}

DraftSource copy_source(uint32_t match) {
  if (match >= 20) return DraftSource::kCopyLong;
  return match >= 8 ? DraftSource::kCopyMedium : DraftSource::kCopyShort;
}

void Acceptance::record(DraftSource source, size_t drafted, size_t accepted) {
  sources_[static_cast<size_t>(source)].record(drafted, accepted, kFade);
}

double Acceptance::rate(DraftSource source, size_t depth, const Acceptance* global) const {
  const double prior = global != nullptr ? global->rate(source, depth, nullptr) : first_guess(source);
  return sources_[static_cast<size_t>(source)].rate(depth, prior, kPriorStrength);
}

}  // namespace tensorfold
