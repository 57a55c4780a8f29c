#include "coordinator/load/arrivals.h"

#include <cmath>

namespace tensorfold {
namespace {

constexpr uint64_t kStream = 0xA221;

}  // namespace

PoissonArrivals::PoissonArrivals(double rate, uint64_t seed) : rate_(rate), random_(seed, kStream) {}

double PoissonArrivals::next() {
  at_ += -std::log1p(-random_.unit()) / rate_;  // an exponential waiting time; unit() is below 1
  return at_;
}

}  // namespace tensorfold
