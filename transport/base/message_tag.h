// The 64-bit header of every message: who sent it, under which membership epoch, as which message of the pair, for
// which operation. It fits a tag-matching transport's tag, so it costs no bytes of its own.
//
//   63..60 operation | 59..56 sender's rank | 55..24 epoch | 23..0 sequence number, modulo 2^24
//
// The sequence counts the messages from one rank to another since the communicator was made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tensorfold {

enum class MessageKind : uint8_t {
  kConnect = 1,
  kAllGather = 2,
  kAllToAll = 3,
  kBroadcast = 4,
  kGather = 5,
  kBarrier = 6,
  kMeasure = 7,
};

struct MessageTag {
  MessageKind kind = MessageKind::kConnect;
  int source = 0;
  uint32_t epoch = 0;
  uint32_t sequence = 0;

  static constexpr uint32_t kSequenceMask = (1u << 24) - 1;
  static constexpr uint64_t kSourceMask = uint64_t{15} << 56;

  static constexpr uint64_t source_bits(int source) { return static_cast<uint64_t>(source) << 56; }

  constexpr uint64_t pack() const {
    return static_cast<uint64_t>(kind) << 60 | source_bits(source) | static_cast<uint64_t>(epoch) << 24 |
           (sequence & kSequenceMask);
  }
  static constexpr MessageTag unpack(uint64_t tag) {
    return {static_cast<MessageKind>(tag >> 60), static_cast<int>(tag >> 56 & 15), static_cast<uint32_t>(tag >> 24),
            static_cast<uint32_t>(tag & kSequenceMask)};
  }
};

// "all_gather"; an operation this build does not know is "operation 12".
std::string message_kind_name(MessageKind kind);

// OK, or an error that names what was expected and what came. `from` is the sender as a person knows it.
absl::Status check_message_tag(const MessageTag& expected, const MessageTag& got, std::string_view from);

}  // namespace tensorfold
