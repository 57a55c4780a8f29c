#include "coordinator/commands/verify/disk_trip.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

namespace tensorfold {
namespace {

constexpr std::chrono::seconds kLongest{30};

// Runs `orders` and then empty passes until every rank has answered each of `tickets`.
absl::Status run_orders(PassExecutor& executor, StateOrders orders, const std::vector<uint64_t>& tickets) {
  std::map<uint64_t, size_t> answers;
  const auto begin = std::chrono::steady_clock::now();
  while (true) {
    PassPlan plan;
    plan.kind = PlanKind::kPing;
    plan.orders = std::exchange(orders, {});
    const absl::StatusOr<PassResult> pass = executor.execute(std::move(plan));
    if (!pass.ok()) return pass.status();
    for (const PassReport& report : pass->reports) {
      for (const StateEvent& event : report.events) {
        if (!event.ok) return absl::DataLossError(fmt::format("rank {}: {}", report.rank, event.message));
        ++answers[event.ticket];
      }
    }
    const bool all = std::all_of(tickets.begin(), tickets.end(),
                                 [&](uint64_t ticket) { return answers[ticket] == pass->reports.size(); });
    if (all) return absl::OkStatus();
    if (std::chrono::steady_clock::now() - begin > kLongest) {
      return absl::DeadlineExceededError("a state did not reach the disk, or come back, within 30 s");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

absl::Status disk_trip(PassExecutor& executor, const DiskTrip& trip) {
  StateOrders saves, fetches, places;
  saves.takes = {{trip.slot, trip.snapshot}};
  std::vector<uint64_t> tickets;
  StateKey parent;
  for (uint64_t first = 0; first < trip.tokens.size(); first += kMaxSegmentTokens) {
    const std::span<const uint32_t> tokens =
        trip.tokens.subspan(first, std::min<size_t>(kMaxSegmentTokens, trip.tokens.size() - first));
    const uint64_t end = first + tokens.size();
    const bool here = trip.committed > first && trip.committed <= end;
    const auto pages_of = [&](const std::vector<int32_t>& pages) {
      return std::vector<int32_t>(pages.begin() + static_cast<std::ptrdiff_t>(first / 64),
                                  pages.begin() + static_cast<std::ptrdiff_t>((end + 63) / 64));
    };
    SaveOrder save;
    save.ticket = tickets.size() + 1;
    save.tokens.assign(tokens.begin(), tokens.end());
    save.key = state_key("verify", parent, save.tokens, here ? trip.committed : 0);
    save.parent = parent;
    save.first_position = first;
    save.pages = pages_of(trip.from);
    if (here) save.snapshot = trip.snapshot, save.committed = trip.committed;
    LoadOrder load;
    load.ticket = save.ticket;
    load.key = save.key;
    fetches.loads.push_back(load);
    load.step = LoadStep::kPlace;
    load.pages = pages_of(trip.to);
    if (here) load.snapshot = trip.snapshot;
    places.loads.push_back(load);
    parent = save.key;
    tickets.push_back(save.ticket);
    saves.saves.push_back(std::move(save));
  }
  if (absl::Status status = run_orders(executor, std::move(saves), tickets); !status.ok()) return status;
  // What comes back must come from the disk.
  StateOrders drop;
  drop.drops = {trip.snapshot};
  if (absl::Status status = run_orders(executor, std::move(drop), {}); !status.ok()) return status;
  if (absl::Status status = run_orders(executor, std::move(fetches), tickets); !status.ok()) return status;
  return run_orders(executor, std::move(places), tickets);
}

}  // namespace tensorfold
