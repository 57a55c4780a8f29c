// Pages and states that are copied, put away and brought back, on every instruction set.
#include <cstring>

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
void states_go_on_from_copies(Checker& c) { on_all_variants(c, state_cases::all_recurrent_states); }

// Protects: bytes from a file that keep other rows than the slot says are refused; believed, the next pass would take
// rows that are not there.
void other_kept_rows_are_refused(Checker& c) {
  const auto variants = all_variants({1});
  DeltaNetShape shape;
  shape.k_heads = shape.v_heads = 1;
  shape.dk = shape.dv = 16;
  shape.k_head_of = {0};
  const auto state = variants.front().ops->make_recurrent_state(shape);
  std::vector<std::byte> bytes(static_cast<size_t>(state->bytes()));
  state->save(bytes);
  c.expect(state->load(bytes, 0), "a state of no kept rows, as it was saved");
  c.expect(!state->load(bytes, 1), "a slot with a row that the state does not keep");
  for (const int64_t rows : {int64_t{-1}, int64_t{1000}}) {
    std::memcpy(bytes.data(), &rows, sizeof(rows));
    c.expect(!state->load(bytes, rows), std::to_string(rows) + " kept rows");
  }
}

}  // namespace

std::vector<NamedCheck> state_checks() {
  return {{"kv_pages_keep_their_bits", kv_pages_keep_their_bits},
          {"row_pages_keep_their_bits", row_pages_keep_their_bits},
          {"states_go_on_from_copies", states_go_on_from_copies},
          {"other_kept_rows_are_refused", other_kept_rows_are_refused}};
}

}  // namespace tensorfold
