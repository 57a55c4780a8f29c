// What a backend's kernels do not take is refused at load, by name: a kernel that met it would stop the program.
#include "worker/model/backend_limits.h"

#include <gtest/gtest.h>

namespace tensorfold {
namespace {

ModelConfig latents() {
  ModelConfig config;
  config.family = Family::kGlm5Next;
  config.hidden_size = 4096;
  config.latent.q_rank = 1536;
  config.latent.kv_rank = 512;
  config.latent.index_dim = 128;
  config.latent.index_heads = 32;
  config.latent.index_windows = 2048;
  config.streams.count = 4;
  return config;
}

Ops::Limits bounds() {
  Ops::Limits limits;
  limits.norm_columns = 16384;
  limits.norm_unit = 4;
  limits.latent_columns = 512;
  limits.latent_unit = 8;
  limits.index_columns = 128;
  limits.index_unit = 2;
  limits.index_heads = 128;
  limits.chosen_windows = 4096;
  return limits;
}

TEST(BackendLimits, NamesTheSizeAndTheBound) {
  EXPECT_TRUE(within_limits(latents(), bounds(), "x").ok());
  struct Case {
    const char* said;
    void (*change)(ModelConfig&);
  };
  const Case cases[] = {
      {"hidden_size is 4098; the kernels of backend x take a multiple of 4, at most 16384: run it with backend cpu",
       [](ModelConfig& c) { c.hidden_size = 4098; }},
      {"hidden_size times the streams of the residual is 32768", [](ModelConfig& c) { c.streams.count = 8; }},
      {"the rank of the queries' latent is 20000", [](ModelConfig& c) { c.latent.q_rank = 20000; }},
      {"the width of a latent is 520", [](ModelConfig& c) { c.latent.kv_rank = 520; }},
      {"the width of an index key is 129; the kernels of backend x take a multiple of 2, at most 128",
       [](ModelConfig& c) { c.latent.index_dim = 129; }},
      {"the number of index heads is 129", [](ModelConfig& c) { c.latent.index_heads = 129; }},
      {"the number of windows to choose is 5000; the kernels of backend x take at most 4096",
       [](ModelConfig& c) { c.latent.index_windows = 5000; }},
      {"the number of windows to choose is 8192",
       [](ModelConfig& c) {
         c.indexer.tokens = 4;
         c.indexer.budget = 32768;
       }},
      {"head_dim is 70",
       [](ModelConfig& c) {
         c.qk_norm = true;
         c.head_dim = 70;
       }},
      {"hidden_size times the streams of the residual is 20480",
       [](ModelConfig& c) {
         c.gated_streams.count = 5;
         c.mtp_layers = 1;
       }},
      // Deepseek's latents are as wide as a head.
      {"the width of a latent is 516",
       [](ModelConfig& c) {
         c.family = Family::kDeepseekV4;
         c.head_dim = 516;
       }},
  };
  for (const Case& c : cases) {
    ModelConfig config = latents();
    c.change(config);
    const absl::Status status = within_limits(config, bounds(), "x");
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << c.said;
    EXPECT_NE(status.message().find(c.said), std::string::npos) << status.message();
  }
}

// The CPU's kernels have no such bounds.
TEST(BackendLimits, NoneByDefault) {
  ModelConfig config = latents();
  config.hidden_size = 100001;
  config.latent.index_windows = 100000;
  EXPECT_TRUE(within_limits(config, {}, "x").ok());
}

}  // namespace
}  // namespace tensorfold
