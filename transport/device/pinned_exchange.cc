#include "transport/device/pinned_exchange.h"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace tensorfold {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kHotTime = milliseconds(2);   // of polling after the last request of a pass before naps begin
constexpr auto kNap = microseconds(50);      // between polls of a pass that takes its time
constexpr auto kIdleNap = milliseconds(10);  // between looks when no pass is announced
constexpr size_t kBatch = 64;                // polls between looks at the clock

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// cuStreamWaitValue32 of the driver, or null: looked up at run time, so that programs start without a driver.
WaitValue wait_value_function() {
  static const WaitValue function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      found = nullptr;
    }
    return reinterpret_cast<WaitValue>(found);
  }();
  return function;
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

size_t total(std::span<const size_t> sizes) { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }

CUdeviceptr release_address(PinnedControl* device_control) {
  return reinterpret_cast<CUdeviceptr>(device_control) + offsetof(PinnedControl, release);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedExchange>> PinnedExchange::create(Communicator& communicator) {
  std::unique_ptr<PinnedExchange> exchange(new PinnedExchange(communicator));
  if (absl::Status status = exchange->open(); !status.ok()) return status;
  return exchange;
}

absl::Status PinnedExchange::open() {
  absl::StatusOr<PinnedPointer<std::byte>> memory = allocate_pinned(sizeof(PinnedControl), "pinned exchange");
  if (!memory.ok()) return memory.status();
  control_memory_ = *std::move(memory);
  control_ = reinterpret_cast<PinnedControl*>(control_memory_.get());
  void* device_address = nullptr;
  absl::Status status =
      cuda_status(cudaHostGetDevicePointer(&device_address, control_, 0), "pinned exchange: mapping its words");
  if (!status.ok()) return status;
  device_control_ = static_cast<PinnedControl*>(device_address);
  void* ticket = nullptr;
  status = cuda_status(cudaMalloc(&ticket, sizeof(uint32_t)), "pinned exchange: device memory");
  if (!status.ok()) return status;
  ticket_.reset(static_cast<uint32_t*>(ticket));
  status = cuda_status(cudaMemset(ticket, 0, sizeof(uint32_t)), "pinned exchange: device memory");
  // cudaMemset may return before it has happened, and the streams used later do not wait for the default stream.
  if (status.ok()) status = cuda_status(cudaStreamSynchronize(nullptr), "pinned exchange: device memory");
  if (!status.ok()) return status;
  if (!cuda_exchange_load()) return launch_status();
  probe_stream_waits();
  thread_ = std::thread([this] { serve(); });
  return absl::OkStatus();
}

// Captures one wait whose condition already holds and runs it. Any failure only means that a kernel waits instead.
void PinnedExchange::probe_stream_waits() {
  if (wait_value_function() == nullptr) return;
  const absl::StatusOr<OwnStream> stream = OwnStream::create();
  if (!stream.ok()) return;
  std::atomic_ref<uint32_t>(control_->release).store(1);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  bool works = cudaStreamBeginCapture(stream->get(), cudaStreamCaptureModeThreadLocal) == cudaSuccess;
  if (works) {
    works = wait_value_function()(stream->get(), release_address(device_control_), 1, CU_STREAM_WAIT_VALUE_EQ) ==
            CUDA_SUCCESS;
    works = cudaStreamEndCapture(stream->get(), &graph) == cudaSuccess && works;
    works = works && cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess;
    works = works && cudaGraphLaunch(executable, stream->get()) == cudaSuccess;
    works = works && wait_for_stream(stream->get(), Deadline::after(std::chrono::seconds(5)), "stream wait").ok();
  }
  if (executable != nullptr) cudaGraphExecDestroy(executable);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
  std::atomic_ref<uint32_t>(control_->release).store(0);
  stream_waits_ = works;
}

PinnedExchange::~PinnedExchange() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

const std::string& PinnedExchange::name() const {
  static const std::string name = "pinned";
  return name;
}

absl::Status PinnedExchange::reserve(size_t max_bytes, Deadline) {
  const size_t wanted = std::max<size_t>(max_bytes, 16) * static_cast<size_t>(communicator_.world());
  if (wanted <= room_) return absl::OkStatus();
  absl::StatusOr<PinnedPointer<std::byte>> send = allocate_pinned(wanted, "pinned exchange");
  if (!send.ok()) return send.status();
  absl::StatusOr<PinnedPointer<std::byte>> receive = allocate_pinned(wanted, "pinned exchange");
  if (!receive.ok()) return receive.status();
  send_ = *std::move(send);
  receive_ = *std::move(receive);
  room_ = wanted;
  return absl::OkStatus();
}

absl::Status PinnedExchange::all_gather(cudaStream_t stream, const void* mine, std::span<const size_t> sizes,
                                        void* out) {
  if (absl::Status status = check_sizes(sizes, communicator_.world(), "all_gather"); !status.ok()) return status;
  Operation operation;
  operation.gathers = true;
  operation.send = {sizes[static_cast<size_t>(communicator_.rank())]};
  operation.receive.assign(sizes.begin(), sizes.end());
  return enqueue(stream, mine, out, std::move(operation));
}

absl::Status PinnedExchange::all_to_all(cudaStream_t stream, const void* send, std::span<const size_t> send_sizes,
                                        void* receive, std::span<const size_t> receive_sizes) {
  if (absl::Status status = check_sizes(send_sizes, communicator_.world(), "all_to_all"); !status.ok()) return status;
  if (absl::Status status = check_sizes(receive_sizes, communicator_.world(), "all_to_all"); !status.ok()) {
    return status;
  }
  Operation operation;
  operation.send.assign(send_sizes.begin(), send_sizes.end());
  operation.receive.assign(receive_sizes.begin(), receive_sizes.end());
  return enqueue(stream, send, receive, std::move(operation));
}

absl::Status PinnedExchange::enqueue(cudaStream_t stream, const void* send, void* receive, Operation operation) {
  operation.send_bytes = total(operation.send);
  operation.receive_bytes = total(operation.receive);
  if (operation.send_bytes > room_ || operation.receive_bytes > room_) {
    return absl::ResourceExhaustedError(
        fmt::format("pinned exchange: {} bytes to send and {} to receive, but room for {} is reserved",
                    operation.send_bytes, operation.receive_bytes, room_));
  }
  std::vector<size_t> key = {operation.gathers ? size_t{1} : size_t{0}};
  key.insert(key.end(), operation.send.begin(), operation.send.end());
  key.insert(key.end(), operation.receive.begin(), operation.receive.end());
  const size_t send_bytes = operation.send_bytes;
  const size_t receive_bytes = operation.receive_bytes;
  uint32_t number = 0;
  {
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return status_;
    uint32_t& place = operation_of_[std::move(key)];
    if (place == 0) {
      operations_.push_back(std::move(operation));
      place = static_cast<uint32_t>(operations_.size());
    }
    number = place;
    armed_ = true;
  }
  changed_.notify_all();
  cuda_pinned_out(stream, device_control_, ticket_.get(), number, send, send_.get(), send_bytes);
  if (absl::Status status = launch_status(); !status.ok()) return status;
  if (absl::Status status = enqueue_wait(stream); !status.ok()) return status;
  cuda_pinned_in(stream, device_control_, receive_.get(), receive, receive_bytes);
  return launch_status();
}

absl::Status PinnedExchange::enqueue_wait(cudaStream_t stream) {
  if (!stream_waits_) {
    const auto limit = std::chrono::nanoseconds(Deadline::kLongest) + std::chrono::minutes(1);
    cuda_pinned_wait(stream, device_control_, static_cast<uint64_t>(limit.count()));
    return launch_status();
  }
  const CUresult result = wait_value_function()(stream, release_address(device_control_), 1, CU_STREAM_WAIT_VALUE_EQ);
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(
      fmt::format("pinned exchange: cuStreamWaitValue32 failed with driver error {}", static_cast<int>(result)));
}

uint32_t PinnedExchange::next_request() {
  std::atomic_ref<uint32_t> request(control_->request);
  auto hot_until = steady_clock::now() + kHotTime;
  while (true) {
    for (size_t i = 0; i < kBatch; ++i) {
      if (const uint32_t operation = request.load(std::memory_order_acquire); operation != 0) return operation;
      pause_briefly();
    }
    if (ending_) return 0;
    if (!armed_) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kIdleNap, [this] { return armed_.load() || ending_.load(); });
      hot_until = steady_clock::now() + kHotTime;
    } else if (steady_clock::now() > hot_until) {
      std::this_thread::sleep_for(kNap);
    } else {
      std::this_thread::yield();  // threads of other ranks may be more than there are cores
    }
  }
}

void PinnedExchange::serve() {
  while (const uint32_t number = next_request()) {
    const Operation* operation = nullptr;
    Deadline deadline = Deadline::after(std::chrono::seconds(0));
    bool fine = false;
    {
      std::lock_guard lock(mutex_);
      if (number <= operations_.size()) operation = &operations_[number - 1];
      deadline = deadline_;
      fine = status_.ok();
    }
    if (fine) {
      absl::Status status = operation != nullptr ? run(*operation, deadline)
                                                 : absl::InternalError("pinned exchange: an operation nobody made");
      std::lock_guard lock(mutex_);
      if (status_.ok()) status_ = std::move(status);
    }
    // The request must be gone before the stream may go on and make the next.
    std::atomic_ref<uint32_t>(control_->request).store(0, std::memory_order_relaxed);
    std::atomic_ref<uint32_t>(control_->release).store(1, std::memory_order_release);
  }
}

absl::Status PinnedExchange::run(const Operation& operation, Deadline deadline) {
  const std::span<const std::byte> send(send_.get(), operation.send_bytes);
  const std::span<std::byte> receive(receive_.get(), operation.receive_bytes);
  if (operation.gathers) return communicator_.all_gather(send, operation.receive, receive, deadline);
  return communicator_.all_to_all(send, operation.send, receive, operation.receive, deadline);
}

absl::Status PinnedExchange::status() {
  std::lock_guard lock(mutex_);
  armed_ = false;
  return status_;
}

void PinnedExchange::set_deadline(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    deadline_ = deadline;
    armed_ = true;
  }
  changed_.notify_all();
}

void PinnedExchange::abort(absl::Status why) {
  {
    std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = why;
  }
  communicator_.abort(std::move(why));
}

std::string PinnedExchange::describe() {
  return fmt::format("pinned host memory, {}, then {}:\n{}",
                     stream_waits_ ? "the stream waits" : "a kernel waits (the driver cannot wait in a graph)",
                     communicator_.name(), communicator_.describe());
}

}  // namespace tensorfold
