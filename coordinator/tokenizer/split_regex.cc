#define PCRE2_CODE_UNIT_WIDTH 8

#include "coordinator/tokenizer/split_regex.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {
namespace {

// Backtracking steps that one start position gets for free. Words of ordinary text need a few dozen.
constexpr uint32_t kFreeSteps = 1000;
// A start position that needs more is tried again with more, and pays from the call's allowance. A run of n blanks
// before a word needs n steps with the usual patterns, so the allowance grows with the text.
constexpr uint32_t kStepGrowth = 16;
constexpr uint64_t kBaseAllowance = uint64_t{64} << 20;
constexpr uint64_t kAllowancePerByte = 64;
constexpr uint32_t kHeapLimitKiB = 64 * 1024;
constexpr size_t kJitStackStart = 64 * 1024, kJitStackMax = 16 * 1024 * 1024;

std::string pcre_message(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof buffer) < 0) return fmt::format("PCRE2 error {}", code);
  return reinterpret_cast<const char*>(buffer);
}

size_t next_character(std::string_view text, size_t at) {
  ++at;
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  return at;
}

// The class tables add to Unicode 14.0; an older PCRE2 would lack characters without a word.
absl::Status check_library() {
  char version[64] = "";
  if (pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, nullptr) < static_cast<int>(sizeof version)) {
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
  }
  if (std::atoi(version) < 14) {
    return absl::FailedPreconditionError(fmt::format(
        "the PCRE2 library knows Unicode {}; the tokenizer needs PCRE2 10.40 (Unicode 14) or newer", version));
  }
  return absl::OkStatus();
}

}  // namespace

struct SplitRegex::Compiled {
  pcre2_code* code = nullptr;
  ~Compiled() { pcre2_code_free(code); }
};

struct RegexScratch::State {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* jit_stack = nullptr;
  uint64_t allowance = 0;
  ~State() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(jit_stack);
  }
};

RegexScratch::RegexScratch(size_t text_bytes) : state_(std::make_unique<State>()) {
  state_->allowance = kBaseAllowance + kAllowancePerByte * text_bytes;
  if (state_->context != nullptr) pcre2_set_heap_limit(state_->context, kHeapLimitKiB);
}

RegexScratch::~RegexScratch() = default;

SplitRegex::SplitRegex() : compiled_(std::make_unique<Compiled>()) {}
SplitRegex::~SplitRegex() = default;

absl::StatusOr<std::unique_ptr<SplitRegex>> SplitRegex::compile(const std::string& pcre_pattern, std::string shown) {
  if (absl::Status status = check_library(); !status.ok()) return status;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  if (context == nullptr) return absl::ResourceExhaustedError("no memory to compile a regex");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  std::unique_ptr<SplitRegex> regex(new SplitRegex());
  regex->shown_ = std::move(shown);
  int code = 0;
  PCRE2_SIZE offset = 0;
  regex->compiled_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre_pattern.data()), pcre_pattern.size(),
                                         PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_CAPTURE, &code, &offset, context);
  pcre2_compile_context_free(context);
  if (regex->compiled_->code == nullptr) {
    return absl::InvalidArgumentError(fmt::format("regex '{}': {}", regex->shown_, pcre_message(code)));
  }
  // Where the system forbids executable memory PCRE2 interprets instead: slower, same matches.
  (void)pcre2_jit_compile(regex->compiled_->code, PCRE2_JIT_COMPLETE);
  return regex;
}

int SplitRegex::run(std::string_view text, size_t from, uint32_t options, uint32_t match_limit,
                    RegexScratch& scratch) const {
  RegexScratch::State& state = *scratch.state_;
  pcre2_set_match_limit(state.context, match_limit);
  pcre2_set_depth_limit(state.context, match_limit);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const auto match = [&] {
    return pcre2_match(compiled_->code, subject, text.size(), from, options | PCRE2_NO_UTF_CHECK, state.data,
                       state.context);
  };
  int rc = match();
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT && state.jit_stack == nullptr) {
    state.jit_stack = pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr);
    if (state.jit_stack != nullptr) {
      pcre2_jit_stack_assign(state.context, nullptr, state.jit_stack);
      rc = match();
    }
  }
  return rc;
}

absl::Status SplitRegex::failure(int code, size_t at) const {
  switch (code) {
    case PCRE2_ERROR_MATCHLIMIT:
    case PCRE2_ERROR_DEPTHLIMIT:
      return absl::ResourceExhaustedError(fmt::format(
          "the text makes the tokenizer's regex '{}' backtrack without end near byte {}: more than {} steps plus "
          "{} a byte of text (match limit)",
          shown_, at, kBaseAllowance, kAllowancePerByte));
    case PCRE2_ERROR_HEAPLIMIT:
      return absl::ResourceExhaustedError(
          fmt::format("the text makes the tokenizer's regex '{}' remember more than {} KiB near byte {} (heap limit)",
                      shown_, kHeapLimitKiB, at));
    case PCRE2_ERROR_JIT_STACKLIMIT:
      return absl::ResourceExhaustedError(
          fmt::format("the text makes the tokenizer's regex '{}' remember more than {} KiB near byte {} (stack limit)",
                      shown_, kJitStackMax / 1024, at));
    default:
      return absl::InternalError(fmt::format("regex '{}' near byte {}: {}", shown_, at, pcre_message(code)));
  }
}

absl::Status SplitRegex::find(std::string_view text, size_t from, RegexScratch& scratch, bool& found,
                              RegexPiece& match) const {
  const int rc = run(text, from, 0, kFreeSteps, scratch);
  if (rc == PCRE2_ERROR_MATCHLIMIT || rc == PCRE2_ERROR_DEPTHLIMIT) {
    return find_slowly(text, from, scratch, found, match);
  }
  found = rc >= 0;
  if (rc == PCRE2_ERROR_NOMATCH) return absl::OkStatus();
  if (rc < 0) return failure(rc, from);
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(scratch.state_->data);
  match = {ends[0], ends[1], true};
  return absl::OkStatus();
}

// PCRE2 counts its steps anew at each start position, so an unanchored search is not bounded by the match limit. Here
// each start position is tried by itself and pays for what it uses beyond the free steps.
absl::Status SplitRegex::find_slowly(std::string_view text, size_t from, RegexScratch& scratch, bool& found,
                                     RegexPiece& match) const {
  uint64_t& allowance = scratch.state_->allowance;
  for (size_t at = from; at <= text.size(); at = next_character(text, at)) {
    uint64_t limit = kFreeSteps;
    int rc = run(text, at, PCRE2_ANCHORED, static_cast<uint32_t>(limit), scratch);
    while (rc == PCRE2_ERROR_MATCHLIMIT || rc == PCRE2_ERROR_DEPTHLIMIT) {
      limit = std::min(limit * kStepGrowth, allowance);
      if (limit <= kFreeSteps) return failure(rc, at);
      allowance -= limit;
      rc = run(text, at, PCRE2_ANCHORED, static_cast<uint32_t>(std::min<uint64_t>(limit, UINT32_MAX)), scratch);
    }
    if (rc == PCRE2_ERROR_NOMATCH) continue;
    if (rc < 0) return failure(rc, at);
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(scratch.state_->data);
    found = true;
    match = {ends[0], ends[1], true};
    return absl::OkStatus();
  }
  found = false;
  return absl::OkStatus();
}

absl::Status SplitRegex::split(std::string_view text, RegexScratch& scratch, std::vector<RegexPiece>& out) const {
  if (scratch.state_->data == nullptr || scratch.state_->context == nullptr) {
    return absl::ResourceExhaustedError("no memory to run a regex");
  }
  if (text.empty()) {
    out.push_back({0, 0, false});
    return absl::OkStatus();
  }
  size_t covered = 0;  // the pieces so far cover [0, covered)
  size_t from = 0;
  bool any = false;
  while (from <= text.size()) {
    bool found = false;
    RegexPiece match{};
    if (absl::Status status = find(text, from, scratch, found, match); !status.ok()) return status;
    if (!found) break;
    // The library's iterator drops an empty match right after a match, and steps over one character.
    if (match.begin == match.end && any && match.end == covered) {
      from = next_character(text, from);
      continue;
    }
    if (covered != match.begin) out.push_back({covered, match.begin, false});
    out.push_back(match);
    covered = from = match.end;
    any = true;
  }
  if (covered != text.size()) out.push_back({covered, text.size(), false});
  return absl::OkStatus();
}

}  // namespace tensorfold
