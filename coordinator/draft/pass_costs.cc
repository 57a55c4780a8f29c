#include "coordinator/draft/pass_costs.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace tensorfold {

void PassCosts::record(size_t rows, double ms) {
  if (rows == 0 || !std::isfinite(ms) || ms <= 0.0) return;
  const auto it = averages_.find(rows);
  if (it != averages_.end()) {
    it->second += weight_ * (ms - it->second);
  } else if (averages_.size() < kMaxEntries) {
    averages_.emplace(rows, ms);
  }
}

double PassCosts::estimate(size_t rows) const {
  const double r = static_cast<double>(std::max<size_t>(rows, 1));
  if (averages_.empty()) return 1.0 + kGrowth * (r - 1.0);
  const auto above = averages_.lower_bound(rows);
  // A noisy average must not make more rows look cheaper: the largest of the counts at or below is the floor.
  double floor = 0.0;
  for (auto it = averages_.begin(); it != above; ++it) floor = std::max(floor, it->second);
  if (above != averages_.end() && above->first == rows) return std::max(floor, above->second);
  if (above == averages_.begin()) {
    return above->second / (1.0 + kGrowth * (static_cast<double>(above->first) - r));
  }
  const auto below = std::prev(above);
  const double gap = r - static_cast<double>(below->first);
  if (above == averages_.end()) return floor * (1.0 + kGrowth * gap);
  const double span = static_cast<double>(above->first - below->first);
  return floor + std::max(0.0, above->second - floor) * gap / span;
}

}  // namespace tensorfold
