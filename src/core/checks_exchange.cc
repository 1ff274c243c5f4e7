// The checks of expert parallelism.
#include <string>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"
#include "core/exchange_limits.h"

namespace sonicmoe::checks {
namespace {

constexpr std::int32_t kTransportCount = 3;
constexpr std::int32_t kPartCount = 4;
constexpr std::uintptr_t kBufferAlignment = 256;

void at_most(const char* name, std::int64_t value, std::int64_t most, const char* what) {
  if (value <= most) return;
  refuse(std::string(name) + " is " + std::to_string(value) + ", must be at most " +
         std::to_string(most) + ", " + what);
}

/// The layer of one rank: this rank's tokens, its own experts.
Problem own_problem(const ExchangeShape& shape, const Problem& problem) {
  Problem own = problem;
  own.experts /= shape.ranks;
  return own;
}

}  // namespace

void exchange_shape(const ExchangeShape& s) {
  at_least("shape.ranks", s.ranks, 1);
  at_most("shape.ranks", s.ranks, kMaxRanks, "the most that an exchange has");
  at_least("shape.max_tokens", s.max_tokens, 1);
  at_least("shape.max_slots", s.max_slots, 1);
  at_least("shape.hidden", s.hidden, 1);
  constexpr DTypes kRows = {DType::kBF16, DType::kF16};
  if (!kRows.contains(s.dtype)) {
    refuse(Status::kUnsupported,
           std::string("shape.dtype is ") + dtype_name(s.dtype) + ", must be " + kRows.text());
  }
  below_2_31("shape.ranks * shape.max_tokens",
             product("shape.ranks * shape.max_tokens", {s.ranks, s.max_tokens}));
  below_2_31("shape.ranks * shape.max_slots",
             product("shape.ranks * shape.max_slots", {s.ranks, s.max_slots}));
  array_bytes("shape.ranks * shape.max_tokens * shape.hidden in bytes",
              {s.ranks, s.max_tokens, s.hidden, dtype_bytes(s.dtype)});
}

void exchange_options(const ExchangeOptions& o, std::int64_t needed, const Exec& exec) {
  checks::exec(exec);
  at_least("rank", o.rank, 0);
  at_most("rank", o.rank, o.shape.ranks - 1, "the last rank");
  known("transport", static_cast<std::int32_t>(o.transport), kTransportCount);
  at_least("time_limit_ms", o.time_limit_ms, 0);
  at_most("time_limit_ms", o.time_limit_ms, std::int64_t{1} << 32, "49 days");
  at_least("multiprocessors", o.multiprocessors, 0);
  at_most("multiprocessors", o.multiprocessors, 1024, "more than a GPU has");
  if (o.buffers == nullptr) refuse("buffers is null, must be an address for each rank");
  for (std::int32_t r = 0; r < o.shape.ranks; ++r) {
    const auto address = reinterpret_cast<std::uintptr_t>(o.buffers[r]);
    if (address == 0 || address % kBufferAlignment != 0) {
      refuse("buffers[" + std::to_string(r) + "] is " +
             (address == 0 ? "null" : "not 256-byte aligned") +
             ", must be the symmetric buffer of that rank");
    }
  }
  if (o.buffer_bytes < needed) {
    refuse(Status::kWorkspaceTooSmall, "buffer_bytes is " + std::to_string(o.buffer_bytes) +
                                           ", must be at least " + std::to_string(needed));
  }
}

void exchange_problem(const ExchangeShape& s, const Problem& p) {
  problem(p);
  if (p.form == RoutingForm::kGrouped) {
    refuse(Status::kUnsupported,
           "form is grouped, must be ids or pairs: an exchange needs to know each token's experts");
  }
  if (p.dtype != s.dtype) {
    refuse(std::string("dtype is ") + dtype_name(p.dtype) + ", must be " + dtype_name(s.dtype) +
           " as in the exchange's shape");
  }
  at_most("tokens", p.tokens, s.max_tokens, "the exchange's max_tokens");
  at_most("hidden", p.hidden, s.hidden, "the exchange's hidden");
  at_most("slots", checks::rows(p), s.max_slots, "the exchange's max_slots");
  if (p.experts % s.ranks != 0) {
    refuse("experts is " + std::to_string(p.experts) + ", must be a multiple of the " +
           std::to_string(s.ranks) + " ranks");
  }
}

void exchange_rows(const ExchangeShape& s, const Problem& p, std::int64_t rows) {
  at_least("rows", rows, 0);
  below_2_31("rows", rows);
  Problem layer = own_problem(s, p);
  layer.form = RoutingForm::kPairs;
  layer.top_k = 0;
  layer.tokens = s.ranks * s.max_tokens;
  layer.capacity = rows;
  problem(layer);
}

void exchange_part(ExchangePart part) {
  known("part", static_cast<std::int32_t>(part), kPartCount);
}

void exchange_order(const ExchangeState& state, Pass pass, ExchangePart part) {
  if (state.next == part && (part == ExchangePart::kBegin || state.step.pass == pass)) return;
  constexpr const char* kNames[kPartCount] = {"kAll", "kBegin", "kCompute", "kFinish"};
  const auto name = [&](ExchangePart p, Pass of) {
    return std::string(kNames[static_cast<int>(p)]) + " of " +
           (of == Pass::kBackward ? "exchange_backward" : "exchange_forward");
  };
  const std::string asked = "part is " + name(part, pass) + " but ";
  if (state.next == ExchangePart::kAll) {
    refuse(asked +
           "a part of the step has failed; exchange_reset on all ranks makes the exchange usable "
           "again.");
  }
  refuse(asked + "the next part must be " +
         (state.next == ExchangePart::kBegin ? "kBegin" : name(state.next, state.step.pass)) +
         "; exchange_reset on all ranks gives a step up.");
}

void exchange_forward(const ExchangeShape& s, const Problem& p, const ForwardArgs& args,
                      const Exec& exec) {
  exchange_problem(s, p);
  checks::moe_forward(own_problem(s, p), args, exec);
  fp8_weights(own_problem(s, p), args.fp8_weights, exec);
}

void exchange_backward(const ExchangeShape& s, const Problem& p, const BackwardArgs& args,
                       const Exec& exec) {
  exchange_problem(s, p);
  checks::moe_backward(own_problem(s, p), args, exec);
  fp8_weights(own_problem(s, p), args.fp8_weights, exec);
}

}  // namespace sonicmoe::checks
