// Makes the backend that a profile or command asks for.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

struct BackendOptions {
  std::string backend = "cpu";
  std::string isa = "auto";  // cpu: auto | avx512 | avx2 | neon | portable
  int threads = 0;           // cpu: 0 = one a core
};

/// InvalidArgument names what this build and machine have instead.
absl::StatusOr<std::unique_ptr<Ops>> make_backend(const BackendOptions& options);

}  // namespace tensorfold
