// Test cases of batch invariance: some tokens of a batch, computed alone, must have the same bits.
// Token rounding and expert choice route by the batch, so they have no cases.
#include <string>

#include "verify/cases.h"

namespace sonicmoe::verify {
namespace {

constexpr RoutingForm kIds = RoutingForm::kIds, kPairs = RoutingForm::kPairs,
                      kGrouped = RoutingForm::kGrouped;

// The first tokens, whose rows stay at the same place of their experts; tokens of the middle, whose
// rows move by a number that is no multiple of a tile; and one token.
std::vector<TokenRange> parts_of(std::int64_t tokens) {
  const std::int64_t middle = tokens / 2 + 3;
  return {{0, tokens / 4 - 3}, {middle, middle + tokens / 4 - 2}, {tokens - 5, tokens - 4}};
}

struct BatchShape {
  const char* name;
  RoutingForm form;
  Pattern pattern;
  std::int64_t tokens, experts, slots;  // slots: top_k for ids, the capacity for pairs
  std::vector<std::int64_t> counts;
  ActivationKind activation;
};

// The Hopper engine chooses tiles, their order and the order of backward's steps by the mean number
// of rows of an expert: those of the whole batch are at least 256, those of the first part at most
// 64. Experts of the whole batch have up to five tiles of 128 rows; those of a part have one or
// two.
std::vector<BatchShape> batch_shapes() {
  using enum Pattern;
  return {
      {"ids_gated", kIds, kHot, 400, 3, 2, {}, ActivationKind::kSwiGLU},
      {"ids_plain", kIds, kDistinct, 270, 3, 3, {}, ActivationKind::kGELU},
      {"pairs_gated", kPairs, kShuffled, 150, 3, 801, {}, ActivationKind::kGeGLU},
      {"pairs_plain", kPairs, kSorted, 130, 2, 530, {}, ActivationKind::kSiLU},
      {"grouped_gated", kGrouped, kGaps, 530, 2, 0, {363, 131}, ActivationKind::kSwiGLUOai},
      {"grouped_plain", kGrouped, kContiguous, 530, 2, 0, {127, 401}, ActivationKind::kReLU2},
  };
}

struct Format {
  DType dtype;
  Precision precision = Precision::kTensors;
};

// 184 columns of Y: with a mean of 64 rows or fewer the Hopper engine takes another tile.
void add(const BatchShape& shape, const Format& format, std::vector<Case>& cases) {
  const bool fp8 = format.precision == Precision::kFp8;
  Case c;
  c.name = std::string(fp8 ? "fp8/batch/" : "batch/") + shape.name +
           (fp8 ? std::string() : std::string("/") + dtype_name(format.dtype)) + "/random";
  Problem& p = c.problem;
  p.form = shape.form;
  p.tokens = shape.tokens;
  p.hidden = fp8 ? 256 : 184;
  p.width = fp8 ? 128 : 40;
  p.experts = shape.experts;
  (shape.form == kPairs ? p.capacity : p.top_k) = shape.slots;
  p.dtype = c.grad_dtype = format.dtype;
  p.activation.kind = shape.activation;
  p.precision = format.precision;
  c.pattern = shape.pattern;
  c.counts = shape.counts;
  c.bias = is_gated(shape.activation);
  c.parts = parts_of(shape.tokens);
  cases.push_back(c);
}

// CUDA uses another kernel to sum a token's rows if the output has more than 2^16 chunks of 16
// bytes. Here the output of the whole batch is larger than that, and the outputs of the parts are
// smaller.
void add_large(std::vector<Case>& cases) {
  const BatchShape shape{"large_output",         kIds, Pattern::kDistinct, 4200, 5, 3, {},
                         ActivationKind::kSwiGLU};
  add(shape, {DType::kBF16}, cases);
  cases.back().problem.hidden = 2000;
  cases.back().problem.width = 8;
}

}  // namespace

void add_batch_cases(Extent extent, std::vector<Case>& cases) {
  for (const BatchShape& shape : batch_shapes()) {
    add(shape, {DType::kBF16}, cases);
    add(shape, {DType::kF32}, cases);
    add(shape, {DType::kBF16, Precision::kFp8}, cases);
    if (extent == Extent::kQuick) continue;
    add(shape, {DType::kF16}, cases);
    add(shape, {DType::kF64}, cases);
  }
  if (extent == Extent::kFull) add_large(cases);
}

}  // namespace sonicmoe::verify
