// The kernels, written once: every isa_*.cc defines TF_ISA (its own namespace), includes its vec_*.h and then this. All
// of it lives in that namespace, so that no function compiled for one instruction set can be linked in place of
// another's.
#pragma once

#include <cstdint>

#include "kernels/cpu/kernel_table.h"

// Unrolls the loop that follows: register tiles must be indexed by constants.
#if defined(__clang__)
#define TF_UNROLL(n) _Pragma("unroll")
#else
#define TF_UNROLL_TEXT(text) _Pragma(#text)
#define TF_UNROLL(n) TF_UNROLL_TEXT(GCC unroll n)
#endif

namespace tensorfold::TF_ISA {
inline constexpr int64_t kAttentionPage = 64;    // kPageTokens
inline constexpr int64_t kAttentionSplit = 512;  // kKeySplit
inline constexpr int64_t kPrefetchBytes = 8192;  // how far ahead packed weights are fetched
}  // namespace tensorfold::TF_ISA

// In this order: each uses the ones before.
// clang-format off
#include "kernels/cpu/vec_math.h"
#include "kernels/cpu/impl_rowwise.h"
#include "kernels/cpu/impl_small_floats.h"
#include "kernels/cpu/impl_matmul.h"
#include "kernels/cpu/impl_attention.h"
#include "kernels/cpu/impl_delta_net.h"
#include "kernels/cpu/impl_latent.h"
#include "kernels/cpu/impl_mamba2.h"
#include "kernels/cpu/impl_streams.h"
// clang-format on

namespace tensorfold::TF_ISA {

inline KernelTable make_table(const char* name) {
  KernelTable t;
  t.name = name;
  t.matmul = matmul;
  t.matmul_scratch_floats = matmul_scratch_floats;
  t.dequantise_row = dequantise_row;
  t.rms_norm = rms_norm;
  t.l2_norm = l2_norm;
  t.add = add;
  t.silu_mul = silu_mul;
  t.sigmoid_mul = sigmoid_mul;
  t.relu_squared = relu_squared;
  t.softmax = softmax;
  t.weighted_sum = weighted_sum;
  t.rope = rope;
  t.attention_split = attention_split;
  t.attention_merge = attention_merge;
  t.attention_finish = attention_finish;
  t.conv_silu = conv_silu;
  t.delta_gates = delta_gates;
  t.channel_decay = channel_decay;
  t.delta_step = delta_step;
  t.delta_output = delta_output;
  t.layer_norm = layer_norm;
  t.silu_mul_limited = silu_mul_limited;
  t.sqrt_softplus = sqrt_softplus;
  t.pool = pool;
  t.index_score = index_score;
  t.latent_split = latent_split;
  t.delta_output_sigmoid = delta_output_sigmoid;
  t.scaled_silu = scaled_silu;
  t.mix_streams = mix_streams;
  t.add_scaled = add_scaled;
  t.dot = dot;
  t.mamba2_conv = mamba2_conv;
  t.mamba2_steps = mamba2_steps;
  t.mamba2_step = mamba2_step;
  t.mamba2_output = mamba2_output;
  t.find_greater = find_greater;
  t.exp = exp_lanes;
  t.sigmoid = sigmoid_lanes;
  t.softplus = softplus_lanes;
  t.read_all = read_all;
  t.burn_fma = burn_fma;
  return t;
}

}  // namespace tensorfold::TF_ISA
