// What the HTTP and the gRPC front end share: from typed requests to what the engine takes, and who may ask.
//
// prepare_*() and tokenize() render templates and tokenise, which takes long for long prompts: they run on workers(),
// never on the scheduler's thread nor on one that serves sockets. Everything is thread-safe. Errors are those of the
// catalogue (coordinator/api/error.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/api/chat_request.h"
#include "coordinator/api/completion_request.h"
#include "coordinator/api/generation.h"
#include "coordinator/api/reply_parts.h"
#include "coordinator/api/service_bodies.h"
#include "coordinator/chat/chat_template.h"
#include "coordinator/cluster/membership.h"
#include "coordinator/schedule/engine.h"
#include "coordinator/service/api_keys.h"
#include "coordinator/service/worker_pool.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace tensorfold {

/// Whether the cluster can answer now.
struct Readiness {
  bool ready = true;
  std::string reason;  // why not: names the rank
  uint32_t epoch = 0;  // of the membership; 0 before the first
  std::vector<RankStatus> ranks;
};

struct ModelServiceOptions {
  std::vector<std::string> names;  // what requests may call the model: the served name, then aliases. Not empty
  std::string fingerprint;         // numeric fingerprint, 16 hex characters
  std::string family;              // "qwen3_5"
  std::string format;              // of the weights: "bf16", "mlx-4bit-g64"
  std::vector<std::string> drafters;
  int64_t created = 0;  // seconds since 1970; 0: now

  RequestDefaults defaults;                      // for fields that a request leaves out
  uint32_t max_tokens = 0;                       // of a reply that names none; 0: what the context leaves
  std::chrono::milliseconds request_timeout{0};  // 0: none
  std::vector<std::string> api_key_hashes;       // SHA-256 in hex; none: everybody is served
  std::vector<std::string> admin_key_hashes;     // the same, for the /admin routes; none: there are none
  // Requests with one of these keys (hashes as above), or for one of these names, are background whatever they say.
  std::vector<std::string> background_key_hashes;
  std::vector<std::string> background_names;
  int workers = 2;  // threads of workers()
  // "Recent" in "ready means a recent step on every rank". Longer than the longest pass and the engine's ping interval.
  std::chrono::milliseconds recent_step{30000};
  // The cluster's part of readiness(). Called from several threads; must not wait. Empty: a world without ranks to
  // report.
  std::function<Readiness()> readiness;
};

/// A chat request, ready for Engine::submit(), and how its replies are read.
struct PreparedChat {
  GenerationRequest request;
  ReplyParser::Options parser;
};

class ModelService {
 public:
  /// The referenced objects outlive the service. `chat` may be null: the checkpoint has no template, and chat requests
  /// are refused saying so. InvalidArgument: no name, or a key hash that is none.
  static absl::StatusOr<std::unique_ptr<ModelService>> create(Engine& engine, const Tokenizer& tokenizer,
                                                              const ChatTemplate* chat, ModelServiceOptions options);

  /// Template, tokens, bounds. `id` is for logs and the reply.
  ApiOr<PreparedChat> prepare_chat(const ChatRequest& request, std::string id) const;
  /// One engine request a prompt, in order.
  ApiOr<std::vector<GenerationRequest>> prepare_completion(const CompletionRequest& request, std::string id) const;
  /// Engine::submit(), unless a rank is away: what the control plane knows is said at once instead of after a pass has
  /// failed on it. Every front end submits through this.
  ApiOr<uint64_t> submit(GenerationRequest request, GenerationSink sink) const;
  ApiOr<std::vector<uint32_t>> tokenize(const TokenizeRequest& request) const;
  ApiOr<std::string> detokenize(const DetokenizeRequest& request, bool skip_special = false) const;

  /// Every name that the model is served under, the served name first.
  const std::vector<ServedModel>& models() const { return models_; }
  const ServedModel* find_model(std::string_view name) const;
  /// What a request for `model` gets back as its model: the name it used, or the served one.
  std::string reply_model(const std::string& model) const { return model.empty() ? options_.names[0] : model; }

  /// Joins the provider's view with the engine's: passes run, and the last one is recent.
  Readiness readiness() const;

  bool keys_required() const { return keys_.required(); }
  /// Whether there are /admin routes, and whether this is one of their keys.
  bool has_admin() const { return admin_.required(); }
  bool is_admin(std::string_view authorization) const { return admin_.allows(authorization); }
  bool authorized(std::string_view authorization) const { return keys_.allows(authorization); }

  /// Whether the profile makes requests with this Authorization value background.
  bool background_key(std::string_view authorization) const { return background_keys_.holds(authorization); }

  /// "chatcmpl-" and 24 characters: unlike any other of this server, and not guessable.
  std::string new_id(std::string_view prefix) const;

  Engine& engine() const { return engine_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  WorkerPool& workers() const { return *workers_; }
  const ModelServiceOptions& options() const { return options_; }
  uint32_t context() const { return engine_.model().context; }
  double uptime_s() const;

 private:
  ModelService(Engine& engine, const Tokenizer& tokenizer, const ChatTemplate* chat, ModelServiceOptions options,
               ApiKeys keys, ApiKeys background_keys);

  GenerationBounds bounds() const;
  void apply_profile(const std::string& model, GenerationRequest* request) const;
  ApiOr<Rendered> render(const std::vector<ChatMessage>& messages, const boost::json::array& tools,
                         const boost::json::object& variables, bool add_generation_prompt) const;
  ApiOr<std::vector<uint32_t>> encode(const Rendered& rendered) const;
  // Text from a client, which never becomes a control token.
  ApiOr<std::vector<uint32_t>> encode_text(std::string_view text, bool add_special_tokens) const;

  Engine& engine_;
  const Tokenizer& tokenizer_;
  const ChatTemplate* chat_;
  const ModelServiceOptions options_;
  const ApiKeys keys_;
  ApiKeys admin_;
  const ApiKeys background_keys_;
  std::vector<ServedModel> models_;
  std::chrono::steady_clock::time_point started_;
  std::unique_ptr<WorkerPool> workers_;
};

}  // namespace tensorfold
