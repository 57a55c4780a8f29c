// The real engine, tokenizer, template and service over a model that says what a test tells it to: no weights, no
// ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/chat/chat_template.h"
#include "coordinator/schedule/engine.h"
#include "coordinator/service/metrics.h"
#include "coordinator/service/model_service.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace tensorfold {

/// Predicts token i of every reply to be script[i], then the end token for ever; without a script, tokens that depend
/// on the last one and never end.
class ScriptedModel : public ClusterLink, public PassExecutor {
 public:
  ScriptedModel(uint32_t vocabulary, uint32_t end_id) : vocabulary_(vocabulary), end_id_(end_id) {}

  void set_script(std::vector<uint32_t> script);
  /// Each pass takes so long.
  void set_pass_time(std::chrono::milliseconds time) { pass_ms_ = time.count(); }
  /// While held, passes wait.
  void hold(bool held);
  /// Passes fail and ranks stay away until it is false again.
  void set_broken(bool broken) { broken_ = broken; }
  uint64_t rows() const { return rows_; }

  PassExecutor& executor() override { return *this; }
  absl::Status try_regroup() override;
  absl::StatusOr<PassResult> execute(PassPlan plan) override;

 private:
  uint32_t next(uint32_t slot, uint64_t position, int32_t token);

  const uint32_t vocabulary_;
  const uint32_t end_id_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool held_ = false;
  std::vector<uint32_t> script_;
  std::map<uint32_t, uint64_t> prompt_end_;  // slot → position after the prompt
  std::atomic<int64_t> pass_ms_{0};
  std::atomic<bool> broken_{false};
  std::atomic<uint64_t> rows_{0};
};

struct ServingOptions {
  EngineOptions engine;
  ModelServiceOptions service;
  uint32_t context = 2048;
  bool chat = true;
};

/// Owns everything below the front ends, with the demo model's tokenizer and template.
class Serving {
 public:
  explicit Serving(const ServingOptions& options = {});
  ~Serving();

  /// The ids of a reply's text, as the model would write them: control words become control tokens.
  std::vector<uint32_t> ids(const std::string& text) const;
  void script(const std::string& text) { model->set_script(ids(text)); }
  /// Waits up to five seconds until the engine has so many running and waiting.
  bool wait_for_load(int active, int queued) const;

  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat;
  std::unique_ptr<ScriptedModel> model;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<ModelService> service;
  ServiceMetrics metrics;
};

}  // namespace tensorfold
