// The types that all functions use: tensors, buffers, activations, and the device of a call.
//
// Letters in all headers: T tokens, d model width, n expert width, E experts, K experts per
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

/// Element types. A zero-initialised description has the value 0, fp32.
enum class DType : std::int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kI32 = 4, kI64 = 5 };

/// Bytes of one element.
constexpr std::int64_t dtype_bytes(DType t) {
  return t == DType::kF64 || t == DType::kI64 ? 8 : t == DType::kBF16 || t == DType::kF16 ? 2 : 4;
}

/// A strided view of memory that the caller owns. Only the first `rank` entries of `shape` and
/// `stride` are used. Strides count elements and may be negative. A tensor spans fewer than 2^55
/// bytes. An optional argument with `data == nullptr` is not given. Inputs are never written,
/// although `data` is not a pointer to const.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int32_t rank = 0;
  std::int64_t shape[3] = {0, 0, 0};
  std::int64_t stride[3] = {0, 0, 0};
};

/// Contiguous row-major views of rank 1, 2 and 3.
constexpr Tensor tensor1(void* data, DType t, std::int64_t n0) {
  return {data, t, 1, {n0, 0, 0}, {1, 0, 0}};
}
constexpr Tensor tensor2(void* data, DType t, std::int64_t n0, std::int64_t n1) {
  return {data, t, 2, {n0, n1, 0}, {n1, 1, 0}};
}
constexpr Tensor tensor3(void* data, DType t, std::int64_t n0, std::int64_t n1, std::int64_t n2) {
  return {data, t, 3, {n0, n1, n2}, {n1 * n2, n2, 1}};
}

/// Memory of the caller: scratch of one call, or data that later calls read (h, saved,
/// fp8_weights). `data` must be aligned to 256 bytes on CUDA and to 64 bytes on the CPU.
struct Buffer {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

/// The activation between the two projections. Gated kinds act on (gate, up), the others on one
/// input x. In the formulas g' = min(gate, limit) and u' = clamp(up, -limit, limit). docs/method.md
/// has all formulas and their derivatives. The values are part of the C ABI: a new kind gets the
/// next value.
enum class ActivationKind : std::int32_t {
  kSwiGLU = 0,          ///< silu(gate) * up
  kSwiGLUOai = 1,       ///< g' sigmoid(alpha g') (u' + 1)
  kGeGLU = 2,           ///< gelu(gate) * up, exact erf
  kGeGLUTanh = 3,       ///< gelu(gate) * up, tanh form
  kReGLU = 4,           ///< relu(gate) * up
  kSiLU = 5,            ///< silu(x)
  kGELU = 6,            ///< gelu(x), exact erf
  kGELUTanh = 7,        ///< gelu(x), tanh form
  kReLU = 8,            ///< max(x, 0)
  kReLU2 = 9,           ///< max(x, 0)^2
  kSwiGLUClamped = 10,  ///< silu(g') u'
  kSiTU = 11,           ///< alpha tanh(gate / alpha) sigmoid(gate) * limit tanh(up / limit)
  kSwiGLUStep = 12,     ///< min(silu(gate), limit) u'
};
inline constexpr std::int32_t kActivationCount = 13;

/// A kind and its parameters. 0 means the kind's default. A parameter that the kind does not have
/// must be 0. Parameters must be finite, and limit must not be negative. For situ, alpha and limit
/// are the caps of gate and up, from 1e-9 to 1e9.
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

/// The properties of a kind; those of an unknown kind have the name "unknown". The table is inside
/// the function so that device code can read it.
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
      {"situ", true, 4.0, 25.0},            // 11
      {"swiglu_step", true, 0.0, 7.0},      // 12
  };
  const auto index = static_cast<std::int32_t>(kind);
  return index >= 0 && index < kActivationCount ? kTable[index]
                                                : ActivationTraits{"unknown", false, 0.0, 0.0};
}

/// Whether a kind acts on (gate, up).
constexpr bool is_gated(ActivationKind kind) { return activation_traits(kind).gated; }
/// G: 2 for gated activations, else 1.
constexpr std::int64_t gate_factor(ActivationKind kind) { return is_gated(kind) ? 2 : 1; }

/// `activation`, in which parameters that are 0 have the defaults of its kind.
constexpr Activation with_defaults(const Activation& activation) {
  const ActivationTraits traits = activation_traits(activation.kind);
  return {activation.kind, activation.alpha != 0.0 ? activation.alpha : traits.alpha,
          activation.limit != 0.0 ? activation.limit : traits.limit};
}

/// Converts a kind to its public name ("swiglu_oai") and back. An unknown value has the name
/// "unknown"; an unknown name throws Status::kInvalidArgument.
SONICMOE_API const char* activation_name(ActivationKind kind);
SONICMOE_API ActivationKind activation_from_name(const char* name);
/// Converts a dtype to its name, "f32", "bf16", "f16", "f64", "i32" or "i64", and back. Unknown
/// values and names are treated as by activation_name().
SONICMOE_API const char* dtype_name(DType dtype);
SONICMOE_API DType dtype_from_name(const char* name);

/// The implementation that a call uses.
enum class Backend : std::int32_t { kCpu = 0, kCuda = 1 };

/// Times the kernels of the layer one by one; used by `sonicmoe bench` only.
class KernelObserver;

/// Where a call runs. On the CPU the bits of a result do not depend on num_threads. On CUDA a call
/// enqueues its work on `stream` and does not wait for the device, unless its comment says so.
/// Every call with kCuda needs `device`, also a call that only returns a size.
struct Exec {
  Backend backend = Backend::kCpu;
  std::int32_t num_threads = 0;        ///< CPU: 0: one per core of the process; at most 4 per core
  const void* device = nullptr;        ///< CUDA: a handle of smoe_device_open() in c_api.h
  void* stream = nullptr;              ///< CUDA: a cudaStream_t; null: the default stream
  KernelObserver* observer = nullptr;  ///< leave it null
};

}  // namespace sonicmoe
