// The one grouped GEMM kernel: a producer warpgroup and two consumer warpgroups around a ring of
// mbarriers. Producer, scheduler and epilogue are plugs; docs/engine.md has roles, arrival counts
// and the timeline of a tile.
#pragma once

#include "cuda/engine/concepts.cuh"
#include "cuda/engine/mainloop.cuh"
#include "cuda/engine/operand_b.cuh"

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

template <class Gemm>
__device__ __forceinline__ void consume(const typename Gemm::Params& p,
                                        const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  const int warpgroup = threadIdx.x / kWarpgroup - 1;
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
  if (Gemm::kConsumerDraws && !stream.done()) {
    draw.ask();
    draw.post(0);
  }
  const auto store_late = [&] {
    if constexpr (StoresLate<typename Gemm::Epilogue>) {
      if (state.held) Gemm::Epilogue::late(p.epilogue, state, staging);
    }
  };
  while (!stream.done()) {
    if (Gemm::kConsumerDraws) draw.ask();
    const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
    const int offset = kShape.ping_pong() ? 0 : warpgroup * kShape.warpgroup_rows();
    const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
    // Halves without a valid row are neither multiplied nor stored.
    const int left = work.left - offset;
    const int halves = left <= 0 ? 0 : min((left + 63) / 64, kShape.halves());
    const Rows rows{offset, halves};
    if constexpr (kShape.ping_pong()) {
      ptx::named_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
    }
    const auto hand_over = [&] {
      if (Gemm::kConsumerDraws) draw.post(stream.taken() + 1);
      if (Gemm::kShape.ping_pong()) {
        ptx::named_arrive(kTurnBarrier + (warpgroup ^ 1), 2 * kWarpgroup);
      }
    };
    const auto beside = [&](int kt) {
      if constexpr (StoresLate<typename Gemm::Epilogue>) {
        if (kt == Gemm::Epilogue::late_at(k_tiles, warpgroup)) store_late();
      }
    };
    const auto nothing = [](int) {};
    const Span span{k_tiles, work.depth};
    if (!Gemm::Scheduler::kFixedDepth && k_tiles == 0) {
      hand_over();  // an expert without rows: the epilogue stores zeros
    } else if (halves == kShape.halves()) {
      // The last tile of columns may have only 64 or 128 of them.
      const int columns = Gemm::kNarrows ? p.tiles.columns - work.column : kShape.n;
      constexpr int kHalves = kShape.halves();
      if (Gemm::kNarrows && columns <= 64) {
        Loop::template run<kHalves, 64>(acc, cta, ring, warpgroup, span, nothing, hand_over);
      } else if (Gemm::kNarrows && columns <= 128 && kShape.n > 128) {
        Loop::template run<kHalves, 128>(acc, cta, ring, warpgroup, span, nothing, hand_over);
      } else {
        Loop::template run<kHalves, kShape.n>(acc, cta, ring, warpgroup, span, beside, hand_over);
      }
    } else if (kShape.halves() > 1 && halves == 1) {
      Loop::template run<1, kShape.n>(acc, cta, ring, warpgroup, span, nothing, hand_over);
    } else {
      Loop::template run<0, kShape.n>(acc, cta, ring, warpgroup, span, nothing, hand_over);
    }
    if constexpr (kShape.ping_pong()) skip_other();
    store_late();
    if (halves > 0) Gemm::Epilogue::run(p.epilogue, state, acc, work, staging, rows);
    // By now the kernel before has ended, or its last tiles are about to.
    if (p.begins == Begins::kIndependent && threadIdx.x == kWarpgroup) let_next_begin();
    stream.next();
    if (kShape.ping_pong() && !stream.done()) stream.next();
  }
  store_late();
  staging.drain();
}

/// As consume(), where the epilogue of a tile runs beside the products of the next one.
template <class Gemm>
__device__ __forceinline__ void consume_deferring(const typename Gemm::Params& p,
                                                  const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  using Epilogue = typename Gemm::Epilogue;
  constexpr int kPieces = Epilogue::kPieces;
  const int warpgroup = threadIdx.x / kWarpgroup - 1;
  const int offset = warpgroup * kShape.warpgroup_rows();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  typename Epilogue::State state{};
  state.close(staging);
  const auto piece = [&]<int kPiece>(std::integral_constant<int, kPiece>) {
    Epilogue::template piece<kPiece>(p.epilogue, state, staging);
    if constexpr (kPiece == kPieces - 1) state.close(staging);
  };
  TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
  TileDraw<typename Gemm::Scheduler, kShape> draw(cta, p.tiles);
  if (Gemm::kConsumerDraws && !stream.done()) {
    draw.ask();
    draw.post(0);
  }
  const auto work_of = [&](int tile) {
    return Gemm::Scheduler::template work<kShape>(p.tiles, tile, cta.rank());
  };
  Work next{};
  if (!stream.done()) next = work_of(stream.tile());
  while (true) {
    const bool more = !stream.done();
    const Work work = next;
    const bool valid = more && work.left > offset;
    const Span span{Gemm::Scheduler::k_tiles(p.tiles, work), work.depth};
    // The last tile of columns may have only 64 or 128 of them.
    const int columns = Gemm::kNarrows ? p.tiles.columns - work.column : kShape.n;
    const bool beside = valid && span.k_tiles >= kPieces && columns > 128;
    if (!beside) {
      // A question before each piece keeps the compiler from mixing them, which takes registers.
      staging.sync();
      for_each_index<kPieces>([&](auto index) {
        if (!state.empty(staging)) piece(index);
      });
      staging.sync();
    }
    if (!more) break;
    if (staging.elected()) staging.note_expert(work.expert);
    const auto ask = [&] {
      if (Gemm::kConsumerDraws) draw.ask();
    };
    const auto nothing = [](int) {};
    // The next tile is looked up under the last products.
    const auto look_up = [&] {
      if (Gemm::kConsumerDraws) draw.post(stream.taken() + 1);
      stream.next();
      if (!stream.done()) next = work_of(stream.tile());
    };
    if (beside) {
      const Beside at{warpgroup, span.k_tiles, Epilogue::every(span.k_tiles)};
      Loop::template run_beside<kPieces>(acc, cta, ring, at, piece, ask, look_up);
    } else {
      ask();
      constexpr int kHalves = kShape.halves();
      if (!valid) {
        Loop::template run<0, kShape.n>(acc, cta, ring, warpgroup, span, nothing, look_up);
      } else if (columns <= 64) {
        Loop::template run<kHalves, 64>(acc, cta, ring, warpgroup, span, nothing, look_up);
      } else if (columns <= 128) {
        Loop::template run<kHalves, 128>(acc, cta, ring, warpgroup, span, nothing, look_up);
      } else {
        Loop::template run<kHalves, kShape.n>(acc, cta, ring, warpgroup, span, nothing, look_up);
      }
    }
    if (valid) Epilogue::take(p.epilogue, state, acc, work, staging, {offset, kShape.halves()});
    // Up projections are never independent, and have no register for the question.
    if (!Gemm::kConsumerDraws && p.begins == Begins::kIndependent && threadIdx.x == kWarpgroup)
      let_next_begin();
  }
  staging.drain();
}

/// As consume(), where the epilogue's input comes through the ring.
template <class Gemm>
__device__ __forceinline__ void consume_with_input(const typename Gemm::Params& p,
                                                   const Cta<Gemm::kShape>& cta) {
  constexpr TileShape kShape = Gemm::kShape;
  using Loop = Mainloop<Gemm>;
  using Epilogue = typename Gemm::Epilogue;
  static_assert(kShape.orders == Orders::kStatic && kShape.halves() == 1);
  const int warpgroup = threadIdx.x / kWarpgroup - 1;
  const int offset = warpgroup * kShape.warpgroup_rows();
  typename Loop::Accumulator acc;
  typename Loop::Ring ring;
  const Staging<kShape> staging(cta);
  bool owes = false;  // the tile's warpgroup still has the stage before
  TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
  while (!stream.done()) {
    const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
    const Rows rows{offset, work.left > offset ? 1 : 0};
    const auto pay = [&](int kt) {
      if (kt == 0 && owes) Epilogue::give_back(cta, ring.before());
    };
    const auto nothing = [](int) {};
    const auto last = [] {};
    const Span span{Gemm::Scheduler::k_tiles(p.tiles, work), work.depth};
    if (rows.halves == 0) {
      pay(0);
      const Span all{span.k_tiles + Epilogue::kInputTiles, 0};
      Loop::template run<0, kShape.n>(acc, cta, ring, warpgroup, all, nothing, last);
    } else {
      Epilogue::begin(p.epilogue, work, staging, rows);
      // The last tile of columns may have only 64 or 128 of them.
      const int columns = p.tiles.columns - work.column;
      if (columns <= 64) {
        Loop::template run<1, 64>(acc, cta, ring, warpgroup, span, pay, last);
      } else if (columns <= 128) {
        Loop::template run<1, 128>(acc, cta, ring, warpgroup, span, pay, last);
      } else {
        Loop::template run<1, kShape.n>(acc, cta, ring, warpgroup, span, pay, last);
      }
    }
    if (p.told_tiles != 0 && stream.tile() == cta.cluster() + p.told_tiles) {
      tell_of_stores(staging, p.told);
    }
    owes = rows.halves > 0;
    if (owes) Epilogue::run(p.epilogue, acc, work, staging, rows, cta, ring);
    stream.next();
  }
  staging.drain();
  // A cluster of fewer tiles has not told yet.
  if (p.told_tiles != 0 && tile_or_none<typename Gemm::Scheduler, kShape>(
                               p.tiles, cta.cluster() + p.told_tiles) == kNoTile) {
    tell_of_stores(staging, p.told);
  }
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
  if (kShape.orders == Orders::kStatic && p.told_tiles != 0) {
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
