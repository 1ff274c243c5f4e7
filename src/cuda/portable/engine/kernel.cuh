// The kernel of the portable engine. Its CTAs are persistent, and all warps copy, multiply and
// store.
//
// Every thread issues a part of the copies of each k tile. Copies run kStages - 1 k tiles ahead of
// the products, also from one tile of D to the next: while a warp's epilogue stores a tile, the
// operands of the next tile arrive.
//
// There is no producer warp. With a ninth warp, one quarter of the multiprocessor's registers would
// have to serve three warps. A thread would have 168 registers, but its products alone take 192.
//
// A warp issues a copy after every few mma.sync. If it issued all copies of a k tile at once, the
// tensor cores would be idle meanwhile.
#pragma once

#include <cstdint>

#include "cuda/portable/engine/architecture.cuh"
#include "cuda/portable/engine/fragments.cuh"
#include "cuda/portable/engine/pipeline.cuh"
#include "cuda/portable/engine/tile_slots.cuh"
#include "cuda/portable/params.h"
#include "cuda/portable/shape.h"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda::portable {

/// A barrier of all threads in a build with SONICMOE_RACECHECK, else nothing. Racecheck
/// (compute-sanitizer 2025.3.1) does not see that the ring's mbarriers order accesses, and reports
/// races between copies and reads of stages. With this barrier at each wait for a stage, racecheck
/// can judge all other accesses to shared memory.
__device__ __forceinline__ void meet_for_racecheck() {
#ifdef SONICMOE_RACECHECK
  __syncthreads();
#endif
}

/// `Producer` copies k tiles (producers/). `Epilogue` processes and stores the accumulators of a
/// tile (epilogues/). If an epilogue has prepare(), it is called before the products of each tile.
template <class Element, class Producer, class Epilogue>
class Kernel {
 public:
  using Shape = typename Producer::Shape;
  using Params = ProductParams<typename Producer::Params, typename Epilogue::Params>;

  static __device__ __forceinline__ void run(const Params& p) {
    const std::uint32_t base = ptx::shared_address(shared_memory());
    const std::uint32_t staging = base + kBarrierBytes + kSlotBytes;
    const Pipeline<Shape> pipeline(base, staging + Shape::kWarps * kStagingBytes);
    if (threadIdx.x == 0) pipeline.init(Producer::kStores ? Shape::kWarps : 1);
    __syncthreads();

    Kernel kernel(p, pipeline);
    for (int i = 0; i < kStages - 1; i++) {
      kernel.template copy<0, Producer::kCopies>();
      kernel.finish_copies();
    }
    for (unsigned tile = 0;; tile++) {
      pipeline.full(kernel.read_.stage).wait(kernel.read_.parity);
      meet_for_racecheck();
      const TileSlot& slot = tile_slots()[tile % kTileSlots];
      if (slot.k_tiles == 0) break;
      if constexpr (requires { Epilogue::prepare(p.epilogue, slot); }) {
        Epilogue::prepare(p.epilogue, slot);
      }
      Accumulators acc = {};
      kernel.multiply(acc, slot.k_tiles);
      Epilogue::run(p.epilogue, acc, slot, kernel.warp_,
                    staging + (threadIdx.x >> 5) * kStagingBytes);
    }
    // The last copies write zeros. They must land before the CTA exits, because another CTA may
    // then own this shared memory.
    ptx::copies_wait();
  }

 private:
  /// Steps of a k tile: one mma.sync takes 16 of K.
  static constexpr int kSteps = Shape::kDepth / 16;
  /// The first step that issues copies. In step 0 a warp would wait for the slowest warp, which is
  /// still reading the previous k tile; the products of one step cover this wait.
  static constexpr int kFirstCopies = kSteps > 2 ? 1 : 0;

  __device__ __forceinline__ Kernel(const Params& p, const Pipeline<Shape>& pipeline)
      : p_(p), pipeline_(pipeline), producer_(p.tiles), a_(warp_), b_(warp_) {}

  /// Copies are issued after every 2 * kApart mma.sync of a warp.
  static constexpr int kApart = Producer::kStores ? 1 : 4;

  /// Waits until all warps have read the stage to fill.
  __device__ __forceinline__ void wait_for_room() const {
    pipeline_.empty(fill_.stage).wait(fill_.parity ^ 1);
    meet_for_racecheck();
  }

  template <int kFrom, int kTo>
  __device__ __forceinline__ void copy() {
    if constexpr (kFrom < kTo) {
      producer_.template copy<kFrom>(p_.tiles, pipeline_.address(fill_.stage));
      copy<kFrom + 1, kTo>();
    }
  }

  __device__ __forceinline__ void finish_copies() {
    pipeline_.full(fill_.stage).arrive_after_copies();
    if constexpr (Producer::kStores) {
      __syncwarp();
      if (warp_.lane == 0) pipeline_.full(fill_.stage).arrive();
    } else if (threadIdx.x == 0) {
      pipeline_.full(fill_.stage).arrive();
    }
    fill_.next();
    producer_.advance(p_.tiles);
  }

  /// A warp's operands. Those of B are loaded one step ahead. Those of A are, too, unless registers
  /// are needed for stores: then a fragment is replaced after its last mma.sync.
  static constexpr int kBuffersA = Producer::kStores ? 1 : 2;
  struct Operands {
    Operand a[kBuffersA];
    Operand b[2];
  };

  template <int kStep>
  __device__ __forceinline__ void load_all(Operands& operands) const {
    a_.template load<kStep>(operands.a[kStep % kBuffersA], pipeline_.address(read_.stage));
    b_.template load<kStep>(operands.b[kStep & 1], pipeline_.address(read_.stage));
  }

  /// Computes the sums of a tile of D. Its first k tile must have arrived.
  __device__ __forceinline__ void multiply(Accumulators& acc, int k_tiles) {
    Operands operands;
    load_all<0>(operands);
    for (int i = 0; i < k_tiles; i++) {
      multiply_steps<0>(acc, operands);
      finish_copies();
    }
  }

  /// Multiplies a k tile from step kStep on and issues copies of a later k tile. Operands are
  /// loaded one step ahead: the last step loads those of the next k tile, which may belong to the
  /// next tile of D.
  template <int kStep>
  __device__ __forceinline__ void multiply_steps(Accumulators& acc, Operands& operands) {
    constexpr bool kIsLast = kStep + 1 == kSteps;
    constexpr int kNext = (kStep + 1) % kSteps;
    if constexpr (kStep == kFirstCopies && Producer::kFirstStore == 0) wait_for_room();
    const auto empty = pipeline_.empty(read_.stage);
    const auto leave = [&] {
      __syncwarp();
      if (warp_.lane == 0) empty.arrive();
    };
    if constexpr (kIsLast) {
      if constexpr (kBuffersA == 2) leave();
      read_.next();
      pipeline_.full(read_.stage).wait(read_.parity);
    }
    if constexpr (kBuffersA == 2) {
      load_all<kNext>(operands);
    } else {
      b_.template load<kNext>(operands.b[kNext & 1], pipeline_.address(read_.stage));
    }
    multiply_add<Element>(acc, operands.a[kStep % kBuffersA], operands.b[kStep & 1], [&]<int i>() {
      if constexpr (kBuffersA == 1) {
        if constexpr (i % 4 == 3) {
          a_.template load_fragment<kNext>(operands.a[0][i / 4], pipeline_.address(read_.stage),
                                           i / 4);
        }
        if constexpr (kIsLast && i == 2) leave();  // the reads of the step before have ended
      }
      constexpr bool kIsPlace = i % kApart == kApart - 1;
      if constexpr (kStep >= kFirstCopies && kIsPlace) {
        constexpr int kPlaces = 16 / kApart * (kSteps - kFirstCopies);
        constexpr int kPlace = 16 / kApart * (kStep - kFirstCopies) + i / kApart;
        if constexpr (kPlace > 0 && kPlace == Producer::kFirstStore) wait_for_room();
        copy<kPlace * Producer::kCopies / kPlaces, (kPlace + 1) * Producer::kCopies / kPlaces>();
        if constexpr (kBuffersA == 1) {
          tie<kPlace>(operands.a[0][(i / 4 + 1) % 4][0]);
        }
      }
    });
    if constexpr (!kIsLast) multiply_steps<kStep + 1>(acc, operands);
  }

  /// Makes the operand of the next mma.sync depend on what copy() has computed before. Otherwise
  /// ptxas would compute half of it after the last mma.sync of a k tile.
  template <int kPlace>
  __device__ __forceinline__ void tie(std::uint32_t& operand) const {
    if constexpr (Producer::has_zero(kPlace)) operand |= producer_.zero(p_.tiles);
  }

  const Params& p_;
  Pipeline<Shape> pipeline_;
  Warp warp_{Shape::kWarpsAlongColumns};
  RingPosition fill_;
  RingPosition read_;
  Producer producer_;
  FragmentsA<Shape, Producer::kMajorA> a_;
  FragmentsB<Shape, Producer::kMajorB, Epilogue::kColumns, Epilogue::kColumnOrder> b_;
};

/// The kernel is empty in code for a compute capability that does not have its shape
/// (is_compiled()). The host does not launch it there.
template <class K>
__global__ void __launch_bounds__(K::Shape::kThreads, K::Shape::kCtas)
    product_kernel(const __grid_constant__ typename K::Params p) {
  if constexpr (is_compiled(K::Shape::kShape, kArchitecture)) K::run(p);
}

}  // namespace sonicmoe::cuda::portable
