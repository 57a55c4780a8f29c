// When users of an open loop come: a Poisson process, so that they come in clusters, as people do.
#pragma once

#include <cstdint>

#include "coordinator/load/random.h"

namespace tensorfold {

/// The same seed and rate give the same times. One owner.
class PoissonArrivals {
 public:
  /// `rate`: arrivals a second, positive.
  PoissonArrivals(double rate, uint64_t seed);
  /// Seconds from the start to the next arrival; ascending.
  double next();

 private:
  double rate_;
  double at_ = 0;
  LoadRandom random_;
};

}  // namespace tensorfold
