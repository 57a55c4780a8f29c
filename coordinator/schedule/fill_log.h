// A line every few seconds for each prompt that takes long to read: how far it is, how fast, how long it will take.
// Owned by the scheduler's thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "coordinator/schedule/sequence.h"

namespace tensorfold {

class FillLog {
 public:
  using Clock = std::chrono::steady_clock;

  /// `say` gets the lines; empty: the log.
  explicit FillLog(std::function<void(const std::string&)> say = {});
  /// After a round, with those that have a lane.
  void update(const std::vector<std::unique_ptr<Sequence>>& active, Clock::time_point now);

 private:
  struct Reading {
    Clock::time_point said;  // the last line, or the first round
    uint64_t computed = 0;   // then
    uint64_t id = 0;         // of the request: another sequence may come to lie in the same place
  };

  std::function<void(const std::string&)> say_;
  std::unordered_map<const Sequence*, Reading> readings_;
};

}  // namespace tensorfold
