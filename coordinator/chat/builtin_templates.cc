#include "coordinator/chat/builtin_templates.h"

#include <string>

#include "absl/strings/str_replace.h"

namespace tensorfold {
namespace {

// One text for both versions, which differ in three places alone: @T@ is the marker of tags (V4.1 has a space behind
// it),
// @BLOCK@ the name of the block around calls, @BEFORE@ what precedes one.
constexpr std::string_view kDeepSeek =
    R"J(
{%- set thinking_on = enable_thinking if enable_thinking is defined else (thinking if thinking is defined else true) -%}
{%- macro call_block(calls) -%}
@BEFORE@{{ '<@T@@BLOCK@>\n' }}
{%- for call in calls -%}
{%- set f = call.function if call.function is defined else call -%}
{{ '<@T@invoke name="' ~ f.name ~ '">\n' }}
{%- for key, value in f.arguments.items() -%}
{{ '<@T@parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' }}
{{- value if value is string else value | tojson(ensure_ascii=False) -}}
{{ '</@T@parameter>\n' }}
{%- endfor -%}
{{ '</@T@invoke>\n' }}
{%- endfor -%}
{{ '</@T@@BLOCK@>' }}
{%- endmacro -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- set ns = namespace(system='', open_user=false) -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}
{%- set ns.system = (ns.system ~ '\n\n' if ns.system else '') ~ (message.content or '') -%}
{%- endif -%}
{%- endfor -%}
{{- ns.system -}}
{%- if tools -%}
{{ ('\n\n' if ns.system else '') ~ '## Tools\n\nCall tools by writing a block of this form:\n\n<@T@@BLOCK@>\n<@T@invoke name="NAME">\n<@T@parameter name="KEY" string="true">text</@T@parameter>\n</@T@invoke>\n</@T@@BLOCK@>\n\nA parameter that is not a string has string="false" and its value as JSON. The tools, one JSON schema a line:\n' }}
{%- for tool in tools -%}
{{ '\n' ~ ((tool.function if tool.function is defined else tool) | tojson(ensure_ascii=False)) }}
{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '\n\n' if ns.open_user else '<｜User｜>' -}}
{{- message.content -}}
{%- set ns.open_user = true -%}
{%- elif message.role == 'tool' -%}
{{- '\n\n' if ns.open_user else '<｜User｜>' -}}
{{- '<tool_result>' -}}{{- message.content -}}{{- '</tool_result>' -}}
{%- set ns.open_user = true -%}
{%- elif message.role == 'assistant' -%}
{{- '<｜Assistant｜></think>' -}}
{{- message.content or '' -}}
{%- if message.tool_calls -%}
{{- call_block(message.tool_calls) -}}
{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- set ns.open_user = false -%}
{%- elif message.role not in ['system', 'developer'] -%}
{{- raise_exception('messages of role ' ~ message.role ~ ' have no place in this format') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' ~ ('<think>' if thinking_on else '</think>') -}}
{%- endif -%}
)J";

std::string with(std::string_view marker, std::string_view block, std::string_view before) {
  return absl::StrReplaceAll(
      std::string(kDeepSeek),
      {{"@T@", std::string(marker)}, {"@BLOCK@", std::string(block)}, {"@BEFORE@", std::string(before)}});
}

}  // namespace

std::string_view builtin_chat_template(std::string_view model_type) {
  static const std::string v4 = with("｜DSML｜", "tool_calls", "");
  static const std::string v41 = with("｜DSML｜ ", "calls", "{{- '\\n\\n' -}}");
  if (model_type == "deepseek_v4") return v4;
  if (model_type == "deepseek_v41" || model_type == "deepseek_v41_text") return v41;
  return {};
}

}  // namespace tensorfold
