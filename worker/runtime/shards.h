// A checkpoint opened, checked and loaded: one model a rank that this process holds.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/model/block_drafter.h"
#include "worker/model/model.h"
#include "worker/runtime/backend.h"

namespace tensorfold {

struct DflashConfig;

/// Which block drafter goes with a model.
struct DrafterChoice {
  enum class Own : uint8_t { kNo, kIfThere, kWanted };
  DrafterChoice() = default;
  explicit DrafterChoice(std::string checkpoint, Own from_model = Own::kNo)
      : folder(std::move(checkpoint)), own(from_model) {}

  std::string folder;  // of a checkpoint of its own; empty: none
  Own own = Own::kNo;  // with no folder: the stages that the model's files bring along (DSpark)

  /// Of a draft kind ("dflash", "dspark", "auto", …) and the folder beside it.
  static DrafterChoice of_kind(std::string_view kind, const std::string& checkpoint);
};

/// Thread-safety: open and load from one thread; afterwards the weights are immutable and each rank's Model is used by
/// one thread.
class ModelShards {
 public:
  ~ModelShards();
  /// Opens and checks the folder and hashes every byte; loads no weights yet. A drafter must fit the model, and one
  /// that is wanted must be there.
  static absl::StatusOr<std::unique_ptr<ModelShards>> open(const std::string& dir, int world,
                                                           Precision precision = Precision::kCheckpoint,
                                                           const DrafterChoice& drafter = {});
  /// Packs the share of `rank` with `packer` (any CPU Ops will do for any other). Errors name the tensor.
  absl::Status load(int rank, Ops& packer);
  /// open() and load() of all ranks of `world`.
  static absl::StatusOr<std::unique_ptr<ModelShards>> load_all(const std::string& dir, int world, Ops& packer,
                                                               const DrafterChoice& drafter = {});
  /// The same in the options' precision, with a packer for each rank, on the GPU that the rank will run on; `decorate`
  /// (may be null) wraps it.
  using Decorate = std::function<std::unique_ptr<Ops>(std::unique_ptr<Ops>)>;
  static absl::StatusOr<std::unique_ptr<ModelShards>> load_all(const std::string& dir, int world,
                                                               const BackendOptions& backend,
                                                               const Decorate& decorate = nullptr,
                                                               const DrafterChoice& drafter = {});

  int world() const { return world_; }
  /// The config as loaded (tied head and MTP layer settled by what the weights have).
  const ModelConfig& config() const { return config_; }
  const ModelShape& shape(int rank) const { return models_[static_cast<size_t>(rank)]->shape(); }
  Model& model(int rank) { return *models_[static_cast<size_t>(rank)]; }
  /// Null without a drafter.
  const BlockDrafter* drafter(int rank) const { return drafters_[static_cast<size_t>(rank)].get(); }
  /// Null without one; known once open.
  const DrafterFacts* drafter_facts() const { return drafter_facts_.has_value() ? &*drafter_facts_ : nullptr; }
  /// Most drafts of a block; 0 without a drafter.
  uint32_t block_drafts() const {
    return drafter_facts_.has_value() ? static_cast<uint32_t>(drafter_facts_->most_drafts()) : 0;
  }
  /// As checkpoint_hash(), of the drafter. It changes no reply, but ranks with different drafters would guess different
  /// tokens.
  const std::string& drafter_hash() const { return drafter_hash_; }
  /// SHA-256 over every tensor and the configuration.
  const std::string& checkpoint_hash() const { return checkpoint_hash_; }
  /// Size of all weight files: what the weights of all ranks together need at most, the embedding apart.
  int64_t file_bytes() const { return file_bytes_; }
  /// What a person should know about the load: skipped tensors, decisions taken. One line each.
  const std::vector<std::string>& notes() const { return notes_; }
  /// Unmaps the files once all that is wanted has been loaded.
  void close_files() {
    checkpoint_.reset();
    drafter_checkpoint_.reset();
  }

 private:
  ModelShards();
  absl::Status open_drafter(const std::string& dir);
  absl::Status find_own_drafter(const Layout& layout, DrafterChoice::Own own);
  absl::Status load_drafter(int rank, Ops& packer);

  int world_ = 1;
  ModelConfig config_;
  std::string checkpoint_hash_;
  int64_t file_bytes_ = 0;
  std::vector<std::string> notes_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<std::unique_ptr<Model>> models_;    // [world]; null where not loaded
  std::unique_ptr<DflashConfig> drafter_config_;  // of a checkpoint of its own
  std::optional<DrafterFacts> drafter_facts_;
  std::string drafter_hash_;
  std::unique_ptr<Checkpoint> drafter_checkpoint_;
  std::vector<std::unique_ptr<BlockDrafter>> drafters_;  // [world]
};

/// The numeric fingerprint (contract, section 1): 16 hex characters of SHA-256 over numerics version, backend, slice
/// plan, precision and KV options, and the hash of the weights.
std::string numeric_fingerprint(const Ops& ops, const SlicePlan& slices, const std::string& options,
                                const std::string& checkpoint_hash);

}  // namespace tensorfold
