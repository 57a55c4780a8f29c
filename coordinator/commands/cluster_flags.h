// The flags that every command on an in-process world has.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/runtime/local_cluster.h"

namespace CLI {
class App;
}

namespace tensorfold {

struct ClusterFlags {
  std::string model;
  int world = 1;
  std::string transport = "local";
  std::string isa = "auto";
  int threads = 0;
  std::string backend = "cpu";
  std::string launch = "graph";
  std::string kv_format = "bf16";
  std::string exchange = "auto";
  std::string precision = "checkpoint";
  std::string drafter;  // --draft-model, of commands that draft

  /// --model, --world, --transport, --isa, --threads, --backend, --launch, --kv-format, --exchange,
  /// --precision.
  void add_to(CLI::App& app);
  /// --draft-model.
  void add_drafter_to(CLI::App& app);
};

/// Shards and cluster together, in the order in which they must die.
struct OpenCluster {
  std::unique_ptr<ModelShards> shards;
  std::unique_ptr<LocalCluster> cluster;
};

absl::StatusOr<OpenCluster> open_cluster(const ClusterFlags& flags, const RunnerOptions& runner,
                                         const DrafterChoice& drafter = {});

}  // namespace tensorfold
