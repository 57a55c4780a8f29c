// Makes the backend that a profile or command asks for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

struct BackendOptions {
  std::string backend = "cpu";           // cpu | cuda
  std::string isa = "auto";              // cpu: auto | avx512 | avx2 | neon | portable
  int threads = 0;                       // cpu: 0 = one a core
  int device = -1;                       // cuda: GPU number; -1 = the rank's number modulo the GPUs of this machine
  std::string launch = "graph";          // cuda: graph | eager; the same bits
  std::string kv_format = "bf16";        // cuda: bf16 | fp8
  std::string precision = "checkpoint";  // checkpoint | full: of models loaded for it (model_config.h)
  std::string exchange = "auto";         // cuda: auto measures | peer | nccl | pinned | staged
};

/// The backends in this build: cpu, and cuda where it was built in.
std::vector<std::string> built_backends();

/// `rank` chooses the GPU where the options do not. InvalidArgument names what this build and machine have instead.
absl::StatusOr<std::unique_ptr<Ops>> make_backend(const BackendOptions& options, int rank = 0);

}  // namespace tensorfold
