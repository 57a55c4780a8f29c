#include "coordinator/draft/pass_costs.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace tensorfold {

void PassCosts::record(size_t rows, double ms) {
  if (rows == 0 || !std::isfinite(ms) || ms <= 0.0) return;
  const auto it = averages_.find(rows);
  if (it == averages_.end() && averages_.size() >= kMaxEntries) return;
  Average& average = averages_[rows];
  average.count = std::min(average.count + 1.0, 1.0 / weight_);
  average.ms += (ms - average.ms) / average.count;
  curve_.clear();
}

// The rising curve nearest to the averages (pool adjacent violators).
const std::vector<PassCosts::Point>& PassCosts::curve() const {
  if (!curve_.empty() || averages_.empty()) return curve_;
  struct Pool {
    double ms = 0;
    double count = 0;
    size_t points = 0;
  };
  std::vector<Pool> pools;
  for (const auto& [rows, average] : averages_) {
    pools.push_back({average.ms, average.count, 1});
    while (pools.size() > 1 && pools[pools.size() - 2].ms > pools.back().ms) {
      const Pool last = pools.back();
      pools.pop_back();
      Pool& pool = pools.back();
      pool.ms = (pool.ms * pool.count + last.ms * last.count) / (pool.count + last.count);
      pool.count += last.count;
      pool.points += last.points;
    }
  }
  auto at = averages_.begin();
  for (const Pool& pool : pools) {
    for (size_t i = 0; i < pool.points; ++i, ++at) curve_.push_back({at->first, pool.ms});
  }
  return curve_;
}

double PassCosts::estimate(size_t rows) const {
  const double r = static_cast<double>(std::max<size_t>(rows, 1));
  const std::vector<Point>& points = curve();
  if (points.empty()) return 1.0 + kGrowth * (r - 1.0);
  const auto above = std::lower_bound(points.begin(), points.end(), std::max<size_t>(rows, 1),
                                      [](const Point& point, size_t wanted) { return point.rows < wanted; });
  if (above == points.begin()) return above->ms / (1.0 + kGrowth * (static_cast<double>(above->rows) - r));
  const Point& below = *std::prev(above);
  const double gap = r - static_cast<double>(below.rows);
  if (above == points.end()) return below.ms * (1.0 + kGrowth * gap);
  return below.ms + (above->ms - below.ms) * gap / static_cast<double>(above->rows - below.rows);
}

}  // namespace tensorfold
