#include "coordinator/commands/bench/world.h"

#include <algorithm>
#include <thread>

#include "coordinator/commands/bench/link_bench.h"
#include "transport/local/local_world.h"

namespace tensorfold {
namespace {

class ThreadWorld : public BenchWorld {
 public:
  absl::Status start(const BenchWorldOptions& options);

  PassExecutor& executor() override { return cluster_->executor(); }
  const ModelConfig& config() const override { return shards_->config(); }
  const ModelShape& shape() const override { return shards_->shape(0); }
  uint32_t block_drafts() const override { return shards_->block_drafts(); }

 private:
  absl::Status measure_links(int world, int rounds);

  std::unique_ptr<ModelShards> shards_;
  std::unique_ptr<LocalCluster> cluster_;  // dies first
};

absl::Status ThreadWorld::measure_links(int world, int rounds) {
  auto ranks = LocalWorld::create(world);
  if (!ranks.ok()) return ranks.status();
  std::vector<std::thread> others;
  for (size_t rank = 1; rank < ranks->size(); ++rank) {
    others.emplace_back([&, rank] { bench_links(*(*ranks)[rank], rounds).IgnoreError(); });
  }
  absl::StatusOr<std::vector<LinkFigure>> figures = bench_links(*(*ranks)[0], rounds);
  for (std::thread& other : others) other.join();
  if (!figures.ok()) return figures.status();
  links_ = *std::move(figures);
  return absl::OkStatus();
}

absl::Status ThreadWorld::start(const BenchWorldOptions& options) {
  if (options.world > 1) {
    if (absl::Status status = measure_links(options.world, options.link_rounds); !status.ok()) return status;
  }
  auto shards = ModelShards::load_all(options.model, options.world, options.backend, nullptr, options.drafter);
  if (!shards.ok()) return shards.status();
  shards_ = *std::move(shards);
  LocalClusterOptions cluster_options;
  cluster_options.backend = options.backend;
  cluster_options.runner = options.runner;
  auto cluster = LocalCluster::start(*shards_, cluster_options);
  if (!cluster.ok()) return cluster.status();
  cluster_ = *std::move(cluster);
  backend_ = cluster_->ops(0).describe();
  for (int rank = 0; rank < options.world; ++rank) {
    const WeightTotals share = weight_totals(shards_->model(rank));
    weights_.bytes += share.bytes;
    weights_.values += share.values;
    weights_.head_values += share.head_values;
  }
  threads_ = options.backend.threads;
  return absl::OkStatus();
}

}  // namespace

int rank_threads(int threads, int world) {
  if (threads > 0) return threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world);
}

WeightTotals weight_totals(const Model& model) {
  return {model.weight_bytes(), model.weight_values(), model.shape().local_vocab * model.shape().hidden};
}

absl::StatusOr<std::unique_ptr<BenchWorld>> BenchWorld::open(const BenchWorldOptions& options) {
  BenchWorldOptions settled = options;
  settled.backend.threads = rank_threads(options.backend.threads, options.world);
  if (settled.world > 1 && settled.transport == "ucx") return open_process_world(settled);
  auto world = std::make_unique<ThreadWorld>();
  if (absl::Status status = world->start(settled); !status.ok()) return status;
  return world;
}

}  // namespace tensorfold
