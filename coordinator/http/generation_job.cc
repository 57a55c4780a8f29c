#include "coordinator/http/generation_job.h"

#include <utility>

namespace tensorfold {

GenerationJob::GenerationJob(Context context)
    : context_(std::move(context)), queue_(std::make_shared<EventQueue>(context_.wake)) {}

GenerationJob::~GenerationJob() {
  // Cancelling what has ended is harmless: the engine ignores ids it does not know.
  cancel();
}

ReplyHead GenerationJob::head(const std::string& model, const RequestOptions& options) const {
  ReplyHead head;
  head.id = context_.id;
  head.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  head.model = context_.service.reply_model(model);
  head.fingerprint = context_.service.options().fingerprint;
  head.include_usage = options.include_usage;
  head.return_token_ids = options.return_token_ids;
  return head;
}

ApiOr<std::vector<GenerationRequest>> GenerationJob::prepare_chat(std::string_view body) {
  const ModelService& service = context_.service;
  ApiOr<ChatRequest> request = parse_chat_request(body, service.options().defaults);
  if (!request.ok()) return request.error();
  ApiOr<PreparedChat> prepared = service.prepare_chat(*request, context_.id);
  if (!prepared.ok()) return prepared.error();
  const RequestOptions& options = request->options;
  stream_ = options.stream;
  builder_ = make_chat_builder(service.tokenizer(), head(request->model, options), prepared->parser, options.n,
                               options.logprobs.has_value(), stream_);
  std::vector<GenerationRequest> out;
  out.push_back(std::move(prepared->request));
  return out;
}

ApiOr<std::vector<GenerationRequest>> GenerationJob::prepare_completion(std::string_view body) {
  const ModelService& service = context_.service;
  ApiOr<CompletionRequest> request = parse_completion_request(body, service.options().defaults);
  if (!request.ok()) return request.error();
  ApiOr<std::vector<GenerationRequest>> prepared = service.prepare_completion(*request, context_.id);
  if (!prepared.ok()) return prepared.error();
  const RequestOptions& options = request->options;
  stream_ = options.stream;
  builder_ = make_completion_builder(service.tokenizer(), head(request->model, options),
                                     static_cast<uint32_t>(prepared->size()), options.n, options.logprobs.has_value(),
                                     stream_);
  return prepared;
}

ApiOr<std::unique_ptr<GenerationJob>> GenerationJob::admit(Endpoint endpoint, std::string_view body, Context context) {
  std::unique_ptr<GenerationJob> job(new GenerationJob(std::move(context)));
  ApiOr<std::vector<GenerationRequest>> requests =
      endpoint == Endpoint::kChat ? job->prepare_chat(body) : job->prepare_completion(body);
  if (!requests.ok()) return requests.error();
  if (job->context_.gone()) return cancelled_error();
  if (auto error = job->submit(std::move(*requests))) return *error;
  return job;
}

std::optional<ApiError> GenerationJob::submit(std::vector<GenerationRequest> requests) {
  choices_ = requests[0].n;
  last_seen_.resize(requests.size() * choices_);
  for (uint32_t part = 0; part < requests.size(); ++part) {
    const size_t tokens = requests[part].prompt.size();
    if (context_.background) requests[part].priority = Priority::kBackground;
    ApiOr<uint64_t> id = context_.service.submit(std::move(requests[part]), EventQueue::sink(queue_, part));
    if (!id.ok()) return id.error();  // the destructor cancels the parts before
    engine_ids_.push_back(*id);
    prompt_tokens_ += tokens;
  }
  context_.metrics.prompt_tokens(prompt_tokens_);
  return std::nullopt;
}

void GenerationJob::record(const GenerationEvent& event, uint32_t part) {
  const TokenEvent* tokens = std::get_if<TokenEvent>(&event);
  if (tokens == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  auto& last = last_seen_[part * choices_ + tokens->choice];
  if (last.time_since_epoch().count() == 0) {
    context_.metrics.first_token(std::chrono::duration<double>(now - context_.arrived).count());
  } else {
    context_.metrics.token_gap(std::chrono::duration<double>(now - last).count(), tokens->tokens.size());
  }
  last = now;
  context_.metrics.reply_tokens(tokens->tokens.size());
}

std::string GenerationJob::pump() {
  std::string out;
  for (EventQueue::Item& item : queue_->take()) {
    record(item.event, item.part);
    out += builder_->take(item.part, std::move(item.event));
  }
  return out;
}

void GenerationJob::cancel() {
  if (cancelled_) return;
  cancelled_ = true;
  queue_->close();
  for (const uint64_t id : engine_ids_) context_.service.engine().cancel(id);
}

}  // namespace tensorfold
