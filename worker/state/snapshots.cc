#include "worker/state/snapshots.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>

#include "transport/pass/codec.h"

namespace tensorfold {
namespace {

void copy_rows(Ops& ops, Tensor from, Tensor to, int64_t rows) {
  if (rows == 0) return;
  std::vector<int32_t> index(static_cast<size_t>(rows));
  std::iota(index.begin(), index.end(), 0);
  ops.gather_rows(from, index, to.row_range(0, rows));
}

}  // namespace

int64_t snapshot_bytes(const ModelShape& shape) {
  int64_t bytes = shape.has_mtp ? int64_t{kMaxWindow} * shape.row_values() * static_cast<int64_t>(sizeof(float)) : 0;
  for (const StateShape& layer : shape.recurrent) bytes += state_bytes(layer);
  return bytes;
}

SnapshotStore::SnapshotStore(const ModelShape& shape, Ops& ops, int64_t capacity)
    : shape_(shape), ops_(ops), snapshots_(static_cast<size_t>(capacity)) {
  for (Snapshot& snapshot : snapshots_) {
    for (const StateShape& layer : shape_.recurrent) {
      snapshot.recurrent.push_back(ops_.make_recurrent_state(layer));
      if (snapshot.recurrent.back() == nullptr) return;
      snapshot.recurrent.back()->reset();  // large ones are not there before they are written
    }
    if (shape_.has_mtp) snapshot.kept_hidden = ops_.persistent(kMaxWindow, shape_.row_values());
  }
  whole_ = true;
}

absl::Status SnapshotStore::check(uint32_t id, bool must_hold) const {
  if (id >= snapshots_.size()) {
    return absl::InvalidArgumentError(fmt::format("plan uses snapshot {}, this rank has {}", id, snapshots_.size()));
  }
  if (must_hold && !snapshots_[id].valid) {
    return absl::FailedPreconditionError(fmt::format("plan uses snapshot {}, which holds nothing here", id));
  }
  return absl::OkStatus();
}

absl::Status SnapshotStore::take(uint32_t id, const Slot& slot) {
  if (absl::Status status = check(id, false); !status.ok()) return status;
  if (!slot.in_use) {
    return absl::FailedPreconditionError(fmt::format("plan takes snapshot {} of a slot that is free here", id));
  }
  Snapshot& snapshot = snapshots_[id];
  for (size_t layer = 0; layer < slot.recurrent.size(); ++layer) {
    snapshot.recurrent[layer]->copy_from(*slot.recurrent[layer]);
  }
  copy_rows(ops_, slot.kept_hidden, snapshot.kept_hidden, slot.kept_rows);
  snapshot.committed = slot.committed;
  snapshot.tentative = slot.tentative;
  snapshot.kept_rows = slot.kept_rows;
  snapshot.kept_position = slot.kept_position;
  snapshot.kept_tokens = slot.kept_tokens;
  snapshot.valid = true;
  return absl::OkStatus();
}

absl::Status SnapshotStore::drop(uint32_t id) {
  if (absl::Status status = check(id, true); !status.ok()) return status;
  snapshots_[id].valid = false;
  return absl::OkStatus();
}

absl::Status SnapshotStore::restore(uint32_t id, Slot* slot) const {
  if (absl::Status status = check(id, true); !status.ok()) return status;
  const Snapshot& snapshot = snapshots_[id];
  for (size_t layer = 0; layer < slot->recurrent.size(); ++layer) {
    slot->recurrent[layer]->copy_from(*snapshot.recurrent[layer]);
  }
  copy_rows(ops_, snapshot.kept_hidden, slot->kept_hidden, snapshot.kept_rows);
  slot->committed = snapshot.committed;
  slot->tentative = snapshot.tentative;
  slot->kept_rows = snapshot.kept_rows;
  slot->kept_position = snapshot.kept_position;
  slot->kept_tokens = snapshot.kept_tokens;
  return absl::OkStatus();
}

// committed, tentative, kept rows, kept position; kept tokens; kept hidden rows; each layer's state with its size.
absl::Status SnapshotStore::save(uint32_t id, std::vector<std::byte>* bytes) const {
  if (absl::Status status = check(id, true); !status.ok()) return status;
  const Snapshot& snapshot = snapshots_[id];
  ByteWriter writer;
  for (const int64_t number : {snapshot.committed, snapshot.tentative, snapshot.kept_rows, snapshot.kept_position}) {
    writer.put(number);
  }
  writer.put_array(std::span<const int32_t>(snapshot.kept_tokens));
  std::vector<float> hidden(static_cast<size_t>(snapshot.kept_rows * shape_.row_values()));
  if (!hidden.empty()) ops_.download(snapshot.kept_hidden.row_range(0, snapshot.kept_rows), hidden);
  writer.put_array(std::span<const float>(hidden));
  writer.put(static_cast<uint32_t>(snapshot.recurrent.size()));
  std::vector<std::byte> state;
  for (const std::unique_ptr<RecurrentState>& layer : snapshot.recurrent) {
    state.resize(static_cast<size_t>(layer->bytes()));
    layer->save(state);
    writer.put_array(std::span<const std::byte>(state));
  }
  *bytes = std::move(writer.bytes());
  return absl::OkStatus();
}

absl::Status SnapshotStore::load(uint32_t id, std::span<const std::byte> bytes) {
  if (absl::Status status = check(id, false); !status.ok()) return status;
  Snapshot& snapshot = snapshots_[id];
  snapshot.valid = false;
  ByteReader reader(bytes);
  Snapshot read;
  for (int64_t* number : {&read.committed, &read.tentative, &read.kept_rows, &read.kept_position}) {
    *number = reader.get<int64_t>();
  }
  read.kept_tokens = reader.get_array<int32_t>(kMaxWindow);
  const int64_t most = shape_.has_mtp ? int64_t{kMaxWindow} : 0;
  const std::vector<float> hidden = reader.get_array<float>(static_cast<size_t>(most * shape_.row_values()));
  const uint32_t layers = reader.get<uint32_t>();
  std::vector<std::vector<std::byte>> states;
  bool fits = layers == snapshot.recurrent.size();
  for (size_t layer = 0; fits && layer < snapshot.recurrent.size(); ++layer) {
    const size_t size = static_cast<size_t>(snapshot.recurrent[layer]->bytes());
    states.push_back(reader.get_array<std::byte>(size));
    fits = states.back().size() == size;
  }
  const bool rows_fit =
      read.kept_rows >= 0 && read.kept_rows <= most &&
      static_cast<int64_t>(hidden.size()) == read.kept_rows * shape_.row_values() &&
      (read.kept_rows == 0 || (read.kept_rows == read.tentative + 1 && read.kept_position == read.committed - 1));
  if (!fits || !rows_fit || !reader.ok() || reader.left() != 0 || read.committed <= 0 || read.tentative < 0 ||
      read.tentative >= int64_t{kMaxWindow} || static_cast<int64_t>(read.kept_tokens.size()) != read.tentative) {
    return absl::InvalidArgumentError("a snapshot of another share, or a damaged one");
  }
  for (size_t layer = 0; layer < states.size(); ++layer) {
    if (!snapshot.recurrent[layer]->load(states[layer], read.tentative)) {
      return absl::InvalidArgumentError("a snapshot whose states keep other rows than it says, or a damaged one");
    }
  }
  if (!hidden.empty()) ops_.upload(hidden, snapshot.kept_hidden.row_range(0, read.kept_rows));
  snapshot.committed = read.committed;
  snapshot.tentative = read.tentative;
  snapshot.kept_rows = read.kept_rows;
  snapshot.kept_position = read.kept_position;
  snapshot.kept_tokens = std::move(read.kept_tokens);
  snapshot.valid = true;
  return absl::OkStatus();
}

void SnapshotStore::clear() {
  for (Snapshot& snapshot : snapshots_) snapshot.valid = false;
}

int64_t SnapshotStore::bytes() const {
  int64_t bytes = 0;
  for (const Snapshot& snapshot : snapshots_) {
    for (const std::unique_ptr<RecurrentState>& state : snapshot.recurrent) bytes += state->bytes();
    if (snapshot.kept_hidden.data != nullptr) {
      bytes += int64_t{kMaxWindow} * shape_.row_values() * static_cast<int64_t>(sizeof(float));
    }
  }
  return bytes;
}

}  // namespace tensorfold
