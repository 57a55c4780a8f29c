// Preconditions of the kernels. A breach is a mistake in the calling code, never bad input, so the program stops with
// the text: computing on would give wrong bytes.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace tensorfold {

[[noreturn]] inline void kernel_fail(const char* what) {
  std::fprintf(stderr, "tensorfold kernels: %s\n", what);
  std::abort();
}

inline void kernel_check(bool ok, const char* what) {
  if (!ok) kernel_fail(what);
}

}  // namespace tensorfold
