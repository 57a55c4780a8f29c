#include "coordinator/sampling/identity.h"

#include <openssl/sha.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <string_view>

#include "fmt/format.h"
#include "kernels/numerics/gumbel.h"

namespace tensorfold {
namespace {

std::array<unsigned char, SHA256_DIGEST_LENGTH> sha256(std::string_view text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

void append_little_endian(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>((value >> (8 * i)) & 0xFF));
}

}  // namespace

std::string token_sha(std::span<const uint32_t> ids) {
  std::string text;
  text.reserve(ids.size() * 7);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i > 0) text.push_back(',');
    fmt::format_to(std::back_inserter(text), "{}", ids[i]);
  }
  const auto digest = sha256(text);
  std::string hex;
  for (size_t i = 0; i < 6; ++i) fmt::format_to(std::back_inserter(hex), "{:02x}", digest[i]);
  return hex;
}

uint64_t default_seed(std::span<const uint32_t> prompt, int64_t salt) {
  std::string bytes;
  bytes.reserve(8 + prompt.size() * 4);
  append_little_endian(bytes, static_cast<uint64_t>(salt), 8);
  for (uint32_t id : prompt) append_little_endian(bytes, id, 4);
  const auto digest = sha256(bytes);
  uint64_t seed = 0;
  for (int i = 7; i >= 0; --i) seed = (seed << 8) | digest[static_cast<size_t>(i)];
  return seed;
}

uint64_t choice_seed(uint64_t seed, uint32_t index) {
  if (index == 0) return seed;
  return mix64(seed ^ mix64(0x9E3779B97F4A7C15ull * (uint64_t{index} + 1)));
}

}  // namespace tensorfold
