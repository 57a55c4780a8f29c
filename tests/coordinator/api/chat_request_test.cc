#include "coordinator/api/chat_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <limits>
#include <string>

#include "fmt/format.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

constexpr const char* kUser = R"({"role":"user","content":"hi"})";

// A body with one user message and `extra` members.
std::string body(const std::string& extra = "", const std::string& messages = kUser) {
  return fmt::format(R"({{"model":"m","messages":[{}]{}{}}})", messages, extra.empty() ? "" : ",", extra);
}

ChatRequest parsed(const std::string& text, const RequestDefaults& defaults = {}) {
  ApiOr<ChatRequest> request = parse_chat_request(text, defaults);
  if (!request.ok()) {
    ADD_FAILURE() << request.error().message << "\n" << text;
    return {};
  }
  return *request;
}

ApiError refused(const std::string& text, const RequestDefaults& defaults = {}) {
  const ApiOr<ChatRequest> request = parse_chat_request(text, defaults);
  if (request.ok()) {
    ADD_FAILURE() << "accepted: " << text;
    return {};
  }
  EXPECT_EQ(request.error().http_status(), 400) << text;
  return request.error();
}

// Protects the defaults and every option's way into the request.
TEST(ChatRequest, ReadsEveryOption) {
  const ChatRequest plain = parsed(body());
  EXPECT_EQ(plain.model, "m");
  EXPECT_EQ(plain.options.n, 1u);
  EXPECT_TRUE(plain.options.draft);
  EXPECT_FALSE(plain.options.seed.has_value());
  EXPECT_FALSE(plain.options.max_tokens.has_value());
  EXPECT_FALSE(plain.options.logprobs.has_value());

  const ChatRequest full = parsed(body(R"("temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.05,"seed":-1,
    "stop":["a","b"],"stop_token_ids":[1,2],"presence_penalty":-2,"frequency_penalty":2,"repetition_penalty":1.1,
    "logit_bias":{"5":-100,"7":1.5},"n":16,"logprobs":true,"top_logprobs":20,"max_completion_tokens":9,"min_tokens":3,
    "stream":true,"stream_options":{"include_usage":true,"progress":true},"draft":false,"return_token_ids":true,"ignore_eos":true,
    "tool_choice":"none","response_format":{"type":"text"},"enable_thinking":false,"reasoning_effort":"low",
    "chat_template_kwargs":{"preserve_thinking":true},"user":"u","metadata":{"a":"b"},"store":false)"));
  const RequestOptions& o = full.options;
  EXPECT_EQ(o.sampling.temperature, 0.5);
  EXPECT_EQ(o.sampling.top_p, 0.9);
  EXPECT_EQ(o.sampling.top_k, 40u);
  EXPECT_EQ(o.sampling.min_p, 0.05);
  EXPECT_EQ(o.seed, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(o.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(o.stop_token_ids, (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(o.sampling.presence_penalty, -2);
  EXPECT_EQ(o.sampling.frequency_penalty, 2);
  EXPECT_EQ(o.sampling.repetition_penalty, 1.1);
  ASSERT_EQ(o.sampling.logit_bias.size(), 2u);
  EXPECT_EQ(o.sampling.logit_bias[0].id, 5u);
  EXPECT_EQ(o.sampling.logit_bias[1].bias, 1.5);
  EXPECT_EQ(o.n, 16u);
  EXPECT_EQ(o.logprobs, 20u);
  EXPECT_EQ(o.max_tokens, 9u);
  EXPECT_EQ(o.min_tokens, 3u);
  EXPECT_TRUE(o.stream && o.include_usage && o.progress && o.return_token_ids && o.ignore_eos);
  EXPECT_FALSE(o.draft);
  EXPECT_FALSE(full.use_tools);
  EXPECT_EQ(boost::json::serialize(full.chat_template_kwargs),
            R"({"preserve_thinking":true,"enable_thinking":false,"reasoning_effort":"low"})");
}

// Protects the profile's defaults, and null as "left out" (clients send explicit nulls).
TEST(ChatRequest, DefaultsAndNulls) {
  RequestDefaults defaults;
  defaults.sampling.temperature = 0.6;
  defaults.sampling.top_k = 20;
  const ChatRequest request = parsed(body(R"("temperature":null,"stop":null,"seed":null,"tools":null,"n":null,
    "response_format":null,"stream_options":null,"logit_bias":null,"max_tokens":null,"functions":null)"),
                                     defaults);
  EXPECT_EQ(request.options.sampling.temperature, 0.6);
  EXPECT_EQ(request.options.sampling.top_k, 20u);
  EXPECT_EQ(parsed(body(R"("top_k":-1)"), defaults).options.sampling.top_k, 0u);
  EXPECT_EQ(parsed(R"({"messages":[{"role":"user","content":"x"}]})").model, "");
}

// Protects "temperature accepted late then refused": every range and type is checked before any work, and named.
TEST(ChatRequest, RangesAndTypesAreNamed) {
  const struct {
    const char* extra;
    const char* param;
    ErrorCode code;
  } cases[] = {
      {R"("temperature":2.1)", "temperature", ErrorCode::kInvalidValue},
      {R"("temperature":-0.1)", "temperature", ErrorCode::kInvalidValue},
      {R"("temperature":"0.5")", "temperature", ErrorCode::kInvalidType},
      {R"("temperature":true)", "temperature", ErrorCode::kInvalidType},
      {R"("temperature":1e999)", "temperature", ErrorCode::kInvalidType},
      {R"("top_p":1.5)", "top_p", ErrorCode::kInvalidValue},
      {R"("top_k":-2)", "top_k", ErrorCode::kInvalidValue},
      {R"("top_k":1.5)", "top_k", ErrorCode::kInvalidType},
      {R"("min_p":-1)", "min_p", ErrorCode::kInvalidValue},
      {R"("presence_penalty":3)", "presence_penalty", ErrorCode::kInvalidValue},
      {R"("frequency_penalty":-2.5)", "frequency_penalty", ErrorCode::kInvalidValue},
      {R"("repetition_penalty":0)", "repetition_penalty", ErrorCode::kInvalidValue},
      {R"("n":0)", "n", ErrorCode::kInvalidValue},
      {R"("n":17)", "n", ErrorCode::kInvalidValue},
      {R"("n":18446744073709551615)", "n", ErrorCode::kInvalidValue},
      {R"("n":1e300)", "n", ErrorCode::kInvalidValue},
      {R"("seed":1.5)", "seed", ErrorCode::kInvalidType},
      {R"("seed":18446744073709551616)", "seed", ErrorCode::kInvalidType},
      {R"("stop":"")", "stop", ErrorCode::kInvalidValue},
      {R"("stop":["a",""])", "stop[1]", ErrorCode::kInvalidValue},
      {R"("stop":[["a"]])", "stop[0]", ErrorCode::kInvalidType},
      {R"("stop":7)", "stop", ErrorCode::kInvalidType},
      {R"("stop":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"])", "stop",
       ErrorCode::kInvalidValue},
      {R"("stop_token_ids":[1,-1])", "stop_token_ids[1]", ErrorCode::kInvalidValue},
      {R"("stop_token_ids":[[1]])", "stop_token_ids[0]", ErrorCode::kInvalidType},
      {R"("logit_bias":{"x":1})", "logit_bias.x", ErrorCode::kInvalidValue},
      {R"("logit_bias":{"07":1})", "logit_bias.07", ErrorCode::kInvalidValue},
      {R"("logit_bias":{"7":101})", "logit_bias.7", ErrorCode::kInvalidValue},
      {R"("logit_bias":{"7":"1"})", "logit_bias.7", ErrorCode::kInvalidType},
      {R"("logit_bias":[1])", "logit_bias", ErrorCode::kInvalidType},
      {R"("logprobs":5)", "logprobs", ErrorCode::kInvalidType},
      {R"("logprobs":true,"top_logprobs":21)", "top_logprobs", ErrorCode::kInvalidValue},
      {R"("top_logprobs":3)", "top_logprobs", ErrorCode::kInvalidValue},
      {R"("max_tokens":0)", "max_tokens", ErrorCode::kInvalidValue},
      {R"("max_tokens":-1)", "max_tokens", ErrorCode::kInvalidValue},
      {R"("max_tokens":5,"max_completion_tokens":6)", "max_completion_tokens", ErrorCode::kInvalidValue},
      {R"("max_tokens":5,"min_tokens":6)", "min_tokens", ErrorCode::kInvalidValue},
      {R"("stream":"yes")", "stream", ErrorCode::kInvalidType},
      {R"("stream_options":{"include_usage":true})", "stream_options", ErrorCode::kInvalidValue},
      {R"("stream":true,"stream_options":{"progress":1})", "stream_options.progress", ErrorCode::kInvalidType},
      {R"("stream":true,"stream_options":{"usage":true})", "stream_options.usage", ErrorCode::kUnknownField},
      {R"("draft":"off")", "draft", ErrorCode::kInvalidType},
      {R"("tools":{})", "tools", ErrorCode::kInvalidType},
      {R"("tools":[[]])", "tools[0]", ErrorCode::kInvalidType},
      {R"("tools":[{"type":"function"}])", "tools[0].function", ErrorCode::kMissingField},
      {R"("tools":[{"type":"function","function":{"name":7}}])", "tools[0].function.name", ErrorCode::kInvalidType},
      {R"("tools":[{"type":"function","function":{}}])", "tools[0].function.name", ErrorCode::kMissingField},
      {R"("tools":[{"type":"function","function":{"name":"f","parameters":[]}}])", "tools[0].function.parameters",
       ErrorCode::kInvalidType},
      {R"("reasoning_effort":"extreme")", "reasoning_effort", ErrorCode::kInvalidValue},
      {R"("enable_thinking":true,"chat_template_kwargs":{"enable_thinking":false})", "enable_thinking",
       ErrorCode::kInvalidValue},
  };
  for (const auto& c : cases) {
    const ApiError error = refused(body(c.extra));
    EXPECT_EQ(error.param, c.param) << c.extra << ": " << error.message;
    EXPECT_EQ(error.code, c.code) << c.extra << ": " << error.message;
    EXPECT_THAT(error.message, HasSubstr(c.param)) << c.extra;
  }
}

// Protects "accepted and ignored": what this server does not do is refused by name, with the reason.
TEST(ChatRequest, UnsupportedIsRefusedByName) {
  const struct {
    const char* extra;
    const char* param;
  } cases[] = {
      {R"("tool_choice":"required")", "tool_choice"},
      {R"("tool_choice":{"type":"function","function":{"name":"f"}})", "tool_choice"},
      {R"("response_format":{"type":"json_object"})", "response_format.type"},
      {R"("response_format":{"type":"json_schema","json_schema":{}})", "response_format.type"},
      {R"("parallel_tool_calls":false)", "parallel_tool_calls"},
      {R"("modalities":["text","audio"])", "modalities"},
      {R"("functions":[])", "functions"},
      {R"("function_call":"auto")", "function_call"},
      {R"("audio":{})", "audio"},
      {R"("chat_template":"{{ x }}")", "chat_template"},
      {R"("chat_template_kwargs":{"messages":[]})", "chat_template_kwargs.messages"},
      {R"("tools":[{"type":"web_search"}])", "tools[0].type"},
      {R"("tools":[{"type":"function","function":{"name":"f","strict":true}}])", "tools[0].function.strict"},
  };
  for (const auto& c : cases) {
    const ApiError error = refused(body(c.extra));
    EXPECT_EQ(error.param, c.param) << error.message;
    EXPECT_EQ(error.code, ErrorCode::kUnsupported) << error.message;
  }
  parsed(body(R"("parallel_tool_calls":true,"modalities":["text"])"));
}

// Protects against silently ignored options: an unknown field is refused, with a suggestion where one is near.
TEST(ChatRequest, UnknownFieldsAreRefused) {
  ApiError error = refused(body(R"("temprature":0.5)"));
  EXPECT_EQ(error.code, ErrorCode::kUnknownField);
  EXPECT_EQ(error.param, "temprature");
  EXPECT_THAT(error.message, HasSubstr("did you mean 'temperature'?"));
  error = refused(body(R"("guided_json":{})"));
  EXPECT_EQ(error.param, "guided_json");
}

// Protects "nested arrays crash", broken and hostile JSON.
TEST(ChatRequest, HostileJson) {
  EXPECT_EQ(refused("").code, ErrorCode::kInvalidJson);
  EXPECT_EQ(refused("{").code, ErrorCode::kInvalidJson);
  EXPECT_EQ(refused("[]").code, ErrorCode::kInvalidType);
  EXPECT_EQ(refused("null").code, ErrorCode::kInvalidType);
  EXPECT_EQ(refused(body() + "x").code, ErrorCode::kInvalidJson);
  EXPECT_EQ(refused(std::string(100000, '[')).code, ErrorCode::kInvalidJson);
  EXPECT_THAT(refused(body("\"tools\":" + std::string(100, '[') + std::string(100, ']'))).message,
              HasSubstr("nested deeper than 64"));
  EXPECT_EQ(refused(body("\"user\":\"\xff\xfe\"")).code, ErrorCode::kInvalidJson);
  EXPECT_EQ(refused(body("\"user\":\"\\ud800\"")).code, ErrorCode::kInvalidJson);
  EXPECT_EQ(refused(R"({"messages":[[[[]]]]})").param, "messages[0]");
  EXPECT_EQ(refused(R"({"messages":[]})").param, "messages");
  EXPECT_EQ(refused(R"({"messages":{}})").param, "messages");
  EXPECT_EQ(refused(R"({})").code, ErrorCode::kMissingField);
  EXPECT_EQ(refused(R"({"messages":[{"role":"user","content":[["a"]]}]})").param, "messages[0].content[0]");
}

// Protects the roles and the forms of content.
TEST(ChatRequest, MessagesAndContent) {
  const ChatRequest request = parsed(body("", R"({"role":"system","content":"s"},{"role":"developer","content":"d"},
    {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b\u0000c"}],"name":"Ann Lee"},
    {"role":"assistant","content":null},{"role":"assistant","reasoning_content":"think","content":"x","refusal":null,
     "annotations":[],"audio":null,"function_call":null,"tool_calls":null},
    {"role":"tool","content":{"temp":7},"tool_call_id":"c1"})"));
  ASSERT_EQ(request.messages.size(), 6u);
  EXPECT_EQ(request.messages[1].role, ChatRole::kDeveloper);
  EXPECT_EQ(template_role_name(request.messages[1].role), "system");
  EXPECT_EQ(request.messages[2].content, std::string("ab\0c", 4));
  EXPECT_EQ(request.messages[2].name, "Ann Lee");
  EXPECT_EQ(request.messages[3].content, "");
  EXPECT_EQ(request.messages[4].reasoning_content, "think");
  EXPECT_EQ(request.messages[5].content, R"({"temp":7})");
  EXPECT_EQ(request.messages[5].tool_call_id, "c1");

  EXPECT_EQ(refused(body("", R"({"role":"user","content":null})")).param, "messages[0].content");
  EXPECT_EQ(refused(body("", R"({"role":"user","content":7})")).code, ErrorCode::kInvalidType);
  EXPECT_EQ(refused(body("", R"({"role":"robot","content":"x"})")).param, "messages[0].role");
  EXPECT_EQ(refused(body("", R"({"content":"x"})")).param, "messages[0].role");
  const ApiError image = refused(body(
      "",
      std::string(kUser) +
          R"(,{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"http://x"}}]})"));
  EXPECT_EQ(image.param, "messages[1].content[1]");
  EXPECT_EQ(image.code, ErrorCode::kUnsupported);
  EXPECT_THAT(image.message, HasSubstr("image_url"));
}

// Protects "malformed history gives 400 for ever" and "names with spaces lose tool calls": past calls in any shape are
// read, and what cannot be read is text.
TEST(ChatRequest, ToolCallHistoryIsTolerant) {
  const ChatRequest request = parsed(body("", std::string(kUser) + R"(,{"role":"assistant","content":null,"tool_calls":[
    {"id":"a","type":"function","function":{"name":"get weather","arguments":"{\"city\":\"Zürich\"}"}},
    {"id":"b","type":"function","function":{"name":"f","arguments":{"x":[1,2]}}},
    {"id":"c","type":"function","function":{"name":"g","arguments":"{\"cut\": "}},
    {"name":"h","arguments":""},
    {"id":"e","type":"function","function":{"name":"k"}},
    {"id":"d","type":"function","function":{"arguments":"{}"}}, "junk"]},
    {"role":"tool","tool_call_id":"a","content":"12"},{"role":"assistant","content":"x","tool_calls":"junk"},
    {"role":"assistant","content":null,"function_call":{"name":"old","arguments":"{}"}})"));
  const ChatMessage& m = request.messages[1];
  ASSERT_EQ(m.tool_calls.size(), 5u);
  EXPECT_EQ(m.tool_calls[0].name, "get weather");
  EXPECT_EQ(boost::json::serialize(m.tool_calls[0].arguments), "{\"city\":\"Zürich\"}");
  EXPECT_EQ(boost::json::serialize(m.tool_calls[1].arguments), R"({"x":[1,2]})");
  EXPECT_TRUE(m.tool_calls[2].arguments.is_string());
  EXPECT_EQ(m.tool_calls[3].name, "h");
  EXPECT_TRUE(m.tool_calls[3].arguments.is_object());
  EXPECT_TRUE(m.tool_calls[4].arguments.is_object());
  EXPECT_THAT(m.content, HasSubstr("\"d\""));
  EXPECT_THAT(m.content, HasSubstr("junk"));
  EXPECT_EQ(request.messages[3].content, "x\n\"junk\"");
  ASSERT_EQ(request.messages[4].tool_calls.size(), 1u);
  EXPECT_EQ(request.messages[4].tool_calls[0].name, "old");
}

// Protects what the template gets: every member of a message that it may read, developer as system, nothing invented.
TEST(ChatRequest, TemplateMessages) {
  const ChatRequest request = parsed(body("", R"({"role":"developer","content":"d"},{"role":"assistant","content":null,
    "reasoning_content":"r","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\"x\":1}"}}]},
    {"role":"tool","content":"7","tool_call_id":"a","name":"f"})"));
  EXPECT_EQ(boost::json::serialize(template_messages(request.messages)),
            R"([{"role":"system","content":"d"},{"role":"assistant","content":"","reasoning_content":"r",)"
            R"("tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":{"x":1}}}]},)"
            R"({"role":"tool","content":"7","name":"f","tool_call_id":"a"}])");
}

// Protects tools: names with spaces, and members this server does not read reach the template as sent.
TEST(ChatRequest, ToolsAreKeptAsSent) {
  const char* tools = R"([{"type":"function","function":{"name":"my tool","description":"d",
"parameters":{"type":"object","properties":{}},"strict":false,"x":1}}])";
  const ChatRequest request = parsed(body(fmt::format(R"("tools":{},"tool_choice":"auto")", tools)));
  EXPECT_TRUE(request.use_tools);
  EXPECT_EQ(boost::json::value(request.tools), boost::json::parse(tools));
}

// Protects 64-bit seeds, negative ones as two's complement.
TEST(ChatRequest, Seeds) {
  EXPECT_EQ(parsed(body(R"("seed":0)")).options.seed, 0u);
  EXPECT_EQ(parsed(body(R"("seed":-9223372036854775808)")).options.seed, 0x8000000000000000ull);
  EXPECT_EQ(parsed(body(R"("seed":18446744073709551615)")).options.seed, 0xFFFFFFFFFFFFFFFFull);
}

// Protects ids against the vocabulary while parsing.
TEST(ChatRequest, BiasOutsideTheVocabulary) {
  RequestDefaults defaults;
  defaults.vocabulary = 100;
  parsed(body(R"("logit_bias":{"99":1})"), defaults);
  EXPECT_EQ(refused(body(R"("logit_bias":{"100":1})"), defaults).param, "logit_bias");
}

}  // namespace
}  // namespace tensorfold
