// The message engine over UCX's tag matching. A message's tag is UCX's tag; a receive matches on the sender's rank
// alone, so that a message of a wrong epoch or sequence is seen and refused instead of waiting unmatched for ever.
//
// UCX sends short messages eagerly and long ones by rendezvous, read from the sender's memory where the transport can.
// UCX works only inside progress(), in the waiting thread.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/message_communicator.h"
#include "transport/base/message_engine.h"
#include "transport/ucx/ucx_worker.h"

namespace tensorfold {

class UcxEngine : public MessageEngine {
 public:
  UcxEngine(std::unique_ptr<UcxWorker> worker, const WorldMembership& membership);
  // Gives messages on their way a second to leave, never more.
  ~UcxEngine() override;

  // Endpoints to all peers; `addresses` are UCX's own, one a rank.
  absl::Status open(std::span<const std::span<const std::byte>> addresses);

  void post_send(int peer, uint64_t tag, std::span<const std::byte> data) override;
  bool send_done(int peer) override { return !peers_[peer].sending; }
  void post_receive(int peer, std::span<std::byte> out) override;
  std::optional<Arrival> received(int peer) override;
  std::optional<Arrival> peek(int peer) override;
  void progress() override;
  absl::Status peer_failure(int peer) override { return peers_[peer].failure; }
  void block(Deadline until) override;
  void wake() override;
  void fail(const absl::Status& why) override;
  std::string describe() override;

 private:
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    absl::Status failure;  // the first one
    void* send_request = nullptr;
    bool sending = false;
    void* receive_request = nullptr;
    bool receiving = false;
    bool arrived = false;
    size_t wanted = 0;       // bytes of the posted receive
    bool looked_at = false;  // `info` is known from before the receive
    ucp_tag_recv_info_t info = {};
  };

  static void on_sent(void* request, ucs_status_t status, void* peer);
  static void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* peer);
  static void on_endpoint_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  static void record_failure(Peer& peer, ucs_status_t status);
  static void finish_receive(Peer& peer, ucs_status_t status, const ucp_tag_recv_info_t& info);

  // Progresses until `request` (may be null or an error) is complete, at most until the deadline; releases it.
  void finish(void* request, Deadline deadline);
  void flush_endpoints(Deadline deadline);
  void close_endpoints(Deadline deadline);
  bool busy() const;
  bool sending() const;
  Deadline::Clock::duration longest_sleep();

  const WorldMembership membership_;
  const int wake_fd_;     // an eventfd
  bool ended_ = false;    // after fail(): UCX may not run again, buffers are back with their owners
  int still_sleeps_ = 0;  // sleeps since something moved
  int refusals_ = 0;      // of UCX to be armed, one after the other, since something moved
  std::array<Peer, kMaxWorld> peers_;
  const std::unique_ptr<UcxWorker> worker_;  // last, so destroyed first: it may still call back into peers_
};

}  // namespace tensorfold
