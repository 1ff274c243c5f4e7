// The FP8 grouped GEMM. It shares schedulers, loads of B, barriers and staging with the 16-bit
// kernels. Two parts differ: the producers of A also load row scales (gather_rows.cuh,
// tma_rows.cuh), and the consumers promote products to fp32 (mainloop.cuh).
//
// A tile's epilogue runs right after the tile's last products (immediate). Deferred epilogues,
// which run under the next tile's products, kept a stage occupied and were 3 to 7 % slower (H200).
#pragma once

#include "cuda/hopper/engine/kernel.cuh"
#include "cuda/hopper/fp8/mainloop.cuh"
#include "cuda/hopper/ptx/thread.cuh"

namespace sonicmoe::cuda {

/// The parts of a kernel. A consumer calls Epilogue::begin() before the first products of a tile,
/// and Epilogue::run() after the last.
template <class Producer_, class Scheduler_, class Epilogue_, BSource kSource, class Codes_>
struct Fp8Gemm {
  using Codes = Codes_;  // where wgmma reads A (operand_a.cuh)
  using Producer = Producer_;
  using Scheduler = Scheduler_;
  using Epilogue = Epilogue_;
  static constexpr TileShape kShape = kFp8Tile;
  using B = OperandB<kShape, kSource, Major::kK, Epilogue::Params::kColumns>;
  static constexpr bool kConsumerSchedules = Producer::kScheduler == SchedulerThread::kConsumer;
  static constexpr int kQueueReaders = Producer::kQueueReaders;  // consumers read cards instead
  using Params = Fp8Params<typename Producer::Params, typename Epilogue::Params>;
};

/// A Cta whose rank() reads the CTA number again at each call. Otherwise ptxas would keep the rank
/// in a register during the whole tile and spill it.
struct Fp8SchedulerCta : Fp8Cta {
  __device__ __forceinline__ int rank() const { return ptx::cta() % kFp8Tile.cluster; }
};

/// The work of a consumer warpgroup: all tiles of the CTA.
template <class Gemm>
__device__ __forceinline__ void consume_promoting(const typename Gemm::Params& p,
                                                  const Fp8Cta& cta) {
  using Loop = Fp8Mainloop<Gemm>;
  const int warpgroup = consumer_warpgroup();
  const Rows rows{warpgroup * kFp8Tile.warpgroup_rows(), 1};
  typename Loop::Sums sums;
  typename Loop::Ring ring;
  const Staging<kFp8Tile> staging(cta);
  ConsumerTiles tiles(cta);
  const Fp8SchedulerCta scheduler_cta{cta};
  InlineScheduler<typename Gemm::Scheduler, kFp8Tile, Fp8SchedulerCta> scheduler(scheduler_cta,
                                                                                 p.tiles);
  if (Gemm::kConsumerSchedules) scheduler.begin();
  while (tiles.next()) {
    const bool valid = ptx::uniform(tiles.current().valid_rows) > rows.offset;
    ring.make_uniform();
    if (Gemm::kConsumerSchedules) scheduler.take();
    if (valid) {
      Gemm::Epilogue::begin(p.epilogue, tiles, cta, staging, rows);
      Loop::run(sums, p, cta, ring, tiles, warpgroup);
    } else {
      Loop::pass(p, cta, ring, warpgroup);
    }
    if (Gemm::kConsumerSchedules) scheduler.send(tiles.cards_read());
    tiles.save(ring);
    if (valid) Gemm::Epilogue::run(p.epilogue, sums, tiles, cta, staging, rows);
    tiles.restore(ring);
  }
  staging.drain();
  if (Gemm::kConsumerSchedules && p.tiles.tile_counter != nullptr) {
    wait_for_unread_index(cta, tiles.cards_read() - 1);
  }
}

template <class Gemm>
__global__ void __maxnreg__(kLaunchRegisters)
    fp8_gemm_kernel(const __grid_constant__ typename Gemm::Params p) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  Fp8Cta cta;
  cta.base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    Gemm::Epilogue::init(cta);
    init_barriers<Gemm>(cta);
    for (int i = 0; i < kFp8Cards; i++) card_full(cta, i).init(1);
    Gemm::Producer::prefetch(p.producer);
    ptx::prefetch_map(&p.b.map[0]);
  }
  ptx::cluster_sync();
  launch_dependents_after_wait();
  constexpr Registers kRegisters = Gemm::Producer::registers();
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <= 3 * kLaunchRegisters);
  if (threadIdx.x < kWarpgroup) {
    ptx::shrink_registers<kRegisters.producer>();
    Gemm::Producer::template run<Gemm>(p, cta);
    __syncwarp();
  } else {
    ptx::grow_registers<kRegisters.consumer>();
    consume_promoting<Gemm>(p, cta);
  }
  // No CTA exits before the other CTA of the cluster is done: the other one may still multicast to
  // this CTA's stages and arrive at its mbarriers.
  ptx::cluster_sync();
}

}  // namespace sonicmoe::cuda
