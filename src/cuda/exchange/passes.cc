// Forward and backward over all ranks: the parts of a step, and the transfers around the layer.
// Each rank runs the layer of one GPU (layer.cc) on the tokens of all ranks (W * max_tokens), with
// the list of pairs of its own experts as routing. The output of this layer is the rank's partial
// sums. Time runs to the right; "caller" is work that the caller enqueues between the parts:
//
//   exec.stream   routing | caller   | pairs, layer | caller   | sum
//   sending               | rows                    | partial sums
//   aside                 | own rows                       | sums of backward
#include <string>

#include "cuda/device/carver.h"
#include "cuda/exchange/step.h"
#include "cuda/layer/checks.h"
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

/// Begins the epochs of a step, marks the ranks of each token, and makes the other streams wait for
/// the caller's stream.
void begin_step(const Run& run, const OwnSlots& slots, std::uint32_t phases) {
  const Exchange& e = run.exchange;
  begin_phases(*e.device, e.peers, phases, run.stream);
  mark_ranks(*e.device, slots, e.peers.own<std::uint64_t>(e.layout.rank_masks), run.stream);
  for (cudaStream_t stream : {e.sending, e.aside}) follow(e, stream, run.stream);
}

/// Waits until the other ranks have read the rows of the previous step, then announces that this
/// rank sends. From then on its rows need copy engines only, no multiprocessor.
void begin_sending(const Run& run) {
  const Exchange& e = run.exchange;
  run.wait({kPhaseFree}, e.sending);
  if (e.transport == ExchangeTransport::kCopy) {
    announce_by_kernel(*e.device, e.peers, kPhaseStarted, e.sending);
  }
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

const char* part_name(ExchangePart part) {
  return part == ExchangePart::kBegin     ? "kBegin"
         : part == ExchangePart::kCompute ? "kCompute"
                                          : "kFinish";
}
const char* pass_name(Pass pass) {
  return pass == Pass::kBackward ? "exchange_backward" : "exchange_forward";
}

/// Refuses a part that is not the next one of this pass.
void check_part(const Exchange& exchange, Pass pass, ExchangePart part) {
  const Exchange::Step& step = exchange.step;
  if (step.next == part && (part == ExchangePart::kBegin || step.pass == pass)) return;
  const std::string asked = std::string("part is ") + part_name(part) + " of " + pass_name(pass);
  if (step.next == ExchangePart::kAll) {
    throw Error(Status::kInvalidArgument,
                asked +
                    " but a part of the step has failed; exchange_reset on all ranks makes the "
                    "exchange usable again.");
  }
  throw Error(
      Status::kInvalidArgument,
      asked + " but the next part must be " + part_name(step.next) +
          (step.next == ExchangePart::kBegin ? "" : std::string(" of ") + pass_name(step.pass)) +
          "; exchange_reset on all ranks gives a step up.");
}

/// The checks of a part before any work. Only the first part checks for faults of earlier steps.
/// The later parts are always enqueued, even if the host could already see a fault of this step.
void check_call(Exchange& exchange, ExchangePart part, const Exec& exec) {
  const bool first = part == ExchangePart::kBegin || part == ExchangePart::kAll;
  first ? cuda::exchange_check(exchange, exec) : check_handle(exchange, exec);
}

/// Runs one part, or all of them. If a part throws in the middle, the other ranks wait for rows
/// that are never sent. So `next` is kAll while a part runs: after a throw every call is refused
/// until exchange_reset().
template <class Begin, class Compute, class Finish>
void run_parts(Exchange& exchange, Pass pass, ExchangePart part, const Begin& begin,
               const Compute& compute, const Finish& finish) {
  const auto one = [&](ExchangePart which, ExchangePart next, const auto& work) {
    if (part != ExchangePart::kAll && part != which) return;
    exchange.step = {pass, ExchangePart::kAll};
    work();
    exchange.step.next = next;
  };
  check_part(exchange, pass, part == ExchangePart::kAll ? ExchangePart::kBegin : part);
  one(ExchangePart::kBegin, ExchangePart::kCompute, begin);
  one(ExchangePart::kCompute, ExchangePart::kFinish, compute);
  one(ExchangePart::kFinish, ExchangePart::kBegin, finish);
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
  m.pairs.has_row = kept.take<std::uint8_t>(layer.tokens);
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

std::int64_t exchange_rows(Exchange& exchange, const Problem& problem, const Exec& exec) {
  const CurrentDevice current(*exchange.device);
  cuda::exchange_check(exchange, exec);
  check_part(exchange, Pass::kForward, ExchangePart::kCompute);
  const cudaStream_t stream = stream_of(exec);
  void* count = nullptr;
  check_cuda(cudaHostGetDevicePointer(&count, exchange.row_count, 0), "mapping pinned memory");
  wait_for(*exchange.device, exchange.peers, {kPhaseRouting}, exchange.limits, stream);
  const PairWork work = pair_work(exchange, problem);
  count_pairs(work, nullptr, stream);
  sum_pairs(work, static_cast<std::int64_t*>(count), stream);
  check_cuda(cudaStreamSynchronize(stream), "waiting for the number of rows");
  cuda::exchange_check(exchange, exec);
  return *exchange.row_count;
}

void exchange_forward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                      const ForwardArgs& args, ExchangePart part, const Exec& exec) {
  check_call(exchange, part, exec);
  check_rows("x", args.x);
  check_rows("out", args.out);
  const Pass pass = args.saved.data == nullptr ? Pass::kInference : Pass::kForward;
  const Run run(exchange, problem, rows, pass, {args.saved.data, args.scratch.data}, exec);
  check_problem(run.layer, *exchange.device->engine);
  check_weights(run.layer, args.weights);
  const auto begin = [&] {
    const OwnSlots slots = own_slots(exchange, problem, args.routing);
    begin_step(run, slots,
               phase_bit(kPhaseRouting) | phase_bit(kPhaseStarted) | phase_bit(kPhaseRows) |
                   phase_bit(kPhasePartials) | phase_bit(kPhaseMorePartials));
    send_slots(*exchange.device, exchange.peers, exchange.shape, slots, run.stream);
    announce_by_kernel(*exchange.device, exchange.peers, kPhaseRouting, run.stream);
    begin_sending(run);
    send_rows(exchange, args.x, {exchange.layout.x, kPhaseRows});
    copy_own(exchange, args.x, exchange.layout.x);
  };
  const auto compute = [&] {
    run.wait({kPhaseRouting}, run.stream);
    const PairWork work = pair_work(exchange, problem);
    count_pairs(work, &run.memory.pairs, run.stream);
    list_pairs(work, run.memory.pairs, run.stream);
    compute_forward(run, args);
  };
  const auto finish = [&] {
    finish_forward(run, args);
    end_step(run);
  };
  run_parts(exchange, Pass::kForward, part, begin, compute, finish);
}

void exchange_backward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                       const BackwardArgs& args, ExchangePart part, const Exec& exec) {
  check_call(exchange, part, exec);
  check_rows("x", args.x);
  check_rows("dout", args.dout);
  if (args.dx.data != nullptr) check_rows("dx", args.dx);
  const Run run(exchange, problem, rows, Pass::kBackward, {args.saved.data, args.scratch.data},
                exec);
  check_problem(run.layer, *exchange.device->engine);
  check_weights(run.layer, args.weights);
  check_grads(run.layer, args.weights, args.grads);
  const OwnSlots slots = own_slots(exchange, problem, args.routing);
  const auto begin = [&] {
    begin_step(run, slots,
               phase_bit(kPhaseStarted) | phase_bit(kPhaseRows) | phase_bit(kPhaseAgain) |
                   phase_bit(kPhasePartials) | phase_bit(kPhaseMorePartials) |
                   phase_bit(kPhaseScores));
    begin_sending(run);
    send_rows(exchange, args.dout, {exchange.layout.dout, kPhaseRows});
    send_rows(exchange, args.x, {exchange.layout.x, kPhaseAgain});
    copy_own(exchange, args.dout, exchange.layout.dout);
    copy_own(exchange, args.x, exchange.layout.x);
  };
  const auto compute = [&] { compute_backward(run, args); };
  const auto finish = [&] {
    // The gradients of routing weights arrive first, and are taken while partial sums travel.
    if (args.dweights.data != nullptr) {
      run.wait({kPhaseScores}, exchange.aside);
      take_score_grads(exchange.peers, exchange.shape, slots, args.dweights, exchange.aside);
    }
    finish_backward(run, args);
    end_step(run);
  };
  run_parts(exchange, Pass::kBackward, part, begin, compute, finish);
}

}  // namespace sonicmoe::cuda
