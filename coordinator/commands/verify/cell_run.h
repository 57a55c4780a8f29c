// Runs one cell of the differential tester: a prompt and a reply under that cell's conditions, down to the logits'
// bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/verify/cells.h"
#include "transport/pass/executor.h"

namespace tensorfold {

struct CellInputs {
  std::vector<uint32_t> prompt;
  std::vector<std::vector<uint32_t>> mates;  // prompts of the other sequences, three of them
  uint32_t reply_tokens = 12;
  uint64_t seed = 7;
  uint32_t block_drafts = 0;  // most drafts of the block drafter; 0: there is none
  bool has_states = true;     // the model has recurrent states: a sequence that moves wants a snapshot
};

struct CellResult {
  std::vector<uint32_t> reply;
  /// Hash of the raw fp32 logits of a row, by the row's position: chosen prompt rows and every row that a reply token
  /// was drawn from.
  std::vector<std::pair<int64_t, uint64_t>> rows;
  uint64_t drafted = 0;
  uint64_t accepted = 0;

  /// First 12 hex characters of SHA-256 over the reply's ids and the rows' hashes.
  std::string hash() const;
};

/// The slot that a cell's own sequence uses: mates take the others.
uint32_t cell_slot(const Cell& cell);
/// The slot that it moves to and back from, where the cache axis says so.
uint32_t spare_slot();
/// Slots and KV pages that a cluster needs for any cell.
int64_t cells_slots();
int64_t cells_pages(const CellInputs& inputs);

/// Runs `cell` on a cluster made for it (world, transport, ISA, threads are the cluster's). `expected` is the reply
/// that mixed drafts are made from (empty for the first, undrafted run).
absl::StatusOr<CellResult> run_cell(PassExecutor& executor, const Cell& cell, const CellInputs& inputs,
                                    const std::vector<uint32_t>& expected);

}  // namespace tensorfold
