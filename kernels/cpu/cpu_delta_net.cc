// The gated delta net: replay of accepted rows, certain rows, tentative rows on a copy. The step itself is the kernels'
// (impl_delta_net.h).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

int64_t state_floats(const DeltaNetShape& s) {
  const int64_t heads = s.v_heads * s.dk * round_up(s.dv, 16);
  return heads + (s.conv_kernel - 1) * s.channels() + s.max_window * (s.channels() + s.v_heads + s.decays());
}

}  // namespace

CpuRecurrentState::CpuRecurrentState(const DeltaNetShape& shape)
    : CpuStateMemory(state_floats(shape), shape.max_window),
      dk_(shape.dk),
      dv_(shape.dv),
      v_heads_(shape.v_heads),
      channels_(shape.channels()),
      decays_(shape.decays()),
      taps_(shape.conv_kernel) {
  kernel_check(dk_ % 8 == 0 && dv_ % 8 == 0 && taps_ >= 1, "delta net: head dims must be multiples of 8");
  history_ = floats() + v_heads_ * head_floats();
  kept_ = history_ + (taps_ - 1) * channels_;
}

// One pass's rows, group after group: first the group's replayed rows, then its own.
struct CpuOps::DeltaRun {
  struct Row {
    const float* qkv = nullptr;  // before the convolution
    const float* b = nullptr;
    const float* a = nullptr;
    int64_t group = 0;
    int64_t out_row = -1;  // row of the pass, or -1 for a replayed one
  };
  struct Group {
    CpuRecurrentState* state = nullptr;
    int64_t first = 0;  // index into rows
    int64_t count = 0;
    int64_t commit = 0;  // leading rows that advance the committed state
  };
  std::vector<Row> rows;
  std::vector<Group> groups;
  float* mixed = nullptr;  // [rows, channels]: after convolution, silu and normalisation of q and k
  float* beta = nullptr;   // [rows, v_heads]
  float* decay = nullptr;  // [rows, decays]
  float* y = nullptr;      // [threads, dv]
  float* copy = nullptr;   // [threads, dk * value_stride]
};

CpuOps::DeltaRun CpuOps::start_delta_run(const DeltaNetArgs& args) {
  const DeltaNetShape& shape = *args.shape;
  DeltaRun run;
  const std::vector<RecurrentState*>& states = args.rows.recurrent[static_cast<size_t>(args.layer)];
  for (size_t i = 0; i < args.rows.groups.size(); ++i) {
    const RowGroup& g = args.rows.groups[i];
    auto* state = static_cast<CpuRecurrentState*>(states[i]);
    kernel_check(state->channels_ == shape.channels() && state->dk_ == shape.dk && state->dv_ == shape.dv &&
                     state->v_heads_ == shape.v_heads && state->decays_ == shape.decays() &&
                     state->taps_ == shape.conv_kernel,
                 "delta net: state of another shape");
    kernel_check(g.first_row >= 0 && g.first_row + g.rows <= args.qkv.rows, "row group outside the pass");
    kernel_check(g.accepted >= 0 && g.accepted <= state->kept,
                 "delta net: more rows accepted than the last window had");
    kernel_check(g.certain >= 0 && g.certain <= g.rows && g.rows - g.certain <= state->max_window(),
                 "delta net: window wider than max_window");
    run.groups.push_back({state, static_cast<int64_t>(run.rows.size()), g.accepted + g.rows, g.accepted + g.certain});
    const int64_t group = static_cast<int64_t>(i);
    for (int64_t r = 0; r < g.accepted; ++r) {
      run.rows.push_back({state->kept_qkv(r), state->kept_b(r), state->kept_a(r), group, -1});
    }
    for (int64_t r = g.first_row; r < g.first_row + g.rows; ++r) {
      run.rows.push_back({args.qkv.data + r * args.qkv.stride, args.b.data + r * args.b.stride,
                          args.a.data + r * args.a.stride, group, r});
    }
  }
  const int64_t rows = static_cast<int64_t>(run.rows.size()), threads = pool_->threads();
  run.mixed = pass_.take(rows * shape.channels());
  run.beta = pass_.take(rows * shape.v_heads);
  run.decay = pass_.take(rows * shape.decays());
  run.y = pass_.take(threads * round_up(shape.dv, 16));
  run.copy = pass_.take(threads * shape.dk * round_up(shape.dv, 16));
  return run;
}

// Convolution, gates and normalised q, k of every row: no row needs another's result here.
void CpuOps::delta_inputs(const DeltaNetArgs& args, const DeltaRun& run) {
  const DeltaNetShape& shape = *args.shape;
  const int64_t taps = shape.conv_kernel, channels = shape.channels();
  const float* weight = static_cast<const CpuVector*>(args.conv)->transposed(taps);
  const float* a_log = static_cast<const CpuVector*>(args.a_log)->data();
  const float* dt_bias = static_cast<const CpuVector*>(args.dt_bias)->data();
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(shape.dk));
  const int64_t units = 2 * shape.k_heads + shape.v_heads;  // heads of q, k, v; plus one unit for the gates
  const int64_t rows = static_cast<int64_t>(run.rows.size());
  pool_->parallel_for(rows * (units + 1), 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t r = item / (units + 1), unit = item % (units + 1);
      const DeltaRun::Row& row = run.rows[static_cast<size_t>(r)];
      if (unit == units && shape.channel_decay) {
        kernels_->sigmoid(row.b, run.beta + r * shape.v_heads, shape.v_heads);
        for (int64_t h = 0; h < shape.v_heads; ++h) {
          kernels_->channel_decay(row.a + h * shape.dk, dt_bias + h * shape.dk, a_log[h], args.decay_floor, shape.dk,
                                  run.decay + r * shape.decays() + h * shape.dk);
        }
        continue;
      }
      if (unit == units) {
        kernels_->delta_gates(row.b, row.a, a_log, dt_bias, shape.v_heads, run.beta + r * shape.v_heads,
                              run.decay + r * shape.v_heads);
        continue;
      }
      const bool key_side = unit < 2 * shape.k_heads;
      const int64_t first =
          key_side ? unit * shape.dk : 2 * shape.k_heads * shape.dk + (unit - 2 * shape.k_heads) * shape.dv;
      const int64_t n = key_side ? shape.dk : shape.dv;
      const DeltaRun::Group& group = run.groups[static_cast<size_t>(row.group)];
      const float* window[16];
      for (int64_t t = 0; t < taps; ++t) {
        const int64_t at = r - group.first - (taps - 1) + t;  // row in the group; before it comes the history
        window[t] =
            (at >= 0 ? run.rows[static_cast<size_t>(group.first + at)].qkv : group.state->history(at + taps - 1)) +
            first;
      }
      float* out = run.mixed + r * channels + first;
      kernels_->conv_silu(window, weight + first, channels, taps, n, out);
      if (key_side) kernels_->l2_norm(out, n, unit < shape.k_heads ? q_scale : 1.0f);
    }
  });
}

// Each value head of each group, one step a row in order.
void CpuOps::delta_heads(const DeltaNetArgs& args, const DeltaRun& run) {
  const DeltaNetShape& shape = *args.shape;
  const int64_t channels = shape.channels(), stride = round_up(shape.dv, 16), head_floats = shape.dk * stride;
  const float* norm = static_cast<const CpuVector*>(args.norm)->data();
  const int64_t decays = shape.decays(), decay_step = shape.channel_decay ? 1 : 0;
  const bool sigmoid = shape.channel_decay || args.sigmoid_gate;
  const auto output = sigmoid ? kernels_->delta_output_sigmoid : kernels_->delta_output;
  const int64_t items = static_cast<int64_t>(run.groups.size()) * shape.v_heads;
  pool_->parallel_for(items, 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t item = begin; item < end; ++item) {
      const DeltaRun::Group& group = run.groups[static_cast<size_t>(item / shape.v_heads)];
      const int64_t h = item % shape.v_heads, k_head = shape.k_head_of[static_cast<size_t>(h)];
      float* s = group.state->head(h);
      float* y = run.y + worker * stride;
      for (int64_t i = 0; i < group.count; ++i) {
        if (i == group.commit) {  // from here on rows may be rejected
          float* copy = run.copy + worker * head_floats;
          std::memcpy(copy, s, static_cast<size_t>(head_floats) * 4);
          s = copy;
        }
        const int64_t r = group.first + i;
        const float* mixed = run.mixed + r * channels;
        const float* v = mixed + 2 * shape.k_heads * shape.dk + h * shape.dv;
        kernels_->delta_step(
            s, shape.dk, shape.dv, stride, mixed + k_head * shape.dk, mixed + (shape.k_heads + k_head) * shape.dk, v,
            run.decay + r * decays + h * (decays / shape.v_heads), decay_step, run.beta[r * shape.v_heads + h], y);
        const int64_t out_row = run.rows[static_cast<size_t>(r)].out_row;
        if (out_row < 0) continue;
        output(y, args.z.data + out_row * args.z.stride + h * shape.dv, norm, shape.dv, args.eps,
               args.out.data + out_row * args.out.stride + h * shape.dv);
      }
    }
  });
}

void CpuOps::delta_net(const DeltaNetArgs& args) {
  const DeltaNetShape& shape = *args.shape;
  kernel_check(args.qkv.cols == shape.channels() && args.z.cols == shape.v_heads * shape.dv &&
                   args.out.cols == args.z.cols && args.b.cols == shape.v_heads && args.a.cols == shape.decays() &&
                   args.dt_bias->size() == shape.decays() && args.a_log->size() == shape.v_heads &&
                   static_cast<int64_t>(shape.k_head_of.size()) == shape.v_heads && shape.conv_kernel <= 16 &&
                   args.conv->size() == shape.channels() * shape.conv_kernel && args.norm->size() == shape.dv &&
                   args.layer >= 0 && args.layer < static_cast<int64_t>(args.rows.recurrent.size()) &&
                   args.rows.groups.size() == args.rows.recurrent[static_cast<size_t>(args.layer)].size(),
               "delta net: shapes differ");
  const DeltaRun run = start_delta_run(args);
  delta_inputs(args, run);
  delta_heads(args, run);

  // The convolution's committed history, then this window's tentative inputs. Both may come from the kept rows of the
  // last window, which are overwritten last.
  const int64_t channels = shape.channels(), history = shape.conv_kernel - 1;
  const size_t row_bytes = static_cast<size_t>(channels) * sizeof(float);
  for (const DeltaRun::Group& group : run.groups) {
    CpuRecurrentState& state = *group.state;
    for (int64_t t = 0; t < history; ++t) {
      const int64_t at = group.commit - history + t;
      const float* from =
          at >= 0 ? run.rows[static_cast<size_t>(group.first + at)].qkv : state.history(t + group.commit);
      std::memmove(state.history(t), from, row_bytes);
    }
    state.kept = group.count - group.commit;
    for (int64_t r = 0; r < state.kept; ++r) {
      const DeltaRun::Row& row = run.rows[static_cast<size_t>(group.first + group.commit + r)];
      std::memcpy(state.kept_qkv(r), row.qkv, row_bytes);
      std::memcpy(state.kept_b(r), row.b, static_cast<size_t>(shape.v_heads) * 4);
      std::memcpy(state.kept_a(r), row.a, static_cast<size_t>(shape.decays()) * 4);
    }
  }
}

}  // namespace tensorfold
