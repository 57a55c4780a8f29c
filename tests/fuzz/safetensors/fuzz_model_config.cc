// Any bytes as config.json, of a model and of a block drafter, and after a zero byte as generation_config.json: a
// configuration inside its limits or an error.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "worker/checkpoint/dflash_config.h"
#include "worker/checkpoint/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t zero = text.find('\0');
  const auto drafter = tensorfold::parse_dflash_config(text.substr(0, zero), "fuzz");
  if (drafter.ok() && (drafter->block_size < 2 || drafter->windows.size() != drafter->model.layers.size() ||
                       drafter->mask_token_id >= drafter->model.vocab_size || drafter->model.head_dim > 1024)) {
    abort();
  }
  const auto config = tensorfold::parse_config(
      text.substr(0, zero), zero == std::string_view::npos ? std::string_view() : text.substr(zero + 1));
  if (!config.ok()) return 0;
  if (config->heads % config->kv_heads != 0 || config->layers.empty() || config->rope.dims > config->head_dim) abort();
  (void)tensorfold::canonical_text(*config);
  return 0;
}
