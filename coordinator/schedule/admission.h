// Whether a request may wait for a lane: what waits is bounded by count and by tokens, and a request that is turned
// away learns when it may come again, from how fast the queue has moved. Pure bookkeeping, no clock; one owner (the
// engine, under its mutex), not thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "coordinator/api/error.h"

namespace tensorfold {

struct AdmissionLimits {
  int count = 64;      // sequences that wait for a lane
  int64_t tokens = 0;  // prompt tokens that wait; 0: no limit
};

class Admission {
 public:
  explicit Admission(AdmissionLimits limits) : limits_(limits) {}

  /// Why `count` sequences of `tokens` prompt tokens together cannot be taken in; none: they can. `free_lanes`: lanes
  /// that are about to take what waits.
  std::optional<ApiError> refuse(int count, int64_t tokens, int free_lanes) const;

  void add(int count, int64_t tokens) {
    waiting_ += count;
    waiting_tokens_ += tokens;
  }
  void set(int count, int64_t tokens) {
    waiting_ = count;
    waiting_tokens_ = tokens;
  }
  int waiting() const { return waiting_; }
  int64_t waiting_tokens() const { return waiting_tokens_; }

  /// A round took `seconds`; it read so many prompt tokens and ended so many sequences.
  void record_round(double seconds, int64_t prompt_tokens, int ended);
  /// Seconds until `sequences` lanes more have become free and `tokens` prompt tokens more have been read, at least 1.
  int seconds_until(int sequences, int64_t tokens) const;

 private:
  AdmissionLimits limits_;
  int waiting_ = 0;
  int64_t waiting_tokens_ = 0;
  // Of recent rounds, older ones counting less.
  double seconds_ = 0;
  double prompt_tokens_ = 0;
  double ended_ = 0;
};

}  // namespace tensorfold
