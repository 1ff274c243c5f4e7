// Barriers in shared memory (mbarriers), by which producers and consumers wait for each other.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// An mbarrier of this CTA. wait() takes the parity of the phase that must have completed.
class Mbarrier {
 public:
  static constexpr std::uint32_t kBytes = 8;

  __device__ __forceinline__ explicit Mbarrier(std::uint32_t address) : address_(address) {}
  __device__ __forceinline__ std::uint32_t address() const { return address_; }

  __device__ __forceinline__ void init(std::uint32_t arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_), "r"(arrivals));
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_) : "memory");
  }
  /// Arrives at the barrier of the same address in CTA `cta` of the cluster.
  __device__ __forceinline__ void arrive_at(std::uint32_t cta) const {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(address_),
        "r"(cta)
        : "memory");
  }
  /// Arrives once, and makes the current phase also wait for `bytes` more bytes of bulk copies.
  __device__ __forceinline__ void arrive_expecting(std::uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_),
                 "r"(bytes)
                 : "memory");
  }
  /// Arrives once, as soon as all earlier cp.async copies of this thread have landed. The thread
  /// does not wait. (noinc: the arrival is one of the arrivals that init() counted.)
  __device__ __forceinline__ void arrive_after_copies() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address_) : "memory");
  }
  __device__ __forceinline__ void wait(std::uint32_t parity) const {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE_%=;\nbra AGAIN_%=;\nDONE_%=:\n}\n" ::"r"(address_),
        "r"(parity)
        : "memory");
  }

 private:
  std::uint32_t address_;
};

/// Makes initialised mbarriers visible to the cluster and to bulk copies.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Stores a word at the shared address `slot` of CTA `cta` of the cluster, and arrives once at
/// `barrier` in that CTA. The barrier's phase completes only after the word is stored. The thread
/// does not wait. An ordinary store, followed by an arrival that releases it to the cluster, would
/// wait 600 clocks for all earlier stores of the thread (H200).
__device__ __forceinline__ void post_word(std::uint32_t slot, Mbarrier barrier, std::uint32_t cta,
                                          std::int32_t value) {
  asm volatile(
      "{\n.reg .b32 word, ready;\nmapa.shared::cluster.u32 word, %0, %2;\n"
      "mapa.shared::cluster.u32 ready, %1, %2;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [ready], 4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [word], %3, [ready];\n}\n" ::"r"(
          slot),
      "r"(barrier.address()), "r"(cta), "r"(value)
      : "memory");
}

}  // namespace sonicmoe::cuda::ptx
