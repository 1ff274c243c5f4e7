#include "verify/negative.h"

#include <algorithm>
#include <memory>

#include "verify/breakage.h"

namespace sonicmoe::verify {
namespace {

void zero(const Tensor& t) { zero_rows(t, 0, row_count(t)); }
void shift_rows(const Tensor& t) { rotate_rows(t, 0, row_count(t)); }
void flip_last_bit(const Tensor& t) { static_cast<std::uint8_t*>(t.data)[0] ^= 1; }

// --- Breakages of results: f changes memory after a sound call.

using Edit = void (*)(const Tensor&);

Break edit_out(Edit f) {
  return after_forward([f](const Memory& memory, const Problem&, const ForwardArgs& args) {
    edit(memory, args.out, f);
  });
}
Break edit_dx(Edit f) {
  return after_backward([f](const Memory& memory, const Problem&, const BackwardArgs& args) {
    edit(memory, args.dx, f);
  });
}
Break edit_grad(Tensor Weights::* which, Edit f) {
  return after_backward([=](const Memory& memory, const Problem&, const BackwardArgs& args) {
    edit(memory, args.grads.*which, f);
  });
}

// Restores the bytes that a view held before the call, as if it had not been written.
Break unwritten(Tensor (*view)(const BackwardArgs&)) {
  return [view](const Implementation& sound) {
    Implementation broken = sound;
    broken.moe_backward = [sound, view](const Problem& p, const BackwardArgs& args) {
      std::vector<double> before;
      edit(sound.memory, view(args), [&](const Tensor& t) { before = oracle::read(t); });
      sound.moe_backward(p, args);
      edit(sound.memory, view(args), [&](const Tensor& t) { oracle::write(t, before); });
    };
    return broken;
  };
}

Tensor last_row_of_dx(const BackwardArgs& args) {
  Tensor t = args.dx;
  t.data =
      static_cast<std::uint8_t*>(t.data) + (t.shape[0] - 1) * t.stride[0] * dtype_bytes(t.dtype);
  t.shape[0] = 1;
  return t;
}
Tensor second_expert_of_ddown(const BackwardArgs& args) {
  Tensor t = args.grads.down;
  t.data = static_cast<std::uint8_t*>(t.data) + t.stride[0] * dtype_bytes(t.dtype);
  t.shape[0] = 1;
  return t;
}

template <class F>
Break with_ids(F f) {
  return with_inputs([f](DeviceCopies& copies, Problem&, auto& args) {
    args.routing.ids = copies.changed(args.routing.ids, [&](const Tensor& t) {
      auto* ids = static_cast<std::int64_t*>(t.data);
      f(ids, t.shape[0], t.shape[1]);
    });
  });
}

void drop_expert(std::int64_t* ids, std::int64_t tokens, std::int64_t k) {
  std::replace(ids, ids + tokens * k, std::int64_t{2}, std::int64_t{-1});
}
void narrow(std::int64_t* ids, std::int64_t tokens, std::int64_t k) {
  for (std::int64_t i = 0; i < tokens * k; ++i) ids[i] = static_cast<std::int32_t>(ids[i]);
}
void deduplicate(std::int64_t* ids, std::int64_t tokens, std::int64_t k) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 1; i < k; ++i) {
      std::int64_t* row = ids + t * k;
      if (std::find(row, row + i, row[i]) != row + i) row[i] = -1;
    }
  }
}
void to_bf16_values(const Tensor& t) {
  std::vector<double> values = oracle::read(t);
  oracle::round_all(DType::kBF16, values);
  oracle::write(t, values);
}

// --- The table.

constexpr const char* kIntegers = "routing/ids_distinct/bf16/integers";
constexpr const char* kRandom = "routing/ids_distinct/bf16/random";
constexpr const char* kLarge = "large/rows_131072/bf16/random";
constexpr const char* kRoundings = "routing/ids_distinct/bf16/roundings";
constexpr const char* kEmptyExperts = "grads/fp32/bf16/random";
constexpr const char* kAccumulated = "grads/accumulated/bf16/random";

std::vector<Control> controls_of_values() {
  const auto both = [](Fault integers, Fault random) {
    return std::vector<Expectation>{{kIntegers, integers}, {kRandom, random}, {kLarge, random}};
  };
  const std::vector<Expectation> wrong = both(Fault::kUnequal, Fault::kInaccurate);
  return {
      {"out is all zeros", wrong, edit_out(zero)},
      {"one row of out is zero", wrong, edit_out(zero_middle_row)},
      {"two neighbouring rows of out are swapped", wrong, edit_out(swap_middle_rows)},
      {"out is shifted by one row", wrong, edit_out(shift_rows)},
      {"dx is all zeros", wrong, edit_dx(zero)},
      {"one row of dx is zero", wrong, edit_dx(zero_middle_row)},
      {"two neighbouring rows of dx are swapped", wrong, edit_dx(swap_middle_rows)},
      {"dx is shifted by one row", wrong, edit_dx(shift_rows)},
      {"dgate is all zeros", wrong, edit_grad(&Weights::gate, zero)},
      {"one row of dup is zero",
       {{kRandom, Fault::kInaccurate}, {kLarge, Fault::kInaccurate}},
       edit_grad(&Weights::up, zero_middle_row)},
      {"ddown is shifted by one row", wrong, edit_grad(&Weights::down, shift_rows)},
      {"an expert is dropped", wrong, with_ids(drop_expert)},
      {"dS is scaled by the score",
       {{kRandom, Fault::kInaccurate}},
       after_backward([](const Memory& memory, const Problem&, const BackwardArgs& args) {
         std::vector<double> scores;
         edit(memory, args.routing.weights, [&](const Tensor& t) { scores = oracle::read(t); });
         edit(memory, args.dweights, [&](const Tensor& t) {
           std::vector<double> values = oracle::read(t);
           for (std::size_t i = 0; i < values.size(); ++i) values[i] *= scores[i];
           oracle::write(t, values);
         });
       })},
      {"ids are narrowed before they are compared",
       {{"routing/ids_aliases/bf16/integers", Fault::kUnequal},
        {"routing/ids_aliases/bf16/random", Fault::kInaccurate}},
       with_ids(narrow)},
      {"a repeated expert counts once",
       {{"routing/ids_repeated/bf16/random", Fault::kInaccurate}},
       with_ids(deduplicate)},
      {"dW of an expert without rows is not zero",
       {{kEmptyExperts, Fault::kNotZero}},
       after_backward([](const Memory& memory, const Problem&, const BackwardArgs& args) {
         edit(memory, second_expert_of_ddown(args),
              [](const Tensor& t) { oracle::store(t.data, t.dtype, 0, 1e-30); });
       })},
  };
}

std::vector<Control> controls_of_formulas() {
  return {
      {"the tanh form of gelu instead of erf",
       {{"activation/geglu/f32/random", Fault::kInaccurate},
        {"activation/geglu_tail/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem& p, auto&) {
         p.activation.kind = ActivationKind::kGeGLUTanh;
       })},
      {"clamps are dropped",
       {{"activation/swiglu_oai_limits/bf16/random", Fault::kInaccurate},
        {"activation/swiglu_clamped_limits/bf16/random", Fault::kInaccurate},
        {"activation/swiglu_clamped_default/bf16/random", Fault::kInaccurate},
        {"activation/swiglu_step_limits/bf16/random", Fault::kInaccurate},
        {"activation/swiglu_step_default/bf16/random", Fault::kInaccurate},
        {"activation/situ_small_caps/bf16/random", Fault::kInaccurate},
        {"activation/situ_caps/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem& p, auto&) { p.activation.limit = 1e9; })},
      {"alpha is ignored",
       {{"activation/swiglu_oai_limits/bf16/random", Fault::kInaccurate},
        {"activation/situ_small_caps/bf16/random", Fault::kInaccurate},
        {"activation/situ_caps/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem& p, auto&) { p.activation.alpha = 0.0; })},
      {"the caps of gate and up are exchanged",
       {{"activation/situ_caps/bf16/random", Fault::kInaccurate},
        {"activation/situ_default/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem& p, auto&) {
         const Activation full = with_defaults(p.activation);
         p.activation.alpha = full.limit;
         p.activation.limit = full.alpha;
       })},
      {"the gate is clamped before silu",
       {{"activation/swiglu_step_limits/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem& p, auto&) {
         p.activation.kind = ActivationKind::kSwiGLUClamped;
       })},
      {"the limit is swiglu_clamped's",
       {{"activation/swiglu_step_default/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem& p, auto&) { p.activation.limit = 10.0; })},
      {"the limit is swiglu_oai's",
       {{"activation/swiglu_clamped_default/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem& p, auto&) { p.activation.limit = 7.0; })},
      {"b1 is ignored",
       {{"activation/swiglu_bias/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies& copies, Problem&, auto& args) {
         args.weights.b_gate = copies.changed(args.weights.b_gate, zero);
         args.weights.b_up = copies.changed(args.weights.b_up, zero);
       })},
      {"b2 is ignored",
       {{"activation/swiglu_bias/bf16/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies& copies, Problem&, auto& args) {
         args.weights.b_down = copies.changed(args.weights.b_down, zero);
       })},
      {"b2 has no term in dS",
       {{"activation/swiglu_bias/bf16/random", Fault::kInaccurate}},
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.moe_backward = [sound](const Problem& p, BackwardArgs args) {
           DeviceCopies copies(sound.memory);
           args.weights.b_down = copies.changed(args.weights.b_down, zero);
           sound.moe_backward(p, args);
         };
         return broken;
       }},
      {"fp32 weights are cut to bf16",
       {{"activation/swiglu/f32/random", Fault::kInaccurate}},
       with_inputs([](DeviceCopies& copies, Problem&, auto& args) {
         args.weights.up = copies.changed(args.weights.up, to_bf16_values);
       })},
      {"gate and up are exchanged",
       {{kRandom, Fault::kInaccurate}},
       with_inputs([](DeviceCopies&, Problem&, auto& args) {
         std::swap(args.weights.gate, args.weights.up);
       })},
      {"dW is added twice",
       {{kAccumulated, Fault::kInaccurate}},
       after_backward([](const Memory& memory, const Problem&, const BackwardArgs& args) {
         edit(memory, args.grads.up, [](const Tensor& t) {
           std::vector<double> values = oracle::read(t);
           for (double& v : values) v *= 2.0;
           oracle::write(t, values);
         });
       })},
      {"dW is written where it is to be added",
       {{kAccumulated, Fault::kInaccurate}},
       writing_where_to_add()},
  };
}

std::vector<Control> controls_of_memory() {
  const auto at = [](const char* name, Fault fault) {
    return std::vector<Expectation>{{name, fault}};
  };
  return {
      {"the last row of dx is not written", at(kRandom, Fault::kUnwritten),
       unwritten(last_row_of_dx)},
      {"dW of an expert without rows is not written", at(kEmptyExperts, Fault::kUnwritten),
       unwritten(second_expert_of_ddown)},
      {"a write past the end of out", at(kRandom, Fault::kOutside),
       after_forward([](const Memory& memory, const Problem&, const ForwardArgs& args) {
         scribble(memory, args.out.data, extent(args.out) * dtype_bytes(args.out.dtype));
       })},
      {"a write before the beginning of dx", at(kRandom, Fault::kOutside),
       after_backward([](const Memory& memory, const Problem&, const BackwardArgs& args) {
         scribble(memory, args.dx.data, -1);
       })},
      {"a write past the end of h", at(kRandom, Fault::kOutside),
       after_forward([](const Memory& memory, const Problem&, const ForwardArgs& args) {
         if (args.h.data != nullptr) scribble(memory, args.h.data, args.h.bytes);
       })},
      {"a write past the end of the scratch", at(kRandom, Fault::kOutside),
       after_backward([](const Memory& memory, const Problem&, const BackwardArgs& args) {
         scribble(memory, args.scratch.data, args.scratch.bytes);
       })},
      {"a write into the gap between rows of a padded output",
       at("layout/padded_gated/bf16/random", Fault::kOutside),
       after_forward([](const Memory& memory, const Problem& p, const ForwardArgs& args) {
         scribble(memory, args.out.data, p.hidden * dtype_bytes(args.out.dtype));
       })},
      {"x is changed", at(kRandom, Fault::kInputChanged),
       after_forward([](const Memory& memory, const Problem&, const ForwardArgs& args) {
         edit(memory, args.x, flip_last_bit);
       })},
      {"backward changes h", at(kRandom, Fault::kInputChanged),
       after_backward([](const Memory& memory, const Problem& p, const BackwardArgs& args) {
         edit(memory, tensor1(args.h.data, p.dtype, 1), flip_last_bit);
       })},
      {"every second result differs in one bit", at(kRandom, Fault::kNotRepeatable),
       [](const Implementation& sound) {
         const auto calls = std::make_shared<int>(0);
         return after_forward(
             [calls](const Memory& memory, const Problem&, const ForwardArgs& args) {
               if (++*calls % 2 == 0) edit(memory, args.out, flip_last_bit);
             })(sound);
       }},
      {"inference has other bits than training", at(kRandom, Fault::kNotRepeatable),
       after_forward([](const Memory& memory, const Problem&, const ForwardArgs& args) {
         if (args.h.data == nullptr) edit(memory, args.out, flip_last_bit);
       })},
      {"the grouped GEMM writes rows past its last offset",
       at("gemm/24x40/bf16/integers", Fault::kOutside),
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.grouped_gemm = [sound](const GroupedGemm& args) {
           sound.grouped_gemm(args);
           edit(sound.memory, args.d,
                [](const Tensor& t) { zero_rows(t, row_count(t) - 1, row_count(t)); });
         };
         return broken;
       }},
      {"one row of the grouped GEMM comes from its neighbour",
       at("gemm_k/24x40_gather/bf16/integers", Fault::kUnequal),
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.grouped_gemm_k = [sound](const GroupedGemmK& args) {
           DeviceCopies copies(sound.memory);
           GroupedGemmK shifted = args;
           shifted.gather = copies.changed(args.gather, [](const Tensor& t) {
             static_cast<std::int32_t*>(t.data)[t.shape[0] / 2] ^= 1;
           });
           sound.grouped_gemm_k(shifted);
         };
         return broken;
       }},
      {"h is larger than G*C*n elements", at(kRandom, Fault::kSizes),
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.moe_sizes = [sound](const Problem& p, Pass pass) {
           Sizes sizes = sound.moe_sizes(p, pass);
           sizes.h_bytes *= 2;
           return sizes;
         };
         return broken;
       }},
      {"the call throws", at(kRandom, Fault::kThrew),
       after_forward([](const Memory&, const Problem&, const ForwardArgs&) {
         throw Error(Status::kInternal, "broken on purpose");
       })},
  };
}

// Replaces some outputs of backward by results without any rounding in between: the outputs that
// `keep` leaves in the arguments.
Break with_exact(void (*keep)(BackwardArgs&)) {
  return [keep](const Implementation& sound) {
    Implementation broken = sound;
    broken.moe_backward = [sound, keep](const Problem& p, BackwardArgs args) {
      sound.moe_backward(p, args);
      keep(args);
      oracle_implementation(oracle::Precision::kExact).moe_backward(p, args);
    };
    return broken;
  };
}

// These break the oracle instead of the backend under test, because they need its formulas.
std::vector<Control> controls_of_roundings() {
  const Implementation unrounded = oracle_implementation(oracle::Precision::kExact);
  return {
      {"nothing is rounded before the output",
       {{kRoundings, Fault::kUnequal}},
       [unrounded](const Implementation&) { return unrounded; }},
      {"dS is taken from the unrounded act(H)",
       {{kRoundings, Fault::kUnequal}},
       with_exact([](BackwardArgs& args) {
         args.dx = {};
         args.grads = {};
       })},
      {"A' is not rounded", {{kRoundings, Fault::kUnequal}}, with_exact([](BackwardArgs& args) {
         args.dx = args.dweights = {};
         const Tensor down = args.grads.down;
         args.grads = {};
         args.grads.down = down;
       })},
  };
}

void judge(const Control& control, const Implementation& sound, const VerifyOptions& options,
           const ControlProgress& progress, std::vector<ControlResult>& results) {
  const Implementation broken = control.breakage(sound);
  for (const Expectation& expectation : control.expectations) {
    for (const Case& c : all_cases(options.extent, expectation.case_name)) {
      if (c.name != expectation.case_name || !asked_for(options, c) || !serves(sound, c)) continue;
      const CaseResult result = run_case(c, broken);
      results.push_back({control.name, c.name, expectation.fault, result.fault, result.message});
      if (progress) progress(results.back());
    }
  }
}

std::vector<Control> joined(std::initializer_list<std::vector<Control>> lists) {
  std::vector<Control> all;
  for (const std::vector<Control>& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Those that break the implementation under test, and those that break the oracle.
std::vector<Control> controls_of_any() {
  return joined({controls_of_values(), controls_of_formulas(), controls_of_memory(),
                 controls_of_the_router(), controls_of_fp8(), controls_of_batches(),
                 controls_of_factors(), controls_of_packed_weights()});
}
std::vector<Control> controls_of_the_oracle() {
  return joined({controls_of_roundings(), controls_of_fp8_sums()});
}

}  // namespace

std::vector<std::string> negative_control_names() {
  std::vector<std::string> names;
  for (const Control& control : joined({controls_of_any(), controls_of_the_oracle()})) {
    names.emplace_back(control.name);
  }
  return names;
}

std::vector<ControlResult> negative_controls(const VerifyOptions& options,
                                             const Implementation& sound,
                                             const ControlProgress& progress) {
  std::vector<ControlResult> results;
  const auto judge_all = [&](const std::vector<Control>& controls, const Implementation& base) {
    for (const Control& control : controls) {
      if (std::string(control.name).find(options.filter) == std::string::npos) continue;
      judge(control, base, options, progress, results);
    }
  };
  judge_all(controls_of_any(), sound);
  judge_all(controls_of_the_oracle(), oracle_implementation(oracle::Precision::kSame));
  return results;
}

}  // namespace sonicmoe::verify
