// What a transport made of ordered messages between pairs of ranks implements; MessageCommunicator builds the
// operations, checks and waits on it. One engine serves one rank.
//
// Rules: messages of a pair arrive in the order sent. At most one send and one receive a peer are outstanding. `tag` is
// a packed MessageTag; the engine carries it and never judges it. One thread at a time, except wake().
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "transport/base/deadline.h"

namespace tensorfold {

struct Arrival {
  uint64_t tag = 0;
  size_t bytes = 0;  // the message's own length, also where the buffer was shorter
};

class MessageEngine {
 public:
  virtual ~MessageEngine() = default;

  // `data` stays valid until send_done(peer) or fail().
  virtual void post_send(int peer, uint64_t tag, std::span<const std::byte> data) = 0;
  virtual bool send_done(int peer) = 0;

  // Receives the next message of `peer`, whatever its tag. Longer messages fill at most `out`; received() tells their
  // length if the transport knows it, else out.size() + 1.
  virtual void post_receive(int peer, std::span<std::byte> out) = 0;
  // The posted receive's message once it is complete; reported once.
  virtual std::optional<Arrival> received(int peer) = 0;

  // The next message of `peer` if it is known to be there; it stays there for the next post_receive.
  virtual std::optional<Arrival> peek(int peer) = 0;

  // Moves messages on; cheap when there is nothing to do.
  virtual void progress() = 0;

  // Not OK once `peer` can no longer send or receive. What it sent before can still be received.
  virtual absl::Status peer_failure(int peer) = 0;

  // Sleeps until something may have changed, wake() or the deadline; may return early.
  virtual void block(Deadline until) = 0;
  // Ends block() now or, if none is running, the next one. Thread-safe.
  virtual void wake() = 0;

  // The end: after it returns no posted buffer is touched again. Peers may learn `why`. Bounded in time.
  virtual void fail(const absl::Status& why) = 0;

  virtual std::string describe() = 0;
};

}  // namespace tensorfold
