// numpy.random.default_rng's numbers, against values that NumPy 2.4 gave.
#include "worker/model/numpy_generator.h"

#include <gtest/gtest.h>

#include <vector>

namespace tensorfold {
namespace {

std::vector<uint64_t> draw(uint64_t seed, uint64_t bound, int count) {
  NumpyGenerator generator(seed);
  std::vector<uint64_t> out;
  for (int i = 0; i < count; ++i) out.push_back(generator.below(bound));
  return out;
}

using Numbers = std::vector<uint64_t>;

// Protects: the multipliers that released engram tables were hashed with: default_rng(10007 * layer).integers(0,
// bound).
TEST(NumpyGenerator, EngramMultipliers) {
  EXPECT_EQ(draw(0, 46539438283891, 4), (Numbers{29643839136299, 12555722115027, 1906884788502, 769186873658}));
  EXPECT_EQ(draw(10007, 46539438283891, 4), (Numbers{38316048023122, 2419938046656, 17979836159674, 36993668729195}));
  EXPECT_EQ(draw(140098, 46539438283891, 4), (Numbers{33858405369630, 25755403400457, 15460673601360, 41309613242795}));
  EXPECT_EQ(draw(50035, 274877906943, 4), (Numbers{107500333366, 91403322602, 60145997054, 194633294348}));
}

// Protects: seeds of two words, and the draws that are thrown away (every other one at a bound just over half).
TEST(NumpyGenerator, WideSeedsAndRejections) {
  EXPECT_EQ(draw((uint64_t{1} << 40) + 5, (uint64_t{1} << 50) + 1, 3),
            (Numbers{5336156868223, 419492946627781, 661161556814267}));
  EXPECT_EQ(draw(7, (uint64_t{1} << 63) - 1, 3),
            (Numbers{5765488047046174020, 8275336682942969161, 7154437704795913392}));
  EXPECT_EQ(draw(10007, (uint64_t{1} << 63) + 1, 6),
            (Numbers{479593001838623258, 3563315849468963733, 6976413731397036916, 5906307652790778431,
                     536409479770357733, 7521451877440251285}));
}

}  // namespace
}  // namespace tensorfold
