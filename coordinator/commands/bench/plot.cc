#include "coordinator/commands/bench/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

namespace tensorfold {
namespace {

// Pixels. A plot's frame is kWidth x kHeight; labels and legend stand around it.
constexpr double kWidth = 440, kHeight = 300, kLeft = 76, kTop = 96, kBetween = 110, kAxis = 58, kLegendLine = 18;
constexpr std::array<const char*, 6> kColours = {"#1b6ca8", "#c8553d", "#3c8d40", "#7b4ea3", "#b8860b", "#4a4a4a"};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

// A step of 1, 2 or 5 times a power of ten that divides `top` into about five.
double nice_step(double top) {
  const double raw = top / 5, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power) return factor * power;
  }
  return 10 * power;
}

// One plot's coordinates.
struct Frame {
  double left = 0;
  double low_x = 0, high_x = 1;  // log2
  double step = 1, top = 1;
  std::set<double> ticks;

  Frame(const Plot& plot, double at) : left(at) {
    double highest = 0;
    for (const PlotLine& line : plot.lines) {
      for (const PlotPoint& point : line.points) {
        ticks.insert(point.x);
        highest = std::max(highest, point.y);
      }
    }
    step = nice_step(highest > 0 ? highest : 1);
    top = std::max(1.0, std::ceil(highest / step * 1.02)) * step;
    if (ticks.empty()) ticks.insert(1);
    low_x = std::log2(*ticks.begin()) - 0.25;
    high_x = std::log2(*ticks.rbegin()) + 0.25;
  }
  double x(double value) const { return left + (std::log2(value) - low_x) / (high_x - low_x) * kWidth; }
  double y(double value) const { return kTop + kHeight - value / top * kHeight; }
};

void draw_axes(const Plot& plot, const Frame& frame, std::string* out) {
  *out +=
      fmt::format(R"(<text x="{:.1f}" y="{:.1f}" class="head">{}</text>)", frame.left, kTop - 12, escaped(plot.title)) +
      "\n";
  const int steps = static_cast<int>(std::lround(frame.top / frame.step));
  for (int i = 0; i <= steps; ++i) {
    const double value = i * frame.step;
    *out += fmt::format(R"(<line x1="{0:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{2:.1f}" class="grid"/>)", frame.left,
                        frame.left + kWidth, frame.y(value));
    *out += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" class="tick" text-anchor="end">{:.6g}</text>)", frame.left - 8,
                        frame.y(value) + 4, value) +
            "\n";
  }
  for (const double tick : frame.ticks) {
    *out += fmt::format(R"(<line x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}" class="axis"/>)", frame.x(tick),
                        kTop + kHeight, kTop + kHeight + 5);
    *out += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" class="tick" text-anchor="middle">{:.6g}</text>)", frame.x(tick),
                        kTop + kHeight + 20, tick) +
            "\n";
  }
  *out += fmt::format(R"(<path d="M{0:.1f} {1:.1f} V{2:.1f} H{3:.1f}" class="axis"/>)", frame.left, kTop,
                      kTop + kHeight, frame.left + kWidth);
  *out += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" class="label" text-anchor="middle">{}</text>)",
                      frame.left + kWidth / 2, kTop + kHeight + 42, escaped(plot.x_label));
  *out += fmt::format(
              R"svg(<text transform="translate({:.1f} {:.1f}) rotate(-90)" class="label" text-anchor="middle">{})svg",
              frame.left - 54, kTop + kHeight / 2, escaped(plot.y_label)) +
          "</text>\n";
}

void draw_line(const PlotLine& line, const Frame& frame, size_t legend_row, std::string* out) {
  const char* const colour = kColours[line.colour % kColours.size()];
  const std::string stroke = fmt::format(R"(fill="none" stroke="{}" stroke-width="{}"{})", colour,
                                         line.dashed ? "1.5" : "2", line.dashed ? R"( stroke-dasharray="5 4")" : "");
  std::string points;
  for (const PlotPoint& point : line.points) {
    points += fmt::format("{}{:.1f},{:.1f}", points.empty() ? "" : " ", frame.x(point.x), frame.y(point.y));
  }
  *out += fmt::format(R"(<polyline points="{}" {}/>)", points, stroke) + "\n";
  for (const PlotPoint& point : line.points) {
    if (line.dashed) break;
    *out += fmt::format(R"(<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="{}"/>)", frame.x(point.x), frame.y(point.y),
                        colour);
  }
  const double y = kTop + kHeight + kAxis + static_cast<double>(legend_row) * kLegendLine;
  *out += fmt::format(R"(<line x1="{0:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{2:.1f}" {3}/>)", frame.left, frame.left + 28,
                      y, stroke);
  *out += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" class="tick">{}</text>)", frame.left + 36, y + 4,
                      escaped(line.label)) +
          "\n";
}

}  // namespace

std::string svg_plots(const std::string& title, const std::string& subtitle, const std::vector<Plot>& plots) {
  size_t legend = 0;
  for (const Plot& plot : plots) legend = std::max(legend, plot.lines.size());
  const double width = kLeft + static_cast<double>(plots.size()) * (kWidth + kBetween) - kBetween + 30;
  const double height = kTop + kHeight + kAxis + static_cast<double>(legend) * kLegendLine + 10;
  std::string out = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" viewBox="0 0 {0:.0f} {1:.0f}">)",
      width, height);
  out += R"(
<style>
text { font-family: sans-serif; fill: #222222; }
.title { font-size: 16px; font-weight: bold; }
.head { font-size: 13px; font-weight: bold; }
.label { font-size: 12px; }
.tick { font-size: 11px; }
.axis { stroke: #222222; stroke-width: 1; fill: none; }
.grid { stroke: #dddddd; stroke-width: 1; }
</style>
<rect width="100%" height="100%" fill="#ffffff"/>
)";
  out += fmt::format(R"(<text x="16" y="28" class="title">{}</text>)", escaped(title)) + "\n";
  out += fmt::format(R"(<text x="16" y="50" class="label">{}</text>)", escaped(subtitle)) + "\n";
  for (size_t i = 0; i < plots.size(); ++i) {
    const Frame frame(plots[i], kLeft + static_cast<double>(i) * (kWidth + kBetween));
    draw_axes(plots[i], frame, &out);
    for (size_t line = 0; line < plots[i].lines.size(); ++line) {
      if (!plots[i].lines[line].points.empty()) draw_line(plots[i].lines[line], frame, line, &out);
    }
  }
  return out + "</svg>\n";
}

}  // namespace tensorfold
