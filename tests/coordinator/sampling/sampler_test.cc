#include "coordinator/sampling/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "kernels/numerics/gumbel.h"
#include "kernels/numerics/math64.h"

namespace tensorfold {
namespace {

// The contract's section 5 written down as plainly as possible: sorts everything, prunes nothing.
uint32_t plain_sample(const SamplingParams& p, std::vector<double> logits, uint64_t position) {
  struct E {
    double logit;
    uint32_t id;
  };
  std::vector<E> row;
  for (size_t i = 0; i < logits.size(); ++i) row.push_back({logits[i], static_cast<uint32_t>(i)});
  std::sort(row.begin(), row.end(),
            [](const E& a, const E& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); });
  if (p.temperature == 0.0) return row[0].id;
  if (p.top_k > 0 && p.top_k < row.size()) row.resize(p.top_k);
  const double max = row[0].logit / p.temperature;
  const auto mass = [&](const E& e) {
    return static_cast<uint64_t>(std::floor(exp64(e.logit / p.temperature - max) * 0x1p40));
  };
  if (p.top_p < 1.0) {
    long double total = 0;
    for (const E& e : row) total += mass(e);
    long double before = mass(row[0]);
    size_t keep = 1;
    while (keep < row.size() && before < std::floor(p.top_p * 0x1p52) * 0x1p-52L * total) before += mass(row[keep++]);
    row.resize(keep);
  }
  if (p.min_p > 0.0) {
    std::erase_if(row, [&](const E& e) { return static_cast<double>(mass(e)) < p.min_p * 0x1p40; });
  }
  double best = -std::numeric_limits<double>::infinity();
  uint32_t id = 0;
  for (const E& e : row) {
    const double score = e.logit / p.temperature + gumbel(p.seed, position, e.id);
    if (score > best || (score == best && e.id < id)) {
      best = score;
      id = e.id;
    }
  }
  return id;
}

std::vector<float> random_row(std::mt19937& rng, size_t size, bool ties) {
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> row(size);
  for (float& x : row) x = ties ? std::round(normal(rng)) : normal(rng);
  return row;
}

SamplingParams random_params(std::mt19937& rng) {
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  SamplingParams p;
  p.seed = rng();
  const double temperatures[] = {0.0, 0.3, 0.7, 1.0, 1.7};
  p.temperature = temperatures[rng() % 5];
  if (rng() % 2) p.top_k = 1 + rng() % 40;
  if (rng() % 2) p.top_p = unit(rng);
  if (rng() % 3 == 0) p.min_p = unit(rng) * 0.5;
  return p;
}

// A vocabulary cut into `ranks` contiguous parts; each sends its best n.
struct Split {
  std::vector<std::vector<SampleCandidate>> storage;
  std::vector<CandidateList> lists;

  Split(const std::vector<float>& row, size_t ranks, size_t n, std::mt19937& rng) {
    std::set<size_t> cuts = {0, row.size()};
    while (cuts.size() < ranks + 1) cuts.insert(rng() % row.size());
    for (auto it = cuts.begin(); std::next(it) != cuts.end(); ++it) {
      std::vector<SampleCandidate> part;
      for (size_t i = *it; i < *std::next(it); ++i) part.push_back({row[i], static_cast<uint32_t>(i)});
      std::sort(part.begin(), part.end(), [](const SampleCandidate& a, const SampleCandidate& b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
      });
      sizes.push_back(static_cast<uint32_t>(part.size()));
      part.resize(std::min(part.size(), n));
      storage.push_back(std::move(part));
    }
    for (size_t i = 0; i < storage.size(); ++i) lists.push_back({storage[i], sizes[i]});
  }
  std::vector<uint32_t> sizes;
};

// Protects the noise itself: values computed independently (Python integers and floats) from the contract's formulas.
TEST(Gumbel, MatchesTheContractsFormulas) {
  EXPECT_EQ(mix64(1), 0x5692161d100b05e5ull);
  EXPECT_EQ(row_key(42, 7), 0x5864fa25fd883a8aull);
  EXPECT_EQ(token_hash(row_key(42, 7), 1234), 0x1ace8994833643bfull);
  EXPECT_NEAR(gumbel(42, 7, 1234), -0.8138248449499381, 1e-12);
}

// Protects the skipping of tokens that cannot win: the bound really is one, the extremes of the hash included.
TEST(Gumbel, BoundHolds) {
  std::mt19937_64 rng(1);
  for (int i = 0; i < 200000; ++i) {
    uint64_t h = rng();
    if (i % 2) h = ~(h >> (rng() % 64));  // many leading ones: large noise
    ASSERT_GE(gumbel_bound(h), gumbel_of_hash(h)) << h;
    ASSERT_LE(gumbel_of_hash(h), kMaxGumbel);
  }
  EXPECT_NEAR(gumbel_of_hash(~uint64_t{0}), 37.43, 0.01);  // u rounds to 1 and must not give an infinity
  EXPECT_GE(gumbel_bound(~uint64_t{0}), gumbel_of_hash(~uint64_t{0}));
  EXPECT_TRUE(std::isfinite(gumbel_of_hash(0)));
}

// Protects the whole-row path against the contract written down naively.
TEST(SampleRow, EqualsThePlainReading) {
  std::mt19937 rng(2);
  for (int i = 0; i < 3000; ++i) {
    const std::vector<float> row = random_row(rng, 1 + rng() % 300, i % 3 == 0);
    const SamplingParams p = random_params(rng);
    const uint64_t position = rng() % 100000;
    const auto got = sample_row(p, row, position, {});
    ASSERT_TRUE(got.ok());
    ASSERT_EQ(got->id, plain_sample(p, {row.begin(), row.end()}, position)) << i;
  }
}

// Protects "nothing about the choice may depend on where the vocabulary is cut": candidates give the whole row's token,
// for any split in 1..8 and with what row_needs asks for, they always suffice.
TEST(SampleCandidates, EqualsTheWholeRow) {
  std::mt19937 rng(3);
  int decided = 0;
  int undecided = 0;
  for (int i = 0; i < 6000; ++i) {
    const std::vector<float> row = random_row(rng, 16 + rng() % 300, i % 2 == 0);
    const SamplingParams p = random_params(rng);
    const RowNeeds needs = row_needs(p, false);
    const size_t n = needs.full_row || needs.draw ? 1 + rng() % 64 : needs.top_n;
    const Split split(row, 1 + rng() % 8, n, rng);
    const uint64_t position = rng() % 100000;
    const auto full = sample_row(p, row, position, {});
    const auto got = sample_candidates(p, split.lists, position);
    ASSERT_TRUE(full.ok());
    ASSERT_TRUE(got.ok()) << got.status();
    if (!needs.full_row && !needs.draw) {
      ASSERT_FALSE(got->needs_full_row) << i;
    }
    (got->needs_full_row ? undecided : decided) += 1;
    if (!got->needs_full_row) {
      ASSERT_EQ(got->sampled.id, full->id) << i;
      ASSERT_EQ(got->sampled.logit, full->logit) << i;
    }
  }
  EXPECT_GT(decided, 1000);
  EXPECT_GT(undecided, 100);
}

// Protects the draw from everything: each rank's own best score, of however it is cut, leads to the whole row's token,
// near-ties included; a logit that is not finite is reported, the first of all ranks'.
TEST(SampleDrawn, EqualsTheWholeRow) {
  std::mt19937 rng(12);
  for (int i = 0; i < 3000; ++i) {
    const std::vector<float> row = random_row(rng, 1 + rng() % 300, i % 2 == 0);
    SamplingParams p;
    p.temperature = 0.05 + static_cast<double>(rng() % 100) / 40;
    p.seed = rng();
    ASSERT_TRUE(row_needs(p, false).draw);
    const uint64_t position = rng() % 100000;
    const uint64_t key = row_key(p.seed, position);
    const size_t ranks = 1 + rng() % 8;
    std::vector<SampleCandidate> best;
    for (size_t r = 0; r < ranks; ++r) {
      KeyedDraw draw;
      for (size_t id = row.size() * r / ranks; id < row.size() * (r + 1) / ranks; ++id) {
        draw.offer(key, static_cast<double>(row[id]) / p.temperature, static_cast<double>(row[id]),
                   static_cast<uint32_t>(id));
      }
      if (draw.any) best.push_back({static_cast<float>(draw.logit), draw.id});
    }
    const auto got = sample_drawn(p, best, position);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(got->id, sample_row(p, row, position, {})->id) << i;
    best.push_back({NAN, 900});
    best.push_back({INFINITY, 800});
    const auto broken = sample_drawn(p, best, position);
    ASSERT_FALSE(broken.ok());
    ASSERT_NE(broken.status().message().find("token 800 at position"), std::string::npos);
  }
}

// Protects against a nucleus that is cut short: it crosses beyond what was sent, so the whole row must be asked for.
TEST(SampleCandidates, AsksForTheRowWhenTheNucleusGoesOn) {
  const std::vector<float> row(64, 1.0f);
  std::mt19937 rng(4);
  SamplingParams p;
  p.top_p = 0.9;
  const Split few(row, 2, 4, rng);
  EXPECT_TRUE(sample_candidates(p, few.lists, 0)->needs_full_row);
  const Split all(row, 2, 64, rng);
  EXPECT_FALSE(sample_candidates(p, all.lists, 0)->needs_full_row);
  // A peaked row is decided from few candidates: what was not sent has no mass.
  std::vector<float> peaked(64, -50.0f);
  peaked[9] = 10.0f;
  const Split peak(peaked, 3, 2, rng);
  const auto got = sample_candidates(p, peak.lists, 0);
  EXPECT_FALSE(got->needs_full_row);
  EXPECT_EQ(got->sampled.id, 9u);
}

// Protects against wire data: unsorted lists, nothing sent, a broken logit.
TEST(SampleCandidates, RefusesBadLists) {
  SamplingParams greedy;
  greedy.temperature = 0;
  const std::vector<SampleCandidate> wrong = {{1.0f, 1}, {2.0f, 0}};
  const CandidateList lists[] = {{wrong, 8}};
  EXPECT_EQ(sample_candidates(greedy, lists, 5).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sample_candidates(greedy, {}, 5).status().code(), absl::StatusCode::kInvalidArgument);
  const std::vector<SampleCandidate> twice = {{1.0f, 1}, {1.0f, 1}};
  const CandidateList doubled[] = {{twice, 8}};
  EXPECT_EQ(sample_candidates(greedy, doubled, 5).status().code(), absl::StatusCode::kInvalidArgument);
  const std::vector<SampleCandidate> nan = {{std::nanf(""), 3}};
  const CandidateList broken[] = {{nan, 8}};
  const auto status = sample_candidates(greedy, broken, 77).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(status.message()).find("position 77"), std::string::npos);
  // A rank that sent nothing might hold the best token.
  const std::vector<SampleCandidate> one = {{1.0f, 1}};
  const CandidateList blind[] = {{one, 1}, {{}, 7}};
  EXPECT_TRUE(sample_candidates(greedy, blind, 5)->needs_full_row);
}

// Protects "a broken model is an error that names the position, never a crash or a guess".
TEST(SampleRow, NonFiniteLogitsAreNamed) {
  for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> row(10, 0.0f);
    row[4] = bad;
    for (double temperature : {0.0, 1.0}) {
      SamplingParams p;
      p.temperature = temperature;
      const auto got = sample_row(p, row, 123, {});
      ASSERT_EQ(got.status().code(), absl::StatusCode::kInternal);
      EXPECT_NE(std::string(got.status().message()).find("token 4 at position 123"), std::string::npos);
    }
  }
  EXPECT_FALSE(sample_row({}, {}, 0, {}).ok());
  EXPECT_FALSE(sample_row({}, std::vector<float>(kMaxVocabulary + 1), 0, {}).ok());
}

// Protects greedy's tie rule, signed zeros included.
TEST(SampleRow, GreedyTiesGoToTheLowestId) {
  SamplingParams p;
  p.temperature = 0;
  EXPECT_EQ(sample_row(p, std::vector<float>{1, 5, 5, 5}, 0, {})->id, 1u);
  EXPECT_EQ(sample_row(p, std::vector<float>{-0.0f, 0.0f}, 0, {})->id, 0u);
  p.temperature = 1e-9;  // "no randomness" as some clients write it
  EXPECT_EQ(sample_row(p, std::vector<float>{1, 5, 5, 5}, 0, {})->id, 1u);
}

// Protects top-p's rule: the token that crosses is kept, and 0 keeps the top token alone.
TEST(SampleRow, TopPKeepsTheCrossingToken) {
  // Probabilities 1/2, 1/4, 1/8, 1/8.
  const float ln2 = 0.69314718f;
  const std::vector<float> row = {0.0f, -ln2, -2 * ln2, -2 * ln2};
  std::set<uint32_t> half;
  std::set<uint32_t> more;
  std::set<uint32_t> none;
  for (uint64_t position = 0; position < 500; ++position) {
    SamplingParams p;
    p.top_p = 0.49;
    half.insert(sample_row(p, row, position, {})->id);
    p.top_p = 0.6;
    more.insert(sample_row(p, row, position, {})->id);
    p.top_p = 0.0;
    none.insert(sample_row(p, row, position, {})->id);
  }
  EXPECT_EQ(half, (std::set<uint32_t>{0}));
  EXPECT_EQ(more, (std::set<uint32_t>{0, 1}));
  EXPECT_EQ(none, (std::set<uint32_t>{0}));
}

// Protects min-p: measured against the top token's probability.
TEST(SampleRow, MinPIsAgainstTheTop) {
  const float ln2 = 0.69314718f;
  const std::vector<float> row = {0.0f, -ln2, -2 * ln2, -3 * ln2};
  std::set<uint32_t> seen;
  for (uint64_t position = 0; position < 500; ++position) {
    SamplingParams p;
    p.min_p = 0.2;
    seen.insert(sample_row(p, row, position, {})->id);
  }
  EXPECT_EQ(seen, (std::set<uint32_t>{0, 1, 2}));
}

// Protects that the noise is a fair draw: frequencies follow the softmax.
TEST(SampleRow, FrequenciesFollowTheSoftmax) {
  const std::vector<float> row = {2.0f, 1.0f, 0.0f, -1.0f};
  std::vector<double> count(4, 0.0);
  SamplingParams p;
  p.seed = 99;
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) count[sample_row(p, row, static_cast<uint64_t>(i), {})->id] += 1;
  double sum = 0;
  for (float x : row) sum += std::exp(x);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(count[i] / kDraws, std::exp(row[i]) / sum, 0.01);
}

// Protects the stated meaning of penalties and bias ("accepted and ignored" is a failure users have met).
TEST(SampleRow, PenaltiesAndBias) {
  SamplingParams p;
  p.temperature = 0;
  const std::vector<float> row = {4.0f, 3.0f, -1.0f, -1.5f};
  TokenCounts counts(std::vector<uint32_t>{0});  // token 0 is in the prompt
  const auto pick = [&](const SamplingParams& q) { return *sample_row(q, row, 0, counts); };

  SamplingParams repetition = p;
  repetition.repetition_penalty = 2.0;  // reads the prompt too: 4 / 2 < 3
  EXPECT_EQ(pick(repetition).id, 1u);
  EXPECT_TRUE(row_needs(repetition, false).full_row);

  SamplingParams presence = p;
  presence.presence_penalty = 2.0;  // the prompt does not count
  EXPECT_EQ(pick(presence).id, 0u);
  counts.push(0);
  EXPECT_EQ(pick(presence).id, 1u);
  counts.pop();
  EXPECT_EQ(pick(presence).id, 0u);

  SamplingParams frequency = p;
  frequency.frequency_penalty = 0.6;
  counts.push(0);
  EXPECT_EQ(pick(frequency).id, 0u);  // 4 - 0.6
  counts.push(0);
  EXPECT_EQ(pick(frequency).id, 1u);  // 4 - 1.2
  counts.pop_to(0);

  // A negative logit is multiplied: the penalty never helps a token.
  const std::vector<float> negative = {-1.0f, -1.5f};
  SamplingParams twice = p;
  twice.repetition_penalty = 2.0;
  EXPECT_EQ(sample_row(twice, negative, 0, counts)->id, 1u);

  SamplingParams bias = p;
  bias.logit_bias = {{3, 100.0}, {0, -100.0}};
  EXPECT_EQ(pick(bias).id, 3u);
  bias.logit_bias = {{4, 1.0}};
  EXPECT_EQ(sample_row(bias, row, 0, counts).status().code(), absl::StatusCode::kInvalidArgument);
}

// Protects the exactness of verify windows: a row with drafts pushed before it gives what the serial row gives, and
// rejected drafts leave no trace.
TEST(SampleRow, VerifyRowsSeeTheSerialHistory) {
  std::mt19937 rng(5);
  SamplingParams p;
  p.seed = 7;
  p.repetition_penalty = 1.3;
  p.presence_penalty = 0.5;
  p.frequency_penalty = 0.4;
  const std::vector<uint32_t> prompt = {1, 2, 3};
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < 20; ++i) rows.push_back(random_row(rng, 20, true));

  TokenCounts serial(prompt);
  std::vector<uint32_t> reply;
  for (size_t i = 0; i < rows.size(); ++i) {
    reply.push_back(sample_row(p, rows[i], 3 + i, serial)->id);
    serial.push(reply.back());
  }
  TokenCounts drafted(prompt);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (uint32_t wrong : {5u, 5u, 6u}) drafted.push(wrong);  // a window that is rejected
    drafted.pop_to(i);
    ASSERT_EQ(sample_row(p, rows[i], 3 + i, drafted)->id, reply[i]);
    drafted.push(reply[i]);
  }
}

// Protects what rank 0 asks for: asking for too little costs a second round trip, too much costs the link.
TEST(RowNeeds, ByParameters) {
  SamplingParams p;
  EXPECT_TRUE(row_needs(p, false).draw);  // temperature alone
  EXPECT_FALSE(row_needs(p, false).full_row);
  EXPECT_TRUE(row_needs(p, true).full_row);
  p.top_p = 0.9;
  EXPECT_TRUE(row_needs(p, false).full_row);
  p.top_p = 1.0;
  p.min_p = 0.1;
  EXPECT_TRUE(row_needs(p, false).full_row);
  p.min_p = 0.0;
  p.top_k = 40;
  EXPECT_FALSE(row_needs(p, false).full_row);
  EXPECT_EQ(row_needs(p, false).top_n, 40u);
  EXPECT_TRUE(row_needs(p, true).full_row);
  p.top_p = 0.9;
  p.min_p = 0.1;
  EXPECT_FALSE(row_needs(p, false).full_row);
  p.top_k = 257;
  EXPECT_TRUE(row_needs(p, false).full_row);
  p.temperature = 0;
  EXPECT_EQ(row_needs(p, false).top_n, 1u);
  p.logit_bias = {{1, 2.0}};
  EXPECT_TRUE(row_needs(p, false).full_row);
}

// Protects the shortcut past the exact total: thresholds that lie on a token's edge, where bounds on the total cannot
// decide.
TEST(SampleRow, NucleusOnTheEdge) {
  std::mt19937 rng(6);
  for (int i = 0; i < 300; ++i) {
    const size_t size = 2 + rng() % 64;
    const std::vector<float> row(size, 1.0f);  // k equal tokens: masses up to j are exactly j / k of the total
    SamplingParams p;
    p.seed = rng();
    p.top_p = static_cast<double>(1 + rng() % size) / static_cast<double>(size);
    if (p.top_p == 1.0) continue;
    const uint64_t position = rng() % 1000;
    ASSERT_EQ(sample_row(p, row, position, {})->id, plain_sample(p, {row.begin(), row.end()}, position));
  }
}

// Protects the nucleus against rounding of a sum: a large flat row has an exact total.
TEST(SampleRow, LargeFlatRows) {
  const std::vector<float> row(kMaxVocabulary, 0.5f);
  SamplingParams p;
  p.top_p = 0.5;
  for (uint64_t position = 0; position < 3; ++position) {
    const auto got = sample_row(p, row, position, {});
    ASSERT_TRUE(got.ok());
    EXPECT_LT(got->id, kMaxVocabulary / 2);  // equal logits: the lower half by id is the nucleus
  }
}

}  // namespace
}  // namespace tensorfold
