#include "tests/transport/operations_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

namespace tensorfold {
namespace {

using Bytes = std::vector<std::byte>;

std::byte pattern(uint64_t key, size_t i) {
  uint64_t x = key * 0x9E3779B97F4A7C15 + i;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  return static_cast<std::byte>(x >> 40);
}

void fill(std::span<std::byte> out, uint64_t key) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = pattern(key, i);
}

absl::Status expect(std::span<const std::byte> got, uint64_t key, std::string_view what) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != pattern(key, i))
      return absl::InternalError(fmt::format("{}: byte {} of {} differs", what, i, got.size()));
  }
  return absl::OkStatus();
}

size_t draw_size(std::mt19937_64& random, size_t limit) {
  switch (random() % 4) {
    case 0:
      return 0;
    case 1:
      return random() % 64;
    case 2:
      return limit;
    default:
      return random() % (limit + 1);
  }
}

struct Case {
  Communicator& communicator;
  std::mt19937_64& random;  // the same on all ranks
  size_t limit;
  uint64_t key;
  Deadline deadline;

  int world() const { return communicator.world(); }
  int rank() const { return communicator.rank(); }

  absl::Status all_gather() {
    std::vector<size_t> sizes;
    for (int r = 0; r < world(); ++r) sizes.push_back(draw_size(random, limit));
    Bytes out(std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
    Bytes mine(sizes[rank()]);
    fill(mine, key + rank());
    absl::Status status = communicator.all_gather(mine, sizes, out, deadline);
    size_t offset = 0;
    for (int r = 0; status.ok() && r < world(); ++r) {
      status = expect(std::span(out).subspan(offset, sizes[r]), key + r, fmt::format("all_gather from {}", r));
      offset += sizes[r];
    }
    return status;
  }

  absl::Status all_gather_in_place() {
    std::vector<size_t> sizes(world(), 1000);
    Bytes out(1000 * sizes.size());
    const std::span<std::byte> mine = std::span(out).subspan(1000 * rank(), 1000);
    fill(mine, key + rank());
    absl::Status status = communicator.all_gather(mine, sizes, out, deadline);
    for (int r = 0; status.ok() && r < world(); ++r) {
      status = expect(std::span(out).subspan(1000 * r, 1000), key + r, fmt::format("all_gather in place from {}", r));
    }
    return status;
  }

  absl::Status all_to_all() {
    std::vector<std::vector<size_t>> sizes(world());  // [from][to]
    for (auto& row : sizes) {
      for (int to = 0; to < world(); ++to) row.push_back(draw_size(random, limit));
    }
    std::vector<size_t> receive_sizes;
    for (int from = 0; from < world(); ++from) receive_sizes.push_back(sizes[from][rank()]);
    const std::vector<size_t>& send_sizes = sizes[rank()];
    Bytes send(std::accumulate(send_sizes.begin(), send_sizes.end(), size_t{0}));
    Bytes receive(std::accumulate(receive_sizes.begin(), receive_sizes.end(), size_t{0}));
    size_t offset = 0;
    for (int to = 0; to < world(); ++to) {
      fill(std::span(send).subspan(offset, send_sizes[to]), key + rank() * 16 + to);
      offset += send_sizes[to];
    }
    absl::Status status = communicator.all_to_all(send, send_sizes, receive, receive_sizes, deadline);
    offset = 0;
    for (int from = 0; status.ok() && from < world(); ++from) {
      status = expect(std::span(receive).subspan(offset, receive_sizes[from]), key + from * 16 + rank(),
                      fmt::format("all_to_all from {}", from));
      offset += receive_sizes[from];
    }
    return status;
  }

  absl::Status broadcast() {
    const int root = static_cast<int>(random() % world());
    const size_t bytes = draw_size(random, limit);
    Bytes message;
    if (rank() == root) {
      message.resize(bytes);
      fill(message, key);
    }
    absl::Status status = communicator.broadcast(root, message, limit, deadline);
    if (!status.ok()) return status;
    if (message.size() != bytes) {
      return absl::InternalError(fmt::format("broadcast: {} bytes came, {} were sent", message.size(), bytes));
    }
    return expect(message, key, "broadcast");
  }

  absl::Status gather() {
    const int root = static_cast<int>(random() % world());
    std::vector<size_t> sizes;
    for (int r = 0; r < world(); ++r) sizes.push_back(draw_size(random, limit));
    Bytes mine(sizes[rank()]);
    fill(mine, key + rank());
    std::vector<Bytes> all;
    absl::Status status = communicator.gather(root, mine, &all, limit, deadline);
    if (!status.ok()) return status;
    if (rank() != root) return all.empty() ? status : absl::InternalError("gather: written on a rank that is no root");
    for (int r = 0; status.ok() && r < world(); ++r) {
      if (all[r].size() != sizes[r]) {
        return absl::InternalError(fmt::format("gather: {} bytes of rank {}, not {}", all[r].size(), r, sizes[r]));
      }
      status = expect(all[r], key + r, fmt::format("gather from {}", r));
    }
    return status;
  }

  absl::Status run() {
    absl::Status status;
    for (auto operation :
         {&Case::all_gather, &Case::all_to_all, &Case::broadcast, &Case::gather, &Case::all_gather_in_place}) {
      status = (this->*operation)();
      if (!status.ok()) return status;
      key += 1000;
    }
    return communicator.barrier(deadline);
  }
};

}  // namespace

absl::Status check_all_operations(Communicator& communicator, uint64_t seed, int rounds, size_t large_bytes) {
  std::mt19937_64 random(seed);
  for (int round = 0; round <= rounds; ++round) {
    const size_t limit = round == rounds ? large_bytes : size_t{20} << 10;
    Case one{communicator, random, limit, seed + 100000 * round, Deadline::after(std::chrono::seconds(60))};
    absl::Status status = one.run();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
