#include "transport/pass/plan.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <cmath>
#include <set>

#include "transport/pass/codec.h"

namespace tensorfold {
namespace {

constexpr uint32_t kPlanMagic = 0x4E504654;    // "TFPN"
constexpr uint32_t kReportMagic = 0x50524654;  // "TFRP"
constexpr size_t kMaxReportRows = kMaxPassRows;
constexpr size_t kMaxVocabulary = 1u << 24;
constexpr size_t kMaxErrorBytes = 4096;
constexpr uint32_t kMaxCandidates = 4096;  // of one row and rank

void seal(ByteWriter& writer) { writer.put(XXH64(writer.bytes().data(), writer.bytes().size(), 0)); }

// Checks length, checksum, magic and version; returns the body between the header and the checksum.
absl::StatusOr<std::span<const std::byte>> open_sealed(std::span<const std::byte> bytes, uint32_t magic,
                                                       const char* what) {
  constexpr size_t kFrame = sizeof(uint32_t) * 2 + sizeof(uint64_t);
  if (bytes.size() < kFrame) {
    return absl::InvalidArgumentError(fmt::format("{}: {} bytes are too few", what, bytes.size()));
  }
  const auto body = bytes.first(bytes.size() - sizeof(uint64_t));
  const uint64_t found = ByteReader(bytes.last(sizeof(uint64_t))).get<uint64_t>();
  const uint64_t computed = XXH64(body.data(), body.size(), 0);
  if (found != computed) {
    return absl::DataLossError(fmt::format("{}: checksum {:016x}, computed {:016x}", what, found, computed));
  }
  ByteReader reader(body);
  const uint32_t found_magic = reader.get<uint32_t>();
  const uint32_t version = reader.get<uint32_t>();
  if (found_magic != magic) {
    return absl::InvalidArgumentError(fmt::format("{}: magic {:08x}, expected {:08x}", what, found_magic, magic));
  }
  if (version != kPlanVersion) {
    return absl::InvalidArgumentError(fmt::format("{}: version {}, this build speaks {}", what, version, kPlanVersion));
  }
  return body.subspan(sizeof(uint32_t) * 2);
}

void put_sequence(ByteWriter& writer, const SequencePlan& sequence) {
  writer.put(sequence.slot);
  writer.put(static_cast<uint8_t>(sequence.fresh));
  writer.put(static_cast<uint8_t>(sequence.use_mtp));
  writer.put(sequence.snapshot);
  writer.put(sequence.first_position);
  writer.put(sequence.accepted);
  writer.put(sequence.certain);
  writer.put(sequence.mtp_steps);
  writer.put(static_cast<uint8_t>(sequence.use_block));
  writer.put(sequence.block_drafts);
  writer.put_array(std::span<const int32_t>(sequence.tokens));
  writer.put_array(std::span<const int32_t>(sequence.new_pages));
  writer.put(static_cast<uint32_t>(sequence.wants.size()));
  for (const RowWant& want : sequence.wants) {
    writer.put(want.row);
    writer.put(want.top_n);
    if (want.top_n != kDrawn) continue;
    writer.put(want.key);
    writer.put(want.temperature);
  }
}

// One form for one meaning: 0 or 1.
bool get_flag(ByteReader& reader) {
  const uint8_t flag = reader.get<uint8_t>();
  if (flag > 1) reader.fail();
  return flag == 1;
}

SequencePlan get_sequence(ByteReader& reader) {
  SequencePlan sequence;
  sequence.slot = reader.get<uint32_t>();
  sequence.fresh = get_flag(reader);
  sequence.use_mtp = get_flag(reader);
  sequence.snapshot = reader.get<uint32_t>();
  sequence.first_position = reader.get<uint64_t>();
  sequence.accepted = reader.get<uint32_t>();
  sequence.certain = reader.get<uint32_t>();
  sequence.mtp_steps = reader.get<uint32_t>();
  sequence.use_block = get_flag(reader);
  sequence.block_drafts = reader.get<uint32_t>();
  sequence.tokens = reader.get_array<int32_t>(kMaxPassRows);
  sequence.new_pages = reader.get_array<int32_t>(kMaxPages);
  const uint32_t wants = reader.get<uint32_t>();
  for (uint32_t i = 0; i < wants && reader.ok(); ++i) {
    const uint32_t row = reader.get<uint32_t>();
    RowWant& want = sequence.wants.emplace_back();
    want.row = row;
    want.top_n = reader.get<uint32_t>();
    if (want.top_n != kDrawn) continue;
    want.key = reader.get<uint64_t>();
    want.temperature = reader.get<double>();
  }
  return sequence;
}

const char* kind_name(PlanKind kind) {
  switch (kind) {
    case PlanKind::kForward:
      return "forward";
    case PlanKind::kPing:
      return "ping";
    case PlanKind::kStop:
      return "stop";
  }
  return "unknown kind";
}

absl::Status validate_sequence(const SequencePlan& sequence) {
  const auto bad = [&](const std::string& why) {
    return absl::InvalidArgumentError(fmt::format("plan: slot {}: {}", sequence.slot, why));
  };
  const uint64_t rows = sequence.tokens.size() + sequence.drafted();
  if (sequence.slot >= kMaxSlots) return bad(fmt::format("slots end at {}", kMaxSlots - 1));
  if (sequence.tokens.empty()) return bad("no tokens");
  if (sequence.certain == 0 || sequence.certain > sequence.tokens.size()) {
    return bad(fmt::format("{} certain of {} tokens", sequence.certain, sequence.tokens.size()));
  }
  if (rows - sequence.certain >= kMaxWindow) {
    return bad(fmt::format("{} tentative rows, at most {} fit a window", rows - sequence.certain, kMaxWindow - 1));
  }
  if (sequence.accepted >= kMaxWindow) return bad(fmt::format("{} accepted rows", sequence.accepted));
  if (sequence.snapshot != kNoSnapshot) {
    if (sequence.snapshot >= kMaxSnapshots) return bad(fmt::format("starts from snapshot {}", sequence.snapshot));
    if (!sequence.fresh) return bad("goes on and starts from a snapshot");
    if (sequence.first_position == 0) return bad("starts from a snapshot at position 0");
  } else if (sequence.fresh && sequence.accepted != 0) {
    return bad("a fresh slot without a snapshot has nothing to accept");
  }
  if (sequence.mtp_steps != 0 && !sequence.use_mtp) return bad("MTP steps without MTP");
  if (sequence.block_drafts != 0 && !sequence.use_block) return bad("drafts of a block without a block drafter");
  if (sequence.block_drafts != 0 && sequence.mtp_steps != 0) return bad("MTP steps beside drafts of a block");
  constexpr uint64_t kPositions = uint64_t{kMaxPages} * 64;
  if (rows > kPositions || sequence.first_position > kPositions - rows) {
    return bad(fmt::format("{} rows from position {}, positions end at {}", rows, sequence.first_position, kPositions));
  }
  if (sequence.new_pages.size() > kMaxPages) return bad(fmt::format("{} new pages", sequence.new_pages.size()));
  uint32_t last = 0;
  for (size_t i = 0; i < sequence.wants.size(); ++i) {
    const RowWant& want = sequence.wants[i];
    if (want.row >= rows) return bad(fmt::format("row {} wanted of {}", want.row, rows));
    if (i > 0 && want.row < last) return bad(fmt::format("row {} wanted after row {}", want.row, last));
    if (i > 0 && want.row == last && want.top_n == sequence.wants[i - 1].top_n) {
      return bad(fmt::format("row {} wanted twice in the same way", want.row));
    }
    if (i > 1 && want.row == sequence.wants[i - 2].row) return bad(fmt::format("row {} wanted three times", want.row));
    if (want.top_n == kDrawn) {
      if (!(want.temperature > 0.0) || !std::isfinite(want.temperature)) {
        return bad(fmt::format("row {} drawn at temperature {}", want.row, want.temperature));
      }
    } else if (want.top_n == 0 || (want.top_n != kFullRow && want.top_n > kMaxCandidates)) {
      return bad(
          fmt::format("{} candidates wanted of row {}, allowed are 1 to {}", want.top_n, want.row, kMaxCandidates));
    }
    last = want.row;
  }
  for (const int32_t token : sequence.tokens) {
    if (token < 0) return bad(fmt::format("token {}", token));
  }
  for (const int32_t page : sequence.new_pages) {
    if (page < 0 || page >= static_cast<int32_t>(kMaxPages)) return bad(fmt::format("page {}", page));
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t PassPlan::rows() const {
  uint64_t total = 0;
  for (const SequencePlan& sequence : sequences) total += sequence.tokens.size() + sequence.drafted();
  return total;
}

absl::Status validate_plan(const PassPlan& plan) {
  std::set<uint32_t> slots;
  size_t wants = 0;
  for (const SequencePlan& sequence : plan.sequences) {
    if (absl::Status status = validate_sequence(sequence); !status.ok()) return status;
    if (!slots.insert(sequence.slot).second) {
      return absl::InvalidArgumentError(fmt::format("plan: slot {} twice", sequence.slot));
    }
    wants += sequence.wants.size();
  }
  if (wants > kMaxReportRows) {
    return absl::InvalidArgumentError(fmt::format("plan: {} rows wanted, at most {}", wants, kMaxReportRows));
  }
  if (absl::Status status = validate_orders(plan.orders); !status.ok()) return status;
  if (plan.kind != PlanKind::kForward && !plan.sequences.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("plan: {} with {} sequences", kind_name(plan.kind), plan.sequences.size()));
  }
  if (plan.release.size() > kMaxSlots) {
    return absl::InvalidArgumentError(
        fmt::format("plan: {} slots released, at most {}", plan.release.size(), kMaxSlots));
  }
  for (const uint32_t slot : plan.release) {
    if (slot >= kMaxSlots) return absl::InvalidArgumentError(fmt::format("plan: slot {} released", slot));
  }
  if (plan.rows() > kMaxPassRows) {
    return absl::InvalidArgumentError(fmt::format("plan: {} rows, at most {}", plan.rows(), kMaxPassRows));
  }
  return absl::OkStatus();
}

std::vector<std::byte> encode_plan(const PassPlan& plan) {
  ByteWriter writer;
  writer.put(kPlanMagic);
  writer.put(kPlanVersion);
  writer.put(static_cast<uint8_t>(plan.kind));
  writer.put(plan.epoch);
  writer.put(plan.sequence);
  put_orders(writer, plan.orders);
  writer.put_array(std::span<const uint32_t>(plan.release));
  writer.put(static_cast<uint32_t>(plan.sequences.size()));
  for (const SequencePlan& sequence : plan.sequences) put_sequence(writer, sequence);
  seal(writer);
  return std::move(writer.bytes());
}

absl::StatusOr<PassPlan> decode_plan(std::span<const std::byte> bytes) {
  const auto body = open_sealed(bytes, kPlanMagic, "plan");
  if (!body.ok()) return body.status();
  ByteReader reader(*body);
  PassPlan plan;
  const uint8_t kind = reader.get<uint8_t>();
  if (kind < 1 || kind > 3) return absl::InvalidArgumentError(fmt::format("plan: kind {}", kind));
  plan.kind = static_cast<PlanKind>(kind);
  plan.epoch = reader.get<uint32_t>();
  plan.sequence = reader.get<uint64_t>();
  plan.orders = get_orders(reader);
  plan.release = reader.get_array<uint32_t>(kMaxSlots);
  const uint32_t sequences = reader.get<uint32_t>();
  if (sequences > kMaxSlots) return absl::InvalidArgumentError(fmt::format("plan: {} sequences", sequences));
  for (uint32_t i = 0; i < sequences && reader.ok(); ++i) plan.sequences.push_back(get_sequence(reader));
  if (!reader.ok() || reader.left() != 0) {
    return absl::InvalidArgumentError(fmt::format("plan: lengths inside do not fit its {} bytes", bytes.size()));
  }
  if (absl::Status status = validate_plan(plan); !status.ok()) return status;
  return plan;
}

std::vector<std::byte> encode_report(const PassReport& report) {
  ByteWriter writer;
  writer.put(kReportMagic);
  writer.put(kPlanVersion);
  writer.put(report.epoch);
  writer.put(report.sequence);
  writer.put(report.rank);
  writer.put(report.compute_us);
  writer.put_string(report.error.substr(0, kMaxErrorBytes));
  put_events(writer, report.events);
  writer.put(static_cast<uint32_t>(report.rows.size()));
  for (const RowReport& row : report.rows) {
    writer.put(row.slot);
    writer.put(row.row);
    writer.put(row.first_id);
    writer.put_array(std::span<const WireCandidate>(row.candidates));
    writer.put_array(std::span<const float>(row.logits));
  }
  seal(writer);
  return std::move(writer.bytes());
}

absl::StatusOr<PassReport> decode_report(std::span<const std::byte> bytes) {
  const auto body = open_sealed(bytes, kReportMagic, "pass report");
  if (!body.ok()) return body.status();
  ByteReader reader(*body);
  PassReport report;
  report.epoch = reader.get<uint32_t>();
  report.sequence = reader.get<uint64_t>();
  report.rank = reader.get<uint32_t>();
  report.compute_us = reader.get<uint32_t>();
  report.error = reader.get_string(kMaxErrorBytes);
  report.events = get_events(reader);
  const uint32_t rows = reader.get<uint32_t>();
  if (rows > kMaxReportRows) return absl::InvalidArgumentError(fmt::format("pass report: {} rows", rows));
  for (uint32_t i = 0; i < rows && reader.ok(); ++i) {
    RowReport& row = report.rows.emplace_back();
    row.slot = reader.get<uint32_t>();
    row.row = reader.get<uint32_t>();
    row.first_id = reader.get<int32_t>();
    row.candidates = reader.get_array<WireCandidate>(kMaxVocabulary);
    row.logits = reader.get_array<float>(kMaxVocabulary);
  }
  if (!reader.ok() || reader.left() != 0) {
    return absl::InvalidArgumentError(fmt::format("pass report: lengths inside do not fit its {} bytes", bytes.size()));
  }
  return report;
}

}  // namespace tensorfold
