#include "transport/device/nccl_exchange.h"

#include <fmt/format.h>

#include "transport/device/cuda_support.h"

#if TENSORFOLD_HAVE_NCCL

#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tensorfold {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kEnqueueTime = seconds(30);  // of a call that waits for no peer, a generous bound

// The functions of the library that are used: none of them adds anything.
struct Nccl {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  absl::Status loaded;
};

Nccl load() {
  Nccl nccl;
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    nccl.loaded = absl::NotFoundError(fmt::format("libnccl.so.2 cannot be loaded: {}", why == nullptr ? "?" : why));
    return nccl;
  }
  auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) nccl.loaded = absl::NotFoundError(fmt::format("libnccl.so.2 has no {}", name));
  };
  find(&nccl.get_version, "ncclGetVersion");
  find(&nccl.get_unique_id, "ncclGetUniqueId");
  find(&nccl.init, "ncclCommInitRankConfig");
  find(&nccl.async_error, "ncclCommGetAsyncError");
  find(&nccl.abort, "ncclCommAbort");
  find(&nccl.error_string, "ncclGetErrorString");
  find(&nccl.last_error, "ncclGetLastError");
  find(&nccl.all_gather, "ncclAllGather");
  find(&nccl.send, "ncclSend");
  find(&nccl.receive, "ncclRecv");
  find(&nccl.group_start, "ncclGroupStart");
  find(&nccl.group_end, "ncclGroupEnd");
  return nccl;
}

const Nccl& nccl() {
  static const Nccl library = load();
  return library;
}

class NcclExchange : public DeviceExchange {
 public:
  explicit NcclExchange(Communicator& communicator)
      : rank_(communicator.rank()), world_(communicator.world()), deadline_(Deadline::after(seconds(60))) {
    for (int r = 0; r < world_; ++r) labels_.push_back(communicator.label(r));
  }

  ~NcclExchange() override {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    if (watch_.joinable()) watch_.join();
    // Abort, not destroy: destroying waits for the other ranks.
    if (comm_ != nullptr && !aborted_) nccl().abort(comm_);
  }

  absl::Status open(Communicator& communicator, Deadline deadline) {
    ncclUniqueId id;
    std::vector<std::byte> message;
    absl::Status made;
    if (rank_ == 0) {
      const ncclResult_t result = nccl().get_unique_id(&id);
      if (result != ncclSuccess) made = error_of(result, "making an id");
      if (made.ok()) {
        message.resize(sizeof(id));
        std::memcpy(message.data(), &id, sizeof(id));
      }
    }
    if (absl::Status status = communicator.broadcast(0, message, sizeof(id), deadline); !status.ok()) return status;
    if (!made.ok()) return made;
    if (message.size() != sizeof(id)) return absl::UnavailableError("nccl: rank 0 could not make an id");
    std::memcpy(&id, message.data(), sizeof(id));

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t result = nccl().init(&comm_, world_, id, rank_, &config);
    if (absl::Status status = settle(result, "connecting", deadline); !status.ok()) return status;
    watch_ = std::thread([this] { watch(); });
    return warm_up(deadline);
  }

  const std::string& name() const override {
    static const std::string name = "nccl";
    return name;
  }

  absl::Status reserve(size_t, Deadline) override { return absl::OkStatus(); }

  absl::Status all_gather(cudaStream_t stream, const void* mine, std::span<const size_t> sizes, void* out) override {
    if (absl::Status status = check_sizes(sizes, world_, "all_gather"); !status.ok()) return status;
    const size_t each = sizes[0];
    if (std::all_of(sizes.begin(), sizes.end(), [&](size_t size) { return size == each; })) {
      if (each == 0) return first_error();
      if (absl::Status status = first_error(); !status.ok()) return status;
      return settle(nccl().all_gather(mine, out, each, ncclInt8, comm_, stream), "all_gather");
    }
    const std::vector<size_t> send(static_cast<size_t>(world_), sizes[static_cast<size_t>(rank_)]);
    return pairwise(stream, static_cast<const std::byte*>(mine), send, static_cast<std::byte*>(out), sizes, false,
                    "all_gather");
  }

  absl::Status all_to_all(cudaStream_t stream, const void* send, std::span<const size_t> send_sizes, void* receive,
                          std::span<const size_t> receive_sizes) override {
    if (absl::Status status = check_sizes(send_sizes, world_, "all_to_all"); !status.ok()) return status;
    if (absl::Status status = check_sizes(receive_sizes, world_, "all_to_all"); !status.ok()) return status;
    return pairwise(stream, static_cast<const std::byte*>(send), send_sizes, static_cast<std::byte*>(receive),
                    receive_sizes, true, "all_to_all");
  }

  absl::Status status() override {
    std::lock_guard lock(mutex_);
    armed_ = false;
    look_for_error();
    return status_;
  }

  void set_deadline(Deadline deadline) override {
    {
      std::lock_guard lock(mutex_);
      deadline_ = deadline;
      armed_ = true;
    }
    changed_.notify_all();
  }

  void abort(absl::Status why) override {
    {
      std::lock_guard lock(mutex_);
      if (status_.ok()) status_ = std::move(why);
    }
    changed_.notify_all();
  }

  std::string describe() override {
    int version = 0;
    nccl().get_version(&version);
    std::string text = fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
    for (int r = 0; r < world_; ++r) {
      if (r != rank_) text += fmt::format("\nrank {} ({}): NCCL", r, labels_[static_cast<size_t>(r)]);
    }
    return text;
  }

 private:
  absl::Status first_error() {
    std::lock_guard lock(mutex_);
    return status_;
  }

  std::string others() const {
    std::string text;
    for (int r = 0; r < world_; ++r) {
      if (r == rank_) continue;
      text += fmt::format("{}rank {} ({})", text.empty() ? "" : ", ", r, labels_[static_cast<size_t>(r)]);
    }
    return text;
  }

  absl::Status error_of(ncclResult_t result, const char* what) {
    const char* const detail = comm_ == nullptr ? nullptr : nccl().last_error(comm_);
    std::string message = fmt::format("nccl: {}: {}", what, nccl().error_string(result));
    if (detail != nullptr && detail[0] != 0) message += fmt::format(" ({})", detail);
    if (result == ncclRemoteError) return absl::UnavailableError(message + "; peers: " + others());
    return absl::InternalError(message);
  }

  absl::Status late(const char* what) const {
    return absl::DeadlineExceededError(fmt::format("nccl: {} was not done in time, waiting for {}", what, others()));
  }

  // The communicator does not block: a call may have only begun, and then the next may not be made before it is done.
  absl::Status settle(ncclResult_t result, const char* what, Deadline deadline = Deadline::after(kEnqueueTime)) {
    for (int polls = 0; result == ncclInProgress; ++polls) {
      {
        std::lock_guard lock(mutex_);
        if (!status_.ok()) return status_;
        const ncclResult_t asked = nccl().async_error(comm_, &result);
        if (asked != ncclSuccess) result = asked;
        if (result == ncclInProgress && deadline.passed()) status_ = late(what);
      }
      if (polls > 100 && result == ncclInProgress) std::this_thread::sleep_for(microseconds(20));
    }
    std::lock_guard lock(mutex_);
    if (result != ncclSuccess && status_.ok()) status_ = error_of(result, what);
    return status_;
  }

  // Every rank's piece to every other as one group. `split`: each receiver has a piece of its own in `send`.
  absl::Status pairwise(cudaStream_t stream, const std::byte* send, std::span<const size_t> send_sizes,
                        std::byte* receive, std::span<const size_t> receive_sizes, bool split, const char* what) {
    if (absl::Status status = first_error(); !status.ok()) return status;
    ncclResult_t worst = nccl().group_start();
    auto note = [&](ncclResult_t result) {
      if (result != ncclSuccess && result != ncclInProgress && worst == ncclSuccess) worst = result;
    };
    const std::byte* from = send;
    std::byte* to = receive;
    const std::byte* own_from = nullptr;
    std::byte* own_to = nullptr;
    for (int peer = 0; peer < world_; ++peer) {
      const size_t p = static_cast<size_t>(peer);
      if (peer == rank_) {
        own_from = from;
        own_to = to;
      } else {
        if (send_sizes[p] != 0) note(nccl().send(from, send_sizes[p], ncclInt8, peer, comm_, stream));
        if (receive_sizes[p] != 0) note(nccl().receive(to, receive_sizes[p], ncclInt8, peer, comm_, stream));
      }
      if (split) from += send_sizes[p];
      to += receive_sizes[p];
    }
    const ncclResult_t ended = nccl().group_end();
    if (absl::Status status = settle(worst != ncclSuccess ? worst : ended, what); !status.ok()) return status;
    const size_t own_bytes = receive_sizes[static_cast<size_t>(rank_)];
    if (own_from == own_to || own_bytes == 0) return absl::OkStatus();
    return cuda_status(cudaMemcpyAsync(own_to, own_from, own_bytes, cudaMemcpyDeviceToDevice, stream),
                       fmt::format("nccl: {}: copying the own piece", what));
  }

  // NCCL connects pairs and loads kernels at their first use, which may not happen inside a capture.
  absl::Status warm_up(Deadline deadline) {
    absl::StatusOr<OwnStream> stream = OwnStream::create();
    if (!stream.ok()) return stream.status();
    const size_t world = static_cast<size_t>(world_);
    const size_t most = size_t{1} << 20;
    void* memory = nullptr;
    if (absl::Status status = cuda_status(cudaMalloc(&memory, 2 * most * world), "nccl: warming up"); !status.ok()) {
      return status;
    }
    const DevicePointer<std::byte> holder(static_cast<std::byte*>(memory));
    std::byte* const out = holder.get() + most * world;
    set_deadline(deadline);
    for (size_t bytes : {size_t{4096}, most}) {
      const std::vector<size_t> sizes(world, bytes);
      absl::Status status = all_gather(stream->get(), holder.get(), sizes, out);
      if (status.ok()) status = all_to_all(stream->get(), holder.get(), sizes, out, sizes);
      if (status.ok()) status = wait_for_stream(stream->get(), deadline, "nccl: warming up");
      if (!status.ok()) {
        abort(status);
        return status;
      }
    }
    return this->status();
  }

  // Called with the lock held.
  void look_for_error() {
    if (!status_.ok() || aborted_) return;
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = nccl().async_error(comm_, &result);
    if (asked != ncclSuccess) result = asked;
    if (result != ncclSuccess && result != ncclInProgress) status_ = error_of(result, "exchange");
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!ending_) {
      if (!status_.ok()) {
        aborted_ = true;
        lock.unlock();
        nccl().abort(comm_);  // ends the kernels, then may wait for graphs that hold some
        return;
      }
      if (!armed_) {
        changed_.wait(lock, [this] { return armed_ || ending_ || !status_.ok(); });
        continue;
      }
      const auto next = std::min(deadline_.time(), Deadline::Clock::now() + milliseconds(50));
      changed_.wait_until(lock, next);
      if (!armed_ || ending_) continue;
      look_for_error();
      if (status_.ok() && deadline_.passed()) status_ = late("an exchange");
    }
  }

  const int rank_;
  const int world_;
  std::vector<std::string> labels_;
  ncclComm_t comm_ = nullptr;

  std::mutex mutex_;
  std::condition_variable changed_;
  absl::Status status_;   // guarded by mutex_
  Deadline deadline_;     // guarded by mutex_
  bool armed_ = false;    // guarded by mutex_
  bool ending_ = false;   // guarded by mutex_
  bool aborted_ = false;  // guarded by mutex_
  std::thread watch_;
};

}  // namespace

absl::StatusOr<std::string> nccl_version() {
  if (!nccl().loaded.ok()) return nccl().loaded;
  int version = 0;
  if (nccl().get_version(&version) != ncclSuccess) return absl::NotFoundError("libnccl.so.2 does not tell its version");
  if (version < 21800) {
    return absl::NotFoundError(fmt::format("libnccl.so.2 is of version {}, older than 2.18", version));
  }
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

absl::StatusOr<std::unique_ptr<DeviceExchange>> create_nccl_exchange(Communicator& communicator, Deadline deadline) {
  int device = 0;
  absl::Status mine = cuda_status(cudaGetDevice(&device), "nccl");
  const absl::StatusOr<DeviceIdentity> identity = device_identity(device);
  if (mine.ok()) mine = identity.status();
  const absl::StatusOr<std::string> version = nccl_version();
  if (mine.ok()) mine = version.status();
  if (absl::Status status = agree(communicator, mine, deadline); !status.ok()) return status;
  struct Record {
    DeviceIdentity identity;
    char version[32] = {};
  };
  Record record;
  record.identity = *identity;
  version->copy(record.version, sizeof(record.version) - 1);
  const size_t world = static_cast<size_t>(communicator.world());
  std::vector<Record> all(world);
  const std::vector<size_t> sizes(world, sizeof(Record));
  if (absl::Status status = communicator.all_gather(std::as_bytes(std::span(&record, 1)), sizes,
                                                    std::as_writable_bytes(std::span(all)), deadline);
      !status.ok()) {
    return status;
  }
  for (size_t a = 0; a < world; ++a) {
    all[a].version[sizeof(all[a].version) - 1] = 0;  // came as bytes
    all[a].identity.pci.back() = 0;
    if (std::strcmp(all[a].version, all[0].version) != 0) {
      return absl::FailedPreconditionError(fmt::format("nccl: rank {} ({}) has version {}, rank 0 ({}) has {}", a,
                                                       communicator.label(static_cast<int>(a)), all[a].version,
                                                       communicator.label(0), all[0].version));
    }
    for (size_t b = 0; b < a; ++b) {
      if (!same_gpu(all[a].identity, all[b].identity)) continue;
      return absl::FailedPreconditionError(
          fmt::format("nccl: ranks {} and {} ({}) are on one GPU ({}); NCCL needs a GPU for each", b, a,
                      communicator.label(static_cast<int>(a)), all[a].identity.pci.data()));
    }
  }
  auto exchange = std::make_unique<NcclExchange>(communicator);
  if (absl::Status status = exchange->open(communicator, deadline); !status.ok()) return status;
  return exchange;
}

}  // namespace tensorfold

#else  // built without NCCL's header

namespace tensorfold {

absl::StatusOr<std::string> nccl_version() {
  return absl::UnimplementedError("this build has no NCCL: its header nccl.h was not found when it was made");
}

absl::StatusOr<std::unique_ptr<DeviceExchange>> create_nccl_exchange(Communicator& communicator, Deadline deadline) {
  return agree(communicator, nccl_version().status(), deadline);  // the other ranks may have been built otherwise
}

}  // namespace tensorfold

#endif
