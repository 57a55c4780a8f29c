#include "coordinator/load/level.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cmath>
#include <numeric>
#include <utility>

#include "coordinator/load/arrivals.h"
#include "coordinator/load/conversation.h"
#include "coordinator/load/malformed.h"

namespace tensorfold {
namespace {

namespace asio = boost::asio;

constexpr uint64_t kDiceStream = 0xD1CE;
constexpr uint64_t kCheckStream = 0xC8EC;
constexpr size_t kMostErrorKinds = 64;
constexpr size_t kMostAtOnce = 4096;  // of an open loop; descriptors are finite
constexpr int kMostUnanswered = 64;   // connections refused in a row: the server is gone
constexpr std::chrono::milliseconds kAfterRefusal{200};
constexpr int kMostWait = 5;  // seconds of a Retry-After that are honoured

double seconds(LoadClock::duration time) { return std::chrono::duration<double>(time).count(); }

// Amounts by the time at which they came, in slots of 20 ms: what came before a time that is known only later.
class Timeline {
 public:
  void add(double at_s, double amount) {
    const auto slot = static_cast<size_t>(std::max(at_s, 0.0) / kSlot);
    if (slot >= slots_.size()) slots_.resize(slot + 1);
    slots_[slot] += amount;
  }
  double until(double at_s) const {
    const auto slots = static_cast<size_t>(std::max(std::lround(at_s / kSlot), 0L));
    const size_t end = std::min(slots_.size(), slots);
    return std::accumulate(slots_.begin(), slots_.begin() + static_cast<std::ptrdiff_t>(end), 0.0);
  }

 private:
  static constexpr double kSlot = 0.02;
  std::vector<double> slots_;
};

// A conversation under way, and in a closed loop the user who has it.
struct Talk {
  Talk(const ConversationOptions& options, uint64_t number) : conversation(options, number) { hashes.index = number; }
  Conversation conversation;
  HashedConversation hashes;
  LoadClock::time_point due;
  bool checked = false;
};

class Level {
 public:
  Level(const LoadOptions& options, const ClientSettings& client, const LevelPlan& plan)
      : options_(options), plan_(plan), client_(io_, client), timer_(io_), next_(plan.first_conversation) {
    if (options.duration.count() == 0) {
      const int wanted = options.conversations > 0 ? options.conversations : std::max(16, 4 * plan.users);
      end_ = next_ + static_cast<uint64_t>(wanted);
    }
  }

  absl::StatusOr<LevelResult> run() {
    start_ = LoadClock::now();
    if (plan_.users > 0) {
      for (int user = 0; user < plan_.users; ++user) begin_next(start_);
    } else {
      arrivals_.emplace(plan_.rate, options_.conversation.seed ^ plan_.first_conversation);
      await_arrival();
    }
    io_.run();
    if (!gone_.ok()) return gone_;
    return result();
  }

 private:
  bool more() const {
    if (!gone_.ok()) return false;
    return end_ ? next_ < *end_ : LoadClock::now() < start_ + options_.duration;
  }

  // ---- Users come and go. -------------------------------------------------------------------------------------------

  void await_arrival() {
    if (!more()) return fade();
    const auto due =
        start_ + std::chrono::duration_cast<LoadClock::duration>(std::chrono::duration<double>(arrivals_->next()));
    if (!end_ && due >= start_ + options_.duration) return fade();
    timer_.expires_at(due);
    timer_.async_wait([this, due](const boost::system::error_code& ec) {
      if (ec || !more()) return fade();
      late_.add(seconds(LoadClock::now() - due));
      if (at_once_ < kMostAtOnce) {
        begin_next(due);
      } else {
        ++next_;
        add_error("not sent", fmt::format("{} conversations are under way, which is the most", kMostAtOnce));
      }
      await_arrival();
    });
  }

  void begin_next(LoadClock::time_point due) {
    if (!more()) return fade();
    const uint64_t index = next_++;
    ++figures_.conversations;
    ++at_once_;
    if (LoadRandom dice(options_.conversation.seed ^ kDiceStream, index + 1); dice.unit() < options_.malformed) {
      return send_malformed(index);
    }
    auto talk = std::make_shared<Talk>(options_.conversation, index);
    LoadRandom chooses(options_.conversation.seed ^ kCheckStream, index + 1);
    talk->checked = chooses.unit() < options_.check_share;
    talk->due = due;
    send_turn(std::move(talk));
  }

  // One user is gone or had nothing more to begin: from here on the load is less than it should be.
  void fade() {
    if (!faded_) faded_ = LoadClock::now();
  }

  void end_talk(const std::shared_ptr<Talk>& talk) {
    if (talk != nullptr && talk->checked && !talk->hashes.shas.empty()) hashes_.push_back(std::move(talk->hashes));
    --at_once_;
    if (plan_.users > 0) begin_next(LoadClock::now());
  }

  // A user who was turned away comes back after a while, as people and proxies do.
  void end_talk_later(const std::shared_ptr<Talk>& talk, std::chrono::milliseconds wait) {
    if (plan_.users == 0) return end_talk(talk);
    auto timer = std::make_shared<asio::steady_timer>(io_, wait);
    timer->async_wait([this, talk, timer](const boost::system::error_code&) { end_talk(talk); });
  }

  // ---- Requests. ----------------------------------------------------------------------------------------------------

  std::optional<LeavePlan> draw_leave(const Talk& talk) const {
    LoadRandom dice(options_.conversation.seed ^ kDiceStream,
                    (talk.hashes.index + 1) * 64 + static_cast<uint64_t>(talk.conversation.turn()) + 1);
    if (dice.unit() >= options_.disconnect) return std::nullopt;
    LeavePlan plan;
    plan.reset = dice.below(2) == 0;
    // A third go before their first token, at any moment: queued, while the prompt is read, before the headers.
    if (dice.below(3) == 0) {
      plan.after = std::chrono::microseconds(dice.below(300000));
    } else {
      plan.after_events = 1 + dice.below(12);
    }
    return plan;
  }

  void send_turn(std::shared_ptr<Talk> talk) {
    const std::string body = talk->conversation.body();
    ClientRequest request;
    request.bytes = post_head(options_, "/v1/chat/completions", body.size()) + body;
    request.leave = draw_leave(*talk);
    ++figures_.requests;
    client_.send(std::move(request), [this, talk = std::move(talk)](const Exchange& exchange) {
      if (exchange.end != ExchangeEnd::kNotConnected) unanswered_ = 0;
      on_turn(talk, exchange);
    });
  }

  void on_turn(const std::shared_ptr<Talk>& talk, const Exchange& exchange) {
    if (exchange.end == ExchangeEnd::kLeft) {
      ++figures_.left;
      return end_talk(talk);
    }
    const bool whole = exchange.end == ExchangeEnd::kReply && exchange.status == 200 && exchange.streamed &&
                       exchange.reply.error_code.empty();
    if (!whole) return on_failure(talk, exchange);
    measure(*talk, exchange);
    talk->hashes.shas.push_back(exchange.reply.token_sha);
    talk->conversation.take(exchange.reply);
    const bool over = !end_ && LoadClock::now() >= start_ + options_.duration;
    if (talk->conversation.done() || over) return end_talk(talk);
    talk->due = LoadClock::now();
    send_turn(talk);
  }

  void on_failure(const std::shared_ptr<Talk>& talk, const Exchange& exchange) {
    switch (exchange.end) {
      case ExchangeEnd::kNotConnected:
        add_error("cannot connect", exchange.message);
        if (++unanswered_ >= kMostUnanswered && gone_.ok()) {
          gone_ = absl::UnavailableError(
              fmt::format("{} ({} times in a row): the server went away in the middle", exchange.message, unanswered_));
          timer_.cancel();
        }
        return end_talk_later(talk, kAfterRefusal);
      case ExchangeEnd::kTimeout:
        add_error("timeout", exchange.message);
        break;
      case ExchangeEnd::kDisconnected:
        add_error("disconnected", exchange.message);
        break;
      case ExchangeEnd::kBroken:
        add_error("broken reply", exchange.message);
        break;
      default:
        return on_refusal(talk, exchange);
    }
    end_talk(talk);
  }

  void on_refusal(const std::shared_ptr<Talk>& talk, const Exchange& exchange) {
    if (exchange.status == 200 && exchange.streamed) {
      add_error(fmt::format("error in the stream: {}", exchange.reply.error_code), exchange.reply.error_message);
    } else {
      const std::string code = error_code_of(exchange.body);
      add_error(fmt::format("status {}{}{}", exchange.status, code.empty() ? "" : " ", code),
                error_text(exchange.body));
    }
    if (exchange.status == 429 || exchange.status >= 500) {
      const auto wait = std::chrono::seconds(std::clamp(exchange.retry_after_s, 0, kMostWait));
      return end_talk_later(talk, std::max<std::chrono::milliseconds>(wait, kAfterRefusal));
    }
    end_talk(talk);
  }

  void send_malformed(uint64_t index) {
    MalformedRequest made = malformed_request(options_, index);
    ClientRequest request;
    request.bytes = std::move(made.bytes);
    request.ends_after = made.ends_after;
    request.keeps = false;
    client_.send(std::move(request), [this, kind = made.kind, silent = made.may_be_silent](const Exchange& exchange) {
      const bool refused = exchange.status >= 400 && exchange.status < 500;
      const bool closed = silent && exchange.end == ExchangeEnd::kDisconnected && exchange.status == 0;
      if (refused || closed) {
        ++figures_.refused;
      } else {
        add_error(fmt::format("malformed request not refused: {}", malformed_kind_name(kind)),
                  exchange.message.empty() ? fmt::format("status {}", exchange.status) : exchange.message);
      }
      end_talk(nullptr);
    });
  }

  // ---- Figures. -----------------------------------------------------------------------------------------------------

  void measure(const Talk& talk, const Exchange& exchange) {
    const StreamedReply& reply = exchange.reply;
    ++figures_.completed;
    figures_.prompt_tokens += reply.prompt_tokens;
    figures_.cached_tokens += reply.cached;
    figures_.reply_tokens += reply.completion_tokens;
    figures_.drafted += reply.drafted;
    figures_.accepted += reply.accepted;
    // A reply that shows nothing has its first token at its end, as far as a client can tell.
    const LoadClock::time_point first = exchange.shown.empty() ? exchange.ended : exchange.shown.front();
    const bool good = measure_waiting(talk, exchange, first);
    if (good) ++figures_.good;
    const double ended = seconds(exchange.ended - start_);
    completions_.add(ended, 1);
    goods_.add(ended, good ? 1 : 0);
    prompts_.add(seconds(first - start_), static_cast<double>(reply.prompt_tokens));
    // Which event had how many tokens is not told, so they are spread evenly.
    const auto tokens = static_cast<double>(reply.completion_tokens);
    if (exchange.shown.empty()) replies_.add(ended, tokens);
    for (const LoadClock::time_point at : exchange.shown) {
      replies_.add(seconds(at - start_), tokens / static_cast<double>(exchange.shown.size()));
    }
  }

  // Returns whether the user who waited for the reply had it within the limits.
  bool measure_waiting(const Talk& talk, const Exchange& exchange, LoadClock::time_point first) {
    const double ttft = seconds(first - talk.due);
    if (talk.conversation.background()) {
      ++figures_.background;
      background_ttft_.add(ttft);
      return false;
    }
    ttft_.add(ttft);
    total_.add(seconds(exchange.ended - talk.due));
    std::vector<double> gaps;
    for (size_t i = 1; i < exchange.shown.size(); ++i) {
      gaps.push_back(seconds(exchange.shown[i] - exchange.shown[i - 1]));
      gap_.add(gaps.back());
    }
    const uint64_t tokens = exchange.reply.completion_tokens;
    if (exchange.shown.size() > 1 && tokens > 1) {
      per_token_.add(seconds(exchange.shown.back() - first) / static_cast<double>(tokens - 1));
    }
    return ttft <= options_.ttft_limit_s && (gaps.empty() || percentile(gaps, 0.99) <= options_.gap_limit_s);
  }

  void add_error(const std::string& kind, const std::string& example) {
    const bool room = figures_.errors.size() < kMostErrorKinds || figures_.errors.count(kind) > 0;
    LoadError& error = figures_.errors[room ? kind : "others"];
    if (error.count++ == 0) error.example = example;
  }

  LevelResult result() {
    const double wall = seconds(LoadClock::now() - start_);
    // With hardly more conversations than users the load fades as soon as it is there: then all of it counts.
    const bool steady =
        !end_ || plan_.users == 0 || *end_ - plan_.first_conversation >= 2 * static_cast<uint64_t>(plan_.users);
    double window = steady && faded_ ? seconds(*faded_ - start_) : wall;
    if (window <= 0) window = wall;
    figures_.users = plan_.users;
    figures_.rate = plan_.rate;
    figures_.window_s = window;
    figures_.wall_s = wall;
    figures_.reply_tokens_per_s = replies_.until(window) / window;
    figures_.total_tokens_per_s = figures_.reply_tokens_per_s + prompts_.until(window) / window;
    figures_.requests_per_s = completions_.until(window) / window;
    figures_.goodput = goods_.until(window) / window;
    figures_.ttft_s = ttft_.summary();
    figures_.gap_s = gap_.summary();
    figures_.per_token_s = per_token_.summary();
    figures_.total_s = total_.summary();
    figures_.background_ttft_s = background_ttft_.summary();
    figures_.late_s = late_.summary();
    LevelResult out;
    out.figures = std::move(figures_);
    std::sort(hashes_.begin(), hashes_.end(), [](const auto& a, const auto& b) { return a.index < b.index; });
    out.hashes = std::move(hashes_);
    out.next_conversation = next_;
    return out;
  }

  const LoadOptions& options_;
  const LevelPlan plan_;
  asio::io_context io_;
  LoadClient client_;
  asio::steady_timer timer_;
  std::optional<PoissonArrivals> arrivals_;
  LoadClock::time_point start_;
  std::optional<LoadClock::time_point> faded_;
  uint64_t next_;
  std::optional<uint64_t> end_;  // conversations; none: by time
  size_t at_once_ = 0;
  int unanswered_ = 0;
  absl::Status gone_;
  LevelFigures figures_;
  Samples ttft_, gap_, per_token_, total_, background_ttft_, late_;
  Timeline replies_, prompts_, completions_, goods_;
  std::vector<HashedConversation> hashes_;
};

}  // namespace

uint64_t LevelFigures::error_count() const {
  return std::accumulate(errors.begin(), errors.end(), uint64_t{0},
                         [](uint64_t sum, const auto& error) { return sum + error.second.count; });
}

absl::StatusOr<LevelResult> run_level(const LoadOptions& options, const ClientSettings& client, const LevelPlan& plan) {
  return Level(options, client, plan).run();
}

}  // namespace tensorfold
