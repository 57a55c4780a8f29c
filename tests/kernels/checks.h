// Checks of the kernels that need no test framework, so that a cross build can run them under an emulator: the program
// kernels_selftest runs them all, and kernels_test gives each to GoogleTest.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/ops/ops.h"
#include "kernels/reference/reference.h"

namespace tensorfold {

/// Collects failures of one check.
class Checker {
 public:
  void expect(bool ok, const std::string& what);
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  std::vector<std::string> failures_;
};

struct NamedCheck {
  const char* name;
  void (*run)(Checker&);
};
/// All checks of all *_checks.cc files.
std::span<const NamedCheck> all_checks();

/// splitmix64; the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  /// Uniform in [-1, 1), a multiple of 2^-23.
  float uniform();
  /// Wide range: uniform times 2^-12 … 2^12.
  float wide();
  std::vector<float> vector(int64_t n, bool wide = false);

 private:
  uint64_t state_;
};

/// A MatrixSource with its own bytes.
struct OwnedMatrix {
  MatrixSource source;
  std::vector<std::byte> data, scales, biases;
};
/// Random weights; bits/group only for kMlxAffine.
std::unique_ptr<OwnedMatrix> random_matrix(Random* random, int64_t rows, int64_t cols, WeightFormat format,
                                           int bits = 0, int group = 0,
                                           WeightFormat scale_format = WeightFormat::kBf16);
/// Random FP8 (kE4m3) or FP4 (kE2m1) weights: every code but NaN's, finite scales in one of the formats of scales, one
/// for block_rows x block_cols.
std::unique_ptr<OwnedMatrix> random_small_floats(Random* random, int64_t rows, int64_t cols, WeightFormat format,
                                                 WeightFormat scale_format, int64_t block_rows, int64_t block_cols,
                                                 float global_scale = 1.0f, bool divide = false);
/// The same values as fp32.
std::unique_ptr<OwnedMatrix> as_f32(const MatrixSource& source);

/// A CPU backend, its tensors filled and read with little ceremony.
struct Variant {
  std::string name;
  std::unique_ptr<Ops> ops;
};
/// Every instruction set of this machine with each of these thread counts.
std::vector<Variant> all_variants(const std::vector<int>& threads);
Tensor upload(Ops& ops, int64_t rows, int64_t cols, const std::vector<float>& values);
std::vector<float> download(Ops& ops, Tensor t);
RefMatrix to_ref(int64_t rows, int64_t cols, const std::vector<float>& values);

/// Equal as bits (so that -0, NaN and subnormals count).
bool same_bits(const std::vector<float>& a, const std::vector<float>& b);
/// FNV-1a over the bits; `seed` chains several.
uint64_t hash_bits(const std::vector<float>& values, uint64_t seed = 0xcbf29ce484222325u);
/// Largest |a - b| / (|b| + floor).
double relative_error(const std::vector<float>& a, const RefMatrix& b, double floor);

// One function a file; each appends to the list.
std::vector<NamedCheck> numerics_checks();
std::vector<NamedCheck> vector_math_checks();
std::vector<NamedCheck> matmul_checks();
std::vector<NamedCheck> small_float_checks();
std::vector<NamedCheck> rowwise_checks();
std::vector<NamedCheck> attention_checks();
std::vector<NamedCheck> delta_net_checks();
std::vector<NamedCheck> expert_checks();
std::vector<NamedCheck> state_checks();
std::vector<NamedCheck> mamba2_checks();
std::vector<NamedCheck> stream_checks();
std::vector<NamedCheck> latent_checks();
std::vector<NamedCheck> shared_latent_checks();
std::vector<NamedCheck> block_checks();
std::vector<NamedCheck> latent_block_checks();
std::vector<NamedCheck> golden_checks();

/// Of products with FP8 and FP4 weights of every layout, for the golden checks (small_float_checks.cc).
uint64_t small_floats_hash(Ops& ops);
/// Of the router's and the experts' results on fixed inputs, for the golden checks (expert_checks.cc).
uint64_t router_hash(Ops& ops);
uint64_t experts_hash(Ops& ops);
/// The same of experts without gates beside a shared one that is always on.
uint64_t ungated_experts_hash(Ops& ops);
/// Of a Mamba2 layer (mamba2_checks.cc).
uint64_t mamba2_hash(Ops& ops);
/// Of gated streams with the dilated convolution, and of attention over chosen keys (stream_checks.cc).
uint64_t streams_hash(Ops& ops);
uint64_t chosen_keys_hash(Ops& ops);
/// Of operations on latents (latent_checks.cc).
uint64_t hyper_streams_hash(Ops& ops);
uint64_t latents_hash(Ops& ops);
/// Of those that layers share (shared_latent_checks.cc).
uint64_t shared_latents_hash(Ops& ops);
/// Of attention of blocks (block_checks.cc).
uint64_t block_hash(Ops& ops);
/// Of the same over latents (latent_block_checks.cc).
uint64_t latent_blocks_hash(Ops& ops, int64_t window);

/// A batch of row groups for ops that look at nothing else.
inline RowBatch batch_of(std::span<const RowGroup> groups) {
  RowBatch rows;
  rows.groups = groups;
  return rows;
}

inline RowBatch batch_at(std::span<const int64_t> positions) {
  RowBatch rows;
  rows.positions = positions;
  return rows;
}

inline RowBatch batch_with(std::span<const int32_t> tokens) {
  RowBatch rows;
  rows.tokens = tokens;
  return rows;
}

}  // namespace tensorfold
