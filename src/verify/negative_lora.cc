// Negative controls of low-rank factors.
#include <algorithm>
#include <utility>

#include "verify/breakage.h"

namespace sonicmoe::verify {
namespace {

constexpr const char* kIntegers = "lora/routing-ids_distinct/bf16/integers";
constexpr const char* kFrozen = "lora/frozen_written/bf16/random";
constexpr const char* kFp8 = "lora/frozen_fp8/random";
constexpr const char* kFp8Integers = "lora/frozen_fp8/roundings";
constexpr const char* kAdded = "lora/frozen_added/bf16/random";

// Moves each expert's matrix to the next expert.
void take_neighbours(const Tensor& t) {
  const std::int64_t expert = t.shape[1] * t.shape[2];
  std::vector<double> values = oracle::read(t);
  std::rotate(values.begin(), values.begin() + expert, values.end());
  oracle::write(t, values);
}
void zero(const Tensor& t) { zero_rows(t, 0, row_count(t)); }

enum class In { kForward, kBackward, kBoth };

/// f changes the factors that one pass, or both, read.
template <class F>
Break with_factors(In in, F f) {
  return [in, f](const Implementation& sound) {
    Implementation broken = sound;
    if (in != In::kBackward) {
      broken.moe_forward = [sound, f](const Problem& p, ForwardArgs args) {
        DeviceCopies copies(sound.memory);
        f(copies, args.lora);
        sound.moe_forward(p, args);
      };
    }
    if (in != In::kForward) {
      broken.moe_backward = [sound, f](const Problem& p, BackwardArgs args) {
        DeviceCopies copies(sound.memory);
        f(copies, args.lora);
        sound.moe_backward(p, args);
      };
    }
    return broken;
  };
}

/// f changes one factor.
Break with_factor(In in, LowRank Lora::* projection, Tensor LowRank::* factor,
                  void (*f)(const Tensor&)) {
  return with_factors(in, [=](DeviceCopies& copies, Lora& lora) {
    lora.*projection.*factor = copies.changed(lora.*projection.*factor, f);
  });
}

Break without_scale(In in, LowRank Lora::* projection) {
  return with_factors(in,
                      [projection](DeviceCopies&, Lora& lora) { (lora.*projection).scale = 1.0; });
}

Break with_other_gradients(Tensor LowRank::* factor, LowRank Lora::* projection) {
  return after_backward([=](const Memory& memory, const Problem&, const BackwardArgs& args) {
    edit(memory, args.lora_grads.*projection.*factor, take_neighbours);
  });
}

}  // namespace

std::vector<Control> controls_of_factors() {
  const std::vector<Expectation> wrong = {{kIntegers, Fault::kUnequal},
                                          {kFrozen, Fault::kInaccurate}};
  const std::vector<Expectation> inaccurate = {{kFrozen, Fault::kInaccurate}};
  const std::vector<Expectation> no_term = {{kIntegers, Fault::kUnequal},
                                            {kFrozen, Fault::kInaccurate},
                                            {kFp8, Fault::kInaccurate},
                                            {kFp8Integers, Fault::kUnequal}};
  const std::vector<Expectation> no_back_term = {
      {kFrozen, Fault::kInaccurate}, {kFp8, Fault::kInaccurate}, {kFp8Integers, Fault::kUnequal}};
  const std::vector<Expectation> moved = {{kFrozen, Fault::kNotZero}};  // an expert without rows
  const auto up = &Lora::up, down = &Lora::down;
  return {
      {"A of the up-projection is the next expert's", wrong,
       with_factor(In::kBoth, up, &LowRank::a, take_neighbours)},
      {"B of the up-projection is the next expert's", wrong,
       with_factor(In::kBoth, up, &LowRank::b, take_neighbours)},
      {"B of the down-projection is the next expert's", wrong,
       with_factor(In::kBoth, down, &LowRank::b, take_neighbours)},
      {"the halves of B for gate and up are exchanged", wrong,
       with_factors(In::kBoth,
                    [](DeviceCopies&, Lora& lora) { std::swap(lora.up.b, lora.up.gate_b); })},
      {"P is not scaled", wrong, without_scale(In::kForward, up)},
      {"U is not scaled", wrong, without_scale(In::kForward, down)},
      {"V is not scaled", inaccurate, without_scale(In::kBackward, up)},
      {"Q and U' are not scaled", inaccurate, without_scale(In::kBackward, down)},
      {"H has no low-rank term", no_term, with_factor(In::kForward, up, &LowRank::b, zero)},
      {"Y has no low-rank term", no_term, with_factor(In::kForward, down, &LowRank::b, zero)},
      {"dA' has no low-rank term", no_back_term,
       with_factor(In::kBackward, down, &LowRank::a, zero)},
      {"dX~ has no low-rank term", no_back_term, with_factor(In::kBackward, up, &LowRank::a, zero)},
      {"dA of the up-projection is the next expert's", moved,
       with_other_gradients(&LowRank::a, up)},
      {"dB of the up-projection is the next expert's", moved,
       with_other_gradients(&LowRank::b, up)},
      {"dA of the down-projection is the next expert's", moved,
       with_other_gradients(&LowRank::a, down)},
      {"dB of the down-projection is the next expert's", moved,
       with_other_gradients(&LowRank::b, down)},
      {"gradients of factors are written where they are to be added",
       {{kAdded, Fault::kInaccurate}},
       writing_where_to_add()},
  };
}

}  // namespace sonicmoe::verify
