// The kernels for AVX2; see isa_body.h.
#define TF_ISA isa_avx2

// clang-format off
#include "kernels/cpu/vec_avx2.h"
#include "kernels/cpu/isa_body.h"
// clang-format on

namespace tensorfold {

const KernelTable* kernels_avx2() {
  static const KernelTable table = TF_ISA::make_table("avx2");
  return &table;
}

}  // namespace tensorfold
