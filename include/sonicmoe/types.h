// Plain descriptions shared by every entry point: tensors, activations, buffers, where to run.
//
// Letters, here and everywhere: T tokens, d model width, n expert width, E experts, K experts per
// token, R routed rows, C row capacity, G gate factor (2 for gated activations, else 1).
#pragma once

#include <cstddef>
#include <cstdint>

#include "sonicmoe/status.h"

#if defined(_WIN32)
#define SONICMOE_API
#else
#define SONICMOE_API __attribute__((visibility("default")))
#endif

namespace sonicmoe {

/// Element types. Zero-initialised descriptions mean fp32.
enum class DType : std::int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kI32 = 4, kI64 = 5 };

/// Bytes of one element.
constexpr std::int64_t dtype_bytes(DType t) {
  return t == DType::kF64 || t == DType::kI64 ? 8 : t == DType::kBF16 || t == DType::kF16 ? 2 : 4;
}

/// A strided view of memory that the caller owns. Strides count elements and may be negative; a
/// tensor spans fewer than 2^55 bytes. `data == nullptr` means "not given" where an argument is
/// optional. Inputs are never written, though the pointer's type allows it.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int32_t rank = 0;
  std::int64_t shape[3] = {0, 0, 0};
  std::int64_t stride[3] = {0, 0, 0};
};

/// Contiguous views.
constexpr Tensor tensor1(void* data, DType t, std::int64_t n0) {
  return {data, t, 1, {n0, 0, 0}, {1, 0, 0}};
}
constexpr Tensor tensor2(void* data, DType t, std::int64_t n0, std::int64_t n1) {
  return {data, t, 2, {n0, n1, 0}, {n1, 1, 0}};
}
constexpr Tensor tensor3(void* data, DType t, std::int64_t n0, std::int64_t n1, std::int64_t n2) {
  return {data, t, 3, {n0, n1, n2}, {n1 * n2, n2, 1}};
}

/// Memory of the caller: scratch of one call, or data for later calls (h, saved, fp8_weights). It
/// must be aligned to 256 bytes, on the CPU to 64.
struct Buffer {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

/// The activation between the two projections. Gated kinds act on (gate, up), the others on one
/// input. docs/method.md has the formulas and their derivatives. The values are part of the C ABI:
/// a new kind gets the next value.
enum class ActivationKind : std::int32_t {
  kSwiGLU = 0,          ///< silu(gate) * up
  kSwiGLUOai = 1,       ///< g' sigmoid(alpha g') (u' + 1), g' = min(gate, limit), u' = clamp(up)
  kGeGLU = 2,           ///< gelu(gate) * up, exact erf
  kGeGLUTanh = 3,       ///< gelu(gate) * up, tanh form
  kReGLU = 4,           ///< relu(gate) * up
  kSiLU = 5,            ///< silu(x)
  kGELU = 6,            ///< gelu(x), exact erf
  kGELUTanh = 7,        ///< gelu(x), tanh form
  kReLU = 8,            ///< max(x, 0)
  kReLU2 = 9,           ///< max(x, 0)^2
  kSwiGLUClamped = 10,  ///< silu(g') u', g' = min(gate, limit), u' = clamp(up)
};
inline constexpr std::int32_t kActivationCount = 11;

/// A kind and its parameters. 0 means the kind's default. A parameter that the kind does not have
/// must be 0.
struct Activation {
  ActivationKind kind = ActivationKind::kSwiGLU;
  double alpha = 0.0;
  double limit = 0.0;
};

/// The properties of a kind, except its formula.
struct ActivationTraits {
  const char* name;  ///< the public name
  bool gated;        ///< acts on (gate, up)
  double alpha;      ///< default of Activation::alpha, 0 if the kind has none
  double limit;      ///< default of Activation::limit, 0 if the kind has none
};

/// The properties of each kind. The table is inside the function so that device code can read it.
constexpr ActivationTraits activation_traits(ActivationKind kind) {
  constexpr ActivationTraits kTable[kActivationCount] = {
      {"swiglu", true, 0.0, 0.0},           // 0
      {"swiglu_oai", true, 1.702, 7.0},     // 1
      {"geglu", true, 0.0, 0.0},            // 2
      {"geglu_tanh", true, 0.0, 0.0},       // 3
      {"reglu", true, 0.0, 0.0},            // 4
      {"silu", false, 0.0, 0.0},            // 5
      {"gelu", false, 0.0, 0.0},            // 6
      {"gelu_tanh", false, 0.0, 0.0},       // 7
      {"relu", false, 0.0, 0.0},            // 8
      {"relu2", false, 0.0, 0.0},           // 9
      {"swiglu_clamped", true, 0.0, 10.0},  // 10
  };
  const auto index = static_cast<std::int32_t>(kind);
  return index >= 0 && index < kActivationCount ? kTable[index]
                                                : ActivationTraits{"unknown", false, 0.0, 0.0};
}

constexpr bool is_gated(ActivationKind kind) { return activation_traits(kind).gated; }
/// G: 2 for gated activations, else 1.
constexpr std::int64_t gate_factor(ActivationKind kind) { return is_gated(kind) ? 2 : 1; }

/// `activation` with its kind's defaults in place of zeros.
constexpr Activation with_defaults(const Activation& activation) {
  const ActivationTraits traits = activation_traits(activation.kind);
  return {activation.kind, activation.alpha != 0.0 ? activation.alpha : traits.alpha,
          activation.limit != 0.0 ? activation.limit : traits.limit};
}

/// Converts a kind to its public name ("swiglu_oai") and back; an unknown name throws Error.
SONICMOE_API const char* activation_name(ActivationKind kind);
SONICMOE_API ActivationKind activation_from_name(const char* name);
/// Converts a dtype to its name, "f32", "bf16", "f16", "f64", "i32" or "i64", and back.
SONICMOE_API const char* dtype_name(DType dtype);
SONICMOE_API DType dtype_from_name(const char* name);

enum class Backend : std::int32_t { kCpu = 0, kCuda = 1 };

/// Times the kernels of the layer one by one; used by `sonicmoe bench` only.
class KernelObserver;

/// Where a call runs. On the CPU the bits of a result do not depend on num_threads.
struct Exec {
  Backend backend = Backend::kCpu;
  std::int32_t num_threads = 0;        ///< CPU: 0 means one per core; at most 4 per core are used
  const void* device = nullptr;        ///< CUDA: handle of smoe_device_open
  void* stream = nullptr;              ///< CUDA: a cudaStream_t
  KernelObserver* observer = nullptr;  ///< leave it null
};

}  // namespace sonicmoe
