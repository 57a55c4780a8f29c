#include "coordinator/hub/resolve.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace tensorfold {
namespace {

struct Lookup {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  int error = 0;
  std::vector<ResolvedAddress> addresses;
};

void look_up(const std::string& host, Lookup& lookup) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  std::vector<ResolvedAddress> addresses;
  for (const addrinfo* at = list; error == 0 && at != nullptr; at = at->ai_next) {
    std::array<char, 128> text{};
    if (getnameinfo(at->ai_addr, at->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
      addresses.emplace_back(text.data());
    }
  }
  if (list != nullptr) freeaddrinfo(list);
  const std::lock_guard lock(lookup.mutex);
  lookup.error = error;
  lookup.addresses = std::move(addresses);
  lookup.done = true;
  lookup.changed.notify_all();
}

}  // namespace

absl::StatusOr<std::vector<ResolvedAddress>> resolve_host(const std::string& host,
                                                          std::chrono::steady_clock::time_point until,
                                                          const std::atomic<bool>* stop) {
  auto lookup = std::make_shared<Lookup>();
  std::thread([host, lookup] { look_up(host, *lookup); }).detach();
  std::unique_lock lock(lookup->mutex);
  while (!lookup->done) {
    if (stop != nullptr && stop->load()) return absl::CancelledError("stopped");
    const auto now = std::chrono::steady_clock::now();
    if (now >= until) return absl::UnavailableError(fmt::format("looking up the host {} took too long", host));
    lookup->changed.wait_until(lock, std::min(until, now + std::chrono::milliseconds(100)));
  }
  if (lookup->error != 0) {
    return absl::UnavailableError(fmt::format("cannot find the host {}: {}", host, gai_strerror(lookup->error)));
  }
  if (lookup->addresses.empty()) return absl::UnavailableError(fmt::format("the host {} has no address", host));
  return lookup->addresses;
}

}  // namespace tensorfold
