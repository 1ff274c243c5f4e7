// The MoE layer: O[t] = sum_k s_k * (W2_e act(W1_e x_t + b1_e) + b2_e), forward and backward.
//
// The method (SonicMoE, arXiv 2512.14080) keeps only X, H and routing metadata for backward. Every
// element of an output is written, whatever the routing; for weight gradients see GradMode. Equal
// inputs give equal bits in every run. docs/method.md says where values are rounded.
//
// A training step:
//   Sizes f = moe_sizes(problem, Pass::kForward), b = moe_sizes(problem, Pass::kBackward);
//   moe_forward(problem, {x, routing, weights, out, h, saved, scratch}, exec);
//   moe_backward(problem, {x, routing, weights, dout, h, saved, scratch, grads...}, exec);
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// The form in which a caller gives the routing.
enum class RoutingForm : std::int32_t {
  kIds = 0,      ///< ids and weights (T, K); C = T*K
  kPairs = 1,    ///< a list of (token, expert, weight) in any order; C is its length
  kGrouped = 2,  ///< x already grouped by expert: rows of expert e begin at row_begin[e]; C = T
};

/// The precision of the products. kFp8 needs bf16 tensors, and d and n that are multiples of 128;
/// docs/fp8.md has its formulas.
enum class Precision : std::int32_t {
  kTensors = 0,  ///< Problem::dtype
  kFp8 = 1,      ///< e4m3 with block scales; Problem::dtype for weight gradients
};

/// Converts a precision to its name, "tensors" or "fp8", and back.
SONICMOE_API const char* precision_name(Precision precision);
SONICMOE_API Precision precision_from_name(const char* name);

/// How H is kept from forward to backward. The output of forward does not depend on it.
enum class KeptH : std::int32_t {
  kPrecision = 0,  ///< in the precision of the products: kFp8 keeps e4m3 codes and scales
  kTensors = 1,    ///< in Problem::dtype
};

/// The numbers that the host must know before it launches. Counts on the device are never read
/// back.
struct Problem {
  std::int64_t tokens = 0;    ///< T: rows of x and of the output; 0 is allowed
  std::int64_t hidden = 0;    ///< d >= 1
  std::int64_t width = 0;     ///< n >= 1
  std::int64_t experts = 0;   ///< E >= 1
  std::int64_t top_k = 0;     ///< K >= 1 of the kIds form (K > E if ids repeat); else 0
  std::int64_t capacity = 0;  ///< C of the kPairs form; 0 (derived) for the others
  RoutingForm form = RoutingForm::kIds;
  DType dtype =
      DType::kF32;  ///< of x, weights, biases and outputs; scores are fp32, or fp64 for fp64
  Activation activation{};
  Precision precision = Precision::kTensors;
  KeptH kept_h = KeptH::kPrecision;
};

/// C, the number of rows for which buffers have room: T*K, the pair list's length, or T. Refuses
/// C >= 2^31.
SONICMOE_API std::int64_t row_capacity(const Problem& problem);

/// The routing, in memory of the call's device. Values out of range are skipped, never refused.
struct Routing {
  Tensor ids{};      ///< kIds: (T, K) i32 or i64; < 0 or >= E is an empty slot
  Tensor weights{};  ///< kIds (T, K), kPairs (C): fp32, or fp64 for fp64; kGrouped: (T), absent: 1
  Tensor token{};    ///< kPairs: (C) i32 or i64; out of [0, T) is an empty slot
  Tensor expert{};   ///< kPairs: (C) i32 or i64; out of [0, E) is an empty slot
  Tensor row_begin{};  ///< kGrouped: (E) i32 or i64
  Tensor row_count{};  ///< kGrouped: (E) i32 or i64; ranges are clamped to the buffer
};

/// Expert weights as strided views, so concatenated, interleaved, separate and transposed tensors
/// all have this form. Activations without a gate use only `up` and leave `gate` empty. The same
/// struct holds gradients; an absent gradient is not computed. Elements of gate, up or down must
/// not share memory (expanded tensors are refused), because each has a gradient of its own.
struct Weights {
  Tensor gate{};    ///< (E, n, d)
  Tensor up{};      ///< (E, n, d)
  Tensor down{};    ///< (E, d, n)
  Tensor b_gate{};  ///< (E, n), optional; gated: both b_gate and b_up, or neither
  Tensor b_up{};    ///< (E, n), optional
  Tensor b_down{};  ///< (E, d), optional
};

enum class Pass : std::int32_t { kInference = 0, kForward = 1, kBackward = 2 };

/// Bytes of the buffers that the caller must allocate. Forward writes h and saved, and backward
/// only reads them. The contents of scratch are not needed after the call's work is done. Inference
/// keeps nothing: h and saved have 0 bytes. A problem with an array of 2^55 bytes or more is
/// refused.
struct Sizes {
  std::int64_t h_bytes = 0;        ///< G*C*n elements of the dtype, or their e4m3 codes and scales
  std::int64_t saved_bytes = 0;    ///< metadata: at most 20 B a row, 16 B a token, 1 KiB an expert
  std::int64_t scratch_bytes = 0;  ///< of the pass asked for
};
SONICMOE_API Sizes moe_sizes(const Problem& problem, Pass pass, const Exec& exec = {});

/// Bytes of the buffer that quantize_weights() fills; 0 if the problem's precision is kTensors.
SONICMOE_API std::int64_t fp8_weights_bytes(const Problem& problem, const Exec& exec = {});

/// Quantises gate, up and down into `out`, the argument fp8_weights of forward and backward. Call
/// it again after the weights have changed. Any number of passes may read one buffer.
SONICMOE_API void quantize_weights(const Problem& problem, const Weights& weights,
                                   const Buffer& out, const Exec& exec = {});

/// The smallest row capacity C at which kFp8 is expected to be faster than kTensors, for the
/// problem's d, n and E on the device of `exec`. INT64_MAX if kFp8 is never faster or not served.
SONICMOE_API std::int64_t auto_fp8_rows(const Problem& problem, const Exec& exec = {});
/// kFp8 if row_capacity(problem) >= auto_fp8_rows(problem, exec), else kTensors. Ignores
/// problem.precision.
SONICMOE_API Precision auto_precision(const Problem& problem, const Exec& exec = {});

struct ForwardArgs {
  Tensor x{};  ///< (T, d)
  Routing routing{};
  Weights weights{};
  Tensor out{};  ///< (T, d); kGrouped: out[p] = row weight * Y[p], and 0 for rows of no expert
  Buffer h{};    ///< h and saved empty: inference
  Buffer saved{};
  Buffer scratch{};
  /// kFp8: the buffer that quantize_weights() filled. Gate, up and down of `weights` are then not
  /// read. Empty for kTensors.
  Buffer fp8_weights{};
};

/// Forward. With h and saved it keeps H and metadata for backward; without them it is inference.
/// Both give the same bits. A bad argument throws Error before any work. No output may share an
/// element with another argument, and no buffer a byte.
SONICMOE_API void moe_forward(const Problem& problem, const ForwardArgs& args,
                              const Exec& exec = {});

/// The two parts of H, as views (C, n) of the buffer that forward wrote.
struct HViews {
  Tensor gate{};  ///< empty without a gate
  Tensor up{};
};
/// Views of gate and up before the activation, with biases added, as forward left them in `h`.
///
/// Rows are in the order of the experts. Within an expert, rows of the ids form are in the order
/// (token, slot), rows of the pairs form in the order (token, position in the list), and grouped
/// rows in the order of x. For grouped rows, row p of H belongs to row p of x on CUDA, while on the
/// CPU the rows of H have no gaps; the two differ if there are gaps between the groups or if the
/// groups are not in the order of the experts. Rows after the last routed row, and rows of no
/// group, are not written.
///
/// Gate and up lie side by side ([gate | up]). On CUDA, except in fp8, they alternate if they
/// alternate along n in the weights: each element of up directly follows the same element of gate.
/// Of `weights` only the addresses and strides of gate and up are used. If h has no data, the views
/// have no data. If H is kept as e4m3 codes, the call is refused.
SONICMOE_API HViews h_views(const Problem& problem, const Weights& weights, const Buffer& h,
                            const Exec& exec = {});

/// How the weight gradients are stored. fp64 weights have fp64 gradients in both modes.
enum class GradMode : std::int32_t {
  kWrite = 0,       ///< dW in the weights' dtype (or fp32); experts without rows get zero
  kAccumulate = 1,  ///< dW is added once to fp32 buffers; experts without rows do not change
};

struct BackwardArgs {
  Tensor x{};         ///< as in forward
  Routing routing{};  ///< as in forward
  Weights weights{};  ///< as in forward
  Tensor dout{};      ///< (T, d)
  Buffer h{};         ///< as forward left it; not written
  Buffer saved{};     ///< as forward left it; not written
  Buffer scratch{};
  Tensor dx{};        ///< (T, d), optional
  Tensor dweights{};  ///< shape and dtype of routing.weights, optional; empty slots get 0
  Weights grads{};    ///< any subset; shapes of the weights; strides on CUDA: docs/cpp.md
  GradMode grad_mode = GradMode::kWrite;
  Buffer fp8_weights{};  ///< as in forward
};

/// Backward of moe_forward. It may be called more than once on the same h and saved.
SONICMOE_API void moe_backward(const Problem& problem, const BackwardArgs& args,
                               const Exec& exec = {});

}  // namespace sonicmoe
