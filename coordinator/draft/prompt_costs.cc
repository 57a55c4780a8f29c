#include "coordinator/draft/prompt_costs.h"

#include <algorithm>
#include <cmath>

namespace tensorfold {
namespace {

constexpr double kFade = 0.95;       // a pass counts e times less after about 20 others
constexpr double kLeastPart = 0.25;  // of the mean: a fitted line is not believed further down
constexpr double kUnit = 1024.0;     // positions are counted in so many tokens, which keeps the sums alike in size

}  // namespace

void PromptCosts::record(int64_t rows, double position, double ms) {
  if (rows <= 0 || !std::isfinite(ms) || ms <= 0.0) return;
  const double w = static_cast<double>(rows);
  const double x = position / kUnit;
  const double y = ms / w;
  for (double* sum : {&weight_, &x_, &xx_, &y_, &xy_}) *sum *= kFade;
  weight_ += w;
  x_ += w * x;
  xx_ += w * x * x;
  y_ += w * y;
  xy_ += w * x * y;
}

double PromptCosts::row_ms(double position, double guess) const {
  if (empty()) return guess;
  const double mean_x = x_ / weight_;
  const double mean_y = y_ / weight_;
  const double variance = xx_ / weight_ - mean_x * mean_x;
  const double covariance = xy_ / weight_ - mean_x * mean_y;
  // Later rows never cost less; positions that hardly differ tell nothing of a slope.
  const double slope = variance > 1e-3 ? std::max(0.0, covariance / variance) : 0.0;
  return std::max(mean_y + slope * (position / kUnit - mean_x), mean_y * kLeastPart);
}

}  // namespace tensorfold
