#include "coordinator/load/load.h"

#include <algorithm>
#include <iterator>

namespace tensorfold {

absl::StatusOr<LoadReport> run_load(const LoadOptions& options, const LoadServer& server,
                                    const std::function<void(const LevelFigures&)>& on_level) {
  if (absl::Status status = options.validate(); !status.ok()) return status;
  LoadReport report;
  report.options = options;
  report.server = server;
  ConversationOptions& conversation = report.options.conversation;
  conversation.model = server.model;
  conversation.tokens_per_word = server.tokens_per_word;
  if (server.context > 0) conversation.overlong_tokens = server.context + server.context / 4;

  std::vector<LevelPlan> plans;
  for (const double rate : options.rates) plans.push_back({.users = 0, .rate = rate, .first_conversation = 0});
  if (options.rates.empty()) {
    for (const int users : options.concurrency) {
      plans.push_back({.users = users, .rate = 0, .first_conversation = 0});
    }
  }
  uint64_t next = 0;
  for (LevelPlan& plan : plans) {
    plan.first_conversation = next;
    absl::StatusOr<LevelResult> level = run_level(report.options, server.client, plan);
    if (!level.ok()) return level.status();
    next = level->next_conversation;
    if (on_level) on_level(level->figures);
    report.levels.push_back(std::move(level->figures));
    std::move(level->hashes.begin(), level->hashes.end(), std::back_inserter(report.hashes));
  }
  return report;
}

}  // namespace tensorfold
