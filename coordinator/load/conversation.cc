#include "coordinator/load/conversation.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr uint64_t kPrefixStream = 0x5EED;
constexpr uint64_t kBackgroundStream = 0xBAC6;
constexpr uint64_t kPrefixes = 4;  // groups of users that share one

constexpr std::array<std::string_view, 64> kWords = {
    "river",  "stone",  "copper", "garden", "winter", "silver", "engine", "harbor", "letter", "market",  "window",
    "forest", "candle", "bridge", "summer", "paper",  "orange", "castle", "doctor", "island", "kitchen", "ladder",
    "mirror", "number", "ocean",  "pepper", "rabbit", "school", "ticket", "valley", "yellow", "blue",    "green",
    "small",  "large",  "quick",  "slow",   "old",    "new",    "bright", "dark",   "warm",   "cold",    "early",
    "late",   "north",  "south",  "east",   "west",   "first",  "second", "third",  "last",   "open",    "closed",
    "heavy",  "light",  "round",  "narrow", "wide",   "silent", "loud",   "simple", "strange"};

int64_t words_for(int64_t tokens, double tokens_per_word) {
  return std::max<int64_t>(1, std::llround(static_cast<double>(tokens) / tokens_per_word));
}

json::object message(std::string_view role, std::string_view text) {
  return {{"role", json::string_view(role.data(), role.size())},
          {"content", json::string_view(text.data(), text.size())}};
}

json::object tool(const char* name, const char* description, const char* parameter) {
  return {{"type", "function"},
          {"function",
           {{"name", name},
            {"description", description},
            {"parameters",
             {{"type", "object"},
              {"properties", {{parameter, {{"type", "string"}}}}},
              {"required", json::array{parameter}}}}}}};
}

json::array agent_tools() {
  return {tool("find_file", "Finds files by a word in their name", "word"), tool("read_file", "Reads a file", "path"),
          tool("run_test", "Runs a test and shows its output", "name")};
}

}  // namespace

std::string load_text(LoadRandom& random, int64_t words) {
  std::string out;
  for (int64_t i = 0; i < words; ++i) {
    if (i > 0) out += i % 12 == 0 ? ". " : " ";
    // Numbers keep texts apart from one another for good: words alone repeat.
    if (random.below(8) == 0) {
      out += std::to_string(random.below(1000));
    } else {
      out += kWords[random.below(kWords.size())];
    }
  }
  return out;
}

Conversation::Conversation(const ConversationOptions& options, uint64_t index)
    : options_(options),
      random_(options.seed, index + 1),
      kind_(options.mix),
      background_(LoadRandom(options.seed ^ kBackgroundStream, index + 1).unit() < options.background) {
  if (kind_ == LoadMix::kMixed) {
    // Half are chats; the others are the rarer, heavier sorts.
    constexpr std::array<LoadMix, 8> kKinds = {LoadMix::kChat,         LoadMix::kChat,      LoadMix::kChat,
                                               LoadMix::kChat,         LoadMix::kAgent,     LoadMix::kSharedPrefix,
                                               LoadMix::kSharedPrefix, LoadMix::kLongPrompt};
    kind_ = kKinds[random_.below(kKinds.size())];
  }
  begin();
}

void Conversation::begin() {
  switch (kind_) {
    case LoadMix::kLongPrompt:
      say("user",
          fmt::format("Text {}: {}. {}", random_.below(1000000000),
                      load_text(random_, words_for(options_.prompt_tokens, options_.tokens_per_word)), question()));
      return;
    case LoadMix::kSharedPrefix: {
      LoadRandom shared(options_.seed, kPrefixStream << 32 | random_.below(kPrefixes));
      say("system", load_text(shared, words_for(options_.prefix_tokens, options_.tokens_per_word)));
      say("user", question());
      return;
    }
    case LoadMix::kAgent:
      turns_ = static_cast<int>(3 + random_.below(4));
      say("system", fmt::format("You are agent {}. Use the tools.", random_.below(1000000000)));
      say("user", fmt::format("Find the file about {} and read it.", load_text(random_, 3)));
      return;
    default:
      turns_ = static_cast<int>(1 + random_.below(3));
      say("user", question());
  }
}

void Conversation::say(std::string_view role, std::string_view text) { messages_.push_back(message(role, text)); }

std::string Conversation::question() {
  const uint64_t a = random_.below(1000), b = random_.below(1000);
  switch (random_.below(6)) {
    case 0:
      return fmt::format("What is {} plus {}?", a, b);
    case 1:
      return fmt::format("Count from {} to {}.", a, a + 4 + random_.below(20));
    case 2:
      return fmt::format("Sort these numbers: {}, {}, {}, {}.", a, b, random_.below(1000), random_.below(1000));
    case 3:
      return fmt::format("Repeat this text: {}", load_text(random_, static_cast<int64_t>(6 + random_.below(12))));
    case 4:
      return fmt::format("Tell a short story about: {}.", load_text(random_, 4));
    default:
      return fmt::format("Write a short letter to {} about {}.", load_text(random_, 1), load_text(random_, 3));
  }
}

std::string Conversation::body(bool serial) const {
  json::object out;
  if (!options_.model.empty()) out["model"] = options_.model;
  out["messages"] = messages_;
  if (kind_ == LoadMix::kAgent) out["tools"] = agent_tools();
  out["max_tokens"] = options_.reply_tokens;
  if (options_.temperature) out["temperature"] = *options_.temperature;
  if (options_.ignore_eos) out["ignore_eos"] = true;
  out["stream"] = true;
  out["stream_options"] = {{"include_usage", true}};
  if (background_) out["priority"] = "background";
  if (serial) {
    out["draft"] = false;
    out["cache"] = false;
  }
  return json::serialize(out);
}

// The server's ids of calls differ from run to run and a template may show them, so the history has ids of its own.
void Conversation::answer_calls(const StreamedReply& reply) {
  json::array calls;
  for (size_t i = 0; i < reply.calls.size(); ++i) {
    calls.push_back({{"id", fmt::format("call_{}_{}", turn_, i)},
                     {"type", "function"},
                     {"function", {{"name", reply.calls[i].name}, {"arguments", reply.calls[i].arguments}}}});
  }
  json::object said = message("assistant", reply.content);
  if (!calls.empty()) said["tool_calls"] = std::move(calls);
  messages_.push_back(std::move(said));
  // A model that calls nothing gets its next result all the same: what is measured is the loop.
  if (reply.calls.empty()) {
    say("user", fmt::format("Result: {}. Go on.", load_text(random_, 30)));
    return;
  }
  for (size_t i = 0; i < reply.calls.size(); ++i) {
    json::object result = message("tool", load_text(random_, 30));
    result["tool_call_id"] = fmt::format("call_{}_{}", turn_, i);
    messages_.push_back(std::move(result));
  }
}

void Conversation::take(const StreamedReply& reply) {
  if (kind_ == LoadMix::kAgent) {
    answer_calls(reply);
  } else {
    say("assistant", reply.content);
    say("user", question());
  }
  ++turn_;
}

}  // namespace tensorfold
