#include "worker/runtime/rank_loop.h"

#include <fmt/format.h>

namespace tensorfold {
namespace {

constexpr size_t kMaxReportBytes = size_t{1} << 30;
constexpr std::chrono::seconds kIdleWait{1};

PassReport run_share(PassRunner& runner, const PassPlan& plan, int rank, std::vector<std::vector<int32_t>>* drafts) {
  PassReport report;
  report.epoch = plan.epoch;
  report.sequence = plan.sequence;
  report.rank = static_cast<uint32_t>(rank);
  const auto start = std::chrono::steady_clock::now();
  absl::StatusOr<LocalResult> local = runner.run(plan);
  const auto spent = std::chrono::steady_clock::now() - start;
  report.compute_us = static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::microseconds>(spent).count());
  if (!local.ok()) {
    report.error = std::string(local.status().message());
    return report;
  }
  report.rows = std::move(local->rows);
  report.events = runner.take_events();
  if (drafts != nullptr) *drafts = std::move(local->drafts);
  return report;
}

absl::Status check_report(const PassReport& report, const PassPlan& plan, int rank, const std::string& label) {
  if (report.epoch != plan.epoch || report.sequence != plan.sequence || report.rank != static_cast<uint32_t>(rank)) {
    return absl::DataLossError(
        fmt::format("rank {} ({}) reports rank {}, epoch {}, pass {}; expected epoch {}, pass {}", rank, label,
                    report.rank, report.epoch, report.sequence, plan.epoch, plan.sequence));
  }
  if (!report.error.empty()) {
    return absl::InternalError(
        fmt::format("rank {} ({}) failed in pass {}: {}", rank, label, plan.sequence, report.error));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PassResult> WorldExecutor::execute(PassPlan plan) {
  if (!failure_.ok()) return failure_;
  plan.epoch = communicator_ != nullptr ? communicator_->epoch() : 0;
  plan.sequence = sequence_ + 1;
  // A plan that is refused here was never sent: its number stays free, and the world stays in step.
  if (absl::Status status = validate_plan(plan); !status.ok()) return status;
  PassResult result;
  if (communicator_ == nullptr || communicator_->world() == 1) {
    ++sequence_;
    result.reports.push_back(run_share(runner_, plan, 0, &result.drafts));
    if (absl::Status status = check_report(result.reports[0], plan, 0, "here"); !status.ok()) return status;
    return result;
  }
  std::vector<std::byte> message = encode_plan(plan);
  if (message.size() > kMaxPlanBytes) {
    return absl::InvalidArgumentError(fmt::format("plan: {} bytes, at most {}", message.size(), kMaxPlanBytes));
  }
  ++sequence_;
  const Deadline deadline = runner_.deadline_for(plan.rows());
  failure_ = communicator_->broadcast(0, message, kMaxPlanBytes, deadline);
  if (failure_.ok()) failure_ = run_pass(plan, deadline, &result);
  if (!failure_.ok()) return failure_;
  return result;
}

absl::Status WorldExecutor::run_pass(const PassPlan& plan, Deadline deadline, PassResult* result) {
  result->reports.push_back(run_share(runner_, plan, 0, &result->drafts));
  std::vector<std::vector<std::byte>> all;
  const absl::Status gathered = communicator_->gather(0, {}, &all, kMaxReportBytes, deadline);
  if (!gathered.ok()) {
    // When rank 0's own share found the world broken, it knows more than the gather that cannot begin after it.
    const std::string& mine = result->reports[0].error;
    return absl::Status(gathered.code(), fmt::format("pass {}: {}", plan.sequence,
                                                     mine.empty() ? std::string(gathered.message()) : mine));
  }
  for (int rank = 1; rank < communicator_->world(); ++rank) {
    absl::StatusOr<PassReport> report = decode_report(all[static_cast<size_t>(rank)]);
    if (!report.ok()) {
      return absl::DataLossError(
          fmt::format("rank {} ({}): {}", rank, communicator_->label(rank), std::string(report.status().message())));
    }
    result->reports.push_back(*std::move(report));
  }
  for (int rank = 0; rank < communicator_->world(); ++rank) {
    const absl::Status status =
        check_report(result->reports[static_cast<size_t>(rank)], plan, rank, communicator_->label(rank));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status WorldExecutor::stop() {
  if (communicator_ == nullptr || communicator_->world() == 1) return absl::OkStatus();
  PassPlan plan;
  plan.kind = PlanKind::kStop;
  return execute(plan).status();
}

absl::Status run_rank(PassRunner& runner, Communicator& communicator, const RankLoopHooks& hooks) {
  uint64_t expected = 1;
  while (true) {
    std::vector<std::byte> message;
    const absl::Status received = communicator.broadcast(0, message, kMaxPlanBytes, Deadline::after(kIdleWait));
    if (absl::IsDeadlineExceeded(received)) {
      if (hooks.should_stop()) return absl::OkStatus();
      continue;
    }
    if (!received.ok()) return received;
    const absl::StatusOr<PassPlan> plan = decode_plan(message);
    if (!plan.ok()) return plan.status();
    if (plan->epoch != communicator.epoch() || plan->sequence != expected) {
      return absl::DataLossError(fmt::format("rank {}: plan of epoch {}, pass {}; expected epoch {}, pass {}",
                                             communicator.rank(), plan->epoch, plan->sequence, communicator.epoch(),
                                             expected));
    }
    ++expected;
    const PassReport report = run_share(runner, *plan, communicator.rank(), nullptr);
    const std::vector<std::byte> bytes = encode_report(report);
    const absl::Status sent =
        communicator.gather(0, bytes, nullptr, kMaxReportBytes, runner.deadline_for(plan->rows()));
    if (!sent.ok()) return sent;
    if (!report.error.empty()) return absl::InternalError(report.error);
    hooks.on_step(plan->sequence);
    if (plan->kind == PlanKind::kStop) return absl::OkStatus();
  }
}

}  // namespace tensorfold
