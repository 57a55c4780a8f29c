#include "coordinator/commands/bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json.hpp>

namespace tensorfold {
namespace {

double acceptance(const DecodeFigure& figure) {
  return figure.drafted == 0 ? 0 : static_cast<double>(figure.accepted) / static_cast<double>(figure.drafted);
}

double rows_a_pass(const DecodeFigure& figure) {
  return figure.rounds == 0 ? 0 : 1 + static_cast<double>(figure.drafted) / static_cast<double>(figure.rounds);
}

// Weight bytes read a second over the whole reply, as a share of the limit. A pass with MTP steps reads more than that.
double reply_read_share(const BenchReport& report, const DecodeFigure& figure) {
  if (figure.seconds <= 0) return 0;
  return static_cast<double>(report.weights.bytes) * static_cast<double>(figure.rounds) / figure.seconds /
         report.limits.bandwidth;
}

double tokens_a_second(const DecodeFigure& figure) {
  return figure.seconds > 0 && figure.tokens > 1 ? (figure.tokens - 1) / figure.seconds : 0;
}

}  // namespace

double BenchReport::roofline_ms(const WidthFigure& figure) const {
  const double read = static_cast<double>(weights.bytes) / limits.bandwidth;
  const double multiply = 2.0 * figure.rows * static_cast<double>(weights.values) / limits.matrix_rate;
  return std::max(read, multiply) * 1e3;
}

double BenchReport::bandwidth_share(const WidthFigure& figure) const {
  return static_cast<double>(weights.bytes) / (figure.best_ms * 1e-3) / limits.bandwidth;
}

double BenchReport::fma_share(const PromptFigure& figure) const {
  const double operations =
      2.0 * figure.tokens * static_cast<double>(weights.values - weights.head_values) +
      2.0 * static_cast<double>(weights.head_values);  // one row's logits are wanted: the last one's
  return operations / figure.best_s / limits.matrix_rate;
}

void print_report(const BenchReport& report, std::ostream& out) {
  out << fmt::format("{}: {}, {} {} of {} {} over {}\n", report.model, report.backend, report.world,
                     report.world == 1 ? "rank" : "ranks", report.threads, report.threads == 1 ? "thread" : "threads",
                     report.world == 1 ? "nothing" : report.transport);
  out << fmt::format("limits: reads {:.1f} GB/s, {:.1f} GFLOP/s {}; a pass reads {:.1f} MB of weights\n",
                     report.limits.bandwidth * 1e-9, report.limits.matrix_rate * 1e-9,
                     matrix_rate_name(report.backend.substr(0, report.backend.find('/'))),
                     static_cast<double>(report.weights.bytes) * 1e-6);
  out << fmt::format("\npasses at a context of {} tokens\n", report.context);
  out << fmt::format("{:>6} {:>9} {:>9} {:>8} {:>7} {:>12} {:>10}\n", "rows", "best ms", "p50 ms", "GB/s", "% read",
                     "roofline ms", "x roofline");
  for (const WidthFigure& figure : report.widths) {
    const double roofline = report.roofline_ms(figure);
    out << fmt::format("{:>6} {:>9.3f} {:>9.3f} {:>8.2f} {:>6.1f}% {:>12.3f} {:>10.2f}\n", figure.rows, figure.best_ms,
                       figure.median_ms, static_cast<double>(report.weights.bytes) / figure.best_ms * 1e-6,
                       100 * report.bandwidth_share(figure), roofline, figure.best_ms / roofline);
  }
  out << fmt::format("\nprompts from an empty cache\n{:>6} {:>8} {:>10} {:>7}\n", "chunk", "tokens", "tok/s", "% fma");
  for (const PromptFigure& figure : report.prompts) {
    out << fmt::format("{:>6} {:>8} {:>10.1f} {:>6.1f}%\n", figure.chunk, figure.tokens, figure.tokens / figure.best_s,
                       100 * report.fma_share(figure));
  }
  out << fmt::format("\nreplies through the scheduler\n{:>6} {:>8} {:>9} {:>11} {:>11} {:>10} {:>7}  {}\n", "draft",
                     "tokens", "tok/s", "rows a pass", "acceptance", "ms a pass", "% read", "token_sha");
  for (const DecodeFigure& figure : report.decodes) {
    const double ms = figure.rounds == 0 ? 0 : figure.seconds * 1e3 / static_cast<double>(figure.rounds);
    out << fmt::format("{:>6} {:>8} {:>9.1f} {:>11.2f} {:>10.1f}% {:>10.3f} {:>6.1f}%  {}\n", figure.draft,
                       figure.tokens, tokens_a_second(figure), rows_a_pass(figure), 100 * acceptance(figure), ms,
                       100 * reply_read_share(report, figure), figure.token_sha);
  }
  print_links(report.links, report.processes > 1, out);
}

void print_links(const std::vector<LinkFigure>& links, bool processes, std::ostream& out) {
  if (links.empty()) return;
  out << fmt::format("\nbetween ranks ({})\n", processes ? "one process each" : "threads of one process");
  for (const LinkFigure& figure : links) {
    out << fmt::format("  {:<34} p50 {:>8.1f} us", figure.what, figure.p50_us);
    if (figure.p99_us > 0) out << fmt::format("   p99 {:>8.1f} us", figure.p99_us);
    out << "\n";
  }
}

std::string report_json(const BenchReport& report) {
  boost::json::object root;
  root["model"] = report.model;
  root["backend"] = report.backend;
  root["transport"] = report.world == 1 ? "none" : report.transport;
  root["world"] = report.world;
  root["threads"] = report.threads;
  root["processes"] = report.processes;
  root["context"] = report.context;
  root["weight_bytes"] = report.weights.bytes;
  root["limits"] = {{"read_bytes_per_s", report.limits.bandwidth}, {"fma_flop_per_s", report.limits.matrix_rate}};
  boost::json::array widths;
  for (const WidthFigure& figure : report.widths) {
    const double roofline = report.roofline_ms(figure);
    widths.push_back({{"rows", figure.rows},
                      {"passes", figure.passes},
                      {"best_ms", figure.best_ms},
                      {"p50_ms", figure.median_ms},
                      {"read_bytes_per_s", static_cast<double>(report.weights.bytes) / figure.best_ms * 1e3},
                      {"read_share", report.bandwidth_share(figure)},
                      {"roofline_ms", roofline},
                      {"times_roofline", figure.best_ms / roofline}});
  }
  root["widths"] = std::move(widths);
  boost::json::array prompts;
  for (const PromptFigure& figure : report.prompts) {
    prompts.push_back({{"chunk", figure.chunk},
                       {"tokens", figure.tokens},
                       {"prompts", figure.prompts},
                       {"tokens_per_s", figure.tokens / figure.best_s},
                       {"fma_share", report.fma_share(figure)}});
  }
  root["prompts"] = std::move(prompts);
  boost::json::array decodes;
  for (const DecodeFigure& figure : report.decodes) {
    decodes.push_back({{"draft", figure.draft},
                       {"tokens", figure.tokens},
                       {"rounds", figure.rounds},
                       {"drafted", figure.drafted},
                       {"accepted", figure.accepted},
                       {"acceptance", acceptance(figure)},
                       {"rows_per_pass", rows_a_pass(figure)},
                       {"tokens_per_s", tokens_a_second(figure)},
                       {"read_share", reply_read_share(report, figure)},
                       {"token_sha", figure.token_sha}});
  }
  root["decodes"] = std::move(decodes);
  boost::json::array links;
  for (const LinkFigure& figure : report.links) {
    links.push_back({{"what", figure.what}, {"p50_us", figure.p50_us}, {"p99_us", figure.p99_us}});
  }
  root["links"] = std::move(links);
  return boost::json::serialize(root);
}

std::string report_legend() {
  return R"(What the lines mean:
  limits    what this machine does with the threads of all ranks: bytes a second read from memory (an array far
            larger than the caches), and fp32 fused multiply-adds from registers, two operations each. Measured
            between the other figures; the best turn counts, here as there.
  passes    one verify window through every layer, the head and the choice of candidates: the best and the median
            pass, the weight bytes it read a second and their share of the read limit. The roofline is the larger of
            weight bytes over the read limit and 2 x rows x weights over the fma limit; keys, values and attention
            are not in it, so long contexts look worse than they are.
  prompts   tokens a second of a whole prompt in passes of `chunk` rows, and the share of the fma limit that its
            matrix products alone make up.
  replies   greedy decoding of --prompt through the scheduler that serves, one token a pass ("none") and drafted:
            rows a pass (1 and the drafts), how many drafts were kept, the share of the read limit over the whole
            reply, and the token_sha, which is the same for all.
  between   plan + candidates: rank 0 encodes a plan, every rank decodes it and returns one candidate for each of 8
  ranks     rows. Nodes: what a sum over slices exchanges, so many bytes from each rank to each rank. With
            --transport ucx each rank is a process of its own, with local they are threads.
On a machine that does other things, run longer (--seconds) and look at the best figures.)";
}

}  // namespace tensorfold
