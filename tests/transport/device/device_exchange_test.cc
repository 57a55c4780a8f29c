// Ranks as threads of one process: the pinned exchange with all ranks on GPU 0, peer memory and NCCL with a GPU each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <functional>
#include <set>
#include <thread>
#include <tuple>

#include "tests/cuda/gpu.h"
#include "tests/transport/device/exchange_checks.h"
#include "transport/device/choose_exchange.h"
#include "transport/device/nccl_exchange.h"
#include "transport/device/peer_exchange.h"
#include "transport/device/pinned_exchange.h"
#include "transport/local/local_world.h"
#include "transport/ucx/ucx_endpoint.h"

namespace tensorfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

// Streams of one process that share a hardware queue wait for each other; read by CUDA at its first call.
const int connections_set = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

using Ranks = std::vector<std::unique_ptr<Communicator>>;

Ranks make_local(int world) {
  auto ranks = LocalWorld::create(world);
  EXPECT_TRUE(ranks.ok()) << ranks.status();
  return ranks.ok() ? *std::move(ranks) : Ranks();
}

Ranks make_ucx(int world) {
  std::vector<std::unique_ptr<UcxEndpoint>> endpoints;
  UcxMembers members{0, world, 1, {}, {}};
  for (int r = 0; r < world; ++r) {
    auto endpoint = UcxEndpoint::create({"posix,cma,self", "", true, {}});
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    if (!endpoint.ok()) return {};
    members.addresses.push_back((*endpoint)->address());
    members.labels.push_back("host-" + std::to_string(r));
    endpoints.push_back(*std::move(endpoint));
  }
  Ranks ranks(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r, mine = members]() mutable {
      mine.rank = r;
      auto rank = endpoints[static_cast<size_t>(r)]->connect(mine, Deadline::after(seconds(30)));
      EXPECT_TRUE(rank.ok()) << rank.status();
      if (rank.ok()) ranks[static_cast<size_t>(r)] = *std::move(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& rank : ranks) {
    if (rank == nullptr) return {};
  }
  return ranks;
}

std::vector<absl::Status> on_ranks(Ranks& ranks, const std::function<absl::Status(Communicator&)>& body) {
  std::vector<absl::Status> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { results[r] = body(*ranks[r]); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

absl::StatusOr<std::unique_ptr<DeviceExchange>> make_exchange(const std::string& name, Communicator& communicator) {
  const int device = name == "pinned" ? 0 : communicator.rank();
  if (absl::Status status = cuda_status(cudaSetDevice(device), "device"); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<DeviceExchange>> made = [&]() -> absl::StatusOr<std::unique_ptr<DeviceExchange>> {
    if (name == "peer") return create_peer_exchange(communicator, Deadline::after(seconds(60)));
    if (name == "nccl") return create_nccl_exchange(communicator, Deadline::after(seconds(60)));
    return PinnedExchange::create(communicator);
  }();
  if (!made.ok()) return made.status();
  if (absl::Status status = (*made)->reserve(kLargestMessage, Deadline::after(seconds(60))); !status.ok())
    return status;
  if (absl::Status status = communicator.barrier(Deadline::after(seconds(60))); !status.ok()) return status;
  return made;
}

int gpu_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

struct Case {
  std::string exchange;
  std::string communicator;
  int world;
};

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.exchange + "_" + info.param.communicator + "_" + std::to_string(info.param.world);
}

class DeviceExchangeTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    TF_NEED_GPU();
    if (GetParam().exchange != "pinned" && gpu_count() < GetParam().world) {
      GTEST_SKIP() << GetParam().exchange << " wants " << GetParam().world << " GPUs, this machine has " << gpu_count();
    }
    if (GetParam().exchange == "nccl" && !nccl_version().ok()) GTEST_SKIP() << nccl_version().status();
    ranks_ = GetParam().communicator == "ucx" ? make_ucx(GetParam().world) : make_local(GetParam().world);
    ASSERT_EQ(ranks_.size(), static_cast<size_t>(GetParam().world));
  }

  // Makes the exchange on every rank and runs `body` with it.
  void run(const std::function<absl::Status(Communicator&, DeviceExchange&)>& body) {
    const std::vector<absl::Status> results = on_ranks(ranks_, [&](Communicator& communicator) {
      absl::StatusOr<std::unique_ptr<DeviceExchange>> exchange = make_exchange(GetParam().exchange, communicator);
      if (!exchange.ok()) return exchange.status();
      EXPECT_EQ((*exchange)->name(), GetParam().exchange);
      return body(communicator, **exchange);
    });
    for (size_t r = 0; r < results.size(); ++r) EXPECT_TRUE(results[r].ok()) << "rank " << r << ": " << results[r];
  }

  Ranks ranks_;
};

// Bytes arrive whole, in order and nowhere else, whatever their number and alignment.
TEST_P(DeviceExchangeTest, AllSizes) {
  run([](Communicator& communicator, DeviceExchange& exchange) { return check_sizes_of_all(communicator, exchange); });
}

// A captured exchange does the new contents at each of many launches, and no launch sees another's.
TEST_P(DeviceExchangeTest, GraphIsReplayed) {
  const int launches = GetParam().world <= 2 ? 1000 : 200;
  run([=](Communicator& communicator, DeviceExchange& exchange) {
    return check_graph(communicator, exchange, launches);
  });
}

// A peer that does not come ends the wait at the deadline with its name, and the stream goes on.
TEST_P(DeviceExchangeTest, MissingPeerIsNamed) {
  run([](Communicator& communicator, DeviceExchange& exchange) -> absl::Status {
    absl::StatusOr<OwnStream> stream = OwnStream::create();
    if (!stream.ok()) return stream.status();
    const std::vector<size_t> sizes(static_cast<size_t>(communicator.world()), 4096);
    void* memory = nullptr;
    if (cudaMalloc(&memory, 4096 * (sizes.size() + 1)) != cudaSuccess) return absl::InternalError("no memory");
    if (absl::Status status = communicator.barrier(Deadline::after(seconds(60))); !status.ok()) return status;
    const int missing = communicator.world() - 1;
    if (communicator.rank() == missing) {
      std::this_thread::sleep_for(seconds(3));  // alive, but not there
      cudaFree(memory);
      return absl::OkStatus();
    }
    const auto start = std::chrono::steady_clock::now();
    exchange.set_deadline(Deadline::after(milliseconds(500)));
    absl::Status status = exchange.all_gather(stream->get(), memory, sizes, static_cast<std::byte*>(memory) + 4096);
    if (!status.ok()) return status;
    status = wait_for_stream(stream->get(), Deadline::after(seconds(20)), "stream");
    if (!status.ok()) return status;
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(3));
    status = exchange.status();
    // With more ranks, another that gave up first may have ended this one's wait.
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || (communicator.world() > 2 && !status.ok())) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank " + std::to_string(missing)));
    // Final: what is enqueued later is refused or ends at once.
    const absl::Status later =
        exchange.all_gather(stream->get(), memory, sizes, static_cast<std::byte*>(memory) + 4096);
    EXPECT_FALSE(later.ok() && exchange.status().ok());
    status = wait_for_stream(stream->get(), Deadline::after(seconds(5)), "stream");
    cudaFree(memory);
    return status;
  });
}

// abort() from another thread ends a wait long before the deadline, with the reason given.
TEST_P(DeviceExchangeTest, AbortEndsAWait) {
  run([](Communicator& communicator, DeviceExchange& exchange) -> absl::Status {
    absl::StatusOr<OwnStream> stream = OwnStream::create();
    if (!stream.ok()) return stream.status();
    const std::vector<size_t> sizes(static_cast<size_t>(communicator.world()), 4096);
    void* memory = nullptr;
    if (cudaMalloc(&memory, 4096 * (sizes.size() + 1)) != cudaSuccess) return absl::InternalError("no memory");
    if (absl::Status status = communicator.barrier(Deadline::after(seconds(60))); !status.ok()) return status;
    if (communicator.rank() != 0) {
      std::this_thread::sleep_for(seconds(2));
      cudaFree(memory);
      return absl::OkStatus();
    }
    exchange.set_deadline(Deadline::after(seconds(60)));
    absl::Status status = exchange.all_gather(stream->get(), memory, sizes, static_cast<std::byte*>(memory) + 4096);
    if (!status.ok()) return status;
    std::thread killer([&] {
      std::this_thread::sleep_for(milliseconds(200));
      exchange.abort(absl::CancelledError("the user left"));
    });
    const auto start = std::chrono::steady_clock::now();
    status = wait_for_stream(stream->get(), Deadline::after(seconds(20)), "stream");
    killer.join();
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
    EXPECT_EQ(exchange.status(), absl::CancelledError("the user left"));
    cudaFree(memory);
    return status;
  });
}

// The fused sum has the bits of the contract's tree on every rank.
TEST_P(DeviceExchangeTest, SumHasTheTreesBits) {
  if (GetParam().exchange != "peer") GTEST_SKIP() << "only peer memory has a fused sum";
  run([](Communicator& communicator, DeviceExchange& exchange) { return check_sum(communicator, exchange); });
}

// A message longer than what was reserved is refused, not cut.
TEST_P(DeviceExchangeTest, TooLongIsRefused) {
  if (GetParam().exchange == "nccl") GTEST_SKIP() << "NCCL needs no room";
  run([](Communicator& communicator, DeviceExchange& exchange) -> absl::Status {
    const std::vector<size_t> sizes(static_cast<size_t>(communicator.world()), 2 * kLargestMessage);
    const absl::Status status = exchange.all_gather(nullptr, nullptr, sizes, nullptr);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    const std::vector<size_t> few(static_cast<size_t>(communicator.world()) - 1, 16);
    EXPECT_TRUE(absl::IsInvalidArgument(exchange.all_gather(nullptr, nullptr, few, nullptr)));
    return exchange.status();
  });
}

// Two ranks a GPU and process at most: see one_gpu_a_process() in choose_exchange.cc. More are processes, in
// device_processes_test.cc.
INSTANTIATE_TEST_SUITE_P(Pinned, DeviceExchangeTest,
                         testing::Values(Case{"pinned", "local", 2}, Case{"pinned", "ucx", 2}), case_name);
INSTANTIATE_TEST_SUITE_P(Gpus, DeviceExchangeTest,
                         testing::Values(Case{"peer", "local", 2}, Case{"peer", "local", 3}, Case{"peer", "local", 4},
                                         Case{"peer", "local", 8}, Case{"nccl", "local", 2}, Case{"nccl", "local", 3},
                                         Case{"nccl", "local", 4}),
                         case_name);

// Ranks that share a GPU in one process have no way here, and each way says why.
TEST(ChooseExchangeTest, OneGpuForAllThreadsIsRefused) {
  TF_NEED_GPU();
  Ranks ranks = make_local(2);
  const std::vector<absl::Status> results = on_ranks(ranks, [](Communicator& communicator) -> absl::Status {
    std::vector<std::string> report;
    auto exchange = choose_exchange(communicator, "auto", 0, &report);
    EXPECT_TRUE(absl::IsFailedPrecondition(exchange.status())) << exchange.status();
    EXPECT_EQ(report.size(), 3u);
    EXPECT_THAT(report[0], testing::AllOf(HasSubstr("peer: out"), HasSubstr("one GPU")));
    EXPECT_THAT(report[1], HasSubstr("nccl: out"));
    EXPECT_THAT(report[2], testing::AllOf(HasSubstr("pinned: out"), HasSubstr("threads of one process on one GPU")));
    return communicator.barrier(Deadline::after(seconds(30)));
  });
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
}

// What was asked for by name is taken or refused, never replaced.
TEST(ChooseExchangeTest, ImpossibleWaysAreRefusedByName) {
  TF_NEED_GPU();
  Ranks ranks = make_local(2);
  const std::vector<absl::Status> results = on_ranks(ranks, [](Communicator& communicator) -> absl::Status {
    const absl::Status peer = choose_exchange(communicator, "peer", 0, nullptr).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(peer)) << peer;
    EXPECT_THAT(std::string(peer.message()), HasSubstr("one GPU"));
    EXPECT_TRUE(absl::IsFailedPrecondition(choose_exchange(communicator, "nccl", 0, nullptr).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(choose_exchange(communicator, "pigeon", 0, nullptr).status()));
    return communicator.barrier(Deadline::after(seconds(30)));
  });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
}

// With a GPU each, the choice is measured and the same on all ranks.
TEST(ChooseExchangeTest, TwoGpus) {
  TF_NEED_GPU();
  if (gpu_count() < 2) GTEST_SKIP() << "wants 2 GPUs";
  Ranks ranks = make_local(2);
  std::vector<std::string> names(2);
  const std::vector<absl::Status> results = on_ranks(ranks, [&](Communicator& communicator) -> absl::Status {
    std::vector<std::string> report;
    auto exchange = choose_exchange(communicator, "auto", communicator.rank(), &report);
    for (const std::string& line : report) std::printf("rank %d  %s\n", communicator.rank(), line.c_str());
    if (!exchange.ok()) return exchange.status();
    names[static_cast<size_t>(communicator.rank())] = (*exchange)->name();
    return communicator.barrier(Deadline::after(seconds(30)));
  });
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(names[0], names[1]);
}

// Sender and receiver cut a message alike: blocks cover it without gaps, in 16-byte steps.
TEST(PeerLayoutTest, BlocksCoverMessages) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{16}, size_t{17}, size_t{1023}, size_t{1024}, size_t{100003}}) {
    EXPECT_EQ(peer_layout::block_begin(bytes, 0), 0u);
    EXPECT_EQ(peer_layout::block_begin(bytes, kPeerBlocks), bytes);
    for (int block = 0; block < kPeerBlocks; ++block) {
      const size_t begin = peer_layout::block_begin(bytes, block);
      EXPECT_LE(begin, peer_layout::block_begin(bytes, block + 1));
      EXPECT_TRUE(begin % 16 == 0 || begin == bytes);
    }
  }
}

// No two words of a sum share a place, also across the double buffer, and all places are inside and 16-byte aligned.
TEST(PeerLayoutTest, SumPlacesAreDistinct) {
  constexpr int64_t kItems = 37;
  constexpr int kNodes = 5;
  constexpr int64_t kFloats = kItems * 4 * kNodes;
  std::set<int64_t> seen;
  for (uint32_t sequence : {6u, 7u}) {
    for (int node = 0; node < kNodes; ++node) {
      for (int half = 0; half < 2; ++half) {
        for (int64_t item = 0; item < kItems; ++item) {
          const int64_t at = peer_layout::sum_offset(sequence, kFloats, node, half, kItems, item);
          EXPECT_EQ(at % 2, 0);
          EXPECT_LE(at + 2, 2 * kFloats);
          EXPECT_TRUE(seen.insert(at).second) << "node " << node << " half " << half << " item " << item;
          EXPECT_TRUE(seen.insert(at + 1).second);
        }
      }
    }
  }
}

// The plan of the fused sum is the tree: run on numbers, rank by rank, it gives what one rank alone gets.
TEST(PeerLayoutTest, PlanIsTheTree) {
  for (int64_t slices : {2, 4, 8}) {
    for (int64_t world = 2; world <= slices; ++world) {
      std::vector<std::string> nodes(kPeerSumNodes);
      for (int64_t rank = 0; rank < world; ++rank) {
        const PeerSum sum = peer_sum_plan(slices, world, rank);
        const SliceRange mine = owned_slices(slices, world, rank);
        std::vector<std::string> parts;
        for (int64_t s = 0; s < mine.count; ++s) parts.push_back(std::to_string(mine.first + s));
        ASSERT_EQ(sum.mine.part_count, static_cast<int>(parts.size()));
        for (int s = 0; s < sum.mine.step_count; ++s) {
          std::string& into = parts[static_cast<size_t>(sum.mine.steps[s].dst)];
          into = "(" + into + "+" + parts[static_cast<size_t>(sum.mine.steps[s].src)] + ")";
        }
        ASSERT_LE(sum.root_count, kPeerSumOwn);
        for (int r = 0; r < sum.root_count; ++r) {
          EXPECT_EQ(sum.owner[sum.first_node + r], rank);
          nodes[static_cast<size_t>(sum.first_node + r)] = parts[static_cast<size_t>(sum.roots[r])];
        }
      }
      const PeerSum sum = peer_sum_plan(slices, world, 0);
      for (int s = 0; s < sum.finish_count; ++s) {
        std::string& into = nodes[static_cast<size_t>(sum.finish[s].dst)];
        into = "(" + into + "+" + nodes[static_cast<size_t>(sum.finish[s].src)] + ")";
      }
      const std::vector<std::string> wanted = {"(0+1)", "((0+1)+(2+3))", "(((0+1)+(2+3))+((4+5)+(6+7)))"};
      EXPECT_EQ(nodes[0], wanted[slices == 2 ? 0 : slices == 4 ? 1 : 2]) << slices << " slices, world " << world;
    }
  }
}

}  // namespace
}  // namespace tensorfold
