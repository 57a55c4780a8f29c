// A checkpoint opened, checked and loaded: one model a rank that this process holds.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/model/dflash.h"
#include "worker/model/model.h"
#include "worker/runtime/backend.h"

namespace tensorfold {

/// Thread-safety: open and load from one thread; afterwards the weights are immutable and each rank's Model is used by
/// one thread.
class ModelShards {
 public:
  /// Opens and checks the folder and hashes every byte; loads no weights yet. `drafter`: the folder of a block drafter
  /// of its own, which must fit the model; empty: none.
  static absl::StatusOr<std::unique_ptr<ModelShards>> open(const std::string& dir, int world,
                                                           Precision precision = Precision::kCheckpoint,
                                                           const std::string& drafter = "");
  /// Packs the share of `rank` with `packer` (any CPU Ops will do for any other). Errors name the tensor.
  absl::Status load(int rank, Ops& packer);
  /// open() and load() of all ranks of `world`.
  static absl::StatusOr<std::unique_ptr<ModelShards>> load_all(const std::string& dir, int world, Ops& packer,
                                                               const std::string& drafter = "");
  /// The same in the options' precision, with a packer for each rank, on the GPU that the rank will run on; `decorate`
  /// (may be null) wraps it.
  using Decorate = std::function<std::unique_ptr<Ops>(std::unique_ptr<Ops>)>;
  static absl::StatusOr<std::unique_ptr<ModelShards>> load_all(const std::string& dir, int world,
                                                               const BackendOptions& backend,
                                                               const Decorate& decorate = nullptr,
                                                               const std::string& drafter = "");

  int world() const { return world_; }
  /// The config as loaded (tied head and MTP layer settled by what the weights have).
  const ModelConfig& config() const { return config_; }
  const ModelShape& shape(int rank) const { return models_[static_cast<size_t>(rank)]->shape(); }
  Model& model(int rank) { return *models_[static_cast<size_t>(rank)]; }
  /// Null without a drafter.
  const BlockDrafter* drafter(int rank) const { return drafters_[static_cast<size_t>(rank)].get(); }
  /// Null without one; known once open.
  const DflashConfig* drafter_config() const { return drafter_config_.get(); }
  /// Rows of a block of the drafter; 0 without one.
  uint32_t block_size() const {
    return drafter_config_ == nullptr ? 0 : static_cast<uint32_t>(drafter_config_->block_size);
  }
  /// As checkpoint_hash(), of the drafter's folder. It changes no reply, but ranks with different drafters would guess
  /// different tokens.
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
  ModelShards() = default;
  absl::Status open_drafter(const std::string& dir);
  absl::Status load_drafter(int rank, Ops& packer);

  int world_ = 1;
  ModelConfig config_;
  std::string checkpoint_hash_;
  int64_t file_bytes_ = 0;
  std::vector<std::string> notes_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<std::unique_ptr<Model>> models_;  // [world]; null where not loaded
  std::unique_ptr<DflashConfig> drafter_config_;
  std::string drafter_hash_;
  std::unique_ptr<Checkpoint> drafter_checkpoint_;
  std::vector<std::unique_ptr<BlockDrafter>> drafters_;  // [world]
};

/// The numeric fingerprint (contract, section 1): 16 hex characters of SHA-256 over numerics version, backend, slice
/// plan, precision and KV options, and the hash of the weights.
std::string numeric_fingerprint(const Ops& ops, const SlicePlan& slices, const std::string& options,
                                const std::string& checkpoint_hash);

}  // namespace tensorfold
