// Any bytes as the header of a state on disk: an error, or a header that encodes to the very same bytes. The first byte
// says whether the rest is sealed anew with the right magic, version, size and checksum, so that the parser behind them
// is reached.
#include <xxhash.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "worker/state/state_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<std::byte> bytes(size - 1);
  if (size > 1) std::memcpy(bytes.data(), data + 1, size - 1);
  if ((data[0] & 1) != 0 && bytes.size() < 60000) {
    std::vector<std::byte> sealed(12);
    const uint32_t words[3] = {0x54534654, tensorfold::kStateVersion, static_cast<uint32_t>(bytes.size() + 20)};
    std::memcpy(sealed.data(), words, sizeof words);
    sealed.insert(sealed.end(), bytes.begin(), bytes.end());
    const uint64_t sum = XXH3_64bits(sealed.data(), sealed.size());
    sealed.resize(sealed.size() + sizeof sum);
    std::memcpy(sealed.data() + sealed.size() - sizeof sum, &sum, sizeof sum);
    bytes = std::move(sealed);
  }
  size_t used = 0;
  const auto header = tensorfold::decode_state_header(bytes, &used);
  if (!header.ok()) return 0;
  bytes.resize(used);
  if (tensorfold::encode_state_header(*header) != bytes) abort();
  if (header->pages() == 0 || header->pages() > tensorfold::kMaxSegmentPages) abort();
  return 0;
}
