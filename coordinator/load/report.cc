#include "coordinator/load/report.h"

#include <fmt/format.h>

#include <boost/json.hpp>

namespace tensorfold {
namespace {

namespace json = boost::json;

double ratio(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string level_name(const LevelFigures& level) {
  return level.users > 0 ? std::to_string(level.users) : fmt::format("{:g}/s", level.rate);
}

// Milliseconds with three digits that mean something.
std::string ms(double seconds) {
  const double value = seconds * 1000;
  return value < 10    ? fmt::format("{:.2f}", value)
         : value < 100 ? fmt::format("{:.1f}", value)
                       : fmt::format("{:.0f}", value);
}

void print_rates(const LoadReport& report, std::ostream& out) {
  out << fmt::format("{:>8} {:>8} {:>7} {:>8} {:>9} {:>9} {:>8} {:>8} {:>7} {:>7} {:>7}\n",
                     report.options.rates.empty() ? "users" : "rate", "requests", "errors", "seconds", "reply t/s",
                     "total t/s", "req/s", "good/s", "good", "accept", "cached");
  for (const LevelFigures& level : report.levels) {
    out << fmt::format("{:>8} {:>8} {:>7} {:>8.1f} {:>9.1f} {:>9.1f} {:>8.2f} {:>8.2f} {:>6.1f}% {:>6.1f}% {:>6.1f}%\n",
                       level_name(level), level.requests, level.error_count(), level.wall_s, level.reply_tokens_per_s,
                       level.total_tokens_per_s, level.requests_per_s, level.goodput,
                       100 * ratio(level.good, level.completed - level.background),
                       100 * ratio(level.accepted, level.drafted),
                       100 * ratio(level.cached_tokens, level.prompt_tokens));
  }
}

void print_times(const LoadReport& report, std::ostream& out) {
  out << fmt::format("\n{:>8} {:<14} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
                     report.options.rates.empty() ? "users" : "rate", "milliseconds", "count", "mean", "p50", "p90",
                     "p99", "longest");
  for (const LevelFigures& level : report.levels) {
    const auto row = [&](const char* what, const SampleSummary& of) {
      if (of.count == 0) return;
      out << fmt::format("{:>8} {:<14} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}\n", level_name(level), what, of.count,
                         ms(of.mean), ms(of.p50), ms(of.p90), ms(of.p99), ms(of.max));
    };
    row("first token", level.ttft_s);
    row("gap", level.gap_s);
    row("a token", level.per_token_s);
    row("whole reply", level.total_s);
    row("background", level.background_ttft_s);
    row("begun late", level.late_s);
  }
}

void print_errors(const LoadReport& report, std::ostream& out) {
  for (const LevelFigures& level : report.levels) {
    if (level.left + level.refused > 0) {
      out << fmt::format("{}: {} requests dropped on purpose, {} malformed ones refused as they must be\n",
                         level_name(level), level.left, level.refused);
    }
    for (const auto& [kind, error] : level.errors) {
      out << fmt::format("{}: {} x {}; the first: {}\n", level_name(level), error.count, kind, error.example);
    }
  }
}

json::object summary_json(const SampleSummary& of) {
  return {{"count", of.count}, {"mean", of.mean}, {"p50", of.p50}, {"p90", of.p90}, {"p99", of.p99}, {"max", of.max}};
}

json::object level_json(const LevelFigures& level) {
  json::object out;
  if (level.users > 0) {
    out["concurrency"] = level.users;
  } else {
    out["rate"] = level.rate;
  }
  out["window_s"] = level.window_s;
  out["wall_s"] = level.wall_s;
  out["conversations"] = level.conversations;
  out["requests"] = level.requests;
  out["completed"] = level.completed;
  out["left"] = level.left;
  out["malformed_refused"] = level.refused;
  out["background"] = level.background;
  out["good"] = level.good;
  json::object errors;
  for (const auto& [kind, error] : level.errors) {
    errors[kind] = json::object{{"count", error.count}, {"example", error.example}};
  }
  out["errors"] = std::move(errors);
  out["prompt_tokens"] = level.prompt_tokens;
  out["cached_tokens"] = level.cached_tokens;
  out["reply_tokens"] = level.reply_tokens;
  out["drafted"] = level.drafted;
  out["accepted"] = level.accepted;
  out["reply_tokens_per_s"] = level.reply_tokens_per_s;
  out["total_tokens_per_s"] = level.total_tokens_per_s;
  out["requests_per_s"] = level.requests_per_s;
  out["goodput_per_s"] = level.goodput;
  out["ttft_s"] = summary_json(level.ttft_s);
  out["gap_s"] = summary_json(level.gap_s);
  out["per_token_s"] = summary_json(level.per_token_s);
  out["total_s"] = summary_json(level.total_s);
  if (level.background > 0) out["background_ttft_s"] = summary_json(level.background_ttft_s);
  if (level.late_s.count > 0) out["late_s"] = summary_json(level.late_s);
  return out;
}

json::object check_json(const HashCheck& check) {
  json::array first;
  for (const HashDifference& one : check.first) {
    first.push_back(json::object{
        {"conversation", one.conversation}, {"turn", one.turn}, {"loaded", one.loaded}, {"serial", one.serial}});
  }
  return {{"compared", check.compared}, {"different", check.different}, {"first", std::move(first)}};
}

}  // namespace

std::string load_legend() {
  return "reply t/s, total t/s: tokens a second of replies, and of prompts too, until the load fades\n"
         "good: within --ttft-limit and, for 99 % of the reply's gaps, --gap-limit; good/s: such requests a second\n"
         "accept: share of drafted tokens that were kept; cached: share of prompt tokens that were not computed again\n"
         "first token: from when the request was due to the first text; gap: between two events with text, each of "
         "which may have several tokens; a token: of one reply, its time over its tokens after the first";
}

void print_load(const LoadReport& report, const std::optional<HashCheck>& check, std::ostream& out) {
  const ConversationOptions& what = report.options.conversation;
  out << fmt::format("{} at {}, mix {}, seed {}, replies of {} {} tokens, distinct prompts{}\n\n", report.server.model,
                     report.server.client.authority, load_mix_name(what.mix), what.seed,
                     what.ignore_eos ? "exactly" : "at most", what.reply_tokens,
                     report.server.fingerprint.empty() ? "" : ", fingerprint " + report.server.fingerprint);
  print_rates(report, out);
  print_times(report, out);
  out << "\n";
  print_errors(report, out);
  if (!check) return;
  for (const HashDifference& one : check->first) {
    out << fmt::format("DIFFERENT: conversation {}, turn {}: token_sha {} under load, {} alone and without drafts\n",
                       one.conversation, one.turn, one.loaded, one.serial);
  }
  out << fmt::format("check: {} replies compared with a serial run, {} different\n", check->compared, check->different);
}

std::string load_json(const LoadReport& report, const std::optional<HashCheck>& check) {
  const LoadOptions& options = report.options;
  json::object out;
  out["server"] = report.server.client.authority;
  out["model"] = report.server.model;
  out["fingerprint"] = report.server.fingerprint;
  out["mix"] = std::string(load_mix_name(options.conversation.mix));
  out["seed"] = options.conversation.seed;
  out["reply_tokens"] = options.conversation.reply_tokens;
  out["ignore_eos"] = options.conversation.ignore_eos;
  out["prompt_tokens"] = options.conversation.prompt_tokens;
  out["prefix_tokens"] = options.conversation.prefix_tokens;
  out["ttft_limit_s"] = options.ttft_limit_s;
  out["gap_limit_s"] = options.gap_limit_s;
  out["disconnect"] = options.disconnect;
  out["malformed"] = options.malformed;
  out["background"] = options.conversation.background;
  json::array levels;
  for (const LevelFigures& level : report.levels) levels.push_back(level_json(level));
  out["levels"] = std::move(levels);
  if (check) out["check"] = check_json(*check);
  return json::serialize(out);
}

}  // namespace tensorfold
