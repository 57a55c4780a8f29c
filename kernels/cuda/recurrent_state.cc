#include "kernels/cuda/recurrent_state.h"

#include <cstring>
#include <utility>

#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

class State : public CudaRecurrentState {
 public:
  State(float* memory, int64_t bytes, std::vector<int64_t> counters, cudaStream_t stream)
      : memory_(memory), bytes_(bytes), counters_(std::move(counters)), stream_(stream) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() override { device_free(memory_); }

  int64_t bytes() const override { return bytes_; }
  void reset() override {
    cuda_ok(cudaMemsetAsync(memory_, 0, static_cast<size_t>(bytes_), stream_), "reset of a recurrent state");
  }
  void copy_from(const RecurrentState& other) override {
    const auto& from = static_cast<const State&>(other);
    kernel_check(from.bytes_ == bytes_, "recurrent state: copy of one of another shape");
    cuda_ok(cudaMemcpyAsync(memory_, from.memory_, static_cast<size_t>(bytes_), cudaMemcpyDeviceToDevice, stream_),
            "copy of a recurrent state");
  }
  void save(std::span<std::byte> into) const override {
    kernel_check(static_cast<int64_t>(into.size()) == bytes_, "recurrent state: save into another size");
    cuda_ok(cudaMemcpyAsync(into.data(), memory_, into.size(), cudaMemcpyDeviceToHost, stream_),
            "save of a recurrent state");
    cuda_ok(cudaStreamSynchronize(stream_), "save of a recurrent state");
  }
  // How many rows are kept is no part of the bytes: the plan says it.
  bool load(std::span<const std::byte> from, int64_t /*tentative*/) override {
    if (static_cast<int64_t>(from.size()) != bytes_) return false;
    for (const int64_t at : counters_) {
      int32_t count = 0;
      std::memcpy(&count, from.data() + at, sizeof(count));
      if (count != 0) return false;  // blocks would wait for too few of each other
    }
    return cuda_ok(cudaMemcpyAsync(memory_, from.data(), from.size(), cudaMemcpyHostToDevice, stream_),
                   "load of a recurrent state") &&
           cuda_ok(cudaStreamSynchronize(stream_), "load of a recurrent state");
  }
  float* data() const override { return memory_; }

 private:
  float* memory_;
  int64_t bytes_;
  std::vector<int64_t> counters_;
  cudaStream_t stream_;
};

}  // namespace

std::unique_ptr<CudaRecurrentState> make_device_state(int64_t bytes, std::vector<int64_t> counters, cudaStream_t stream,
                                                      const std::string& shape_error, std::string* error) {
  if (!shape_error.empty()) {
    if (error != nullptr) {
      *error = shape_error;
    } else {
      cuda_ok(cudaErrorInvalidValue, shape_error.c_str());
    }
    return nullptr;
  }
  void* memory = device_allocate(bytes, "memory of a recurrent state");
  if (memory == nullptr) return nullptr;
  auto state = std::make_unique<State>(static_cast<float*>(memory), bytes, std::move(counters), stream);
  state->reset();
  return state;
}

}  // namespace tensorfold
