// The mbarriers of the ring, by the instructions that sm_80 has.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// An mbarrier of the CTA in shared memory. Waiting takes the parity of the phase that must have
/// completed.
class RingBarrier {
 public:
  static constexpr std::uint32_t kBytes = 8;

  __device__ __forceinline__ explicit RingBarrier(std::uint32_t address) : address_(address) {}

  __device__ __forceinline__ void init(std::uint32_t arrivals) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_), "r"(arrivals));
  }
  /// Arrives with release semantics: orders this thread's earlier reads and writes before it.
  __device__ __forceinline__ void arrive() const {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(address_)
                 : "memory");
  }
  /// Arrives when all earlier cp.async copies of this thread have landed. With noinc it is one of
  /// the arrivals that the barrier was initialised with.
  __device__ __forceinline__ void arrive_after_copies() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address_) : "memory");
  }
  __device__ __forceinline__ void wait(std::uint32_t parity) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // The hardware suspends a waiting thread.
    asm volatile(
        "{\n.reg .pred done;\nAGAIN_%=:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra DONE_%=;\nbra AGAIN_%=;\nDONE_%=:\n}\n" ::"r"(address_),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred done;\nAGAIN_%=:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra DONE_%=;\nbra AGAIN_%=;\nDONE_%=:\n}\n" ::"r"(address_),
        "r"(parity)
        : "memory");
#endif
  }

 private:
  std::uint32_t address_;
};

}  // namespace sonicmoe::cuda::ptx
