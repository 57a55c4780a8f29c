#include "tests/transport/ucx_processes.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

namespace tensorfold {
namespace {

bool write_all(int fd, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(fd, next, bytes, MSG_NOSIGNAL);
    if (n <= 0) return false;
    next += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool read_all(int fd, void* data, size_t bytes, Deadline deadline) {
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

bool write_blob(int fd, const void* data, uint32_t bytes) {
  return write_all(fd, &bytes, sizeof(bytes)) && write_all(fd, data, bytes);
}

bool read_blob(int fd, std::vector<std::byte>& blob, Deadline deadline) {
  uint32_t bytes = 0;
  if (!read_all(fd, &bytes, sizeof(bytes), deadline) || bytes > (1u << 20)) return false;
  blob.resize(bytes);
  return read_all(fd, blob.data(), bytes, deadline);
}

absl::Status run_rank(int fd, int rank, const ProcessWorld& world,
                      const std::function<absl::Status(Communicator&)>& body) {
  const Deadline deadline = Deadline::after(world.connect_time);
  auto endpoint = UcxEndpoint::create(world.options);
  if (!endpoint.ok()) return endpoint.status();
  const std::vector<std::byte>& mine = (*endpoint)->address();
  if (!write_blob(fd, mine.data(), static_cast<uint32_t>(mine.size()))) return absl::InternalError("parent gone");
  UcxMembers members;
  members.rank = rank;
  members.world = world.world;
  members.epoch = world.epochs.empty() ? 1 : world.epochs[rank];
  for (int r = 0; r < world.world; ++r) {
    members.labels.push_back(fmt::format("host-{}", r));
    members.addresses.emplace_back();
    if (!read_blob(fd, members.addresses.back(), deadline)) return absl::InternalError("no addresses from the parent");
  }
  auto communicator = (*endpoint)->connect(members, deadline);
  if (!communicator.ok()) return communicator.status();
  return body(**communicator);
}

[[noreturn]] void child(int fd, int rank, const ProcessWorld& world,
                        const std::function<absl::Status(Communicator&)>& body) {
  absl::Status status = run_rank(fd, rank, world, body);
  const auto code = static_cast<uint32_t>(status.code());
  const std::string message(status.message());
  write_all(fd, &code, sizeof(code));
  write_blob(fd, message.data(), static_cast<uint32_t>(message.size()));
  std::fflush(stdout);
  _exit(0);
}

// A dead child stays in the process table until its parent has waited for it, and UCX takes it for alive until then.
void reap(std::vector<pid_t>& pids) {
  for (pid_t& pid : pids) {
    if (pid > 0 && waitpid(pid, nullptr, WNOHANG) == pid) pid = 0;
  }
}

void wait_for_data(const std::vector<int>& fds, size_t wanted, std::vector<pid_t>& pids, Deadline deadline) {
  pollfd one = {fds[wanted], POLLIN, 0};
  while (poll(&one, 1, 20) == 0 && !deadline.passed()) reap(pids);
}

absl::Status read_status(int fd, Deadline deadline) {
  uint32_t code = 0;
  std::vector<std::byte> message;
  if (!read_all(fd, &code, sizeof(code), deadline) || !read_blob(fd, message, deadline)) {
    return absl::UnknownError("the process died or hung without a result");
  }
  return absl::Status(static_cast<absl::StatusCode>(code),
                      std::string(reinterpret_cast<const char*>(message.data()), message.size()));
}

}  // namespace

std::vector<absl::Status> run_ucx_processes(const ProcessWorld& world,
                                            const std::function<absl::Status(Communicator&)>& body) {
  std::vector<int> fds;
  std::vector<pid_t> pids;
  std::fflush(stdout);
  for (int rank = 0; rank < world.world; ++rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) std::abort();
    const pid_t pid = fork();
    if (pid < 0) std::abort();
    if (pid == 0) {
      close(pair[0]);
      for (int fd : fds) close(fd);
      child(pair[1], rank, world, body);
    }
    close(pair[1]);
    fds.push_back(pair[0]);
    pids.push_back(pid);
  }
  const Deadline deadline = Deadline::after(world.limit);
  std::vector<std::vector<std::byte>> addresses(fds.size());
  bool complete = true;
  for (size_t r = 0; r < fds.size(); ++r) complete = complete && read_blob(fds[r], addresses[r], deadline);
  for (int fd : fds) {
    for (const auto& address : addresses) {
      if (complete) write_blob(fd, address.data(), static_cast<uint32_t>(address.size()));
    }
    if (!complete) shutdown(fd, SHUT_WR);
  }
  std::vector<absl::Status> results;
  for (size_t r = 0; r < fds.size(); ++r) {
    wait_for_data(fds, r, pids, deadline);
    results.push_back(read_status(fds[r], deadline));
  }
  for (size_t r = 0; r < fds.size(); ++r) {
    if (pids[r] > 0 && absl::IsUnknown(results[r])) kill(pids[r], SIGKILL);
    if (pids[r] > 0) waitpid(pids[r], nullptr, 0);
    close(fds[r]);
  }
  return results;
}

}  // namespace tensorfold
