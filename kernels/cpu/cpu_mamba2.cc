// Mamba2: replay of accepted rows, certain rows, tentative rows on a copy. The step itself is the kernels'
// (impl_mamba2.h).
#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"

namespace tensorfold {

// One pass's rows, group after group: first the group's replayed rows, then its own.
struct CpuOps::Mamba2Run {
  struct Row {
    const float* xbc = nullptr;  // before the convolution
    const float* dt = nullptr;
    int64_t group = 0;
    int64_t out_row = -1;  // row of the pass, or -1 for a replayed one
  };
  struct Group {
    CpuMamba2State* state = nullptr;
    int64_t first = 0;  // index into rows
    int64_t count = 0;
    int64_t commit = 0;  // leading rows that advance the committed state
  };
  std::vector<Row> rows;
  std::vector<Group> groups;
  float* mixed = nullptr;  // [rows, channels]: after convolution and silu
  float* step = nullptr;   // [rows, heads]
  float* decay = nullptr;  // [rows, heads]
  float* y = nullptr;      // [rows, width]
  float* copy = nullptr;   // [threads, state * stride]
};

CpuOps::Mamba2Run CpuOps::start_mamba2_run(const Mamba2Args& args) {
  const Mamba2Shape& shape = *args.shape;
  Mamba2Run run;
  const std::vector<RecurrentState*>& states = args.rows.recurrent[static_cast<size_t>(args.layer)];
  for (size_t i = 0; i < args.rows.groups.size(); ++i) {
    const RowGroup& g = args.rows.groups[i];
    auto* state = static_cast<CpuMamba2State*>(states[i]);
    kernel_check(state->shape().channels() == shape.channels() && state->shape().heads == shape.heads &&
                     state->shape().state == shape.state && state->shape().conv_kernel == shape.conv_kernel,
                 "mamba2: state of another shape");
    kernel_check(g.first_row >= 0 && g.first_row + g.rows <= args.xbc.rows, "row group outside the pass");
    kernel_check(g.accepted >= 0 && g.accepted <= state->kept, "mamba2: more rows accepted than the last window had");
    kernel_check(g.certain >= 0 && g.certain <= g.rows && g.rows - g.certain <= state->max_window(),
                 "mamba2: window wider than max_window");
    run.groups.push_back({state, static_cast<int64_t>(run.rows.size()), g.accepted + g.rows, g.accepted + g.certain});
    const int64_t group = static_cast<int64_t>(i);
    for (int64_t r = 0; r < g.accepted; ++r) run.rows.push_back({state->kept_xbc(r), state->kept_dt(r), group, -1});
    for (int64_t r = g.first_row; r < g.first_row + g.rows; ++r) {
      run.rows.push_back({args.xbc.data + r * args.xbc.stride, args.dt.data + r * args.dt.stride, group, r});
    }
  }
  const int64_t rows = static_cast<int64_t>(run.rows.size());
  run.mixed = pass_.take(rows * shape.channels());
  run.step = pass_.take(rows * shape.heads);
  run.decay = pass_.take(rows * shape.heads);
  run.y = pass_.take(rows * shape.width());
  run.copy = pass_.take(pool_->threads() * shape.state * round_up(shape.head_dim, 16));
  return run;
}

// Convolution and time steps of every row: no row needs another's result here.
void CpuOps::mamba2_inputs(const Mamba2Args& args, const Mamba2Run& run) {
  const Mamba2Shape& shape = *args.shape;
  const int64_t taps = shape.conv_kernel, channels = shape.channels();
  const float* weight = static_cast<const CpuVector*>(args.conv)->transposed(taps);
  const float* bias = args.conv_bias == nullptr ? nullptr : static_cast<const CpuVector*>(args.conv_bias)->data();
  const float* a_log = static_cast<const CpuVector*>(args.a_log)->data();
  const float* dt_bias = static_cast<const CpuVector*>(args.dt_bias)->data();
  const int64_t rows = static_cast<int64_t>(run.rows.size());
  const int64_t grain = std::max<int64_t>(1, kPieceElements / 4 / channels);
  pool_->parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Mamba2Run::Row& row = run.rows[static_cast<size_t>(r)];
      const Mamba2Run::Group& group = run.groups[static_cast<size_t>(row.group)];
      const float* window[16];
      for (int64_t t = 0; t < taps; ++t) {
        const int64_t at = r - group.first - (taps - 1) + t;  // row in the group; before it comes the history
        window[t] = at >= 0 ? run.rows[static_cast<size_t>(group.first + at)].xbc : group.state->history(at + taps - 1);
      }
      kernels_->mamba2_conv(window, weight, channels, taps, bias, channels, run.mixed + r * channels);
      kernels_->mamba2_steps(row.dt, dt_bias, a_log, args.least_step, args.most_step, shape.heads,
                             run.step + r * shape.heads, run.decay + r * shape.heads);
    }
  });
}

// Each head of each group of rows, one step a row in order.
void CpuOps::mamba2_heads(const Mamba2Args& args, const Mamba2Run& run) {
  const Mamba2Shape& shape = *args.shape;
  const int64_t channels = shape.channels(), stride = round_up(shape.head_dim, 16);
  const int64_t head_floats = shape.state * stride, together = shape.heads / shape.groups;
  const float* d = static_cast<const CpuVector*>(args.d)->data();
  const int64_t items = static_cast<int64_t>(run.groups.size()) * shape.heads;
  pool_->parallel_for(items, 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t item = begin; item < end; ++item) {
      const Mamba2Run::Group& group = run.groups[static_cast<size_t>(item / shape.heads)];
      const int64_t h = item % shape.heads;
      float* s = group.state->head(h);
      for (int64_t i = 0; i < group.count; ++i) {
        if (i == group.commit) {  // from here on rows may be rejected
          float* copy = run.copy + worker * head_floats;
          std::memcpy(copy, s, static_cast<size_t>(head_floats) * sizeof(float));
          s = copy;
        }
        const int64_t r = group.first + i;
        const float* mixed = run.mixed + r * channels;
        const float* b = mixed + shape.width() + h / together * shape.state;
        kernels_->mamba2_step(s, shape.state, shape.head_dim, stride, mixed + h * shape.head_dim, b,
                              b + shape.groups * shape.state, run.step[r * shape.heads + h],
                              run.decay[r * shape.heads + h], d[h], run.y + r * shape.width() + h * shape.head_dim);
      }
    }
  });
  const float* norm = static_cast<const CpuVector*>(args.norm)->data();
  const int64_t wide = together * shape.head_dim;
  const int64_t rows = static_cast<int64_t>(run.rows.size());
  pool_->parallel_for(
      rows, std::max<int64_t>(1, kPieceElements / 4 / shape.width()), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) {
          const int64_t row = run.rows[static_cast<size_t>(r)].out_row;
          for (int64_t at = 0; row >= 0 && at < shape.width(); at += wide) {
            kernels_->mamba2_output(run.y + r * shape.width() + at, args.z.data + row * args.z.stride + at, norm + at,
                                    wide, args.eps, args.out.data + row * args.out.stride + at);
          }
        }
      });
}

void CpuOps::mamba2(const Mamba2Args& args) {
  const Mamba2Shape& shape = *args.shape;
  kernel_check(args.xbc.cols == shape.channels() && args.z.cols == shape.width() && args.out.cols == shape.width() &&
                   args.dt.cols == shape.heads && shape.groups > 0 && shape.heads % shape.groups == 0 &&
                   shape.conv_kernel <= 16 && args.conv->size() == shape.channels() * shape.conv_kernel &&
                   (args.conv_bias == nullptr || args.conv_bias->size() == shape.channels()) &&
                   args.a_log->size() == shape.heads && args.dt_bias->size() == shape.heads &&
                   args.d->size() == shape.heads && args.norm->size() == shape.width() && args.layer >= 0 &&
                   args.layer < static_cast<int64_t>(args.rows.recurrent.size()) &&
                   args.rows.groups.size() == args.rows.recurrent[static_cast<size_t>(args.layer)].size(),
               "mamba2: shapes differ");
  const ScratchScope scope(*this);
  const Mamba2Run run = start_mamba2_run(args);
  mamba2_inputs(args, run);
  mamba2_heads(args, run);

  // The convolution's committed history, then this window's tentative inputs. Both may come from the kept rows of the
  // last window, which are overwritten last.
  const int64_t history = shape.conv_kernel - 1;
  const size_t row_bytes = static_cast<size_t>(shape.channels()) * sizeof(float);
  for (const Mamba2Run::Group& group : run.groups) {
    CpuMamba2State& state = *group.state;
    for (int64_t t = 0; t < history; ++t) {
      const int64_t at = group.commit - history + t;
      const float* from =
          at >= 0 ? run.rows[static_cast<size_t>(group.first + at)].xbc : state.history(t + group.commit);
      std::memmove(state.history(t), from, row_bytes);
    }
    state.kept = group.count - group.commit;
    for (int64_t r = 0; r < state.kept; ++r) {
      const Mamba2Run::Row& row = run.rows[static_cast<size_t>(group.first + group.commit + r)];
      std::memmove(state.kept_xbc(r), row.xbc, row_bytes);
      std::memmove(state.kept_dt(r), row.dt, static_cast<size_t>(shape.heads) * sizeof(float));
    }
  }
}

}  // namespace tensorfold
