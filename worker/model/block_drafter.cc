#include "worker/model/block_drafter.h"

#include <fmt/format.h>

namespace tensorfold {

int64_t DrafterShape::row_page_bytes() const {
  int64_t values = 0;
  for (const RowCacheLayer& layer : row_layers) values += kPageTokens / layer.tokens * layer.width;
  return values * static_cast<int64_t>(sizeof(float));
}

absl::Status BlockDrafter::check_backend(const Ops& ops, std::string_view source) {
  if (ops.supports_block_drafts()) return absl::OkStatus();
  return absl::UnimplementedError(fmt::format(
      "{} drafts blocks of rows at once, which backend {} does not compute: run it with backend cpu, or with "
      "another draft.kind",
      source, ops.fingerprint_name()));
}

}  // namespace tensorfold
