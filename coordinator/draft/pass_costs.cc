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

// A line through the averages near `rows`, at `rows`; near is a quarter of it to either side, so that few rows stand
// each for itself, where kernels change with every one, and many rows share their noise.
double PassCosts::smoothed(size_t rows) const {
  const double centre = static_cast<double>(rows);
  const double reach = std::max(0.75, 0.25 * centre);
  double sum = 0;
  double x_sum = 0;
  double xx_sum = 0;
  double y_sum = 0;
  double xy_sum = 0;
  for (auto it = averages_.lower_bound(static_cast<size_t>(std::ceil(std::max(centre - reach, 1.0))));
       it != averages_.end() && static_cast<double>(it->first) < centre + reach; ++it) {
    const double x = static_cast<double>(it->first) - centre;
    const double weight = it->second.count * (1.0 - std::abs(x) / reach);
    sum += weight;
    x_sum += weight * x;
    xx_sum += weight * x * x;
    y_sum += weight * it->second.ms;
    xy_sum += weight * x * it->second.ms;
  }
  const double spread = sum * xx_sum - x_sum * x_sum;
  if (spread < 1e-9 * sum * sum) return y_sum / sum;
  return std::max((xx_sum * y_sum - x_sum * xy_sum) / spread, 0.25 * y_sum / sum);
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
    pools.push_back({smoothed(rows), average.count, 1});
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
