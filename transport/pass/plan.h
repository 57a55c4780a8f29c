// The Pass seam: the plan that rank 0 sends to every rank and the report that comes back.
//
// A plan travels on the transport's broadcast, a report on its gather. Both are little-endian, versioned, bounded and
// end in an xxHash64 of everything before it; docs/formats/wire.md has the layout. Decoding never allocates more than
// the message's own length allows and refuses anything inconsistent, naming what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/pass/state_orders.h"

namespace tensorfold {

inline constexpr uint32_t kPlanVersion = 4;
inline constexpr uint32_t kMaxSlots = 1024;
inline constexpr uint32_t kMaxPassRows = 16384;
inline constexpr uint32_t kMaxWindow = 16;       // rows of a verify window: the certain one and its drafts
inline constexpr uint32_t kMaxPages = 1u << 20;  // page ids
inline constexpr size_t kMaxPlanBytes = 1u << 20;
inline constexpr uint32_t kFullRow = 0xFFFFFFFFu;  // RowWant::top_n: the whole row of logits

inline constexpr uint32_t kDrawn = 0xFFFFFFFEu;  // RowWant::top_n: the token that each rank draws with RowWant::key

/// What rank 0 wants of one row's logits. A row may be wanted twice, in two ways.
struct RowWant {
  uint32_t row = 0;          // index within the sequence's rows; drafted rows count
  uint32_t top_n = 1;        // best candidates of each rank's vocabulary slices, or kFullRow, or kDrawn
  uint64_t key = 0;          // kDrawn: the row's part of the sampler's noise
  double temperature = 0.0;  // kDrawn: above 0
  bool operator==(const RowWant&) const = default;
};

/// One sequence's rows in a pass.
struct SequencePlan {
  uint32_t slot = 0;
  bool fresh = false;               // the slot starts anew: state and page table are cleared first
  uint32_t snapshot = kNoSnapshot;  // fresh: starts from this snapshot instead of from nothing
  bool use_mtp = false;             // keep the MTP layer's keys up to date for this sequence
  uint64_t first_position = 0;      // absolute position of tokens[0]
  uint32_t accepted = 0;            // tentative rows of the slot's previous window that are now committed
  uint32_t certain = 0;             // leading tokens that cannot be rejected
  uint32_t mtp_steps = 0;           // draft this many tokens with the MTP layer and append them as tentative rows
  bool use_block = false;           // keep the block drafter's keys up to date for this sequence
  uint32_t block_drafts = 0;        // draft this many tokens with the block drafter and append them; not with mtp_steps
  std::vector<int32_t> tokens;
  std::vector<int32_t> new_pages;  // appended to the slot's page table before the pass
  std::vector<RowWant> wants;
  bool operator==(const SequencePlan&) const = default;

  /// Rows that the ranks draft themselves, behind `tokens`.
  uint64_t drafted() const { return uint64_t{mtp_steps} + block_drafts; }
};

enum class PlanKind : uint8_t { kForward = 1, kPing = 2, kStop = 3 };

struct PassPlan {
  PlanKind kind = PlanKind::kForward;
  uint32_t epoch = 0;     // membership epoch
  uint64_t sequence = 0;  // 1, 2, 3 … within an epoch
  // Carried out before the pass in this order: snapshots dropped, snapshots taken of slots as the last pass left them,
  // pages and snapshots copied for disk, slots released, fetched states placed, pages copied, sequences opened.
  StateOrders orders;
  std::vector<uint32_t> release;  // slots freed
  std::vector<SequencePlan> sequences;
  bool operator==(const PassPlan&) const = default;

  /// Rows of the pass, drafted ones included.
  uint64_t rows() const;
};

struct WireCandidate {
  float logit = 0;
  int32_t id = 0;
  bool operator==(const WireCandidate&) const = default;
};

/// One wanted row of one rank: its candidates (drawn: one), or its vocabulary slices' logits.
struct RowReport {
  uint32_t slot = 0;
  uint32_t row = 0;
  int32_t first_id = 0;                   // of `logits`
  std::vector<WireCandidate> candidates;  // (logit descending, id ascending)
  std::vector<float> logits;              // when the whole row was wanted
  bool operator==(const RowReport&) const = default;
};

/// What one rank says after a pass.
struct PassReport {
  uint32_t epoch = 0;
  uint64_t sequence = 0;
  uint32_t rank = 0;
  uint32_t compute_us = 0;
  std::string error;               // empty: the pass succeeded
  std::vector<StateEvent> events;  // saves and fetches that ended on this rank since its last report
  std::vector<RowReport> rows;
  bool operator==(const PassReport&) const = default;
};

/// InvalidArgument if the plan breaks a bound or contradicts itself (rows wanted that it lacks, a slot twice …).
absl::Status validate_plan(const PassPlan& plan);

std::vector<std::byte> encode_plan(const PassPlan& plan);
absl::StatusOr<PassPlan> decode_plan(std::span<const std::byte> bytes);

std::vector<std::byte> encode_report(const PassReport& report);
absl::StatusOr<PassReport> decode_report(std::span<const std::byte> bytes);

}  // namespace tensorfold
