// Residuals of several gated streams, and the dilated convolution with its state. Which work goes together is decided
// here; the arithmetic is the kernels' (impl_streams.h), but for single numbers.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"
#include "kernels/numerics/ngram_hash.h"
#include "kernels/ops/stream_ops.h"

namespace tensorfold {

void CpuOps::scaled_silu(Tensor x, float scale) {
  for_pieces(x.rows, x.cols,
             [&](int64_t r, int64_t c, int64_t n) { kernels_->scaled_silu(x.data + r * x.stride + c, scale, n); });
}

void CpuOps::clear(Tensor x) {
  for_pieces(x.rows, x.cols, [&](int64_t r, int64_t c, int64_t n) { std::fill_n(x.data + r * x.stride + c, n, 0.0f); });
}

void CpuOps::mix_streams(const MixStreamsArgs& args) {
  const int64_t width = args.out.cols;
  kernel_check(args.count >= 1 && args.count <= kMostGatedStreams && args.x.cols == args.count * width &&
                   args.gate.cols == args.x.cols && args.gate.rows == args.x.rows && args.out.rows == args.x.rows,
               "mix_streams: shapes differ");
  const float share = 1.0f / static_cast<float>(args.count);
  for_pieces(args.x.rows, width, [&](int64_t r, int64_t c, int64_t n) {
    kernels_->mix_streams(args.x.data + r * args.x.stride + c, args.gate.data + r * args.gate.stride + c, args.count,
                          width, share, n, args.out.data + r * args.out.stride + c);
  });
}

void CpuOps::inject_streams(const InjectStreamsArgs& args) {
  const int64_t width = args.y.cols, count = args.count;
  kernel_check(count >= 1 && count <= kMostGatedStreams && args.x.cols == count * width && args.inject.cols == count &&
                   args.inject.rows == args.x.rows && args.y.rows == args.x.rows,
               "inject_streams: shapes differ");
  const float share = 1.0f / static_cast<float>(count);
  const int64_t grain = std::max<int64_t>(1, kPieceElements / args.x.cols);
  pool_->parallel_for(args.x.rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float weight[kMostGatedStreams];
      const float* inject = args.inject.data + r * args.inject.stride;
      for (int64_t s = 0; s < count; ++s) weight[s] = inject[s] * share;
      kernels_->sigmoid(weight, weight, count);
      for (int64_t s = 0; s < count; ++s) {
        kernels_->add_scaled(args.x.data + r * args.x.stride + s * width, args.y.data + r * args.y.stride,
                             2.0f * weight[s], width);
      }
    }
  });
}

void CpuOps::gate_streams(const GateStreamsArgs& args) {
  const int64_t width = args.value.cols, count = args.count;
  kernel_check(count >= 1 && count <= kMostGatedStreams && args.key.cols == count * width &&
                   args.query.cols == args.key.cols && args.out.cols == args.key.cols &&
                   args.query.rows == args.key.rows && args.value.rows == args.key.rows &&
                   args.out.rows == args.key.rows,
               "gate_streams: shapes differ");
  const float root = std::sqrt(static_cast<float>(width));  // correctly rounded by IEEE 754, as all square roots here
  const int64_t grain = std::max<int64_t>(1, kPieceElements / args.key.cols);
  pool_->parallel_for(args.key.rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* key = args.key.data + r * args.key.stride;
      const float* query = args.query.data + r * args.query.stride;
      const float* value = args.value.data + r * args.value.stride;
      for (int64_t s = 0; s < count; ++s) {
        const float score = kernels_->dot(key + s * width, query + s * width, width) / root;
        const float magnitude = score < 0.0f ? -score : score;
        const float bent = std::sqrt(magnitude < 1e-6f ? 1e-6f : magnitude);
        float gate = score < 0.0f ? -bent : (score > 0.0f ? bent : score * bent);  // 0 stays 0, NaN stays NaN
        kernels_->sigmoid(&gate, &gate, 1);
        kernels_->weighted_sum(&value, &gate, 1, width, args.out.data + r * args.out.stride + s * width);
      }
    }
  });
}

namespace {

CpuShortConvState& state_of(const RowBatch& rows, int64_t layer, size_t group) {
  kernel_check(layer >= 0 && layer < static_cast<int64_t>(rows.recurrent.size()) &&
                   group < rows.recurrent[static_cast<size_t>(layer)].size(),
               "short convolution: no such state");
  return static_cast<CpuShortConvState&>(*rows.recurrent[static_cast<size_t>(layer)][group]);
}

// For each row the `count` tokens before it, newest first, -1 before the sequence's start.
std::vector<int32_t> tokens_before(const RowBatch& rows, int64_t layer, int64_t count) {
  std::vector<int32_t> out(static_cast<size_t>(rows.rows() * count), -1);
  for (size_t i = 0; i < rows.groups.size(); ++i) {
    const RowGroup& g = rows.groups[i];
    CpuShortConvState& state = state_of(rows, layer, i);
    kernel_check(count <= state.shape().context && g.accepted <= state.kept && g.first_row >= 0 &&
                     g.first_row + g.rows <= rows.rows(),
                 "embed_ngrams: more tokens than the state keeps");
    // The sequence's last tokens before the group, oldest first, then the group's own.
    std::vector<int32_t> line;
    for (int64_t t = 0; t < state.shape().context; ++t) line.push_back(static_cast<int32_t>(state.tokens()[t]) - 1);
    for (int64_t r = 0; r < g.accepted; ++r) line.push_back(static_cast<int32_t>(*state.kept_token(r)) - 1);
    const int64_t before = static_cast<int64_t>(line.size());
    for (int64_t r = 0; r < g.rows; ++r) {
      for (int64_t back = 1; back <= count; ++back) {
        out[static_cast<size_t>((g.first_row + r) * count + back - 1)] = line[static_cast<size_t>(before + r - back)];
      }
      line.push_back(rows.tokens[static_cast<size_t>(g.first_row + r)]);
    }
  }
  return out;
}

}  // namespace

void CpuOps::embed_ngrams(const EmbedNgramsArgs& args) {
  const NgramHeads& heads = *args.heads;
  const int64_t rows = args.rows.rows(), context = static_cast<int64_t>(heads.multipliers.size()) - 1;
  const int64_t count = static_cast<int64_t>(args.tables.size()), cols = count == 0 ? 0 : args.out.cols / count;
  kernel_check(context >= 1 && args.first_head >= 0 && count >= 1 && args.out.rows == rows &&
                   args.out.cols == count * cols &&
                   args.first_head + count <= static_cast<int64_t>(heads.table_rows.size()) &&
                   heads.backs(args.first_head + count - 1) <= context,
               "embed_ngrams: shapes differ");
  const std::vector<int32_t> before = tokens_before(args.rows, args.layer, context);
  std::vector<int32_t> ids(static_cast<size_t>(rows));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t head = args.first_head + i;
    for (int64_t r = 0; r < rows; ++r) {
      ids[static_cast<size_t>(r)] =
          ngram_row(args.rows.tokens[static_cast<size_t>(r)], static_cast<int>(heads.backs(head)),
                    heads.multipliers.data(), heads.end_token, heads.table_rows[static_cast<size_t>(head)],
                    [&](int back) { return before[static_cast<size_t>(r * context + back - 1)]; });
    }
    RowBatch batch;
    batch.tokens = ids;
    embed(*args.tables[static_cast<size_t>(i)], batch, args.out.columns(i * cols, cols));
  }
}

void CpuOps::short_conv(const ShortConvArgs& args) {
  const ShortConvShape& shape = *args.shape;
  const int64_t channels = shape.channels, history = shape.history();
  kernel_check(args.x.cols == channels && args.out.cols == channels && args.out.rows == args.x.rows &&
                   args.conv->size() == channels * shape.taps && args.rows.rows() == args.x.rows,
               "short_conv: shapes differ");
  const float* weight = static_cast<const CpuVector*>(args.conv)->transposed(shape.taps);
  for (size_t i = 0; i < args.rows.groups.size(); ++i) {
    const RowGroup& g = args.rows.groups[i];
    CpuShortConvState& state = state_of(args.rows, args.layer, i);
    kernel_check(state.shape().channels == channels && state.shape().history() == history &&
                     state.shape().taps == shape.taps && state.shape().context == shape.context,
                 "short_conv: state of another shape");
    kernel_check(g.first_row >= 0 && g.first_row + g.rows <= args.x.rows && g.accepted >= 0 &&
                     g.accepted <= state.kept && g.certain >= 0 && g.certain <= g.rows &&
                     g.rows - g.certain <= state.max_window(),
                 "short_conv: rows that the state cannot take");
    // Row `at` of history, accepted rows and own rows, the first of the accepted being 0.
    const auto row = [&](int64_t at) -> const float* {
      if (at < 0) return state.history(at + history);
      return at < g.accepted ? state.kept_row(at) : args.x.data + (g.first_row + at - g.accepted) * args.x.stride;
    };
    pool_->parallel_for(g.rows, std::max<int64_t>(1, kPieceElements / 4 / channels),
                        [&](int64_t begin, int64_t end, int) {
                          for (int64_t r = begin; r < end; ++r) {
                            const float* window[16];
                            for (int64_t t = 0; t < shape.taps; ++t)
                              window[t] = row(g.accepted + r - (shape.taps - 1 - t) * shape.dilation);
                            kernels_->conv_silu(window, weight, channels, shape.taps, channels,
                                                args.out.data + (g.first_row + r) * args.out.stride);
                          }
                        });

    // What is committed moves the history on; then the tentative rows are kept in place of the last window's.
    const int64_t commit = g.accepted + g.certain;
    const size_t row_bytes = static_cast<size_t>(channels) * sizeof(float);
    for (int64_t t = 0; t < history; ++t) std::memmove(state.history(t), row(commit - history + t), row_bytes);
    const auto token = [&](int64_t at) {
      if (at < 0) return state.tokens()[at + shape.context];
      if (at < g.accepted) return *state.kept_token(at);
      return static_cast<float>(args.rows.tokens[static_cast<size_t>(g.first_row + at - g.accepted)] + 1);
    };
    for (int64_t t = 0; t < shape.context; ++t) state.tokens()[t] = token(commit - shape.context + t);
    for (int64_t r = g.certain; r < g.rows; ++r) {
      std::memcpy(state.kept_row(r - g.certain), args.x.data + (g.first_row + r) * args.x.stride, row_bytes);
      *state.kept_token(r - g.certain) = static_cast<float>(args.rows.tokens[static_cast<size_t>(g.first_row + r)] + 1);
    }
    state.kept = g.rows - g.certain;
  }
}

}  // namespace tensorfold
