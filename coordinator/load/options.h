// What a load is made of: everything that the user of `tensorfold bench serve` may set. Plain data.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/hub/url.h"

namespace tensorfold {

/// What users do. docs/load-testing.md has each in words.
enum class LoadMix : uint8_t { kChat, kLongPrompt, kSharedPrefix, kAgent, kMixed };
/// "chat", "long-prompt", "shared-prefix", "agent", "mixed".
std::string_view load_mix_name(LoadMix mix);
std::vector<std::string> load_mix_names();
absl::StatusOr<LoadMix> parse_load_mix(std::string_view name);

/// Sizes and contents of conversations.
struct ConversationOptions {
  LoadMix mix = LoadMix::kChat;
  uint64_t seed = 1;
  int prompt_tokens = 2048;                    // of a long prompt, about
  int prefix_tokens = 1024;                    // of a shared prefix, about
  int reply_tokens = 64;                       // max_tokens of every request
  bool ignore_eos = false;                     // every reply has reply_tokens
  std::optional<double> temperature;           // none: the server's
  std::string model;                           // empty: the one that is served
  double tokens_per_word = 1.5;                // of the server's tokenizer, measured beforehand
  double background = 0;                       // share of conversations that are background work
  int64_t overlong_tokens = int64_t{1} << 21;  // of a prompt that cannot fit
};

struct LoadOptions {
  Url url;
  std::string api_key;  // empty: none is sent
  ConversationOptions conversation;
  std::vector<int> concurrency = {1, 2, 4, 8, 16, 32, 64};  // closed loop: users that wait for their replies
  std::vector<double> rates;  // open loop, if any: conversations a second that begin, whatever the server does
  int conversations = 0;      // at each level; 0: four a user, at least sixteen
  std::chrono::milliseconds duration{0};          // of each level, instead of a number
  std::chrono::milliseconds timeout{300000};      // of one request, from its start to its last byte
  std::chrono::milliseconds idle_timeout{60000};  // without a byte; servers say something every ten seconds
  std::chrono::milliseconds connect_timeout{5000};
  std::chrono::milliseconds wait_ready{0};  // for a server that is not ready
  double disconnect = 0;                    // share of requests that are dropped midway
  double malformed = 0;                     // share of conversations that are one malformed request instead
  double ttft_limit_s = 2;                  // goodput: until the first token
  double gap_limit_s = 0.2;                 // goodput: between tokens
  double check_share = 1;                   // of conversations that check_load() repeats

  /// InvalidArgument naming the option.
  absl::Status validate() const;
};

}  // namespace tensorfold
