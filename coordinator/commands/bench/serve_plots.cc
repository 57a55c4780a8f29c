#include "coordinator/commands/bench/serve_plots.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/commands/bench/plot.h"

namespace tensorfold {
namespace {

template <class Value>
PlotLine line(const LoadReport& report, std::string label, size_t colour, const Value& value) {
  PlotLine out;
  out.label = std::move(label);
  out.colour = colour;
  for (const LevelFigures& level : report.levels) {
    out.points.push_back({level.users > 0 ? static_cast<double>(level.users) : level.rate, value(level)});
  }
  std::sort(out.points.begin(), out.points.end(), [](const auto& a, const auto& b) { return a.x < b.x; });
  return out;
}

Plot times(const LoadReport& report, const std::string& title, const std::string& x, SampleSummary LevelFigures::*of) {
  Plot plot{title, x, "milliseconds", {}};
  plot.lines.push_back(line(report, "p50", 0, [of](const LevelFigures& level) { return (level.*of).p50 * 1000; }));
  plot.lines.push_back(line(report, "p90", 2, [of](const LevelFigures& level) { return (level.*of).p90 * 1000; }));
  plot.lines.push_back(line(report, "p99", 1, [of](const LevelFigures& level) { return (level.*of).p99 * 1000; }));
  return plot;
}

}  // namespace

std::string load_svg(const LoadReport& report) {
  const std::string x = report.options.rates.empty() ? "users at once" : "conversations a second";
  Plot tokens{"Throughput", x, "tokens a second", {}};
  tokens.lines.push_back(line(report, "replies", 0, [](const auto& level) { return level.reply_tokens_per_s; }));
  tokens.lines.push_back(
      line(report, "replies and prompts", 3, [](const auto& level) { return level.total_tokens_per_s; }));
  Plot requests{"Requests", x, "a second", {}};
  requests.lines.push_back(line(report, "completed", 0, [](const auto& level) { return level.requests_per_s; }));
  requests.lines.push_back(line(report, "within both limits", 2, [](const auto& level) { return level.goodput; }));
  return svg_plots(
      fmt::format("{} under load: {}", report.server.model, load_mix_name(report.options.conversation.mix)),
      fmt::format("seed {}, distinct prompts; limits: first token {:g} s, gaps {:g} s; fingerprint {}",
                  report.options.conversation.seed, report.options.ttft_limit_s, report.options.gap_limit_s,
                  report.server.fingerprint.empty() ? "not told" : report.server.fingerprint),
      {tokens, requests, times(report, "First token", x, &LevelFigures::ttft_s),
       times(report, "Gaps between tokens", x, &LevelFigures::gap_s)});
}

}  // namespace tensorfold
