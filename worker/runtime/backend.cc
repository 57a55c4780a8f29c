#include "worker/runtime/backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "kernels/cpu/cpu_ops.h"
#if TENSORFOLD_WITH_CUDA
#include "kernels/cuda/cuda_ops.h"
#endif

namespace tensorfold {

std::vector<std::string> built_backends() {
#if TENSORFOLD_WITH_CUDA
  return {"cpu", "cuda"};
#else
  return {"cpu"};
#endif
}

absl::StatusOr<std::unique_ptr<Ops>> make_backend(const BackendOptions& options, [[maybe_unused]] int rank) {
  const std::vector<std::string> built = built_backends();
  if (std::find(built.begin(), built.end(), options.backend) == built.end()) {
    return absl::InvalidArgumentError(
        fmt::format("backend \"{}\" is not in this build; it has: {}", options.backend, fmt::join(built, ", ")));
  }
  std::string error;
  std::unique_ptr<Ops> ops;
#if TENSORFOLD_WITH_CUDA
  if (options.backend == "cuda") {
    if (options.launch != "graph" && options.launch != "eager") {
      return absl::InvalidArgumentError(fmt::format("launch \"{}\": there are graph and eager", options.launch));
    }
    const int device = options.device >= 0 ? options.device : rank % std::max(1, cuda_device_count());
    ops = make_cuda_ops({.device = device,
                         .graphs = options.launch == "graph",
                         .kv_format = options.kv_format,
                         .exchange = options.exchange},
                        &error);
    if (ops == nullptr) return absl::InvalidArgumentError("backend \"cuda\": " + error);
    return ops;
  }
#endif
  ops = make_cpu_ops({.threads = options.threads, .isa = options.isa, .pool = nullptr}, &error);
  if (ops == nullptr) return absl::InvalidArgumentError(error);
  return ops;
}

}  // namespace tensorfold
