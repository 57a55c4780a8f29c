#include "coordinator/grpc/generate_call.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace tensorfold {
namespace {

using Reactor = grpc::ServerWriteReactor<pb::GenerateEvent>;

constexpr size_t kMaxRequestId = 128;

// The call's state. gRPC's reactor, the worker that prepares and the writer share it; the mutex guards all of it, and
// the reactor is touched only under it and only until it was told to finish.
class GenerateCall : public std::enable_shared_from_this<GenerateCall> {
 public:
  GenerateCall(GenerateHost& host, Reactor* reactor, grpc::CallbackServerContext* context,
               const pb::GenerateRequest* request)
      : host_(host),
        reactor_(reactor),
        context_(context),
        request_(request),
        arrived_(std::chrono::steady_clock::now()) {}

  void begin() {
    if (!call_authorized(host_.service, *context_)) {
      const std::lock_guard lock(mutex_);
      preparing_ = false;
      return end(unauthorized_error());
    }
    host_.service.workers().post([self = shared_from_this()] { self->prepare(); }, request_->ByteSizeLong());
  }

  void on_written(bool ok) {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (!ok) return leave();
    flush();
  }

  void on_cancel() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    if (!preparing_) leave();  // else the worker, which still reads the request, ends the call
  }

 private:
  struct Prepared {
    std::vector<GenerationRequest> requests;
    std::optional<ReplyParser::Options> parser;
  };

  ApiOr<Prepared> convert() {
    const ModelService& service = host_.service;
    const RequestDefaults& defaults = service.options().defaults;
    ApiOr<RequestOptions> options = options_from_proto(*request_, defaults);
    if (!options.ok()) return options.error();
    if (request_->has_draft() && request_->draft() && service.options().drafters.empty()) {
      return invalid_value_error("draft", "true, but this server has no drafter");
    }
    Prepared out;
    if (request_->has_chat()) {
      if (request_->chat().has_add_generation_prompt() && !request_->chat().add_generation_prompt()) {
        return unsupported_error("add_generation_prompt", "false; a reply needs the head of the assistant's turn");
      }
      ApiOr<ChatRequest> chat = chat_from_proto(request_->model(), request_->chat(), defaults);
      if (!chat.ok()) return chat.error();
      chat->options = *options;
      ApiOr<PreparedChat> prepared = service.prepare_chat(*chat, id_);
      if (!prepared.ok()) return prepared.error();
      out.requests.push_back(std::move(prepared->request));
      out.parser = std::move(prepared->parser);
      return out;
    }
    CompletionRequest completion;
    completion.model = request_->model();
    completion.options = *options;
    if (request_->has_prompt_ids()) {
      ApiOr<std::vector<uint32_t>> ids = ids_from_proto(request_->prompt_ids().ids(), "prompt_ids");
      if (!ids.ok()) return ids.error();
      completion.prompts.emplace_back(std::move(*ids));
    } else if (request_->input_case() == pb::GenerateRequest::kPrompt) {
      completion.prompts.emplace_back(request_->prompt());
    } else {
      return missing_field_error("prompt", "one of prompt, prompt_ids and chat");
    }
    ApiOr<std::vector<GenerationRequest>> prepared = service.prepare_completion(completion, id_);
    if (!prepared.ok()) return prepared.error();
    out.requests = std::move(*prepared);
    return out;
  }

  std::optional<ApiError> take_id() {
    id_ = request_->request_id();
    if (id_.empty()) id_ = host_.service.new_id("gen-");
    const bool good =
        id_.size() <= kMaxRequestId && std::all_of(id_.begin(), id_.end(), [](char c) { return c > 0x20 && c < 0x7F; });
    if (good) return std::nullopt;
    return invalid_value_error("request_id", "it has at most 128 printable characters, without spaces");
  }

  // On a worker.
  void prepare() {
    std::optional<ApiError> error = take_id();
    ApiOr<Prepared> prepared = error ? ApiOr<Prepared>(*error) : convert();
    const std::lock_guard lock(mutex_);
    preparing_ = false;
    if (cancelled_) return leave();
    if (!prepared.ok()) return end(prepared.error());
    GenerationRequest& request = prepared->requests[0];
    const size_t prompt_tokens = request.prompt.size();
    if (call_background(host_.service, *context_)) request.priority = Priority::kBackground;
    set_up(request, prepared->parser);
    ApiOr<uint64_t> admitted = host_.service.submit(std::move(request), EventQueue::sink(queue_, 0));
    if (!admitted.ok()) return end(admitted.error());
    engine_id_ = *admitted;
    host_.metrics.prompt_tokens(prompt_tokens);
    pb::GenerateEvent event;
    pb::Started* started = event.mutable_started();
    started->set_request_id(id_);
    started->set_model(host_.service.reply_model(request_->model()));
    started->set_created_unix_s(
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count());
    started->set_prompt_tokens(static_cast<uint32_t>(prompt_tokens));
    send(std::move(event));
  }

  void set_up(const GenerationRequest& request, const std::optional<ReplyParser::Options>& parser) {
    token_ids_ = request.return_token_ids;
    logprobs_ = request.logprobs.has_value();
    stops_ = request.stop;
    end_ids_ = request.stop_ids;
    if (!request.ignore_eos) {
      const std::vector<uint32_t>& own = host_.service.engine().model().end_ids;
      end_ids_.insert(end_ids_.end(), own.begin(), own.end());
    }
    for (uint32_t i = 0; i < request.n; ++i) readers_.emplace_back(parser, fmt::format("{}_{}", id_, i));
    last_ids_.resize(request.n);
    last_seen_.resize(request.n);
    const std::weak_ptr<GenerateCall> weak = weak_from_this();
    queue_ = std::make_shared<EventQueue>([weak, &writers = host_.writers] {
      writers.post([weak] {
        if (auto self = weak.lock()) self->pump();
      });
    });
  }

  // On the writer.
  void pump() {
    const std::lock_guard lock(mutex_);
    if (finished_) return;
    for (EventQueue::Item& item : queue_->take()) {
      if (TokenEvent* tokens = std::get_if<TokenEvent>(&item.event)) {
        take(std::move(*tokens));
      } else if (const ProgressEvent* read = std::get_if<ProgressEvent>(&item.event)) {
        send(progress_to_proto(*read));
      } else if (!take(std::get<FinishEvent>(item.event))) {
        return;
      }
      if (finished_) return;
    }
  }

  void take(TokenEvent event) {
    const uint32_t choice = event.choice;
    const auto now = std::chrono::steady_clock::now();
    auto& last = last_seen_[choice];
    if (last.time_since_epoch().count() == 0) {
      host_.metrics.first_token(std::chrono::duration<double>(now - arrived_).count());
    } else {
      host_.metrics.token_gap(std::chrono::duration<double>(now - last).count(), event.tokens.size());
    }
    last = now;
    host_.metrics.reply_tokens(event.tokens.size());
    reply_tokens_ += event.tokens.size();
    if (!event.tokens.empty()) last_ids_[choice] = event.tokens.back().id;
    send_piece(choice, readers_[choice].take(std::move(event)));
  }

  // False when the call has ended with an error.
  bool take(FinishEvent& event) {
    if (event.error) {
      end(*event.error);
      return false;
    }
    const uint32_t choice = event.choice;
    ChoiceReader& reader = readers_[choice];
    send_piece(choice, reader.take(event));
    pb::GenerateEvent out;
    pb::Finish* finish = out.mutable_finish();
    finish->set_choice(choice);
    finish->set_reason(reason_to_proto(reader.reason()));
    if (event.reason == FinishReason::kStop) {
      if (std::find(end_ids_.begin(), end_ids_.end(), last_ids_[choice]) != end_ids_.end()) {
        finish->set_matched_stop_id(static_cast<int32_t>(last_ids_[choice]));
      } else if (stops_.size() == 1) {
        finish->set_matched_stop(stops_[0]);
      }
    }
    stats_to_proto(event.stats, host_.service.options().fingerprint, finish);
    complete_ = ++ended_choices_ == readers_.size();
    send(std::move(out));
    return true;
  }

  void send_piece(uint32_t choice, const ReplyPiece& piece) {
    if (auto event = delta_to_proto(host_.service.tokenizer(), choice, piece, token_ids_, logprobs_)) {
      send(*std::move(event));
    }
  }

  void send(pb::GenerateEvent event) {
    if (finished_) return;
    pending_bytes_ += event.ByteSizeLong();
    pending_.push_back(std::move(event));
    if (writing_ && pending_bytes_ > host_.write_buffer_bytes) {
      host_.metrics.slow_reader();
      return finish(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                 "the client reads more slowly than its reply is made; the stream was cut"),
                    "slow_reader");
    }
    flush();
  }

  void flush() {
    if (writing_ || finished_) return;
    if (pending_.empty()) {
      if (complete_) finish(grpc::Status::OK, "ok");
      return;
    }
    in_flight_ = std::move(pending_.front());
    pending_.pop_front();
    pending_bytes_ -= std::min(pending_bytes_, in_flight_.ByteSizeLong());
    writing_ = true;
    reactor_->StartWrite(&in_flight_);
  }

  void end(const ApiError& error) {
    if (!finished_) finish(error_to_status(error, context_), error.info().name);
  }

  void leave() {
    if (finished_) return;
    host_.metrics.client_left();
    finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away"), "cancelled");
  }

  void finish(const grpc::Status& status, std::string_view code) {
    if (finished_) return;
    finished_ = true;
    pending_.clear();
    if (queue_ != nullptr) queue_->close();
    if (engine_id_ && !complete_) host_.service.engine().cancel(*engine_id_);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - arrived_).count();
    host_.metrics.request("grpc", "Generate", code, seconds);
    spdlog::info("{} grpc Generate {} {:.0f} ms, {} reply tokens", id_.empty() ? "-" : id_, code, seconds * 1000,
                 reply_tokens_);
    reactor_->Finish(status);
  }

  GenerateHost& host_;
  std::mutex mutex_;
  Reactor* const reactor_;
  grpc::CallbackServerContext* const context_;
  const pb::GenerateRequest* const request_;  // gRPC's, until the call is finished
  const std::chrono::steady_clock::time_point arrived_;

  std::string id_;
  bool preparing_ = true;
  bool cancelled_ = false;
  bool writing_ = false;
  bool complete_ = false;  // every choice has finished
  bool finished_ = false;  // the reactor was told
  std::optional<uint64_t> engine_id_;
  std::shared_ptr<EventQueue> queue_;
  std::vector<ChoiceReader> readers_;  // [choice]
  std::vector<uint32_t> last_ids_;     // [choice]
  std::vector<std::chrono::steady_clock::time_point> last_seen_;
  std::vector<std::string> stops_;
  std::vector<uint32_t> end_ids_;
  bool token_ids_ = false;
  bool logprobs_ = false;
  size_t ended_choices_ = 0;
  uint64_t reply_tokens_ = 0;
  std::deque<pb::GenerateEvent> pending_;
  size_t pending_bytes_ = 0;
  pb::GenerateEvent in_flight_;
};

// gRPC's end of a call; it deletes itself when gRPC is done with it.
class GenerateReactor final : public Reactor {
 public:
  GenerateReactor(GenerateHost& host, grpc::CallbackServerContext* context, const pb::GenerateRequest* request)
      : call_(std::make_shared<GenerateCall>(host, this, context, request)) {
    call_->begin();
  }
  void OnWriteDone(bool ok) override { call_->on_written(ok); }
  void OnCancel() override { call_->on_cancel(); }
  void OnDone() override { delete this; }

 private:
  const std::shared_ptr<GenerateCall> call_;
};

}  // namespace

grpc::ServerWriteReactor<pb::GenerateEvent>* begin_generate(GenerateHost& host, grpc::CallbackServerContext* context,
                                                            const pb::GenerateRequest* request) {
  return new GenerateReactor(host, context, request);
}

}  // namespace tensorfold
