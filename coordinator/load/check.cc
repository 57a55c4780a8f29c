#include "coordinator/load/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <thread>

#include "coordinator/load/conversation.h"
#include "coordinator/load/malformed.h"

namespace tensorfold {
namespace {

constexpr size_t kShown = 20;
constexpr int kAttempts = 10;  // of a request that finds no place, as when dropped ones are still being cleared away
constexpr std::chrono::seconds kProgressEvery{5};

absl::StatusOr<StreamedReply> ask_serially(LoadClient& client, const LoadOptions& options, const Conversation& talk) {
  const std::string body = talk.body(/*serial=*/true);
  const std::string bytes = post_head(options, "/v1/chat/completions", body.size()) + body;
  for (int attempt = 1;; ++attempt) {
    Exchange answer = client.ask({.bytes = bytes, .ends_after = false, .keeps = true, .leave = {}});
    if (answer.end != ExchangeEnd::kReply) return absl::UnavailableError("while checking: " + answer.message);
    if (answer.status == 200 && answer.streamed && answer.reply.complete()) return std::move(answer.reply);
    const bool again = answer.status == 429 || answer.status == 503;
    if (!again || attempt == kAttempts) {
      return absl::InternalError(fmt::format("while checking: status {}, {}", answer.status,
                                             answer.streamed ? answer.reply.error_message : error_text(answer.body)));
    }
    std::this_thread::sleep_for(std::chrono::seconds(std::clamp(answer.retry_after_s, 1, 5)));
  }
}

absl::Status check_conversation(LoadClient& client, const LoadReport& report, const HashedConversation& hashed,
                                HashCheck* out) {
  Conversation talk(report.options.conversation, hashed.index);
  for (const std::string& sha : hashed.shas) {
    absl::StatusOr<StreamedReply> reply = ask_serially(client, report.options, talk);
    if (!reply.ok()) return reply.status();
    if (sha.empty() || reply->token_sha.empty()) {
      return absl::FailedPreconditionError(
          "the server's replies have no tensorfold.token_sha: nothing can be compared");
    }
    ++out->compared;
    if (reply->token_sha != sha) {
      ++out->different;
      if (out->first.size() < kShown) out->first.push_back({hashed.index, talk.turn(), sha, reply->token_sha});
      return absl::OkStatus();
    }
    talk.take(*reply);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HashCheck> check_load(const LoadReport& report, const std::function<void(size_t, size_t)>& on_progress) {
  if (report.hashes.empty()) {
    return absl::FailedPreconditionError("no reply was completed under load, so there is nothing to check");
  }
  boost::asio::io_context io;
  LoadClient client(io, report.server.client);
  HashCheck out;
  LoadClock::time_point told = LoadClock::now();
  for (size_t i = 0; i < report.hashes.size(); ++i) {
    if (absl::Status status = check_conversation(client, report, report.hashes[i], &out); !status.ok()) return status;
    if (on_progress && LoadClock::now() - told > kProgressEvery) {
      on_progress(i + 1, report.hashes.size());
      told = LoadClock::now();
    }
  }
  return out;
}

}  // namespace tensorfold
