// The checks of low-rank factors.
#include <string>

#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe::checks {
namespace {

// A tensor of a projection's factors and the shape it must have.
struct FactorRule {
  LowRank Lora::* projection;
  Tensor LowRank::* member;
  const char* name;
  const char* grad_name;
  Shape shape;
};
struct FactorRules {
  FactorRule rule[5];
};
FactorRules factor_rules(const Problem& p) {
  const Dim d{"d", p.hidden}, n{"n", p.width}, E{"E", p.experts};
  const Dim up{"r", p.up_rank}, down{"r", p.down_rank};
  return {{{&Lora::up, &LowRank::a, "lora.up.a", "lora_grads.up.a", {E, up, d}},
           {&Lora::up, &LowRank::b, "lora.up.b", "lora_grads.up.b", {E, n, up}},
           {&Lora::up, &LowRank::gate_b, "lora.up.gate_b", "lora_grads.up.gate_b", {E, n, up}},
           {&Lora::down, &LowRank::a, "lora.down.a", "lora_grads.down.a", {E, down, n}},
           {&Lora::down, &LowRank::b, "lora.down.b", "lora_grads.down.b", {E, d, down}}}};
}

bool is_gate(const FactorRule& rule) { return rule.member == &LowRank::gate_b; }

std::int64_t rank_of(const Problem& p, const FactorRule& rule) {
  return rule.projection == &Lora::up ? p.up_rank : p.down_rank;
}

}  // namespace

void low_rank(const Problem& p) {
  at_least("up_rank", p.up_rank, 0);
  at_least("down_rank", p.down_rank, 0);
  below_2_31("up_rank", p.up_rank);
  below_2_31("down_rank", p.down_rank);
  if (p.f32_factors && p.dtype == DType::kF64) {
    refuse("f32_factors is true, must be false: a layer in f64 has factors in f64");
  }
  if (p.up_rank == 0 && p.down_rank == 0) return;
  constexpr std::int64_t kBytes = 8;  // of the widest dtype
  array_bytes("C * up_rank in bytes", {kBytes, rows(p), p.up_rank});
  array_bytes("C * down_rank in bytes", {kBytes, rows(p), p.down_rank});
  for (const FactorRule& r : factor_rules(p).rule) {
    array_bytes(r.name, {kBytes, r.shape.dims[0].size, r.shape.dims[1].size, r.shape.dims[2].size});
  }
}

void factors(const Problem& p, const Lora& lora) {
  finite("lora.up.scale", lora.up.scale);
  finite("lora.down.scale", lora.down.scale);
  absent(lora.down.gate_b, "lora.down.gate_b", "only the up-projection has a gate");
  const DType dtype = p.f32_factors ? DType::kF32 : p.dtype;
  for (const FactorRule& r : factor_rules(p).rule) {
    const Tensor& t = lora.*r.projection.*r.member;
    if (rank_of(p, r) == 0) {
      absent(t, r.name, "the problem has rank 0 for this projection");
    } else if (is_gate(r) && !is_gated(p.activation.kind)) {
      const std::string reason = std::string(activation_name(p.activation.kind)) + " has no gate";
      absent(t, r.name, reason.c_str());
    } else {
      input(t, r.name, r.shape, dtype);
    }
  }
}

void factor_grads(const Problem& p, const BackwardArgs& args, DTypes dtypes) {
  absent(args.lora_grads.down.gate_b, "lora_grads.down.gate_b",
         "only the up-projection has a gate");
  for (const FactorRule& r : factor_rules(p).rule) {
    const Tensor& grad = args.lora_grads.*r.projection.*r.member;
    if (!given(grad)) continue;
    if (!given(args.lora.*r.projection.*r.member)) {
      refuse(std::string(r.grad_name) + " is given, must be empty: " + r.name + " is not given");
    }
    output(grad, r.grad_name, r.shape, dtypes);
  }
}

}  // namespace sonicmoe::checks
