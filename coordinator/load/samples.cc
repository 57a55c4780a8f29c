#include "coordinator/load/samples.h"

#include <algorithm>
#include <cmath>

namespace tensorfold {
namespace {

double at_rank(std::span<const double> sorted, double share) {
  // A product like 0.99 * 100 may come out a hair above the whole number that it is.
  const double rank = std::ceil(share * static_cast<double>(sorted.size()) - 1e-9);
  const auto index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

}  // namespace

double percentile(std::span<double> values, double share) {
  std::sort(values.begin(), values.end());
  return at_rank(values, share);
}

void Samples::add(double value) {
  max_ = count_ == 0 ? value : std::max(max_, value);
  ++count_;
  sum_ += value;
  if (kept_.size() < most_) {
    kept_.push_back(value);
  } else if (const uint64_t at = random_.below(count_); at < most_) {
    kept_[at] = value;
  }
}

SampleSummary Samples::summary() const {
  SampleSummary out;
  if (count_ == 0) return out;
  std::vector<double> sorted = kept_;
  std::sort(sorted.begin(), sorted.end());
  out.count = count_;
  out.mean = sum_ / static_cast<double>(count_);
  out.p50 = at_rank(sorted, 0.5);
  out.p90 = at_rank(sorted, 0.9);
  out.p99 = at_rank(sorted, 0.99);
  out.max = max_;
  return out;
}

}  // namespace tensorfold
