// Any bytes as a safetensors file: the parser must answer with a file or an error, and the tensors it gives must lie
// inside the bytes. The first 8 bytes are replaced half of the time by a header length that fits, which a fuzzer would
// seldom guess.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/tensor_values.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  if (size > 8 && (data[0] & 1) != 0) {
    // The header ends at its last '}': what follows are the tensors' bytes.
    size_t end = size;
    while (end > 8 && data[end - 1] != '}') --end;
    const uint64_t header = end - 8;
    std::memcpy(bytes.data(), &header, 8);
  }
  const auto file = tensorfold::SafetensorsFile::parse(bytes, "fuzz");
  if (!file.ok()) return 0;
  for (const tensorfold::TensorInfo& tensor : file->tensors()) {
    if (tensor.data.data() < bytes.data() || tensor.data.data() + tensor.data.size() > bytes.data() + bytes.size())
      abort();
    if (file->find(tensor.name) != &tensor) abort();
    (void)tensorfold::read_floats(tensor);
    (void)tensorfold::read_integers(tensor);
  }
  return 0;
}
