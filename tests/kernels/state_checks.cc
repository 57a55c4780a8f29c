// Pages and states that are copied, put away and brought back, on every instruction set.
#include "tests/kernels/checks.h"
#include "tests/kernels/state_cases.h"

namespace tensorfold {
namespace {

void on_all_variants(Checker& c, state_cases::Failures (*run)(Ops&)) {
  for (const Variant& variant : all_variants({1, 3})) {
    for (const std::string& failure : run(*variant.ops)) c.expect(false, variant.name + ": " + failure);
  }
}

// Protects: shared, copied and restored pages of keys and values hold the very bits; their neighbours are untouched.
void kv_pages_keep_their_bits(Checker& c) { on_all_variants(c, state_cases::kv_pages); }
// Protects: the same for paged rows, pooled ones included.
void row_pages_keep_their_bits(Checker& c) { on_all_variants(c, state_cases::row_pages); }
// Protects: a state taken from a sequence goes on exactly as the sequence would have, for any number of kept rows.
void states_go_on_from_copies(Checker& c) { on_all_variants(c, state_cases::recurrent_states); }

}  // namespace

std::vector<NamedCheck> state_checks() {
  return {{"kv_pages_keep_their_bits", kv_pages_keep_their_bits},
          {"row_pages_keep_their_bits", row_pages_keep_their_bits},
          {"states_go_on_from_copies", states_go_on_from_copies}};
}

}  // namespace tensorfold
