// Pages and states of the CUDA backend that are copied, put away and brought back.
#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/gpu.h"
#include "tests/kernels/state_cases.h"

namespace tensorfold {
namespace {

void run_case(state_cases::Failures (*run)(Ops&), const std::string& kv_format) {
  CudaOptions options;
  options.kv_format = kv_format;
  std::string error;
  const std::unique_ptr<Ops> ops = make_cuda_ops(options, &error);
  ASSERT_NE(ops, nullptr) << error;
  for (const std::string& failure : run(*ops)) ADD_FAILURE() << failure;
}

// Protects: shared, copied and restored pages of keys and values hold the very bits, the scales of fp8 included.
TEST(CudaState, KvPagesKeepTheirBits) {
  TF_NEED_GPU();
  run_case(state_cases::kv_pages, "bf16");
  run_case(state_cases::kv_pages, "fp8");
}

// Protects: the same for paged rows, where the backend has them.
TEST(CudaState, RowPagesKeepTheirBits) {
  TF_NEED_GPU();
  run_case(state_cases::row_pages, "bf16");
}

// Protects: a state taken from a sequence goes on exactly as the sequence would have, for any number of kept rows.
TEST(CudaState, StatesGoOnFromCopies) {
  TF_NEED_GPU();
  run_case(state_cases::all_recurrent_states, "bf16");
}

}  // namespace
}  // namespace tensorfold
