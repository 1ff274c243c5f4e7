// The C functions of expert parallelism.
#include "sonicmoe/exchange.h"

#include "capi/convert.h"

using namespace sonicmoe;

namespace {

ExchangeOptions options_of(const smoe_exchange_options* given) {
  const smoe_exchange_options o = capi::read(given, "options");
  ExchangeOptions options;
  options.shape = {o.ranks, o.max_tokens, o.max_slots, o.hidden, static_cast<DType>(o.dtype)};
  options.rank = o.rank;
  options.buffers = o.buffers;
  options.buffer_bytes = o.buffer_bytes;
  options.time_limit_ms = o.time_limit_ms;
  options.multiprocessors = o.multiprocessors;
  options.transport = static_cast<ExchangeTransport>(o.transport);
  return options;
}

Exchange& exchange_of(const smoe_exchange* given) {
  capi::refuse_null(given, "exchange");
  return *const_cast<Exchange*>(reinterpret_cast<const Exchange*>(given));
}

}  // namespace

extern "C" {

smoe_status smoe_exchange_bytes(const smoe_exchange_options* options, const smoe_exec* exec,
                                int64_t* bytes) {
  return capi::guarded([&] {
    capi::refuse_null(bytes, "bytes");
    *bytes = exchange_bytes(options_of(options).shape, capi::exec(exec));
  });
}

smoe_status smoe_exchange_open(const smoe_exchange_options* options, const smoe_exec* exec,
                               smoe_exchange** exchange) {
  return capi::guarded([&] {
    capi::refuse_null(exchange, "exchange");
    *exchange =
        reinterpret_cast<smoe_exchange*>(exchange_open(options_of(options), capi::exec(exec)));
  });
}

smoe_status smoe_exchange_close(smoe_exchange* exchange, const smoe_exec* exec) {
  return capi::guarded([&] {
    if (exchange == nullptr) return;  // also without exec
    exchange_close(reinterpret_cast<Exchange*>(exchange), capi::exec(exec));
  });
}

smoe_status smoe_exchange_check(smoe_exchange* exchange, const smoe_exec* exec) {
  return capi::guarded([&] { exchange_check(exchange_of(exchange), capi::exec(exec)); });
}

smoe_status smoe_exchange_reset(smoe_exchange* exchange, const smoe_exec* exec) {
  return capi::guarded([&] { exchange_reset(exchange_of(exchange), capi::exec(exec)); });
}

smoe_status smoe_exchange_rows(smoe_exchange* exchange, const smoe_problem* problem,
                               const smoe_exec* exec, int64_t* rows) {
  return capi::guarded([&] {
    capi::refuse_null(rows, "rows");
    capi::problem(problem);  // the step has it
    *rows = exchange_rows(exchange_of(exchange), capi::exec(exec));
  });
}

smoe_status smoe_exchange_sizes(const smoe_exchange* exchange, const smoe_problem* problem,
                                int64_t rows, int32_t pass, const smoe_exec* exec,
                                smoe_sizes* sizes) {
  return capi::guarded([&] {
    capi::write_sizes(sizes, [&] {
      return exchange_sizes(exchange_of(exchange), capi::problem(problem), rows,
                            static_cast<Pass>(pass), capi::exec(exec));
    });
  });
}

smoe_status smoe_exchange_kept_bytes(const smoe_exchange* exchange, const smoe_problem* problem,
                                     const smoe_exec* exec, int64_t* bytes) {
  return capi::guarded([&] {
    capi::refuse_null(bytes, "bytes");
    const Exchange& of = exchange_of(exchange);
    *bytes = exchange_kept_bytes(of, capi::problem(problem), capi::exec(exec));
  });
}

smoe_status smoe_exchange_forward(smoe_exchange* exchange, const smoe_problem* problem,
                                  int64_t rows, const smoe_forward_args* args, int32_t part,
                                  const smoe_exec* exec) {
  return capi::guarded([&] {
    exchange_forward(exchange_of(exchange), capi::problem(problem), rows, capi::forward_args(args),
                     static_cast<ExchangePart>(part), capi::exec(exec), capi::kept_rows(args));
  });
}

smoe_status smoe_exchange_backward(smoe_exchange* exchange, const smoe_problem* problem,
                                   int64_t rows, const smoe_backward_args* args, int32_t part,
                                   const smoe_exec* exec) {
  return capi::guarded([&] {
    exchange_backward(exchange_of(exchange), capi::problem(problem), rows,
                      capi::backward_args(args), static_cast<ExchangePart>(part), capi::exec(exec),
                      capi::kept_rows(args));
  });
}

}  // extern "C"
