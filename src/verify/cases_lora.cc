// The cases of low-rank factors: cases of the layer, with factors on top.
#include <iterator>

#include "verify/cases.h"

namespace sonicmoe::verify {
namespace {

struct Ranks {
  std::int64_t up, down;
};
// Below, at and above the 64 columns of a tile of depth; one projection alone.
constexpr Ranks kRanks[] = {{8, 16}, {64, 8}, {16, 72}, {24, 0}, {0, 40}, {136, 64}};
// Ranks that only the CPU serves.
constexpr Ranks kOddRanks[] = {{1, 5}, {7, 3}, {65, 1}};

bool begins(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

// Whether a case of the layer also runs with factors.
bool takes_factors(Extent extent, const Case& c) {
  if (c.subject != Subject::kLayer || c.cancelling || c.bias_shift != 0.0) return false;
  const std::string& name = c.name;
  if (c.problem.precision == Precision::kFp8) {
    // Inner rows add to the integers of fp8, which then leave those that e4m3 holds.
    if (c.data == Data::kIntegers) return false;
    if (begins(name, "fp8/shape/")) return c.cpu_only || c.data == Data::kRoundings;
    return begins(name, "fp8/routing/") || begins(name, "fp8/activation/tail_") ||
           begins(name, "fp8/large/");
  }
  if (begins(name, "routing/")) {
    const bool quick = c.data == Data::kRandom || c.pattern == Pattern::kDistinct;
    return extent == Extent::kFull || (c.problem.dtype != DType::kF32 && quick);
  }
  if (begins(name, "activation/")) return c.problem.dtype != DType::kF16 && c.bias;
  if (begins(name, "shape/")) return c.cpu_only || extent == Extent::kFull;
  return begins(name, "layout/") || begins(name, "grads/") || begins(name, "batch/") ||
         begins(name, "wide/");
}

}  // namespace

void add_lora_cases(Extent extent, std::vector<Case>& cases) {
  std::vector<Case> more, in_fp8;
  for (const Case& c : cases) {
    if (!takes_factors(extent, c)) continue;
    Case with = c;
    // Not "lora/" + c.name: a filter that names one case must not find two.
    with.name = c.name;
    with.name.replace(c.name.find('/'), 1, "-").insert(0, "lora/");
    const std::size_t i = more.size();
    const Ranks ranks =
        c.cpu_only ? kOddRanks[i % std::size(kOddRanks)] : kRanks[i % std::size(kRanks)];
    with.problem.up_rank = ranks.up;
    with.problem.down_rank = ranks.down;
    with.problem.f32_factors = c.problem.dtype != DType::kF64 && i % 4 == 3;
    more.push_back(std::move(with));
  }
  // A frozen layer: the gradients of the factors and of the tokens alone, written and added.
  for (const GradMode mode : {GradMode::kWrite, GradMode::kAccumulate}) {
    for (const Layout layout : {Layout::kConcatenated, Layout::kPaired}) {
      Case c;
      c.name = std::string("lora/frozen_") + (mode == GradMode::kWrite ? "written" : "added") +
               (layout == Layout::kPaired ? "_paired" : "") + "/bf16/random";
      c.problem = {.tokens = 90, .hidden = 32, .width = 24, .experts = 6, .top_k = 2};
      c.problem.dtype = DType::kBF16;
      c.problem.up_rank = 16;
      c.problem.down_rank = 8;
      c.problem.f32_factors = true;
      c.pattern = Pattern::kCounts;
      c.counts = {40, 0, 65, 1, 0, 70};
      c.layout = layout;
      c.grad_dtype = DType::kF32;
      c.grad_mode = mode;
      c.bias = true;
      c.wanted = {"dx", "dweights", "dup.a", "dup.b", "dup.gate_b", "ddown.a", "ddown.b"};
      more.push_back(c);
    }
  }
  // In fp8, with a last block of 64 in d and n.
  for (const Data data : {Data::kRoundings, Data::kRandom}) {
    Case c = more.back();
    c.name = data == Data::kRandom ? "lora/frozen_fp8/random" : "lora/frozen_fp8/roundings";
    c.data = data;
    c.problem.hidden = 192;
    c.problem.width = 320;
    c.problem.precision = Precision::kFp8;
    if (data == Data::kRoundings) c.problem.activation.kind = ActivationKind::kReGLU;
    c.layout = Layout::kConcatenated;
    c.grad_mode = GradMode::kWrite;
    in_fp8.push_back(std::move(c));
  }
  for (const char* name : {"dx", "dup.a", "dup.b", "dup.gate_b", "ddown.a", "ddown.b"}) {
    Case c = more.back();
    c.name = std::string("lora/only_") + name + "/bf16/random";
    c.grad_mode = GradMode::kWrite;
    c.wanted = {name};
    more.push_back(c);
  }
  for (std::vector<Case>* part : {&more, &in_fp8}) {
    cases.insert(cases.end(), std::make_move_iterator(part->begin()),
                 std::make_move_iterator(part->end()));
  }
}

}  // namespace sonicmoe::verify
