// Forward and backward over all ranks: the parts of a step, and the transfers around the layer.
// Each rank runs the layer of one GPU (layer.cc) on the tokens of all ranks (W * max_tokens), with
// the list of pairs of its own experts as routing. The output of this layer is the rank's partial
// sums. Time runs to the right; "caller" is work that the caller enqueues between the parts:
//
//   exec.stream   routing | caller   | pairs, layer | caller   | sum
//   sending               | rows                    | partial sums
//   aside                 | own rows                       | sums of backward
#include "cuda/device/carver.h"
#include "cuda/exchange/step.h"
#include "cuda/layer/checks.h"
#include "cuda/layer/lora.h"
#include "cuda/layer/moe.h"

namespace sonicmoe::cuda {
namespace {

PairWork pair_work(const Exchange& exchange, const Problem& problem) {
  return {exchange.device, exchange.peers, exchange.shape, problem.experts / exchange.shape.ranks,
          exchange.limits};
}

OwnSlots own_slots(const Exchange& exchange, const Problem& problem, const Routing& routing) {
  const bool ids = problem.form == RoutingForm::kIds;
  return {.expert = ids ? routing.ids : routing.expert,
          .token = routing.token,
          .weight = routing.weights,
          .top_k = problem.top_k,
          .count = row_capacity(problem),
          .tokens = problem.tokens,
          .experts = problem.experts,
          .experts_per_rank = problem.experts / exchange.shape.ranks};
}

/// Begins the epochs of a step, makes the other streams wait for the caller's stream, and marks the
/// ranks of each token. Push kernels need the marks; copies of whole rows do not wait for them.
void begin_step(const Run& run, const OwnSlots& slots, std::uint32_t phases) {
  const Exchange& e = run.exchange;
  const auto mark = [&](cudaStream_t stream) {
    mark_ranks(*e.device, slots, e.peers.own<std::uint64_t>(e.layout.rank_masks), stream);
  };
  const bool pushes = e.transport == ExchangeTransport::kPush;
  begin_phases(*e.device, e.peers, phases, run.stream);
  if (pushes) mark(run.stream);
  for (cudaStream_t stream : {e.sending, e.aside}) follow(e, stream, run.stream);
  if (!pushes) mark(e.aside);
}

/// Waits until the other ranks have read the rows of the previous step, then announces that this
/// rank sends. From then on its rows need copy engines only, no multiprocessor.
///
/// More than two ranks begin together. A rank that began later would send to a rank that already
/// gets the next rank's rows, and both would have half of the link.
void begin_sending(const Run& run) {
  const Exchange& e = run.exchange;
  const bool copies = e.transport == ExchangeTransport::kCopy;
  if (copies && e.peers.ranks > 2) return meet(*e.device, e.peers, e.limits, e.sending);
  run.wait({kPhaseFree}, e.sending);
  if (copies) announce_by_kernel(*e.device, e.peers, kPhaseStarted, e.sending);
}
/// Makes the caller's stream wait for all work that was enqueued on the others.
void end_step(const Run& run) {
  const Exchange& e = run.exchange;
  for (cudaStream_t stream : {e.sending, e.aside}) follow(e, run.stream, stream);
}

/// Copies own rows on the stream `aside`, while the GPU makes the lists of pairs. They have arrived
/// for work that follows `aside`.
void copy_own(const Exchange& e, const Tensor& rows, std::int64_t offset) {
  copy_own_rows(e.peers, {rows.data, rows.stride[0], rows.shape[0], rows.shape[1]}, offset,
                e.aside);
}

/// The phases of forward and of backward.
constexpr std::uint32_t kBothPhases = phase_bit(kPhaseReady) | phase_bit(kPhaseStarted) |
                                      phase_bit(kPhaseRows) | phase_bit(kPhasePartials) |
                                      phase_bit(kPhaseMorePartials);
constexpr std::uint32_t kForwardPhases = kBothPhases | phase_bit(kPhaseRouting);
/// And kPhaseAgain, if x is sent again.
constexpr std::uint32_t kBackwardPhases = kBothPhases | phase_bit(kPhaseScores);

void begin_forward(const Run& run, const ForwardArgs& args) {
  const Exchange& e = run.exchange;
  const OwnSlots slots = own_slots(e, run.problem, args.routing);
  begin_step(run, slots, kForwardPhases);
  send_slots(*e.device, e.peers, e.shape, slots, run.stream);
  begin_sending(run);
  send_rows(e, args.x, {e.layout.x, kPhaseRows});
  copy_own(e, args.x, e.layout.x);
}

void begin_backward(const Run& run, const BackwardArgs& args) {
  const Exchange& e = run.exchange;
  const bool again = !run.keeps_rows();
  begin_step(run, own_slots(e, run.problem, args.routing),
             kBackwardPhases | (again ? phase_bit(kPhaseAgain) : 0));
  begin_sending(run);
  send_rows(e, args.dout, {e.layout.dout, kPhaseRows});
  if (again) send_rows(e, args.x, {e.layout.x, kPhaseAgain});
  copy_own(e, args.dout, e.layout.dout);
  if (again) copy_own(e, args.x, e.layout.x);
}

/// The gradients of routing weights arrive before the partial sums, and are taken while these
/// travel.
void take_scores(const Run& run, const BackwardArgs& args) {
  const Exchange& e = run.exchange;
  if (args.dweights.data == nullptr) return;
  run.wait({kPhaseScores}, e.aside);
  take_score_grads(e.peers, e.shape, own_slots(e, run.problem, args.routing), args.dweights,
                   e.aside);
}

/// Refuses what the layer of one rank does not serve.
void check_step(const Exchange& e, const ExchangeStep& step) {
  const Problem layer = layer_problem(e, step.problem, step.rows);
  const bool back = step.pass == Pass::kBackward;
  check_rows("x", back ? step.backward.x : step.forward.x);
  check_problem(layer, *e.device->engine);
  check_weights(layer, back ? step.backward.weights : step.forward.weights);
  if (!back) return check_rows("out", step.forward.out);
  check_rows("dout", step.backward.dout);
  if (step.backward.dx.data != nullptr) check_rows("dx", step.backward.dx);
  check_grads(layer, step.backward.weights, step.backward.grads);
  check_factor_grads(layer, step.backward);
}

/// Runs a part. If it throws in the middle, the other ranks wait for rows that are never sent. So
/// `next` is kAll meanwhile: after a throw every call is refused until exchange_reset().
template <class F>
void run_part(Exchange& exchange, ExchangePart next, const F& part) {
  const CurrentDevice current(*exchange.device);
  exchange.next = ExchangePart::kAll;
  part(Run(exchange));
  exchange.next = next;
}

}  // namespace

Problem layer_problem(const Exchange& exchange, const Problem& problem, std::int64_t rows) {
  Problem layer = problem;
  layer.form = RoutingForm::kPairs;
  layer.tokens = exchange.shape.ranks * exchange.shape.max_tokens;
  layer.experts = problem.experts / exchange.shape.ranks;
  layer.top_k = 0;
  layer.capacity = rows;
  return layer;
}

StepMemory step_memory(const Problem& layer, Pass pass, const StepBuffers& buffers,
                       const Exec& exec) {
  const Sizes sizes = cuda::moe_sizes(layer, pass, *device_of(exec).engine);
  Carver<256> saved(buffers.saved);
  Carver<256> scratch(buffers.scratch);
  Carver<256>& kept = pass == Pass::kInference ? scratch : saved;
  StepMemory m{};
  m.layer_saved = {kept.take<std::uint8_t>(sizes.saved_bytes), sizes.saved_bytes};
  m.pairs.token = kept.take<std::int32_t>(layer.capacity);
  m.pairs.weight = kept.take<float>(layer.capacity);
  m.pairs.slot = kept.take<std::int32_t>(layer.capacity);
  m.pairs.rows = layer.capacity;
  m.layer_scratch = {scratch.take<std::uint8_t>(sizes.scratch_bytes), sizes.scratch_bytes};
  m.split = record_split(layer, scratch.take<std::uint8_t>(record_split(layer, nullptr).bytes));
  m.partials = scratch.take<std::uint8_t>(layer.tokens * layer.hidden * dtype_bytes(layer.dtype));
  if (pass == Pass::kBackward) {
    m.score_grads = scratch.take<float>(layer.capacity);
  } else {
    m.pairs.expert = scratch.take<std::int32_t>(layer.capacity);
  }
  m.saved_bytes = saved.used();
  m.scratch_bytes = scratch.used();
  return m;
}

StepMemory step_memory(const Problem& layer, const ExchangeStep& step) {
  const bool back = step.pass == Pass::kBackward;
  void* saved = back ? step.backward.saved.data : step.forward.saved.data;
  void* scratch = back ? step.backward.scratch.data : step.forward.scratch.data;
  const Pass pass = back || saved != nullptr ? step.pass : Pass::kInference;
  return step_memory(layer, pass, {saved, scratch}, step.exec);
}

void list_rows(const Run& run, const Metadata& metadata) {
  run.wait({kPhaseRouting}, run.stream);
  const PairWork work = pair_work(run.exchange, run.problem);
  if (run.lists_positions()) {
    list_positions(work, run.memory.pairs, metadata.token_offsets, run.stream);
  } else {
    list_pairs(work, run.memory.pairs, run.stream);
  }
}

Sizes exchange_sizes(const Exchange& exchange, const Problem& problem, std::int64_t rows, Pass pass,
                     const Exec& exec) {
  check_handle(exchange, exec);
  const Problem layer = layer_problem(exchange, problem, rows);
  const StepMemory memory = step_memory(layer, pass, {}, exec);
  Sizes sizes = cuda::moe_sizes(layer, pass, *device_of(exec).engine);
  sizes.saved_bytes = pass == Pass::kInference ? 0 : memory.saved_bytes;
  sizes.scratch_bytes = memory.scratch_bytes;
  return sizes;
}

void exchange_begin(Exchange& exchange, const ExchangeStep& step) {
  check_step(exchange, step);
  exchange.step = step;
  run_part(exchange, ExchangePart::kCompute, [&](const Run& run) {
    step.pass == Pass::kBackward ? begin_backward(run, step.backward)
                                 : begin_forward(run, step.forward);
  });
}

std::int64_t exchange_rows(Exchange& exchange) {
  const CurrentDevice current(*exchange.device);
  const Exec& exec = exchange.step.exec;
  const cudaStream_t stream = stream_of(exec);
  void* count = nullptr;
  check_cuda(cudaHostGetDevicePointer(&count, exchange.row_count, 0), "mapping pinned memory");
  wait_for(*exchange.device, exchange.peers, {kPhaseRouting}, exchange.limits, stream);
  sum_pairs(pair_work(exchange, exchange.step.problem), static_cast<std::int64_t*>(count), stream);
  check_cuda(cudaStreamSynchronize(stream), "waiting for the number of rows");
  cuda::exchange_check(exchange, exec);
  return *exchange.row_count;
}

void exchange_compute(Exchange& exchange, const ExchangeStep& step) {
  exchange.step = step;
  run_part(exchange, ExchangePart::kFinish, [&](const Run& run) {
    step.pass == Pass::kBackward ? compute_backward(run, step.backward)
                                 : compute_forward(run, step.forward);
  });
}

void exchange_finish(Exchange& exchange) {
  const ExchangeStep& step = exchange.step;
  run_part(exchange, ExchangePart::kBegin, [&](const Run& run) {
    if (step.pass == Pass::kBackward) {
      take_scores(run, step.backward);
      finish_backward(run, step.backward);
    } else {
      finish_forward(run, step.forward);
    }
    end_step(run);
  });
}

}  // namespace sonicmoe::cuda
