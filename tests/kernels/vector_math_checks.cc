// exp, sigmoid and softplus of each instruction set.
#include <bit>
#include <cmath>

#include "kernels/cpu/isa.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

using LaneFunction = void (*)(const float*, float*, int64_t);

// Arguments over the whole range, and the edges where results become 0, subnormal, infinite or NaN.
std::vector<float> arguments() {
  Random random(2);
  std::vector<float> x = {0.0f,    -0.0f,   1.0f,    -1.0f,   88.72f,  88.73f,   88.8f,  89.0f,     -87.33f, -87.34f,
                          -103.9f, -104.0f, -104.1f, 1e30f,   -1e30f,  1e-30f,   -1e-8f, 20.0f,     -20.0f,  INFINITY,
                          17.0f,   -17.0f,  1e-40f,  -1e-40f, 0.3466f, -0.3466f, NAN,    -INFINITY, 50.0f};
  for (int i = 0; i < 20000; ++i) x.push_back(random.uniform() * (i % 4 == 0 ? 110.0f : 10.0f));
  return x;
}

double worst_ulps(const std::vector<float>& x, const std::vector<float>& y, double (*want)(double), double tiny) {
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = want(x[i]);
    const float rounded = static_cast<float>(w);
    if (std::isnan(x[i]) || std::isinf(rounded) || rounded == 0) {
      const bool same = std::isnan(x[i]) ? std::isnan(y[i]) : y[i] == rounded || std::abs(y[i] - w) < 2e-45;
      worst = same ? worst : HUGE_VAL;
      continue;
    }
    if (std::abs(y[i] - w) < tiny) continue;
    const double unit = std::nextafter(std::abs(rounded), INFINITY) - std::abs(rounded);
    worst = std::max(worst, std::abs(y[i] - w) / unit);
  }
  return worst;
}

// Protects both accuracy and equality of the vector math on every instruction set, tails included.
void vector_math(Checker& c) {
  const std::vector<float> x = arguments();
  struct Case {
    const char* name;
    LaneFunction KernelTable::*function;
    double (*want)(double);
    double bound;
    double tiny;  // absolute error that is always allowed: sigmoid is 0 where e^-x overflows
  };
  const Case cases[] = {
      {"exp", &KernelTable::exp, [](double v) { return std::exp(v); }, 1.1, 0.0},
      {"sigmoid", &KernelTable::sigmoid, [](double v) { return 1 / (1 + std::exp(-v)); }, 3.0, 4e-39},
      {"softplus", &KernelTable::softplus,
       [](double v) { return std::fmax(v, 0.0) + std::log1p(std::exp(-std::fabs(v))); }, 3.0, 0.0},
  };
  for (const Case& one : cases) {
    std::vector<float> first;
    for (const std::string& isa : available_isas()) {
      std::vector<float> y(x.size());
      (kernels_for(isa)->*one.function)(x.data(), y.data(), static_cast<int64_t>(x.size()));
      const double worst = worst_ulps(x, y, one.want, one.tiny);
      c.expect(worst < one.bound, std::string(one.name) + " on " + isa + ": " + std::to_string(worst) + " ulp");
      for (float& v : y) v = std::isnan(v) ? NAN : v;
      if (first.empty()) first = y;
      c.expect(same_bits(first, y), std::string(one.name) + " differs on " + isa);
    }
  }
}

}  // namespace

std::vector<NamedCheck> vector_math_checks() { return {{"vector_math", vector_math}}; }

}  // namespace tensorfold
