// Sizes and capacities against arithmetic in 128 bits.
#include <algorithm>

#include "fuzz/world.h"

namespace sonicmoe::fuzz {
namespace {

using Wide = __int128;

void require(bool holds, const char* what) {
  if (!holds) throw Fault(what);
}

smoe_problem any_problem(Random& r) {
  const auto count = [&r](std::int64_t most) {
    if (r.percent(80)) return r.in(0, most);
    return r.pick<std::int64_t>({-1, 1LL << 20, (1LL << 30) + 4, INT32_MAX, (1LL << 31) - 8,
                                 1LL << 31, 1LL << 40, 1LL << 50, (1LL << 61) - 1, 1LL << 62,
                                 INT64_MAX, INT64_MIN});
  };
  smoe_problem p{};
  p.size = sizeof(p);
  p.form = static_cast<std::int32_t>(r.in(0, 2));
  p.dtype = static_cast<std::int32_t>(r.in(0, 3));
  p.activation = static_cast<std::int32_t>(r.in(0, kActivationCount - 1));
  p.tokens = count(5000);
  p.hidden = count(3000);
  p.width = count(3000);
  p.experts = count(300);
  if (p.form == SMOE_FORM_IDS) p.top_k = count(16);
  if (p.form == SMOE_FORM_PAIRS) p.capacity = count(9000);
  return p;
}

void fuzz_sizes(World& w) {
  Random& r = w.random;
  const smoe_problem p = any_problem(r);
  smoe_sizes s{};
  s.size = sizeof(s);
  const auto pass = static_cast<std::int32_t>(r.in(0, 2));
  const smoe_status status = smoe_moe_sizes(&p, pass, nullptr, &s);
  std::int64_t capacity = -1;
  require((smoe_row_capacity(&p, &capacity) == SMOE_OK) == (status == SMOE_OK),
          "row capacity and sizes disagree on what is refused");
  const Wide C = p.form == SMOE_FORM_IDS     ? static_cast<Wide>(p.tokens) * p.top_k
                 : p.form == SMOE_FORM_PAIRS ? p.capacity
                                             : p.tokens;
  const Wide most = Wide{1} << 31;
  const bool counts = p.tokens >= 0 && p.hidden >= 1 && p.width >= 1 && p.experts >= 1 &&
                      (p.form != SMOE_FORM_IDS || p.top_k >= 1) && C >= 0;
  const bool small = p.tokens < most && p.experts < most && C < most && p.top_k < most;
  const Wide G = smoe_activation_is_gated(p.activation) + 1;
  const Wide element = dtype_bytes(static_cast<DType>(p.dtype));
  if (status != SMOE_OK) {
    const bool modest = small && p.hidden <= 1 << 20 && p.width <= 1 << 20 && p.experts <= 512 &&
                        C <= 1 << 20 && p.tokens <= 1 << 20;
    require(!(counts && modest), "sizes of a modest problem are refused");
    require(!counts || status == SMOE_OUT_OF_RANGE, "too large a count is not OUT_OF_RANGE");
    return;
  }
  require(counts && small, "sizes of an impossible problem are accepted");
  require(capacity == C, "row capacity is wrong");
  const Wide h = pass == SMOE_INFERENCE ? 0 : G * C * p.width * element;
  require(s.h_bytes == h, "h_bytes is not G*C*n elements");
  const Wide least = pass == SMOE_BACKWARD ? G * C * p.width * element : C * p.width * element;
  require(s.scratch_bytes >= least, "scratch has no room for its rows");
  require(
      s.scratch_bytes <= 8 * (C + p.tokens + p.experts + 1) * (G * p.width + p.hidden + 1024) * 8,
      "scratch is far too large");
  require(s.saved_bytes >= 0 && s.saved_bytes <= 20 * C + 16 * static_cast<Wide>(p.tokens) +
                                                     1024 * static_cast<Wide>(p.experts),
          "saved_bytes is beyond its bound");
}

void fuzz_round_sizes(World& w) {
  Random& r = w.random;
  const auto count = [&r](std::int64_t most) {
    return r.percent(75) ? r.in(0, most)
                         : r.pick<std::int64_t>({-1, INT32_MAX, 1LL << 31, 1LL << 62, INT64_MAX});
  };
  smoe_route_options route{};
  route.size = sizeof(route);
  route.top_k = count(8);
  smoe_round_options options{};
  options.size = sizeof(options);
  options.route = &route;
  options.tile = count(300);
  options.mode = static_cast<std::int32_t>(r.in(-1, 6));
  const std::int64_t T = count(5000), E = count(300);
  std::int64_t capacity = -7, bytes = -7;
  const bool served = smoe_round_capacity(&options, T, E, &capacity) == SMOE_OK;
  const bool has_scratch = smoe_round_scratch_bytes(&options, T, E, nullptr, &bytes) == SMOE_OK;
  require(served == has_scratch, "capacity and scratch disagree on what is refused");
  if (!served) {
    require(capacity == -7 && bytes == -7, "a refused query wrote its result");
    return;
  }
  const Wide chosen = static_cast<Wide>(T) * route.top_k, every = static_cast<Wide>(T) * E;
  const Wide added = static_cast<Wide>(E) * (options.tile == 0 ? 128 : options.tile);
  const Wide want = options.mode == SMOE_ROUND_DOWN      ? chosen
                    : options.mode == SMOE_ROUND_NEAREST ? chosen + added / 2
                                                         : std::min(every, chosen + added);
  require(capacity == want, "the capacity of a rounding is wrong");
  require(bytes >= 8 * every, "the scratch of a rounding has no room for its keys");
}

void fuzz_scratch(World& w) {
  Random& r = w.random;
  const auto count = [&r] {
    return r.pick<std::int64_t>({INT64_MIN, -1, 0, 1, 8, 5000, INT32_MAX, 1LL << 31, INT64_MAX});
  };
  const std::int64_t rows = count(), experts = count();
  std::int64_t bytes = -7;
  const auto query = r.pick({&smoe_grouped_gemm_scratch_bytes, &smoe_expert_choice_scratch_bytes,
                             &smoe_router_losses_scratch_bytes});
  const smoe_status status = query(rows, experts, nullptr, &bytes);
  const bool valid = rows >= 0 && experts >= 1 && rows <= INT32_MAX && experts <= INT32_MAX;
  require(status != SMOE_OK || (valid && bytes == 0), "the CPU asks for scratch");
  require(status == SMOE_OK || bytes == -7, "a refused query wrote its result");
  require(!(valid && rows <= 5000 && experts <= 5000) || status == SMOE_OK,
          "a modest query is refused");
}

void fuzz_null(World& w) {
  std::int64_t result = 0;
  smoe_sizes sizes{};
  const std::function<smoe_status()> calls[] = {
      [] { return smoe_row_capacity(nullptr, nullptr); },
      [&] { return smoe_row_capacity(nullptr, &result); },
      [&] { return smoe_moe_sizes(nullptr, 0, nullptr, &sizes); },
      [] { return smoe_moe_sizes(nullptr, 0, nullptr, nullptr); },
      [] { return smoe_h_views(nullptr, nullptr, nullptr, 0, nullptr, nullptr, nullptr); },
      [] { return smoe_moe_forward(nullptr, nullptr, nullptr); },
      [] { return smoe_moe_backward(nullptr, nullptr, nullptr); },
      [] { return smoe_route(nullptr, nullptr, nullptr, nullptr, nullptr); },
      [&] { return smoe_round_capacity(nullptr, 1, 1, &result); },
      [] { return smoe_grouped_gemm(nullptr, nullptr); },
      [] { return smoe_grouped_gemm_k(nullptr, nullptr); },
      [] { return smoe_grouped_gemm_scratch_bytes(1, 1, nullptr, nullptr); },
      [] { return smoe_exchange_kept_bytes(nullptr, nullptr, nullptr, nullptr); },
      [&] { return smoe_exchange_kept_bytes(nullptr, nullptr, nullptr, &result); },
      [] { return smoe_exchange_forward(nullptr, nullptr, 0, nullptr, 0, nullptr); },
      [] { return smoe_exchange_backward(nullptr, nullptr, 0, nullptr, 0, nullptr); },
      [] { return smoe_device_open(0, nullptr); },
      [] { return smoe_device_open(-1, nullptr); },
      [] { return smoe_device_open_with(nullptr, nullptr); },
  };
  const auto& call = calls[w.random.in(0, static_cast<std::int64_t>(std::size(calls)) - 1)];
  require(call() == SMOE_INVALID_ARGUMENT, "a null argument is not INVALID_ARGUMENT");
  require(smoe_engine_name(-1) == nullptr, "engine -1 has a name");
  require(smoe_device_engine(nullptr) == nullptr, "no device has an engine");
  require(smoe_device_engine_note(nullptr) == nullptr, "no device has a note");
  require(smoe_device_close(nullptr) == SMOE_OK, "closing no device is refused");
}

}  // namespace

void fuzz_queries(World& world) {
  const std::int64_t which = world.random.in(0, 9);
  if (which < 5) return fuzz_sizes(world);
  if (which < 8) return fuzz_round_sizes(world);
  which == 8 ? fuzz_scratch(world) : fuzz_null(world);
}

}  // namespace sonicmoe::fuzz
