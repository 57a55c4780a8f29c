#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

#include "transport/pass/state_orders.h"

namespace tensorfold {

StateKey state_key(const std::string& fingerprint, const StateKey& parent, std::span<const int32_t> tokens,
                   uint64_t committed) {
  ByteWriter writer;
  writer.put_string(fingerprint);
  writer.put(parent.high);
  writer.put(parent.low);
  writer.put_array(tokens);
  writer.put(committed);
  const XXH128_hash_t hash = XXH3_128bits(writer.bytes().data(), writer.bytes().size());
  return {hash.high64, hash.low64};
}

std::string key_text(const StateKey& key) { return fmt::format("{:016x}{:016x}", key.high, key.low); }

absl::StatusOr<StateKey> parse_key(const std::string& text) {
  const bool hex = text.size() == 32 && std::all_of(text.begin(), text.end(), [](char c) {
                     return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
                   });
  if (!hex) return absl::InvalidArgumentError("a key is 32 hex digits, not \"" + text.substr(0, 64) + "\"");
  return StateKey{std::stoull(text.substr(0, 16), nullptr, 16), std::stoull(text.substr(16), nullptr, 16)};
}

}  // namespace tensorfold
