// The shared token between ranks. It never travels: each side sends a random nonce and proves that it knows the token
// with HMAC-SHA256 (RFC 2104, FIPS 180-4) over both nonces and the joining rank's identity, so that a proof serves one
// stream, one rank and one direction only. It proves who joins; it does not encrypt the stream.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/join/identity.h"

namespace tensorfold {

inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kProofBytes = 32;

/// 32 random bytes. Internal if the machine's random source fails.
absl::StatusOr<std::string> make_nonce();

enum class Prover { kMember, kCoordinator };

/// The proof that `prover` sends, 32 bytes; empty for an empty token (none configured). Laid out as HMAC-SHA256(token,
/// M) with M = "tensorfold-join-1", "member" or "coordinator", the coordinator's nonce, the member's nonce, then the
/// joining rank's identity field by field in the order of RankIdentity (numbers in decimal), each preceded by its
/// length in bytes as 8 little-endian bytes.
std::string token_proof(std::string_view token, Prover prover, std::string_view coordinator_nonce,
                        std::string_view member_nonce, const RankIdentity& joining);

/// Whether two proofs are equal, in a time that does not depend on where they differ.
bool proofs_equal(std::string_view a, std::string_view b);

}  // namespace tensorfold
