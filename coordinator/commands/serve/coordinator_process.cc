#include "coordinator/commands/serve/coordinator_process.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <thread>

#include "coordinator/commands/serve/world_link.h"
#include "coordinator/grpc/server.h"
#include "coordinator/http/server.h"
#include "coordinator/service/model_service.h"
#include "worker/checkpoint/inspect.h"

namespace tensorfold {
namespace {

constexpr std::chrono::minutes kMostRestoring{5};

// What answers requests besides the world: dies in reverse order.
struct FrontEnd {
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat;  // null: the checkpoint has none
  std::unique_ptr<Engine> engine;
  std::unique_ptr<ModelService> service;
  ServiceMetrics metrics;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<InferenceServer> grpc;  // null: not enabled
  std::atomic<bool> restoring{true};      // pinned contexts are not back yet: not ready

  // Replies under way get `grace`; both front ends stop taking requests at once.
  void stop(std::chrono::milliseconds grace) {
    if (grpc != nullptr) grpc->stop(grace);
    http->stop(grace);
  }
};

absl::Status load_text(RankSetup& setup, FrontEnd& front) {
  const std::string& dir = setup.profile.model.path;
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(dir + "/tokenizer.json");
  if (!tokenizer.ok()) return tokenizer.status();
  front.tokenizer = *std::move(tokenizer);
  if (front.tokenizer->vocab_size() > setup.shape.vocab) {
    return absl::InvalidArgumentError(
        fmt::format("{}: the tokenizer has ids up to {}, the model's vocabulary ends at {}", dir,
                    front.tokenizer->vocab_size() - 1, setup.shape.vocab - 1));
  }
  if (front.tokenizer->missing_bytes() > 0) {
    spdlog::warn("tokenizer.json has no token for {} byte values: text that holds one loses it, as it does elsewhere",
                 front.tokenizer->missing_bytes());
  }
  absl::StatusOr<ChatTemplate> chat = ChatTemplate::load(dir);
  if (chat.ok()) {
    front.chat = std::make_unique<ChatTemplate>(*std::move(chat));
  } else if (absl::IsNotFound(chat.status())) {
    spdlog::warn("{}: chat requests will be refused", std::string(chat.status().message()));
  } else {
    return chat.status();
  }
  return absl::OkStatus();
}

absl::StatusOr<EngineOptions> engine_options(const RankSetup& setup, bool has_mtp) {
  const Profile& profile = setup.profile;
  EngineOptions options;
  options.max_sequences = profile.schedule.max_sequences;
  options.max_batch_rows = profile.schedule.max_batch_rows;
  options.prompt_chunk = profile.schedule.prompt_chunk;
  options.queue_limit = profile.schedule.queue_limit;
  options.queue_tokens = profile.schedule.queue_tokens;
  options.pages = setup.runner_options.pages;
  options.round_budget = profile.schedule.round_budget;
  options.park_deadline = profile.cluster.park_deadline;
  options.background_turn = std::chrono::duration_cast<std::chrono::milliseconds>(profile.schedule.background_turn);
  const absl::StatusOr<DraftKind> draft = parse_draft_kind(profile.draft.kind);
  if (!draft.ok()) return draft.status();
  if (*draft == DraftKind::kMtp && !has_mtp) {
    return absl::InvalidArgumentError(
        setup.shards->config().dspark.stages > 0
            ? "draft.kind is mtp, but what this checkpoint has under mtp.* is a block drafter: use dspark or auto"
            : "draft.kind is mtp, but this checkpoint has no MTP layer: use copy, dflash with draft.model, auto or "
              "none");
  }
  options.draft = *draft;
  options.copy.min_match = static_cast<uint32_t>(profile.draft.min_match);
  options.width.max_width = static_cast<uint32_t>(profile.draft.max_width);
  options.seed_salt = profile.sampling.seed_salt;
  options.cache.enabled = profile.cache.enabled;
  options.cache.snapshots = setup.runner_options.snapshots;
  options.cache.snapshot_tokens = static_cast<uint64_t>(profile.cache.snapshot_tokens);
  return options;
}

std::string weight_format(const std::string& dir) {
  const absl::StatusOr<ModelFacts> facts = inspect(dir);
  if (!facts.ok()) return "unknown";
  std::string most;
  int64_t bytes = -1;
  for (const auto& [format, size] : facts->bytes_by_format) {
    if (size > bytes) {
      most = format;
      bytes = size;
    }
  }
  return most;
}

absl::StatusOr<ModelServiceOptions> service_options(const RankSetup& setup, bool has_mtp, WorldLink& link,
                                                    const std::atomic<bool>& restoring) {
  const Profile& profile = setup.profile;
  ModelServiceOptions options;
  options.names = {profile.model.served_name};
  options.names.insert(options.names.end(), profile.model.aliases.begin(), profile.model.aliases.end());
  options.fingerprint = setup.identity.fingerprint;
  options.family = std::string(family_name(setup.shards->config().family));
  options.format = weight_format(profile.model.path);
  options.drafters = {"none", "copy"};
  if (has_mtp) options.drafters.push_back("mtp");
  if (const DrafterFacts* block = setup.shards->drafter_facts()) options.drafters.push_back(block->kind);
  options.defaults.sampling.temperature = profile.sampling.temperature;
  options.defaults.sampling.top_p = profile.sampling.top_p;
  options.defaults.sampling.top_k = static_cast<uint32_t>(profile.sampling.top_k);
  options.defaults.sampling.min_p = profile.sampling.min_p;
  options.defaults.sampling.repetition_penalty = profile.sampling.repetition_penalty;
  options.defaults.vocabulary = static_cast<uint32_t>(setup.shape.vocab);
  options.max_tokens = static_cast<uint32_t>(profile.sampling.max_tokens);
  options.request_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(profile.schedule.request_timeout);
  absl::StatusOr<std::vector<std::string>> keys = api_key_hashes(profile);
  if (!keys.ok()) return keys.status();
  options.api_key_hashes = *std::move(keys);
  options.admin_key_hashes = profile.http.admin_keys;
  options.readiness = [&link, &restoring] {
    Readiness readiness = link.readiness();
    if (readiness.ready && restoring) {
      readiness.ready = false;
      readiness.reason = "warming up, and bringing pinned contexts back";
    }
    return readiness;
  };
  options.background_key_hashes = profile.schedule.background_keys;
  options.background_names = profile.schedule.background_models;
  return options;
}

// What rank 0 has on disk is what there is: a state of which another rank has no file is computed again.
void open_states(const RankSetup& setup, Engine& engine) {
  if (setup.states == nullptr) return;
  const StateOwner& owner = setup.states->options().owner;
  std::vector<StoredSegment> stored;
  size_t unusable = 0;
  for (const StateFileInfo& file : StateStore::list(StateStore::folder_of(setup.profile.state.directory, owner))) {
    if (!file.status.ok() || !(file.header.owner == owner)) {
      spdlog::warn("state on disk, not used: {}",
                   file.status.ok() ? file.path + ": of another build" : std::string(file.status.message()));
      ++unusable;
      continue;
    }
    StoredSegment& segment = stored.emplace_back();
    segment.key = file.header.key;
    segment.parent = file.header.parent;
    segment.first_position = file.header.first_position;
    segment.tokens.assign(file.header.tokens.begin(), file.header.tokens.end());
    segment.mtp = file.header.mtp;
    segment.committed = file.header.committed;
    segment.kept.assign(file.header.kept.begin(), file.header.kept.end());
    segment.bytes = file.bytes;
    segment.names = file.names;
  }
  spdlog::info("states on disk: {} usable, {} not", stored.size(), unusable);
  StateOptions options;
  options.enabled = true;
  options.fingerprint = owner.fingerprint;
  options.min_tokens = static_cast<uint64_t>(setup.profile.state.min_tokens);
  engine.open_states(std::move(options), std::move(stored), setup.profile.cluster.world);
}

absl::Status start_front(RankSetup& setup, WorldLink& link, FrontEnd& front) {
  const Profile& profile = setup.profile;
  const ModelConfig& config = setup.shards->config();
  EngineModel model;
  model.context = static_cast<uint32_t>(profile.model.context_length > 0 ? profile.model.context_length
                                                                         : setup.shape.context_length);
  if (model.context > setup.shape.context_length) {
    return absl::InvalidArgumentError(
        fmt::format("model.context_length {} exceeds the checkpoint's {}", model.context, setup.shape.context_length));
  }
  model.vocabulary = static_cast<uint32_t>(setup.shape.vocab);
  model.has_mtp = setup.shape.has_mtp;
  model.block_drafts = setup.shards->block_drafts();
  model.has_states = !setup.shape.recurrent.empty();
  model.end_ids.assign(config.eos_token_ids.begin(), config.eos_token_ids.end());
  model.tokenizer = front.tokenizer.get();
  const absl::StatusOr<EngineOptions> engine = engine_options(setup, model.has_mtp);
  if (!engine.ok()) return engine.status();
  front.engine = std::make_unique<Engine>(link, model, *engine);
  absl::StatusOr<ModelServiceOptions> options = service_options(setup, model.has_mtp, link, front.restoring);
  if (!options.ok()) return options.status();
  auto service = ModelService::create(*front.engine, *front.tokenizer, front.chat.get(), *std::move(options));
  if (!service.ok()) return service.status();
  front.service = *std::move(service);
  auto http = HttpServer::start(http_options(profile), *front.service, front.metrics);
  if (!http.ok()) return http.status();
  front.http = *std::move(http);
  spdlog::info("HTTP on {}: live; ready once all ranks are", front.http->address());
  if (!profile.grpc.enabled) return absl::OkStatus();
  auto grpc = InferenceServer::start(grpc_options(profile), *front.service, front.metrics);
  if (!grpc.ok()) return grpc.status();
  front.grpc = *std::move(grpc);
  spdlog::info("gRPC on {}", front.grpc->address());
  return absl::OkStatus();
}

}  // namespace

absl::Status run_coordinator_process(RankSetup& setup, const std::atomic<bool>& stop) {
  absl::StatusOr<std::unique_ptr<WorldLink>> link = WorldLink::start(setup);
  if (!link.ok()) return link.status();
  FrontEnd front;
  if (absl::Status status = load_text(setup, front); !status.ok()) return status;
  // Listening before the world is formed: /health answers and /ready says whom it waits for.
  if (absl::Status status = start_front(setup, **link, front); !status.ok()) return status;
  const absl::Status formed = (*link)->form(stop);
  if (!formed.ok()) {
    front.stop(std::chrono::milliseconds(0));
    (*link)->shutdown("the cluster was not formed");
    return stop ? absl::OkStatus() : formed;
  }
  if (absl::Status status = front.engine->warm_up(); !status.ok()) return status;
  open_states(setup, *front.engine);
  if (absl::Status status = front.engine->restore_pinned(kMostRestoring); !status.ok()) return status;
  front.restoring = false;
  front.engine->start();
  spdlog::info("ready: {} on http://{}/v1, context {}, fingerprint {}", setup.profile.model.served_name,
               front.http->address(), front.service->context(), setup.identity.fingerprint);
  while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(50));

  using Milliseconds = std::chrono::milliseconds;
  const auto grace = std::chrono::duration_cast<Milliseconds>(setup.profile.schedule.drain_timeout);
  const double grace_s = std::chrono::duration<double>(grace).count();
  const auto deadline = std::chrono::steady_clock::now() + grace;
  const auto left = [&] {
    return std::max(std::chrono::duration_cast<Milliseconds>(deadline - std::chrono::steady_clock::now()),
                    Milliseconds(0));
  };
  if (!front.engine->drain(left())) {
    spdlog::warn("some replies did not finish within schedule.drain_timeout of {} s and are cut", grace_s);
    front.engine->stop();  // which ends them with an error; their connections are still there
  }
  if (!front.engine->write_states(left())) {
    spdlog::warn(
        "{} states were not written within schedule.drain_timeout of {} s and are computed again when they are "
        "asked for",
        front.engine->status().unwritten_segments, grace_s);
  }
  front.stop(std::chrono::seconds(2));
  front.engine->stop();
  (*link)->shutdown("rank 0 was told to stop");
  return absl::OkStatus();
}

}  // namespace tensorfold
