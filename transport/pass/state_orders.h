// What a plan orders beside passes: copies of pages, snapshots of slots, and states that go to and come from disk.
// Rank 0 alone decides; every rank carries out the same orders in the same place of a pass (PassPlan says where).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/pass/codec.h"

namespace tensorfold {

inline constexpr uint32_t kMaxSnapshots = 1u << 16;
inline constexpr uint32_t kNoSnapshot = 0xFFFFFFFFu;
inline constexpr uint32_t kMaxOrders = 4096;         // of each kind in a plan
inline constexpr uint32_t kMaxSegmentPages = 32;     // of one entry on disk
inline constexpr uint32_t kMaxSegmentTokens = 2048;  // the tokens of those pages
inline constexpr size_t kMaxPinName = 64;
inline constexpr size_t kMaxEventBytes = 512;  // of an event's message

/// The contents of `from` as of the last pass, into `to`.
struct PageCopy {
  int32_t from = 0;
  int32_t to = 0;
  bool operator==(const PageCopy&) const = default;
};

/// A copy of all that lasts of a slot as the last pass left it, under a number.
struct SnapshotTake {
  uint32_t slot = 0;
  uint32_t id = 0;
  bool operator==(const SnapshotTake&) const = default;
};

/// Names the state of a token chain under a fingerprint; XXH3-128.
struct StateKey {
  uint64_t high = 0;
  uint64_t low = 0;
  auto operator<=>(const StateKey&) const = default;
};

/// The key of the chain that ends `tokens` after the one that `parent` names, with this snapshot at its end.
StateKey state_key(const std::string& fingerprint, const StateKey& parent, std::span<const int32_t> tokens,
                   uint64_t committed);
std::string key_text(const StateKey& key);  // 32 hex digits
absl::StatusOr<StateKey> parse_key(const std::string& text);

/// Copies pages and perhaps a snapshot to host memory, from where a background thread writes them to disk.
struct SaveOrder {
  uint64_t ticket = 0;          // comes back in an event once the file is durable, or is not
  StateKey key;                 // of the chain up to the segment's end
  StateKey parent;              // of the chain before first_position; zeros where that is 0
  uint64_t first_position = 0;  // a multiple of the segment's size
  std::vector<int32_t> tokens;  // of the segment
  std::vector<int32_t> pages;   // that hold them
  bool mtp = false;             // the MTP layer's keys are in the pages
  uint32_t snapshot = kNoSnapshot;
  uint64_t committed = 0;     // of the snapshot
  std::vector<int32_t> kept;  // its tentative tokens that may be accepted
  bool operator==(const SaveOrder&) const = default;
};

enum class LoadStep : uint8_t {
  kFetch = 1,   // read the file of `key` in the background and check it; an event says how that went
  kPlace = 2,   // what was fetched goes into these pages and this snapshot
  kForget = 3,  // what was fetched, or is about to be, is not wanted any more
  kPin = 4,     // the file of `key` stays whatever the quota says, as long as `name` is pinned
  kUnpin = 5,
  kErase = 6,  // the file of `key` goes
};

struct LoadOrder {
  LoadStep step = LoadStep::kFetch;
  uint64_t ticket = 0;
  StateKey key;
  std::vector<int32_t> pages;
  uint32_t snapshot = kNoSnapshot;
  std::string name;  // of a pinned context, at most kMaxPinName bytes
  bool operator==(const LoadOrder&) const = default;
};

struct StateOrders {
  std::vector<uint32_t> drops;  // snapshots that are forgotten
  std::vector<SnapshotTake> takes;
  std::vector<SaveOrder> saves;
  std::vector<LoadOrder> loads;
  std::vector<PageCopy> copies;
  bool operator==(const StateOrders&) const = default;
  bool empty() const { return drops.empty() && takes.empty() && saves.empty() && loads.empty() && copies.empty(); }
};

/// How a save, a fetch or a placing ended on a rank.
struct StateEvent {
  uint64_t ticket = 0;
  bool ok = false;
  std::string message;  // why not, for the log
  bool operator==(const StateEvent&) const = default;
};

/// InvalidArgument if an order breaks a bound or contradicts itself.
absl::Status validate_orders(const StateOrders& orders);
void put_orders(ByteWriter& writer, const StateOrders& orders);
StateOrders get_orders(ByteReader& reader);
void put_events(ByteWriter& writer, std::span<const StateEvent> events);
std::vector<StateEvent> get_events(ByteReader& reader);

}  // namespace tensorfold
