#include "coordinator/commands/cluster_flags.h"

#include <CLI/CLI.hpp>

namespace tensorfold {

void ClusterFlags::add_to(CLI::App& app) {
  app.add_option("--model", model, "folder of the checkpoint")->required();
  app.add_option("--world", world, "ranks, each a thread of this process")->check(CLI::Range(1, kMaxWorld));
  app.add_option("--transport", transport, "how the ranks exchange bytes")->check(CLI::IsMember({"local", "ucx"}));
  app.add_option("--isa", isa, "instruction set; all give the same bits")
      ->check(CLI::IsMember({"auto", "avx512", "avx2", "neon", "portable"}));
  app.add_option("--threads", threads, "threads of each rank; 0 shares the cores")->check(CLI::Range(0, 1024));
}

absl::StatusOr<OpenCluster> open_cluster(const ClusterFlags& flags, const RunnerOptions& runner) {
  OpenCluster open;
  const BackendOptions backend = {.backend = "cpu", .isa = flags.isa, .threads = flags.threads};
  absl::StatusOr<std::unique_ptr<Ops>> packer = make_backend(backend);
  if (!packer.ok()) return packer.status();
  open.packer = *std::move(packer);
  auto shards = ModelShards::load_all(flags.model, flags.world, *open.packer);
  if (!shards.ok()) return shards.status();
  open.shards = *std::move(shards);
  LocalClusterOptions options;
  options.transport = flags.transport;
  options.backend = backend;
  options.runner = runner;
  auto cluster = LocalCluster::start(*open.shards, options);
  if (!cluster.ok()) return cluster.status();
  open.cluster = *std::move(cluster);
  return open;
}

}  // namespace tensorfold
