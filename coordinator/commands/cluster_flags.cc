#include "coordinator/commands/cluster_flags.h"

#include <CLI/CLI.hpp>

namespace tensorfold {

void ClusterFlags::add_to(CLI::App& app) {
  app.add_option("--model", model, "folder of the checkpoint")->required();
  app.add_option("--world", world, "ranks, each a thread of this process")->check(CLI::Range(1, kMaxWorld));
  app.add_option("--transport", transport, "how the ranks exchange bytes")->check(CLI::IsMember({"local", "ucx"}));
  app.add_option("--isa", isa, "instruction set; all give the same bits")
      ->check(CLI::IsMember({"auto", "avx512", "avx2", "neon", "portable"}));
  app.add_option("--backend", backend, "cpu, or cuda: rank r on GPU r modulo the GPUs of this machine")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--launch", launch, "cuda: graph or eager; the same bits")->check(CLI::IsMember({"graph", "eager"}));
  app.add_option("--kv-format", kv_format, "cuda: how keys and values are kept")->check(CLI::IsMember({"bf16", "fp8"}));
  app.add_option("--precision", precision, "activations of families that round some: as the model does, or not at all")
      ->check(CLI::IsMember({"checkpoint", "full"}));
  app.add_option("--exchange", exchange, "cuda: how ranks' sums travel; auto measures")
      ->check(CLI::IsMember({"auto", "peer", "nccl", "pinned", "staged"}));
  app.add_option("--threads", threads, "threads of each rank; 0 shares the cores")->check(CLI::Range(0, 1024));
}

void ClusterFlags::add_drafter_to(CLI::App& app) {
  app.add_option("--draft-model", drafter, "folder of a block drafter (DFlash, DFlash2) that fits the model");
}

absl::StatusOr<OpenCluster> open_cluster(const ClusterFlags& flags, const RunnerOptions& runner,
                                         const DrafterChoice& drafter) {
  OpenCluster open;
  const BackendOptions backend = {.backend = flags.backend,
                                  .isa = flags.isa,
                                  .threads = flags.threads,
                                  .device = -1,
                                  .launch = flags.launch,
                                  .kv_format = flags.kv_format,
                                  .precision = flags.precision,
                                  .exchange = flags.exchange};
  auto shards = ModelShards::load_all(flags.model, flags.world, backend, nullptr, drafter);
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
