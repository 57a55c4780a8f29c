// What names a reply: its token_sha (contract, section 6) and its seeds (section 5). Pure functions, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace tensorfold {

// The first 12 hex characters of SHA-256 over the ids in decimal joined by ','. A final stop token belongs to `ids`.
std::string token_sha(std::span<const uint32_t> ids);

// The seed of a request without one: the same prompt and salt give the same reply. The first 8 bytes, little-endian, of
// SHA-256 over the salt (8 bytes, little-endian) and each id (4 bytes, little-endian). Operators change the salt (a
// profile option) when equal prompts should draw differently.
uint64_t default_seed(std::span<const uint32_t> prompt, int64_t salt);

// The seed of choice `index` of a request with n > 1. Choice 0 keeps the request's seed, so it equals the reply to n
// = 1.
uint64_t choice_seed(uint64_t seed, uint32_t index);

}  // namespace tensorfold
