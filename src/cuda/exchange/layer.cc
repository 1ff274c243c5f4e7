// The layer of one rank, between the transfers.
//
// Each product over gathered rows is two launches. The first ("own") multiplies the full tile
// records that have only rows of this rank, while rows of other ranks are being sent. The second
// ("rest") multiplies the other records.
//
// Sums of other ranks' tokens are computed first, because they must be sent. Sums of this rank's
// tokens follow in kFinish; they add the partial sums of the other ranks. Sums are computed in the
// parts of token_parts(), 1 and 2 in this drawing of two ranks. Time runs to the right:
//
//   forward   A own | A rest  Y rest  O others 1, 2 | Y own | O own 1, 2
//   sending   x --->                          | 1 ---> 2 --->
//
//   backward  dH own | dH rest  dX~           | dW2            | dW1
//   aside                                     | dX others 1, 2  dS  dX own 1, 2
//   sending   dO --->  x --->  own rows --->               | 1 ---> 2 --->
#include <algorithm>

#include "cuda/exchange/step.h"
#include "cuda/layer/backward.h"
#include "cuda/layer/moe.h"

namespace sonicmoe::cuda {
namespace {

/// Launches the list of steps that add(steps) makes.
class Launch {
 public:
  Launch(const Run& run, const PassContext& pass, const Exec& exec)
      : run_(run), pass_(pass), exec_(exec) {}
  template <class Add>
  void operator()(const Add& add) const {
    Steps steps;
    add(steps);
    sonicmoe::cuda::run(steps, pass_, *run_.exchange.device, exec_);
  }

 private:
  const Run& run_;
  const PassContext& pass_;
  const Exec& exec_;
};

/// The exchange's counters: the second half of the pass's counters. The steps of the pass use only
/// the first half.
constexpr int kFirstCounter = kCounterBytes / 4 / 2;
constexpr int kArrivalCounter = kFirstCounter + 8;  // in another 32-byte sector

/// `product`, restricted to the rows of one list. Its tile counter is counter `index` of the
/// exchange's counters.
RowProduct part_of(RowProduct product, const Metadata& list, unsigned* counters, int index) {
  product.groups.lists = &list;
  product.hints = {.tile_counter = counters + kFirstCounter + index};
  return product;
}

RowProduct gathered_from(RowProduct product, const Tensor& rows) {
  product.rows.rows = rows;
  return product;
}

/// Splits the tile records into the two lists, own and rest. Records of the rest read all of their
/// rows from the array at byte `offset`. So those of this rank's `rows` that they need are copied
/// there.
void split(const Run& run, const Metadata& whole, const Tensor& rows, std::int64_t offset) {
  const Exchange& e = run.exchange;
  const Metadata& rest = run.memory.split.rest;
  split_records(*e.device, run.layer, whole, e.shape.max_tokens, run.memory.split, run.stream);
  gather_own_rows(*e.device, e.peers,
                  {{rows.data, rows.stride[0], rows.shape[0], rows.shape[1]},
                   whole.row_token,
                   rest.expert_begin,
                   rest.expert_rows,
                   run.layer.experts},
                  offset, run.stream);
}

/// The tokens of other ranks in a part, as rows of the layer's token arrays.
TokenRange others_of(const Run& run, const TokenPart& part) {
  const ExchangeShape& s = run.exchange.shape;
  return {s.max_tokens + part.first, (s.ranks - 1) * part.count};
}
/// The tokens of this rank in a part.
TokenRange own_of(const Run& run, const TokenPart& part) {
  const std::int64_t left = run.problem.tokens - part.first;
  return {part.first, std::clamp<std::int64_t>(left, 0, part.count)};
}

/// Calls f(part) for each part that has tokens.
template <class F>
void each_part(const Run& run, const F& f) {
  for (const TokenPart& part : token_parts(run.exchange.shape)) {
    if (part.count != 0) f(part);
  }
}

/// Sends the partial sums of a part, after the work that is now on `stream` has computed them.
void send_part(const Run& run, const TokenPart& part, cudaStream_t stream) {
  const Exchange& e = run.exchange;
  follow(e, e.sending, stream);
  send_partials(e, run.rows_at(run.memory.partials), run.memory.pairs.has_row, part);
}

/// Announces the phases of a rank that has no rows for its experts, because the other ranks wait
/// for its flags.
void send_nothing(const Run& run) {
  const Exchange& e = run.exchange;
  // signal() begins the next epoch of kPhaseFree. This step's wait for kPhaseFree must read the
  // epoch before that. So both are on the same stream.
  signal(*e.device, e.peers, kPhaseFree, e.sending);
  each_part(run, [&](const TokenPart& part) { send_part(run, part, run.stream); });
}

/// Adds the partial sums of the other ranks. For a rank that has no rows for its experts, and so no
/// partial sums of its own.
void sum_of_others(const Run& run, const Tensor& out, cudaStream_t stream) {
  const Exchange& e = run.exchange;
  each_part(run, [&](const TokenPart& part) { run.wait(part.phase, stream); });
  sum_partials(e.peers, e.shape, out, stream);
}

/// The layer of one forward.
struct Forward {
  ForwardArgs args;
  ForwardScratch scratch;
  PassContext pass;

  Forward(const Run& run, const ForwardArgs& a)
      : args(layer_args(run, a)),
        scratch(forward_scratch(run.layer, a.h.data != nullptr ? Pass::kForward : Pass::kInference,
                                args.scratch.data)),
        pass{run.layer,
             metadata_layout(run.layer, a.h.data != nullptr ? args.saved.data : scratch.saved)} {}
  TokenSum sum(const Tensor& out, const TokenRange& tokens, const RankSums* ranks) const {
    return {scratch.y, args.routing.weights, out, tokens, Start::kAfterPrevious, ranks};
  }

 private:
  static ForwardArgs layer_args(const Run& run, const ForwardArgs& a) {
    ForwardArgs layer = a;
    layer.x = run.received(run.exchange.layout.x);
    layer.routing = run.pairs();
    layer.out = run.rows_at(run.memory.partials);
    layer.saved = a.h.data != nullptr ? run.memory.layer_saved : Buffer{};
    layer.scratch = run.memory.layer_scratch;
    return layer;
  }
};

/// The layer of one backward.
struct Backward {
  BackwardArgs args;
  BackwardScratch scratch;
  PassContext pass;
  BackwardCall call;
  Exec aside;   ///< for launches on the stream `aside`, without an observer
  bool beside;  ///< whether sums run at the same time as weight gradients

  Backward(const Run& run, const BackwardArgs& a)
      : args(layer_args(run, a)),
        scratch(backward_scratch(run.layer, *run.exchange.device->engine, args.scratch.data)),
        pass{run.layer, metadata_layout(run.layer, args.saved.data)},
        call(backward_call(pass, args, scratch, *run.exchange.device->engine)),
        aside(run.exec),
        beside(has_weight_grads(a.grads)) {
    aside.stream = run.exchange.aside;
    aside.observer = nullptr;
  }
  Backward(const Backward&) = delete;

  TokenSum sum(const Tensor& out, const TokenRange& tokens, const RankSums* ranks) const {
    const Start start = beside ? Start::kIndependent : Start::kAfterPrevious;
    return {scratch.dx, {}, out, tokens, start, ranks, BesideWhat::kOtherStream};
  }

 private:
  static bool has_weight_grads(const Weights& g) {
    return g.gate.data != nullptr || g.up.data != nullptr || g.down.data != nullptr;
  }
  static BackwardArgs layer_args(const Run& run, const BackwardArgs& a) {
    BackwardArgs layer = a;
    layer.x = run.received(run.exchange.layout.x);
    layer.dout = run.received(run.exchange.layout.dout);
    layer.routing = run.pairs();
    layer.saved = run.memory.layer_saved;
    layer.scratch = run.memory.layer_scratch;
    if (a.dx.data != nullptr) layer.dx = run.rows_at(run.memory.partials);
    if (a.dweights.data != nullptr) {
      layer.dweights = tensor1(run.memory.score_grads, DType::kF32, run.layer.capacity);
    }
    return layer;
  }
};

/// Launches dH and dX~.
void add_row_grads(const Run& run, const Backward& b, const Tensor& dout) {
  const Exchange& e = run.exchange;
  const StepMemory& m = run.memory;
  const Launch launch(run, b.pass, run.exec);
  const RowProduct dh = hidden_grad_product(b.call);
  launch([&](Steps& steps) { add_row_lists(b.call, steps); });
  split(run, b.pass.metadata, dout, e.layout.dout);
  launch([&](Steps& steps) {
    const RowProduct own = part_of(dh, m.split.first, b.scratch.counters, 0);
    steps.add("dH", gathered_from(own, dout));
  });
  run.wait(kPhaseRows, run.stream);
  launch([&](Steps& steps) {
    const RowProduct& rest = steps.add("dH", part_of(dh, m.split.rest, b.scratch.counters, 1));
    if (b.args.dx.data == nullptr) return;
    RowProduct dx = input_grad_product(b.call, rest);
    dx.hints.start = Start::kAfterPrevious;
    steps.add("dX~", dx);
  });
}

/// Computes and sends dX of other ranks' tokens and the gradients of routing weights, at the same
/// time as the weight gradients.
void send_sums(const Run& run, const Backward& b) {
  const Exchange& e = run.exchange;
  const Launch launch(run, b.pass, b.aside);
  follow(e, e.aside, run.stream);
  if (b.args.dx.data != nullptr) {
    each_part(run, [&](const TokenPart& part) {
      launch(
          [&](Steps& steps) { steps.add("dX", b.sum(b.args.dx, others_of(run, part), nullptr)); });
      send_part(run, part, e.aside);
    });
  }
  if (b.args.dweights.data == nullptr) return;
  // With a bias, the gradients of routing weights read the rows of dout.
  if (b.args.weights.b_down.data != nullptr) run.wait(kPhaseAgain, e.aside);
  launch([&](Steps& steps) { add_score_grad(b.call, steps); });
  push_score_grads(e.peers, e.shape, run.memory.pairs, run.memory.score_grads, e.aside);
  announce(e, kPhaseScores, e.aside);
}

}  // namespace

void compute_forward(const Run& run, const ForwardArgs& args) {
  const Exchange& e = run.exchange;
  const StepMemory& m = run.memory;
  const Forward f(run, args);
  if (run.layer.capacity == 0) {
    run.wait(kPhaseRows, run.stream);
    cuda::moe_forward(run.layer, f.args, run.exec);
    send_nothing(run);
    return;
  }
  const Launch launch(run, f.pass, run.exec);
  const RowProduct a = up_product(f.pass, f.args, f.scratch);
  const RowProduct y =
      down_product(f.pass, f.args, f.scratch,
                   tensor2(f.scratch.y, run.layer.dtype, run.layer.capacity, run.layer.hidden));
  unsigned* counters = f.scratch.counters;
  launch([&](Steps& steps) {
    steps.add("metadata",
              BuildMetadata{f.args.routing, {f.scratch.metadata, counters, kCounterBytes / 4}});
  });
  split(run, f.pass.metadata, args.x, e.layout.x);
  launch([&](Steps& steps) {
    steps.add("A", gathered_from(part_of(a, m.split.first, counters, 0), args.x));
  });
  run.wait(kPhaseRows, run.stream);
  launch([&](Steps& steps) {
    steps.add("A", part_of(a, m.split.rest, counters, 1));
    steps.add("Y", part_of(y, m.split.rest, counters, 2));
  });
  each_part(run, [&](const TokenPart& part) {
    launch([&](Steps& steps) { steps.add("O", f.sum(f.args.out, others_of(run, part), nullptr)); });
    send_part(run, part, run.stream);
  });
  signal(*e.device, e.peers, kPhaseFree, e.sending);
  launch([&](Steps& steps) { steps.add("Y", part_of(y, m.split.first, counters, 3)); });
}

void finish_forward(const Run& run, const ForwardArgs& args) {
  if (run.layer.capacity == 0) {
    sum_of_others(run, args.out, run.stream);
    return;
  }
  const RankSums ranks = other_sums(run.exchange.peers, run.exchange.shape, run.layer.hidden);
  const Forward f(run, args);
  const Launch launch(run, f.pass, run.exec);
  each_part(run, [&](const TokenPart& part) {
    run.wait(part.phase, run.stream);
    launch([&](Steps& steps) { steps.add("O", f.sum(args.out, own_of(run, part), &ranks)); });
  });
}

void compute_backward(const Run& run, const BackwardArgs& args) {
  const Exchange& e = run.exchange;
  Backward b(run, args);
  if (run.layer.capacity == 0) {
    run.wait(kPhaseRows, run.stream);
    run.wait(kPhaseAgain, run.stream);
    cuda::moe_backward(run.layer, b.args, run.exec);
    send_nothing(run);
    announce(e, kPhaseScores, e.sending);
    return;
  }
  add_row_grads(run, b, args.dout);
  // Without input_grad_first, dS waits until the launches before it on its stream are complete.
  b.call.order.input_grad_first = false;
  send_sums(run, b);
  b.call.arrival = b.scratch.counters + kArrivalCounter;
  run.wait(kPhaseAgain, run.stream, b.call.arrival);
  const Launch launch(run, b.pass, run.exec);
  launch([&](Steps& steps) {
    add_bias_grads(b.call, steps);
    // dW2 needs dH and the rows, but not dX~. With input_grad_first it may start before dX~ is
    // complete: dX~ launches the next kernel once dH is complete. The next kernel is the wait for
    // rows (above). It increments `arrival` once the rows have arrived, then launches dW2.
    b.call.order.input_grad_first = args.dx.data != nullptr;
    add_down_grad(b.call, steps);
    b.call.order.input_grad_first = false;
    add_up_grads(b.call, steps);
  });
  signal(*e.device, e.peers, kPhaseFree, run.stream);
}

void finish_backward(const Run& run, const BackwardArgs& args) {
  if (args.dx.data == nullptr) return;
  const Exchange& e = run.exchange;
  if (run.layer.capacity == 0) {
    sum_of_others(run, args.dx, e.aside);
    return;
  }
  const RankSums ranks = other_sums(e.peers, e.shape, run.layer.hidden);
  const Backward b(run, args);
  const Launch launch(run, b.pass, b.aside);
  each_part(run, [&](const TokenPart& part) {
    run.wait(part.phase, e.aside);
    launch([&](Steps& steps) { steps.add("dX", b.sum(args.dx, own_of(run, part), &ranks)); });
  });
}

}  // namespace sonicmoe::cuda
