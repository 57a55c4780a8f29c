// What a pass of R rows costs: exponential averages of measured milliseconds, one for each row count seen, with
// estimates between and beyond. No clock inside: the engine measures. One owner, not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace tensorfold {

class PassCosts {
 public:
  // `weight`: how much one new measurement counts.
  explicit PassCosts(double weight = 0.1) : weight_(weight) {}

  // Measurements that are not finite and positive, or have no rows, are ignored.
  void record(size_t rows, double ms);

  // Milliseconds of a pass of `rows` rows. Linear between measured counts; beyond them a pass is taken to grow by
  // kGrowth of its cost a row; never falling as rows grow. Nothing measured yet: relative costs, 1 for one row.
  double estimate(size_t rows) const;

  bool empty() const { return averages_.empty(); }

 private:
  // Decoding reads the weights once whatever the rows: an unmeasured row is taken to be nearly free, so that it gets
  // measured.
  static constexpr double kGrowth = 0.03;
  static constexpr size_t kMaxEntries = 512;

  double weight_;
  std::map<size_t, double> averages_;  // rows -> ms
};

}  // namespace tensorfold
