// Slices, the tree, the float64 functions and the thread pool.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <thread>

#include "kernels/cpu/thread_pool.h"
#include "kernels/numerics/math64.h"
#include "kernels/numerics/slices.h"
#include "kernels/numerics/tree.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

// Protects the slice rule: 8, or the largest power of two that divides the units.
void slice_counts(Checker& c) {
  for (int64_t units = 1; units <= 300; ++units) {
    const int64_t s = slice_count(units);
    bool largest = units % s == 0;
    for (int64_t p = 1; p <= 8; p *= 2) largest = largest && (p <= s || units % p != 0);
    c.expect(largest, "slice_count(" + std::to_string(units) + ") = " + std::to_string(s));
  }
  c.expect(slice_count(640 / 32) == 4 && slice_count(9) == 1 && slice_count(48) == 8, "slice_count of known shapes");
  c.expect(widest_world({make_slices(24), make_slices(4), make_slices(12)}) == 4, "widest world is the smallest S");
}

// Protects ownership: runs are contiguous, cover all slices, differ by at most one, larger first.
void ownership(Checker& c) {
  for (int64_t s : {1, 2, 4, 8}) {
    for (int64_t world = 1; world <= s; ++world) {
      int64_t at = 0, last = s;
      for (int64_t rank = 0; rank < world; ++rank) {
        const SliceRange run = owned_slices(s, world, rank);
        c.expect(run.first == at && run.count >= 1 && run.count <= last, "run of a rank");
        last = run.count;
        at = run.end();
      }
      c.expect(at == s && owned_slices(s, world, 0).count - last <= 1, "runs cover the slices evenly");
    }
  }
  c.expect(owned_slices(8, 3, 0).count == 3 && owned_slices(8, 3, 1).count == 3 && owned_slices(8, 3, 2).count == 2,
           "8 slices on 3 ranks are 3, 3, 2");
  c.expect(owned_nodes(8, owned_slices(8, 3, 0)).size() == 2 && owned_nodes(8, owned_slices(8, 3, 1)).size() == 2 &&
               owned_nodes(8, owned_slices(8, 3, 2)).size() == 1,
           "nodes of a world of three are 2, 2, 1");
}

std::string sorted_sum(const std::string& a, const std::string& b) {  // IEEE addition commutes
  std::string sum("(");
  return sum.append(std::min(a, b)).append("+").append(std::max(a, b)).append(")");
}
std::string slice_name(int64_t slice) { return std::string(1, static_cast<char>('0' + slice)); }
std::string whole_tree(int64_t first, int64_t count) {
  if (count == 1) return slice_name(first);
  return sorted_sum(whole_tree(first, count / 2), whole_tree(first + count / 2, count / 2));
}

// Protects the promise across worlds: every S and every W evaluates the same expression tree, seen symbolically.
void one_tree_in_every_world(Checker& c) {
  for (int64_t s : {1, 2, 4, 8}) {
    for (int64_t world = 1; world <= s; ++world) {
      std::vector<std::string> nodes;
      for (int64_t rank = 0; rank < world; ++rank) {
        const SliceRange run = owned_slices(s, world, rank);
        std::vector<std::string> part;
        for (int64_t i = run.first; i < run.end(); ++i) part.push_back(slice_name(i));
        const auto add = [&](int dst, int src) { part.at(dst) = sorted_sum(part.at(dst), part.at(src)); };
        run_plan(fold_plan(s, run), add);
        for (const SliceRange& node : owned_nodes(s, run)) nodes.push_back(part.at(node.first - run.first));
        c.expect(world_nodes(s, world).offsets.at(rank + 1) == static_cast<int64_t>(nodes.size()), "node offsets");
      }
      run_plan(finish_plan(s, world),
               [&](int dst, int src) { nodes.at(dst) = sorted_sum(nodes.at(dst), nodes.at(src)); });
      c.expect(nodes.at(0) == whole_tree(0, s),
               "S " + std::to_string(s) + " W " + std::to_string(world) + " adds " + nodes.at(0));
    }
  }
}

double ulps(double got, long double want) {
  const double rounded = static_cast<double>(want);
  if (got == rounded) return 0;
  const double unit = std::nextafter(std::abs(rounded), HUGE_VAL) - std::abs(rounded);
  return static_cast<double>(std::abs(static_cast<long double>(got) - want) / unit);
}

// Protects the float64 functions: within 2 ulp of long double, and the special values.
void math64_accuracy(Checker& c) {
  Random random(1);
  double worst_exp = 0, worst_log = 0, worst_sin = 0, worst_cos = 0;
  for (int i = 0; i < 20000; ++i) {
    const double u = static_cast<double>(random.bits() >> 11) * 0x1p-53;
    const double x = (u - 0.5) * (i % 2 == 0 ? 1400.0 : 4.0);
    worst_exp = std::max(worst_exp, ulps(exp64(x), std::exp(static_cast<long double>(x))));
    const double y = i % 2 == 0 ? std::ldexp(1.0 + u, static_cast<int>(random.below(2000)) - 1000) : 0.5 + u;
    worst_log = std::max(worst_log, ulps(log64(y), std::log(static_cast<long double>(y))));
    const double angle = i % 3 == 0 ? std::floor(u * 0x1p31) : (i % 3 == 1 ? u * 0x1p31 : (u - 0.5) * 20);
    double s, k;
    sincos64(angle, &s, &k);
    // On machines whose long double is a double this compares with libm, itself within 1 ulp.
    worst_sin = std::max(worst_sin, ulps(s, std::sin(static_cast<long double>(angle))));
    worst_cos = std::max(worst_cos, ulps(k, std::cos(static_cast<long double>(angle))));
  }
  c.expect(worst_exp < 2 && worst_log < 2 && worst_sin < 2 && worst_cos < 2,
           "ulp errors: exp " + std::to_string(worst_exp) + " log " + std::to_string(worst_log) + " sin " +
               std::to_string(worst_sin) + " cos " + std::to_string(worst_cos));
  double s, k;
  sincos64(0x1p32, &s, &k);
  c.expect(std::isnan(s) && std::isnan(k), "sincos64 outside its range is NaN");
  c.expect(exp64(800) == HUGE_VAL && exp64(-800) == 0 && std::isnan(exp64(NAN)) && exp64(0) == 1,
           "exp64 special values");
  c.expect(log64(0) == -HUGE_VAL && std::isnan(log64(-1)) && log64(1) == 0 && log64(HUGE_VAL) == HUGE_VAL,
           "log64 special values");
  c.expect(exp64(-740) > 0 && exp64(-740) < 1e-320, "exp64 reaches subnormals");
  for (double e = -1; e <= 1; e += 0.03125) {
    c.expect(std::abs(pow64(1e7, e) / std::pow(1e7, e) - 1) < 2e-14, "pow64(1e7, " + std::to_string(e) + ")");
  }
}

// Protects the pool: every index exactly once, from several callers at once, and after idle times.
void thread_pool_covers_each_index_once(Checker& c) {
  for (int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      const int64_t count = round * 7 % 101, grain = 1 + round % 5;
      std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
      pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (const auto& h : hits) c.expect(h == 1, "an index was not run exactly once");
      if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    std::atomic<int64_t> sum{0};
    const auto work = [&] {
      for (int round = 0; round < 200; ++round) {
        pool.parallel_for(10, 1, [&](int64_t begin, int64_t end, int) { sum += (begin + end - 1) / 2; });
      }
    };
    std::thread other(work);
    work();
    other.join();
    c.expect(sum == 2 * 200 * 45, "two callers of one pool");
  }
}

}  // namespace

std::vector<NamedCheck> numerics_checks() {
  return {{"slice_counts", slice_counts},
          {"ownership", ownership},
          {"one_tree_in_every_world", one_tree_in_every_world},
          {"math64_accuracy", math64_accuracy},
          {"thread_pool_covers_each_index_once", thread_pool_covers_each_index_once}};
}

}  // namespace tensorfold
