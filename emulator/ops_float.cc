// Floating-point arithmetic.
#include <cstdint>
#include <functional>

#include "float_functions.h"
#include "ops_lanes.h"

namespace sonicmoe::emulator {
namespace {

using namespace floating;

using Minimum = Extreme<std::less<>, std::bit_or<>>;
using Maximum = Extreme<std::greater<>, std::bit_and<>>;

/// With .ftz and .sat, where they are given.
template <class Op, class Signature>
Form form_with_modifiers(Modifiers& m) {
  const bool flushes = m.take("ftz");
  if (m.take("sat")) {
    return flushes ? form_of<Saturate<Flush<Op>>, Signature>() : form_of<Saturate<Op>, Signature>();
  }
  return flushes ? form_of<Flush<Op>, Signature>() : form_of<Op, Signature>();
}

template <class Op, class Signature>
Form form_with_flush(Modifiers& m) {
  return m.take("ftz") ? form_of<Flush<Op>, Signature>() : form_of<Op, Signature>();
}

/// Op on numbers of 16 bits. bf16 has no .ftz.
template <class Op, template <class> class Signature>
Form form_of_small(std::string_view type, Modifiers& m) {
  using Words = Signature<std::uint32_t>;
  if (type == "bf16") return form_of<Op, Signature<Brain>>();
  if (type == "bf16x2") return form_of<Pairs<Op, Brain>, Words>();
  if (type == "f16") return form_with_flush<Op, Signature<Half>>(m);
  if (type != "f16x2") return {};
  return m.take("ftz") ? form_of<Pairs<Flush<Op>, Half>, Words>()
                       : form_of<Pairs<Op, Half>, Words>();
}

template <class Op, template <class> class Signature>
Form form_of_saturated_half(std::string_view type, Modifiers& m) {
  if (type == "f16") return form_with_modifiers<Op, Signature<Half>>(m);
  if (type != "f16x2") return {};
  using Words = Signature<std::uint32_t>;
  m.take("sat");
  return m.take("ftz") ? form_of<Pairs<Saturate<Flush<Op>>, Half>, Words>()
                       : form_of<Pairs<Saturate<Op>, Half>, Words>();
}

/// add, sub, mul, fma and mad. Only rounding to nearest is known, which is the default.
template <class Op, class SmallOp, template <class> class Signature>
Form find_sum(Modifiers& m) {
  const std::string type = m.take_last();
  m.take("rn");
  if (type == "f32") return form_with_modifiers<Op, Signature<float>>(m);
  if (type == "f64") return form_of<Op, Signature<double>>();
  if (m.has("sat")) return form_of_saturated_half<Small<SmallOp>, Signature>(type, m);
  return form_of_small<Small<SmallOp>, Signature>(type, m);
}

/// fma and mad, of which those of 16 bits have .relu.
Form find_fused(Modifiers& m) {
  if (!m.take("relu")) return find_sum<FusedMultiplyAdd, SmallMultiplyAdd, Ternary>(m);
  const std::string type = m.take_last();
  m.take("rn");
  return form_of_small<Rectify<Small<SmallMultiplyAdd>>, Ternary>(type, m);
}

template <class Op>
Form find_extreme_as(std::string_view type, Modifiers& m) {
  if (type == "f32") return form_with_flush<Op, Binary<float>>(m);
  if (type == "f64") return form_of<Op, Binary<double>>();
  return form_of_small<Op, Binary>(type, m);
}

template <class Op>
Form find_extreme(Modifiers& m) {
  const std::string type = m.take_last();
  const bool spreads_nan = m.take("NaN");
  if (m.take("xorsign")) {
    if (!m.take("abs")) return {};
    return spreads_nan ? find_extreme_as<XorSign<SpreadNan<Op>>>(type, m)
                       : find_extreme_as<XorSign<Op>>(type, m);
  }
  return spreads_nan ? find_extreme_as<SpreadNan<Op>>(type, m) : find_extreme_as<Op>(type, m);
}

/// abs and neg.
template <class Op>
Form find_sign(Modifiers& m) {
  const std::string type = m.take_last();
  if (type == "f32") return form_with_flush<Op, Unary<float>>(m);
  if (type == "f64") return form_of<Op, Unary<double>>();
  return form_of_small<Op, Unary>(type, m);
}

Form find_copy_sign(Modifiers& m) {
  const std::string type = m.take_last();
  if (type == "f32") return form_of<CopySign, Binary<float>>();
  return type == "f64" ? form_of<CopySign, Binary<double>>() : Form();
}

/// Quotients and roots. The approximate forms are computed like the exact forms.
template <class Op, template <class> class Signature>
Form find_quotient(Modifiers& m) {
  const std::string type = m.take_last();
  if (type == "f64") return m.take("rn") ? form_of<Op, Signature<double>>() : Form();
  if (type != "f32") return {};
  if (!m.take("rn") && !m.take("approx") && !m.take("full")) return {};
  return form_with_flush<Op, Signature<float>>(m);
}

Form find_reciprocal(Modifiers& m) {
  if (m.last() == "f64" && m.take("approx")) {
    m.take_last();
    return m.take("ftz") ? form_of<UpperHalf<Reciprocal>, Unary<double>>() : Form();
  }
  return find_quotient<Reciprocal, Unary>(m);
}

Form find_reciprocal_root(Modifiers& m) {
  const std::string type = m.take_last();
  if (!m.take("approx")) return {};
  if (type == "f32") return form_with_flush<ReciprocalRoot, Unary<float>>(m);
  if (type != "f64") return {};
  return m.take("ftz") ? form_of<UpperHalf<ReciprocalRoot>, Unary<double>>()
                       : form_of<ReciprocalRoot, Unary<double>>();
}

/// lg2, sin and cos.
template <class Op>
Form find_function(Modifiers& m) {
  if (!m.take("approx") || m.take_last() != "f32") return {};
  return form_with_flush<Op, Unary<float>>(m);
}

Form find_exponential(Modifiers& m) {
  if (!m.take("approx")) return {};
  const std::string type = m.take_last();
  if (type == "f32") return form_with_flush<Exponential2, Unary<float>>(m);
  using Op = Small<Exponential2>;
  if (type == "f16" || type == "f16x2") return form_of_small<Op, Unary>(type, m);
  return m.take("ftz") ? form_of_small<Flush<Op>, Unary>(type, m) : Form();  // bf16: always
}

Form find_tangent(Modifiers& m) {
  if (!m.take("approx")) return {};
  const std::string type = m.take_last();
  if (type == "f32") return form_of<HyperbolicTangent, Unary<float>>();
  return form_of_small<Small<HyperbolicTangent>, Unary>(type, m);
}

}  // namespace

const FormTable& float_forms() {
  static const FormTable table{
      {"add", &find_sum<Add, Add, Binary>},
      {"sub", &find_sum<Subtract, Subtract, Binary>},
      {"mul", &find_sum<Multiply, Multiply, Binary>},
      {"fma", &find_fused},
      {"mad", &find_fused},
      {"div", &find_quotient<Divide, Binary>},
      {"rcp", &find_reciprocal},
      {"sqrt", &find_quotient<SquareRoot, Unary>},
      {"rsqrt", &find_reciprocal_root},
      {"min", &find_extreme<Minimum>},
      {"max", &find_extreme<Maximum>},
      {"abs", &find_sign<Absolute>},
      {"neg", &find_sign<Negate>},
      {"copysign", &find_copy_sign},
      {"ex2", &find_exponential},
      {"lg2", &find_function<Logarithm2>},
      {"sin", &find_function<Sine>},
      {"cos", &find_function<Cosine>},
      {"tanh", &find_tangent},
  };
  return table;
}

void add_float_opcodes(OpcodeTable& table) {
  for (const auto& entry : float_forms()) table[std::string(entry.first)] = &decode_arithmetic;
}

}  // namespace sonicmoe::emulator
