// Latency of a transport between forked processes of this host: plan fan-out and return, exchanges by size, wake-up
// after idling. Prints the median and the 99th percentile in microseconds, as rank 0 sees them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "tests/transport/ucx_processes.h"
#include "transport/base/link_measure.h"

namespace tensorfold {
namespace {

using Bytes = std::vector<std::byte>;

struct BenchOptions {
  ProcessWorld world;
  int rounds = 2000;
};

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

template <typename Round>
absl::Status measure_rounds(Communicator& communicator, const std::string& what, int rounds, Round round) {
  std::vector<double> times;
  for (int i = -rounds / 10 - 1; i < rounds; ++i) {
    const auto start = Deadline::Clock::now();
    absl::Status status = round();
    if (!status.ok()) return status;
    const double us = std::chrono::duration<double, std::micro>(Deadline::Clock::now() - start).count();
    if (i >= 0) times.push_back(us);
  }
  std::sort(times.begin(), times.end());
  if (communicator.rank() == 0) {
    fmt::print("{:<34} p50 {:>9.1f} us   p99 {:>9.1f} us\n", what, times[times.size() / 2],
               times[times.size() * 99 / 100]);
    std::fflush(stdout);
  }
  return communicator.barrier(soon());
}

absl::Status fan_out_and_return(Communicator& communicator, std::chrono::milliseconds pause) {
  if (communicator.rank() == 0 && pause.count() > 0) std::this_thread::sleep_for(pause);
  Bytes plan(communicator.rank() == 0 ? 300 : 0);
  absl::Status status = communicator.broadcast(0, plan, 1 << 20, soon());
  if (!status.ok()) return status;
  std::vector<Bytes> all;
  return communicator.gather(0, Bytes(300), &all, 1 << 20, soon());
}

absl::Status idle_wake(Communicator& communicator) {
  std::vector<double> times;
  for (int i = 0; i < 20; ++i) {
    if (communicator.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto start = Deadline::Clock::now();
    absl::Status status = fan_out_and_return(communicator, {});
    if (!status.ok()) return status;
    times.push_back(std::chrono::duration<double, std::micro>(Deadline::Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  if (communicator.rank() == 0) {
    fmt::print("{:<34} p50 {:>9.1f} us   max {:>9.1f} us\n", "the same after 50 ms of idling", times[10], times[19]);
  }
  return communicator.barrier(soon());
}

absl::Status bench_rank(Communicator& communicator, const BenchOptions& options) {
  auto links = measure_links(communicator, soon());
  if (!links.ok()) return links.status();
  if (communicator.rank() == 0) {
    fmt::print("{}", communicator.describe());
    for (const PeerLink& link : *links) fmt::print("{}\n", format_link(communicator, link));
    std::fflush(stdout);
  }
  absl::Status status = measure_rounds(communicator, "broadcast 300 B + gather 300 B", options.rounds,
                                       [&] { return fan_out_and_return(communicator, {}); });
  if (status.ok()) status = idle_wake(communicator);
  if (status.ok()) {
    status = measure_rounds(communicator, "barrier", options.rounds, [&] { return communicator.barrier(soon()); });
  }
  for (size_t bytes : {size_t{8}, size_t{4} << 10, size_t{16} << 10, size_t{64} << 10, size_t{256} << 10,
                       size_t{1} << 20, size_t{8} << 20}) {
    if (!status.ok()) return status;
    const std::vector<size_t> sizes(communicator.world(), bytes);
    Bytes mine(bytes), out(bytes * sizes.size());
    const int rounds = bytes > (size_t{256} << 10) ? std::max(options.rounds / 20, 10) : options.rounds;
    status = measure_rounds(communicator, fmt::format("all_gather {} B a rank", bytes), rounds,
                            [&] { return communicator.all_gather(mine, sizes, out, soon()); });
  }
  return status;
}

int run(int argc, char** argv) {
  BenchOptions options;
  CLI::App app("Latency of the UCX transport between processes of this host");
  app.add_option("--world", options.world.world, "ranks")->check(CLI::Range(1, kMaxWorld));
  app.add_option("--tls", options.world.options.tls, "UCX transports, comma-separated; empty: all");
  app.add_option("--devices", options.world.options.net_devices, "network devices, comma-separated; empty: all");
  app.add_option("--rounds", options.rounds, "rounds a measurement")->check(CLI::Range(10, 1000000));
  std::vector<std::string> settings;
  app.add_option("--set", settings, "a UCX setting, NAME=VALUE");
  bool no_failure_detection = false;
  app.add_flag("--no-failure-detection", no_failure_detection, "let UCX ignore dead peers");
  CLI11_PARSE(app, argc, argv);
  options.world.options.detect_peer_failure = !no_failure_detection;
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    if (equals == std::string::npos) continue;
    options.world.options.settings.emplace_back(setting.substr(0, equals), setting.substr(equals + 1));
  }
  int failures = 0;
  for (const absl::Status& status :
       run_ucx_processes(options.world, [&](Communicator& rank) { return bench_rank(rank, options); })) {
    if (status.ok()) continue;
    ++failures;
    fmt::print(stderr, "{}\n", status.ToString());
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tensorfold

int main(int argc, char** argv) {
  try {
    return tensorfold::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
