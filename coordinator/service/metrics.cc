#include "coordinator/service/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <vector>

namespace tensorfold {
namespace {

using prometheus::ClientMetric;
using prometheus::Histogram;
using prometheus::MetricFamily;
using prometheus::MetricType;

using Labels = std::vector<ClientMetric::Label>;

MetricFamily family(std::string name, std::string help, MetricType type) {
  MetricFamily out;
  out.name = "tensorfold_" + std::move(name);
  out.help = std::move(help);
  out.type = type;
  return out;
}

void add(MetricFamily* family, double value, Labels labels = {}) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (family->type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family->metric.push_back(std::move(metric));
}

void engine_families(const EngineStatus& status, std::vector<MetricFamily>* out) {
  const auto gauge = [&](const char* name, const char* help, double value) {
    add(&out->emplace_back(family(name, help, MetricType::Gauge)), value);
  };
  const auto counter = [&](const char* name, const char* help, double value) {
    add(&out->emplace_back(family(name, help, MetricType::Counter)), value);
  };
  const auto number = [](auto value) { return static_cast<double>(value); };
  gauge("up", "1 while passes run, 0 while a rank is missing.", status.up ? 1 : 0);
  gauge("draining", "1 while the server is shutting down.", status.draining ? 1 : 0);
  gauge("sequences_running", "Sequences that have a lane.", status.active);
  gauge("sequences_queued", "Sequences that wait for a lane.", status.queued);
  gauge("background_sequences_running", "Of those with a lane, the background ones.", status.active_background);
  gauge("background_sequences_queued", "Of those that wait, the background ones.", status.queued_background);
  gauge("round_budget_seconds", "Time that a round should take while prompts are read beside replies.",
        status.round_budget_seconds);
  gauge("queued_prompt_tokens", "Prompt tokens of the sequences that wait.", number(status.queued_tokens));
  gauge("kv_pages", "KV cache pages of every rank.", number(status.pages));
  gauge("kv_pages_free", "KV cache pages that a request can have: free, or held only by the prefix cache.",
        number(status.free_pages));
  gauge("cache_pages", "Pages that the prefix cache holds, those included that running sequences share.",
        number(status.cached_pages));
  gauge("cache_snapshots", "Snapshots of recurrent states that the prefix cache holds.", number(status.snapshots));
  counter("cache_hits_total", "Sequences that started from a cached prefix.", number(status.cache.hits));
  counter("cache_hit_tokens_total", "Tokens that they did not compute again.", number(status.cache.hit_tokens));
  counter("cache_misses_total", "Sequences that might have used the cache and found nothing in it.",
          number(status.cache.misses));
  counter("cache_evicted_pages_total", "Cached pages forgotten to make room for sequences.",
          number(status.cache.evicted_pages));
  counter("cache_evicted_snapshots_total", "Snapshots forgotten to make room for others, or with their pages.",
          number(status.cache.evicted_snapshots));
  gauge("state_segments", "States on rank 0's disk.", number(status.stored_segments));
  counter("state_saved_total", "States that all ranks have written to disk.", number(status.states.saved));
  counter("state_save_failures_total", "States that a rank could not write.", number(status.states.save_failures));
  counter("state_restored_total", "States brought back from disk.", number(status.states.restored));
  counter("state_restore_failures_total",
          "States not brought back because a rank's file was missing or damaged, or memory did not suffice.",
          number(status.states.restore_failures));
  counter("state_refusals_total", "States not written because too many waited.", number(status.states.refusals));
  counter("cache_refusals_total",
          "Snapshots that were not taken and prefixes that were not used because memory did not suffice.",
          number(status.cache.refusals));
  gauge("seconds_since_step", "Age of the last pass that every rank completed.", status.seconds_since_step);
  counter("passes_total", "Passes that every rank completed.", number(status.passes));
  counter("pass_rows_total", "Rows of those passes: prompt rows and rows of verify windows.", number(status.pass_rows));
  counter("window_rows_total", "Of those, rows of verify windows.", number(status.window_rows));
  counter("prompt_passes_total", "Passes that read prompt rows.", number(status.prompt_passes));
  counter("pass_seconds_total", "Time spent in passes.", status.pass_seconds);
  counter("engine_requests_total", "Requests that the scheduler admitted.", number(status.requests));
  counter("engine_rejected_total", "Requests that it refused before any work: queue full, cluster down, draining.",
          number(status.rejected));
  counter("engine_finished_total", "Replies that ended by themselves.", number(status.finished));
  counter("engine_cancelled_total", "Replies whose client left.", number(status.cancelled));
  counter("engine_failed_total", "Replies that ended with an error.", number(status.failed));
  counter("engine_prompt_tokens_total", "Prompt tokens computed.", number(status.prompt_tokens));
  counter("engine_reply_tokens_total", "Reply tokens made.", number(status.reply_tokens));
  counter("drafted_tokens_total", "Tokens drafted.", number(status.drafted));
  counter("accepted_tokens_total", "Drafted tokens that the model agreed with.", number(status.accepted));
  counter("sequences_preempted_total",
          "Times that a background sequence gave its lane and pages to a foreground one, to go on later.",
          number(status.preempted));
  counter("background_promoted_total",
          "Background sequences that counted as foreground because they had waited for schedule.background_turn.",
          number(status.promoted));
  counter("sequences_replayed_total", "Sequences computed again after a rank was lost.", number(status.parked));
}

void rank_families(const Readiness& readiness, std::vector<MetricFamily>* out) {
  add(&out->emplace_back(family("ready", "1 when every rank has completed a step recently.", MetricType::Gauge)),
      readiness.ready ? 1 : 0);
  add(&out->emplace_back(family("membership_epoch", "Epoch of the membership.", MetricType::Gauge)), readiness.epoch);
  if (readiness.ranks.empty()) return;
  MetricFamily up = family("rank_up", "1 while the rank is serving.", MetricType::Gauge);
  MetricFamily heartbeat =
      family("rank_heartbeat_age_seconds", "Age of the rank's last heartbeat; -1 before the first.", MetricType::Gauge);
  MetricFamily step =
      family("rank_step_age_seconds", "Age of the rank's last pass; -1 before the first.", MetricType::Gauge);
  for (const RankStatus& rank : readiness.ranks) {
    const Labels labels = {{"rank", std::to_string(rank.rank)}, {"host", rank.host}};
    add(&up, rank.state == RankState::kServing ? 1 : 0, labels);
    add(&heartbeat, rank.seconds_since_heartbeat, labels);
    add(&step, rank.seconds_since_step, labels);
  }
  out->push_back(std::move(up));
  out->push_back(std::move(heartbeat));
  out->push_back(std::move(step));
}

}  // namespace

struct ServiceMetrics::Impl {
  prometheus::Registry registry;
  prometheus::Family<prometheus::Counter>& requests = prometheus::BuildCounter()
                                                          .Name("tensorfold_requests_total")
                                                          .Help("Requests answered, by API, endpoint and code.")
                                                          .Register(registry);
  prometheus::Family<Histogram>& durations = prometheus::BuildHistogram()
                                                 .Name("tensorfold_request_seconds")
                                                 .Help("From a request's arrival to the end of its reply.")
                                                 .Register(registry);
  prometheus::Gauge& connections = gauge("tensorfold_http_connections", "HTTP connections that are open.");
  prometheus::Counter& refused =
      counter("tensorfold_http_connections_refused_total", "HTTP connections over the limit.");
  prometheus::Counter& left =
      counter("tensorfold_clients_left_total", "Clients that left before their reply was complete.");
  prometheus::Counter& slow =
      counter("tensorfold_slow_readers_total", "Replies cut because the client read too slowly.");
  prometheus::Counter& prompts = counter("tensorfold_prompt_tokens_total", "Prompt tokens of admitted requests.");
  prometheus::Counter& replies = counter("tensorfold_reply_tokens_total", "Reply tokens delivered to front ends.");
  Histogram& first = histogram("tensorfold_time_to_first_token_seconds",
                               "From a request's arrival to its first token, queueing included.",
                               {0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120});
  Histogram& gaps = histogram("tensorfold_inter_token_seconds",
                              "Time a token after the first took. A pass that keeps drafts brings several at once; "
                              "each counts as its share.",
                              {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5});

  prometheus::Counter& counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
  }
  prometheus::Gauge& gauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
  }
  Histogram& histogram(const char* name, const char* help, const Histogram::BucketBoundaries& bounds) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, bounds);
  }
};

ServiceMetrics::ServiceMetrics() : impl_(std::make_unique<Impl>()) {}
ServiceMetrics::~ServiceMetrics() = default;

void ServiceMetrics::request(std::string_view api, std::string_view endpoint, std::string_view code, double seconds) {
  const std::string api_name(api);
  const std::string endpoint_name(endpoint);
  impl_->requests.Add({{"api", api_name}, {"endpoint", endpoint_name}, {"code", std::string(code)}}).Increment();
  impl_->durations
      .Add({{"api", api_name}, {"endpoint", endpoint_name}},
           Histogram::BucketBoundaries{0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600})
      .Observe(seconds);
}

void ServiceMetrics::connection_opened() { impl_->connections.Increment(); }
void ServiceMetrics::connection_closed() { impl_->connections.Decrement(); }
void ServiceMetrics::connection_refused() { impl_->refused.Increment(); }
void ServiceMetrics::client_left() { impl_->left.Increment(); }
void ServiceMetrics::slow_reader() { impl_->slow.Increment(); }
void ServiceMetrics::first_token(double seconds) { impl_->first.Observe(seconds); }
void ServiceMetrics::prompt_tokens(size_t tokens) { impl_->prompts.Increment(static_cast<double>(tokens)); }
void ServiceMetrics::reply_tokens(size_t tokens) { impl_->replies.Increment(static_cast<double>(tokens)); }

void ServiceMetrics::token_gap(double seconds, size_t tokens) {
  for (size_t i = 0; i < tokens; ++i) impl_->gaps.Observe(seconds / static_cast<double>(tokens));
}

std::string ServiceMetrics::scrape(const ModelService& service) const {
  std::vector<MetricFamily> families = impl_->registry.Collect();
  const ModelServiceOptions& options = service.options();
  add(&families.emplace_back(family("info", "What is served.", MetricType::Gauge)), 1,
      {{"model", options.names[0]},
       {"family", options.family},
       {"format", options.format},
       {"fingerprint", options.fingerprint}});
  add(&families.emplace_back(family("uptime_seconds", "Since the server started.", MetricType::Gauge)),
      service.uptime_s());
  engine_families(service.engine().status(), &families);
  rank_families(service.readiness(), &families);
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace tensorfold
