// The kernels for NEON; see isa_body.h.
#define TF_ISA isa_neon

// clang-format off
#include "kernels/cpu/vec_neon.h"
#include "kernels/cpu/isa_body.h"
// clang-format on

namespace tensorfold {

const KernelTable* kernels_neon() {
  static const KernelTable table = TF_ISA::make_table("neon");
  return &table;
}

}  // namespace tensorfold
