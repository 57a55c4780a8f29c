// The CPU backend: every Ops operation in fp32 on AVX-512, AVX2, NEON or portable C++, all giving the same bits.
//
// The kernels are written once against a 16-lane vector and compiled once per instruction set; the choice is made when
// the Ops object is made and cannot change a result, nor can the number of threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

struct CpuOptions {
  /// Threads that compute, the calling thread included; 1 starts none, 0 means one for each core this process may use.
  int threads = 0;
  /// auto | avx512 | avx2 | neon | portable. auto takes the widest that the machine has.
  std::string isa = "auto";
  /// If set, use this pool (and its thread count) rather than an own one. May be shared by several Ops objects: while
  /// one of them is computing with it, the others compute on their calling threads alone.
  std::shared_ptr<ThreadPool> pool;
};

/// The instruction sets that this build and this machine both have, widest first; always ends with "portable".
std::vector<std::string> available_isas();

/// Null, with a message that names what the machine has, when options.isa is not available or options are out of range.
/// Weights packed by one CPU Ops object may be used by any other, whatever its instruction set.
std::unique_ptr<Ops> make_cpu_ops(const CpuOptions& options, std::string* error);

}  // namespace tensorfold
