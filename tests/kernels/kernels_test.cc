// Gives every kernel check to GoogleTest under its own name. What each protects is said at the check (*_checks.cc).
#include <gtest/gtest.h>

#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

class KernelCheck : public testing::TestWithParam<NamedCheck> {};

TEST_P(KernelCheck, Holds) {
  Checker checker;
  GetParam().run(checker);
  for (const std::string& failure : checker.failures()) ADD_FAILURE() << failure;
}

INSTANTIATE_TEST_SUITE_P(Kernels, KernelCheck, testing::ValuesIn(all_checks().begin(), all_checks().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tensorfold
