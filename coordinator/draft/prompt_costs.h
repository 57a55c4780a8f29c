// What prompt rows add to a pass: milliseconds a row, which grow with the row's position, because it attends to all
// before it. A line fitted to recent passes. No clock inside: the engine measures. One owner, not thread-safe.
#pragma once

#include <cstdint>

namespace tensorfold {

class PromptCosts {
 public:
  /// A pass with `rows` prompt rows, at positions that are `position` on average, took `ms` longer than without them.
  /// What is not finite and positive, or has no rows, is ignored.
  void record(int64_t rows, double position, double ms);

  /// Milliseconds of one row at `position`; `guess` as long as nothing is measured.
  double row_ms(double position, double guess) const;

  bool empty() const { return weight_ <= 0.0; }

 private:
  // Sums over rows, older passes counting less.
  double weight_ = 0;
  double x_ = 0;   // position
  double xx_ = 0;  // position^2
  double y_ = 0;   // milliseconds a row
  double xy_ = 0;
};

}  // namespace tensorfold
