// `tensorfold logits`: raw logits of chosen positions, for comparison with other implementations.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>

#include "coordinator/commands/cluster_flags.h"
#include "coordinator/commands/commands.h"
#include "worker/checkpoint/safetensors_write.h"
#include "worker/checkpoint/tensor_values.h"

namespace tensorfold {
namespace {

struct LogitsFlags {
  ClusterFlags cluster;
  std::string tokens;
  std::string out;
  int chunk = 0;
};

struct LogitsInput {
  std::vector<int64_t> ids;
  std::vector<int64_t> positions;  // ascending
};

absl::StatusOr<std::vector<int64_t>> read_vector(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* tensor = file.find(name);
  if (tensor == nullptr) return absl::InvalidArgumentError(fmt::format("{} has no tensor \"{}\"", file.path(), name));
  if (tensor->shape.size() != 1) {
    return absl::InvalidArgumentError(
        fmt::format("{}: \"{}\" has shape {}, one dimension is wanted", file.path(), name, shape_text(tensor->shape)));
  }
  return read_integers(*tensor);
}

absl::StatusOr<LogitsInput> read_input(const std::string& path, int64_t vocab) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<std::vector<int64_t>> ids = read_vector(*file, "input_ids");
  if (!ids.ok()) return ids.status();
  absl::StatusOr<std::vector<int64_t>> positions = read_vector(*file, "positions");
  if (!positions.ok()) return positions.status();
  if (ids->empty()) return absl::InvalidArgumentError(fmt::format("{}: input_ids is empty", path));
  for (const int64_t id : *ids) {
    if (id < 0 || id >= vocab) {
      return absl::InvalidArgumentError(fmt::format("{}: token {} is outside the vocabulary of {}", path, id, vocab));
    }
  }
  int64_t last = -1;
  for (const int64_t position : *positions) {
    if (position <= last || position >= static_cast<int64_t>(ids->size())) {
      return absl::InvalidArgumentError(fmt::format("{}: positions must ascend within the {} tokens, found {} after {}",
                                                    path, ids->size(), position, last));
    }
    last = position;
  }
  return LogitsInput{*std::move(ids), *std::move(positions)};
}

// Places a part of a row into [positions, vocab].
void place(std::vector<float>& all, int64_t row, int64_t vocab, const RowReport& part) {
  std::copy(part.logits.begin(), part.logits.end(), all.begin() + row * vocab + part.first_id);
}

absl::Status run_logits(const LogitsFlags& flags) {
  const absl::StatusOr<SafetensorsFile> probe = SafetensorsFile::open(flags.tokens);
  if (!probe.ok()) return probe.status();
  const TensorInfo* ids = probe->find("input_ids");
  RunnerOptions runner;
  runner.slots = 1;
  runner.pages = (ids == nullptr ? 1 : ids->elements()) / kPageTokens + 2;
  absl::StatusOr<OpenCluster> open = open_cluster(flags.cluster, runner);
  if (!open.ok()) return open.status();
  const ModelShape& shape = open->shards->shape(0);
  const absl::StatusOr<LogitsInput> input = read_input(flags.tokens, shape.vocab);
  if (!input.ok()) return input.status();
  for (int rank = 0; rank < open->cluster->world(); ++rank) {
    open->cluster->runner(rank).keep_mtp_logits(shape.has_mtp);
  }

  const int64_t total = static_cast<int64_t>(input->ids.size());
  const int64_t chunk = flags.chunk > 0 ? flags.chunk : std::min<int64_t>(total, kMaxPassRows);
  std::map<int64_t, int64_t> row_of;  // position -> output row
  for (const int64_t position : input->positions) row_of.emplace(position, static_cast<int64_t>(row_of.size()));
  const int64_t rows = static_cast<int64_t>(input->positions.size());
  std::vector<float> logits(static_cast<size_t>(rows * shape.vocab));
  // The last position has no next token here, so its pair does not exist.
  const int64_t mtp_rows = shape.has_mtp && rows > 0 ? rows - (input->positions.back() + 1 == total ? 1 : 0) : 0;
  std::vector<float> mtp_logits(static_cast<size_t>(mtp_rows * shape.vocab));

  for (int64_t at = 0; at < total; at += chunk) {
    PassPlan plan;
    SequencePlan& sequence = plan.sequences.emplace_back();
    sequence.fresh = at == 0;
    sequence.use_mtp = shape.has_mtp;
    sequence.first_position = static_cast<uint64_t>(at);
    const int64_t count = std::min(chunk, total - at);
    for (int64_t i = 0; i < count; ++i) {
      sequence.tokens.push_back(static_cast<int32_t>(input->ids[static_cast<size_t>(at + i)]));
      if (row_of.contains(at + i)) sequence.wants.push_back({static_cast<uint32_t>(i), kFullRow});
    }
    sequence.certain = static_cast<uint32_t>(count);
    for (int64_t page = 0; at == 0 && page < runner.pages; ++page) {
      sequence.new_pages.push_back(static_cast<int32_t>(page));
    }
    const absl::StatusOr<PassResult> pass = open->cluster->executor().execute(plan);
    if (!pass.ok()) return pass.status();
    for (const PassReport& report : pass->reports) {
      for (const RowReport& part : report.rows) place(logits, row_of[at + part.row], shape.vocab, part);
    }
    for (int rank = 0; rank < open->cluster->world(); ++rank) {
      for (const RowReport& part : open->cluster->runner(rank).mtp_rows()) {
        const auto row = row_of.find(part.row);
        if (row != row_of.end() && row->second < mtp_rows) place(mtp_logits, row->second, shape.vocab, part);
      }
    }
  }
  std::vector<TensorInfo> tensors = {tensor_view("logits", {rows, shape.vocab}, std::span<const float>(logits))};
  if (shape.has_mtp) {
    tensors.push_back(tensor_view("mtp_logits", {mtp_rows, shape.vocab}, std::span<const float>(mtp_logits)));
  }
  return write_safetensors(flags.out, tensors);
}

}  // namespace

void add_logits_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<LogitsFlags>();
  CLI::App* command = app.add_subcommand(
      "logits", "Write the fp32 logits of chosen positions of a token file (and mtp_logits with an MTP layer)");
  flags->cluster.add_to(*command);
  command->add_option("--tokens", flags->tokens, "safetensors file with int64 input_ids [T] and positions [P]")
      ->required();
  command->add_option("--out", flags->out, "safetensors file to write: logits [P, vocabulary]")->required();
  command->add_option("--chunk", flags->chunk, "prompt rows a pass; 0: all at once")->check(CLI::Range(0, 16384));
  command->callback([flags, exit_code] {
    const absl::Status status = run_logits(*flags);
    *exit_code = status.ok() ? 0 : report_error(status);
  });
}

}  // namespace tensorfold
