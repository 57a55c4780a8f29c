// An Ops that breaks the contract on purpose: its matmul adds in an order that reads the number of rows.
//
// A differential tester that does not catch this proves nothing (contract, section 8). Only the tests and
// `tensorfold verify --negative-control` make one; no option of a server can.
#pragma once

#include <memory>

#include "kernels/ops/ops.h"

namespace tensorfold {

/// Wraps `inner`; everything is forwarded except that a matmul of more than one row adds the two halves of K
/// separately. Weights must be packed through the returned object. It reports fingerprint_name() "negative-control".
std::unique_ptr<Ops> make_negative_control(std::unique_ptr<Ops> inner);

}  // namespace tensorfold
