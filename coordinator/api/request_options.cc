#include "coordinator/api/request_options.h"

#include <charconv>

#include "coordinator/api/request_fields.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

void read_sampling(Fields& fields, const RequestDefaults& defaults, SamplingParams* sampling) {
  *sampling = defaults.sampling;
  if (auto value = fields.number("temperature")) sampling->temperature = *value;
  if (auto value = fields.number("top_p")) sampling->top_p = *value;
  if (auto value = fields.number("min_p")) sampling->min_p = *value;
  if (auto value = fields.integer("top_k", -1, kMaxVocabulary)) {
    sampling->top_k = *value <= 0 ? 0 : static_cast<uint32_t>(*value);  // -1 and 0: all
  }
  if (auto value = fields.number("repetition_penalty")) sampling->repetition_penalty = *value;
  if (auto value = fields.number("presence_penalty")) sampling->presence_penalty = *value;
  if (auto value = fields.number("frequency_penalty")) sampling->frequency_penalty = *value;
}

void read_logit_bias(Fields& fields, SamplingParams* sampling) {
  const boost::json::object* biases = fields.object("logit_bias");
  if (biases == nullptr) return;
  if (biases->size() > kMaxLogitBias) {
    fields.fail(invalid_value_error(fields.path_of("logit_bias"),
                                    fmt::format("{} entries; at most {}", biases->size(), kMaxLogitBias)));
    return;
  }
  sampling->logit_bias.clear();
  Fields entries(*biases, fields.path_of("logit_bias"));
  for (const auto& member : *biases) {
    const std::string_view key(member.key().data(), member.key().size());
    uint32_t id = 0;
    const auto [end, ec] = std::from_chars(key.data(), key.data() + key.size(), id);
    // "007" would name token 7 twice beside "7".
    const bool canonical = key == "0" || (!key.empty() && key[0] != '0');
    if (ec != std::errc() || end != key.data() + key.size() || !canonical || id >= kMaxVocabulary) {
      fields.fail(invalid_value_error(entries.path_of(key.substr(0, 32)), "the key is not a token id"));
      return;
    }
    const std::optional<double> bias = entries.number(key);
    if (bias) sampling->logit_bias.push_back({id, *bias});
  }
  if (entries.failed()) fields.fail(*entries.error());
}

void read_seed(Fields& fields, RequestOptions* options) {
  const boost::json::value* value = fields.get("seed");
  if (value == nullptr) return;
  if (const int64_t* i = value->if_int64()) {
    options->seed = static_cast<uint64_t>(*i);
  } else if (const uint64_t* u = value->if_uint64()) {
    options->seed = *u;
  } else {
    fields.fail(invalid_type_error(fields.path_of("seed"), "an integer of 64 bits", json_type_name(*value)));
  }
}

void read_stop(Fields& fields, RequestOptions* options) {
  const boost::json::value* value = fields.get("stop");
  if (value == nullptr) return;
  boost::json::array one;
  if (value->is_string()) one.push_back(*value);
  const boost::json::array* stops = value->is_string() ? &one : value->if_array();
  if (stops == nullptr) {
    fields.fail(invalid_type_error("stop", "a string or an array of strings", json_type_name(*value)));
    return;
  }
  if (stops->size() > kMaxStops) {
    fields.fail(invalid_value_error("stop", fmt::format("{} strings; at most {}", stops->size(), kMaxStops)));
    return;
  }
  for (size_t i = 0; i < stops->size(); ++i) {
    const std::string path = value->is_string() ? "stop" : fmt::format("stop[{}]", i);
    const boost::json::string* text = (*stops)[i].if_string();
    if (text == nullptr) {
      fields.fail(invalid_type_error(path, "a string", json_type_name((*stops)[i])));
      return;
    }
    if (text->empty() || text->size() > kMaxStopBytes) {
      fields.fail(invalid_value_error(
          path, fmt::format("a stop string has between 1 and {} bytes, not {}", kMaxStopBytes, text->size())));
      return;
    }
    options->stop.emplace_back(text->data(), text->size());
  }
}

void read_lengths(Fields& fields, RequestOptions* options) {
  const auto tokens = fields.integer("max_tokens", 1, kMaxTokenCount);
  const auto completion = fields.integer("max_completion_tokens", 1, kMaxTokenCount);
  if (tokens && completion && *tokens != *completion) {
    fields.fail(invalid_value_error("max_completion_tokens",
                                    fmt::format("{} contradicts max_tokens, which is {}", *completion, *tokens)));
  }
  if (completion || tokens) options->max_tokens = static_cast<uint32_t>(completion ? *completion : *tokens);
  if (auto value = fields.integer("min_tokens", 0, kMaxTokenCount)) options->min_tokens = static_cast<uint32_t>(*value);
  if (options->max_tokens && options->min_tokens > *options->max_tokens) {
    fields.fail(invalid_value_error(
        "min_tokens", fmt::format("{} is over max_tokens, which is {}", options->min_tokens, *options->max_tokens)));
  }
}

void read_streaming(Fields& fields, RequestOptions* options) {
  options->stream = fields.boolean("stream").value_or(false);
  const boost::json::object* stream_options = fields.object("stream_options");
  if (stream_options == nullptr) return;
  if (!options->stream) {
    fields.fail(invalid_value_error("stream_options", "only allowed with \"stream\": true"));
    return;
  }
  Fields inner(*stream_options, "stream_options");
  options->include_usage = inner.boolean("include_usage").value_or(false);
  options->progress = inner.boolean("progress").value_or(false);
  inner.ignore({"include_obfuscation"});  // padding against traffic analysis; the reply is the same
  if (auto error = inner.finish()) fields.fail(*error);
}

void read_priority(Fields& fields, RequestOptions* options) {
  const std::optional<std::string> name = fields.string("priority", kMaxNameBytes);
  if (!name) return;
  if (const std::optional<Priority> priority = parse_priority(*name)) {
    options->priority = *priority;
  } else {
    fields.fail(invalid_value_error(fields.path_of("priority"), "it is neither \"foreground\" nor \"background\""));
  }
}

}  // namespace

RequestOptions read_options(Fields& fields, const RequestDefaults& defaults) {
  RequestOptions options;
  read_sampling(fields, defaults, &options.sampling);
  read_logit_bias(fields, &options.sampling);
  read_seed(fields, &options);
  read_stop(fields, &options);
  if (auto ids = fields.ids("stop_token_ids", kMaxStopIds)) options.stop_token_ids = std::move(*ids);
  read_lengths(fields, &options);
  if (auto value = fields.integer("n", 1, kMaxChoices)) options.n = static_cast<uint32_t>(*value);
  read_streaming(fields, &options);
  options.draft = fields.boolean("draft").value_or(true);
  options.cache = fields.boolean("cache").value_or(true);
  options.return_token_ids = fields.boolean("return_token_ids").value_or(false);
  options.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  read_priority(fields, &options);
  // For the caller's own books, or about how a hosted service bills, stores and routes: nothing of a reply depends on
  // them.
  fields.ignore(
      {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"});
  if (auto error = check_sampling(options.sampling, defaults.vocabulary); error && !fields.failed())
    fields.fail(*error);
  return options;
}

ApiOr<GenerationRequest> make_generation(const RequestOptions& options, std::string id, std::vector<uint32_t> prompt,
                                         const GenerationBounds& bounds) {
  GenerationRequest request;
  request.id = std::move(id);
  request.prompt = std::move(prompt);
  request.min_tokens = options.min_tokens;
  request.sampling = options.sampling;
  request.seed = options.seed;
  request.n = options.n;
  request.stop = options.stop;
  request.stop_ids = options.stop_token_ids;
  request.ignore_eos = options.ignore_eos;
  request.draft = options.draft;
  request.cache = options.cache;
  request.logprobs = options.logprobs;
  request.return_token_ids = options.return_token_ids;
  request.progress = options.progress;
  request.priority = options.priority;
  if (auto error = resolve_generation(bounds, options.max_tokens, &request)) return *error;
  return request;
}

}  // namespace tensorfold
