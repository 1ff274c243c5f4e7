// Packed weights: codes of 4 or 8 bits with scales, as checkpoints store them, and the function
// that unpacks them into a tensor that the layer multiplies.
//
// There are two ways to compute a layer with them, with the same bits:
// - unpack_weights() before a pass, into memory that all layers may share, then moe_forward() and
//   moe_backward();
// - on CUDA, moe_forward() and moe_backward() with a PackedLayer. These unpack a few experts at a
//   time, so they need less memory, but they unpack every operand in every pass. The portable
//   engine unpacks to bf16 inside its products instead.
//
// Element (e, r, c) of the unpacked tensor (E, rows, columns) is value(code) * scale, multiplied in
// fp32 and rounded once to the dtype of `out`. i = (e * rows + r) * columns + c below.
//
// | format | code of element i | value | scale |
// |---|---|---|---|
// | kNF4 | byte i/2; even i: high 4 bits | table of 16 | absmax of block i/block |
// | kMXFP4 | byte i/2; even i: low 4 bits | e2m1 | 2^(s - 127), s of block i/32; 255: NaN |
// | kFP8Blocks | byte i | e4m3 | that of block (e, r/128, c/128) |
//
// kNF4 is the format of bitsandbytes, with its table of 16 values. Its absmax may be nested:
// absmax[b] = nested_map[code b] * nested_scales[b/256] + nested_offset, where product and sum are
// each rounded to fp32. kMXFP4 is the format of gpt-oss, kFP8Blocks that of DeepSeek-V3 and of
// Qwen3's fp8 checkpoints.
//
// The host does not check the values of codes and scales, because on CUDA they are in device
// memory. Every value has a meaning: a scale that is NaN makes its block NaN.
#pragma once

#include "sonicmoe/moe.h"
#include "sonicmoe/types.h"

namespace sonicmoe {

/// The formats. The values are part of the C ABI.
enum class PackedFormat : std::int32_t {
  kNF4 = 0,        ///< 4 bits of a table by quantiles of the normal distribution, absmax a block
  kMXFP4 = 1,      ///< e2m1, scales E8M0 of 32 elements
  kFP8Blocks = 2,  ///< e4m3, fp32 scales of 128 x 128 elements
};
inline constexpr std::int32_t kPackedFormatCount = 3;

/// Converts a format to its name, "nf4", "mxfp4" or "fp8_blocks", and back. An unknown value has
/// the name "unknown"; an unknown name throws Status::kInvalidArgument.
SONICMOE_API const char* packed_format_name(PackedFormat format);
SONICMOE_API PackedFormat packed_format_from_name(const char* name);

/// A packed tensor (E, rows, columns), whose columns are contiguous, in memory of the call's
/// device. Every buffer must have exactly the bytes that its comment says. On CUDA `codes` must be
/// aligned to 16 bytes; fp32 buffers must be aligned to 4 bytes.
struct PackedWeights {
  PackedFormat format = PackedFormat::kNF4;
  std::int64_t experts = 0;  ///< E >= 1
  std::int64_t rows = 0;     ///< >= 1
  std::int64_t columns = 0;  ///< >= 1; kMXFP4: a multiple of 32; kFP8Blocks on CUDA: of 16
  /// kNF4: the elements that share an absmax, a power of two from 32 to 4096 that divides
  /// `columns`. Other formats: 0.
  std::int64_t block = 0;
  Buffer codes{};  ///< one byte for 2 elements (kNF4, kMXFP4) or for 1 (kFP8Blocks)
  /// kNF4: fp32 absmax of each block, or with nested_map one byte a block. kMXFP4: one byte for 32
  /// elements. kFP8Blocks: fp32 (E, rows/128, columns/128), both rounded up.
  Buffer scales{};
  Buffer nested_map{};     ///< kNF4, optional: fp32 (256)
  Buffer nested_scales{};  ///< with nested_map: fp32, one for 256 blocks, rounded up
  Buffer nested_offset{};  ///< with nested_map: fp32 (1)
};

/// Writes the unpacked weights to `out`, a contiguous tensor (E, rows, columns) in bf16, fp16 or
/// fp32. On CUDA `out` must be aligned to 16 bytes. `out` must not share memory with the buffers of
/// `packed`. A wrong size, a missing buffer and a buffer that the format does not have throw
/// Status::kInvalidArgument.
SONICMOE_API void unpack_weights(const PackedWeights& packed, const Tensor& out,
                                 const Exec& exec = {});

/// The packed weights of a layer.
struct PackedLayer {
  PackedWeights up;    ///< gate and up: G*n*d elements for each of E experts
  PackedWeights down;  ///< d*n elements for each of E experts
};

/// As moe_forward() and moe_backward() in moe.h, on packed weights. On CUDA only; other backends
/// throw Status::kUnsupported.
///
/// gate and up of args.weights are memory for 1 <= E' <= E experts, (E', n, d), and down for as
/// many or another number, (E', d, n). Each describes where unpack_weights() puts these elements in
/// a contiguous tensor (E', rows, columns) at a multiple of 16 bytes. The call may unpack E'
/// experts at a time there, and leaves the memory with any contents. gate and up may share the
/// memory of down; no other argument may. fp8_weights and the gradients of gate, up and down must
/// be empty, and Problem::precision kTensors.
SONICMOE_API void moe_forward(const Problem& problem, const ForwardArgs& args,
                              const PackedLayer& packed, const Exec& exec = {});
SONICMOE_API void moe_backward(const Problem& problem, const BackwardArgs& args,
                               const PackedLayer& packed, const Exec& exec = {});

}  // namespace sonicmoe
