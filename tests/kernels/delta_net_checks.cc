// The gated delta net: values, chunking, and commits of tentative rows.
#include <algorithm>

#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

constexpr float kFloor = -5.0f;

DeltaNetShape make_shape(int64_t k_heads, int64_t v_heads, int64_t dk, int64_t dv, bool channel_decay = false) {
  DeltaNetShape s;
  s.k_heads = k_heads;
  s.v_heads = v_heads;
  s.dk = dk;
  s.dv = dv;
  s.max_window = 8;
  s.channel_decay = channel_decay;
  for (int64_t h = 0; h < v_heads; ++h) s.k_head_of.push_back(static_cast<int32_t>(h * k_heads / v_heads));
  return s;
}

// A sequence's inputs and the layer's parameters.
struct Layer {
  DeltaNetShape shape;
  int64_t length;
  std::vector<float> qkv, z, b, a, conv, a_log, dt_bias, norm;

  Layer(const DeltaNetShape& s, int64_t rows, uint64_t seed) : shape(s), length(rows) {
    Random parameters(99), random(seed);
    conv = parameters.vector(s.channels() * s.conv_kernel);
    a_log = parameters.vector(s.v_heads);
    dt_bias = parameters.vector(s.decays());
    norm = parameters.vector(s.dv);
    qkv = random.vector(rows * s.channels());
    z = random.vector(rows * s.v_heads * s.dv);
    b = random.vector(rows * s.v_heads);
    a = random.vector(rows * s.decays());
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
  const DeltaNetShape& s = windows[0].layer->shape;
  std::vector<float> qkv, z, b, a;
  std::vector<RowGroup> groups;
  std::vector<RecurrentState*> states;
  int64_t rows = 0;
  for (const Window& w : windows) {
    const auto append = [&](std::vector<float>* to, const std::vector<float>& from, int64_t cols) {
      to->insert(to->end(), from.begin() + w.position * cols, from.begin() + (w.position + w.rows) * cols);
    };
    append(&qkv, w.layer->qkv, s.channels());
    append(&z, w.layer->z, s.v_heads * s.dv);
    append(&b, w.layer->b, s.v_heads);
    append(&a, w.layer->a, s.decays());
    groups.push_back({rows, w.rows, w.position, w.accepted, w.certain, {}});
    states.push_back(w.state);
    rows += w.rows;
  }
  const Layer& layer = *windows[0].layer;
  const auto conv = ops.pack_vector(layer.conv), a_log = ops.pack_vector(layer.a_log),
             dt_bias = ops.pack_vector(layer.dt_bias), norm = ops.pack_vector(layer.norm);
  DeltaNetArgs args;
  args.shape = &s;
  args.qkv = upload(ops, rows, s.channels(), qkv);
  args.z = upload(ops, rows, s.v_heads * s.dv, z);
  args.b = upload(ops, rows, s.v_heads, b);
  args.a = upload(ops, rows, s.decays(), a);
  args.conv = conv.get();
  args.a_log = a_log.get();
  args.dt_bias = dt_bias.get();
  args.norm = norm.get();
  args.decay_floor = kFloor;
  args.out = ops.scratch(rows, s.v_heads * s.dv);
  const std::vector<RecurrentState*> layers[] = {states};
  args.rows = batch_of(groups);
  args.rows.recurrent = layers;
  ops.delta_net(args);
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

// Protects the values against double precision, and chunking, threads and instruction sets bit for bit.
void delta_net_against_reference(Checker& c) {
  for (const DeltaNetShape& s : {make_shape(2, 4, 16, 16), make_shape(1, 3, 24, 40), make_shape(2, 2, 64, 128),
                                 make_shape(3, 3, 24, 40, true)}) {
    const Layer layer(s, 30, 41);
    RefDeltaInputs in;
    in.shape = &s;
    in.qkv = to_ref(30, s.channels(), layer.qkv);
    in.z = to_ref(30, s.v_heads * s.dv, layer.z);
    in.b = to_ref(30, s.v_heads, layer.b);
    in.a = to_ref(30, s.decays(), layer.a);
    in.decay_floor = kFloor;
    in.conv = layer.conv;
    in.a_log = layer.a_log;
    in.dt_bias = layer.dt_bias;
    in.norm = layer.norm;
    const RefMatrix want = ref_delta_net(in);
    std::vector<float> first;
    for (Variant& v : all_variants({1, 2, 3})) {
      for (int64_t chunk : {30, 1, 7}) {
        const std::vector<float> got = serial(*v.ops, layer, chunk);
        if (first.empty()) first = got;
        c.expect(same_bits(first, got), v.name + " chunk " + std::to_string(chunk));
      }
    }
    const double error = relative_error(first, want, 0.1);
    c.expect(error < 2e-5, "error " + std::to_string(error));
  }
}

// Protects "rejected drafts leave no trace": windows of any width with any number accepted give the serial rows, beside
// a batch-mate that accepts other numbers, for every variant.
void commits_only_accepted_rows(Checker& c, const DeltaNetShape& s) {
  const int64_t cols = s.v_heads * s.dv;
  const Layer layer(s, 60, 42), mate(s, 60, 43);
  // Drafted rows that get rejected carry these other inputs.
  Layer wrong(s, 60, 44);
  for (Variant& v : all_variants({1, 2})) {
    const std::vector<float> want = serial(*v.ops, layer, 60);
    const std::vector<float> mate_want = serial(*v.ops, mate, 60);
    Random random(45);
    for (int trial = 0; trial < 6; ++trial) {
      const auto state = v.ops->make_recurrent_state(s), mate_state = v.ops->make_recurrent_state(s);
      pass(*v.ops, {{&layer, state.get(), 0, 5, 0, 5}, {&mate, mate_state.get(), 0, 5, 0, 5}});
      int64_t at = 5, accepted = 0, mate_at = 5;
      while (at + 9 < layer.length) {
        // A verify window: one certain row and some tentative, of which the first `good` are right.
        const int64_t tentative = random.below(9), good = random.below(tentative + 1);
        Layer drafted = layer;
        for (int64_t r = at + 1 + good; r < at + 1 + tentative; ++r) {
          std::copy_n(wrong.qkv.begin() + r * s.channels(), s.channels(), drafted.qkv.begin() + r * s.channels());
          std::copy_n(wrong.a.begin() + r * s.decays(), s.decays(), drafted.a.begin() + r * s.decays());
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
      }
      // A state that is reset is as good as new.
      state->reset();
      const std::vector<float> again = pass(*v.ops, {{&layer, state.get(), 0, 10, 0, 10}});
      c.expect(same_bits(again, {want.begin(), want.begin() + 10 * cols}), v.name + ": after reset");
    }
  }
}

void delta_net_commits_only_accepted_rows(Checker& c) {
  commits_only_accepted_rows(c, make_shape(2, 4, 16, 24));
  commits_only_accepted_rows(c, make_shape(3, 3, 16, 24, true));
}

}  // namespace

std::vector<NamedCheck> delta_net_checks() {
  return {{"delta_net_against_reference", delta_net_against_reference},
          {"delta_net_commits_only_accepted_rows", delta_net_commits_only_accepted_rows}};
}

}  // namespace tensorfold
