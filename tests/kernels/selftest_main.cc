// Runs all kernel checks without a test framework: `kernels_selftest [name …]`. Exit status 1 when any failed.
#include <chrono>
#include <cstdio>
#include <string_view>

#include "tests/kernels/checks.h"

int main(int argc, char** argv) {
  int failed = 0;
  for (const tensorfold::NamedCheck& check : tensorfold::all_checks()) {
    bool wanted = argc <= 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::string_view(argv[i]) == check.name;
    if (!wanted) continue;
    const auto start = std::chrono::steady_clock::now();
    tensorfold::Checker checker;
    check.run(checker);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %s (%.2f s)\n", checker.failures().empty() ? "ok    " : "FAILED", check.name, seconds);
    for (size_t i = 0; i < checker.failures().size() && i < 20; ++i)
      std::printf("    %s\n", checker.failures()[i].c_str());
    if (!checker.failures().empty()) ++failed;
    std::fflush(stdout);
  }
  std::string isas;
  for (const std::string& isa : tensorfold::available_isas()) isas += " " + isa;
  std::printf("%d failed; instruction sets:%s\n", failed, isas.c_str());
  return failed == 0 ? 0 : 1;
}
