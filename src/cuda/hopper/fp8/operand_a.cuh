// Operand A of the FP8 products. wgmma reads the codes of A from shared memory (Fp8SharedCodes) or
// from registers (Fp8RegisterCodes). Both classes have the same functions. For each k tile the main
// loop calls
//
//   arrived()  when the stage is full; products of the previous k tile may still run
//   load()     when these products are complete too
//   step()     for the operand of each wgmma
#pragma once

#include <cstdint>

#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/fp8/tile_cards.cuh"
#include "cuda/hopper/ptx/thread.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

inline constexpr int kFp8Steps = 4;  // wgmma instructions of a unit; each takes 32 codes along K

/// The codes stay in the stage. Each unit reads them again. Producer is the kernel's producer.
template <class Producer>
class Fp8SharedCodes {
 public:
  __device__ __forceinline__ explicit Fp8SharedCodes(int warpgroup) : warpgroup_(warpgroup) {}
  /// cp.async writes gathered rows through the generic proxy; wgmma reads through the async proxy.
  __device__ __forceinline__ void arrived() const {
    if constexpr (Producer::kGathers) ptx::fence_async_shared();
  }
  __device__ __forceinline__ void load(const Fp8Cta&, int) const {}
  __device__ __forceinline__ std::uint64_t step(const Fp8Cta& cta, int stage, int k) const {
    const std::uint32_t first = cta.a(stage) + warpgroup_ * 64 * 128;
    return ptx::SwizzledOperand(first, leading_bytes(Major::kK)).at(k * 32);
  }

 private:
  int warpgroup_;
};

/// A thread's codes are copied to 16 registers once, for both units. This makes the kernels of A 2
/// to 6 % faster, but those of dH and dX~ 1 to 3 % slower (H200).
class Fp8RegisterCodes {
 public:
  /// The thread number is read again for each tile, so that the compiler does not keep the offset
  /// in a register during an epilogue.
  __device__ __forceinline__ explicit Fp8RegisterCodes(int) {
    const int thread = ptx::thread() - kWarpgroup;
    const int row = (thread >> 5) * 16 + (thread & 15);
    offset_ = row * 128 + ((thread >> 4 & 1 ^ thread & 7) << 4);
  }
  __device__ __forceinline__ void arrived() const {}
  /// Lane i gives the swizzled address of the first or second 16 codes of row i % 16 of its warp.
  /// The 128 codes of a row lie together, so bits 5 and 6 of an address count the steps.
  __device__ __forceinline__ void load(const Fp8Cta& cta, int stage) {
    const std::uint32_t first = cta.a(stage) + offset_;
#pragma unroll
    for (int k = 0; k < kFp8Steps; k++) ptx::load_matrices(codes_[k], first ^ k * 32);
  }
  __device__ __forceinline__ const std::uint32_t (&step(const Fp8Cta&, int, int k) const)[4] {
    return codes_[k];
  }

 private:
  std::uint32_t offset_;
  std::uint32_t codes_[kFp8Steps][4];
};

}  // namespace sonicmoe::cuda
