// The 16-bit grouped GEMM kernel: a producer and two consumer warpgroups around a pipeline of
// stages in shared memory. Producer, tile scheduler and epilogue are template arguments.
//
// Time in one CTA (to the right), for two cooperative tiles t and u with a deferred epilogue. The
// numbers are the 8 k tiles of each:
//
//   loads       t 0 1 2 3 4 5 6 7  u 0 1 2 3 4 5 6 7           up to 4 stages ahead
//   wgmma             t 0 1 2 3 4 5 6 7    u 0 1 2 3 4 5 6 7
//   rounding                           t                       accumulator to 16-bit words
//   stores                                   t   t   t   t     one box at a time
//   tile index        take         send                        two tiles ahead (InlineScheduler)
//
// Ping-pong: while one warpgroup runs its epilogue, the tensor cores multiply the other one's tile,
// so that no product waits for an epilogue:
//
//   warpgroup 0   products t     | epilogue t     | products t + 2 | ...
//   warpgroup 1   epilogue t - 1 | products t + 1 | epilogue t + 1 | ...
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/deferred.cuh"
#include "cuda/hopper/engine/launch_order.cuh"
#include "cuda/hopper/engine/mainloop.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/ptx/registers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

/// A kernel: producer, scheduler, epilogue and compile-time choices.
template <class Element_, TileShape kShape_, class Producer_, class Scheduler_, class Epilogue_,
          BSource kSource, Major kMajorB_>
  requires TileScheduler<Scheduler_> && RowProducer<Producer_> && TileEpilogue<Epilogue_, kShape_>
struct GroupedGemmKernel {
  using Element = Element_;
  using Producer = Producer_;
  using Scheduler = Scheduler_;
  using Epilogue = Epilogue_;
  static constexpr TileShape kShape = kShape_;
  static constexpr Major kMajorA = Scheduler::kFixedDepth ? Major::kK : Major::kMN;
  static constexpr Major kMajorB = kMajorB_;
  using B = OperandB<kShape, kSource, kMajorB>;
  static constexpr int kRegistersAtLaunch =
      Scheduler::kFixedDepth ? kLaunchRegisters : kLaunchRegistersCoresident;
  /// Whether the last tile along N multiplies fewer columns: not if its halves are gate and up.
  static constexpr bool kNarrows = kSource != BSource::kWeightHalves && kShape.n > 64;
  /// Whether a consumer thread is the dynamic scheduler. Not in ping-pong, where a warpgroup skips
  /// every second tile: a gathering kernel in ping-pong (none is built) would need static order.
  static constexpr bool kConsumerSchedules =
      Producer::kScheduler == SchedulerThread::kConsumer && !kShape.ping_pong();
  /// Threads or warps of a CTA that read tile indices: the producer's, and every consumer warp.
  static constexpr int kQueueReaders = Producer::kQueueReaders + kConsumers * kWarpgroup / 32;
  static_assert(!Producer::kMayStartEarly || Scheduler::kCoherent,
                "before griddepcontrol.wait earlier results may not be read by ld.global.nc");
  static_assert(
      !kShape.ping_pong() || Scheduler::kFixedDepth,
      "in ping-pong a warpgroup skips the other one's stages, so it must know their number");

  using Params =
      GemmParams<typename Producer::Params, typename Scheduler::Params, typename Epilogue::Params>;
};

template <class Gemm>
__device__ __forceinline__ void init_barriers(const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  constexpr int kConsumerWarps = kShape.ping_pong() ? 4 : 8;  // that consume one stage
  for (int s = 0; s < kShape.stages; s++) {
    cta.full(s).init(1 + Gemm::Producer::kCopyArrivals);
    cta.empty(s).init(kConsumerWarps * kShape.cluster);
  }
  for (int s = 0; s < kQueueEntries; s++) {
    cta.queue_full(s).init(1);
    cta.queue_empty(s).init(Gemm::kQueueReaders * kShape.cluster);
  }
  ptx::fence_barrier_init();
}

/// 0 or 1: the thread's consumer warpgroup.
__device__ __forceinline__ int consumer_warpgroup() {
  return ptx::uniform(threadIdx.x / kWarpgroup - 1);
}

/// An inline scheduler sends indices two tiles ahead, so the last one sent to a cluster, entry
/// `entry`, is never read. Its remote store (st.async) may still be in flight: wait for it before
/// the CTA exits, or it would land in shared memory that belongs to another CTA by then.
template <TileShape kShape>
__device__ __forceinline__ void wait_for_unread_index(const Cta<kShape>& cta, std::uint32_t entry) {
  cta.queue_full(entry % kQueueEntries).wait(entry / kQueueEntries & 1);
}
template <class Gemm, class Tiles>
__device__ __forceinline__ void wait_for_unread_index(const Cta<Gemm::kShape>& cta,
                                                      const Tiles& tiles) {
  if constexpr (Gemm::kConsumerSchedules) {
    const std::uint32_t entry = tiles.entries_read();  // 0: static order, or no tiles
    if (entry > 0) wait_for_unread_index(cta, entry);
  }
}

/// The CTA's part of the tile with this index. Branches depend on valid_rows and depth. From
/// ptx::uniform() the compiler knows that both are equal in all lanes: it handles no divergence.
template <class Gemm>
__device__ __forceinline__ CtaTile tile_of(const typename Gemm::Params& p,
                                           const Cta<Gemm::kShape>& cta, int index) {
  CtaTile tile = Gemm::Scheduler::template tile<Gemm::kShape>(p.tiles, index, cta.rank());
  tile.valid_rows = ptx::uniform(tile.valid_rows);
  if (!Gemm::Scheduler::kFixedDepth) tile.depth = ptx::uniform(tile.depth);
  return tile;
}

/// The consumers of immediate epilogues.
template <class Gemm>
__device__ __forceinline__ void consume(const typename Gemm::Params& p,
                                        const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  const int warpgroup = consumer_warpgroup();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  typename Gemm::Epilogue::State state{};
  TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kWarp> tiles(cta, p.tiles);
  // Ping-pong: skips the stages of the other warpgroup's tile.
  const auto skip_other = [&] {
    const int other = Gemm::Scheduler::k_tiles(p.tiles, CtaTile{});
    ring.skip(other % Gemm::kShape.stages, other / Gemm::kShape.stages);
  };
  if (kShape.ping_pong() && warpgroup == 1) {
    if (!tiles.done()) tiles.next();
    skip_other();
    arrive(NamedBarrier::kProducts0, 2 * kWarpgroup);
  }
  InlineScheduler<typename Gemm::Scheduler, kShape> scheduler(cta, p.tiles);
  if (Gemm::kConsumerSchedules && !tiles.done()) scheduler.begin();
  DeferredStores<Gemm> deferred{p.epilogue, staging, warpgroup, state};
  while (true) {
    // If stores of the last tile are deferred, they run in one more round, which has no tile.
    const bool more = !tiles.done();
    if (!more && !deferred.pending()) break;
    if (Gemm::kConsumerSchedules && more) scheduler.take();
    const CtaTile tile = more ? tile_of<Gemm>(p, cta, tiles.index()) : CtaTile{};
    const int offset = kShape.ping_pong() ? 0 : warpgroup * kShape.warpgroup_rows();
    // Blocks of 64 rows without a valid row are neither multiplied nor stored.
    const int valid = tile.valid_rows - offset;
    const int blocks = valid <= 0 ? 0 : min((valid + 63) / 64, kShape.row_blocks());
    const Rows rows{offset, blocks};
    if constexpr (kShape.ping_pong()) {
      sync(of_warpgroup(NamedBarrier::kProducts0, warpgroup), 2 * kWarpgroup);
    }
    const WarpgroupTile part{warpgroup, blocks,
                             Gemm::kNarrows ? p.tiles.columns - tile.column : kShape.n,
                             more ? Gemm::Scheduler::k_tiles(p.tiles, tile) : 0, tile.depth};
    deferred.begin(part.k_tiles);
    Loop::run(acc, cta, ring, part, deferred);
    if (Gemm::kConsumerSchedules && more) scheduler.send(tiles.entries_read() + 1);
    if (Gemm::kShape.ping_pong()) {
      arrive(of_warpgroup(NamedBarrier::kProducts0, warpgroup ^ 1), 2 * kWarpgroup);
    }
    Loop::finish(cta, ring, part);
    if (!more) break;
    if constexpr (kShape.ping_pong()) skip_other();
    if (blocks > 0) Gemm::Epilogue::run(p.epilogue, state, acc, tile, staging, rows);
    if (p.begins == Begins::kIndependent && threadIdx.x == kWarpgroup)
      launch_dependents_after_wait();
    tiles.next();
    if (kShape.ping_pong() && !tiles.done()) tiles.next();
  }
  staging.drain();
  wait_for_unread_index<Gemm>(cta, tiles);
}

/// The consumers of deferred epilogues.
template <class Gemm>
__device__ __forceinline__ void consume_deferring(const typename Gemm::Params& p,
                                                  const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  using Epilogue = typename Gemm::Epilogue;
  const int warpgroup = consumer_warpgroup();
  const int offset = warpgroup * kShape.warpgroup_rows();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  typename Epilogue::State state{};
  DeferredPieces<Gemm> pieces{p.epilogue, staging, state};
  TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kWarp> tiles(cta, p.tiles);
  InlineScheduler<typename Gemm::Scheduler, kShape> scheduler(cta, p.tiles);
  if (Gemm::kConsumerSchedules && !tiles.done()) scheduler.begin();
  CtaTile next{};
  if (!tiles.done()) next = tile_of<Gemm>(p, cta, tiles.index());
  while (true) {
    const bool more = !tiles.done();
    // The pieces of the last tile run in one more round. Unrolled pieces run in flush(), below.
    if (!more && (UnrolledEpilogue<Epilogue> || !pieces.pending())) break;
    const CtaTile tile = next;
    const bool valid = more && tile.valid_rows > offset;
    if (staging.elected()) staging.save_expert(tile.expert);
    const WarpgroupTile part{warpgroup, valid ? kShape.row_blocks() : 0,
                             Gemm::kNarrows ? p.tiles.columns - tile.column : kShape.n,
                             more ? Gemm::Scheduler::k_tiles(p.tiles, tile) : 0, tile.depth};
    ring.make_uniform();
    pieces.template multiply<Loop>(acc, cta, ring, part, [&] {
      if (Gemm::kConsumerSchedules && more) scheduler.take();
    });
    // Computes the next tile while the tensor cores execute this tile's last products.
    if (more) {
      if (Gemm::kConsumerSchedules) scheduler.send(tiles.entries_read() + 1);
      tiles.next();
      if (!tiles.done()) next = tile_of<Gemm>(p, cta, tiles.index());
    }
    Loop::finish(cta, ring, part);
    if (!more) break;
    if (valid) {
      Epilogue::take(p.epilogue, state, acc, tile, staging, {offset, kShape.row_blocks()});
      pieces.done = 0;
    }
    // Up projections are never launched as kIndependent, and have no register for the comparison.
    if (Gemm::Producer::kMayStartEarly && p.begins == Begins::kIndependent &&
        threadIdx.x == kWarpgroup)
      launch_dependents_after_wait();
  }
  if constexpr (UnrolledEpilogue<Epilogue>) pieces.flush();
  staging.drain();
  wait_for_unread_index<Gemm>(cta, tiles);
}

/// The consumers of ring epilogues.
template <class Gemm>
__device__ __forceinline__ void consume_with_input(const typename Gemm::Params& p,
                                                   const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  using Epilogue = typename Gemm::Epilogue;
  static_assert(kShape.row_blocks() == 1);
  const int warpgroup = consumer_warpgroup();
  const int offset = warpgroup * kShape.warpgroup_rows();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  DeferredRelease<Gemm> last_input{cta, ring};
  TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kWarp> tiles(cta, p.tiles);
  InlineScheduler<typename Gemm::Scheduler, kShape> scheduler(cta, p.tiles);
  bool releases_early = p.early_release_tiles != 0;
  while (!tiles.done()) {
    scheduler.take();
    const CtaTile tile = tile_of<Gemm>(p, cta, tiles.index());
    const Rows rows{offset, tile.valid_rows > offset ? 1 : 0};
    if (rows.blocks > 0) Epilogue::begin(p.epilogue, tile, staging, rows);
    // A warpgroup without rows releases the input stages unread, like the stages of k tiles.
    const int input_tiles = rows.blocks > 0 ? 0 : Epilogue::kInputTiles;
    const WarpgroupTile part{warpgroup, rows.blocks, p.tiles.columns - tile.column,
                             Gemm::Scheduler::k_tiles(p.tiles, tile) + input_tiles, tile.depth};
    Loop::run(acc, cta, ring, part, last_input);
    scheduler.send(tiles.entries_read());
    Loop::finish(cta, ring, part);
    if (releases_early && tiles.index() >= p.early_release_tiles) {
      release_early(staging, p.release_count);
      releases_early = false;
    }
    last_input.unreleased = rows.blocks > 0;
    if (rows.blocks > 0) Epilogue::run(p.epilogue, acc, tile, staging, rows, cta, ring);
    tiles.next();
  }
  staging.drain();
  // All tiles of the cluster were early, or it had none: the loop has not released.
  if (releases_early) release_early(staging, p.release_count);
}

template <class Gemm>
__global__ void __maxnreg__(Gemm::kRegistersAtLaunch)
    grouped_gemm_kernel(const __grid_constant__ typename Gemm::Params p) {
  constexpr TileShape kShape = Gemm::kShape;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  Cta<kShape> cta;
  cta.base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    init_barriers<Gemm>(cta);
    Gemm::Producer::prefetch(p.producer);
    ptx::prefetch_map(&p.b.map[0]);
  }
  if constexpr (kShape.cluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  if (RingEpilogue<typename Gemm::Epilogue, kShape> && p.early_release_tiles != 0) {
    ptx::wait_for_previous_kernel();
  } else if (p.begins == Begins::kAfterPrevious) {
    launch_dependents_after_wait();
  }
  constexpr Registers kRegisters = Gemm::Producer::registers(kShape);
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <=
                3 * Gemm::kRegistersAtLaunch);
  if (threadIdx.x < kWarpgroup) {
    ptx::shrink_registers<kRegisters.producer>();
    Gemm::Producer::template run<Gemm>(p, cta);
    __syncwarp();
  } else {
    ptx::grow_registers<kRegisters.consumer>();
    if constexpr (DeferredEpilogue<typename Gemm::Epilogue, kShape>) {
      consume_deferring<Gemm>(p, cta);
    } else if constexpr (RingEpilogue<typename Gemm::Epilogue, kShape>) {
      consume_with_input<Gemm>(p, cta);
    } else {
      consume<Gemm>(p, cta);
    }
  }
  // When this kernel is complete, all kernels before it must be complete too (Begins, rule 3).
  if (p.begins != Begins::kAfterPrevious) ptx::wait_for_previous_kernel();
  // The other CTA may still multicast into this CTA's stages and arrive at its mbarriers.
  if constexpr (kShape.cluster > 1) ptx::cluster_sync();
}

}  // namespace sonicmoe::cuda
