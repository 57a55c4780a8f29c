// The kernels for AVX-512; see isa_body.h.
#define TF_ISA isa_avx512

// clang-format off
#include "kernels/cpu/vec_avx512.h"
#include "kernels/cpu/isa_body.h"
// clang-format on

namespace tensorfold {

const KernelTable* kernels_avx512() {
  static const KernelTable table = TF_ISA::make_table("avx512");
  return &table;
}

}  // namespace tensorfold
