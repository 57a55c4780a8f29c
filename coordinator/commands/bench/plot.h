// Line plots as one SVG file.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tensorfold {

struct PlotPoint {
  double x = 0;
  double y = 0;
};

struct PlotLine {
  std::string label;
  std::vector<PlotPoint> points;  // x ascending
  size_t colour = 0;              // of a palette; lines may share one
  bool dashed = false;            // a reference, without marks
};

/// x goes by powers of two and is positive; y starts at 0.
struct Plot {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<PlotLine> lines;
};

/// The plots side by side under a title, each with axes, marks and legend. Any text is allowed in labels.
std::string svg_plots(const std::string& title, const std::string& subtitle, const std::vector<Plot>& plots);

}  // namespace tensorfold
