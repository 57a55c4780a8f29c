// Ranks as forked processes over UCX. The parent is rank 0; UCX addresses travel over socket pairs.
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <iostream>

#include "coordinator/commands/bench/link_bench.h"
#include "coordinator/commands/bench/world.h"

namespace tensorfold {
namespace {

constexpr uint32_t kMaxAddress = 1u << 20;
constexpr std::chrono::seconds kLoadTime{300};  // for every rank to load its share
constexpr std::chrono::seconds kExitTime{10};

bool send_all(int fd, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(fd, next, bytes, MSG_NOSIGNAL);
    if (n <= 0) return false;
    next += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool receive_all(int fd, void* data, size_t bytes, Deadline deadline) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    pollfd one = {fd, POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left()).count();
    if (poll(&one, 1, static_cast<int>(left)) <= 0) return false;
    const ssize_t n = recv(fd, next, bytes, 0);
    if (n <= 0) return false;
    next += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool send_blob(int fd, const std::vector<std::byte>& blob) {
  const uint32_t bytes = static_cast<uint32_t>(blob.size());
  return send_all(fd, &bytes, sizeof bytes) && send_all(fd, blob.data(), bytes);
}

bool receive_blob(int fd, std::vector<std::byte>& blob, Deadline deadline) {
  uint32_t bytes = 0;
  if (!receive_all(fd, &bytes, sizeof bytes, deadline) || bytes > kMaxAddress) return false;
  blob.resize(bytes);
  return receive_all(fd, blob.data(), bytes, deadline);
}

// One rank's part, the same in every process.
struct Member {
  std::unique_ptr<Ops> ops;
  std::unique_ptr<ModelShards> shards;
  std::unique_ptr<PassRunner> runner;
  std::unique_ptr<Communicator> communicator;

  absl::Status load(const BenchWorldOptions& options, int rank);
  absl::StatusOr<WeightTotals> exchange_totals(int rank);
};

absl::Status Member::load(const BenchWorldOptions& options, int rank) {
  auto made = make_backend(options.backend, rank);
  if (!made.ok()) return made.status();
  ops = *std::move(made);
  const absl::StatusOr<Precision> precision = parse_precision(options.backend.precision);
  if (!precision.ok()) return precision.status();
  auto opened = ModelShards::open(options.model, options.world, *precision, options.drafter);
  if (!opened.ok()) return opened.status();
  shards = *std::move(opened);
  if (absl::Status status = shards->load(rank, *ops); !status.ok()) return status;
  shards->close_files();
  auto created = PassRunner::create(*ops, shards->model(rank), options.runner, shards->drafter(rank));
  if (!created.ok()) return created.status();
  runner = *std::move(created);
  return absl::OkStatus();
}

// The sum over all ranks, on rank 0.
absl::StatusOr<WeightTotals> Member::exchange_totals(int rank) {
  WeightTotals total = weight_totals(shards->model(rank));
  const auto mine = std::as_bytes(std::span(&total, 1));
  std::vector<std::vector<std::byte>> all;
  absl::Status status = communicator->gather(0, mine, &all, sizeof total, Deadline::after(kLoadTime));
  if (!status.ok()) return status;
  for (size_t other = 1; other < all.size(); ++other) {
    WeightTotals share;
    if (all[other].size() != sizeof share) return absl::DataLossError("a rank's weight totals are cut short");
    std::memcpy(&share, all[other].data(), sizeof share);
    total.bytes += share.bytes;
    total.values += share.values;
    total.head_values += share.head_values;
  }
  return total;
}

absl::Status member_main(int fd, int rank, const BenchWorldOptions& options) {
  Member member;
  if (absl::Status status = member.load(options, rank); !status.ok()) return status;
  auto endpoint = UcxEndpoint::create({});
  if (!endpoint.ok()) return endpoint.status();
  if (!send_blob(fd, (*endpoint)->address())) return absl::CancelledError("rank 0 is gone");
  const Deadline deadline = Deadline::after(kLoadTime);
  UcxMembers members;
  members.rank = rank;
  members.world = options.world;
  members.epoch = 1;
  for (int r = 0; r < options.world; ++r) {
    members.labels.push_back(fmt::format("process {}", r));
    if (!receive_blob(fd, members.addresses.emplace_back(), deadline)) return absl::CancelledError("rank 0 is gone");
  }
  auto communicator = (*endpoint)->connect(members, deadline);
  if (!communicator.ok()) return communicator.status();
  member.communicator = *std::move(communicator);
  if (auto links = bench_links(*member.communicator, options.link_rounds); !links.ok()) return links.status();
  if (auto totals = member.exchange_totals(rank); !totals.ok()) return totals.status();
  member.runner->use(member.communicator.get());
  return run_rank(*member.runner, *member.communicator);
}

class ProcessWorld : public BenchWorld {
 public:
  ~ProcessWorld() override;
  absl::Status start(const BenchWorldOptions& options);

  PassExecutor& executor() override { return *executor_; }
  const ModelConfig& config() const override { return member_.shards->config(); }
  const ModelShape& shape() const override { return member_.shards->shape(0); }
  uint32_t block_drafts() const override { return member_.shards->block_drafts(); }

 private:
  struct Child {
    pid_t pid = 0;
    int fd = -1;
  };
  absl::Status fork_ranks(const BenchWorldOptions& options);
  absl::StatusOr<UcxMembers> exchange_addresses(const std::vector<std::byte>& mine, int world);
  void reap(Deadline deadline);

  std::vector<Child> children_;  // of ranks 1 and up
  Member member_;
  std::unique_ptr<WorldExecutor> executor_;
};

absl::Status ProcessWorld::fork_ranks(const BenchWorldOptions& options) {
  std::fflush(stdout);
  for (int rank = 1; rank < options.world; ++rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
      return absl::ResourceExhaustedError(fmt::format("rank {}: no socket pair: {}", rank, std::strerror(errno)));
    }
    const pid_t pid = fork();
    if (pid < 0) {
      return absl::ResourceExhaustedError(fmt::format("rank {}: no process: {}", rank, std::strerror(errno)));
    }
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a rank is nothing without rank 0
      close(pair[0]);
      for (const Child& child : children_) close(child.fd);
      const absl::Status status = member_main(pair[1], rank, options);
      if (!status.ok()) std::cerr << fmt::format("rank {}: {}\n", rank, std::string(status.message())) << std::flush;
      _exit(status.ok() ? 0 : 1);
    }
    close(pair[1]);
    children_.push_back({pid, pair[0]});
  }
  return absl::OkStatus();
}

absl::StatusOr<UcxMembers> ProcessWorld::exchange_addresses(const std::vector<std::byte>& mine, int world) {
  UcxMembers members;
  members.world = world;
  members.epoch = 1;
  members.addresses.push_back(mine);
  const Deadline deadline = Deadline::after(kLoadTime);
  for (size_t i = 0; i < children_.size(); ++i) {
    if (!receive_blob(children_[i].fd, members.addresses.emplace_back(), deadline)) {
      return absl::UnavailableError(fmt::format("rank {} did not come up", i + 1));
    }
  }
  for (int rank = 0; rank < world; ++rank) members.labels.push_back(fmt::format("process {}", rank));
  for (size_t i = 0; i < children_.size(); ++i) {
    for (const std::vector<std::byte>& address : members.addresses) {
      if (!send_blob(children_[i].fd, address)) return absl::UnavailableError(fmt::format("rank {} is gone", i + 1));
    }
  }
  return members;
}

absl::Status ProcessWorld::start(const BenchWorldOptions& options) {
  if (absl::Status status = fork_ranks(options); !status.ok()) return status;
  if (absl::Status status = member_.load(options, 0); !status.ok()) return status;
  auto endpoint = UcxEndpoint::create({});
  if (!endpoint.ok()) return endpoint.status();
  const auto members = exchange_addresses((*endpoint)->address(), options.world);
  if (!members.ok()) return members.status();
  auto communicator = (*endpoint)->connect(*members, Deadline::after(kLoadTime));
  if (!communicator.ok()) return communicator.status();
  member_.communicator = *std::move(communicator);
  auto links = bench_links(*member_.communicator, options.link_rounds);
  if (!links.ok()) return links.status();
  links_ = *std::move(links);
  auto totals = member_.exchange_totals(0);
  if (!totals.ok()) return totals.status();
  weights_ = *totals;
  member_.runner->use(member_.communicator.get());
  executor_ = std::make_unique<WorldExecutor>(*member_.runner, member_.communicator.get());
  backend_ = member_.ops->describe();
  threads_ = options.backend.threads;
  processes_ = options.world;
  return absl::OkStatus();
}

void ProcessWorld::reap(Deadline deadline) {
  for (Child& child : children_) {
    while (waitpid(child.pid, nullptr, WNOHANG) == 0) {
      if (deadline.passed()) kill(child.pid, SIGKILL);
      usleep(1000);
    }
    close(child.fd);
  }
}

ProcessWorld::~ProcessWorld() {
  const bool stopped = executor_ != nullptr && executor_->stop().ok();
  executor_.reset();
  member_.communicator.reset();
  reap(Deadline::after(stopped ? kExitTime : std::chrono::seconds(0)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchWorld>> open_process_world(const BenchWorldOptions& options) {
  auto world = std::make_unique<ProcessWorld>();
  if (absl::Status status = world->start(options); !status.ok()) return status;
  return world;
}

}  // namespace tensorfold
