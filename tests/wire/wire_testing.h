// Samples of wire messages, and messages that were changed and sealed anew with a right checksum, so that a test
// reaches what lies behind it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "transport/pass/plan.h"

namespace tensorfold {

inline PassPlan sample_plan() {
  PassPlan plan;
  plan.epoch = 3;
  plan.sequence = 41;
  plan.orders.drops = {3, 65535};
  plan.orders.takes = {{1023, 4}, {0, 5}};
  plan.orders.copies = {{7, 8}, {7, 1048575}};
  plan.orders.saves.resize(2);
  plan.orders.saves[0] = {.ticket = 5,
                          .key = {1, 2},
                          .parent = {3, 4},
                          .first_position = 2048,
                          .tokens = {1, 2, 3},
                          .pages = {9},
                          .snapshot = 4,
                          .committed = 2050,
                          .kept = {3, 8}};
  plan.orders.saves[1].tokens.assign(65, 7);
  plan.orders.saves[1].pages = {1, 2};
  plan.orders.loads = {{LoadStep::kFetch, 6, {5, 6}, {}, kNoSnapshot, ""},
                       {LoadStep::kPlace, 7, {}, {5, 6}, 9, ""},
                       {LoadStep::kPin, 8, {7, 8}, {}, kNoSnapshot, "manual"}};
  plan.release = {7, 1023};
  SequencePlan prompt;
  prompt.slot = 2;
  prompt.fresh = true;
  prompt.use_mtp = true;
  prompt.tokens = {5, 6, 7, 0, 2147483647};
  prompt.certain = 5;
  prompt.new_pages = {11, 0, 1048575};
  prompt.wants = {{4, kFullRow}};
  SequencePlan window;
  window.slot = 0;
  window.use_mtp = true;
  window.first_position = 130;
  window.accepted = 15;
  window.certain = 1;
  window.mtp_steps = 3;
  window.tokens = {9};
  window.wants = {{0, 1}, {1, 4096}, {2, kFullRow}, {2, kDrawn, 0xFEDCBA9876543210u, 0.75}, {3, kFullRow}};
  SequencePlan resumed;
  resumed.slot = 5;
  resumed.fresh = true;
  resumed.snapshot = 9;
  resumed.first_position = 131;
  resumed.accepted = 2;
  resumed.certain = 2;
  resumed.tokens = {4, 5};
  resumed.new_pages = {5, 6, 7};
  SequencePlan block;
  block.slot = 6;
  block.use_block = true;
  block.first_position = 40;
  block.certain = 1;
  block.block_drafts = 7;
  block.tokens = {3};
  block.wants = {{0, 1}, {7, 1}};
  plan.sequences = {prompt, window, resumed, block};
  return plan;
}

inline PassReport sample_report() {
  PassReport report;
  report.epoch = 3;
  report.sequence = 41;
  report.rank = 1;
  report.compute_us = 812;
  report.events = {{6, true, ""}, {5, false, "no space left"}};
  report.rows.resize(2);
  report.rows[0] = {2, 4, 256, {}, {1.5f, -0.0f, std::numeric_limits<float>::infinity(), 1e-45f}};
  report.rows[1] = {0, 1, 256, {{3.25f, 300}, {3.25f, 301}, {-1.0f, 256}}, {}};
  return report;
}

/// Where a field of one sequence lies in an encoded plan of exactly that sequence and no releases.
inline constexpr size_t kPlanHeader = 4 + 4 + 1 + 4 + 8 + 5 * 4 + 4 + 4;
/// magic, version, epoch, sequence, rank, compute_us.
inline constexpr size_t kReportHeader = 4 + 4 + 4 + 8 + 4 + 4;

/// `bytes` with its last eight replaced by the right checksum of the others.
inline std::vector<std::byte> sealed(std::vector<std::byte> bytes) {
  const size_t body = bytes.size() - 8;
  const uint64_t sum = XXH64(bytes.data(), body, 0);
  std::memcpy(bytes.data() + body, &sum, 8);
  return bytes;
}

template <typename T>
std::vector<std::byte> with(std::vector<std::byte> bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
  return sealed(std::move(bytes));
}

/// The largest single allocation since the last call of reset_largest_allocation().
size_t largest_allocation();
void reset_largest_allocation();

#define EXPECT_REFUSED(result, code_, ...)                                               \
  do {                                                                                   \
    const auto& refused = (result);                                                      \
    ASSERT_FALSE(refused.ok());                                                          \
    EXPECT_EQ(refused.status().code(), code_) << refused.status();                       \
    EXPECT_THAT(std::string(refused.status().message()), ::testing::AllOf(__VA_ARGS__)); \
  } while (false)

}  // namespace tensorfold
