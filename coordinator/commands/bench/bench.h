// Everything that `tensorfold bench` does, from options to report.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/report.h"
#include "worker/runtime/backend.h"

namespace tensorfold {

struct BenchOptions {
  std::string model;
  std::string drafter;  // folder of a block drafter; empty: none
  int world = 1;
  std::string transport = "local";
  BackendOptions backend;  // of each rank
  std::vector<int> widths = {1, 2, 4, 8, 16};
  std::vector<int> chunks;  // empty: default_chunks()
  int context = 256;        // tokens before a measured window
  int prompt_tokens = 512;
  int reply_tokens = 128;
  std::string prompt = "Name three colours of the rainbow and describe each in one sentence.";
  double seconds = 10;  // about, altogether
};

/// Prompt rows a pass that are measured when none are asked for: 2048 on GPUs, 64, 256, 512 on the CPU.
std::vector<int> default_chunks(const std::string& backend);

/// Must be called before the process has threads when the ranks are processes (UCX). Errors name the option or the
/// rank.
absl::StatusOr<BenchReport> run_bench(const BenchOptions& options);

}  // namespace tensorfold
