#include "coordinator/service/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cctype>

namespace tensorfold {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

absl::StatusOr<ApiKeys> ApiKeys::parse(const std::vector<std::string>& hashes) {
  ApiKeys keys;
  for (const std::string& text : hashes) {
    Hash hash{};
    bool good = text.size() == 2 * hash.size();
    for (size_t i = 0; good && i < hash.size(); ++i) {
      const int high = hex_digit(text[2 * i]);
      const int low = hex_digit(text[2 * i + 1]);
      good = high >= 0 && low >= 0;
      if (good) hash[i] = static_cast<uint8_t>(high * 16 + low);
    }
    if (!good) return absl::InvalidArgumentError("an API key hash is not 64 hex digits (SHA-256)");
    keys.hashes_.push_back(hash);
  }
  return keys;
}

bool ApiKeys::holds(std::string_view authorization) const {
  if (hashes_.empty()) return false;
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() <= kScheme.size()) return false;
  const bool bearer = std::equal(kScheme.begin(), kScheme.end(), authorization.begin(), [](char want, char found) {
    return want == static_cast<char>(std::tolower(static_cast<unsigned char>(found)));
  });
  if (!bearer) return false;
  std::string_view key = authorization.substr(kScheme.size());
  while (key.starts_with(' ')) key.remove_prefix(1);
  while (key.ends_with(' ')) key.remove_suffix(1);
  Hash hash{};
  unsigned int length = 0;
  if (EVP_Digest(key.data(), key.size(), hash.data(), &length, EVP_sha256(), nullptr) != 1) return false;
  bool found = false;
  for (const Hash& known : hashes_) found |= CRYPTO_memcmp(known.data(), hash.data(), hash.size()) == 0;
  return found;
}

}  // namespace tensorfold
