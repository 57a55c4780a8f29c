#include "transport/base/message_tag.h"

#include <fmt/format.h>

namespace tensorfold {

std::string message_kind_name(MessageKind kind) {
  switch (kind) {
    case MessageKind::kConnect:
      return "connect";
    case MessageKind::kAllGather:
      return "all_gather";
    case MessageKind::kAllToAll:
      return "all_to_all";
    case MessageKind::kBroadcast:
      return "broadcast";
    case MessageKind::kGather:
      return "gather";
    case MessageKind::kBarrier:
      return "barrier";
    case MessageKind::kMeasure:
      return "measure";
  }
  return fmt::format("operation {}", static_cast<int>(kind));
}

absl::Status check_message_tag(const MessageTag& expected, const MessageTag& got, std::string_view from) {
  const std::string operation = message_kind_name(expected.kind);
  if (got.epoch != expected.epoch) {
    return absl::FailedPreconditionError(fmt::format("{}: a message from {} is of membership epoch {}, ours is {}",
                                                     operation, from, got.epoch, expected.epoch));
  }
  const uint32_t sequence = expected.sequence & MessageTag::kSequenceMask;
  if (got.kind != expected.kind || got.sequence != sequence || got.source != expected.source) {
    return absl::DataLossError(
        fmt::format("{0}: out of step with {1}: expected {0} message {2} of rank {3}, got {4} "
                    "message {5} of rank {6}",
                    operation, from, sequence, expected.source, message_kind_name(got.kind), got.sequence, got.source));
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
