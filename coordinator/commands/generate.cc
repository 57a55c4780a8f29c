// `tensorfold generate`: one prompt, one reply, through the very scheduler that serves.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <condition_variable>
#include <iostream>
#include <mutex>

#include "coordinator/chat/chat_template.h"
#include "coordinator/commands/cluster_flags.h"
#include "coordinator/commands/commands.h"
#include "coordinator/commands/still_link.h"
#include "coordinator/schedule/engine.h"

namespace tensorfold {
namespace {

struct GenerateFlags {
  ClusterFlags cluster;
  std::string prompt;
  std::vector<uint32_t> prompt_ids;
  bool chat = false;
  std::string draft = "auto";
  int width = 8;
  uint32_t max_tokens = 128;
  double temperature = 0.0;
  double top_p = 1.0;
  uint32_t top_k = 0;
  uint64_t seed = 0;
  bool ids = false;
};

absl::StatusOr<std::vector<uint32_t>> prompt_tokens(const GenerateFlags& flags, const Tokenizer& tokenizer) {
  if (!flags.prompt_ids.empty()) return flags.prompt_ids;
  std::vector<int32_t> ids;
  if (flags.chat) {
    const absl::StatusOr<ChatTemplate> chat = ChatTemplate::load(flags.cluster.model);
    if (!chat.ok()) return chat.status();
    const boost::json::object message = {{"role", "user"}, {"content", flags.prompt}};
    const boost::json::array messages = {message};
    const absl::StatusOr<Rendered> rendered = chat->render(messages, nullptr, {}, /*add_generation_prompt=*/true);
    if (!rendered.ok()) return rendered.status();
    std::vector<TextSegment> segments;
    for (const PromptSegment& segment : rendered->segments) segments.push_back({segment.text, segment.trusted});
    absl::StatusOr<std::vector<int32_t>> encoded = tokenizer.encode_segments(segments);
    if (!encoded.ok()) return encoded.status();
    ids = *std::move(encoded);
  } else {
    absl::StatusOr<std::vector<int32_t>> encoded = tokenizer.encode(
        flags.prompt, {.added_tokens = AddedTokens::kNone, .add_special_tokens = true, .max_bytes = kMaxEncodeBytes});
    if (!encoded.ok()) return encoded.status();
    ids = *std::move(encoded);
  }
  return std::vector<uint32_t>(ids.begin(), ids.end());
}

void print_stats(const FinishEvent& finish) {
  const GenerationStats& stats = finish.stats;
  const double rate = stats.decode_s > 0 ? (stats.completion_tokens - 1) / stats.decode_s : 0;
  std::cerr << fmt::format(
      "\n[{} of {} prompt tokens in {:.3f} s; {} tokens, {:.1f} tok/s, {} rounds, drafted {}, accepted {}; finish {}; "
      "token_sha {}]\n",
      stats.prompt_tokens - stats.cached_tokens, stats.prompt_tokens, stats.prefill_s, stats.completion_tokens, rate,
      stats.rounds, stats.drafted, stats.accepted, std::string(finish_reason_name(finish.reason)), stats.token_sha);
}

absl::Status run_generate(const GenerateFlags& flags) {
  const absl::StatusOr<DraftKind> draft = parse_draft_kind(flags.draft);
  if (!draft.ok()) return draft.status();
  if (flags.draft == "dflash" && flags.cluster.drafter.empty()) {
    return absl::InvalidArgumentError(
        "--draft dflash: drafts with a checkpoint of its own; name it with --draft-model");
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(flags.cluster.model + "/tokenizer.json");
  const bool only_ids = !flags.prompt_ids.empty() && absl::IsNotFound(tokenizer.status());
  if (!tokenizer.ok() && !only_ids) return tokenizer.status();
  std::vector<uint32_t> prompt = flags.prompt_ids;
  if (!only_ids) {
    absl::StatusOr<std::vector<uint32_t>> tokens = prompt_tokens(flags, **tokenizer);
    if (!tokens.ok()) return tokens.status();
    prompt = *std::move(tokens);
  }

  RunnerOptions runner;
  runner.slots = 1;
  runner.pages = static_cast<int64_t>(prompt.size() + flags.max_tokens + 2 * kMaxWindow) / kPageTokens + 1;
  absl::StatusOr<OpenCluster> open =
      open_cluster(flags.cluster, runner, DrafterChoice::of_kind(flags.draft, flags.cluster.drafter));
  if (!open.ok()) return open.status();
  const ModelConfig& config = open->shards->config();
  const ModelShape& shape = open->shards->shape(0);
  if (*draft == DraftKind::kMtp && !shape.has_mtp) {
    return absl::InvalidArgumentError(
        config.dspark.stages > 0
            ? "--draft mtp: what this checkpoint has under mtp.* is a block drafter: use dspark or auto"
            : "--draft mtp: this checkpoint has no MTP layer; there are none, copy and auto");
  }

  EngineModel model;
  model.context = static_cast<uint32_t>(shape.context_length);
  model.vocabulary = static_cast<uint32_t>(shape.vocab);
  model.has_mtp = shape.has_mtp;
  model.block_drafts = open->shards->block_drafts();
  model.end_ids.assign(config.eos_token_ids.begin(), config.eos_token_ids.end());
  model.tokenizer = only_ids ? nullptr : tokenizer->get();
  EngineOptions options;
  options.max_sequences = 1;
  options.pages = runner.pages;
  options.draft = *draft;
  options.width.max_width = static_cast<uint32_t>(flags.width);
  StillLink link(open->cluster->executor());
  Engine engine(link, model, options);

  GenerationRequest request;
  request.id = "generate";
  request.prompt = prompt;
  request.sampling.temperature = flags.temperature;
  request.sampling.top_p = flags.top_p;
  request.sampling.top_k = flags.top_k;
  if (flags.seed != 0) request.seed = flags.seed;
  request.draft = *draft != DraftKind::kNone;
  request.return_token_ids = true;
  const GenerationBounds bounds = {model.context, model.vocabulary, flags.max_tokens};
  if (const auto error = resolve_generation(bounds, flags.max_tokens, &request); error.has_value()) {
    return absl::InvalidArgumentError(error->message);
  }

  std::mutex mutex;
  std::condition_variable done;
  std::optional<FinishEvent> finish;
  if (absl::Status status = engine.warm_up(); !status.ok()) return status;
  engine.start();
  const ApiOr<uint64_t> id = engine.submit(std::move(request), [&](GenerationEvent event) {
    const std::lock_guard lock(mutex);
    if (auto* tokens = std::get_if<TokenEvent>(&event)) {
      std::cout << tokens->text << std::flush;
    } else {
      finish = std::get<FinishEvent>(std::move(event));
      std::cout << finish->text << std::flush;
      done.notify_one();
    }
  });
  if (!id.ok()) return absl::ResourceExhaustedError(id.error().message);
  std::unique_lock lock(mutex);
  while (!finish.has_value()) done.wait_for(lock, std::chrono::seconds(1));
  lock.unlock();
  engine.stop();
  if (finish->error.has_value()) return absl::InternalError(finish->error->message);
  if (flags.ids) {
    std::cout << (model.tokenizer != nullptr ? "\n" : "");
    for (size_t i = 0; i < finish->stats.token_ids.size(); ++i) {
      std::cout << (i > 0 ? "," : "") << finish->stats.token_ids[i];
    }
    std::cout << "\n";
  }
  print_stats(*finish);
  return absl::OkStatus();
}

}  // namespace

void add_generate_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app.add_subcommand("generate", "One reply to one prompt, on an in-process world");
  flags->cluster.add_to(*command);
  CLI::Option* text = command->add_option("--prompt", flags->prompt, "text; control tokens in it stay text");
  CLI::Option* ids =
      command->add_option("--prompt-ids", flags->prompt_ids, "token ids instead of text")->delimiter(',');
  text->excludes(ids);
  command->add_flag("--chat", flags->chat, "put the prompt into the model's chat template as a user message");
  command->add_option("--draft", flags->draft, "drafter; changes speed, never a byte")
      ->check(CLI::IsMember({"none", "mtp", "copy", "dflash", "dspark", "auto"}));
  flags->cluster.add_drafter_to(*command);
  command->add_option("--width", flags->width, "most rows of a verify window")->check(CLI::Range(1, 16));
  command->add_option("--max-tokens", flags->max_tokens, "tokens of the reply")->check(CLI::Range(1u, 1u << 20));
  command->add_option("--temperature", flags->temperature, "0 is greedy")->check(CLI::Range(0.0, 2.0));
  command->add_option("--top-p", flags->top_p, "nucleus")->check(CLI::Range(0.0, 1.0));
  command->add_option("--top-k", flags->top_k, "0: off");
  command->add_option("--seed", flags->seed, "0: from the prompt");
  command->add_flag("--ids", flags->ids, "also print the reply's token ids");
  command->callback([flags, text, ids, exit_code] {
    if (text->count() + ids->count() == 0) throw CLI::RequiredError("--prompt or --prompt-ids");
    const absl::Status status = run_generate(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
