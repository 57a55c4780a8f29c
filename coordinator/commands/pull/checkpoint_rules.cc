#include "coordinator/commands/pull/checkpoint_rules.h"

#include <vector>

#include "worker/checkpoint/names.h"
#include "worker/checkpoint/tensor_source.h"
#include "worker/model/dflash.h"
#include "worker/model/model.h"

namespace tensorfold {
namespace {

// The tensors of an index: names without bytes. What Layout says of skipping depends on names alone.
class IndexSource : public TensorSource {
 public:
  IndexSource(const ModelConfig& config, const std::map<std::string, std::string>& weight_map) : config_(config) {
    for (const auto& [name, shard] : weight_map) {
      names_.push_back(name);
      TensorInfo& tensor = tensors_[name];
      tensor.name = name;
      // An index has no shapes. The layout asks for one, of convolutions, to tell two conversions apart that skip the
      // same tensors.
      if (name.ends_with("conv1d.weight")) tensor.shape = {1, 1, config.linear.conv_kernel};
    }
  }
  const std::string& dir() const override { return label_; }
  const ModelConfig& config() const override { return config_; }
  std::string file_list() const override { return label_; }
  const TensorInfo* find(std::string_view name) const override {
    const auto at = tensors_.find(name);
    return at == tensors_.end() ? nullptr : &at->second;
  }
  const std::vector<std::string>& names() const override { return names_; }

 private:
  const ModelConfig& config_;
  const std::string label_ = "the index";
  std::vector<std::string> names_;
  std::map<std::string, TensorInfo, std::less<>> tensors_;
};

}  // namespace

absl::StatusOr<ModelConfig> examine_config(std::string_view config, std::string_view generation,
                                           const std::string& label, const std::optional<PullRank>& rank) {
  const ShardSpec shard = rank ? ShardSpec{rank->world, rank->rank} : ShardSpec{};
  if (is_dflash_config(config)) {  // a block drafter; whether it fits a target is said when it is used
    absl::StatusOr<DflashConfig> drafter = parse_dflash_config(config, label);
    if (!drafter.ok()) return drafter.status();
    const absl::StatusOr<DrafterShape> shape = drafter_shape(*drafter, shard);
    if (!shape.ok()) return shape.status();
    return drafter->model;
  }
  absl::StatusOr<ModelConfig> parsed = parse_config(config, generation, label);
  if (!parsed.ok()) return parsed.status();
  const absl::StatusOr<ModelShape> shape = model_shape(*parsed, shard);
  if (!shape.ok()) return shape.status();
  return parsed;
}

std::set<std::string> shards_of_rank(const ModelConfig& config, const std::map<std::string, std::string>& weight_map) {
  const IndexSource source(config, weight_map);
  const absl::StatusOr<Layout> layout = Layout::detect(source);
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map) {
    const Skip skip = layout.ok() ? layout->skip(name) : Skip::kNo;
    if (skip == Skip::kNo || skip == Skip::kDrafter) shards.insert(shard);
  }
  return shards;
}

}  // namespace tensorfold
