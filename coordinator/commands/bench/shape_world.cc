#include "coordinator/commands/bench/shape_world.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "coordinator/commands/bench/limits.h"
#include "coordinator/commands/bench/link_bench.h"
#include "coordinator/commands/bench/world.h"
#include "transport/local/local_world.h"
#include "worker/checkpoint/weights.h"

namespace tensorfold {
namespace {

// Between the hosts' threads, and on GPUs between their memories.
absl::StatusOr<std::vector<LinkFigure>> rank_links(Communicator& communicator, const ShapeWorldOptions& options,
                                                   [[maybe_unused]] int rank) {
  absl::StatusOr<std::vector<LinkFigure>> figures = bench_links(communicator, options.link_rounds);
#if TENSORFOLD_WITH_CUDA
  if (figures.ok() && options.backend.backend == "cuda") {
    absl::Status status = bench_device_links(communicator, gpu_of_rank(options.backend, rank), &*figures);
    if (!status.ok()) return status;
  }
#endif
  return figures;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShapeWorld>> ShapeWorld::load(const TensorSource& source,
                                                             const ShapeWorldOptions& options) {
  std::unique_ptr<ShapeWorld> world(new ShapeWorld());
  world->ranks_.resize(static_cast<size_t>(options.world));
  if (options.world > 1) {
    if (absl::Status status = world->connect(options); !status.ok()) return status;
  }
  for (int rank = 0; rank < options.world; ++rank) {
    Rank& member = world->ranks_[static_cast<size_t>(rank)];
    absl::StatusOr<std::unique_ptr<Ops>> ops = make_backend(options.backend, rank);
    if (!ops.ok()) return ops.status();
    member.ops = *std::move(ops);
    absl::StatusOr<WeightReader> reader = WeightReader::open(source);
    if (!reader.ok()) return reader.status();
    // Packed by the rank's own backend: on GPUs the weights lie on its device.
    auto model = load_model(source.config(), *reader, *member.ops, {options.world, rank});
    if (!model.ok()) return model.status();
    member.model = *std::move(model);
    const WeightTotals share = weight_totals(*member.model);
    world->weights_.bytes += share.bytes;
    world->weights_.values += share.values;
    world->weights_.head_values += share.head_values;
  }
  world->backend_ = world->ranks_[0].ops->describe();
  return world;
}

absl::Status ShapeWorld::connect(const ShapeWorldOptions& options) {
  auto communicators = LocalWorld::create(static_cast<int>(ranks_.size()));
  if (!communicators.ok()) return communicators.status();
  std::vector<std::thread> others;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].communicator = std::move((*communicators)[rank]);
    if (rank == 0) continue;
    others.emplace_back([this, rank, &options] {
      // An error is everybody's, and rank 0 tells it.
      rank_links(*ranks_[rank].communicator, options, static_cast<int>(rank)).IgnoreError();
    });
  }
  absl::StatusOr<std::vector<LinkFigure>> figures = rank_links(*ranks_[0].communicator, options, 0);
  for (std::thread& other : others) other.join();
  if (!figures.ok()) return figures.status();
  links_ = *std::move(figures);
  return absl::OkStatus();
}

absl::Status ShapeWorld::start(int64_t pages) {
  RunnerOptions options;
  options.slots = 1;
  options.pages = pages;
  for (Rank& member : ranks_) {
    auto runner = PassRunner::create(*member.ops, *member.model, options);
    if (!runner.ok()) return runner.status();
    member.runner = *std::move(runner);
    member.runner->use(member.communicator.get());
  }
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    ranks_[rank].thread = std::thread([&member = ranks_[rank], rank] {
      const absl::Status status = run_rank(*member.runner, *member.communicator);
      if (status.ok()) return;
      spdlog::error("rank {}: {}", rank, std::string(status.message()));
      member.communicator->abort(status);
    });
  }
  executor_ = std::make_unique<WorldExecutor>(*ranks_[0].runner, ranks_[0].communicator.get());
  return absl::OkStatus();
}

absl::Status ShapeWorld::assume_context(int64_t tokens) {
  // The other ranks wait for a plan now, and the next one orders their reads after these writes.
  for (Rank& member : ranks_) {
    if (absl::Status status = member.runner->assume_context(0, tokens); !status.ok()) return status;
  }
  return absl::OkStatus();
}

int64_t ShapeWorld::kv_bytes() const {
  int64_t bytes = 0;
  for (const Rank& member : ranks_) bytes += member.runner->kv_bytes();
  return bytes;
}

int64_t ShapeWorld::state_bytes() const {
  int64_t bytes = 0;
  for (const Rank& member : ranks_) bytes += member.runner->state_bytes();
  return bytes;
}

ShapeWorld::~ShapeWorld() {
  if (executor_ != nullptr && !executor_->stop().ok()) {
    for (Rank& member : ranks_) {
      if (member.communicator != nullptr) member.communicator->abort(absl::CancelledError("the bench is closing"));
    }
  }
  for (Rank& member : ranks_) {
    if (member.thread.joinable()) member.thread.join();
  }
}

}  // namespace tensorfold
