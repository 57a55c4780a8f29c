// What `tensorfold bench` measured, and how it is shown.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "coordinator/commands/bench/limits.h"

namespace tensorfold {

/// Weights of all ranks together (they share this machine's memory and cores).
struct WeightTotals {
  int64_t bytes = 0;        // that a pass reads
  int64_t values = 0;       // multiply-adds a row
  int64_t head_values = 0;  // of those, the vocabulary head's: rows whose logits nobody wants skip it
};

/// Passes of one verify window of `rows` rows.
struct WidthFigure {
  int rows = 0;
  int passes = 0;
  double best_ms = 0;
  double median_ms = 0;
};

/// A prompt of `tokens` tokens, `chunk` rows a pass, from an empty cache.
struct PromptFigure {
  int chunk = 0;
  int tokens = 0;
  int prompts = 0;
  double best_s = 0;
};

/// One pass of `chunk` prompt rows after `start` tokens.
struct ChunkFigure {
  int chunk = 0;
  int64_t start = 0;
  int passes = 0;
  double best_s = 0;
  double median_s = 0;
};

/// One reply through the scheduler; the fastest of several.
struct DecodeFigure {
  std::string draft;
  uint32_t tokens = 0;
  uint64_t rounds = 0;
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  double seconds = 0;  // first token to last
  std::string token_sha;
};

/// A latency between ranks as rank 0 sees it, microseconds. p99 is 0 where only medians were taken.
struct LinkFigure {
  std::string what;
  double p50_us = 0;
  double p99_us = 0;
};

struct BenchReport {
  std::string model;
  std::string backend;  // "cpu/avx512"
  std::string transport;
  int world = 1;
  int threads = 0;    // of each rank
  int processes = 1;  // that the ranks ran in
  int context = 0;    // tokens that width passes attend to
  WeightTotals weights;
  MachineLimits limits;
  std::vector<WidthFigure> widths;
  std::vector<PromptFigure> prompts;
  std::vector<DecodeFigure> decodes;
  std::vector<LinkFigure> links;

  double roofline_ms(const WidthFigure& figure) const;
  double bandwidth_share(const WidthFigure& figure) const;
  double fma_share(const PromptFigure& figure) const;
};

/// "between ranks" and its lines; nothing when there are none.
void print_links(const std::vector<LinkFigure>& links, bool processes, std::ostream& out);

/// Tables for a person.
void print_report(const BenchReport& report, std::ostream& out);
/// One JSON object; every figure of the tables under the same names.
std::string report_json(const BenchReport& report);
/// What each line means, for --help.
std::string report_legend();

}  // namespace tensorfold
