// Barriers: mbarriers in shared memory (the ring between producers and consumers), named barriers
// (groups of warps inside one CTA) and the cluster barrier. Shared addresses are 32-bit throughout.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// An mbarrier of this CTA. Waiting takes the parity of the phase that must have completed.
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
  /// One arrival, and the phase now also waits for `bytes` of bulk copies.
  __device__ __forceinline__ void arrive_expecting(std::uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_),
                 "r"(bytes)
                 : "memory");
  }
  /// This thread's arrival, made when all its earlier cp.async copies have landed (noinc: it is
  /// one of the arrivals the barrier was initialised with).
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

/// Makes initialised mbarriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Stores a word into CTA `cta` of the cluster at `slot`, and arrives at its barrier: the phase
/// ends when the word is there. Nothing is waited for. (A store and an arrival that releases it to
/// the cluster would wait for all that the thread has written, 600 clocks.)
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

__device__ __forceinline__ std::int32_t load_word(std::uint32_t address) {
  std::int32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_word(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint4 load_shared16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_zero16(std::uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ float load_float(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_float(std::uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
/// Two of them, 8 bytes aligned.
__device__ __forceinline__ void store_floats(std::uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}
__device__ __forceinline__ void store_half_word(std::uint32_t address, std::uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

/// Named barriers 1..15 of the CTA; `threads` counts those that sync plus those that only arrive.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/// Counts up a word that another kernel reads by acquire_word(): whoever sees the number sees what
/// this thread, and those it has met at a barrier, wrote before.
__device__ __forceinline__ void release_one(unsigned* word) {
  asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(word)
               : "memory");
}
__device__ __forceinline__ unsigned acquire_word(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

/// Programmatic dependent launch: wait until the kernels before this one have finished, and let
/// the next one start its prologue.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void launch_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Moves registers between the warpgroups of a CTA; every warp of the warpgroup must execute it.
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sonicmoe::cuda::ptx
