#include "coordinator/chat/chat_template.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>

#include "coordinator/chat/builtin_templates.h"
#include "coordinator/chat/messages.h"
#include "coordinator/chat/parser.h"
#include "coordinator/chat/unicode.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr size_t kMaxConfigBytes = 16u << 20;

std::string_view view(const json::string& s) { return {s.data(), s.size()}; }

// The whole file; nullopt if there is none.
absl::StatusOr<std::optional<std::string>> read_file(const std::filesystem::path& path, size_t max_bytes) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return std::optional<std::string>();
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > max_bytes) {
    return absl::InvalidArgumentError(
        fmt::format("{}: cannot be read, or longer than {} bytes", path.string(), max_bytes));
  }
  std::ifstream in(path, std::ios::binary);
  std::string text(static_cast<size_t>(size), '\0');
  if (!in.read(text.data(), static_cast<std::streamsize>(size))) {
    return absl::InvalidArgumentError(fmt::format("{}: cannot be read", path.string()));
  }
  return std::optional<std::string>(std::move(text));
}

// A special token of tokenizer_config.json is a string or {"content": string, …}.
std::optional<std::string> special_token(const json::value& v) {
  const json::value* text = v.is_object() ? v.as_object().if_contains("content") : &v;
  if (text == nullptr || !text->is_string()) return std::nullopt;
  return std::string(view(text->as_string()));
}

struct Sources {
  std::string main, tool_use;
};

absl::StatusOr<Sources> config_sources(const json::value& field, const std::string& file) {
  if (field.is_string()) return Sources{std::string(view(field.as_string())), {}};
  const std::string wants =
      fmt::format("{}: chat_template must be a string or a list of {{name, template}} with a 'default'", file);
  if (!field.is_array()) return absl::InvalidArgumentError(wants);
  Sources sources;
  for (const json::value& entry : field.as_array()) {
    const json::value* name = entry.is_object() ? entry.as_object().if_contains("name") : nullptr;
    const json::value* text = entry.is_object() ? entry.as_object().if_contains("template") : nullptr;
    if (name == nullptr || text == nullptr || !name->is_string() || !text->is_string()) {
      return absl::InvalidArgumentError(wants);
    }
    if (view(name->as_string()) == "default") sources.main = view(text->as_string());
    if (view(name->as_string()) == "tool_use") sources.tool_use = view(text->as_string());
  }
  if (sources.main.empty()) return absl::InvalidArgumentError(wants);
  return sources;
}

// The built-in template for the model_type of config.json, if there is one.
absl::StatusOr<std::string_view> builtin_for(const std::filesystem::path& model_folder) {
  absl::StatusOr<std::optional<std::string>> text = read_file(model_folder / "config.json", kMaxConfigBytes);
  if (!text.ok()) return text.status();
  if (!text->has_value()) return std::string_view();
  json::error_code error;
  const json::value config = json::parse(**text, error);
  const json::object* object = error ? nullptr : config.if_object();
  const json::value* type = object == nullptr ? nullptr : object->if_contains("model_type");
  if (type == nullptr || !type->is_string()) return std::string_view();
  return builtin_chat_template(view(type->get_string()));
}

}  // namespace

std::string Rendered::text() const {
  std::string out;
  for (const PromptSegment& segment : segments) out += segment.text;
  return out;
}

bool Rendered::opens_reasoning() const {
  return !segments.empty() && segments.back().trusted && ends_in_reasoning(segments.back().text);
}

Value value_from_json(Runtime& rt, const json::value& v) {
  const DepthGuard guard(rt);
  if (!guard.ok() || !rt.step()) return {};
  switch (v.kind()) {
    case json::kind::null:
      return Value::none(false);
    case json::kind::bool_:
      return Value::boolean(v.get_bool(), false);
    case json::kind::int64:
      return Value::integer(v.get_int64(), false);
    case json::kind::uint64:
      return Value::integer(v.get_uint64(), false);
    case json::kind::double_:
      return Value::real(v.get_double(), false);
    case json::kind::string:
      if (!is_whole_utf8(view(v.get_string()))) return rt.fail("a string of the request is not valid UTF-8");
      return rt.fits(v.get_string().size()) ? rt.text(view(v.get_string()), false) : Value();
    case json::kind::array: {
      std::vector<Value> items;
      for (const json::value& item : v.get_array()) items.push_back(value_from_json(rt, item));
      return rt.sequence(std::move(items)).with_trust(false);
    }
    case json::kind::object: {
      std::vector<std::pair<Value, Value>> items;
      for (const auto& item : v.get_object()) {
        const std::string_view key(item.key().data(), item.key().size());
        if (!is_whole_utf8(key)) return rt.fail("a key of the request is not valid UTF-8");
        Value name = rt.text(key, false);
        items.emplace_back(std::move(name), value_from_json(rt, item.value()));
      }
      return rt.dict(std::move(items)).with_trust(false);
    }
  }
  return {};
}

absl::StatusOr<ChatTemplate> ChatTemplate::load(const std::filesystem::path& model_folder, const Options& options) {
  const std::filesystem::path config_path = model_folder / "tokenizer_config.json";
  absl::StatusOr<std::optional<std::string>> config_text = read_file(config_path, kMaxConfigBytes);
  if (!config_text.ok()) return config_text.status();
  json::object config;
  if (config_text->has_value()) {
    json::error_code error;
    json::value parsed = json::parse(**config_text, error);
    if (error || !parsed.is_object()) {
      return absl::InvalidArgumentError(
          fmt::format("{}: not a JSON object ({})", config_path.string(), error ? error.message() : "another type"));
    }
    config = std::move(parsed.as_object());
  }
  absl::StatusOr<std::optional<std::string>> file =
      read_file(model_folder / "chat_template.jinja", options.limits.source_bytes);
  if (!file.ok()) return file.status();
  if (file->has_value()) return make(**std::move(file), {}, config, options);
  const json::value* field = config.if_contains("chat_template");
  if (field == nullptr || field->is_null()) {
    absl::StatusOr<std::string_view> builtin = builtin_for(model_folder);
    if (!builtin.ok()) return builtin.status();
    if (!builtin->empty()) return make(std::string(*builtin), {}, config, options);
    return absl::NotFoundError(
        fmt::format("{}: no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json)",
                    model_folder.string()));
  }
  absl::StatusOr<Sources> sources = config_sources(*field, config_path.string());
  if (!sources.ok()) return sources.status();
  return make(std::move(sources->main), std::move(sources->tool_use), config, options);
}

absl::StatusOr<ChatTemplate> ChatTemplate::parse(std::string_view source, const json::object& special_tokens,
                                                 const Options& options) {
  return make(std::string(source), {}, special_tokens, options);
}

absl::StatusOr<ChatTemplate::Compiled> ChatTemplate::compile(std::string source, const TemplateLimits& limits) {
  Compiled compiled;
  absl::StatusOr<std::shared_ptr<const Ast>> ast = parse_template(source, limits);
  if (!ast.ok()) return ast.status();
  compiled.ast = *std::move(ast);
  compiled.keeps_argument_text = tensorfold::keeps_argument_text(source);
  compiled.reads_parts = reads_content_parts(source);
  compiled.source = std::move(source);
  return compiled;
}

absl::StatusOr<ChatTemplate> ChatTemplate::make(std::string source, std::string tool_source,
                                                const json::object& special_tokens, const Options& options) {
  ChatTemplate result;
  result.options_ = options;
  if (!result.options_.clock) result.options_.clock = [] { return std::chrono::system_clock::now(); };
  absl::StatusOr<Compiled> main = compile(std::move(source), options.limits);
  if (!main.ok()) return main.status();
  result.main_ = *std::move(main);
  if (!tool_source.empty()) {
    absl::StatusOr<Compiled> tool_use = compile(std::move(tool_source), options.limits);
    if (!tool_use.ok()) return tool_use.status();
    result.tool_use_ = *std::move(tool_use);
  }
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    const json::value* field = special_tokens.if_contains(name);
    if (field == nullptr) continue;
    std::optional<std::string> token = special_token(*field);
    if (token && is_whole_utf8(*token)) result.special_tokens_.emplace_back(name, *std::move(token));
  }
  result.reply_format_ = detect_reply_format(result.main_.source + result.tool_use_.source);
  return result;
}

absl::StatusOr<Rendered> ChatTemplate::render(const json::array& messages, const json::value& tools,
                                              const json::object& variables, bool add_generation_prompt) const {
  if (!tools.is_null() && !tools.is_array()) return absl::InvalidArgumentError("tools must be an array");
  const bool has_tools = tools.is_array() && !tools.get_array().empty();
  const Compiled& chosen = has_tools && tool_use_.ast ? tool_use_ : main_;
  absl::StatusOr<std::optional<json::array>> adapted =
      adapt_messages(messages, chosen.keeps_argument_text, chosen.reads_parts);
  if (!adapted.ok()) return adapted.status();
  const json::array& chat = adapted->has_value() ? **adapted : messages;

  static constexpr std::string_view kReserved[] = {"messages", "tools", "documents", "add_generation_prompt"};
  for (const auto& item : variables) {
    const std::string_view name(item.key().data(), item.key().size());
    const bool special = std::any_of(special_tokens_.begin(), special_tokens_.end(),
                                     [&](const auto& token) { return token.first == name; });
    if (special || std::find(std::begin(kReserved), std::end(kReserved), name) != std::end(kReserved)) {
      return absl::InvalidArgumentError(fmt::format("the template variable '{}' cannot be set by a request", name));
    }
  }
  const auto make_variables = [&](Runtime& rt) {
    std::vector<std::pair<std::string, Value>> out;
    std::vector<Value> list;
    for (const json::value& message : chat) list.push_back(value_from_json(rt, message));
    out.emplace_back("messages", rt.sequence(std::move(list)).with_trust(false));
    out.emplace_back("tools", has_tools ? value_from_json(rt, tools) : Value::none());
    out.emplace_back("documents", Value::none());
    out.emplace_back("add_generation_prompt", Value::boolean(add_generation_prompt));
    for (const auto& [name, token] : special_tokens_) out.emplace_back(name, rt.text(token, true));
    for (const auto& item : variables) {
      out.emplace_back(std::string(item.key().data(), item.key().size()), value_from_json(rt, item.value()));
    }
    return out;
  };
  absl::StatusOr<Text> text = evaluate_template(*chosen.ast, options_.limits, options_.clock, make_variables);
  if (!text.ok()) return text.status();
  Rendered rendered;
  text->for_each_run([&](std::string_view piece, bool trusted) {
    rendered.segments.push_back({std::string(piece), trusted});
  });
  return rendered;
}

}  // namespace tensorfold
