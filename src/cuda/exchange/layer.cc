// The layer of one rank, between the transfers.
//
// Products over gathered rows (A, dH) multiply the records that have only rows of this rank first
// ("own"), while rows of other ranks are being sent, and then the records with rows of place 1, 2,
// ... That is one or two launches, whose tiles wait for their rows, or more, each after a wait
// (GatheredRows).
//
// Sums of other ranks' tokens are computed first, because they must be sent. Y has groups too: the
// sums of one rank's tokens are sent while those of the next rank are computed. Sums of this rank's
// tokens follow in kFinish, and add the partial sums of the other ranks.
//
// Time runs to the right. The numbers are three other ranks, for A and dH in one group, for Y in
// two. With one other rank they are the parts of its tokens (token_parts()).
//
//   forward   A own | A 1 2 3 | Y 1  O 1 | Y 2 3  O 2  O 3 | Y own | O own
//   sending   x 1 2 3 --->               | 1 --->          | 2 3 --->
//   aside     own rows of x
//
//   backward  dH own | dH 1 2 3 | dX~           | dW2          | dW1
//   aside     own rows of dO, x                 | dX 1 2 3  dS   dX own
//   sending   dO 1 2 3 ---> x 1 2 3 --->            | 1 ---> 2 ---> 3 --->
//
// If the links limit a layer with three other ranks, Y of a list follows A of it
// (follows_arrivals()). A record may have rows of rank 1 and of rank 2. It is in the list of rank
// 2, so the sums of rank 1 follow Y of that list:
//
//   forward   A own | A 1  Y 1 | A 2  Y 2  O 1 | A 3  Y 3  O 2  O 3 | Y own | O own
//   sending   x 1 2 3 --->                  1 --->             2 3 --->
#include <algorithm>

#include "core/observer.h"
#include "cuda/exchange/step.h"
#include "cuda/layer/backward.h"
#include "cuda/layer/moe.h"
#include "cuda/metadata/position_pairs.h"

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
constexpr int kArrivalCounter = kFirstCounter + 16;  // in another 32-byte sector
constexpr int kInnerCounter = 24;  // of part_of(): of the inner product of a gathered one

/// `product`, restricted to the rows of one list. Its tile counter is counter `index` of the
/// exchange's counters.
RowProduct part_of(RowProduct product, const Metadata& list, unsigned* counters, int index) {
  product.groups.lists = &list;
  product.hints = {.tile_counter = counters + kFirstCounter + index};
  return product;
}

SourceGroups divided(const ExchangeShape& shape, int groups) {
  const int most = std::min<int>(kMostSourceGroups, shape.ranks - 1);
  SourceGroups g{std::clamp(groups, 1, std::max(most, 1))};
  for (int i = 0; i <= g.groups; ++i) g.bounds[i] = 1 + (shape.ranks - 1) * i / g.groups;
  return g;
}

bool has_factors(const Run& run) { return run.layer.up_rank != 0 || run.layer.down_rank != 0; }

/// n times the pairs of this rank's tokens, for each row of d elements that it sends: K n / (W -
/// 1).
std::int64_t work_per_row(const Run& run) {
  const std::int64_t sent = (run.exchange.shape.ranks - 1) * run.problem.tokens;
  return row_capacity(run.problem) * run.layer.width / std::max<std::int64_t>(sent, 1);
}

/// Whether Y of a list is computed behind A of this list. Then the first sums are sent before
/// all rows have come, and the others one list later than otherwise: a gain only if rows come more
/// slowly than A computes. Not beside low-rank factors, because U has one launch over all rows.
bool follows_arrivals(const Run& run, const SplitLists& lists) {
  return lists.arrivals.groups > 1 && work_per_row(run) < Exchange::kLinkBound && !has_factors(run);
}

/// The lists of a pass. A launch more costs a product of a wide layer a few percent of its time. In
/// a narrow layer each launch should begin when its rows come and end when its sums can be sent. If
/// Y has the lists of A (follows_arrivals()), there are no lists `sums`.
///
/// Tiles do not wait for rows beside low-rank factors: the inner product comes first, and would
/// wait for all rows before the product with the weights begins.
///
/// The launch whose tiles wait begins after the local copies of own rows, on `aside`. Backward has
/// more of them than forward, and its lists are shorter. So with more than two ranks it computes dH
/// of own rows meanwhile, in a launch of its own. Forward has only the lists to compute meanwhile.
SplitLists lists_of(const Run& run, bool has_sums) {
  constexpr std::int64_t kNarrow = 1024;
  const Exchange& e = run.exchange;
  const bool narrow = run.layer.width < kNarrow;
  const int most = kMostSourceGroups;
  SplitLists lists{e.shape.max_tokens, {}, {}};
  const bool awaits = work_per_row(run) >= e.awaits_from && !has_factors(run) &&
                      run.layer.precision == Precision::kTensors;
  if (awaits && e.transport == ExchangeTransport::kCopy && e.shape.ranks <= kMostArrivals &&
      splits_by_source(run.layer.experts, e.shape.ranks)) {
    lists.by_source = e.shape.ranks;
    lists.first_source = !has_sums && e.shape.ranks > 2 ? 1 : 0;
  } else {
    lists.arrivals = divided(e.shape, e.groups != 0 ? e.groups : narrow ? most : 1);
  }
  if (has_sums && !follows_arrivals(run, lists)) {
    lists.sums = divided(e.shape, e.groups != 0 ? e.groups : narrow ? most : 2);
  }
  return lists;
}

/// `count` rows of a matrix, from row `first` on.
Tensor part_of(const Tensor& rows, std::int64_t first, std::int64_t count) {
  Tensor part = rows;
  const std::int64_t bytes = first * rows.stride[0] * dtype_bytes(rows.dtype);
  part.data = static_cast<std::uint8_t*>(rows.data) + bytes;
  part.shape[0] = count;
  return part;
}

/// A product over the rows of x or dout of all ranks, and the inner product of its low-rank term.
struct Gathered {
  const char* name;
  RowProduct product;
  const char* inner_name;
  std::optional<RowProduct> inner;
};

/// Launches a product over the rows of x or dout of all ranks: multiply_own() over this rank's
/// rows, then multiply_others() over the others. If tiles wait for their rows, own rows may be in
/// the second launch (first_source). In fp8 the rows travel as elements and are quantised here, own
/// rows before the first launch, others when they have come.
struct GatheredRows {
  const Run& run;
  const SplitLists& lists;
  const Tensor& own;       ///< this rank's rows, where the caller has them
  const Tensor& received;  ///< rows of all ranks; own rows may still be missing
  const CodedRows& coded;  ///< in fp8 the codes of `received`; else absent
  const Launch& launch;

  bool has_codes() const { return coded.codes.data != nullptr; }
  void multiply_own(const Gathered& g, unsigned* counters) const {
    if (lists.by_source != 0 && lists.first_source == 0) return;
    if (has_codes()) quantize(own, 0);
    multiply_list(g, run.memory.split.own, counters, 0, &own);
  }
  /// Calls after(i) when the product over list i of the arrivals is launched; not if tiles wait.
  template <class After>
  void multiply_others(const Gathered& g, unsigned* counters, const After& after) const {
    const Exchange& e = run.exchange;
    const RecordSplit& split = run.memory.split;
    follow(e, run.stream, e.aside);  // for the copy of own rows
    if (lists.by_source != 0) {
      // The tiles wait on all multiprocessors. So the copies that they wait for must not need one
      // any more, on any rank.
      run.wait({kPhaseStarted}, run.stream);
      RowProduct awaiting = part_of(g.product, split.by_source, counters, lists.first_source);
      awaiting.rows.arrivals = arrivals();
      launch([&](Steps& steps) { steps.add(g.name, awaiting); });
      run.wait({kPhaseRows}, run.stream);
      return;
    }
    for (int a = 0; a < lists.arrivals.groups; ++a) {
      std::uint64_t from = 0;
      for (std::int32_t p = lists.arrivals.bounds[a]; p < lists.arrivals.bounds[a + 1]; ++p) {
        from |= std::uint64_t{1} << (e.peers.rank + p) % e.peers.ranks;
      }
      run.wait({kPhaseRows, from}, run.stream);
      if (has_codes()) {
        const std::int64_t begin = lists.arrivals.bounds[a] * lists.tokens;
        const std::int64_t end = lists.arrivals.bounds[a + 1] * lists.tokens;
        quantize(part_of(received, begin, end - begin), begin);
      }
      multiply_list(g, split.arrivals[a], counters, 1 + a, nullptr);
      after(a);
    }
  }

 private:
  /// Writes the codes of `rows` from row `first` of `coded` on. Rows of a place after the last
  /// token of its rank have any values; no product reads their codes.
  void quantize(const Tensor& rows, std::int64_t first) const {
    if (rows.shape[0] == 0) return;
    CodedRows out = coded;
    out.codes.data = static_cast<std::uint8_t*>(coded.codes.data) + first * coded.codes.stride[0];
    out.codes.shape[0] = rows.shape[0];
    out.scales.data += first * (coded.codes.shape[1] / kScaleBlock);
    const Engine& engine = *run.exchange.device->engine;
    engine.quantizers->rows(*run.exchange.device, {rows, out}, run.stream);
  }
  /// `from` replaces the rows that are elements, where not null.
  void multiply_list(const Gathered& g, const Metadata& list, unsigned* counters, int index,
                     const Tensor* from) const {
    launch([&](Steps& steps) {
      const auto add = [&](const char* name, RowProduct product) {
        if (from != nullptr && product.rows.scales.data == nullptr) product.rows.rows = *from;
        steps.add(name, product);
      };
      if (g.inner) add(g.inner_name, part_of(*g.inner, list, counters, kInnerCounter + index));
      add(g.name, part_of(g.product, list, counters, index));
    });
  }
  RowArrivals arrivals() const {
    const Exchange& e = run.exchange;
    auto* control = e.peers.own<Control>(e.layout.control);
    return {control->flags[kPhaseRows],
            &control->epochs[kPhaseRows],
            control->alarms,
            &control->late,
            &control->deadline,
            static_cast<std::int32_t>(e.shape.max_tokens),
            e.peers.rank,
            e.peers.ranks};
  }
};

/// The tokens of a part of the rank at place `place`, as rows of the layer's token arrays.
TokenRange tokens_of(const Run& run, std::int32_t place, const TokenPart& part) {
  return {place * run.exchange.shape.max_tokens + part.first, part.count};
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

/// Partial sums of a part of the tokens of the rank at place `place`.
PartialSource partials_of(const Run& run, const std::int32_t* token_offsets, std::int32_t place,
                          const TokenPart& part) {
  return {run.memory.partials, run.layer.hidden, token_offsets, part, place};
}

/// Sends partial sums after the work that is now on `stream` has computed them.
void send_after(const Run& run, cudaStream_t stream, const PartialSource& partials) {
  const Exchange& e = run.exchange;
  follow(e, e.sending, stream);
  send_partials(e, partials);
}

/// Copies the rows of x to the caller's buffer, on the stream `aside`, while the layer computes.
/// Rows that this rank did not need are copied too, whatever they are.
void keep_rows(const Run& run) {
  const Exchange& e = run.exchange;
  const Tensor rows = run.received(e.layout.x);
  follow(e, e.aside, run.stream);
  check_cuda(cudaMemcpyAsync(e.step.kept_x.data, rows.data,
                             rows.shape[0] * rows.shape[1] * dtype_bytes(rows.dtype),
                             cudaMemcpyDeviceToDevice, e.aside),
             "keeping rows of x");
}

/// Announces the phases of a rank that has no rows for its experts, because the other ranks wait
/// for its flags.
void send_nothing(const Run& run) {
  const Exchange& e = run.exchange;
  // signal() begins the next epoch of kPhaseFree. This step's wait for kPhaseFree must read the
  // epoch before that. So both are on the same stream.
  signal(*e.device, e.peers, kPhaseFree, e.sending);
  for (std::int32_t p = 1; p < e.peers.ranks; ++p) {
    each_part(run, [&](const TokenPart& part) {
      send_after(run, run.stream, partials_of(run, nullptr, p, part));
    });
  }
}

/// Adds the partial sums of the other ranks. For a rank that has no rows for its experts, and so no
/// partial sums of its own.
void sum_of_others(const Run& run, const Tensor& out, cudaStream_t stream) {
  const Exchange& e = run.exchange;
  if (stream != e.aside) follow(e, stream, e.aside);  // for the ranks of each token
  each_part(run, [&](const TokenPart& part) { run.wait({part.phase}, stream); });
  sum_partials(e.peers, e.shape, out, stream);
}

/// The layer of one forward.
struct Forward {
  ForwardArgs args;
  ForwardScratch scratch;
  PassContext pass;
  LoraPass lora;

  Forward(const Run& run, const ForwardArgs& a)
      : args(layer_args(run, a)),
        scratch(forward_scratch(run.layer, a.h.data != nullptr ? Pass::kForward : Pass::kInference,
                                args.scratch.data)),
        pass{run.layer, run.metadata(a.h.data != nullptr ? args.saved.data : scratch.saved)},
        lora(lora_pass(run.layer, args.weights, args.lora, scratch.lora,
                       a.h.data != nullptr ? saved_p(run.layer, args.saved.data) : scratch.lora.p,
                       scratch.counters + kLoraCounters)) {}
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
        pass{run.layer, run.metadata(args.saved.data)},
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
    layer.x = run.keeps_rows() ? run.rows_at(run.exchange.step.kept_x.data)
                               : run.received(run.exchange.layout.x);
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
  launch([&](Steps& steps) {
    add_row_lists(b.call, steps);
    add_factor_copies(b.call.lora, steps);
  });
  const SplitLists lists = lists_of(run, false);
  split_records(*e.device, run.layer, b.pass.metadata, lists, m.split, run.stream);
  const GatheredRows rows{run, lists, dout, b.args.dout, b.scratch.dout, launch};
  const Gathered gathered{"dH", dh, "Q", hidden_grad_inner_product(b.call)};
  rows.multiply_own(gathered, b.scratch.counters);
  rows.multiply_others(gathered, b.scratch.counters, [](int) {});
  launch([&](Steps& steps) { add_after_hidden_grad(b.call, steps); });
  if (b.args.dx.data == nullptr) return;
  RowProduct dx = input_grad_product(b.call, dh);
  dx.hints.start = Start::kAfterPrevious;
  dx.hints.source = nullptr;
  launch([&](Steps& steps) { steps.add("dX~", dx); });
}

/// Whether dX of other ranks' tokens is summed before the weight gradients, on the whole GPU. In a
/// layer with many ranks and narrow experts, the partial sums then travel during dW2 already. Else
/// it is summed beside the weight gradients.
bool sums_come_first(const Run& run) {
  constexpr std::int64_t kNarrow = 512;
  return run.exchange.shape.ranks > 2 && run.layer.width < kNarrow;
}

/// Computes and sends dX of other ranks' tokens and the gradients of routing weights.
void send_sums(const Run& run, const Backward& b) {
  const Exchange& e = run.exchange;
  const bool first = sums_come_first(run);
  const auto send_dx = [&](const Exec& exec, cudaStream_t stream) {
    const Launch launch(run, b.pass, exec);
    for (std::int32_t p = 1; p < e.peers.ranks; ++p) {
      each_part(run, [&](const TokenPart& part) {
        TokenSum sum = b.sum(b.args.dx, tokens_of(run, p, part), nullptr);
        if (first) sum.start = Start::kAfterPrevious;
        launch([&](Steps& steps) { steps.add("dX", sum); });
        send_after(run, stream, partials_of(run, b.pass.metadata.token_offsets, p, part));
      });
    }
  };
  const bool has_dx = b.args.dx.data != nullptr;
  if (has_dx && first) send_dx(run.exec, run.stream);
  follow(e, e.aside, run.stream);
  if (has_dx && !first) send_dx(b.aside, e.aside);
  if (b.args.dweights.data == nullptr) return;
  const Launch launch(run, b.pass, b.aside);
  launch([&](Steps& steps) { add_score_grad(b.call, steps); });
  push_score_grads(e.peers, e.shape, run.memory.pairs, run.memory.score_grads, e.aside);
}

}  // namespace

void compute_forward(const Run& run, const ForwardArgs& args) {
  const Exchange& e = run.exchange;
  const StepMemory& m = run.memory;
  const Forward f(run, args);
  list_rows(run, f.pass.metadata);
  if (run.layer.capacity == 0) {
    run.wait({kPhaseRows}, run.stream);
    cuda::moe_forward(run.layer, f.args, run.exec);
    send_nothing(run);
    return;
  }
  const Launch launch(run, f.pass, run.exec);
  RowProduct a = up_product(f.pass, f.args, f.scratch);
  a.low_rank = up_term(run.layer, f.lora);
  RowProduct y =
      down_product(f.pass, f.args, f.scratch,
                   tensor2(f.scratch.y, run.layer.dtype, run.layer.capacity, run.layer.hidden));
  y.low_rank = down_term(f.lora);
  unsigned* counters = f.scratch.counters;
  const MetadataWork work{f.scratch.metadata, counters, kCounterBytes / 4};
  if (run.lists_positions()) {
    observed(run.exec, "metadata", [&] {
      sort_pairs(*e.device, run.layer, {m.pairs.expert, m.pairs.token}, f.pass.metadata, work,
                 run.stream);
    });
  }
  launch([&](Steps& steps) {
    if (!run.lists_positions()) steps.add("metadata", BuildMetadata{f.args.routing, work});
    add_factor_copies(f.lora, steps);
  });
  const SplitLists lists = lists_of(run, true);
  split_records(*e.device, run.layer, f.pass.metadata, lists, m.split, run.stream);
  const GatheredRows rows{run, lists, args.x, f.args.x, f.scratch.x, launch};
  int counter = 1 + kMostSourceGroups;
  const auto multiply_down = [&](const Metadata& list) {
    launch([&](Steps& steps) { steps.add("Y", part_of(y, list, counters, counter++)); });
  };
  const auto send_sums = [&](const SourceGroups& of, int g) {
    for (std::int32_t p = of.bounds[g]; p < of.bounds[g + 1]; ++p) {
      each_part(run, [&](const TokenPart& part) {
        launch([&](Steps& steps) {
          steps.add("O", f.sum(f.args.out, tokens_of(run, p, part), nullptr));
        });
        send_after(run, run.stream, partials_of(run, f.pass.metadata.token_offsets, p, part));
      });
    }
  };
  const Gathered gathered{"A", a, "P", up_inner_product(f.pass, f.args, f.lora)};
  const bool follows = follows_arrivals(run, lists);
  rows.multiply_own(gathered, counters);
  rows.multiply_others(gathered, counters, [&](int group) {
    if (!follows) return;
    multiply_down(m.split.arrivals[group]);
    if (group > 0) send_sums(lists.arrivals, group - 1);
  });
  launch([&](Steps& steps) { add_down_inner(f.pass, f.scratch.a.elements, f.lora, steps); });
  if (run.keeps_rows()) keep_rows(run);
  if (follows) send_sums(lists.arrivals, lists.arrivals.groups - 1);
  for (int g = 0; g < lists.sums.groups; ++g) {
    multiply_down(m.split.sums[g]);
    send_sums(lists.sums, g);
  }
  follow(e, e.sending, run.stream);
  if (run.keeps_rows()) follow(e, e.sending, e.aside);
  signal(*e.device, e.peers, kPhaseFree, e.sending);
  multiply_down(m.split.own);
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
    run.wait({part.phase}, run.stream);
    launch([&](Steps& steps) { steps.add("O", f.sum(args.out, own_of(run, part), &ranks)); });
  });
}

void compute_backward(const Run& run, const BackwardArgs& args) {
  const Exchange& e = run.exchange;
  Backward b(run, args);
  if (run.layer.capacity == 0) {
    run.wait({kPhaseRows}, run.stream);
    if (!run.keeps_rows()) run.wait({kPhaseAgain}, run.stream);
    cuda::moe_backward(run.layer, b.args, run.exec);
    send_nothing(run);
    announce(e, kPhaseScores, e.sending);
    return;
  }
  add_row_grads(run, b, args.dout);
  // Without input_grad_first, dS waits until the launches before it on its stream are complete.
  b.call.order.input_grad_first = false;
  send_sums(run, b);
  const Launch launch(run, b.pass, run.exec);
  launch([&](Steps& steps) {
    add_bias_grads(b.call, steps);
    // dW2 needs dH and the rows of dout, but not dX~. With input_grad_first it may start before dX~
    // is complete: dX~ launches the next kernel once dH is complete.
    b.call.order.input_grad_first = args.dx.data != nullptr;
    add_down_grad(b.call, steps);
    b.call.order.input_grad_first = false;
    add_down_factor_grads(b.call, false, steps);
  });
  // The wait increments `arrival` once the rows of x have come, then launches dW1, which may start
  // before dW2 is complete.
  if (!run.keeps_rows()) {
    b.call.arrival = b.scratch.counters + kArrivalCounter;
    run.wait({kPhaseAgain, ~std::uint64_t{0}, b.call.arrival}, run.stream);
  }
  launch([&](Steps& steps) {
    add_up_grads(b.call, steps);
    add_up_factor_grads(b.call, false, steps);
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
    run.wait({part.phase}, e.aside);
    launch([&](Steps& steps) { steps.add("dX", b.sum(args.dx, own_of(run, part), &ranks)); });
  });
}

}  // namespace sonicmoe::cuda
