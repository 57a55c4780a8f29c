#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "tests/transport/communicator_suite.h"
#include "transport/ucx/ucx_address.h"
#include "transport/ucx/ucx_endpoint.h"

namespace tensorfold {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;

using Endpoints = std::vector<std::unique_ptr<UcxEndpoint>>;

Endpoints make_endpoints(int world, const UcxOptions& options) {
  Endpoints endpoints;
  for (int rank = 0; rank < world; ++rank) {
    auto endpoint = UcxEndpoint::create(options);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    if (!endpoint.ok()) return {};
    endpoints.push_back(*std::move(endpoint));
  }
  return endpoints;
}

UcxMembers members_of(const Endpoints& endpoints, int rank, uint32_t epoch) {
  UcxMembers members{rank, static_cast<int>(endpoints.size()), epoch, {}, {}};
  for (size_t r = 0; r < endpoints.size(); ++r) {
    members.addresses.push_back(endpoints[r]->address());
    members.labels.push_back("host-" + std::to_string(r));
  }
  return members;
}

std::vector<absl::Status> connect_all(Endpoints& endpoints, const std::vector<uint32_t>& epochs, Ranks& ranks,
                                      Deadline deadline) {
  ranks.resize(endpoints.size());
  std::vector<absl::Status> results(endpoints.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < endpoints.size(); ++r) {
    threads.emplace_back([&, r, members = members_of(endpoints, static_cast<int>(r), epochs[r])] {
      auto rank = endpoints[r]->connect(members, deadline);
      results[r] = rank.status();
      if (rank.ok()) ranks[r] = *std::move(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

Ranks make_ucx(int world, const UcxOptions& options) {
  Endpoints endpoints = make_endpoints(world, options);
  Ranks ranks;
  for (const absl::Status& status :
       connect_all(endpoints, std::vector<uint32_t>(endpoints.size(), 1), ranks, Deadline::after(seconds(30)))) {
    EXPECT_TRUE(status.ok()) << status;
    if (!status.ok()) return {};
  }
  return ranks;
}

TransportUnderTest ucx_case(const std::string& name, const UcxOptions& options) {
  return {name, [options](int world) { return make_ucx(world, options); }};
}

INSTANTIATE_TEST_SUITE_P(Ucx, CommunicatorSuite,
                         testing::Values(ucx_case("SharedMemory", {"posix,cma,self", "", true, {}}),
                                         ucx_case("Default", {}),
                                         ucx_case("WithoutFailureDetection", {"posix,cma,self", "", false, {}}),
                                         ucx_case("Tcp", {"tcp", "lo", true, {}})),
                         transport_test_name);

// A rank of another membership epoch is refused at connect, with both epochs.
TEST(UcxEndpointTest, WrongEpochIsRefused) {
  Endpoints endpoints = make_endpoints(2, {});
  Ranks ranks;
  std::vector<absl::Status> results = connect_all(endpoints, {7, 8}, ranks, Deadline::after(seconds(5)));
  EXPECT_TRUE(absl::IsFailedPrecondition(results[0]) || absl::IsFailedPrecondition(results[1]))
      << results[0] << results[1];
  for (const absl::Status& status : results) {
    EXPECT_FALSE(status.ok());
    if (!absl::IsFailedPrecondition(status)) continue;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("epoch"), HasSubstr("7"), HasSubstr("8")));
  }
}

// A peer that never connects is named when the deadline of connect() ends.
TEST(UcxEndpointTest, ConnectNamesTheMissingPeer) {
  Endpoints endpoints = make_endpoints(2, {});
  auto rank = endpoints[0]->connect(members_of(endpoints, 0, 1), Deadline::after(std::chrono::milliseconds(300)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(rank.status())) << rank.status();
  EXPECT_THAT(std::string(rank.status().message()), AllOf(HasSubstr("connect"), HasSubstr("rank 1 (host-1)")));
}

// An endpoint is spent by its first connect: a new epoch cannot get the old one's messages.
TEST(UcxEndpointTest, IsSpentByConnect) {
  Endpoints endpoints = make_endpoints(1, {});
  const UcxMembers members = members_of(endpoints, 0, 1);
  EXPECT_TRUE(endpoints[0]->connect(members, Deadline::after(seconds(5))).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(endpoints[0]->connect(members, Deadline::after(seconds(5))).status()));
}

// Damaged addresses, and those of another UCX release, are refused by rank before UCX reads them.
TEST(UcxEndpointTest, BadAddressesAreRefused) {
  auto connect_with = [](auto change) {
    Endpoints endpoints = make_endpoints(2, {});
    UcxMembers members = members_of(endpoints, 0, 1);
    change(members);
    return endpoints[0]->connect(members, Deadline::after(seconds(2))).status();
  };
  for (size_t keep : {size_t{0}, size_t{10}, size_t{16}, size_t{40}}) {
    absl::Status status = connect_with([&](UcxMembers& members) { members.addresses[1].resize(keep); });
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 (host-1)"));
  }
  absl::Status status = connect_with([](UcxMembers& members) { members.addresses[1].back() ^= std::byte{1}; });
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 1 (host-1)"), HasSubstr("damaged")));
  status = connect_with([](UcxMembers& members) { members.addresses[1].resize(kMaxUcxAddress + 1); });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  status = connect_with([](UcxMembers& members) { members.addresses[1][4] = std::byte{99}; });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("UCX 99."));
  status = connect_with([](UcxMembers& members) { members.addresses.pop_back(); });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  status = connect_with([](UcxMembers& members) { members.rank = 2; });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

// Options that UCX cannot fulfil are errors at creation, not a silent fallback.
TEST(UcxEndpointTest, ImpossibleOptionsAreRefused) {
  EXPECT_FALSE(UcxEndpoint::create({"no_such_transport", "", true, {}}).ok());
  EXPECT_FALSE(UcxEndpoint::create({"tcp", "no_such_device", true, {}}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(UcxEndpoint::create({"", "", true, {{"KEEPALIVE_INTERVAL", "soon"}}}).status()));
}

// The description tells which transport carries the link, so that a fallback is seen.
TEST(UcxEndpointTest, DescriptionNamesTheTransport) {
  Ranks tcp = make_ucx(2, {"tcp", "lo", true, {}});
  ASSERT_EQ(tcp.size(), 2);
  EXPECT_THAT(tcp[0]->describe(), AllOf(HasSubstr("rank 1 (host-1)"), HasSubstr("tcp/lo")));
  Ranks shm = make_ucx(2, {"posix,self", "", true, {}});
  ASSERT_EQ(shm.size(), 2);
  EXPECT_THAT(shm[0]->describe(), HasSubstr("posix"));
}

}  // namespace
}  // namespace tensorfold
