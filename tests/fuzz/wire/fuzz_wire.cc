// Any bytes as a pass plan and as a pass report: an error, or a message that encodes to the very same bytes.
//
// The first byte chooses: bit 0 plan or report; bit 1 seals the rest anew with the right magic, version and checksum,
// so that the parser behind them is reached, which a fuzzer would not guess.
#include <xxhash.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "transport/pass/plan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const bool is_plan = (data[0] & 1) == 0;
  const bool seal = (data[0] & 2) != 0;
  std::vector<std::byte> bytes(size - 1);
  if (size > 1) std::memcpy(bytes.data(), data + 1, size - 1);
  if (seal) {
    const char* const magic = is_plan ? "TFPN" : "TFRP";
    std::vector<std::byte> header(8);
    std::memcpy(header.data(), magic, 4);
    std::memcpy(header.data() + 4, &tensorfold::kPlanVersion, 4);
    bytes.insert(bytes.begin(), header.begin(), header.end());
    const uint64_t sum = XXH64(bytes.data(), bytes.size(), 0);
    bytes.resize(bytes.size() + 8);
    std::memcpy(bytes.data() + bytes.size() - 8, &sum, 8);
  }
  if (is_plan) {
    const auto plan = tensorfold::decode_plan(bytes);
    if (!plan.ok()) return 0;
    if (!tensorfold::validate_plan(*plan).ok()) abort();
    if (tensorfold::encode_plan(*plan) != bytes) abort();
  } else {
    const auto report = tensorfold::decode_report(bytes);
    if (report.ok() && tensorfold::encode_report(*report) != bytes) abort();
  }
  return 0;
}
