#include "coordinator/commands/bench/shape_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json.hpp>

#include "coordinator/commands/bench/plot.h"

namespace tensorfold {
namespace {

std::string backend_kind(const ShapeReport& report) { return report.backend.substr(0, report.backend.find('/')); }

// The first width's time, which the others are compared with.
double times_first(const ContextFigure& context, const WidthFigure& figure) {
  return figure.best_ms / context.widths.front().best_ms;
}

std::string context_text(int64_t tokens) {
  return tokens % 1024 == 0 ? fmt::format("{}k", tokens / 1024) : fmt::format("{}", tokens);
}

std::string where_text(const ShapeReport& report) {
  const std::string ranks = fmt::format("{} {}", report.world, report.world == 1 ? "rank" : "ranks");
  if (report.gpus > 0) return fmt::format("{} on {} GPU{}", ranks, report.gpus, report.gpus == 1 ? "" : "s");
  return fmt::format("{} of {} thread{}", ranks, report.threads, report.threads == 1 ? "" : "s");
}

void print_passes(const ShapeReport& report, std::ostream& out) {
  for (const ContextFigure& context : report.contexts) {
    out << fmt::format("\npasses at a context of {} tokens: {:.1f} MB of keys and values beside the weights\n",
                       context.context, static_cast<double>(context.kv_bytes) * 1e-6);
    out << fmt::format("{:>6} {:>9} {:>9} {:>9} {:>7} {:>9} {:>12} {:>10} {:>7}\n", "rows", "best ms", "p50 ms", "GB/s",
                       "% read", "% weights", "roofline ms", "x roofline", "x first");
    for (const WidthFigure& figure : context.widths) {
      const double roofline = report.roofline_ms(context, figure.rows);
      out << fmt::format("{:>6} {:>9.3f} {:>9.3f} {:>9.1f} {:>6.1f}% {:>8.1f}% {:>12.3f} {:>10.2f} {:>7.2f}\n",
                         figure.rows, figure.best_ms, figure.median_ms,
                         report.pass_bytes(context) / figure.best_ms * 1e-6, 100 * report.read_share(context, figure),
                         100 * report.weight_share(figure), roofline, figure.best_ms / roofline,
                         times_first(context, figure));
    }
  }
}

}  // namespace

double ShapeReport::pass_bytes(const ContextFigure& context) const {
  return static_cast<double>(weights.bytes + context.kv_bytes);
}

double ShapeReport::roofline_ms(const ContextFigure& context, int rows) const {
  const double read = pass_bytes(context) / limits.bandwidth;
  const double multiply = 2.0 * rows * static_cast<double>(weights.values) / limits.matrix_rate;
  return std::max(read, multiply) * 1e3;
}

double ShapeReport::read_share(const ContextFigure& context, const WidthFigure& figure) const {
  return pass_bytes(context) / (figure.best_ms * 1e-3) / limits.bandwidth;
}

double ShapeReport::weight_share(const WidthFigure& figure) const {
  return static_cast<double>(weights.bytes) / (figure.best_ms * 1e-3) / limits.bandwidth;
}

double ShapeReport::matrix_share(const ChunkFigure& figure, bool with_attention) const {
  const double rows = figure.chunk;
  double operations = 2.0 * rows * static_cast<double>(weights.values - weights.head_values) +
                      2.0 * static_cast<double>(weights.head_values);  // only the last row's logits are wanted
  if (with_attention) {
    // A row sees all keys up to its own; a key costs a multiply-add a value for its score and one for its sum.
    const double keys = rows * static_cast<double>(figure.start) + rows * (rows + 1) / 2;
    operations += 4.0 * keys * static_cast<double>(attention_values);
  }
  return operations / figure.best_s / limits.matrix_rate;
}

void print_shape_report(const ShapeReport& report, std::ostream& out) {
  out << fmt::format("{} in {}, random weights: {}, {}, keys and values in {}\n", report.shape, report.format,
                     report.backend, where_text(report), report.kv_format);
  out << fmt::format("{:.2f} billion parameters; a pass reads {:.1f} MB of weights\n",
                     static_cast<double>(report.parameters) * 1e-9, static_cast<double>(report.weights.bytes) * 1e-6);
  out << fmt::format("limits: reads {:.1f} GB/s, {:.1f} GFLOP/s {}\n", report.limits.bandwidth * 1e-9,
                     report.limits.matrix_rate * 1e-9, matrix_rate_name(backend_kind(report)));
  print_passes(report, out);
  if (!report.prompts.empty()) {
    out << fmt::format("\nprompts, one pass\n{:>6} {:>8} {:>10} {:>10} {:>9} {:>17}\n", "rows", "after", "best ms",
                       "tok/s", "% matrix", "% with attention");
  }
  for (const ChunkFigure& figure : report.prompts) {
    out << fmt::format("{:>6} {:>8} {:>10.3f} {:>10.1f} {:>8.1f}% {:>16.1f}%\n", figure.chunk, figure.start,
                       figure.best_s * 1e3, figure.chunk / figure.best_s, 100 * report.matrix_share(figure, false),
                       100 * report.matrix_share(figure, true));
  }
  print_links(report.links, /*processes=*/false, out);
  if (!report.left_out.empty()) out << "\n";
  for (const std::string& sentence : report.left_out) out << "left out: " << sentence << "\n";
}

std::string shape_report_json(const ShapeReport& report) {
  boost::json::object root;
  root["shape"] = report.shape;
  root["format"] = report.format;
  root["kv_format"] = report.kv_format;
  root["backend"] = report.backend;
  root["world"] = report.world;
  root["gpus"] = report.gpus;
  root["threads"] = report.threads;
  root["parameters"] = report.parameters;
  root["weight_bytes"] = report.weights.bytes;
  root["weight_values"] = report.weights.values;
  root["state_bytes"] = report.state_bytes;
  root["limits"] = {{"read_bytes_per_s", report.limits.bandwidth},
                    {"matrix_flop_per_s", report.limits.matrix_rate},
                    {"matrix", matrix_rate_name(backend_kind(report))}};
  boost::json::array contexts;
  for (const ContextFigure& context : report.contexts) {
    boost::json::array widths;
    for (const WidthFigure& figure : context.widths) {
      const double roofline = report.roofline_ms(context, figure.rows);
      widths.push_back({{"rows", figure.rows},
                        {"passes", figure.passes},
                        {"best_ms", figure.best_ms},
                        {"p50_ms", figure.median_ms},
                        {"read_bytes_per_s", report.pass_bytes(context) / figure.best_ms * 1e3},
                        {"read_share", report.read_share(context, figure)},
                        {"weight_share", report.weight_share(figure)},
                        {"roofline_ms", roofline},
                        {"times_roofline", figure.best_ms / roofline},
                        {"times_first", times_first(context, figure)}});
    }
    contexts.push_back({{"context", context.context}, {"kv_bytes", context.kv_bytes}, {"widths", std::move(widths)}});
  }
  root["contexts"] = std::move(contexts);
  boost::json::array prompts;
  for (const ChunkFigure& figure : report.prompts) {
    prompts.push_back({{"rows", figure.chunk},
                       {"start", figure.start},
                       {"passes", figure.passes},
                       {"best_ms", figure.best_s * 1e3},
                       {"p50_ms", figure.median_s * 1e3},
                       {"tokens_per_s", figure.chunk / figure.best_s},
                       {"matrix_share", report.matrix_share(figure, false)},
                       {"matrix_share_with_attention", report.matrix_share(figure, true)}});
  }
  root["prompts"] = std::move(prompts);
  boost::json::array links;
  for (const LinkFigure& figure : report.links) {
    links.push_back({{"what", figure.what}, {"p50_us", figure.p50_us}, {"p99_us", figure.p99_us}});
  }
  root["links"] = std::move(links);
  boost::json::array left_out;
  for (const std::string& sentence : report.left_out) left_out.push_back(boost::json::value(sentence));
  root["left_out"] = std::move(left_out);
  return boost::json::serialize(root);
}

std::string shape_report_svg(const ShapeReport& report) {
  Plot times{.title = "Time of a pass", .x_label = "rows of the pass", .y_label = "milliseconds, best", .lines = {}};
  Plot shares{.title = "Bytes read: weights, keys and values",
              .x_label = "rows of the pass",
              .y_label = "% of the measured read limit",
              .lines = {}};
  for (size_t i = 0; i < report.contexts.size(); ++i) {
    const ContextFigure& context = report.contexts[i];
    const std::string label = context_text(context.context) + " context";
    PlotLine measured{.label = label, .points = {}, .colour = i, .dashed = false};
    PlotLine roofline{.label = label + ", roofline", .points = {}, .colour = i, .dashed = true};
    PlotLine share = measured;
    for (const WidthFigure& figure : context.widths) {
      measured.points.push_back({static_cast<double>(figure.rows), figure.best_ms});
      roofline.points.push_back({static_cast<double>(figure.rows), report.roofline_ms(context, figure.rows)});
      share.points.push_back({static_cast<double>(figure.rows), 100 * report.read_share(context, figure)});
    }
    times.lines.push_back(std::move(measured));
    times.lines.push_back(std::move(roofline));
    shares.lines.push_back(std::move(share));
  }
  const std::string title = fmt::format("{}, {}, keys and values in {}: {}, {}", report.shape, report.format,
                                        report.kv_format, report.backend, where_text(report));
  const std::string subtitle =
      fmt::format("limits of the same run: reads {:.0f} GB/s, {:.1f} TFLOP/s {}; a pass reads {:.2f} GB of weights",
                  report.limits.bandwidth * 1e-9, report.limits.matrix_rate * 1e-12,
                  matrix_rate_name(backend_kind(report)), static_cast<double>(report.weights.bytes) * 1e-9);
  return svg_plots(title, subtitle, {times, shares});
}

std::string shape_report_legend() {
  return R"(With --shape the weights are random, of the sizes that a shape file states; no checkpoint is needed:
  passes    one verify window whose last row stands at the context, which is not computed: its keys and values are
            whatever the cache began with (on the CPU memory that was never written, which the caches hold: long contexts
            look faster there than they are). GB/s and "% read" count weights, keys and values; "% weights" the weights
            alone. The roofline is the larger of those bytes over the read limit and the products of the weights over
            the matrix rate. "x first": the time over that of the first width.
  prompts   one pass of so many rows after so many tokens. "% matrix" counts the products of the weights, "% with
            attention" also those of queries with keys and of weights with values, each against the matrix rate: fp32
            multiply-adds on the CPU, bf16 mma.sync on GPUs.
  left out  contexts that this model or this machine's memory cannot hold.)";
}

}  // namespace tensorfold
