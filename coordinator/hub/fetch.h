// GET from a hub: redirects, the token and who may see it, what a refusal means in the user's terms, and attempts.
#pragma once

#include <functional>
#include <string>

#include "coordinator/hub/http_client.h"

namespace tensorfold {

struct HubAccess {
  Url endpoint;       // target: the path before "/api", without a '/' at its end
  std::string token;  // empty: none
  HttpSettings http;
  int attempts = 5;                               // in a row without a byte gained
  std::chrono::milliseconds first_backoff{1000};  // doubles each time, up to 30 s
};

/// One thread's way to the hub.
class HubFetcher {
 public:
  explicit HubFetcher(const HubAccess& access) : access_(access), client_(access.http) {}

  /// One attempt. `target` is a path of the hub below its endpoint; `what` names the thing asked for in messages.
  /// Follows at most 5 redirects, never from https to http, and shows the token to the endpoint's own host alone.
  /// Replies other than 200 and 206 become errors: PermissionDenied (401, 403), NotFound (404), Unavailable for what
  /// may pass (408, 429, 5xx), OutOfRange (416), InvalidArgument for the rest.
  absl::Status get(const std::string& target, const HttpHeaders& headers, const std::string& what,
                   const HttpClient::OnHead& on_head, const HttpClient::OnBody& on_body);
  /// The same for an address of the hub, such as the next page of a list: the endpoint's own host only.
  absl::Status get_url(const Url& url, const HttpHeaders& headers, const std::string& what,
                       const HttpClient::OnHead& on_head, const HttpClient::OnBody& on_body);

  /// Runs `attempt` until it succeeds, fails for good, or `attempts` in a row have ended Unavailable without `progress`
  /// (bytes so far) having grown. Sleeps between attempts: doubling, or as long as the server asked, up to 60 s, and
  /// never past the deadline.
  absl::Status with_attempts(const std::function<absl::Status()>& attempt, const std::function<uint64_t()>& progress);

  /// A body of at most `max_bytes`, with attempts. `link`, if not null, gets the Link header.
  absl::StatusOr<std::string> text(const Url& url, const std::string& what, uint64_t max_bytes, std::string* link);

  Url url(const std::string& target) const;

 private:
  absl::Status refusal(const HttpHead& head, const Url& from, const std::string& what);
  absl::Status sleep(std::chrono::milliseconds time) const;

  const HubAccess access_;
  HttpClient client_;
  std::chrono::milliseconds asked_to_wait_{0};  // by the last reply's Retry-After
};

}  // namespace tensorfold
