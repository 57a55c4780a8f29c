// `tensorfold serve`: one rank of a cluster, as its profile says.
#include <signal.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <thread>

#include "coordinator/commands/commands.h"
#include "coordinator/commands/serve/coordinator_process.h"
#include "coordinator/commands/serve/member_process.h"

namespace tensorfold {
namespace {

struct ServeFlags {
  std::string profile;
  int rank = 0;
};

// SIGTERM and SIGINT set `stop`; a second one ends the process at once. Must be made before other threads, which then
// have the signals blocked.
class SignalWatch {
 public:
  explicit SignalWatch(std::atomic<bool>& stop) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    signal(SIGPIPE, SIG_IGN);
    thread_ = std::thread([this, &stop, signals] {
      while (!ended_) {
        const timespec tick = {.tv_sec = 0, .tv_nsec = 200000000};
        const int got = sigtimedwait(&signals, nullptr, &tick);
        if (got < 0) continue;
        if (stop) _exit(130);
        spdlog::info("signal {}: finishing what is in flight; a second one ends at once", got);
        stop = true;
      }
    });
  }
  ~SignalWatch() {
    ended_ = true;
    thread_.join();
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

absl::Status run_serve(const ServeFlags& flags) {
  std::atomic<bool> stop{false};
  const SignalWatch watch(stop);
  absl::StatusOr<std::unique_ptr<RankSetup>> setup = prepare_rank(flags.profile, flags.rank);
  if (!setup.ok()) return setup.status();
  return flags.rank == 0 ? run_coordinator_process(**setup, stop) : run_member_process(**setup, stop);
}

}  // namespace

void add_serve_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command = app.add_subcommand("serve", "Run one rank of a cluster: rank 0 answers requests");
  command->add_option("--profile", flags->profile, "YAML file; docs/profiles.md lists its options")->required();
  command->add_option("--rank", flags->rank, "which rank this process is")->check(CLI::Range(0, 7));
  command->callback([flags, exit_code] {
    const absl::Status status = run_serve(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
