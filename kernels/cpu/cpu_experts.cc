// Mixtures of experts: the router's choice, and the experts' products over rows grouped by expert.
#include <algorithm>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

class CpuExperts : public ExpertWeights {
 public:
  struct Expert {
    std::unique_ptr<CpuWeight> gate_up;            // [2 * columns, hidden]: gate over up; or [columns, hidden]: up
    std::vector<std::unique_ptr<CpuWeight>> down;  // one [hidden, slice columns] a slice
    int64_t columns = 0;
  };

  int64_t count() const override { return static_cast<int64_t>(all.size()); }
  int64_t slices() const override { return static_cast<int64_t>(all.front().down.size()); }
  int64_t hidden() const override { return all.front().gate_up->in_features(); }
  int64_t bytes(int64_t expert) const override {
    return sum_over(expert, [](const CpuWeight& w) { return w.bytes(); });
  }
  int64_t values(int64_t expert) const override {
    return sum_over(expert, [](const CpuWeight& w) { return w.out_features() * w.in_features(); });
  }

  std::vector<Expert> all;
  int64_t widest = 0;  // columns
  bool gated = true;

 private:
  template <typename Value>
  int64_t sum_over(int64_t expert, const Value& value) const {
    const Expert& e = all[static_cast<size_t>(expert)];
    int64_t sum = value(*e.gate_up);
    for (const std::unique_ptr<CpuWeight>& down : e.down) sum += value(*down);
    return sum;
  }
};

const CpuExperts& cpu_experts(const ExpertsArgs& args) { return static_cast<const CpuExperts&>(*args.experts); }

}  // namespace

std::unique_ptr<ExpertWeights> CpuOps::pack_experts(std::span<const ExpertSource> experts) {
  kernel_check(!experts.empty(), "pack_experts: no experts");
  auto packed = std::make_unique<CpuExperts>();
  packed->gated = experts.front().gate.rows > 0;
  for (const ExpertSource& source : experts) {
    CpuExperts::Expert& expert = packed->all.emplace_back();
    const MatrixSource gate_up[] = {source.gate, source.up};
    expert.gate_up =
        pack_weight(std::span(gate_up).subspan(packed->gated ? 0 : 1), &weights_, pool_.get(), &fp4_tables_);
    int64_t columns = 0;
    for (const MatrixSource& down : source.down) {
      expert.down.push_back(pack_weight({&down, 1}, &weights_, pool_.get(), &fp4_tables_));
      columns += down.cols;
      kernel_check(down.rows == source.up.cols, "pack_experts: up and down differ in the hidden size");
    }
    expert.columns = columns;
    kernel_check(source.gate.rows == (packed->gated ? columns : 0) && source.up.rows == columns &&
                     expert.down.size() == packed->all.front().down.size() &&
                     expert.gate_up->in_features() == packed->hidden(),
                 "pack_experts: shapes differ");
    packed->widest = std::max(packed->widest, columns);
  }
  return packed;
}

void CpuOps::route(const RouteArgs& args) {
  const int64_t experts = args.logits.cols, slots = args.ids.cols;
  const bool gated = args.shared_gate.data != nullptr, shared = gated || args.shared_always;
  const int64_t chosen = slots - (shared ? 1 : 0);
  kernel_check(chosen >= 1 && chosen <= experts && slots <= kMostExpertSlots && args.weights.cols == slots &&
                   args.ids.rows == args.logits.rows && args.weights.rows == args.logits.rows &&
                   (!gated || args.shared_gate.rows == args.logits.rows) &&
                   (args.bias == nullptr || args.bias->size() == experts),
               "route: shapes differ");
  const float* bias = args.bias == nullptr ? nullptr : static_cast<const CpuVector*>(args.bias)->data();
  const ScratchScope scope(*this);
  const Tensor scores = scratch(args.logits.rows, experts);
  pool_->parallel_for(
      args.logits.rows, std::max<int64_t>(1, kPieceElements / 8 / experts), [&](int64_t begin, int64_t end, int) {
        std::vector<Candidate> order(static_cast<size_t>(experts));
        for (int64_t r = begin; r < end; ++r) {
          const float* logits = args.logits.data + r * args.logits.stride;
          float* score = scores.data + r * scores.stride;
          if (args.score == RouterScore::kSoftmax) {
            kernels_->softmax(logits, experts, score);
          } else if (args.score == RouterScore::kSigmoid) {
            kernels_->sigmoid(logits, score, experts);
          } else {
            kernels_->sqrt_softplus(logits, score, experts);
          }
          float* ids = args.ids.data + r * args.ids.stride;
          float* weights = args.weights.data + r * args.weights.stride;
          for (int64_t e = 0; !args.given && e < experts; ++e) {
            order[static_cast<size_t>(e)] = {bias == nullptr ? logits[e] : score[e] + bias[e], static_cast<int32_t>(e)};
          }
          if (!args.given) {
            std::partial_sort(order.begin(), order.begin() + chosen, order.end(), candidate_before);
            for (int64_t j = 0; j < chosen; ++j) ids[j] = static_cast<float>(order[static_cast<size_t>(j)].id);
          }
          float sum = 0.0f;
          for (int64_t j = 0; j < chosen; ++j) {
            const auto expert = static_cast<int64_t>(ids[j]);
            kernel_check(expert >= 0 && expert < experts, "route: no such expert");
            weights[j] = score[expert];
            sum += score[expert];
          }
          for (int64_t j = 0; j < chosen; ++j) {
            if (args.renormalise) weights[j] /= sum + 1e-20f;
            weights[j] *= args.scale;
          }
          if (!shared) continue;
          ids[chosen] = static_cast<float>(experts);
          weights[chosen] = 1.0f;
          if (gated) kernels_->sigmoid(args.shared_gate.data + r * args.shared_gate.stride, weights + chosen, 1);
        }
      });
}

// Every (row, slot) has a place; the places of one expert lie together, its rows ascending.
struct CpuOps::ExpertGroups {
  struct Group {
    int64_t expert = 0;
    int64_t first = 0;  // place
    int64_t places = 0;
  };
  std::vector<Group> groups;      // of experts that have rows, ascending
  std::vector<int32_t> row_of;    // [place]
  std::vector<int32_t> group_of;  // [place]
  std::vector<int32_t> place_of;  // [row * slots + slot]

  ExpertGroups(Tensor ids, int64_t experts) {
    const int64_t slots = ids.cols, places = ids.rows * slots;
    std::vector<int32_t> next(static_cast<size_t>(experts), 0);
    const auto expert_at = [&](int64_t r, int64_t j) { return static_cast<int64_t>(ids.data[r * ids.stride + j]); };
    for (int64_t r = 0; r < ids.rows; ++r) {
      for (int64_t j = 0; j < slots; ++j) {
        const int64_t expert = expert_at(r, j);
        kernel_check(expert >= 0 && expert < experts, "experts: no such expert");
        ++next[static_cast<size_t>(expert)];
      }
    }
    group_of.resize(static_cast<size_t>(places));
    int32_t first = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int32_t count = next[static_cast<size_t>(e)];
      next[static_cast<size_t>(e)] = first;
      if (count == 0) continue;
      std::fill_n(group_of.begin() + first, count, static_cast<int32_t>(groups.size()));
      groups.push_back({e, first, count});
      first += count;
    }
    row_of.resize(static_cast<size_t>(places));
    place_of.resize(static_cast<size_t>(places));
    for (int64_t r = 0; r < ids.rows; ++r) {
      for (int64_t j = 0; j < slots; ++j) {
        const int32_t place = next[static_cast<size_t>(expert_at(r, j))]++;
        row_of[static_cast<size_t>(place)] = static_cast<int32_t>(r);
        place_of[static_cast<size_t>(r * slots + j)] = place;
      }
    }
  }

  // The group's rows follow one another in the pass: no copy is needed. A choice that is given may name an expert twice
  // for one row, so the ends alone do not tell.
  bool consecutive(const Group& group) const {
    const int32_t from = row_of[static_cast<size_t>(group.first)];
    for (int32_t i = 1; i < group.places; ++i) {
      if (row_of[static_cast<size_t>(group.first + i)] - from != i) return false;
    }
    return true;
  }
};

// inner[place] = silu(gate x) * (up x), or relu(up x)^2.
void CpuOps::expert_inner(const ExpertsArgs& args, const ExpertGroups& groups, Tensor inner) {
  const CpuExperts& set = cpu_experts(args);
  const ScratchScope scope(*this);
  const Tensor gathered = scratch(inner.rows, args.x.cols),
               gate_up = scratch(inner.rows, (set.gated ? 2 : 1) * set.widest);
  std::vector<MatmulJob> jobs;
  for (const ExpertGroups::Group& group : groups.groups) {
    const CpuExperts::Expert& expert = set.all[static_cast<size_t>(group.expert)];
    Tensor x = gathered.row_range(group.first, group.places);
    if (groups.consecutive(group)) {
      x = args.x.row_range(groups.row_of[static_cast<size_t>(group.first)], group.places);
    } else {
      gather_rows(args.x,
                  std::span(groups.row_of).subspan(static_cast<size_t>(group.first), static_cast<size_t>(group.places)),
                  x);
    }
    jobs.push_back({expert.gate_up.get(), x,
                    gate_up.row_range(group.first, group.places).columns(0, expert.gate_up->out_features())});
  }
  matmul_many(jobs);
  pool_->parallel_for(
      inner.rows, std::max<int64_t>(1, kPieceElements / 4 / set.widest), [&](int64_t begin, int64_t end, int) {
        for (int64_t place = begin; place < end; ++place) {
          const auto& group = groups.groups[static_cast<size_t>(groups.group_of[static_cast<size_t>(place)])];
          const int64_t columns = set.all[static_cast<size_t>(group.expert)].columns;
          const float* gate = gate_up.data + place * gate_up.stride;
          float* out = inner.data + place * inner.stride;
          if (!set.gated) {
            kernels_->relu_squared(gate, out, columns);
          } else if (args.limit > 0.0f) {
            kernels_->silu_mul_limited(gate, gate + columns, args.limit, out, columns);
          } else {
            kernels_->silu_mul(gate, gate + columns, out, columns);
          }
        }
      });
}

// partial[s][row] = weighted sum over its slots of down_s inner[place]. As many slices at once as keep the products'
// memory small: a prompt of many rows takes them one after another.
void CpuOps::expert_outer(const ExpertsArgs& args, const ExpertGroups& groups, Tensor inner) {
  constexpr int64_t kProductFloats = int64_t{8} << 20;
  const CpuExperts& set = cpu_experts(args);
  const int64_t slices = set.slices(), hidden = args.x.cols, rows = args.x.rows, slots = args.ids.cols;
  const int64_t most = std::clamp<int64_t>(kProductFloats / std::max<int64_t>(1, inner.rows * hidden), 1, slices);
  std::vector<int64_t> column(set.all.size(), 0);  // of each expert's inner values: where the slice begins
  for (int64_t first = 0; first < slices; first += most) {
    const int64_t count = std::min(most, slices - first);
    const ScratchScope scope(*this);
    const Tensor y = scratch(count * inner.rows, hidden);
    std::vector<MatmulJob> jobs;
    for (int64_t s = 0; s < count; ++s) {
      for (const ExpertGroups::Group& group : groups.groups) {
        const CpuWeight& down = *set.all[static_cast<size_t>(group.expert)].down[static_cast<size_t>(first + s)];
        int64_t& at = column[static_cast<size_t>(group.expert)];
        jobs.push_back({&down, inner.row_range(group.first, group.places).columns(at, down.in_features()),
                        y.row_range(s * inner.rows + group.first, group.places)});
        at += down.in_features();
      }
    }
    matmul_many(jobs);
    for_pieces(count * rows, hidden, [&](int64_t item, int64_t c, int64_t n) {
      const int64_t s = item / rows, r = item % rows;
      const float* parts[kMostExpertSlots];
      for (int64_t j = 0; j < slots; ++j) {
        const int64_t place = groups.place_of[static_cast<size_t>(r * slots + j)];
        parts[j] = y.data + (s * inner.rows + place) * y.stride + c;
      }
      const Tensor& out = args.partial[static_cast<size_t>(first + s)];
      kernels_->weighted_sum(parts, args.weights.data + r * args.weights.stride, slots, n,
                             out.data + r * out.stride + c);
    });
  }
}

void CpuOps::experts(const ExpertsArgs& args) {
  const CpuExperts& set = cpu_experts(args);
  kernel_check(args.x.cols == set.hidden() && args.ids.rows == args.x.rows && args.weights.rows == args.x.rows &&
                   args.ids.cols == args.weights.cols && args.ids.cols >= 1 && args.ids.cols <= kMostExpertSlots &&
                   static_cast<int64_t>(args.partial.size()) == set.slices(),
               "experts: shapes differ");
  for (const Tensor& out : args.partial) {
    kernel_check(out.rows == args.x.rows && out.cols == args.x.cols, "experts: shapes differ");
  }
  const ScratchScope scope(*this);
  const ExpertGroups groups(args.ids, set.count());
  const Tensor inner = scratch(args.ids.rows * args.ids.cols, set.widest);
  expert_inner(args, groups, inner);
  expert_outer(args, groups, inner);
}

}  // namespace tensorfold
