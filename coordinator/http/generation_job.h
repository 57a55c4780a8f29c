// One generating request from its body to its last byte: admission, events, cancellation. No sockets.
//
// admit() runs on a worker thread; everything after it on the connection's strand.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/http/reply_builder.h"
#include "coordinator/http/route.h"
#include "coordinator/service/event_queue.h"
#include "coordinator/service/metrics.h"
#include "coordinator/service/model_service.h"

namespace tensorfold {

class GenerationJob {
 public:
  struct Context {
    ModelService& service;
    ServiceMetrics& metrics;
    std::string id;
    std::chrono::steady_clock::time_point arrived;
    bool background = false;  // the client's key says so
    // Called by the engine's thread when there are events, not again until pump() took them. Must not block.
    std::function<void()> wake;
    // Whether the client has left meanwhile; asked before the engine is.
    std::function<bool()> gone;
  };

  /// Parses, prepares and submits. An error means that nothing is left running; it is said before any header.
  static ApiOr<std::unique_ptr<GenerationJob>> admit(Endpoint endpoint, std::string_view body, Context context);
  /// Cancels what is left.
  ~GenerationJob();

  bool stream() const { return stream_; }
  std::string begin() { return builder_->begin(); }
  /// Takes what the engine has sent; returns what a stream sends now.
  std::string pump();
  bool done() const { return builder_->done(); }
  const std::optional<ApiError>& error() const { return builder_->error(); }
  /// Once done() without an error: the end of a stream, or the whole body.
  std::string finish() { return builder_->finish(); }
  /// Once done() with an error: how a stream says so, and its end.
  std::string cut() { return builder_->cut() + sse_done(); }
  /// The engine stops at its next round; no more wakes. Further calls do nothing.
  void cancel();

  uint64_t prompt_tokens() const { return prompt_tokens_; }
  uint64_t reply_tokens() const { return builder_->reply_tokens(); }

 private:
  explicit GenerationJob(Context context);

  ApiOr<std::vector<GenerationRequest>> prepare_chat(std::string_view body);
  ApiOr<std::vector<GenerationRequest>> prepare_completion(std::string_view body);
  ReplyHead head(const std::string& model, const RequestOptions& options) const;
  std::optional<ApiError> submit(std::vector<GenerationRequest> requests);
  void record(const GenerationEvent& event, uint32_t part);

  Context context_;
  bool stream_ = false;
  uint64_t prompt_tokens_ = 0;
  std::unique_ptr<ReplyBuilder> builder_;
  std::shared_ptr<EventQueue> queue_;
  std::vector<uint64_t> engine_ids_;
  bool cancelled_ = false;
  uint32_t choices_ = 1;                                          // of one part
  std::vector<std::chrono::steady_clock::time_point> last_seen_;  // [choice], its last tokens; zero: none yet
};

}  // namespace tensorfold
