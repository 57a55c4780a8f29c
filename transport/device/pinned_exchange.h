// DeviceExchange through pinned host memory: device to host, any Communicator, host to device. For every world, several
// ranks on one GPU (threads or processes) and machines whose network cannot reach device memory.
//
// How stream and Communicator meet. A host function in the stream would not do: those of several streams share threads
// of the driver, and one rank's would wait there for another's. So each exchange has a thread, and two words of pinned
// memory between it and the GPU, both 0 at rest:
//
//   stream:  copy to the send area; request = operation     | wait until release = 1 | release = 0; copy from the
//   receive thread:  wait until request != 0; request = 0; exchange; release = 1             | area
//
// - One operation at a time: a stream reaches the next `request` only after its own wait and after release = 0, both by
//   stream order. So the thread never sees a request while it has one, and the wait never sees the 1 of the one before:
//   the words are at rest between any two operations, whether they come from one graph, from its next launch or from
//   another graph. Nothing in the nodes counts, so a graph may be launched any number of times.
// - The operations' sizes are kept in a list here; `request` holds the place in it plus one, a constant of the node.
// - The thread always answers: the Communicator's operation ends by the deadline, and after an error the thread answers
// at
//   once. So the stream never hangs while the exchange lives. (Hence the rule that streams are waited for before
//   destruction.)
// - The wait is a wait of the stream (cuStreamWaitValue32): it takes no place on the GPU, which other ranks may share.
//   Where the driver does not do that in a captured graph (tried once, at creation), a kernel of one thread spins, at
//   most a little longer than the longest deadline.
// - The copies are kernels, not copy-engine operations: those of several ranks would queue up behind one another in one
//   engine, the first of them waiting for a rank whose copy stands behind it. For the same reason several ranks in one
//   process need as many hardware queues as streams: set CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment before the
//   first CUDA call, or streams that share a queue wait for each other until the deadline.
// - Before the thread uses the Communicator it takes the lock that set_deadline() has released, and status() takes the
// lock
//   that the thread has released afterwards: so the pass runner's own use of the Communicator before and after is
//   ordered with the thread's. The thread polls hotly only between set_deadline() (or an operation enqueued) and
//   status(); then it sleeps, looking up a hundred times a second.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/device/cuda_support.h"
#include "transport/device/device_exchange.h"

namespace tensorfold {

class PinnedExchange : public DeviceExchange {
 public:
  /// On the current device. Not collective.
  static absl::StatusOr<std::unique_ptr<PinnedExchange>> create(Communicator& communicator);
  ~PinnedExchange() override;

  const std::string& name() const override;
  absl::Status reserve(size_t max_bytes, Deadline deadline) override;
  absl::Status all_gather(cudaStream_t stream, const void* mine, std::span<const size_t> sizes, void* out) override;
  absl::Status all_to_all(cudaStream_t stream, const void* send, std::span<const size_t> send_sizes, void* receive,
                          std::span<const size_t> receive_sizes) override;
  absl::Status status() override;
  void set_deadline(Deadline deadline) override;
  void abort(absl::Status why) override;
  std::string describe() override;

 private:
  struct Operation {
    std::vector<size_t> send;     // one size for all_gather, else one a rank
    std::vector<size_t> receive;  // one a rank
    bool gathers = false;
    size_t send_bytes = 0;
    size_t receive_bytes = 0;
  };

  explicit PinnedExchange(Communicator& communicator) : communicator_(communicator) {}
  absl::Status open();
  void probe_stream_waits();
  absl::Status enqueue(cudaStream_t stream, const void* send, void* receive, Operation operation);
  absl::Status enqueue_wait(cudaStream_t stream);
  // 0 when the exchange ends.
  uint32_t next_request();
  void serve();
  absl::Status run(const Operation& operation, Deadline deadline);

  Communicator& communicator_;
  PinnedPointer<std::byte> control_memory_;
  PinnedControl* control_ = nullptr;         // host address
  PinnedControl* device_control_ = nullptr;  // device address of the same
  DevicePointer<uint32_t> ticket_;
  PinnedPointer<std::byte> send_;
  PinnedPointer<std::byte> receive_;
  size_t room_ = 0;  // bytes of each of the two
  bool stream_waits_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> operations_;                               // guarded by mutex_; entries never move or change
  std::map<std::vector<size_t>, uint32_t> operation_of_;           // guarded by mutex_: sizes to place + 1
  absl::Status status_;                                            // guarded by mutex_
  Deadline deadline_ = Deadline::after(std::chrono::seconds(60));  // guarded by mutex_
  std::atomic<bool> armed_{false};
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace tensorfold
