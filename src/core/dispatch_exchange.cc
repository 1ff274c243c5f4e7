// The public functions of expert parallelism. Each checks its arguments, then calls the backend's
// function.
#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {
namespace {

std::int64_t bytes_of(const ExchangeShape& shape, const Exec& exec) {
  checks::exchange_shape(shape);
  return serve(exec, "exchange_bytes", &BackendTable::exchange_bytes)(shape, exec);
}

const ExchangeState& state_of(const Exchange& exchange, const Exec& exec) {
  return serve(exec, "exchange", &BackendTable::exchange_state)(exchange);
}

Sizes sizes_of(const Exchange& exchange, const Problem& problem, std::int64_t rows, Pass pass,
               const Exec& exec) {
  return serve(exec, "exchange_sizes", &BackendTable::exchange_sizes)(exchange, problem, rows, pass,
                                                                      exec);
}

/// The step that an exchange runs, whose next part must be `part`.
const ExchangeStep& running(const Exchange& exchange, Pass pass, ExchangePart part,
                            const Exec& exec) {
  const ExchangeState& state = state_of(exchange, exec);
  checks::exchange_order(state, pass, part);
  return state.step;
}

void check_kept(const Exchange& exchange, const ExchangeStep& step) {
  if (step.kept_x.data == nullptr) return;
  const std::int64_t needed = exchange_kept_bytes(exchange, step.problem, step.exec);
  checks::buffer(step.kept_x, "kept_x", needed, step.exec);
}

/// Checks what a forward knows only when it computes, and adds it to the step.
ExchangeStep with_buffers(const Exchange& exchange, ExchangeStep step, std::int64_t rows,
                          const ExchangeBuffers& buffers) {
  ForwardArgs& args = step.forward;
  step.rows = rows;
  args.h = buffers.h;
  args.saved = buffers.saved;
  args.scratch = buffers.scratch;
  step.kept_x = buffers.kept_x;
  const Pass pass = checks::forward_pass(args);
  checks::exchange_rows(state_of(exchange, step.exec).shape, step.problem, rows);
  checks::forward_buffers(args, sizes_of(exchange, step.problem, rows, pass, step.exec), step.exec);
  check_kept(exchange, step);
  checks::forward_overlap(args, {}, step.kept_x);
  return step;
}

ExchangeStep forward_step(const Exchange& exchange, const Problem& problem, const ForwardArgs& args,
                          const Exec& exec) {
  checks::exchange_forward(state_of(exchange, exec).shape, problem, args, exec);
  ExchangeStep step{.problem = problem, .forward = args, .exec = exec};
  step.forward.h = step.forward.saved = step.forward.scratch = {};
  checks::forward_overlap(step.forward);
  return step;
}

ExchangeStep backward_step(const Exchange& exchange, const Problem& problem, std::int64_t rows,
                           const BackwardArgs& args, const Exec& exec, const Buffer& kept_x) {
  const ExchangeShape& shape = state_of(exchange, exec).shape;
  checks::exchange_backward(shape, problem, args, exec);
  checks::exchange_rows(shape, problem, rows);
  checks::backward_buffers(args, sizes_of(exchange, problem, rows, Pass::kBackward, exec), exec);
  const ExchangeStep step{Pass::kBackward, problem, rows, {}, args, exec, kept_x};
  check_kept(exchange, step);
  checks::backward_overlap(args, {}, kept_x);
  return step;
}

/// Only begin looks for faults of earlier steps. The other parts of a step are enqueued even if the
/// host could already see a fault of this step.
void begin(Exchange& exchange, const ExchangeStep& step) {
  exchange_check(exchange, step.exec);
  running(exchange, step.pass, ExchangePart::kBegin, step.exec);
  serve(step.exec, "exchange_begin", &BackendTable::exchange_begin)(exchange, step);
}

ComputedStep compute(Exchange& exchange, const ExchangeStep& step) {
  serve(step.exec, "exchange_compute", &BackendTable::exchange_compute)(exchange, step);
  return {&exchange, step.pass, step.exec};
}

ComputedStep compute_forward(Exchange& exchange, std::int64_t rows, const ExchangeBuffers& buffers,
                             const Exec& exec) {
  const auto& begun = running(exchange, Pass::kForward, ExchangePart::kCompute, exec);
  return compute(exchange, with_buffers(exchange, begun, rows, buffers));
}

ComputedStep compute_backward(Exchange& exchange, const Exec& exec) {
  return compute(exchange, running(exchange, Pass::kBackward, ExchangePart::kCompute, exec));
}

}  // namespace

std::int64_t exchange_bytes(const ExchangeShape& shape, const Exec& exec) {
  return bytes_of(shape, exec);
}

Exchange* exchange_open(const ExchangeOptions& options, const Exec& exec) {
  checks::exchange_options(options, bytes_of(options.shape, exec), exec);
  return serve(exec, "exchange_open", &BackendTable::exchange_open)(options, exec);
}

void exchange_close(Exchange* exchange, const Exec& exec) {
  if (exchange == nullptr) return;
  checks::exec(exec);
  serve(exec, "exchange_close", &BackendTable::exchange_close)(exchange, exec);
}

void exchange_check(Exchange& exchange, const Exec& exec) {
  checks::exec(exec);
  serve(exec, "exchange_check", &BackendTable::exchange_check)(exchange, exec);
}

void exchange_reset(Exchange& exchange, const Exec& exec) {
  checks::exec(exec);
  serve(exec, "exchange_reset", &BackendTable::exchange_reset)(exchange, exec);
}

Sizes exchange_sizes(const Exchange& exchange, const Problem& problem, std::int64_t rows, Pass pass,
                     const Exec& exec) {
  const ExchangeShape& shape = state_of(exchange, exec).shape;
  checks::exchange_problem(shape, problem);
  checks::exchange_rows(shape, problem, rows);
  checks::moe_sizes(problem, pass, exec);
  return sizes_of(exchange, problem, rows, pass, exec);
}

std::int64_t exchange_kept_bytes(const Exchange& exchange, const Problem& problem,
                                 const Exec& exec) {
  const ExchangeShape& shape = state_of(exchange, exec).shape;
  checks::exchange_problem(shape, problem);
  return shape.ranks * shape.max_tokens * problem.hidden * dtype_bytes(shape.dtype);
}

BegunForward::BegunForward(Exchange& e, const Problem& problem, const ForwardArgs& args,
                           const Exec& x)
    : exchange(&e), exec(x) {
  begin(e, forward_step(e, problem, args, x));
}

std::int64_t BegunForward::rows() const { return exchange_rows(*exchange, exec); }

ComputedStep BegunForward::compute(std::int64_t rows, const ExchangeBuffers& buffers) && {
  return compute_forward(*exchange, rows, buffers, exec);
}

BegunBackward::BegunBackward(Exchange& e, const Problem& problem, std::int64_t rows,
                             const BackwardArgs& args, const Exec& x, const Buffer& kept_x)
    : exchange(&e), exec(x) {
  begin(e, backward_step(e, problem, rows, args, x, kept_x));
}

ComputedStep BegunBackward::compute() && { return compute_backward(*exchange, exec); }

void ComputedStep::finish() && {
  running(*exchange, pass, ExchangePart::kFinish, exec);
  serve(exec, "exchange_finish", &BackendTable::exchange_finish)(*exchange);
}

void exchange_forward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                      const ForwardArgs& args, ExchangePart part, const Exec& exec,
                      const Buffer& kept_x) {
  checks::exchange_part(part);
  const ExchangeBuffers buffers{args.h, args.saved, args.scratch, kept_x};
  if (part == ExchangePart::kAll) {
    const ExchangeStep begun = forward_step(exchange, problem, args, exec);
    const ExchangeStep step = with_buffers(exchange, begun, rows, buffers);
    begin(exchange, step);
    compute(exchange, step).finish();
  } else if (part == ExchangePart::kBegin) {
    BegunForward(exchange, problem, args, exec);
  } else if (part == ExchangePart::kCompute) {
    compute_forward(exchange, rows, buffers, exec);
  } else {
    ComputedStep{&exchange, Pass::kForward, exec}.finish();
  }
}

void exchange_backward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                       const BackwardArgs& args, ExchangePart part, const Exec& exec,
                       const Buffer& kept_x) {
  checks::exchange_part(part);
  if (part == ExchangePart::kAll) {
    BegunBackward(exchange, problem, rows, args, exec, kept_x).compute().finish();
  } else if (part == ExchangePart::kBegin) {
    BegunBackward(exchange, problem, rows, args, exec, kept_x);
  } else if (part == ExchangePart::kCompute) {
    compute_backward(exchange, exec);
  } else {
    ComputedStep{&exchange, Pass::kBackward, exec}.finish();
  }
}

std::int64_t exchange_rows(Exchange& exchange, const Exec& exec) {
  exchange_check(exchange, exec);
  running(exchange, Pass::kForward, ExchangePart::kCompute, exec);
  return serve(exec, "exchange_rows", &BackendTable::exchange_rows)(exchange);
}

}  // namespace sonicmoe
