// The kernels for portable C++; see isa_body.h.
#define TF_ISA isa_portable

// clang-format off
#include "kernels/cpu/vec_portable.h"
#include "kernels/cpu/isa_body.h"
// clang-format on

namespace tensorfold {

const KernelTable* kernels_portable() {
  static const KernelTable table = TF_ISA::make_table("portable");
  return &table;
}

}  // namespace tensorfold
