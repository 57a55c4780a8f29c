// What every transport must do, run on worlds whose ranks are threads of this process. A transport's test file adds
// communicator_suite.cc to its sources and instantiates CommunicatorSuite with ways to make a world.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/communicator.h"

namespace tensorfold {

using Ranks = std::vector<std::unique_ptr<Communicator>>;

struct TransportUnderTest {
  std::string name;                // letters and digits
  std::function<Ranks(int)> make;  // of a world size; empty on failure, which it reports
};

class CommunicatorSuite : public testing::TestWithParam<TransportUnderTest> {};

inline std::string transport_test_name(const testing::TestParamInfo<TransportUnderTest>& info) {
  return info.param.name;
}

// Runs `body` in one thread a rank and returns the statuses in rank order.
std::vector<absl::Status> on_all_ranks(Ranks& ranks, const std::function<absl::Status(Communicator&)>& body);

}  // namespace tensorfold
