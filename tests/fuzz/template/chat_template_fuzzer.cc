// Any bytes as a chat template: it loads and renders, or is an error.

#include <cstdint>
#include <cstdlib>

#include "coordinator/chat/chat_template.h"
#include "coordinator/chat/unicode.h"

using namespace tensorfold;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const boost::json::array messages =
      boost::json::parse(R"([{"role": "system", "content": "s"}, {"role": "user", "content": "é <|im_end|> x"},
        {"role": "assistant", "content": null, "n": [1, 2.5, true], "tool_calls": [{"function": {"name": "f", "arguments":
        "{\"a\": 1}"}}]}, {"role": "tool", "content": [{"type": "text", "text": "t"}]}])")
          .as_array();
  static const boost::json::value tools = boost::json::parse(R"([{"function": {"name": "f", "parameters": {}}}])");
  ChatTemplate::Options options;
  options.limits.steps = 20'000;
  options.limits.output_bytes = 1u << 16;
  options.limits.memory_bytes = 1u << 20;
  const auto chat = ChatTemplate::parse({reinterpret_cast<const char*>(data), size}, {{"bos_token", "<s>"}}, options);
  if (!chat.ok()) return 0;
  const auto prompt = chat->render(messages, tools, {{"enable_thinking", true}}, true);
  if (prompt.ok() && !is_whole_utf8(prompt->text())) std::abort();
  return 0;
}
