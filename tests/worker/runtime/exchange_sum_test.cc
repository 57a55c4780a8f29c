// The tree over ranks must give the bits of the tree of one rank: every S, every world, at once and by rows.
#include "worker/runtime/exchange_sum.h"

#include <cmath>
#include <thread>

#include "kernels/numerics/slices.h"
#include "tests/worker/runtime/runtime_testing.h"
#include "transport/local/local_world.h"

namespace tensorfold {
namespace {

using Matrix = std::vector<float>;  // [rows, cols], no padding

struct Case {
  int64_t slices;
  int64_t rows;
  int64_t cols;
};

uint64_t next(uint64_t& state) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return state >> 17;
}

// Values that tell one order of addition from another: exponents from -60 to 60, and neighbouring slices that nearly
// cancel, so that what is left was low bits before.
std::vector<Matrix> adversarial_partials(const Case& c) {
  uint64_t state = static_cast<uint64_t>(c.slices * 1000003 + c.rows * 101 + c.cols);
  std::vector<Matrix> partials(static_cast<size_t>(c.slices), Matrix(static_cast<size_t>(c.rows * c.cols)));
  for (size_t i = 0; i < partials[0].size(); ++i) {
    const int kind = static_cast<int>(next(state) % 4);
    for (size_t s = 0; s < partials.size(); ++s) {
      const float unit = 1.0f + static_cast<float>(next(state) % (1u << 23)) * 0x1p-23f;
      const float sign = next(state) % 2 == 0 ? 1.0f : -1.0f;
      const int exponent = kind == 0 ? static_cast<int>(next(state) % 121) - 60 : static_cast<int>(next(state) % 24);
      partials[s][i] = sign * std::ldexp(unit, exponent);
      // Nearly the opposite of a slice one, two or four places before: a change of the tree's shape shows.
      const size_t back = size_t{1} << (kind - 1 < 0 ? 0 : kind - 1);
      if (kind != 0 && s >= back && next(state) % 3 != 0) {
        partials[s][i] = -partials[s - back][i] * (1.0f + static_cast<float>(next(state) % 4) * 0x1p-22f);
      }
    }
  }
  return partials;
}

float tree(const std::vector<Matrix>& partials, size_t first, size_t count, size_t element) {
  if (count == 1) return partials[first][element];
  const float left = tree(partials, first, count / 2, element);
  return left + tree(partials, first + count / 2, count / 2, element);
}

Matrix residual_of(const Case& c) {
  Matrix residual(static_cast<size_t>(c.rows * c.cols));
  uint64_t state = 5;
  for (float& value : residual) value = static_cast<float>(next(state) % 2048) * 0.25f - 256.0f;
  return residual;
}

Matrix expected_sum(const Case& c) {
  const std::vector<Matrix> partials = adversarial_partials(c);
  Matrix out = residual_of(c);
  for (size_t i = 0; i < out.size(); ++i) out[i] += tree(partials, 0, partials.size(), i);
  return out;
}

// One rank's share, with its own backend, as a pass would do it; twice, for the second call reuses everything.
absl::StatusOr<Matrix> rank_sum(const Case& c, int world, int rank, Communicator* communicator, int64_t long_bytes) {
  const std::vector<Matrix> partials = adversarial_partials(c);
  const std::unique_ptr<Ops> ops = one_thread_ops(rank % 2 == 0 ? "portable" : "auto");
  ExchangeSum sum(*ops, long_bytes);
  sum.use(communicator);
  if (absl::Status s = sum.begin_pass(Deadline::after(std::chrono::seconds(60))); !s.ok()) return s;
  const SliceRange owned = owned_slices(c.slices, world, rank);
  Matrix out(static_cast<size_t>(c.rows * c.cols));
  for (int round = 0; round < 2; ++round) {
    ops->begin_pass();
    const Tensor residual = ops->scratch(c.rows, c.cols);
    ops->upload(residual_of(c), residual);
    std::vector<Tensor> mine;
    for (int64_t s = owned.first; s < owned.end(); ++s) {
      mine.push_back(ops->scratch(c.rows, c.cols));
      ops->upload(partials[static_cast<size_t>(s)], mine.back());
    }
    if (absl::Status status = sum.add(c.slices, owned.first, mine, residual); !status.ok()) return status;
    ops->download(residual, out);
  }
  return out;
}

void check(const Case& c, int world, int64_t long_bytes) {
  SCOPED_TRACE(::testing::Message() << "S " << c.slices << ", world " << world << ", [" << c.rows << ", " << c.cols
                                    << "], long from " << long_bytes << " bytes");
  auto communicators = LocalWorld::create(world);
  ASSERT_TRUE(communicators.ok()) << communicators.status();
  const Matrix expected = expected_sum(c);
  std::vector<absl::StatusOr<Matrix>> results(static_cast<size_t>(world), absl::UnknownError("not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator* const communicator = (*communicators)[static_cast<size_t>(rank)].get();
      results[static_cast<size_t>(rank)] = rank_sum(c, world, rank, communicator, long_bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < world; ++rank) {
    const absl::StatusOr<Matrix>& result = results[static_cast<size_t>(rank)];
    ASSERT_TRUE(result.ok()) << "rank " << rank << ": " << result.status();
    EXPECT_TRUE(same_bits(*result, expected)) << "rank " << rank;
  }
}

// Protects: one tree for every world. Every S and every world that it allows, short messages at once and long ones by
// rows, also rows that do not divide by the world and columns that no vector width divides.
TEST(ExchangeSum, EveryWorldHasTheTreesBits) {
  for (const int64_t slices : {1, 2, 4, 8}) {
    for (int world = 1; world <= slices; ++world) {
      for (const int64_t rows : {1, 3, 8, 13}) {
        for (const int64_t cols : {64, 40, 7}) {
          check({slices, rows, cols}, world, int64_t{1} << 40);
          check({slices, rows, cols}, world, 1);
        }
      }
    }
  }
}

// Protects: the threshold in use: messages above it, beyond what a transport copies, have the same bits.
TEST(ExchangeSum, LongMessagesHaveTheTreesBits) {
  for (const int world : {2, 3, 4, 5, 8}) check({8, 130, 272}, world, 128 * 1024);
}

// Protects: the test itself: with these values other trees and plain loops do give other bits.
TEST(ExchangeSum, TheValuesTellOrdersApart) {
  const Case c = {8, 13, 64};
  const std::vector<Matrix> partials = adversarial_partials(c);
  size_t loop_differs = 0;
  size_t rotated_differs = 0;
  for (size_t i = 0; i < partials[0].size(); ++i) {
    float loop = 0;
    for (const Matrix& partial : partials) loop += partial[i];
    std::vector<Matrix> rotated(partials.begin() + 1, partials.end());
    rotated.push_back(partials[0]);
    const float sum = tree(partials, 0, 8, i);
    loop_differs += loop != sum ? 1 : 0;
    rotated_differs += tree(rotated, 0, 8, i) != sum ? 1 : 0;
  }
  EXPECT_GT(loop_differs, partials[0].size() / 4);
  EXPECT_GT(rotated_differs, partials[0].size() / 4);
}

// Protects: a lost peer ends the sum with an error that names it, and the residual is not half added.
TEST(ExchangeSum, NamesThePeerThatDoesNotCome) {
  auto communicators = LocalWorld::create(2, 1, {"spark-1", "spark-2"});
  ASSERT_TRUE(communicators.ok()) << communicators.status();
  const std::unique_ptr<Ops> ops = one_thread_ops();
  ExchangeSum sum(*ops);
  sum.use((*communicators)[0].get());
  ASSERT_TRUE(sum.begin_pass(Deadline::after(std::chrono::milliseconds(30))).ok());
  ops->begin_pass();
  const Tensor residual = ops->scratch(1, 16);
  ops->upload(Matrix(16, 2.0f), residual);
  std::vector<Tensor> mine;
  for (int i = 0; i < 4; ++i) {
    mine.push_back(ops->scratch(1, 16));
    ops->upload(Matrix(16, 1.0f), mine.back());
  }
  EXPECT_STATUS(sum.add(8, 0, mine, residual), absl::StatusCode::kDeadlineExceeded, ::testing::HasSubstr("rank 1"),
                ::testing::HasSubstr("spark-2"));
  Matrix out(16);
  ops->download(residual, out);
  EXPECT_EQ(out, Matrix(16, 2.0f));
}

}  // namespace
}  // namespace tensorfold
