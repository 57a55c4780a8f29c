#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "boost/json.hpp"
#include "coordinator/chat/evaluator.h"
#include "coordinator/chat/reply_parser.h"

namespace tensorfold {

// A piece of a prompt. Only trusted pieces, which the template wrote, may become control tokens; everything that came
// with a request is untrusted, down to the character.
struct PromptSegment {
  std::string text;
  bool trusted = false;
};

struct Rendered {
  std::vector<PromptSegment> segments;  // neighbours differ in `trusted`; none is empty
  // The whole prompt, equal to what Hugging Face's apply_chat_template gives.
  std::string text() const;
  // Whether the prompt ends inside an open <think> block, so that the reply begins with reasoning.
  bool opens_reasoning() const;
};

// A model's chat template: the Jinja subset of README.md, with the settings and functions that Hugging Face gives
// templates. Immutable once loaded; all const methods are thread-safe. Templates come from the model folder only, never
// from a client.
class ChatTemplate {
 public:
  struct Options {
    TemplateLimits limits;
    TemplateClock clock;  // for strftime_now, which prints UTC; the system's clock if empty
  };

  // Reads chat_template.jinja, or else `chat_template` of tokenizer_config.json: a string, or a list of {name,
  // template} of which "tool_use" serves requests with tools and "default" the others; or else the built-in template of
  // the family, where there is one (builtin_templates.h). Special tokens (bos_token,
  // eos_token, …) come from tokenizer_config.json. Errors: NotFound (no template), InvalidArgument (unreadable, or
  // outside the subset: by name and line).
  static absl::StatusOr<ChatTemplate> load(const std::filesystem::path& model_folder, const Options& options);
  static absl::StatusOr<ChatTemplate> load(const std::filesystem::path& model_folder) {
    return load(model_folder, Options());
  }
  // From a source, with special tokens as {"bos_token": "…"}.
  static absl::StatusOr<ChatTemplate> parse(std::string_view source, const boost::json::object& special_tokens,
                                            const Options& options);

  // Renders a conversation.
  //   messages   the request's messages, objects as in the OpenAI API. History is taken tolerantly: arguments of a tool
  //   call
  //              that are JSON in a string become an object if the template wants one, and a list of text parts becomes
  //              one string if the template knows no parts.
  //   tools      an array, or null
  //   variables  more variables for the template, such as enable_thinking (chat_template_kwargs)
  // Errors: InvalidArgument with the message of the template's raise_exception, or with a template line where the
  // template fails on these messages; ResourceExhausted where a limit is passed.
  absl::StatusOr<Rendered> render(const boost::json::array& messages, const boost::json::value& tools,
                                  const boost::json::object& variables, bool add_generation_prompt) const;

  // What the replies of this template's model look like.
  const ReplyFormat& reply_format() const { return reply_format_; }
  const std::string& source() const { return main_.source; }

 private:
  struct Compiled {
    std::string source;
    std::shared_ptr<const Ast> ast;  // null if there is none
    bool keeps_argument_text = false;
    bool reads_parts = false;
  };

  static absl::StatusOr<Compiled> compile(std::string source, const TemplateLimits& limits);
  static absl::StatusOr<ChatTemplate> make(std::string source, std::string tool_source,
                                           const boost::json::object& special_tokens, const Options& options);

  Options options_;
  Compiled main_;
  Compiled tool_use_;
  std::vector<std::pair<std::string, std::string>> special_tokens_;
  ReplyFormat reply_format_;
};

// A JSON value as a template value; all of it is untrusted. Errors (depth, memory, UTF-8) go to `rt`.
Value value_from_json(Runtime& rt, const boost::json::value& json);

}  // namespace tensorfold
