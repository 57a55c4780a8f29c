#include "kernels/cpu/isa.h"

namespace tensorfold {

std::vector<std::string> available_isas() {
  std::vector<std::string> isas;
#if defined(__x86_64__)
  // Every machine with AVX2 and FMA has F16C as well.
  const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                      __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0;
  if (avx512) isas.push_back("avx512");
  if (avx2) isas.push_back("avx2");
#elif defined(__aarch64__)
  isas.push_back("neon");  // part of the base architecture
#endif
  isas.push_back("portable");
  return isas;
}

const KernelTable* kernels_for(const std::string& isa) {
  // A table is only touched when the machine can run it: its own code is compiled with its flags.
  for (const std::string& have : available_isas()) {
    if (isa != have && isa != "auto") continue;
#if defined(__x86_64__)
    if (have == "avx512") return kernels_avx512();
    if (have == "avx2") return kernels_avx2();
#elif defined(__aarch64__)
    if (have == "neon") return kernels_neon();
#endif
    return kernels_portable();
  }
  return nullptr;
}

}  // namespace tensorfold
