// The one grouped GEMM kernel: a producer warpgroup and two consumer warpgroups around a ring of
// mbarriers. Producer, scheduler and epilogue are plugs; docs/engine.md has roles, arrival counts
// and the timeline of a tile.
#pragma once

#include "cuda/hopper/engine/beside.cuh"
#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/mainloop.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/ptx/registers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/sm90.cuh"

namespace sonicmoe::cuda {

/// When the tiles of a kernel begin: when the kernel before is complete, or beside its last tiles,
/// as all of them, or those numbered below `early_tiles`, read nothing that it may still write.
enum class Begins : int { kLate = 0, kIndependent = 1, kEarly = 2 };

/// Kernel arguments. They depend on the kinds of plugs alone, so that the host fills one type for
/// all instances of a role.
///
/// What comes next may begin when everything before this kernel is complete, unless `told_tiles`
/// says more. The kernel before must have waited for all before it.
template <class ProducerParams, class SchedulerParams, class EpilogueParams>
struct GemmParams {
  ProducerParams producer;
  OperandBMaps b;
  SchedulerParams tiles;
  EpilogueParams epilogue;
  Begins begins;
  std::int32_t early_tiles;  ///< of kEarly, by TmaRows
  /// Where the epilogue's input comes through the ring: what comes next may begin when the tiles
  /// numbered below it are in memory; 0: at once.
  std::int32_t told_tiles;
  /// CTAs that have told so, zero before their launch. A launch by itself makes no store visible:
  /// kEarly tiles begin only where all `tellers` are counted.
  unsigned* told;
  std::int32_t tellers;
};

/// Binds the plugs and the compile-time choices of one kernel.
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
      Scheduler::kFixedDepth ? kLaunchRegisters : kLaunchRegistersBeside;
  /// Whether the columns of a tile lie as they do in the output.
  static constexpr bool kNarrows = kSource != BSource::kWeightHalves;
  /// The drawing warpgroup must take part in every tile: gathers in ping-pong are static.
  static constexpr bool kConsumerDraws =
      Producer::kDrawer == Drawer::kConsumer && !kShape.ping_pong();
  static_assert(!kShape.ping_pong() || Scheduler::kFixedDepth,
                "in ping-pong a warpgroup must know how far the other one's tile moves the ring");

  using Params =
      GemmParams<typename Producer::Params, typename Scheduler::Params, typename Epilogue::Params>;
};

/// Named barriers 1 and 2 belong to the warpgroups' staging, 3 and 4 to their turns at the
/// products.
inline constexpr int kTurnBarrier = 3;
inline constexpr int kToldBarrier = 6;

template <class Gemm>
__device__ __forceinline__ void init_barriers(const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  constexpr int kReaders = kShape.ping_pong() ? 4 : 8;  // warps that consume a stage
  for (int s = 0; s < kShape.stages; s++) {
    cta.full(s).init(1 + Gemm::Producer::kCopyArrivals);
    cta.empty(s).init(kReaders * kShape.cluster);
  }
  for (int s = 0; s < kSlots; s++) {
    cta.slot_full(s).init(1);
    cta.slot_empty(s).init((Gemm::Producer::kTileReaders + 8) * kShape.cluster);
  }
  ptx::fence_barrier_init();
}

/// What this CTA has stored so far is in memory, so that the next kernel may begin. By both
/// consumer warpgroups, once.
template <TileShape kShape>
__device__ __forceinline__ void tell_of_stores(const Staging<kShape>& staging, unsigned* told) {
  staging.drain();
  ptx::fence_async();
  ptx::named_sync(kToldBarrier, kConsumers * kWarpgroup);
  if (threadIdx.x == kWarpgroup) {
    ptx::release_one(told);
    ptx::launch_next_kernel();
  }
}

/// Which of the consumer warpgroups the thread is in.
__device__ __forceinline__ int consumer() { return ptx::uniform(threadIdx.x / kWarpgroup - 1); }

/// Where consumers draw two numbers ahead, nobody reads the one behind a cluster's last. A CTA may
/// not end before it has come: only its barrier says so.
template <class Gemm, class Stream>
__device__ __forceinline__ void await_unread(const Cta<Gemm::kShape>& cta, const Stream& stream) {
  if constexpr (Gemm::kConsumerDraws) {
    const std::uint32_t number = stream.taken();  // none taken: static order, or no tiles
    if (number > 0) cta.slot_full(number % kSlots).wait(number / kSlots & 1);
  }
}

/// What a tile is; whether there is something to do in it, and for how long, decides over branches.
template <class Gemm>
__device__ __forceinline__ Work work_of(const typename Gemm::Params& p,
                                        const Cta<Gemm::kShape>& cta, int tile) {
  Work work = Gemm::Scheduler::template work<Gemm::kShape>(p.tiles, tile, cta.rank());
  work.left = ptx::uniform(work.left);
  if (!Gemm::Scheduler::kFixedDepth) work.depth = ptx::uniform(work.depth);
  return work;
}

template <class Gemm>
__device__ __forceinline__ void consume(const typename Gemm::Params& p,
                                        const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  const int warpgroup = consumer();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  typename Gemm::Epilogue::State state{};
  TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
  // In ping-pong a warpgroup passes over the stages of the other one's tile.
  const auto skip_other = [&] {
    const int other = Gemm::Scheduler::k_tiles(p.tiles, Work{});
    ring.skip(other % Gemm::kShape.stages, other / Gemm::kShape.stages);
  };
  if (kShape.ping_pong() && warpgroup == 1) {
    if (!stream.done()) stream.next();
    skip_other();
    ptx::named_arrive(kTurnBarrier, 2 * kWarpgroup);
  }
  TileDraw<typename Gemm::Scheduler, kShape> draw(cta, p.tiles);
  if (Gemm::kConsumerDraws && !stream.done()) draw.begin();
  Late<Gemm> late{p.epilogue, staging, warpgroup, state};
  while (true) {
    const bool more = !stream.done();
    if (!more && !late.pending()) break;
    if (Gemm::kConsumerDraws && more) draw.ask();
    const Work work = more ? work_of<Gemm>(p, cta, stream.tile()) : Work{};
    const int offset = kShape.ping_pong() ? 0 : warpgroup * kShape.warpgroup_rows();
    // Halves without a valid row are neither multiplied nor stored.
    const int left = work.left - offset;
    const int halves = left <= 0 ? 0 : min((left + 63) / 64, kShape.halves());
    const Rows rows{offset, halves};
    if constexpr (kShape.ping_pong()) {
      ptx::named_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
    }
    const Part part{warpgroup, halves, Gemm::kNarrows ? p.tiles.columns - work.column : kShape.n,
                    more ? Gemm::Scheduler::k_tiles(p.tiles, work) : 0, work.depth};
    late.next(part.k_tiles);
    Loop::run(acc, cta, ring, part, late);
    if (Gemm::kConsumerDraws && more) draw.post(stream.taken() + 1);
    if (Gemm::kShape.ping_pong()) {
      ptx::named_arrive(kTurnBarrier + (warpgroup ^ 1), 2 * kWarpgroup);
    }
    Loop::finish(cta, ring, part);
    if (!more) break;
    if constexpr (kShape.ping_pong()) skip_other();
    if (halves > 0) Gemm::Epilogue::run(p.epilogue, state, acc, work, staging, rows);
    // By now the kernel before has ended, or its last tiles are about to.
    if (p.begins == Begins::kIndependent && threadIdx.x == kWarpgroup) let_next_begin();
    stream.next();
    if (kShape.ping_pong() && !stream.done()) stream.next();
  }
  staging.drain();
  await_unread<Gemm>(cta, stream);
}

/// As consume(), where the epilogue of a tile runs beside the products of the next one.
template <class Gemm>
__device__ __forceinline__ void consume_deferring(const typename Gemm::Params& p,
                                                  const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  using Epilogue = typename Gemm::Epilogue;
  const int warpgroup = consumer();
  const int offset = warpgroup * kShape.warpgroup_rows();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  typename Epilogue::State state{};
  HeldPieces<Gemm> pieces{p.epilogue, staging, state};
  TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
  TileDraw<typename Gemm::Scheduler, kShape> draw(cta, p.tiles);
  if (Gemm::kConsumerDraws && !stream.done()) draw.begin();
  Work next{};
  if (!stream.done()) next = work_of<Gemm>(p, cta, stream.tile());
  while (true) {
    const bool more = !stream.done();
    // What is left after the last tile runs in the loop's own code, which unrolled pieces lack.
    if (!more && (UnrolledEpilogue<Epilogue> || !pieces.pending())) break;
    const Work work = next;
    const bool valid = more && work.left > offset;
    if (staging.elected()) staging.note_expert(work.expert);
    const Part part{warpgroup, valid ? kShape.halves() : 0,
                    Gemm::kNarrows ? p.tiles.columns - work.column : kShape.n,
                    more ? Gemm::Scheduler::k_tiles(p.tiles, work) : 0, work.depth};
    ring.agree();
    pieces.template multiply<Loop>(acc, cta, ring, part, [&] {
      if (Gemm::kConsumerDraws && more) draw.ask();
    });
    // The next tile is looked up under the last products.
    if (more) {
      if (Gemm::kConsumerDraws) draw.post(stream.taken() + 1);
      stream.next();
      if (!stream.done()) next = work_of<Gemm>(p, cta, stream.tile());
    }
    Loop::finish(cta, ring, part);
    if (!more) break;
    if (valid) {
      Epilogue::take(p.epilogue, state, acc, work, staging, {offset, kShape.halves()});
      pieces.done = 0;
    }
    // Up projections are never independent, and have no register for the question.
    if (!Gemm::kConsumerDraws && p.begins == Begins::kIndependent && threadIdx.x == kWarpgroup)
      let_next_begin();
  }
  if constexpr (UnrolledEpilogue<Epilogue>) pieces.flush();
  staging.drain();
  await_unread<Gemm>(cta, stream);
}

/// As consume(), where the epilogue's input comes through the ring.
template <class Gemm>
__device__ __forceinline__ void consume_with_input(const typename Gemm::Params& p,
                                                   const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  using Epilogue = typename Gemm::Epilogue;
  static_assert(kShape.halves() == 1);
  const int warpgroup = consumer();
  const int offset = warpgroup * kShape.warpgroup_rows();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  OwedStage<Gemm> stage{cta, ring};
  TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
  TileDraw<typename Gemm::Scheduler, kShape> draw(cta, p.tiles);
  bool tells = p.told_tiles != 0;
  while (!stream.done()) {
    draw.ask();
    const Work work = work_of<Gemm>(p, cta, stream.tile());
    const Rows rows{offset, work.left > offset ? 1 : 0};
    if (rows.halves > 0) Epilogue::begin(p.epilogue, work, staging, rows);
    // Without rows the epilogue's stages are passed on too.
    const int more = rows.halves > 0 ? 0 : Epilogue::kInputTiles;
    const Part part{warpgroup, rows.halves, p.tiles.columns - work.column,
                    Gemm::Scheduler::k_tiles(p.tiles, work) + more, work.depth};
    Loop::run(acc, cta, ring, part, stage);
    draw.post(stream.taken());
    Loop::finish(cta, ring, part);
    if (tells && stream.tile() >= p.told_tiles) {
      tell_of_stores(staging, p.told);
      tells = false;
    }
    stage.owes = rows.halves > 0;
    if (stage.owes) Epilogue::run(p.epilogue, acc, work, staging, rows, cta, ring);
    stream.next();
  }
  staging.drain();
  if (tells) tell_of_stores(staging, p.told);  // a cluster of fewer tiles
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
  if (RingEpilogue<typename Gemm::Epilogue, kShape> && p.told_tiles != 0) {
    ptx::wait_for_previous_kernel();
  } else if (p.begins == Begins::kLate) {
    let_next_begin();
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
  // Whoever waits for this kernel waits for those before it too.
  if (p.begins != Begins::kLate) ptx::wait_for_previous_kernel();
  // A CTA may not leave while its neighbour can still reach its barriers and stages.
  if constexpr (kShape.cluster > 1) ptx::cluster_sync();
}

}  // namespace sonicmoe::cuda
