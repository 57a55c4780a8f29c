#include "coordinator/commands/bench/link_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "transport/pass/plan.h"

namespace tensorfold {
namespace {

using Bytes = std::vector<std::byte>;
constexpr uint32_t kWindow = 8;
constexpr size_t kMaxReport = size_t{1} << 20;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

// A verify window in the middle of a reply.
PassPlan window_plan() {
  PassPlan plan;
  plan.sequence = 1;
  SequencePlan& sequence = plan.sequences.emplace_back();
  sequence.first_position = 500;
  sequence.accepted = 3;
  sequence.certain = 1;
  for (uint32_t row = 0; row < kWindow; ++row) {
    sequence.tokens.push_back(static_cast<int32_t>(100 + row));
    sequence.wants.push_back({row, 1});
  }
  return plan;
}

PassReport window_report(int rank) {
  PassReport report;
  report.rank = static_cast<uint32_t>(rank);
  for (uint32_t row = 0; row < kWindow; ++row) {
    RowReport& one = report.rows.emplace_back();
    one.row = row;
    one.candidates.push_back({1.0f, static_cast<int32_t>(row)});
  }
  return report;
}

absl::Status plan_and_candidates(Communicator& communicator) {
  const bool root = communicator.rank() == 0;
  Bytes message = root ? encode_plan(window_plan()) : Bytes();
  if (absl::Status s = communicator.broadcast(0, message, kMaxPlanBytes, soon()); !s.ok()) return s;
  Bytes mine;
  if (!root) {
    const absl::StatusOr<PassPlan> plan = decode_plan(message);
    if (!plan.ok()) return plan.status();
    mine = encode_report(window_report(communicator.rank()));
  }
  std::vector<Bytes> all;
  if (absl::Status s = communicator.gather(0, mine, &all, kMaxReport, soon()); !s.ok()) return s;
  for (size_t rank = 1; root && rank < all.size(); ++rank) {
    const absl::StatusOr<PassReport> report = decode_report(all[rank]);
    if (!report.ok()) return report.status();
  }
  return absl::OkStatus();
}

template <typename Round>
absl::Status measure_rounds(Communicator& communicator, const std::string& what, int rounds, const Round& round,
                            std::vector<LinkFigure>* figures) {
  std::vector<double> times;
  const int warm_up = rounds / 10 + 1;
  // Two rounds a sample: ranks that exchange one message after another tend to alternate between an early round, whose
  // message is there already, and a late one, and the median of single rounds would be the early one's.
  for (int i = -warm_up; i < rounds; ++i) {
    const auto start = Deadline::Clock::now();
    for (int repeat = 0; repeat < 2; ++repeat) {
      if (absl::Status status = round(); !status.ok()) return status;
    }
    const double us = std::chrono::duration<double, std::micro>(Deadline::Clock::now() - start).count();
    if (i >= 0) times.push_back(us / 2);
  }
  std::sort(times.begin(), times.end());
  figures->push_back({what, times[times.size() / 2], times[times.size() * 99 / 100]});
  return communicator.barrier(soon());
}

}  // namespace

absl::StatusOr<std::vector<LinkFigure>> bench_links(Communicator& communicator, int rounds) {
  std::vector<LinkFigure> figures;
  absl::Status status = measure_rounds(
      communicator, "plan + candidates", rounds, [&] { return plan_and_candidates(communicator); }, &figures);
  for (const size_t kib : {4, 16, 64, 1024}) {
    if (!status.ok()) return status;
    const std::vector<size_t> sizes(static_cast<size_t>(communicator.world()), kib << 10);
    const Bytes mine(kib << 10);
    Bytes out(mine.size() * sizes.size());
    status = measure_rounds(
        communicator, kib < 1024 ? fmt::format("nodes, {} KiB a rank", kib) : "nodes, 1 MiB a rank",
        kib < 1024 ? rounds : std::max(rounds / 10, 10),
        [&] { return communicator.all_gather(mine, sizes, out, soon()); }, &figures);
  }
  if (!status.ok()) return status;
  return figures;
}

}  // namespace tensorfold
