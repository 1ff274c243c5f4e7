// The layer between the transfers. Products over gathered rows are launched twice: over full tile
// records of this rank's tokens while other ranks' rows travel, then over the rest. In forward,
// rows of other ranks' tokens come first in Y and O, and their sums travel while the others are
// computed. In backward, all sums travel beside dW1, and kFinish adds them there.
//
//   forward   A own | A rest  Y rest  O others | Y own  O own
//   sending   x --->                           | O others --->
//
//   backward  dH own | dH rest  dX~ | dW2  dS  dX | dW1
//   sending   dO --->  x --->                     | dX, dS --->  sum
#include "cuda/exchange/step.h"
#include "cuda/layer/backend.h"
#include "cuda/layer/backward.h"

namespace sonicmoe::cuda {
namespace {

/// A list of steps that is launched at once.
class Launch {
 public:
  Launch(const Run& run, const PassContext& pass) : run_(run), pass_(pass) {}
  template <class Add>
  void operator()(const Add& add) const {
    Steps steps;
    add(steps);
    sonicmoe::cuda::run(steps, pass_, *run_.exchange.device, run_.exec);
  }

 private:
  const Run& run_;
  const PassContext& pass_;
};

/// The product over the rows of one list. Its tile counter is the `index`th of the second half of
/// the pass's counters, which no step of the pass uses.
RowProduct part_of(RowProduct product, const Metadata& list, unsigned* counters, int index) {
  constexpr int kFirstCounter = kCounterBytes / 4 / 2;
  product.groups.lists = &list;
  product.hints = {.tile_counter = counters + kFirstCounter + index};
  return product;
}

RowProduct gathered_from(RowProduct product, const Tensor& rows) {
  product.rows.rows = rows;
  return product;
}

void split(const Run& run, const Metadata& whole) {
  split_records(*run.exchange.device, run.layer, whole, run.exchange.shape.max_tokens,
                run.memory.split, run.stream);
}

void send_sums(const Run& run) {
  fork(run.exchange, run.stream);
  send_partials(run.exchange, run.rows_at(run.memory.partials), run.memory.pairs.has_row);
}

/// Without rows for its experts a rank still takes part in all phases.
void compute_nothing(const Run& run, const ForwardArgs& args) {
  join(run.exchange, kRowsSent, run.stream);
  run.wait(kPhaseRows);
  cuda::moe_forward(run.layer, args, run.exec);
  signal(run.exchange.peers, kPhaseFree, run.stream);
  send_sums(run);
  signal(run.exchange.peers, kPhasePartials, run.exchange.sending);
}

}  // namespace

void compute_forward(const Run& run, const ForwardArgs& args) {
  const Exchange& e = run.exchange;
  const StepMemory& m = run.memory;
  const std::int64_t own = e.shape.max_tokens;
  const bool training = args.h.data != nullptr;
  ForwardArgs layer = args;
  layer.x = run.received(e.layout.x);
  layer.routing = run.pairs();
  layer.out = run.rows_at(m.partials);
  layer.saved = training ? m.layer_saved : Buffer{};
  layer.scratch = m.layer_scratch;
  if (run.layer.capacity == 0) {
    compute_nothing(run, layer);
    return;
  }
  const ForwardScratch scratch =
      forward_scratch(run.layer, training ? Pass::kForward : Pass::kInference, layer.scratch.data);
  const PassContext pass{run.layer,
                         metadata_layout(run.layer, training ? layer.saved.data : scratch.saved)};
  const Launch launch(run, pass);
  const RowProduct a = up_product(pass, layer, scratch);
  const RowProduct y =
      down_product(pass, layer, scratch,
                   tensor2(scratch.y, run.layer.dtype, run.layer.capacity, run.layer.hidden));
  const auto sum = [&](std::int64_t first, std::int64_t count) {
    return TokenSum{
        scratch.y, layer.routing.weights, layer.out, {first, count}, Start::kAfterPrevious};
  };
  launch([&](Steps& steps) {
    steps.add("metadata", BuildMetadata{layer.routing,
                                        {scratch.metadata, scratch.counters, kCounterBytes / 4}});
  });
  split(run, pass.metadata);
  launch([&](Steps& steps) {
    steps.add("A", gathered_from(part_of(a, m.split.first, scratch.counters, 0), args.x));
  });
  join(e, kRowsSent, run.stream);
  run.wait(kPhaseRows);
  launch([&](Steps& steps) {
    steps.add("A", part_of(a, m.split.rest, scratch.counters, 1));
    steps.add("Y", part_of(y, m.split.rest, scratch.counters, 2));
    steps.add("O", sum(own, run.layer.tokens - own));
  });
  send_sums(run);
  signal(e.peers, kPhasePartials, e.sending);
  signal(e.peers, kPhaseFree, e.sending);
  launch([&](Steps& steps) {
    steps.add("Y", part_of(y, m.split.first, scratch.counters, 3));
    steps.add("O", sum(0, own));
  });
}

void compute_backward(const Run& run, const BackwardArgs& args) {
  const Exchange& e = run.exchange;
  const StepMemory& m = run.memory;
  BackwardArgs layer = args;
  layer.x = run.received(e.layout.x);
  layer.dout = run.received(e.layout.dout);
  layer.routing = run.pairs();
  layer.saved = m.layer_saved;
  layer.scratch = m.layer_scratch;
  if (args.dx.data != nullptr) layer.dx = run.rows_at(m.partials);
  if (args.dweights.data != nullptr) {
    layer.dweights = tensor1(m.score_grads, DType::kF32, run.layer.capacity);
  }
  const auto send = [&] {
    if (args.dx.data != nullptr) {
      send_sums(run);
    } else {
      fork(e, run.stream);
    }
    if (args.dweights.data != nullptr) {
      push_score_grads(e.peers, e.shape, m.pairs, m.score_grads, e.sending);
    }
    signal(e.peers, kPhasePartials, e.sending);
  };
  const auto wait_for_all = [&] {
    join(e, kAllSent, run.stream);
    run.wait(kPhaseAgain);
  };
  if (run.layer.capacity == 0) {
    join(e, kRowsSent, run.stream);
    run.wait(kPhaseRows);
    wait_for_all();
    cuda::moe_backward(run.layer, layer, run.exec);
    signal(e.peers, kPhaseFree, run.stream);
    send();
    return;
  }
  const Engine& engine = *e.device->engine;
  const BackwardScratch scratch = backward_scratch(run.layer, engine, layer.scratch.data);
  const PassContext pass{run.layer, metadata_layout(run.layer, layer.saved.data)};
  const Launch launch(run, pass);
  BackwardCall call = backward_call(pass, layer, scratch, engine);
  call.order.input_grad_first = false;  // no step before the weight gradients overlaps another
  const RowProduct dh = hidden_grad_product(call);
  launch([&](Steps& steps) { add_row_lists(call, steps); });
  split(run, pass.metadata);
  launch([&](Steps& steps) {
    steps.add("dH", gathered_from(part_of(dh, m.split.first, scratch.counters, 0), args.dout));
  });
  join(e, kRowsSent, run.stream);
  run.wait(kPhaseRows);
  launch([&](Steps& steps) {
    steps.add("dH", part_of(dh, m.split.rest, scratch.counters, 1));
    if (layer.dx.data == nullptr) return;
    RowProduct dx = input_grad_product(call, dh);
    dx.hints.start = Start::kAfterPrevious;
    steps.add("dX~", dx);
  });
  wait_for_all();
  // The gradient of the scores and dX run beside dW2.
  const bool beside = args.grads.down.data != nullptr;
  launch([&](Steps& steps) {
    add_bias_grads(call, steps);
    call.order.input_grad_first = beside;
    if (!beside) add_score_grad(call, steps);
    add_down_grad(call, steps);
    if (beside) add_score_grad(call, steps);
    if (layer.dx.data == nullptr) return;
    steps.add("dX", TokenSum{scratch.dx,
                             {},
                             layer.dx,
                             {0, run.layer.tokens},
                             beside ? Start::kIndependent : Start::kAfterPrevious});
  });
  send();
  launch([&](Steps& steps) {
    call.order.input_grad_first = true;  // dW1 reads nothing that a launch since dX~ has written
    add_up_grads(call, steps);
  });
  signal(e.peers, kPhaseFree, run.stream);
}

}  // namespace sonicmoe::cuda
