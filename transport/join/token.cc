#include "transport/join/token.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstdint>

namespace tensorfold {
namespace {

void append_field(std::string& message, std::string_view field) {
  const uint64_t length = field.size();
  for (int byte = 0; byte < 8; ++byte) message.push_back(static_cast<char>(length >> (8 * byte) & 0xff));
  message.append(field);
}

}  // namespace

absl::StatusOr<std::string> make_nonce() {
  std::string nonce(kNonceBytes, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) != 1) {
    return absl::InternalError("the machine's random source failed; a rank cannot be checked without it");
  }
  return nonce;
}

std::string token_proof(std::string_view token, Prover prover, std::string_view coordinator_nonce,
                        std::string_view member_nonce, const RankIdentity& joining) {
  if (token.empty()) return {};
  std::string message;
  append_field(message, "tensorfold-join-1");
  append_field(message, prover == Prover::kMember ? "member" : "coordinator");
  append_field(message, coordinator_nonce);
  append_field(message, member_nonce);
  append_field(message, std::to_string(joining.protocol));
  append_field(message, joining.build);
  append_field(message, joining.fingerprint);
  append_field(message, joining.checkpoint);
  append_field(message, joining.profile);
  append_field(message, joining.slices);
  append_field(message, std::to_string(joining.rank));
  append_field(message, std::to_string(joining.world));
  append_field(message, joining.host);
  append_field(message, std::to_string(joining.pid));
  append_field(message, joining.transport);
  append_field(message,
               std::string_view(reinterpret_cast<const char*>(joining.address.data()), joining.address.size()));

  std::string proof(kProofBytes, '\0');
  unsigned int length = 0;
  HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()),
       reinterpret_cast<const unsigned char*>(message.data()), message.size(),
       reinterpret_cast<unsigned char*>(proof.data()), &length);
  return proof;
}

bool proofs_equal(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace tensorfold
