#include "worker/model/backend_limits.h"

#include <fmt/format.h>

namespace tensorfold {
namespace {

struct Bound {
  int64_t most = 0, unit = 1;
};

struct Size {
  const char* name;
  int64_t value = 0;  // 0: the model has no such thing
  Bound bound;
};

}  // namespace

absl::Status within_limits(const ModelConfig& config, const Ops::Limits& limits, const std::string& backend) {
  const Bound norm = {limits.norm_columns, limits.norm_unit}, latent = {limits.latent_columns, limits.latent_unit};
  const Bound index = {limits.index_columns, limits.index_unit};
  const int64_t hidden = config.hidden_size;
  const IndexerConfig& indexer = config.indexer;
  const int64_t latents = !is_latent(config.family)    ? 0
                          : is_deepseek(config.family) ? config.head_dim
                                                       : config.latent.kv_rank;
  const Size sizes[] = {
      {"hidden_size", hidden, norm},
      {"head_dim", config.qk_norm ? config.head_dim : 0, norm},
      {"hidden_size times the streams of the residual", config.streams.count * hidden, norm},
      {"hidden_size times the streams of the residual", config.mtp_layers > 0 ? config.gated_streams.count * hidden : 0,
       norm},
      {"the rank of the queries' latent", config.latent.q_rank, norm},
      {"the width of a latent", latents, latent},
      {"the width of an index key", config.latent.index_dim, index},
      {"the number of index heads", config.latent.index_heads, {limits.index_heads, 1}},
      {"the number of windows to choose", config.latent.index_windows, {limits.chosen_windows, 1}},
      {"the width of an index key", indexer.head_dim, norm},
      {"the number of windows to choose",
       indexer.tokens > 0 ? indexer.budget / indexer.tokens : 0,
       {limits.chosen_windows, 1}},
  };
  for (const Size& size : sizes) {
    if (size.value <= size.bound.most && size.value % size.bound.unit == 0) continue;
    const std::string unit = size.bound.unit == 1 ? "" : fmt::format("a multiple of {}, ", size.bound.unit);
    return absl::UnimplementedError(
        fmt::format("{} is {}; the kernels of backend {} take {}at most {}: run it with "
                    "backend cpu",
                    size.name, size.value, backend, unit, size.bound.most));
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
