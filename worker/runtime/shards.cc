#include "worker/runtime/shards.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>

#include "kernels/numerics/version.h"
#include "worker/checkpoint/dspark_config.h"
#include "worker/model/dflash.h"
#include "worker/model/dspark.h"
#include "worker/vocabulary/compressed_vocabulary.h"

namespace tensorfold {
namespace {

std::string sha256_hex(const std::string& text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  EVP_Digest(text.data(), text.size(), digest.data(), &size, EVP_sha256(), nullptr);
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

// A drafter's configuration, if it fits the target and the world.
absl::StatusOr<DflashConfig> fitting_drafter(const std::string& dir, const ModelConfig& target, int world) {
  absl::StatusOr<DflashConfig> config = read_dflash_config(dir);
  if (!config.ok()) return config.status();
  if (absl::Status status = check_dflash_fits(*config, target); !status.ok()) return status;
  const absl::StatusOr<DrafterShape> shape = drafter_shape(*config, {world, 0});
  if (!shape.ok()) return shape.status();
  return config;
}

// N-grams of token classes: the classes are the tokenizer's, and enter the hash with the rest of the configuration.
absl::Status read_classes(const std::string& dir, ModelConfig& config) {
  if (config.engram.layers.empty()) return absl::OkStatus();
  absl::StatusOr<CompressedVocabulary> vocabulary = read_compressed_vocabulary(dir);
  if (!vocabulary.ok()) return vocabulary.status();
  const auto tokens = static_cast<int64_t>(vocabulary->class_of.size());
  if (tokens > config.vocab_size || config.engram.pad_token >= tokens || vocabulary->classes != config.engram.classes) {
    return absl::InvalidArgumentError(
        fmt::format("{}: tokenizer.json has {} tokens in {} classes; config.json says vocab_size {} and "
                    "engram_compressed_vocab_size {}: n-grams would find other rows than those that were trained",
                    dir, tokens, vocabulary->classes, config.vocab_size, config.engram.classes));
  }
  // Rows of the embedding behind the tokenizer's: sampling may name them, no text does. They count as padding.
  const int32_t padding = vocabulary->class_of[static_cast<size_t>(config.engram.pad_token)];
  vocabulary->class_of.resize(static_cast<size_t>(config.vocab_size), padding);
  config.engram.class_of = std::make_shared<const std::vector<int32_t>>(std::move(vocabulary->class_of));
  return absl::OkStatus();
}

}  // namespace

DrafterChoice DrafterChoice::of_kind(std::string_view kind, const std::string& checkpoint) {
  if (kind == "dspark") return DrafterChoice("", Own::kWanted);
  if (kind == "auto") return DrafterChoice(checkpoint, Own::kIfThere);
  return kind == "dflash" ? DrafterChoice(checkpoint) : DrafterChoice();
}

absl::StatusOr<std::unique_ptr<ModelShards>> ModelShards::open(const std::string& dir, int world, Precision precision,
                                                               const DrafterChoice& drafter) {
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::open(dir);
  if (!checkpoint.ok()) return checkpoint.status();
  const absl::StatusOr<WeightReader> reader = WeightReader::open(**checkpoint);
  if (!reader.ok()) return reader.status();
  std::unique_ptr<ModelShards> shards(new ModelShards());
  shards->world_ = world;
  shards->config_ = (*checkpoint)->config();
  // What cannot be used is refused before minutes are spent on hashes.
  if (!drafter.folder.empty()) {
    const absl::StatusOr<DflashConfig> fits = fitting_drafter(drafter.folder, shards->config_, world);
    if (!fits.ok()) return fits.status();
  } else if (absl::Status status = shards->find_own_drafter(reader->layout(), drafter.own); !status.ok()) {
    return status;
  }
  const absl::StatusOr<std::string> hash = (*checkpoint)->content_hash();
  if (!hash.ok()) return hash.status();
  // The weights have the last word on what the config leaves open.
  shards->config_.tie_word_embeddings = reader->layout().tied_head();
  if (!reader->layout().has_mtp()) shards->config_.mtp_layers = 0;
  if (!reader->layout().has_drafter()) shards->config_.dspark = {};
  shards->config_.precision = precision;
  shards->notes_ = reader->layout().notes();
  if (absl::Status status = read_classes(dir, shards->config_); !status.ok()) return status;
  // Weights and configuration: eps, rope and the like change bits just as weights do.
  shards->checkpoint_hash_ = sha256_hex(*hash + "\n" + canonical_text(shards->config_));
  for (const SafetensorsFile& file : (*checkpoint)->files()) {
    shards->file_bytes_ += static_cast<int64_t>(file.file_bytes());
  }
  shards->checkpoint_ = *std::move(checkpoint);
  shards->models_.resize(static_cast<size_t>(world));
  shards->drafters_.resize(static_cast<size_t>(world));
  if (shards->drafter_facts_.has_value()) {
    shards->drafter_hash_ = sha256_hex(shards->checkpoint_hash_ + "\n" + dspark_text(shards->config_.dspark));
  }
  if (drafter.folder.empty()) return shards;
  if (absl::Status status = shards->open_drafter(drafter.folder); !status.ok()) return status;
  return shards;
}

ModelShards::ModelShards() = default;
ModelShards::~ModelShards() = default;

absl::Status ModelShards::find_own_drafter(const Layout& layout, DrafterChoice::Own own) {
  if (own == DrafterChoice::Own::kNo) return absl::OkStatus();
  if (!layout.has_drafter()) {
    if (own == DrafterChoice::Own::kIfThere) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "draft.kind dspark: this checkpoint brings no block drafter along (mtp.* tensors, and dspark_block_size in its "
        "config.json): use mtp, copy, dflash with draft.model, auto or none");
  }
  const absl::StatusOr<DrafterShape> shape = dspark_shape(config_, {world_, 0});
  if (!shape.ok()) return shape.status();
  drafter_facts_ = dspark_facts(config_);
  return absl::OkStatus();
}

absl::Status ModelShards::open_drafter(const std::string& dir) {
  absl::StatusOr<DflashConfig> config = fitting_drafter(dir, config_, world_);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::open(dir, config->model);
  if (!checkpoint.ok()) return checkpoint.status();
  const absl::StatusOr<std::string> hash = (*checkpoint)->content_hash();
  if (!hash.ok()) return hash.status();
  drafter_hash_ = sha256_hex(*hash + "\n" + canonical_text(*config));
  drafter_facts_ = tensorfold::drafter_facts(*config);
  drafter_config_ = std::make_unique<DflashConfig>(*std::move(config));
  drafter_checkpoint_ = *std::move(checkpoint);
  return absl::OkStatus();
}

absl::Status ModelShards::load_drafter(int rank, Ops& packer) {
  if (!drafter_facts_.has_value()) return absl::OkStatus();
  const bool own = drafter_config_ == nullptr;
  Layout layout = Layout::bare();
  if (own) {
    const absl::StatusOr<Layout> found = Layout::detect(*checkpoint_);
    if (!found.ok()) return found.status();
    layout = found->of_drafter();
  }
  WeightReader reader(own ? *checkpoint_ : *drafter_checkpoint_, layout);
  auto drafter = own ? DsparkDrafter::load(config_, reader, packer, {world_, rank})
                     : DflashDrafter::load(*drafter_config_, reader, packer, {world_, rank});
  if (!drafter.ok()) return drafter.status();
  if (absl::Status status = reader.check_all_used(); !status.ok()) return status;
  drafters_[static_cast<size_t>(rank)] = *std::move(drafter);
  return absl::OkStatus();
}

absl::Status ModelShards::load(int rank, Ops& packer) {
  absl::StatusOr<WeightReader> reader = WeightReader::open(*checkpoint_);
  if (!reader.ok()) return reader.status();
  absl::StatusOr<std::unique_ptr<Model>> model = load_model(config_, *reader, packer, {world_, rank});
  if (!model.ok()) return model.status();
  if (absl::Status status = reader->check_all_used(); !status.ok()) return status;
  models_[static_cast<size_t>(rank)] = *std::move(model);
  return load_drafter(rank, packer);
}

absl::StatusOr<std::unique_ptr<ModelShards>> ModelShards::load_all(const std::string& dir, int world, Ops& packer,
                                                                   const DrafterChoice& drafter) {
  absl::StatusOr<std::unique_ptr<ModelShards>> shards = open(dir, world, Precision::kCheckpoint, drafter);
  if (!shards.ok()) return shards.status();
  for (int rank = 0; rank < world; ++rank) {
    if (absl::Status status = (*shards)->load(rank, packer); !status.ok()) return status;
  }
  (*shards)->close_files();
  return shards;
}

absl::StatusOr<std::unique_ptr<ModelShards>> ModelShards::load_all(const std::string& dir, int world,
                                                                   const BackendOptions& backend,
                                                                   const Decorate& decorate,
                                                                   const DrafterChoice& drafter) {
  const absl::StatusOr<Precision> precision = parse_precision(backend.precision);
  if (!precision.ok()) return precision.status();
  absl::StatusOr<std::unique_ptr<ModelShards>> shards = open(dir, world, *precision, drafter);
  if (!shards.ok()) return shards.status();
  for (int rank = 0; rank < world; ++rank) {
    absl::StatusOr<std::unique_ptr<Ops>> packer = make_backend(backend, rank);
    if (!packer.ok()) return packer.status();
    const std::unique_ptr<Ops> ops = decorate ? decorate(*std::move(packer)) : *std::move(packer);
    if (absl::Status status = (*shards)->load(rank, *ops); !status.ok()) return status;
  }
  (*shards)->close_files();
  return shards;
}

std::string numeric_fingerprint(const Ops& ops, const SlicePlan& slices, const std::string& options,
                                const std::string& checkpoint_hash) {
  const std::string text = fmt::format("{}\n{}\n{}\n{}\n{}\n", std::string(kNumericsVersion), ops.fingerprint_name(),
                                       slices.text(), options, checkpoint_hash);
  return sha256_hex(text).substr(0, 16);
}

}  // namespace tensorfold
