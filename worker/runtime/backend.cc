#include "worker/runtime/backend.h"

#include <fmt/format.h>

#include "kernels/cpu/cpu_ops.h"

namespace tensorfold {

absl::StatusOr<std::unique_ptr<Ops>> make_backend(const BackendOptions& options) {
  if (options.backend != "cpu") {
    return absl::InvalidArgumentError(fmt::format("backend \"{}\" is not in this build; it has: cpu", options.backend));
  }
  std::string error;
  std::unique_ptr<Ops> ops = make_cpu_ops({.threads = options.threads, .isa = options.isa, .pool = nullptr}, &error);
  if (ops == nullptr) return absl::InvalidArgumentError(error);
  return ops;
}

}  // namespace tensorfold
