// What `tensorfold bench --shape` measured, and how it is shown.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "coordinator/commands/bench/limits.h"
#include "coordinator/commands/bench/report.h"

namespace tensorfold {

/// Windows that end at one context.
struct ContextFigure {
  int64_t context = 0;
  int64_t kv_bytes = 0;  // that a pass reads, all ranks: keys and values of the context in all attention layers
  std::vector<WidthFigure> widths;
};

struct ShapeReport {
  std::string shape;      // as asked for
  std::string format;     // "mlx-4bit"
  std::string kv_format;  // "f32", "bf16", "fp8"
  std::string backend;    // "cuda/sm_90"
  int world = 1;
  int gpus = 0;     // that the ranks share; 0 on the CPU
  int threads = 0;  // of each rank, on the CPU
  int64_t parameters = 0;
  WeightTotals weights;
  int64_t state_bytes = 0;       // recurrent states of one sequence, all ranks; not counted as read
  int64_t attention_values = 0;  // operations / 4 of one row over one key: query heads * head_dim * layers
  MachineLimits limits;
  std::vector<ContextFigure> contexts;
  std::vector<ChunkFigure> prompts;
  std::vector<std::string> left_out;  // a sentence each
  std::vector<LinkFigure> links;

  /// Bytes of weights, keys and values that a pass at this context reads.
  double pass_bytes(const ContextFigure& context) const;
  double roofline_ms(const ContextFigure& context, int rows) const;
  /// Shares of the read limit: weights with keys and values, and weights alone.
  double read_share(const ContextFigure& context, const WidthFigure& figure) const;
  double weight_share(const WidthFigure& figure) const;
  /// Share of the matrix rate: the products of weights alone, and with attention's.
  double matrix_share(const ChunkFigure& figure, bool with_attention) const;
};

/// Tables for a person.
void print_shape_report(const ShapeReport& report, std::ostream& out);
/// One JSON object; every figure of the tables.
std::string shape_report_json(const ShapeReport& report);
/// Two plots over the rows of a pass: milliseconds beside the roofline, and the share of the read limit.
std::string shape_report_svg(const ShapeReport& report);
/// What each line means, for --help.
std::string shape_report_legend();

}  // namespace tensorfold
