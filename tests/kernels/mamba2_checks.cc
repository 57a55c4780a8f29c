// Mamba2: values, chunking, commits of tentative rows, and states that are copied, put away and brought back.
#include <algorithm>
#include <limits>

#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

Mamba2Shape make_shape(int64_t heads, int64_t head_dim, int64_t groups, int64_t state) {
  return {.heads = heads, .head_dim = head_dim, .groups = groups, .state = state, .max_window = 8};
}

// A sequence's inputs and the layer's parameters.
struct Layer {
  Mamba2Shape shape;
  int64_t length;
  float least = 0.0f, most = std::numeric_limits<float>::infinity();
  std::vector<float> z, xbc, dt, conv, conv_bias, a_log, dt_bias, d, norm;

  Layer(const Mamba2Shape& s, int64_t rows, uint64_t seed, bool bias = true) : shape(s), length(rows) {
    Random parameters(99), random(seed);
    conv = parameters.vector(s.channels() * s.conv_kernel);
    if (bias) conv_bias = parameters.vector(s.channels());
    a_log = parameters.vector(s.heads);
    dt_bias = parameters.vector(s.heads);
    d = parameters.vector(s.heads);
    norm = parameters.vector(s.width());
    z = random.vector(rows * s.width());
    xbc = random.vector(rows * s.channels());
    dt = random.vector(rows * s.heads);
  }
};

struct Window {
  const Layer* layer;
  RecurrentState* state;
  int64_t position, rows, accepted, certain;
};

// One pass; results of all windows in order.
std::vector<float> pass(Ops& ops, const std::vector<Window>& windows) {
  ops.begin_pass();
  const Layer& layer = *windows[0].layer;
  const Mamba2Shape& s = layer.shape;
  std::vector<float> z, xbc, dt;
  std::vector<RowGroup> groups;
  std::vector<RecurrentState*> states;
  int64_t rows = 0;
  for (const Window& w : windows) {
    const auto append = [&](std::vector<float>* to, const std::vector<float>& from, int64_t cols) {
      to->insert(to->end(), from.begin() + w.position * cols, from.begin() + (w.position + w.rows) * cols);
    };
    append(&z, w.layer->z, s.width());
    append(&xbc, w.layer->xbc, s.channels());
    append(&dt, w.layer->dt, s.heads);
    groups.push_back({rows, w.rows, w.position, w.accepted, w.certain, {}});
    states.push_back(w.state);
    rows += w.rows;
  }
  const auto conv = ops.pack_vector(layer.conv), a_log = ops.pack_vector(layer.a_log),
             dt_bias = ops.pack_vector(layer.dt_bias), d = ops.pack_vector(layer.d), norm = ops.pack_vector(layer.norm);
  const auto bias = layer.conv_bias.empty() ? nullptr : ops.pack_vector(layer.conv_bias);
  Mamba2Args args;
  args.shape = &s;
  args.z = upload(ops, rows, s.width(), z);
  args.xbc = upload(ops, rows, s.channels(), xbc);
  args.dt = upload(ops, rows, s.heads, dt);
  args.conv = conv.get();
  args.conv_bias = bias.get();
  args.a_log = a_log.get();
  args.dt_bias = dt_bias.get();
  args.d = d.get();
  args.norm = norm.get();
  args.least_step = layer.least;
  args.most_step = layer.most;
  args.out = ops.scratch(rows, s.width());
  const std::vector<RecurrentState*> layers[] = {states};
  args.rows = batch_of(groups);
  args.rows.recurrent = layers;
  ops.mamba2(args);
  return download(ops, args.out);
}

std::vector<float> serial(Ops& ops, const Layer& layer, int64_t chunk) {
  const auto state = ops.make_recurrent_state(layer.shape);
  std::vector<float> all;
  for (int64_t at = 0; at < layer.length; at += chunk) {
    const int64_t rows = std::min(chunk, layer.length - at);
    const std::vector<float> out = pass(ops, {{&layer, state.get(), at, rows, 0, rows}});
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

// Protects the values against double precision, and chunking, threads and instruction sets bit for bit; head dims that
// are no multiple of a vector, a convolution without bias, and time steps within bounds too.
void mamba2_against_reference(Checker& c) {
  for (int variant = 0; variant < 4; ++variant) {
    const Mamba2Shape s = variant == 0   ? make_shape(4, 16, 2, 16)
                          : variant == 1 ? make_shape(6, 24, 3, 20)
                          : variant == 2 ? make_shape(2, 64, 1, 128)
                                         : make_shape(3, 10, 3, 7);
    Layer layer(s, 30, 41, variant != 1);
    if (variant == 2) {
      layer.least = 0.5f;
      layer.most = 1.0f;
    }
    RefMamba2Inputs in;
    in.shape = &s;
    in.z = to_ref(30, s.width(), layer.z);
    in.xbc = to_ref(30, s.channels(), layer.xbc);
    in.dt = to_ref(30, s.heads, layer.dt);
    in.conv = layer.conv;
    in.conv_bias = layer.conv_bias;
    in.a_log = layer.a_log;
    in.dt_bias = layer.dt_bias;
    in.d = layer.d;
    in.norm = layer.norm;
    in.least_step = static_cast<double>(layer.least);
    in.most_step = static_cast<double>(layer.most);
    const RefMatrix want = ref_mamba2(in);
    std::vector<float> first;
    for (Variant& v : all_variants({1, 2, 3})) {
      for (int64_t chunk : {30, 1, 7}) {
        const std::vector<float> got = serial(*v.ops, layer, chunk);
        if (first.empty()) first = got;
        c.expect(same_bits(first, got), v.name + " chunk " + std::to_string(chunk));
      }
    }
    const double error = relative_error(first, want, 0.1);
    c.expect(error < 2e-5, "variant " + std::to_string(variant) + ": error " + std::to_string(error));
  }
}

// Protects "rejected drafts leave no trace": windows of any width with any number accepted give the serial rows, beside
// a batch-mate that accepts other numbers, for every variant; and a state that was copied, or put away and brought
// back in the middle of a window, goes on as the first would have.
void mamba2_commits_only_accepted_rows(Checker& c) {
  const Mamba2Shape s = make_shape(4, 24, 2, 16);
  const int64_t cols = s.width();
  const Layer layer(s, 60, 42), mate(s, 60, 43), wrong(s, 60, 44);
  for (Variant& v : all_variants({1, 2})) {
    const std::vector<float> want = serial(*v.ops, layer, 60);
    const std::vector<float> mate_want = serial(*v.ops, mate, 60);
    Random random(45);
    for (int trial = 0; trial < 6; ++trial) {
      auto state = v.ops->make_recurrent_state(s);
      const auto mate_state = v.ops->make_recurrent_state(s);
      pass(*v.ops, {{&layer, state.get(), 0, 5, 0, 5}, {&mate, mate_state.get(), 0, 5, 0, 5}});
      int64_t at = 5, accepted = 0, mate_at = 5;
      while (at + 9 < layer.length) {
        // A verify window: one certain row and some tentative, of which the first `good` are right.
        const int64_t tentative = random.below(9), good = random.below(tentative + 1);
        Layer drafted = layer;
        for (int64_t r = at + 1 + good; r < at + 1 + tentative; ++r) {
          std::copy_n(wrong.xbc.begin() + r * s.channels(), s.channels(), drafted.xbc.begin() + r * s.channels());
          std::copy_n(wrong.dt.begin() + r * s.heads, s.heads, drafted.dt.begin() + r * s.heads);
        }
        const std::vector<float> out = pass(*v.ops, {{&mate, mate_state.get(), mate_at, 1, 0, 1},
                                                     {&drafted, state.get(), at, 1 + tentative, accepted, 1}});
        const std::vector<float> got(out.begin() + cols, out.begin() + (2 + good) * cols);
        c.expect(same_bits(got, {want.begin() + at * cols, want.begin() + (at + 1 + good) * cols}),
                 v.name + ": window at " + std::to_string(at));
        c.expect(same_bits({out.begin(), out.begin() + cols},
                           {mate_want.begin() + mate_at * cols, mate_want.begin() + (mate_at + 1) * cols}),
                 v.name + ": batch-mate at " + std::to_string(mate_at));
        at += 1 + good;
        mate_at += 1;
        accepted = good;
        auto other = v.ops->make_recurrent_state(s);
        if (trial % 2 == 0) {
          other->copy_from(*state);
        } else {
          std::vector<std::byte> kept(static_cast<size_t>(state->bytes()));
          state->save(kept);
          c.expect(other->load(kept, tentative), v.name + ": a state that was saved cannot be loaded");
        }
        state = std::move(other);
      }
      // A state that is reset is as good as new.
      state->reset();
      const std::vector<float> again = pass(*v.ops, {{&layer, state.get(), 0, 10, 0, 10}});
      c.expect(same_bits(again, {want.begin(), want.begin() + 10 * cols}), v.name + ": after reset");
    }
  }
}

}  // namespace

uint64_t mamba2_hash(Ops& ops) { return hash_bits(serial(ops, Layer(make_shape(4, 24, 2, 40), 25, 46), 9)); }

std::vector<NamedCheck> mamba2_checks() {
  return {{"mamba2_against_reference", mamba2_against_reference},
          {"mamba2_commits_only_accepted_rows", mamba2_commits_only_accepted_rows}};
}

}  // namespace tensorfold
