#include "coordinator/commands/verify/cells.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

namespace tensorfold {
namespace {

// A cell's values as one small text an axis.
std::array<std::string, 9> values(const Cell& cell) {
  return {fmt::format("{}", cell.world),
          cell.transport,
          cell.variant,
          fmt::format("{}", cell.threads),
          fmt::format("{}{}", draft_name(cell.draft), cell.width),
          fmt::format("{}", cell.chunk),
          cell.mates ? "mates" : "alone",
          cache_name(cell.cache),
          cell.sampled ? "sampled" : "greedy"};
}

std::set<std::string> pairs(const Cell& cell) {
  const auto axis = values(cell);
  std::set<std::string> out;
  for (size_t i = 0; i < axis.size(); ++i) {
    for (size_t j = i + 1; j < axis.size(); ++j) out.insert(fmt::format("{}={}|{}={}", i, axis[i], j, axis[j]));
  }
  return out;
}

}  // namespace

std::string draft_name(CellDraft draft) {
  switch (draft) {
    case CellDraft::kOff:
      return "off";
    case CellDraft::kCopy:
      return "copy";
    case CellDraft::kMtp:
      return "mtp";
    case CellDraft::kBlock:
      return "block";
    case CellDraft::kMixed:
      return "mixed";
    case CellDraft::kAdversary:
      return "adversary";
  }
  return "?";
}

std::string cache_name(CellCache cache) {
  switch (cache) {
    case CellCache::kCold:
      return "cold";
    case CellCache::kPrefix:
      return "prefix";
    case CellCache::kReply:
      return "reply";
    case CellCache::kDisk:
      return "disk";
    case CellCache::kEvicted:
      return "evicted";
  }
  return "?";
}

std::string Cell::name() const {
  return fmt::format("world {} {} {} threads {} {} width {} chunk {} {} {} {}", world, world == 1 ? "-" : transport,
                     variant, threads, draft_name(draft), width,
                     chunk == 0 ? std::string("all") : fmt::format("{}", chunk), mates ? "with mates" : "alone",
                     cache_name(cache), sampled ? "sampled" : "greedy");
}

std::vector<Cell> product(const Axes& axes, bool has_mtp, bool has_block, int widest) {
  std::vector<Cell> cells;
  std::vector<Cell> clusters;
  for (const int world : axes.worlds) {
    if (world > widest) continue;
    for (size_t t = 0; t < (world == 1 ? 1 : axes.transports.size()); ++t) {
      for (const std::string& variant : axes.variants) {
        for (const int threads : axes.threads) {
          Cell& cell = clusters.emplace_back();
          cell.world = world;
          cell.transport = world == 1 ? "local" : axes.transports[t];
          cell.variant = variant;
          cell.threads = threads;
        }
      }
    }
  }
  for (const Cell& cluster : clusters) {
    for (const CellDraft draft : axes.drafts) {
      if (draft == CellDraft::kMtp && !has_mtp) continue;
      if (draft == CellDraft::kBlock && !has_block) continue;
      const std::vector<int> one = {1};
      for (const int width : draft == CellDraft::kOff ? one : axes.widths) {
        for (const int chunk : axes.chunks) {
          for (const bool mates : axes.mates) {
            for (const CellCache cache : axes.caches) {
              for (const bool sampled : axes.sampled) {
                Cell cell = cluster;
                cell.draft = draft;
                cell.width = width;
                cell.chunk = chunk;
                cell.mates = mates;
                cell.cache = cache;
                cell.sampled = sampled;
                cells.push_back(cell);
              }
            }
          }
        }
      }
    }
  }
  return cells;
}

std::vector<Cell> pairwise_sample(const std::vector<Cell>& cells, size_t at_least) {
  std::set<std::string> covered;
  std::vector<bool> taken(cells.size(), false);
  // A stride that shares no factor with the count visits all cells in a scattered order.
  size_t stride = cells.size() * 618 / 1000 + 1;
  const auto coprime = [&](size_t a) {
    size_t b = cells.size();
    while (b != 0) {
      const size_t rest = a % b;
      a = b;
      b = rest;
    }
    return a == 1;
  };
  while (stride > 1 && !coprime(stride)) ++stride;
  size_t count = 0;
  for (size_t i = 0, at = 0; i < cells.size(); ++i, at = (at + stride) % cells.size()) {
    const std::set<std::string> mine = pairs(cells[at]);
    if (std::includes(covered.begin(), covered.end(), mine.begin(), mine.end())) continue;
    covered.insert(mine.begin(), mine.end());
    taken[at] = true;
    ++count;
  }
  for (size_t i = 0, at = 0; i < cells.size() && count < at_least; ++i, at = (at + stride) % cells.size()) {
    if (taken[at]) continue;
    taken[at] = true;
    ++count;
  }
  std::vector<Cell> sample;
  for (size_t i = 0; i < cells.size(); ++i) {
    if (taken[i]) sample.push_back(cells[i]);
  }
  return sample;
}

}  // namespace tensorfold
