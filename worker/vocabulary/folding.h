// Texts as deepseek_v41's n-grams see them: compatibility decomposition without combining marks, in lower case.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tensorfold {

/// The code points of `text`, or nothing if it is not UTF-8.
std::optional<std::u32string> code_points(std::string_view text);
void append_code_point(char32_t code, std::string& out);

/// NFKC, NFD, accents (all combining marks) taken off, lower case without regard to neighbours, as the Hugging Face
/// tokenizers library computes them. Thread-safe.
std::u32string folded(std::u32string_view text);

}  // namespace tensorfold
