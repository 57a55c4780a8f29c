// What every generating request has, whatever its dialect, and the limits that all parsers keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/api/error.h"
#include "coordinator/api/generation.h"
#include "coordinator/sampling/params.h"

namespace tensorfold {

// Counts and sizes that a request may have. The body's length was limited before it came here.
inline constexpr size_t kMaxJsonDepth = 64;
inline constexpr size_t kMaxMessages = 8192;
inline constexpr size_t kMaxContentParts = 4096;
inline constexpr size_t kMaxToolCalls = 1024;  // in one message
inline constexpr size_t kMaxTools = 512;
inline constexpr size_t kMaxNameBytes = 256;  // names of models, tools, authors
inline constexpr size_t kMaxStops = 16;
inline constexpr size_t kMaxStopBytes = 4096;
inline constexpr size_t kMaxStopIds = 256;
inline constexpr size_t kMaxLogitBias = 4096;
inline constexpr uint32_t kMaxChoices = 16;        // n
inline constexpr size_t kMaxPrompts = 64;          // of one completion request
inline constexpr size_t kMaxPromptIds = 1u << 24;  // token ids in one prompt
inline constexpr uint32_t kMaxTokenCount = 1u << 30;

// What a request gets for the fields it leaves out (from the profile) and what the model bounds.
struct RequestDefaults {
  SamplingParams sampling;
  uint32_t vocabulary = 0;  // tokens; 0: ids are not checked while parsing
};

struct RequestOptions {
  SamplingParams sampling;             // without the seed
  std::optional<uint64_t> seed;        // negative numbers as two's complement
  std::optional<uint32_t> max_tokens;  // max_tokens or max_completion_tokens
  uint32_t min_tokens = 0;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  uint32_t n = 1;
  std::optional<uint32_t> logprobs;  // none: not asked; k: the k best beside the chosen token
  bool stream = false;
  bool include_usage = false;  // stream_options.include_usage
  bool progress = false;       // stream_options.progress
  bool draft = true;
  bool cache = true;
  bool return_token_ids = false;
  bool ignore_eos = false;
  Priority priority = Priority::kForeground;
};

// The engine's request for one tokenised prompt. Checked by resolve_generation().
ApiOr<GenerationRequest> make_generation(const RequestOptions& options, std::string id, std::vector<uint32_t> prompt,
                                         const GenerationBounds& bounds);

}  // namespace tensorfold
