#include "transport/pass/state_orders.h"

#include <fmt/format.h>

#include <set>

#include "transport/pass/plan.h"

namespace tensorfold {
namespace {

absl::Status bad(const std::string& why) { return absl::InvalidArgumentError("plan: " + why); }

bool page_ok(int32_t page) { return page >= 0 && page < static_cast<int32_t>(kMaxPages); }

absl::Status validate_pages(const std::vector<int32_t>& pages, uint64_t ticket) {
  if (pages.size() > kMaxSegmentPages) return bad(fmt::format("{} pages in state order {}", pages.size(), ticket));
  for (const int32_t page : pages) {
    if (!page_ok(page)) return bad(fmt::format("page {} in state order {}", page, ticket));
  }
  return absl::OkStatus();
}

absl::Status validate_save(const SaveOrder& save) {
  if (absl::Status status = validate_pages(save.pages, save.ticket); !status.ok()) return status;
  if (save.tokens.empty() || save.pages.size() != (save.tokens.size() + 63) / 64) {
    return bad(
        fmt::format("{} pages for {} tokens in state order {}", save.pages.size(), save.tokens.size(), save.ticket));
  }
  if (save.first_position % kMaxSegmentTokens != 0 || save.first_position >= uint64_t{kMaxPages} * 64) {
    return bad(fmt::format("a segment at position {} in state order {}", save.first_position, save.ticket));
  }
  const bool has = save.snapshot != kNoSnapshot;
  const uint64_t end = save.first_position + save.tokens.size();
  if (has ? save.snapshot >= kMaxSnapshots || save.committed <= save.first_position || save.committed > end
          : save.committed != 0 || !save.kept.empty()) {
    return bad(fmt::format("snapshot {} at {} in state order {}", save.snapshot, save.committed, save.ticket));
  }
  if (save.kept.size() >= kMaxWindow) return bad(fmt::format("{} kept tokens saved", save.kept.size()));
  for (const auto* tokens : {&save.tokens, &save.kept}) {
    for (const int32_t token : *tokens) {
      if (token < 0) return bad(fmt::format("token {} in state order {}", token, save.ticket));
    }
  }
  return absl::OkStatus();
}

absl::Status validate_load(const LoadOrder& load) {
  if (absl::Status status = validate_pages(load.pages, load.ticket); !status.ok()) return status;
  if (load.step != LoadStep::kPlace && (!load.pages.empty() || load.snapshot != kNoSnapshot)) {
    return bad(fmt::format("state order {} has pages before they are placed", load.ticket));
  }
  if (load.snapshot != kNoSnapshot && load.snapshot >= kMaxSnapshots) {
    return bad(fmt::format("snapshot {} in state order {}", load.snapshot, load.ticket));
  }
  if (load.name.size() > kMaxPinName) return bad(fmt::format("a name of {} bytes is pinned", load.name.size()));
  return absl::OkStatus();
}

void put_key(ByteWriter& writer, const StateKey& key) {
  writer.put(key.high);
  writer.put(key.low);
}

StateKey get_key(ByteReader& reader) {
  StateKey key;
  key.high = reader.get<uint64_t>();
  key.low = reader.get<uint64_t>();
  return key;
}

// The number of what follows; 0 after a failure.
uint32_t get_count(ByteReader& reader) {
  const uint32_t count = reader.get<uint32_t>();
  if (count > kMaxOrders) reader.fail();
  return reader.ok() ? count : 0;
}

SaveOrder get_save(ByteReader& reader) {
  SaveOrder save;
  save.ticket = reader.get<uint64_t>();
  save.key = get_key(reader);
  save.parent = get_key(reader);
  save.first_position = reader.get<uint64_t>();
  save.tokens = reader.get_array<int32_t>(kMaxSegmentTokens);
  save.pages = reader.get_array<int32_t>(kMaxSegmentPages);
  const uint8_t mtp = reader.get<uint8_t>();
  if (mtp > 1) reader.fail();
  save.mtp = mtp == 1;
  save.snapshot = reader.get<uint32_t>();
  save.committed = reader.get<uint64_t>();
  save.kept = reader.get_array<int32_t>(kMaxWindow);
  return save;
}

LoadOrder get_load(ByteReader& reader) {
  LoadOrder load;
  const uint8_t step = reader.get<uint8_t>();
  if (step < 1 || step > 6) reader.fail();
  load.step = static_cast<LoadStep>(step);
  load.ticket = reader.get<uint64_t>();
  load.key = get_key(reader);
  load.pages = reader.get_array<int32_t>(kMaxSegmentPages);
  load.snapshot = reader.get<uint32_t>();
  load.name = reader.get_string(2 * kMaxPinName);  // validate_orders() says what is too long
  return load;
}

}  // namespace

absl::Status validate_orders(const StateOrders& orders) {
  for (const size_t count :
       {orders.drops.size(), orders.takes.size(), orders.saves.size(), orders.loads.size(), orders.copies.size()}) {
    if (count > kMaxOrders) return bad(fmt::format("{} orders of a kind, at most {}", count, kMaxOrders));
  }
  for (const uint32_t id : orders.drops) {
    if (id >= kMaxSnapshots) return bad(fmt::format("snapshot {} dropped", id));
  }
  std::set<uint32_t> taken;
  for (const SnapshotTake& take : orders.takes) {
    if (take.slot >= kMaxSlots) return bad(fmt::format("a snapshot of slot {}", take.slot));
    if (take.id >= kMaxSnapshots) return bad(fmt::format("snapshot {} taken", take.id));
    if (!taken.insert(take.id).second) return bad(fmt::format("snapshot {} taken twice", take.id));
  }
  std::set<int32_t> written;
  for (const PageCopy& copy : orders.copies) {
    if (!page_ok(copy.from) || !page_ok(copy.to)) return bad(fmt::format("page {} copied to {}", copy.from, copy.to));
    if (copy.from == copy.to) return bad(fmt::format("page {} copied to itself", copy.from));
    if (!written.insert(copy.to).second) return bad(fmt::format("two copies into page {}", copy.to));
  }
  // The order of copies among each other must not matter.
  for (const PageCopy& copy : orders.copies) {
    if (written.count(copy.from) > 0) return bad(fmt::format("page {} is copied, and copied into", copy.from));
  }
  for (const SaveOrder& save : orders.saves) {
    if (absl::Status status = validate_save(save); !status.ok()) return status;
  }
  for (const LoadOrder& load : orders.loads) {
    if (absl::Status status = validate_load(load); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void put_orders(ByteWriter& writer, const StateOrders& orders) {
  writer.put_array(std::span<const uint32_t>(orders.drops));
  writer.put_array(std::span<const SnapshotTake>(orders.takes));
  writer.put_array(std::span<const PageCopy>(orders.copies));
  writer.put(static_cast<uint32_t>(orders.saves.size()));
  for (const SaveOrder& save : orders.saves) {
    writer.put(save.ticket);
    put_key(writer, save.key);
    put_key(writer, save.parent);
    writer.put(save.first_position);
    writer.put_array(std::span<const int32_t>(save.tokens));
    writer.put_array(std::span<const int32_t>(save.pages));
    writer.put(static_cast<uint8_t>(save.mtp));
    writer.put(save.snapshot);
    writer.put(save.committed);
    writer.put_array(std::span<const int32_t>(save.kept));
  }
  writer.put(static_cast<uint32_t>(orders.loads.size()));
  for (const LoadOrder& load : orders.loads) {
    writer.put(static_cast<uint8_t>(load.step));
    writer.put(load.ticket);
    put_key(writer, load.key);
    writer.put_array(std::span<const int32_t>(load.pages));
    writer.put(load.snapshot);
    writer.put_string(load.name);
  }
}

StateOrders get_orders(ByteReader& reader) {
  StateOrders orders;
  orders.drops = reader.get_array<uint32_t>(kMaxOrders);
  orders.takes = reader.get_array<SnapshotTake>(kMaxOrders);
  orders.copies = reader.get_array<PageCopy>(kMaxOrders);
  for (uint32_t left = get_count(reader); left > 0 && reader.ok(); --left) orders.saves.push_back(get_save(reader));
  for (uint32_t left = get_count(reader); left > 0 && reader.ok(); --left) orders.loads.push_back(get_load(reader));
  return orders;
}

void put_events(ByteWriter& writer, std::span<const StateEvent> events) {
  writer.put(static_cast<uint32_t>(events.size()));
  for (const StateEvent& event : events) {
    writer.put(event.ticket);
    writer.put(static_cast<uint8_t>(event.ok));
    writer.put_string(event.message.substr(0, kMaxEventBytes));
  }
}

std::vector<StateEvent> get_events(ByteReader& reader) {
  std::vector<StateEvent> events;
  for (uint32_t left = get_count(reader); left > 0 && reader.ok(); --left) {
    StateEvent& event = events.emplace_back();
    event.ticket = reader.get<uint64_t>();
    const uint8_t ok = reader.get<uint8_t>();
    if (ok > 1) reader.fail();
    event.ok = ok == 1;
    event.message = reader.get_string(kMaxEventBytes);
  }
  return events;
}

}  // namespace tensorfold
