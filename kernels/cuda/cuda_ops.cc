#include "kernels/cuda/cuda_ops.h"

#include <cstdlib>

#include "kernels/cuda/cuda_ops_impl.h"

namespace tensorfold {

std::vector<std::vector<Candidate>> CudaOps::top_candidates(Tensor logits, int32_t first_id, int64_t n) {
  flush();
  std::vector<std::vector<Candidate>> rows(static_cast<size_t>(logits.rows));
  n = std::min(n, logits.cols);
  if (n <= 0 || logits.rows == 0) return rows;
  if (n > kMaxCudaCandidates) {  // whole rows are wanted anyway
    std::vector<float> host(static_cast<size_t>(logits.cols));
    for (int64_t r = 0; r < logits.rows; ++r) {
      download(logits.row_range(r, 1), host);
      std::vector<Candidate>& row = rows[static_cast<size_t>(r)];
      for (size_t i = 0; i < host.size(); ++i) row.push_back({host[i], first_id + static_cast<int32_t>(i)});
      std::partial_sort(row.begin(), row.begin() + n, row.end(), candidate_before);
      row.resize(static_cast<size_t>(n));
    }
    return rows;
  }
  const ScratchScope scope(*this);
  const size_t bytes = static_cast<size_t>(logits.rows * n) * sizeof(Candidate);
  void* workspace = take(cuda_candidates_workspace(logits.rows, logits.cols, n));
  auto* best = static_cast<Candidate*>(take(static_cast<int64_t>(bytes)));
  auto* host = static_cast<Candidate*>(staging_.take(static_cast<int64_t>(bytes)));
  if (host == nullptr) return rows;
  cuda_candidates(stream_, matrix_of(logits), first_id, n, workspace, best);
  cuda_ok(cudaMemcpyAsync(host, best, bytes, cudaMemcpyDeviceToHost, stream_), "candidates");
  if (!cuda_ok(cudaStreamSynchronize(stream_), "candidates")) return rows;
  for (int64_t r = 0; r < logits.rows; ++r) {
    for (int64_t i = 0; i < n; ++i) rows[static_cast<size_t>(r)].push_back(host[r * n + i]);
  }
  return rows;
}

std::vector<Candidate> CudaOps::best_draws(Tensor logits, int32_t first_id, std::span<const DrawKey> keys) {
  flush();
  std::vector<Candidate> rows(static_cast<size_t>(logits.rows), Candidate{0.0f, -1});
  kernel_check(static_cast<int64_t>(keys.size()) == logits.rows, "best_draws: a key a row");
  if (logits.rows == 0 || logits.cols == 0) return rows;
  const ScratchScope scope(*this);
  const size_t bytes = rows.size() * sizeof(Candidate);
  void* workspace = take(cuda_draws_workspace(logits.rows, logits.cols));
  auto* device_keys = static_cast<DrawKey*>(take(static_cast<int64_t>(keys.size_bytes())));
  auto* best = static_cast<Candidate*>(take(static_cast<int64_t>(bytes)));
  void* staged = staging_.take(static_cast<int64_t>(keys.size_bytes()));
  auto* host = static_cast<Candidate*>(staging_.take(static_cast<int64_t>(bytes)));
  if (staged == nullptr || host == nullptr) return rows;
  std::memcpy(staged, keys.data(), keys.size_bytes());
  cuda_ok(cudaMemcpyAsync(device_keys, staged, keys.size_bytes(), cudaMemcpyHostToDevice, stream_), "keys of draws");
  cuda_draws(stream_, matrix_of(logits), first_id, device_keys, workspace, best);
  cuda_ok(cudaMemcpyAsync(host, best, bytes, cudaMemcpyDeviceToHost, stream_), "draws");
  if (!cuda_ok(cudaStreamSynchronize(stream_), "draws")) return rows;
  std::copy_n(host, rows.size(), rows.begin());
  return rows;
}

int cuda_backends_on(int device) {
  return device < 0 || device >= kMostCudaDevices ? 0 : cuda_backends[static_cast<size_t>(device)].load();
}

int cuda_device_count() {
  // Several ranks of one process on one GPU wait for each other: each needs a hardware queue of its own. Read by the
  // driver at its first call.
  // And a kernel that is loaded at its first launch may wait for what waits for that launch.
  static const int set = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) + setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  static_cast<void>(set);
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options, std::string* error) {
  const int count = cuda_device_count();
  if (options.device < 0 || options.device >= std::min(count, kMostCudaDevices)) {
    *error = count == 0 ? "no CUDA device: this machine has no GPU, or its driver is missing or older than CUDA 13"
                        : "GPU " + std::to_string(options.device) + " does not exist: this machine has " +
                              std::to_string(count) + ", counted from 0";
    return nullptr;
  }
  if (options.kv_format != "bf16" && options.kv_format != "fp8") {
    *error = "keys and values can be kept as bf16 or fp8, not '" + options.kv_format + "'";
    return nullptr;
  }
  cudaDeviceProp properties;
  if (const cudaError_t failed = cudaGetDeviceProperties(&properties, options.device); failed != cudaSuccess) {
    *error = "GPU " + std::to_string(options.device) + ": " + cudaGetErrorString(failed);
    return nullptr;
  }
  if (properties.major < 8) {
    *error = std::string(properties.name) + " has no bf16 matrix instructions (compute capability " +
             std::to_string(properties.major) + "." + std::to_string(properties.minor) + "; 8.0 or newer is needed)";
    return nullptr;
  }
  return std::make_unique<CudaOps>(options, properties);
}

CudaStreamOps* cuda_stream_ops(Ops& ops) { return dynamic_cast<CudaStreamOps*>(&ops.undecorated()); }

}  // namespace tensorfold
