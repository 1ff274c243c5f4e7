// The MoE layer, forward and backward: O[t] = sum_k s_k * (W2_e act(W1_e x_t + b1_e) + b2_e), where
// e is the expert of token t's k-th choice and s_k its routing weight.
//
// From forward to backward the layer keeps only X, H and routing metadata (the method of SonicMoE,
// arXiv 2512.14080). A call writes every element of its outputs, whatever the routing.
// GradMode says how weight gradients are stored. Equal inputs give equal bits in every run.
// docs/method.md has the formulas and says where values are rounded.
//
// A training step:
//   Sizes f = moe_sizes(problem, Pass::kForward), b = moe_sizes(problem, Pass::kBackward);
//   moe_forward(problem, {x, routing, weights, out, h, saved, scratch}, exec);
//   moe_backward(problem, {x, routing, weights, dout, h, saved, scratch, grads...}, exec);
// Both calls may use the same scratch, of the larger of the two sizes.
#pragma once

#include "sonicmoe/low_rank.h"
#include "sonicmoe/types.h"

namespace sonicmoe {

/// The form in which a caller gives the routing.
enum class RoutingForm : std::int32_t {
  kIds = 0,      ///< ids and weights (T, K); C = T*K
  kPairs = 1,    ///< a list of (token, expert, weight) in any order; C is its length
  kGrouped = 2,  ///< x is grouped by expert: rows of expert e begin at row_begin[e]; C = T
};

/// The precision of the products. kFp8 needs bf16 tensors, d and n that are multiples of 64, and
/// the CPU or a GPU whose engine has FP8 kernels (H100 and H200 with the engine hopper). Other
/// requests throw Status::kUnsupported. docs/fp8.md has its formulas.
enum class Precision : std::int32_t {
  kTensors = 0,  ///< Problem::dtype
  kFp8 = 1,      ///< e4m3 with block scales; weight gradients in Problem::dtype
};

/// Converts a precision to its name, "tensors" or "fp8", and back. An unknown value has the name
/// "unknown"; an unknown name throws Status::kInvalidArgument.
SONICMOE_API const char* precision_name(Precision precision);
SONICMOE_API Precision precision_from_name(const char* name);

/// How H is kept from forward to backward. The output of forward does not depend on it.
enum class KeptH : std::int32_t {
  kPrecision = 0,  ///< with kFp8 as e4m3 codes and scales, else in Problem::dtype
  kTensors = 1,    ///< in Problem::dtype
};

/// The sizes and options of a layer. On CUDA moe_forward() and moe_backward() need no other numbers
/// on the host: they never read counts back from the device.
struct Problem {
  std::int64_t tokens = 0;    ///< T: rows of x and of the output; 0 is allowed
  std::int64_t hidden = 0;    ///< d >= 1
  std::int64_t width = 0;     ///< n >= 1
  std::int64_t experts = 0;   ///< E >= 1
  std::int64_t top_k = 0;     ///< kIds: K >= 1, may exceed E (ids may repeat); else 0
  std::int64_t capacity = 0;  ///< kPairs: C >= 0, the length of the list; else 0
  RoutingForm form = RoutingForm::kIds;
  DType dtype =
      DType::kF32;  ///< of x, weights, biases and outputs; scores are fp32, or fp64 for fp64
  Activation activation{};
  Precision precision = Precision::kTensors;
  KeptH kept_h = KeptH::kPrecision;
  std::int64_t up_rank = 0;    ///< rank of the low-rank factors of gate and up; 0: no factors
  std::int64_t down_rank = 0;  ///< rank of the low-rank factors of down; 0: no factors
  bool f32_factors = false;    ///< the factors are fp32; else they are in `dtype`
};

/// C, the number of rows for which buffers have room: T*K (kIds), Problem::capacity (kPairs) or T
/// (kGrouped). Checks nothing; functions that take a problem refuse C >= 2^31.
constexpr std::int64_t row_capacity(const Problem& problem) {
  if (problem.form == RoutingForm::kIds) return problem.tokens * problem.top_k;
  return problem.form == RoutingForm::kPairs ? problem.capacity : problem.tokens;
}

/// The routing, in memory of the call's device. Tensors of other forms must not be given. The host
/// does not check values on the device: empty slots are skipped and ranges are clamped. If the row
/// ranges of two experts overlap, the results are unspecified.
struct Routing {
  Tensor ids{};  ///< kIds: (T, K) i32 or i64; outside [0, E): an empty slot
  Tensor
      weights{};   ///< fp32 (fp64 for fp64); kIds: (T, K); kPairs: (C); kGrouped: (T) or absent (1)
  Tensor token{};  ///< kPairs: (C) i32 or i64; outside [0, T): an empty slot
  Tensor expert{};     ///< kPairs: (C) i32 or i64; outside [0, E): an empty slot
  Tensor row_begin{};  ///< kGrouped: (E) i32 or i64; the first row of x of each expert
  Tensor row_count{};  ///< kGrouped: (E) i32 or i64; ranges are clamped to [0, T)
};

/// Expert weights as strided views. Views describe concatenated, interleaved, separate and
/// transposed tensors. Activations without a gate use `up` and leave `gate` and `b_gate` empty. Two
/// elements of one weight matrix must not share memory, because each has its own gradient: expanded
/// tensors are refused. The same struct holds gradients; a gradient that is not given is not
/// computed.
struct Weights {
  Tensor gate{};    ///< (E, n, d)
  Tensor up{};      ///< (E, n, d)
  Tensor down{};    ///< (E, d, n)
  Tensor b_gate{};  ///< (E, n), optional; gated: both b_gate and b_up, or neither
  Tensor b_up{};    ///< (E, n), optional
  Tensor b_down{};  ///< (E, d), optional
};

/// A pass of the layer. Inference is a forward that keeps nothing for backward.
enum class Pass : std::int32_t { kInference = 0, kForward = 1, kBackward = 2 };

/// Bytes of the buffers that the caller must allocate for a pass. Forward writes h and saved, and
/// backward only reads them; for inference both have 0 bytes. The contents of scratch are not
/// needed after the call's work is done. A problem with an array of 2^55 bytes or more throws
/// Status::kOutOfRange.
struct Sizes {
  std::int64_t h_bytes = 0;  ///< G*C*n elements of the dtype, or their e4m3 codes and scales
  /// Metadata: at most 20 B a row, 16 B a token, 1 KiB an expert; and C * up_rank elements of the
  /// dtype.
  std::int64_t saved_bytes = 0;
  std::int64_t scratch_bytes = 0;  ///< differs between passes
};
SONICMOE_API Sizes moe_sizes(const Problem& problem, Pass pass, const Exec& exec = {});

/// Bytes of the buffer that quantize_weights() fills; 0 if problem.precision is kTensors.
SONICMOE_API std::int64_t fp8_weights_bytes(const Problem& problem, const Exec& exec = {});

/// Quantises gate, up and down of a problem with kFp8 into `out`, a buffer of fp8_weights_bytes().
/// Pass `out` as fp8_weights to forward and backward; any number of passes may read it. Quantise
/// again after the weights have changed. A problem with kTensors throws Status::kInvalidArgument.
SONICMOE_API void quantize_weights(const Problem& problem, const Weights& weights,
                                   const Buffer& out, const Exec& exec = {});

/// The smallest row capacity C at which kFp8 is expected to be faster than kTensors, for the
/// problem's d, n and E on the device of `exec`. INT64_MAX if kFp8 is not expected to be faster at
/// any C, or if dtype, sizes or device do not allow kFp8. Ignores problem.precision.
SONICMOE_API std::int64_t auto_fp8_rows(const Problem& problem, const Exec& exec = {});
/// kFp8 if row_capacity(problem) >= auto_fp8_rows(problem, exec), else kTensors. Ignores
/// problem.precision.
SONICMOE_API Precision auto_precision(const Problem& problem, const Exec& exec = {});

/// Arguments of moe_forward(). Tensors have Problem::dtype, unless a comment says otherwise.
struct ForwardArgs {
  Tensor x{};  ///< (T, d)
  Routing routing{};
  Weights weights{};
  Tensor out{};  ///< (T, d); kGrouped: out[p] = row weight * Y[p], and 0 for rows of no expert
  Buffer h{};    ///< for inference leave h and saved empty
  Buffer saved{};
  Buffer scratch{};
  /// kFp8: the buffer that quantize_weights() filled; gate, up and down of `weights` are checked,
  /// but their elements are not read. kTensors: empty.
  Buffer fp8_weights{};
  Lora lora{};  ///< low-rank factors, of the ranks that `problem` has
};

/// Forward. With h and saved it keeps H and metadata for backward; without them it is inference.
/// Both give the same bits in `out`. An output must not share an element with another argument, and
/// h, saved and scratch must not share a byte with another argument. Wrong arguments are refused
/// before any work (status.h).
SONICMOE_API void moe_forward(const Problem& problem, const ForwardArgs& args,
                              const Exec& exec = {});

/// The two parts of H, as views (C, n) of the buffer that forward wrote.
struct HViews {
  Tensor gate{};  ///< empty if the activation has no gate
  Tensor up{};
};
/// Views of gate and up before the activation, with biases added, as forward wrote them to `h`.
/// | form | order of the rows of H |
/// |---|---|
/// | kIds | by expert, then token, then slot |
/// | kPairs | by expert, then token, then position in the list |
/// | kGrouped on the CPU | by expert, then row of x, without gaps |
/// | kGrouped on CUDA | row p of H belongs to row p of x |
///
/// Forward does not write the rows after the last routed row, nor (kGrouped on CUDA) rows of no
/// group.
///
/// A row of H is [gate | up], with one exception: on CUDA with kTensors, gate and up alternate if
/// they alternate along n in the weights. Each element of up then directly follows the same element
/// of gate.
///
/// Of `weights` the call uses only the descriptions of gate and up, not their elements. If h has no
/// data, the views have no data. If H is kept as e4m3 codes, the call throws Status::kUnsupported.
SONICMOE_API HViews h_views(const Problem& problem, const Weights& weights, const Buffer& h,
                            const Exec& exec = {});

/// How the weight gradients are stored. fp64 weights have fp64 gradients in both modes.
enum class GradMode : std::int32_t {
  kWrite = 0,       ///< writes dW, in the weights' dtype or fp32; 0 for experts without rows
  kAccumulate = 1,  ///< adds the finished dW to fp32 buffers; experts without rows: no change
};

/// Arguments of moe_backward(). Absent gradients are not computed.
struct BackwardArgs {
  Tensor x{};         ///< as in forward
  Routing routing{};  ///< as in forward
  Weights weights{};  ///< as in forward
  Tensor dout{};      ///< (T, d)
  Buffer h{};         ///< as forward wrote it; only read
  Buffer saved{};     ///< as forward wrote it; only read
  Buffer scratch{};
  Tensor dx{};        ///< (T, d), optional
  Tensor dweights{};  ///< shape and dtype of routing.weights, optional; empty slots get 0
  Weights grads{};    ///< any subset, each with its weight's shape; strides on CUDA: docs/cpp.md
  GradMode grad_mode = GradMode::kWrite;
  Buffer fp8_weights{};  ///< as in forward
  Lora lora{};           ///< as in forward
  Lora lora_grads{};     ///< any subset, each with its factor's shape; stored by grad_mode
};

/// Backward of moe_forward(). It may be called more than once with the same h and saved. `problem`,
/// x, routing, weights and factors must be those of the forward. The rules for shared memory and
/// wrong arguments are those of moe_forward().
SONICMOE_API void moe_backward(const Problem& problem, const BackwardArgs& args,
                               const Exec& exec = {});

}  // namespace sonicmoe
