// Everything that `tensorfold bench --shape` does, from options to report.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/shape_report.h"
#include "worker/runtime/backend.h"

namespace tensorfold {

struct ShapeBenchOptions {
  std::string shape;  // a name of deploy/shapes or a path
  std::string format = "bf16";
  int world = 1;           // ranks, each a thread of this process
  BackendOptions backend;  // of each rank; threads 0 shares the cores
  std::vector<int> widths = {1, 2, 4, 8, 16};
  std::vector<int64_t> contexts = {1024, 32768, 262144};
  std::vector<int> chunks;               // empty: default_chunks()
  std::vector<int64_t> prompt_contexts;  // where prompt passes end; empty: 8192, or the model's if that is less
  double seconds = 10;                   // about, altogether, loading apart
};

/// Contexts that the model or the memory cannot hold are left out and named in the report. Errors name the option and
/// what there is instead: an unknown shape, format or backend, a world that is too wide, nothing that fits.
absl::StatusOr<ShapeReport> run_shape_bench(const ShapeBenchOptions& options);

/// Writes the shape's random weights as a checkpoint (config.json, model.safetensors; no tokenizer) into `folder`,
/// which is made if need be, so that a cluster can be tried at its true size before anything is downloaded.
/// InvalidArgument if the folder has a model.safetensors or config.json already.
absl::Status write_shape_checkpoint(const std::string& shape, const std::string& format, const std::string& folder);

}  // namespace tensorfold
