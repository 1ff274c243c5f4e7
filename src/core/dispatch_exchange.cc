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

const ExchangeShape& shape_of(const Exchange& exchange, const Exec& exec) {
  return serve(exec, "exchange", &BackendTable::exchange_shape)(exchange);
}

Sizes sizes_of(const Exchange& exchange, const Problem& problem, std::int64_t rows, Pass pass,
               const Exec& exec) {
  return serve(exec, "exchange_sizes", &BackendTable::exchange_sizes)(exchange, problem, rows, pass,
                                                                      exec);
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

std::int64_t exchange_rows(Exchange& exchange, const Problem& problem, const Exec& exec) {
  checks::exec(exec);
  checks::exchange_problem(shape_of(exchange, exec), problem, 0);
  return serve(exec, "exchange_rows", &BackendTable::exchange_rows)(exchange, problem, exec);
}

Sizes exchange_sizes(const Exchange& exchange, const Problem& problem, std::int64_t rows, Pass pass,
                     const Exec& exec) {
  checks::exchange_problem(shape_of(exchange, exec), problem, rows);
  checks::moe_sizes(problem, pass, exec);
  return sizes_of(exchange, problem, rows, pass, exec);
}

void exchange_forward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                      const ForwardArgs& args, ExchangePart part, const Exec& exec) {
  const ExchangeShape& shape = shape_of(exchange, exec);
  checks::exchange_problem(shape, problem, rows);
  checks::exchange_forward(shape, problem, args, part, exec);
  // Before kCompute the caller may not know `rows`, so it has no buffers yet.
  if (part != ExchangePart::kBegin) {
    checks::forward_buffers(
        args, sizes_of(exchange, problem, rows, checks::forward_pass(args), exec), exec);
  }
  checks::forward_overlap(args);
  serve(exec, "exchange_forward", &BackendTable::exchange_forward)(exchange, problem, rows, args,
                                                                   part, exec);
}

void exchange_backward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                       const BackwardArgs& args, ExchangePart part, const Exec& exec) {
  const ExchangeShape& shape = shape_of(exchange, exec);
  checks::exchange_problem(shape, problem, rows);
  checks::exchange_backward(shape, problem, args, part, exec);
  checks::backward_buffers(args, sizes_of(exchange, problem, rows, Pass::kBackward, exec), exec);
  checks::backward_overlap(args);
  serve(exec, "exchange_backward", &BackendTable::exchange_backward)(exchange, problem, rows, args,
                                                                     part, exec);
}

}  // namespace sonicmoe
