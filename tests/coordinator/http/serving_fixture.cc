#include "tests/coordinator/http/serving_fixture.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace tensorfold {
namespace {

constexpr const char* kModelFolder = TENSORFOLD_SOURCE_DIR "/deploy/models/sprout";

template <typename T>
T must(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(std::string(value.status().message()));
  return *std::move(value);
}

}  // namespace

void ScriptedModel::set_script(std::vector<uint32_t> script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
}

void ScriptedModel::hold(bool held) {
  const std::lock_guard lock(mutex_);
  held_ = held;
  wake_.notify_all();
}

absl::Status ScriptedModel::try_regroup() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (broken_) return absl::UnavailableError("rank 1 (host b) is away");
  return absl::OkStatus();
}

uint32_t ScriptedModel::next(uint32_t slot, uint64_t position, int32_t token) {
  if (script_.empty()) return 300 + (static_cast<uint32_t>(token) * 31 + 7) % 3000;
  const uint64_t index = position + 1 - prompt_end_.at(slot);
  return index < script_.size() ? script_[index] : end_id_;
}

absl::StatusOr<PassResult> ScriptedModel::execute(PassPlan plan) {
  std::this_thread::sleep_for(std::chrono::milliseconds(pass_ms_.load()));
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return !held_; });
  if (broken_) return absl::UnavailableError("rank 1 (host b, pid 7) was lost: its connection broke");
  rows_ += plan.rows();
  PassResult result;
  PassReport& report = result.reports.emplace_back();
  for (const SequencePlan& sequence : plan.sequences) {
    if (sequence.fresh) prompt_end_.erase(sequence.slot);
    for (const RowWant& want : sequence.wants) {
      const uint64_t position = sequence.first_position + want.row;
      prompt_end_.try_emplace(sequence.slot, position + 1);  // the first row wanted is the prompt's last
      const uint32_t best = next(sequence.slot, position, sequence.tokens[want.row]);
      RowReport row{.slot = sequence.slot, .row = want.row, .first_id = 0, .candidates = {}, .logits = {}};
      if (want.top_n == kFullRow) {
        row.logits.assign(vocabulary_, 0.0f);
        row.logits[best] = 40.0f;
        row.logits[(best + 1) % vocabulary_] = 20.0f;
      } else {
        const uint32_t count = want.top_n == kDrawn ? 1 : want.top_n;
        for (uint32_t i = 0; i < count; ++i) {
          row.candidates.push_back(
              {40.0f - 20.0f * static_cast<float>(i), static_cast<int32_t>((best + i) % vocabulary_)});
        }
      }
      report.rows.push_back(std::move(row));
    }
  }
  result.drafts.resize(plan.sequences.size());
  return result;
}

Serving::Serving(const ServingOptions& options) {
  tokenizer = must(Tokenizer::load(std::string(kModelFolder) + "/tokenizer.json"));
  if (options.chat) chat = std::make_unique<ChatTemplate>(must(ChatTemplate::load(kModelFolder)));
  const uint32_t vocabulary = 4096;
  const auto end_id = static_cast<uint32_t>(tokenizer->token_to_id("<|im_end|>").value());
  model = std::make_unique<ScriptedModel>(vocabulary, end_id);
  EngineModel facts;
  facts.context = options.context;
  facts.vocabulary = vocabulary;
  facts.end_ids = {end_id};
  facts.tokenizer = tokenizer.get();
  engine = std::make_unique<Engine>(*model, facts, options.engine);
  ModelServiceOptions service_options = options.service;
  if (service_options.names.empty()) service_options.names = {"sprout", "demo"};
  if (service_options.fingerprint.empty()) service_options.fingerprint = "0123456789abcdef";
  service_options.family = "qwen3_5";
  service_options.format = "bf16";
  service_options.drafters = {"copy"};
  service = must(ModelService::create(*engine, *tokenizer, chat.get(), std::move(service_options)));
  engine->start();
}

Serving::~Serving() {
  model->hold(false);
  engine->stop();
}

std::vector<uint32_t> Serving::ids(const std::string& text) const {
  const std::vector<int32_t> ids = must(tokenizer->encode(text));
  return {ids.begin(), ids.end()};
}

bool Serving::wait_for_load(int active, int queued) const {
  for (int i = 0; i < 500; ++i) {
    const EngineStatus status = engine->status();
    if (status.active == active && status.queued == queued) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace tensorfold
