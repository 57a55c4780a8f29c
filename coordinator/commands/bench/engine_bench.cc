#include "coordinator/commands/bench/engine_bench.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "coordinator/chat/chat_template.h"
#include "coordinator/commands/still_link.h"
#include "coordinator/schedule/engine.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace tensorfold {
namespace {

constexpr int kFewestReplies = 2;
constexpr int64_t kRandomPrompt = 64;

absl::StatusOr<FinishEvent> one_reply(Engine& engine, const EngineBenchOptions& options, bool draft) {
  GenerationRequest request;
  request.id = "bench";
  request.prompt = options.prompt;
  request.max_tokens = options.tokens;
  request.draft = draft;
  request.sampling.temperature = 0;
  std::mutex mutex;
  std::condition_variable done;
  std::optional<FinishEvent> finish;
  const ApiOr<uint64_t> id = engine.submit(std::move(request), [&](GenerationEvent event) {
    const std::lock_guard lock(mutex);
    if (auto* end = std::get_if<FinishEvent>(&event)) {
      finish = std::move(*end);
      done.notify_one();
    }
  });
  if (!id.ok()) return absl::ResourceExhaustedError(id.error().message);
  std::unique_lock lock(mutex);
  while (!finish.has_value()) done.wait_for(lock, std::chrono::seconds(1));
  if (finish->error.has_value()) return absl::InternalError(finish->error->message);
  return *std::move(finish);
}

}  // namespace

absl::StatusOr<DecodeFigure> bench_decode(PassExecutor& executor, const ModelShape& shape, DraftKind draft,
                                          const EngineBenchOptions& options) {
  EngineModel model;
  model.context = static_cast<uint32_t>(shape.context_length);
  model.vocabulary = static_cast<uint32_t>(shape.vocab);
  model.has_mtp = shape.has_mtp;
  model.block_drafts = options.block_drafts;
  model.end_ids = options.end_ids;
  EngineOptions engine_options;
  engine_options.max_sequences = 1;
  engine_options.pages = options.pages;
  engine_options.draft = draft;
  engine_options.width.max_width = static_cast<uint32_t>(options.width);
  StillLink link(executor);
  Engine engine(link, model, engine_options);
  if (absl::Status status = engine.warm_up(); !status.ok()) return status;
  engine.start();
  DecodeFigure figure;
  figure.draft = std::string(draft_kind_name(draft));
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.seconds);
  for (int reply = 0; reply < kFewestReplies || std::chrono::steady_clock::now() < end; ++reply) {
    const absl::StatusOr<FinishEvent> finish = one_reply(engine, options, draft != DraftKind::kNone);
    if (!finish.ok()) return finish.status();
    const GenerationStats& stats = finish->stats;
    if (reply > 0 && stats.token_sha != figure.token_sha) {
      return absl::InternalError("two replies to one prompt differ: " + figure.token_sha + " and " + stats.token_sha);
    }
    if (reply > 0 && stats.decode_s >= figure.seconds) continue;
    figure.tokens = stats.completion_tokens;
    figure.rounds = stats.rounds;
    figure.drafted = stats.drafted;
    figure.accepted = stats.accepted;
    figure.seconds = stats.decode_s;
    figure.token_sha = stats.token_sha;
  }
  engine.stop();
  return figure;
}

absl::StatusOr<std::vector<uint32_t>> bench_prompt(const std::string& model, const std::string& text,
                                                   int64_t vocabulary) {
  std::vector<uint32_t> prompt;
  const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(model + "/tokenizer.json");
  if (absl::IsNotFound(tokenizer.status())) {
    for (int64_t i = 1; i <= kRandomPrompt; ++i) prompt.push_back(static_cast<uint32_t>(i * 2654435761 % vocabulary));
    return prompt;
  }
  if (!tokenizer.ok()) return tokenizer.status();
  Rendered rendered = {{{text, false}}};  // outlives the segments, which are views of it
  const absl::StatusOr<ChatTemplate> chat = ChatTemplate::load(model);
  if (chat.ok()) {
    const boost::json::object message = {{"role", "user"}, {"content", text}};
    const boost::json::array messages = {message};
    absl::StatusOr<Rendered> turn = chat->render(messages, nullptr, {}, /*add_generation_prompt=*/true);
    if (!turn.ok()) return turn.status();
    rendered = *std::move(turn);
  }
  std::vector<TextSegment> segments;
  for (const PromptSegment& segment : rendered.segments) segments.push_back({segment.text, segment.trusted});
  const absl::StatusOr<std::vector<int32_t>> ids = (*tokenizer)->encode_segments(segments);
  if (!ids.ok()) return ids.status();
  prompt.assign(ids->begin(), ids->end());
  if (prompt.empty()) return absl::InvalidArgumentError("--prompt is empty");
  return prompt;
}

}  // namespace tensorfold
