#include "coordinator/hub/fetch.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <thread>

namespace tensorfold {
namespace {

constexpr int kMaxRedirects = 5;
constexpr std::chrono::milliseconds kMaxBackoff{30000};
constexpr int kMaxRetryAfter = 60;  // seconds

bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

// Seconds only: the form with a date is rare, and the back-off serves for it.
std::chrono::milliseconds parse_retry_after(const std::string& text) {
  int seconds = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (text.empty() || ec != std::errc() || end != text.data() + text.size() || seconds < 0) return {};
  return std::chrono::seconds(std::min(seconds, kMaxRetryAfter));
}

}  // namespace

Url HubFetcher::url(const std::string& target) const {
  Url url = access_.endpoint;
  url.target += target;
  return url;
}

absl::Status HubFetcher::get(const std::string& target, const HttpHeaders& headers, const std::string& what,
                             const HttpClient::OnHead& on_head, const HttpClient::OnBody& on_body) {
  return get_url(url(target), headers, what, on_head, on_body);
}

absl::Status HubFetcher::get_url(const Url& start, const HttpHeaders& headers, const std::string& what,
                                 const HttpClient::OnHead& on_head, const HttpClient::OnBody& on_body) {
  Url at = start;
  for (int hop = 0; hop <= kMaxRedirects; ++hop) {
    HttpHeaders sent = headers;
    if (!access_.token.empty() && at.same_origin(access_.endpoint)) {
      sent.emplace_back("Authorization", "Bearer " + access_.token);
    }
    std::string location;
    const absl::Status status = client_.get(
        at, sent,
        [&](const HttpHead& head) -> absl::StatusOr<bool> {
          asked_to_wait_ = parse_retry_after(head.retry_after);
          if (is_redirect(head.status) && !head.location.empty()) {
            location = head.location;
            return false;
          }
          if (head.status != 200 && head.status != 206) return refusal(head, at, what);
          return on_head(head);
        },
        on_body);
    if (!status.ok() || location.empty()) return status;
    absl::StatusOr<Url> next = resolve_location(at, location);
    if (!next.ok()) {
      return absl::InvalidArgumentError(fmt::format("{}: {} redirects to something that is {}", what, at.authority(),
                                                    std::string(next.status().message())));
    }
    if (at.tls && !next->tls) {
      return absl::InvalidArgumentError(fmt::format("{}: {} redirects from https to http, at {}, which is refused",
                                                    what, at.authority(), next->authority()));
    }
    at = std::move(*next);
  }
  return absl::InvalidArgumentError(
      fmt::format("{}: more than {} redirects, the last one to {}", what, kMaxRedirects, at.authority()));
}

absl::Status HubFetcher::refusal(const HttpHead& head, const Url& from, const std::string& what) {
  const std::string host = from.authority();
  const bool token = !access_.token.empty();
  switch (head.status) {
    case 401:
      return absl::PermissionDeniedError(
          token ? fmt::format("{}: {} does not accept the token in HF_TOKEN (401), or the name is wrong", what, host)
                : fmt::format("{}: {} wants a token (401): set HF_TOKEN, or check the name", what, host));
    case 403:
      return absl::PermissionDeniedError(
          token
              ? fmt::format("{}: {} refuses access to the owner of the token in HF_TOKEN (403); where the authors ask "
                            "for consent to terms, give it on the hub first",
                            what, host)
              : fmt::format("{}: {} refuses access without a token (403): set HF_TOKEN", what, host));
    case 404:
      return absl::NotFoundError(fmt::format("{}: {} has no such thing (404){}", what, host,
                                             token ? "" : "; what is private shows only with a token in HF_TOKEN"));
    case 416:
      return absl::OutOfRangeError(fmt::format("{}: {} has fewer bytes of it than its list says (416)", what, host));
    case 408:
    case 425:
      return absl::UnavailableError(fmt::format("{}: {} answers {}", what, host, head.status));
    case 429:
      return absl::UnavailableError(fmt::format("{}: {} says that it is asked too often (429)", what, host));
    default:
      break;
  }
  if (head.status >= 500) {
    return absl::UnavailableError(fmt::format("{}: {} has trouble of its own ({})", what, host, head.status));
  }
  return absl::InvalidArgumentError(
      fmt::format("{}: {} answers {}, which has no meaning here", what, host, head.status));
}

absl::Status HubFetcher::sleep(std::chrono::milliseconds time) const {
  const auto until = std::chrono::steady_clock::now() + time;
  for (;;) {
    if (access_.http.stop != nullptr && access_.http.stop->load()) return absl::CancelledError("stopped");
    const auto now = std::chrono::steady_clock::now();
    if (now >= until) return absl::OkStatus();
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(until - now, std::chrono::milliseconds(50)));
  }
}

absl::Status HubFetcher::with_attempts(const std::function<absl::Status()>& attempt,
                                       const std::function<uint64_t()>& progress) {
  uint64_t before = progress();
  int failed = 0;
  std::chrono::milliseconds backoff = access_.first_backoff;
  for (;;) {
    asked_to_wait_ = {};
    const absl::Status status = attempt();
    if (!absl::IsUnavailable(status)) return status;
    if (progress() > before) {
      before = progress();
      failed = 0;
      backoff = access_.first_backoff;
    }
    if (++failed >= access_.attempts) {
      return absl::UnavailableError(
          fmt::format("{}; given up after {} attempts in a row", std::string(status.message()), failed));
    }
    const std::chrono::milliseconds wait = std::max(backoff, asked_to_wait_);
    if (std::chrono::steady_clock::now() + wait >= access_.http.deadline) {
      return absl::DeadlineExceededError(
          fmt::format("{}; the time for the whole pull is over before another attempt", std::string(status.message())));
    }
    if (absl::Status stopped = sleep(wait); !stopped.ok()) return stopped;
    backoff = std::min(backoff * 2, kMaxBackoff);
  }
}

absl::StatusOr<std::string> HubFetcher::text(const Url& url, const std::string& what, uint64_t max_bytes,
                                             std::string* link) {
  std::string body;
  const absl::Status status = with_attempts(
      [&] {
        body.clear();
        return get_url(
            url, {}, what,
            [&](const HttpHead& head) -> absl::StatusOr<bool> {
              if (link != nullptr) *link = head.link;
              return true;
            },
            [&](std::span<const char> piece) {
              if (body.size() + piece.size() > max_bytes) {
                return absl::InvalidArgumentError(fmt::format("{}: {} sends more than the {} bytes that are allowed",
                                                              what, url.authority(), max_bytes));
              }
              body.append(piece.data(), piece.size());
              return absl::OkStatus();
            });
      },
      [] { return uint64_t{0}; });
  if (!status.ok()) return status;
  return body;
}

}  // namespace tensorfold
