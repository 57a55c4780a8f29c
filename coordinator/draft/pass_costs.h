// What a pass of R rows costs: exponential averages of measured milliseconds, one for each row count seen, with
// estimates between and beyond. No clock inside: the engine measures. One owner, not thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

namespace tensorfold {

class PassCosts {
 public:
  // `weight`: how much one new measurement counts once there are 1 / weight of them.
  explicit PassCosts(double weight = 0.1) : weight_(weight) {}

  // Measurements that are not finite and positive, or have no rows, are ignored.
  void record(size_t rows, double ms);

  // Milliseconds of a pass of `rows` rows. Averages are smoothed over a quarter of their rows, each counting as much as
  // it was measured, and never fall as rows grow: those that do are replaced by their common mean. Linear between
  // measured counts; beyond them a pass is taken to grow by kGrowth of its cost a row. Nothing measured yet: relative
  // costs, 1 for one row.
  double estimate(size_t rows) const;

  bool empty() const { return averages_.empty(); }

 private:
  // Decoding reads the weights once whatever the rows: an unmeasured row is taken to be nearly free, so that it gets
  // measured.
  static constexpr double kGrowth = 0.03;
  static constexpr size_t kMaxEntries = 512;

  struct Average {
    double ms = 0;
    double count = 0;  // at most 1 / weight: what is long ago does not count
  };
  struct Point {
    size_t rows = 0;
    double ms = 0;
  };
  const std::vector<Point>& curve() const;
  double smoothed(size_t rows) const;  // of rows that were measured

  double weight_;
  std::map<size_t, Average> averages_;
  mutable std::vector<Point> curve_;  // rising; empty: to be made again
};

}  // namespace tensorfold
