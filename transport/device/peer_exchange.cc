#include "transport/device/peer_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace tensorfold {
namespace {

// Memory that is shared by a handle is an allocation of its own: the driver cuts small ones out of blocks of this size.
constexpr size_t kBlockBytes = size_t{2} << 20;
constexpr size_t kControlBytes = 256;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Device memory that ranks of this process share the ownership of.
struct Block {
  explicit Block(void* memory) : memory(memory) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { cudaFree(memory); }
  void* const memory;
};

// Finds a block of this process by its address, so that ranks that got the address as bytes own the block too.
struct Registry {
  std::mutex mutex;
  std::map<void*, std::weak_ptr<Block>> blocks;

  static Registry& get() {
    static Registry* const registry = new Registry;  // outlives every exchange
    return *registry;
  }
  void add(const std::shared_ptr<Block>& block) {
    std::lock_guard lock(mutex);
    std::erase_if(blocks, [](const auto& entry) { return entry.second.expired(); });
    blocks[block->memory] = block;
  }
  std::shared_ptr<Block> find(void* memory) {
    std::lock_guard lock(mutex);
    const auto found = blocks.find(memory);
    return found == blocks.end() ? nullptr : found->second.lock();
  }
};

// One area of every rank, as this rank reaches them.
class SharedArea {
 public:
  SharedArea() = default;
  SharedArea(SharedArea&& other) noexcept { swap(other); }
  SharedArea& operator=(SharedArea&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedArea() {
    for (void* memory : mapped_) cudaIpcCloseMemHandle(memory);
  }
  void swap(SharedArea& other) {
    blocks_.swap(other.blocks_);
    mapped_.swap(other.mapped_);
    at_.swap(other.at_);
  }

  std::byte* at(int rank) const { return at_[static_cast<size_t>(rank)]; }

  // Collective. `bytes` of zeros on each rank.
  static absl::StatusOr<SharedArea> create(Communicator& communicator, std::span<const DeviceIdentity> ranks,
                                           size_t bytes, Deadline deadline);

 private:
  struct Record {
    void* memory = nullptr;
    cudaIpcMemHandle_t handle{};
  };
  absl::Status allocate(std::span<const DeviceIdentity> ranks, int me, size_t bytes, Record* record);
  absl::Status reach(std::span<const DeviceIdentity> ranks, int me, std::span<const Record> records,
                     const Communicator& communicator);

  std::vector<std::shared_ptr<Block>> blocks_;
  std::vector<void*> mapped_;
  std::vector<std::byte*> at_;
};

absl::Status SharedArea::allocate(std::span<const DeviceIdentity> ranks, int me, size_t bytes, Record* record) {
  bytes = round_up(bytes, kBlockBytes);
  absl::Status status =
      cuda_status(cudaMalloc(&record->memory, bytes), fmt::format("peer exchange: {} bytes of device memory", bytes));
  if (!status.ok()) return status;
  blocks_.push_back(std::make_shared<Block>(record->memory));
  Registry::get().add(blocks_.back());
  const absl::StatusOr<OwnStream> stream = OwnStream::create();
  if (!stream.ok()) return stream.status();
  status = cuda_status(cudaMemsetAsync(record->memory, 0, bytes, stream->get()), "peer exchange: clearing memory");
  if (status.ok()) status = cuda_status(cudaStreamSynchronize(stream->get()), "peer exchange: clearing memory");
  if (!status.ok()) return status;
  const uint64_t mine = ranks[static_cast<size_t>(me)].process;
  if (std::all_of(ranks.begin(), ranks.end(), [&](const DeviceIdentity& r) { return r.process == mine; })) {
    return absl::OkStatus();
  }
  return cuda_status(cudaIpcGetMemHandle(&record->handle, record->memory), "peer exchange: sharing memory");
}

absl::Status SharedArea::reach(std::span<const DeviceIdentity> ranks, int me, std::span<const Record> records,
                               const Communicator& communicator) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) == me) {
      at_.push_back(static_cast<std::byte*>(records[r].memory));
      continue;
    }
    const std::string who =
        fmt::format("peer exchange: the memory of rank {} ({})", r, communicator.label(static_cast<int>(r)));
    if (ranks[r].process == ranks[static_cast<size_t>(me)].process) {
      std::shared_ptr<Block> block = Registry::get().find(records[r].memory);
      if (block == nullptr) return absl::InternalError(who + " is gone");
      at_.push_back(static_cast<std::byte*>(block->memory));
      blocks_.push_back(std::move(block));
      continue;
    }
    void* memory = nullptr;
    absl::Status status =
        cuda_status(cudaIpcOpenMemHandle(&memory, records[r].handle, cudaIpcMemLazyEnablePeerAccess), who);
    if (!status.ok()) return status;
    mapped_.push_back(memory);
    at_.push_back(static_cast<std::byte*>(memory));
  }
  return absl::OkStatus();
}

absl::StatusOr<SharedArea> SharedArea::create(Communicator& communicator, std::span<const DeviceIdentity> ranks,
                                              size_t bytes, Deadline deadline) {
  SharedArea area;
  Record record;
  const absl::Status allocated = area.allocate(ranks, communicator.rank(), bytes, &record);
  if (absl::Status status = agree(communicator, allocated, deadline); !status.ok()) return status;
  std::vector<Record> records(ranks.size());
  const std::vector<size_t> sizes(ranks.size(), sizeof(Record));
  absl::Status gathered = communicator.all_gather(std::as_bytes(std::span(&record, 1)), sizes,
                                                  std::as_writable_bytes(std::span(records)), deadline);
  if (!gathered.ok()) return gathered;
  const absl::Status reached = area.reach(ranks, communicator.rank(), records, communicator);
  if (absl::Status status = agree(communicator, reached, deadline); !status.ok()) return status;
  return area;
}

class PeerExchange : public DeviceExchange {
 public:
  PeerExchange(Communicator& communicator, std::vector<DeviceIdentity> ranks)
      : communicator_(communicator), ranks_(std::move(ranks)) {
    view_.rank = communicator.rank();
    view_.world = communicator.world();
  }

  absl::Status open(int64_t sum_floats, Deadline deadline) {
    const size_t world = ranks_.size();
    const size_t flag_bytes = world * kPeerBlocks * sizeof(uint32_t);  // a multiple of 256
    const size_t sum_bytes = 2 * static_cast<size_t>(sum_floats) * sizeof(unsigned long long);
    absl::StatusOr<PinnedPointer<std::byte>> host = allocate_pinned(sizeof(PeerHost), "peer exchange");
    absl::Status mine = host.status();
    void* device_host = nullptr;
    if (mine.ok()) {
      host_memory_ = *std::move(host);
      host_ = reinterpret_cast<PeerHost*>(host_memory_.get());
      set_deadline(Deadline::after(std::chrono::seconds(60)));
      mine = cuda_status(cudaHostGetDevicePointer(&device_host, host_memory_.get(), 0), "peer exchange: mapped memory");
    }
    if (mine.ok()) mine = enable_access();
    if (mine.ok() && !cuda_exchange_load()) mine = launch_status();
    if (mine.ok() && !cuda_peer_move_fits()) {
      mine = absl::FailedPreconditionError(
          fmt::format("this GPU cannot hold {} blocks of {} threads at once", kPeerBlocks, kPeerThreads));
    }
    if (absl::Status status = agree(communicator_, mine, deadline); !status.ok()) return status;
    absl::StatusOr<SharedArea> area =
        SharedArea::create(communicator_, ranks_, kControlBytes + flag_bytes + sum_bytes, deadline);
    if (!area.ok()) return area.status();
    area_ = *std::move(area);
    view_.host = static_cast<PeerHost*>(device_host);
    view_.control = reinterpret_cast<PeerControl*>(area_.at(view_.rank));
    view_.sum_floats = sum_floats;
    for (int r = 0; r < view_.world; ++r) {
      std::byte* const at = area_.at(r) + kControlBytes;
      view_.flags[r] = reinterpret_cast<uint32_t*>(at);
      view_.sums[r] = reinterpret_cast<unsigned long long*>(at + flag_bytes);
    }
    return absl::OkStatus();
  }

  const std::string& name() const override {
    static const std::string name = "peer";
    return name;
  }

  absl::Status reserve(size_t max_bytes, Deadline deadline) override {
    const size_t slot = round_up(std::max<size_t>(max_bytes, 16), 256);
    if (slot <= view_.slot_bytes) return absl::OkStatus();
    absl::StatusOr<SharedArea> slots = SharedArea::create(communicator_, ranks_, 2 * ranks_.size() * slot, deadline);
    if (!slots.ok()) return slots.status();
    slots_ = *std::move(slots);
    for (int r = 0; r < view_.world; ++r) view_.slots[r] = slots_.at(r);
    view_.slot_bytes = slot;
    return absl::OkStatus();
  }

  absl::Status all_gather(cudaStream_t stream, const void* mine, std::span<const size_t> sizes, void* out) override {
    if (absl::Status status = check_sizes(sizes, view_.world, "all_gather"); !status.ok()) return status;
    const size_t own = sizes[static_cast<size_t>(view_.rank)];
    PeerMove move;
    std::byte* to = static_cast<std::byte*>(out);
    for (size_t r = 0; r < sizes.size(); ++r) {
      move.send[r] = static_cast<const std::byte*>(mine);
      move.send_bytes[r] = own;
      move.out[r] = to;
      move.receive_bytes[r] = sizes[r];
      to += sizes[r];
    }
    return enqueue(stream, move);
  }

  absl::Status all_to_all(cudaStream_t stream, const void* send, std::span<const size_t> send_sizes, void* receive,
                          std::span<const size_t> receive_sizes) override {
    if (absl::Status status = check_sizes(send_sizes, view_.world, "all_to_all"); !status.ok()) return status;
    if (absl::Status status = check_sizes(receive_sizes, view_.world, "all_to_all"); !status.ok()) return status;
    PeerMove move;
    const std::byte* from = static_cast<const std::byte*>(send);
    std::byte* to = static_cast<std::byte*>(receive);
    for (size_t r = 0; r < send_sizes.size(); ++r) {
      move.send[r] = from;
      move.send_bytes[r] = send_sizes[r];
      move.out[r] = to;
      move.receive_bytes[r] = receive_sizes[r];
      from += send_sizes[r];
      to += receive_sizes[r];
    }
    return enqueue(stream, move);
  }

  absl::Status status() override {
    const uint32_t error = std::atomic_ref<uint32_t>(host_->error).load(std::memory_order_acquire);
    std::lock_guard lock(mutex_);
    if (error != 0 && status_.ok()) {
      const int peer = static_cast<int>(error) - 1;
      status_ = absl::DeadlineExceededError(
          fmt::format("peer exchange: rank {} ({}) did not come within {} ms", peer, communicator_.label(peer),
                      std::chrono::duration_cast<std::chrono::milliseconds>(wait_).count()));
    }
    return status_;
  }

  void set_deadline(Deadline deadline) override {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.left());
    {
      std::lock_guard lock(mutex_);
      wait_ = left;
    }
    std::atomic_ref<uint64_t>(host_->wait_ns).store(static_cast<uint64_t>(left.count()));
  }

  void abort(absl::Status why) override {
    {
      std::lock_guard lock(mutex_);
      if (status_.ok()) status_ = std::move(why);
    }
    std::atomic_ref<uint32_t>(host_->aborted).store(1);
  }

  std::string describe() override {
    std::string text = fmt::format("peer memory, this GPU {}", ranks_[static_cast<size_t>(view_.rank)].pci.data());
    for (int r = 0; r < view_.world; ++r) {
      if (r == view_.rank) continue;
      const DeviceIdentity& peer = ranks_[static_cast<size_t>(r)];
      const bool same = peer.process == ranks_[static_cast<size_t>(view_.rank)].process;
      text += fmt::format("\nrank {} ({}): GPU {}, {} process", r, communicator_.label(r), peer.pci.data(),
                          same ? "this" : "another");
    }
    return text;
  }

  const PeerView* peer_view() const override { return &view_; }

 private:
  // For plain pointers within the process; handles bring their own access.
  absl::Status enable_access() {
    for (int r = 0; r < view_.world; ++r) {
      const DeviceIdentity& peer = ranks_[static_cast<size_t>(r)];
      if (r == view_.rank || peer.process != ranks_[static_cast<size_t>(view_.rank)].process) continue;
      int device = 0;
      const std::string what = fmt::format("peer exchange: access to GPU {}", peer.pci.data());
      if (absl::Status status = cuda_status(cudaDeviceGetByPCIBusId(&device, peer.pci.data()), what); !status.ok()) {
        return status;
      }
      const cudaError_t enabled = cudaDeviceEnablePeerAccess(device, 0);
      if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else if (absl::Status status = cuda_status(enabled, what); !status.ok()) {
        return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status enqueue(cudaStream_t stream, const PeerMove& move) {
    {
      std::lock_guard lock(mutex_);
      if (!status_.ok()) return status_;
    }
    for (int r = 0; r < view_.world; ++r) {
      if (r == view_.rank) continue;  // the own message does not travel
      const size_t longest = std::max(move.send_bytes[r], move.receive_bytes[r]);
      if (longest > view_.slot_bytes) {
        return absl::ResourceExhaustedError(
            fmt::format("peer exchange: a message of {} bytes between ranks {} and {}, but room for {} is reserved",
                        longest, view_.rank, r, view_.slot_bytes));
      }
    }
    cuda_peer_move(stream, view_, move);
    return launch_status();
  }

  Communicator& communicator_;
  const std::vector<DeviceIdentity> ranks_;
  PinnedPointer<std::byte> host_memory_;
  PeerHost* host_ = nullptr;  // of host_memory_; the GPU reads and writes it meanwhile
  SharedArea area_;
  SharedArea slots_;
  PeerView view_;

  std::mutex mutex_;
  absl::Status status_;               // guarded by mutex_
  std::chrono::nanoseconds wait_{0};  // guarded by mutex_
};

}  // namespace

absl::Status peers_reachable(std::span<const DeviceIdentity> ranks, int rank, int device,
                             const Communicator& communicator) {
  const auto refuse = [](const std::string& why) { return absl::FailedPreconditionError(why); };
  for (size_t a = 0; a < ranks.size(); ++a) {
    if (!same_host(ranks[a], ranks[0])) {
      return refuse(fmt::format("peer exchange: rank {} ({}) is on another host than rank 0 ({})", a,
                                communicator.label(static_cast<int>(a)), communicator.label(0)));
    }
    for (size_t b = 0; b < a; ++b) {
      if (same_gpu(ranks[a], ranks[b])) {
        return refuse(
            fmt::format("peer exchange: ranks {} and {} ({}) are on one GPU ({}): a waiting kernel of one "
                        "would keep out the other's",
                        b, a, communicator.label(static_cast<int>(a)), ranks[a].pci.data()));
      }
    }
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    int peer = 0;
    int can = 0;
    if (cudaDeviceGetByPCIBusId(&peer, ranks[r].pci.data()) != cudaSuccess) {
      cudaGetLastError();
      return refuse(fmt::format("peer exchange: GPU {} of rank {} is not visible to rank {} (CUDA_VISIBLE_DEVICES)",
                                ranks[r].pci.data(), r, rank));
    }
    if (absl::Status status = cuda_status(cudaDeviceCanAccessPeer(&can, device, peer), "peer exchange"); !status.ok()) {
      return status;
    }
    if (can == 0) {
      return refuse(fmt::format("peer exchange: GPU {} of rank {} cannot reach GPU {} of rank {}",
                                ranks[static_cast<size_t>(rank)].pci.data(), rank, ranks[r].pci.data(), r));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceExchange>> create_peer_exchange(Communicator& communicator, Deadline deadline,
                                                                     int64_t sum_floats) {
  if (communicator.world() > kMaxPeers || sum_floats < 4 || sum_floats % 4 != 0) {
    return absl::InvalidArgumentError("peer exchange: sum_floats is not a positive multiple of 4");
  }
  int device = 0;
  absl::Status mine = cuda_status(cudaGetDevice(&device), "peer exchange");
  absl::StatusOr<DeviceIdentity> identity = device_identity(device);
  if (mine.ok()) mine = identity.status();
  if (absl::Status status = agree(communicator, mine, deadline); !status.ok()) return status;
  std::vector<DeviceIdentity> ranks(static_cast<size_t>(communicator.world()));
  const std::vector<size_t> sizes(ranks.size(), sizeof(DeviceIdentity));
  absl::Status gathered = communicator.all_gather(std::as_bytes(std::span(&*identity, 1)), sizes,
                                                  std::as_writable_bytes(std::span(ranks)), deadline);
  if (!gathered.ok()) return gathered;
  for (DeviceIdentity& rank : ranks) {  // came as bytes
    rank.host.back() = 0;
    rank.pci.back() = 0;
  }
  mine = peers_reachable(ranks, communicator.rank(), device, communicator);
  if (absl::Status status = agree(communicator, mine, deadline); !status.ok()) return status;
  auto exchange = std::make_unique<PeerExchange>(communicator, std::move(ranks));
  if (absl::Status status = exchange->open(sum_floats, deadline); !status.ok()) return status;
  return exchange;
}

}  // namespace tensorfold
