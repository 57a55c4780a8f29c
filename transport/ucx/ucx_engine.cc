#include "transport/ucx/ucx_engine.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace tensorfold {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A sleeping rank looks around this often even if nothing woke it: against a wake-up lost in a driver, at no cost.
constexpr milliseconds kLongestSleep(200);
// Shared memory does not wake a sender whose peer made room, so with sends under way sleeps are short: at first about
// as long as a receiver takes for what fits on the way, and longer when nothing moves.
constexpr microseconds kShortSleep(50);
constexpr milliseconds kStalledSleep(2);
constexpr int kShortSleeps = 100;
// UCX 1.16 (not 1.13) does not arm while a message finds no room in shared memory. One refusal is an event to progress;
// so many in a row, with nothing moved, are that.
constexpr int kRefusals = 3;
constexpr milliseconds kFlushTime(1000);
constexpr milliseconds kCancelTime(500);

// What UCX prints about an endpoint: its lanes, one a line, of which the transports and devices matter.
std::string lanes_of(ucp_ep_h endpoint) {
  char* text = nullptr;
  size_t bytes = 0;
  FILE* stream = open_memstream(&text, &bytes);
  if (stream == nullptr) return "unknown";
  ucp_ep_print_info(endpoint, stream);
  std::fclose(stream);
  std::string lanes;
  std::string_view rest(text, bytes);
  while (!rest.empty()) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    const size_t begin = line.find("lane[");
    if (begin == std::string_view::npos) continue;
    std::string lane;  // with runs of blanks closed up
    for (char c : line.substr(begin)) {
      if (c != ' ' || (!lane.empty() && lane.back() != ' ')) lane += c;
    }
    lanes += fmt::format("{}{}", lanes.empty() ? "" : "; ", lane);
  }
  std::free(text);
  return lanes.empty() ? "no lanes" : lanes;
}

}  // namespace

UcxEngine::UcxEngine(std::unique_ptr<UcxWorker> worker, const WorldMembership& membership)
    : membership_(membership), wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), worker_(std::move(worker)) {}

UcxEngine::~UcxEngine() {
  if (!ended_) {
    flush_endpoints(Deadline::after(kFlushTime));
    close_endpoints(Deadline::after(kCancelTime));
  }
  if (wake_fd_ >= 0) close(wake_fd_);
}

absl::Status UcxEngine::open(std::span<const std::span<const std::byte>> addresses) {
  if (wake_fd_ < 0) return absl::ResourceExhaustedError("connect: no file descriptor left for wake-ups");
  for (int rank = 0; rank < membership_.world; ++rank) {
    if (rank == membership_.rank) continue;
    ucp_ep_params_t params = {};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(addresses[rank].data());
    params.err_mode = worker_->detects_peer_failure() ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    params.err_handler.cb = &UcxEngine::on_endpoint_error;
    params.err_handler.arg = &peers_[rank];
    const ucs_status_t status = ucp_ep_create(worker_->handle(), &params, &peers_[rank].endpoint);
    if (status != UCS_OK) {
      peers_[rank].endpoint = nullptr;
      return absl::UnavailableError(fmt::format("connect: UCX has no way to rank {} ({}): {}", rank,
                                                membership_.labels[rank], ucs_status_string(status)));
    }
  }
  return absl::OkStatus();
}

void UcxEngine::record_failure(Peer& peer, ucs_status_t status) {
  if (!peer.failure.ok()) return;
  peer.failure = absl::UnavailableError(fmt::format("UCX reports \"{}\"", ucs_status_string(status)));
}

void UcxEngine::on_endpoint_error(void* peer, ucp_ep_h, ucs_status_t status) {
  record_failure(*static_cast<Peer*>(peer), status);
}

void UcxEngine::on_sent(void* request, ucs_status_t status, void* user_data) {
  Peer& peer = *static_cast<Peer*>(user_data);
  ucp_request_free(request);
  peer.send_request = nullptr;
  if (status == UCS_OK) {
    peer.sending = false;
  } else {
    record_failure(peer, status);
  }
}

void UcxEngine::post_send(int rank, uint64_t tag, std::span<const std::byte> data) {
  Peer& peer = peers_[rank];
  peer.sending = true;
  if (!peer.failure.ok()) return;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &UcxEngine::on_sent;
  param.user_data = &peer;
  ucs_status_ptr_t request = ucp_tag_send_nbx(peer.endpoint, data.data(), data.size(), tag, &param);
  if (request == nullptr) {
    peer.sending = false;
  } else if (UCS_PTR_IS_ERR(request)) {
    record_failure(peer, UCS_PTR_STATUS(request));
  } else {
    peer.send_request = request;
  }
}

void UcxEngine::finish_receive(Peer& peer, ucs_status_t status, const ucp_tag_recv_info_t& info) {
  peer.receiving = false;
  if (status == UCS_ERR_CANCELED) return;
  if (status != UCS_OK && status != UCS_ERR_MESSAGE_TRUNCATED) {
    record_failure(peer, status);
    return;
  }
  if (!peer.looked_at) peer.info = info;
  if (status == UCS_ERR_MESSAGE_TRUNCATED) peer.info.length = std::max(peer.info.length, peer.wanted + 1);
  peer.arrived = true;
}

void UcxEngine::on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* user_data) {
  Peer& peer = *static_cast<Peer*>(user_data);
  finish_receive(peer, status, *info);  // before the request goes: `info` is in it
  peer.receive_request = nullptr;
  ucp_request_free(request);
}

void UcxEngine::post_receive(int rank, std::span<std::byte> out) {
  Peer& peer = peers_[rank];
  peer.receiving = true;
  peer.arrived = false;
  peer.wanted = out.size();
  // A message that is already there is looked at before it is taken: if it is too long, the receive itself would not
  // tell its tag and length.
  ucp_tag_recv_info_t info = {};
  peer.looked_at =
      ucp_tag_probe_nb(worker_->handle(), MessageTag::source_bits(rank), MessageTag::kSourceMask, 0, &info) != nullptr;
  if (peer.looked_at) peer.info = info;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv = &UcxEngine::on_received;
  param.user_data = &peer;
  ucs_status_ptr_t request = ucp_tag_recv_nbx(worker_->handle(), out.data(), out.size(), MessageTag::source_bits(rank),
                                              MessageTag::kSourceMask, &param);
  if (request == nullptr) {
    finish_receive(peer, UCS_OK, info);
  } else if (UCS_PTR_IS_ERR(request)) {
    finish_receive(peer, UCS_PTR_STATUS(request), info);
  } else {
    peer.receive_request = request;
  }
}

std::optional<Arrival> UcxEngine::received(int rank) {
  Peer& peer = peers_[rank];
  if (!peer.arrived) return std::nullopt;
  peer.arrived = false;
  return Arrival{peer.info.sender_tag, peer.info.length};
}

std::optional<Arrival> UcxEngine::peek(int rank) {
  ucp_tag_recv_info_t info = {};
  if (ucp_tag_probe_nb(worker_->handle(), MessageTag::source_bits(rank), MessageTag::kSourceMask, 0, &info) ==
      nullptr) {
    return std::nullopt;
  }
  return Arrival{info.sender_tag, info.length};
}

void UcxEngine::progress() {
  if (ended_ || ucp_worker_progress(worker_->handle()) == 0) return;
  still_sleeps_ = 0;
  refusals_ = 0;
}

bool UcxEngine::sending() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.sending; });
}

Deadline::Clock::duration UcxEngine::longest_sleep() {
  if (!sending()) return kLongestSleep;
  if (still_sleeps_ >= kShortSleeps) return kStalledSleep;
  ++still_sleeps_;
  return kShortSleep;
}

void UcxEngine::block(Deadline until) {
  // Arming fails while events wait to be progressed, so none can fall between the last progress and the sleep.
  const bool armed = ucp_worker_arm(worker_->handle()) == UCS_OK;
  if (armed) {
    refusals_ = 0;
  } else if (!sending() || ++refusals_ < kRefusals) {
    sched_yield();
    return;
  }
  const auto sleep = std::min(until.left(), longest_sleep());
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(sleep).count();
  const timespec timeout = {nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  // What an unarmed worker's descriptor says is old.
  pollfd fds[] = {{wake_fd_, POLLIN, 0}, {worker_->event_fd(), POLLIN, 0}};
  ppoll(fds, armed ? 2 : 1, &timeout, nullptr);
  if ((fds[0].revents & POLLIN) != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t bytes = read(wake_fd_, &count, sizeof(count));
  }
}

void UcxEngine::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = write(wake_fd_, &one, sizeof(one));
}

bool UcxEngine::busy() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.send_request != nullptr || peer.receive_request != nullptr; });
}

void UcxEngine::finish(void* request, Deadline deadline) {
  if (request == nullptr || UCS_PTR_IS_ERR(request)) return;
  while (ucp_request_check_status(request) == UCS_INPROGRESS && !deadline.passed()) {
    ucp_worker_progress(worker_->handle());
  }
  ucp_request_free(request);
}

void UcxEngine::flush_endpoints(Deadline deadline) {
  ucp_request_param_t param = {};
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr || !peer.failure.ok()) continue;
    finish(ucp_ep_flush_nbx(peer.endpoint, &param), deadline);
  }
}

void UcxEngine::close_endpoints(Deadline deadline) {
  // Closing by force is defined only where peer failures are handled.
  ucp_request_param_t param = {};
  if (worker_->detects_peer_failure()) {
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  }
  std::array<void*, kMaxWorld> requests{};
  for (int rank = 0; rank < membership_.world; ++rank) {
    if (peers_[rank].endpoint == nullptr) continue;
    requests[rank] = ucp_ep_close_nbx(peers_[rank].endpoint, &param);
    peers_[rank].endpoint = nullptr;
  }
  for (void* request : requests) finish(request, deadline);
}

void UcxEngine::fail(const absl::Status&) {
  if (ended_) return;
  for (Peer& peer : peers_) {
    if (peer.receive_request != nullptr) ucp_request_cancel(worker_->handle(), peer.receive_request);
  }
  const Deadline deadline = Deadline::after(kCancelTime);
  close_endpoints(deadline);
  while (busy() && !deadline.passed()) ucp_worker_progress(worker_->handle());
  if (busy()) worker_->abandon();
  ended_ = true;
}

std::string UcxEngine::describe() {
  std::string text;
  for (int rank = 0; rank < membership_.world; ++rank) {
    if (peers_[rank].endpoint == nullptr) continue;
    text += fmt::format("rank {} ({}): {}\n", rank, membership_.labels[rank], lanes_of(peers_[rank].endpoint));
  }
  return text;
}

}  // namespace tensorfold
