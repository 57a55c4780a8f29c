#include "worker/runtime/local_cluster.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "transport/local/local_world.h"

namespace tensorfold {
namespace {

constexpr std::chrono::seconds kConnectTimeout{30};

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> connect(int world, const LocalClusterOptions& options) {
  if (options.transport == "local") return LocalWorld::create(world);
  if (options.transport == "ucx") return connect_ucx_threads(world, options.ucx);
  return absl::InvalidArgumentError(fmt::format("transport \"{}\": there are local and ucx", options.transport));
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> connect_ucx_threads(int world, const UcxOptions& options) {
  std::vector<std::unique_ptr<UcxEndpoint>> endpoints;
  UcxMembers members;
  members.world = world;
  members.epoch = 1;
  for (int rank = 0; rank < world; ++rank) {
    absl::StatusOr<std::unique_ptr<UcxEndpoint>> endpoint = UcxEndpoint::create(options);
    if (!endpoint.ok()) return endpoint.status();
    members.addresses.push_back((*endpoint)->address());
    members.labels.push_back(fmt::format("thread {}", rank));
    endpoints.push_back(*std::move(endpoint));
  }
  std::vector<std::unique_ptr<Communicator>> communicators(static_cast<size_t>(world));
  std::vector<absl::Status> statuses(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const size_t index = static_cast<size_t>(rank);
      UcxMembers mine = members;
      mine.rank = rank;
      auto connected = endpoints[index]->connect(mine, Deadline::after(kConnectTimeout));
      if (connected.ok()) {
        communicators[index] = *std::move(connected);
      } else {
        statuses[index] = connected.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return communicators;
}

absl::StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::start(ModelShards& shards,
                                                                  const LocalClusterOptions& options) {
  std::unique_ptr<LocalCluster> cluster(new LocalCluster());
  const int world = shards.world();
  cluster->ranks_.resize(static_cast<size_t>(world));
  cluster->slots_ = options.runner.slots;
  BackendOptions backend = options.backend;
  if (backend.threads == 0) {
    backend.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world);
  }
  for (int rank = 0; rank < world; ++rank) {
    Rank& member = cluster->ranks_[static_cast<size_t>(rank)];
    absl::StatusOr<std::unique_ptr<Ops>> ops = make_backend(backend, rank);
    if (!ops.ok()) return ops.status();
    member.ops = options.decorate ? options.decorate(*std::move(ops)) : *std::move(ops);
    auto runner = PassRunner::create(*member.ops, shards.model(rank), options.runner, shards.drafter(rank));
    if (!runner.ok()) return runner.status();
    member.runner = *std::move(runner);
    if (options.state_directory.empty()) continue;
    StateStoreOptions states;
    states.directory = options.state_directory;
    states.owner = options.state_owner;
    states.owner.rank = static_cast<uint32_t>(rank);
    states.owner.world = static_cast<uint32_t>(world);
    states.quota = options.state_quota;
    states.page_bytes = static_cast<uint64_t>(member.runner->page_bytes());
    absl::StatusOr<std::unique_ptr<StateStore>> store = StateStore::open(std::move(states));
    if (!store.ok()) return store.status();
    member.states = *std::move(store);
    member.runner->keep_states(member.states.get());
  }
  if (world > 1) {
    auto communicators = connect(world, options);
    if (!communicators.ok()) return communicators.status();
    for (int rank = 0; rank < world; ++rank) {
      Rank& member = cluster->ranks_[static_cast<size_t>(rank)];
      member.communicator = std::move((*communicators)[static_cast<size_t>(rank)]);
      member.runner->use(member.communicator.get());
    }
  }
  cluster->executor_ =
      std::make_unique<WorldExecutor>(*cluster->ranks_[0].runner, cluster->ranks_[0].communicator.get());
  for (int rank = 1; rank < world; ++rank) {
    Rank& member = cluster->ranks_[static_cast<size_t>(rank)];
    member.thread = std::thread([&member, rank] {
      const absl::Status status = run_rank(*member.runner, *member.communicator);
      if (!status.ok()) {
        spdlog::error("rank {}: {}", rank, std::string(status.message()));
        member.communicator->abort(status);
      }
    });
  }
  return cluster;
}

absl::Status LocalCluster::forget() {
  PassPlan plan;
  plan.kind = PlanKind::kPing;
  for (int64_t slot = 0; slot < slots_; ++slot) plan.release.push_back(static_cast<uint32_t>(slot));
  return executor_->execute(plan).status();
}

LocalCluster::~LocalCluster() {
  if (ranks_.empty()) return;
  if (executor_ != nullptr) {
    const absl::Status stopped = executor_->stop();
    if (!stopped.ok()) {
      for (Rank& member : ranks_) {
        if (member.communicator != nullptr) member.communicator->abort(absl::CancelledError("the cluster is closing"));
      }
    }
  }
  for (Rank& member : ranks_) {
    if (member.thread.joinable()) member.thread.join();
  }
}

}  // namespace tensorfold
