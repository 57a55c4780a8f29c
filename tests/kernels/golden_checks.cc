// Committed hashes of every operation's bits: the same on x86 and Arm, on every instruction set, today and next year.
#include <cmath>
#include <cstdio>

#include "kernels/numerics/math64.h"
#include "kernels/numerics/version.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

struct Golden {
  const char* name;
  uint64_t hash;
};
// If a change of arithmetic is intended, raise kNumericsVersion and take the new values from the failure messages.
constexpr const char* kGoldenVersion = "tf-numerics-1";
constexpr Golden kGolden[] = {
    {"math64", 0x9cb95c61efb2706c},          {"matmul_f32", 0xb6af430bec15d66d},
    {"matmul_bf16", 0xc09a42c59770452e},     {"matmul_f16", 0x1b4987e074f29312},
    {"matmul_affine", 0xe7cf3feeafe75311},   {"rms_norm", 0x5b058a7fd4de02bd},
    {"activations", 0x4c108c8f907d98c7},     {"rope", 0x048c39adfbb93754},
    {"attention", 0xe5f812785bc5cdea},       {"delta_net", 0xa964fe3ad7c7967c},
    {"router", 0x19baf2cf0fad413c},          {"experts", 0x7739a78cacfcfd89},
    {"ungated_experts", 0xf3ccf67ab1acdb41}, {"mamba2", 0x44ae7d0384af85a5},
    {"streams", 0x2c7f079a23658441},         {"chosen_keys", 0x5a5228cda206f057},
    {"kimi_delta", 0xc1dabf0a9abc9b18},      {"hyper_streams", 0xa15abd5166b694b4},
    {"latents", 0x53f0780f7a37a15c},         {"shared_latents", 0xacdeb34fa106ddcc},
    {"block", 0x5ac0fbbc75d73b95},           {"small_floats", 0x00eb4a435d069f8e},
    {"latent_blocks", 0xa8b1e2d338ef206c},   {"latent_block_window", 0xa86b2f8ac2740a27},
};

void compare(Checker& c, const std::string& variant, const std::string& name, uint64_t hash) {
  for (const Golden& g : kGolden) {
    if (name != g.name) continue;
    char text[64];
    std::snprintf(text, sizeof text, ": 0x%016llx", static_cast<unsigned long long>(hash));
    c.expect(hash == g.hash, variant + " {\"" + name + "\"" + text);
    return;
  }
  c.expect(false, "no golden hash named " + name);
}

uint64_t hash_doubles(const std::vector<double>& values) {
  std::vector<float> halves;
  for (double d : values) {
    float two[2];
    static_assert(sizeof two == sizeof d);
    __builtin_memcpy(two, &d, sizeof d);
    halves.insert(halves.end(), two, two + 2);
  }
  return hash_bits(halves);
}

// Protects the float64 functions' bits.
void golden_math64(Checker& c) {
  Random random(50);
  std::vector<double> values;
  for (int i = 0; i < 500; ++i) {
    const double u = static_cast<double>(random.bits() >> 11) * 0x1p-53;
    double s, k;
    sincos64(std::floor(u * 1e6) * 0.731, &s, &k);
    values.insert(values.end(), {exp64((u - 0.5) * 100), log64(u + 0.001), s, k, pow64(1e6, -u)});
  }
  compare(c, "math64", "math64", hash_doubles(values));
}

uint64_t matmul_hash(Ops& ops, WeightFormat format, std::initializer_list<std::pair<int, int>> affine) {
  uint64_t hash = hash_bits({});
  for (const auto& [bits, group] : affine) {
    Random random(static_cast<uint64_t>(51 + bits));
    const int64_t cols = format == WeightFormat::kMlxAffine ? 256 : 203, rows = 11;
    const auto m = random_matrix(&random, 45, cols, format, bits, group);
    ops.begin_pass();
    const auto w = ops.pack(std::span<const MatrixSource>(&m->source, 1));
    const Tensor out = ops.scratch(rows, 45);
    ops.matmul(*w, upload(ops, rows, cols, random.vector(rows * cols, true)), out);
    hash = hash_bits(download(ops, out), hash);
  }
  return hash;
}

uint64_t attention_hash(Ops& ops) {
  Random random(60);
  const int64_t heads = 6, kv_heads = 2, dim = 40, rows = 600;
  std::vector<int32_t> pages, kv_head_of = {0, 0, 0, 1, 1, 1};
  for (int32_t i = 0; i < 10; ++i) pages.push_back(9 - i);
  ops.begin_pass();
  const auto cache = ops.make_kv_cache(1, 10, kv_heads, dim);
  const RowGroup group{0, rows, 0, 0, rows, pages};
  const std::span<const RowGroup> groups(&group, 1);
  const Tensor k = upload(ops, rows, kv_heads * dim, random.vector(rows * kv_heads * dim));
  const Tensor v = upload(ops, rows, kv_heads * dim, random.vector(rows * kv_heads * dim));
  ops.kv_write(*cache, 0, k, v, batch_of(groups));
  AttentionArgs args;
  args.q = upload(ops, rows, heads * dim, random.vector(rows * heads * dim));
  args.out = ops.scratch(rows, heads * dim);
  args.heads = heads;
  args.head_dim = dim;
  args.kv_head_of = kv_head_of;
  args.scale = 0.5f;
  args.rows = batch_of(groups);
  ops.attention(*cache, 0, args);
  return hash_bits(download(ops, args.out));
}

uint64_t delta_net_hash(Ops& ops, bool channel_decay = false) {
  Random random(61);
  DeltaNetShape s;
  s.k_heads = 2;
  s.v_heads = 4;
  s.dk = 32;
  s.dv = 48;
  s.k_head_of = {0, 0, 1, 1};
  s.channel_decay = channel_decay;
  const int64_t rows = 25;
  ops.begin_pass();
  const auto conv = ops.pack_vector(random.vector(s.channels() * 4)), a_log = ops.pack_vector(random.vector(4)),
             dt_bias = ops.pack_vector(random.vector(s.decays())), norm = ops.pack_vector(random.vector(s.dv));
  const auto state = ops.make_recurrent_state(s);
  const std::vector<RecurrentState*> states[] = {{state.get()}};
  const RowGroup group{0, rows, 0, 0, rows - 5, {}};
  DeltaNetArgs args;
  args.shape = &s;
  args.qkv = upload(ops, rows, s.channels(), random.vector(rows * s.channels()));
  args.z = upload(ops, rows, 4 * s.dv, random.vector(rows * 4 * s.dv));
  args.b = upload(ops, rows, 4, random.vector(rows * 4));
  args.a = upload(ops, rows, s.decays(), random.vector(rows * s.decays()));
  args.decay_floor = -5.0f;
  args.conv = conv.get();
  args.a_log = a_log.get();
  args.dt_bias = dt_bias.get();
  args.norm = norm.get();
  args.out = ops.scratch(rows, 4 * s.dv);
  args.rows = batch_of({&group, 1});
  args.rows.recurrent = states;
  ops.delta_net(args);
  return hash_bits(download(ops, args.out));
}

// Protects every operation's bits on every instruction set against committed values.
void golden_ops(Checker& c) {
  for (Variant& v : all_variants({1, 2})) {
    Ops& ops = *v.ops;
    compare(c, v.name, "matmul_f32", matmul_hash(ops, WeightFormat::kF32, {{0, 0}}));
    compare(c, v.name, "matmul_bf16", matmul_hash(ops, WeightFormat::kBf16, {{0, 0}}));
    compare(c, v.name, "matmul_f16", matmul_hash(ops, WeightFormat::kF16, {{0, 0}}));
    compare(c, v.name, "small_floats", small_floats_hash(ops));
    compare(c, v.name, "matmul_affine",
            matmul_hash(ops, WeightFormat::kMlxAffine, {{2, 32}, {3, 64}, {4, 128}, {5, 32}, {6, 64}, {8, 128}}));
    Random random(62);
    ops.begin_pass();
    const auto weight = ops.pack_vector(random.vector(100));
    const Tensor x = upload(ops, 5, 300, random.vector(1500, true)), normed = ops.scratch(5, 300);
    ops.rms_norm(x, 3, *weight, 1e-6f, normed);
    compare(c, v.name, "rms_norm", hash_bits(download(ops, normed)));
    const Tensor half = ops.scratch(5, 150);
    ops.silu_mul(x, half);
    ops.sigmoid_mul(x, normed);
    compare(c, v.name, "activations", hash_bits(download(ops, x), hash_bits(download(ops, half))));
    const std::vector<int64_t> positions = {0, 1, 77, 4096, 1000000};
    const RopeTable table =
        ops.rope_table(batch_at(positions), *ops.pack_vector(std::vector<float>{1.0f, 0.5f, 0.01f, 1e-6f}), 1.0);
    ops.rope(normed, 3, 100, table);
    compare(c, v.name, "rope", hash_bits(download(ops, normed)));
    compare(c, v.name, "attention", attention_hash(ops));
    compare(c, v.name, "delta_net", delta_net_hash(ops));
    compare(c, v.name, "kimi_delta", delta_net_hash(ops, true));
    compare(c, v.name, "hyper_streams", hyper_streams_hash(ops));
    compare(c, v.name, "latents", latents_hash(ops));
    compare(c, v.name, "shared_latents", shared_latents_hash(ops));
    compare(c, v.name, "router", router_hash(ops));
    compare(c, v.name, "experts", experts_hash(ops));
    compare(c, v.name, "ungated_experts", ungated_experts_hash(ops));
    compare(c, v.name, "mamba2", mamba2_hash(ops));
    compare(c, v.name, "streams", streams_hash(ops));
    compare(c, v.name, "chosen_keys", chosen_keys_hash(ops));
    compare(c, v.name, "block", block_hash(ops));
    compare(c, v.name, "latent_blocks", latent_blocks_hash(ops, 0));
    compare(c, v.name, "latent_block_window", latent_blocks_hash(ops, 50));
  }
}

// Protects against changing the arithmetic without changing its version.
void golden_version(Checker& c) {
  c.expect(kNumericsVersion == kGoldenVersion,
           "kNumericsVersion changed: take new golden hashes and name their version");
}

}  // namespace

std::vector<NamedCheck> golden_checks() {
  return {{"golden_math64", golden_math64}, {"golden_ops", golden_ops}, {"golden_version", golden_version}};
}

}  // namespace tensorfold
