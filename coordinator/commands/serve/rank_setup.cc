#include "coordinator/commands/serve/rank_setup.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "coordinator/commands/log_format.h"
#include "coordinator/plan/memory_plan.h"
#include "transport/base/link_measure.h"

namespace tensorfold {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr std::chrono::seconds kConnectTimeout{15};

// Free memory of the GPU, or MemAvailable of /proc/meminfo; -1 if unknown.
int64_t available_memory(Ops& ops) {
  if (const int64_t device = ops.free_memory(); device >= 0) return device;
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  std::string unit;
  while (file >> name >> kib >> unit) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return -1;
}

// The plan in the log, and whether it fits.
absl::Status plan_memory(RankSetup& setup) {
  const absl::StatusOr<ModelFacts> facts = inspect(setup.profile.model.path);
  if (!facts.ok()) return facts.status();
  const absl::StatusOr<MemoryPlan> plan = make_memory_plan(setup.profile, setup.shards->config(), *facts, setup.rank);
  if (!plan.ok()) return plan.status();
  setup.runner_options.pages = plan->pages;
  setup.runner_options.snapshots = plan->snapshots;
  const int64_t available = available_memory(*setup.ops);
  spdlog::info("memory plan of rank {}, {} available:\n{}", setup.rank,
               available < 0 ? std::string("unknown") : human_bytes(available), memory_plan_text(*plan));
  return check_memory_plan(*plan, setup.profile, available);
}

// UCX only warns of a device that is not there; then a rank has no path and nobody knows why.
absl::Status check_devices(const RankSetup& setup) {
  std::istringstream devices(setup.ucx_options().net_devices);
  std::string device;
  while (std::getline(devices, device, ',')) {
    const std::string name = device.substr(0, device.find(':'));
    const bool there = name == "all" || std::filesystem::exists("/sys/class/net/" + name) ||
                       std::filesystem::exists("/sys/class/infiniband/" + name);
    if (there) continue;
    std::string found;
    for (const char* folder : {"/sys/class/net", "/sys/class/infiniband"}) {
      std::error_code none;
      for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
        found += (found.empty() ? "" : ", ") + entry.path().filename().string();
      }
    }
    return absl::InvalidArgumentError(
        fmt::format("cluster.ucx.net_devices: rank {} has no device {}; it has {}", setup.rank, device, found));
  }
  return absl::OkStatus();
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? std::string(name.data()) : "unknown host";
}

// "shm", "tcp" or "rdma": what UCX chose for a peer, from its line of Communicator::describe().
std::string link_kind(const std::string& description) {
  const auto any_of = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(),
                       [&](const char* name) { return description.find(name) != std::string::npos; });
  };
  if (any_of({"rc_", "dc_", "ud_", "rdmacm"})) return "rdma";
  if (any_of({"sysv/", "posix/", "cma/", "knem/", "xpmem/", "self/"})) return "shm";
  return any_of({"tcp/"}) ? "tcp" : "unknown";
}

// A link that is not what the profile expects is half the speed and nobody knows why: say so, or refuse.
absl::Status check_links(const RankSetup& setup, Communicator& communicator, Deadline deadline) {
  const absl::StatusOr<std::vector<PeerLink>> links = measure_links(communicator, deadline);
  if (!links.ok()) return links.status();
  const Profile::Cluster::Ucx& ucx = setup.profile.cluster.ucx;
  std::istringstream lines(communicator.describe());
  for (const PeerLink& link : *links) {
    std::string description;
    while (std::getline(lines, description) && description.empty()) {
    }
    const std::string kind = link_kind(description);
    spdlog::info("link to {}, {}", format_link(communicator, link), kind);
    const std::string name = setup.profile.cluster.rank_name(link.peer);
    std::vector<std::string> problems;
    if (ucx.expect_transport != "any" && kind != ucx.expect_transport) {
      problems.push_back(fmt::format("the link to {} goes over {}; cluster.ucx.expect_transport expects {}", name, kind,
                                     ucx.expect_transport));
    }
    const double wanted = static_cast<double>(ucx.min_bandwidth) / 1e9;
    if (link.measure.bandwidth_gb_s < wanted) {
      problems.push_back(
          fmt::format("the link to {} carries {:.2f} GB/s; cluster.ucx.min_bandwidth expects {:.2f} GB/s", name,
                      link.measure.bandwidth_gb_s, wanted));
    }
    for (const std::string& problem : problems) {
      if (ucx.on_slow == "refuse") return absl::FailedPreconditionError(problem);
      spdlog::warn("{}", problem);
    }
  }
  return absl::OkStatus();
}

}  // namespace

ClusterTimings RankSetup::timings() const {
  ClusterTimings timings;
  timings.heartbeat_interval =
      std::chrono::duration_cast<std::chrono::milliseconds>(profile.cluster.heartbeat_interval);
  timings.heartbeat_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(profile.cluster.heartbeat_timeout);
  timings.handshake_timeout = std::max(timings.handshake_timeout, 2 * timings.heartbeat_timeout);
  return timings;
}

UcxOptions RankSetup::ucx_options() const {
  UcxOptions options;
  options.tls = profile.cluster.ucx_tls();
  options.net_devices = profile.cluster.net_devices_of(rank);
  return options;
}

std::string RankSetup::host_label() const {
  return profile.cluster.hosts.empty() ? host_name() : profile.cluster.hosts[static_cast<size_t>(rank)];
}

absl::StatusOr<std::unique_ptr<RankSetup>> prepare_rank(const std::string& profile_path, int rank) {
  auto setup = std::make_unique<RankSetup>();
  absl::StatusOr<Profile> profile = load_profile(profile_path);
  if (!profile.ok()) return profile.status();
  setup->profile = *std::move(profile);
  set_log(setup->profile.log.format, setup->profile.log.level);
  for (const std::string& warning : setup->profile.warnings) spdlog::warn("{}", warning);
  const int world = setup->profile.cluster.world;
  if (rank < 0 || rank >= world) {
    return absl::InvalidArgumentError(
        fmt::format("--rank {}: {} has cluster.world {}, so ranks are 0 to {}", rank, profile_path, world, world - 1));
  }
  setup->rank = rank;
  if (absl::Status status = check_devices(*setup); !status.ok()) return status;
  const absl::StatusOr<std::string> token = cluster_token(setup->profile);
  if (!token.ok()) return token.status();
  setup->token = *token;

  const Profile::Compute& compute = setup->profile.compute;
  absl::StatusOr<std::unique_ptr<Ops>> ops = make_backend({.backend = compute.backend,
                                                           .isa = compute.isa,
                                                           .threads = compute.threads,
                                                           .device = compute.device,
                                                           .launch = compute.launch,
                                                           .kv_format = setup->profile.kv_format(),
                                                           .exchange = compute.exchange},
                                                          rank);
  if (!ops.ok()) return ops.status();
  setup->ops = *std::move(ops);
  spdlog::info("rank {} of {}: backend {}, model {}", rank, world, setup->ops->describe(), setup->profile.model.path);
  const DrafterChoice drafter = DrafterChoice::of_kind(setup->profile.draft.kind, setup->profile.draft.model);
  if (!drafter.folder.empty()) {
    if (absl::Status status = BlockDrafter::check_backend(*setup->ops); !status.ok()) return status;
  }
  const absl::StatusOr<Precision> precision = parse_precision(setup->profile.model.precision);
  if (!precision.ok()) return precision.status();
  absl::StatusOr<std::unique_ptr<ModelShards>> shards =
      ModelShards::open(setup->profile.model.path, world, *precision, drafter);
  if (!shards.ok()) return shards.status();
  setup->shards = *std::move(shards);
  for (const std::string& note : setup->shards->notes()) spdlog::info("checkpoint: {}", note);
  absl::StatusOr<ModelShape> shape = model_shape(setup->shards->config(), {world, rank});
  if (!shape.ok()) return shape.status();
  setup->shape = *std::move(shape);

  setup->runner_options.slots = setup->profile.schedule.max_sequences;
  setup->runner_options.prepare_context =
      setup->profile.model.context_length > 0 ? setup->profile.model.context_length : setup->shape.context_length;
  setup->runner_options.step_timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(setup->profile.cluster.step_timeout);
  setup->runner_options.row_timeout = setup->profile.cluster.step_timeout_per_row;
  if (absl::Status status = plan_memory(*setup); !status.ok()) return status;

  RankIdentity& identity = setup->identity;
  identity.build = TENSORFOLD_VERSION;
  identity.fingerprint =
      numeric_fingerprint(*setup->ops, setup->shape.slices,
                          fmt::format("precision {} kv {}", setup->profile.model.precision, setup->profile.kv_format()),
                          setup->shards->checkpoint_hash());
  identity.checkpoint = setup->shards->checkpoint_hash();
  identity.profile = profile_hash(setup->profile);
  identity.slices = setup->shape.slices.text();
  if (const DrafterFacts* drafter = setup->shards->drafter_facts(); drafter != nullptr) {
    // Ranks with different drafters would guess different tokens.
    const std::string hash = setup->shards->drafter_hash().substr(0, 16);
    identity.slices += fmt::format("; drafter {}", hash);
    spdlog::info("drafter {} ({}): {} layers, blocks of {}, taps of layers {}", hash, drafter->kind, drafter->layers,
                 drafter->block_size, fmt::join(drafter->target_layers, ", "));
  }
  identity.rank = static_cast<uint32_t>(rank);
  identity.world = static_cast<uint32_t>(world);
  identity.host = setup->host_label();
  identity.pid = getpid();
  identity.transport = setup->profile.cluster.transport;
  spdlog::info("numeric fingerprint {}; slices: {}", identity.fingerprint, identity.slices);
  return setup;
}

namespace {

absl::Status open_states(RankSetup& setup) {
  const Profile::State& state = setup.profile.state;
  if (state.directory.empty()) return absl::OkStatus();
  StateStoreOptions options;
  options.directory = state.directory;
  std::string build = setup.identity.build;
  // A drafter's keys lie in the pages: another drafter's would be of no use.
  if (setup.shards->drafter_facts() != nullptr) build += "; drafter " + setup.shards->drafter_hash().substr(0, 16);
  options.owner = {.build = std::move(build),
                   .fingerprint = setup.identity.fingerprint,
                   .rank = static_cast<uint32_t>(setup.rank),
                   .world = static_cast<uint32_t>(setup.profile.cluster.world)};
  options.quota = state.quota;
  options.page_bytes = static_cast<uint64_t>(setup.runner->page_bytes());
  absl::StatusOr<std::unique_ptr<StateStore>> store = StateStore::open(std::move(options));
  if (!store.ok()) return store.status();
  setup.states = *std::move(store);
  setup.runner->keep_states(setup.states.get());
  spdlog::info("states on disk: {}, at most {:.0f} MiB",
               StateStore::folder_of(state.directory, setup.states->options().owner),
               static_cast<double>(state.quota) / kMiB);
  return absl::OkStatus();
}

}  // namespace

absl::Status load_rank(RankSetup& setup) {
  const auto start = std::chrono::steady_clock::now();
  if (absl::Status status = setup.shards->load(setup.rank, *setup.ops); !status.ok()) return status;
  setup.shards->close_files();
  auto runner = PassRunner::create(*setup.ops, setup.shards->model(setup.rank), setup.runner_options,
                                   setup.shards->drafter(setup.rank));
  if (!runner.ok()) return runner.status();
  setup.runner = *std::move(runner);
  if (absl::Status status = open_states(setup); !status.ok()) return status;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  spdlog::info("loaded {:.1f} MiB of weights in {:.2f} s",
               static_cast<double>(setup.shards->model(setup.rank).weight_bytes()) / kMiB, seconds);
  return absl::OkStatus();
}

Deadline connect_deadline(const RankSetup& setup) {
  return Deadline::after(std::min<Profile::Duration>(setup.profile.cluster.join_timeout, kConnectTimeout));
}

absl::StatusOr<std::unique_ptr<Communicator>> connect_rank(RankSetup& setup, std::unique_ptr<UcxEndpoint> endpoint,
                                                           const Roster& roster, Deadline deadline) {
  UcxMembers members;
  members.rank = setup.rank;
  members.world = static_cast<int>(roster.world);
  members.epoch = roster.epoch;
  for (const RosterRank& rank : roster.ranks) {
    members.addresses.push_back(rank.address);
    members.labels.push_back(rank.host);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> communicator = endpoint->connect(members, deadline);
  if (!communicator.ok()) return communicator.status();
  spdlog::info("transport of epoch {}:\n{}", roster.epoch, (*communicator)->describe());
  if (absl::Status status = check_links(setup, **communicator, deadline); !status.ok()) return status;
  return communicator;
}

}  // namespace tensorfold
