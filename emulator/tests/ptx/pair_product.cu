// D = A * B^T by a pair of CTAs with tcgen05: small kernels for the tests of the emulator, which
// nvcc compiles for sm_100f. A is (any number of rows, K), B is (256, K), D is (256, 256): row r of
// D belongs to row index[r] of A, and is zero if that is -1. The operands are bf16, or e4m3 with a
// scale of each row and 32 columns of A (by rows of D) and B.
//
//   warp 0      both CTAs   gathers 128 rows of A and loads 128 rows of B into a stage, and scales
//   warp 1      leader      multiplies the stage; both CTAs: tensor memory
//   warps 2-5   both CTAs   store 128 rows of D
//
// `full` of the leader counts the bytes of both CTAs. `empty` and `done` of each CTA wait for the
// products. K is walked twice, so that D is written again: `drained` of the leader waits for the
// loads of D by both CTAs.
#include <cuda.h>

#include <cstdint>

namespace {

constexpr int kStages = 2;
constexpr std::uint32_t kPart = 128 * 128;  // bytes of A, or of B, in a stage of a CTA
constexpr int kColumns = 256;
constexpr int kPasses = 2;
constexpr int kEpilogueWarps = 4;
// D in fp32, A and B in bf16, 256 columns, 256 rows.
constexpr std::uint32_t kShape = 1u << 4 | 1u << 7 | 1u << 10 | kColumns / 8 << 17 | 256 / 16 << 24;
// A and B in e4m3, scales in UE8M0.
constexpr std::uint32_t kScaledShape = kColumns / 8 << 17 | 1u << 23 | 256 / 128 << 27;
// Eight rows further: 1024 bytes. The version, and the swizzle of 128 bytes.
constexpr std::uint64_t kOperand =
    std::uint64_t{1024 / 16} << 32 | std::uint64_t{1} << 46 | std::uint64_t{2} << 61;

// The scales of 128 rows and four steps of K. Eight rows further: 128 bytes.
constexpr std::uint32_t kChunk = 512;
constexpr std::uint64_t kChunkSource = std::uint64_t{128 / 16} << 32 | std::uint64_t{1} << 46;

__device__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// The same place in the leader.
__device__ std::uint32_t in_leader(std::uint32_t address) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(address));
  return there;
}

__device__ std::uint32_t cta_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ bool is_elected() {
  std::uint32_t is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(is));
  return is != 0;
}

__device__ void init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ void wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN_%=;\n}\n" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

__device__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ void fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ void fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

__device__ void allocate(std::uint32_t place, int columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;\n"
      "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::"r"(place),
      "r"(columns)
      : "memory");
}

__device__ void deallocate(std::uint32_t place, int columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(place), "r"(columns)
               : "memory");
}

__device__ void gather(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int column,
                       int4 rows) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes."
      "cta_group::2 [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(rows.x), "r"(rows.y), "r"(rows.z), "r"(rows.w)
      : "memory");
}

__device__ void load(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int column,
                     int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
      "cta_group::2 [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

__device__ void multiply(std::uint32_t d, std::uint64_t a, std::uint64_t b, bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(kShape), "r"(static_cast<std::uint32_t>(accumulates))
      : "memory");
}

/// `scales`: column of the scales of A, with those of B behind them. `step`: their byte.
__device__ void multiply_scaled(std::uint32_t d, std::uint64_t a, std::uint64_t b,
                                std::uint32_t scales, int step, bool accumulates) {
  const std::uint32_t shape = kScaledShape | step << 4 | step << 29;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 "
      "[%0], %1, %2, %3, [%4], [%5], p;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(shape), "r"(scales), "r"(scales + 4),
      "r"(static_cast<std::uint32_t>(accumulates))
      : "memory");
}

__device__ void copy_scales(std::uint32_t to, std::uint64_t source) {
  asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(source)
               : "memory");
}

/// Arrives in both CTAs.
__device__ void commit(std::uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(barrier),
      "h"(static_cast<std::uint16_t>(3))
      : "memory");
}

struct Barriers {
  std::uint64_t full[kStages], empty[kStages], done, drained;
};

/// A place in the sequence of stages.
struct Stage {
  int index = 0;
  std::uint32_t parity = 0;
  __device__ void next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

/// Operands in bf16.
struct Plain {
  static constexpr int kDepth = 64;                // K of a stage
  static constexpr std::uint32_t kScaleBytes = 0;  // of a stage
  static constexpr int kAllocated = kColumns;

  __device__ void load_scales(std::uint32_t, std::uint32_t, int) const {}
  __device__ static void multiply_stage(std::uint32_t d, std::uint32_t at, std::uint32_t, int,
                                        bool accumulates) {
    for (int k = 0; k < kDepth / 16; ++k) {
      multiply(d, kOperand | (at + 2 * k), kOperand | (at + kPart / 16 + 2 * k),
               accumulates || k != 0);
    }
  }
};

/// Chunks, 32 rows of 16 bytes each: all k tiles of the first 128 rows, then those of the others.
struct ScaleMaps {
  CUtensorMap a, b;
};

/// Operands in e4m3. The scales of a CTA's rows of A, and those of all columns of B.
struct Scaled {
  static constexpr int kDepth = 128;
  static constexpr std::uint32_t kScaleBytes = 3 * kChunk;
  static constexpr int kAllocated = 512;

  const ScaleMaps& maps;
  int k_tiles;

  __device__ void load_scales(std::uint32_t to, std::uint32_t full, int tile) const {
    load(to, maps.a, full, 0, 32 * (cta_rank() * k_tiles + tile));
    load(to + kChunk, maps.b, full, 0, 32 * tile);
    load(to + 2 * kChunk, maps.b, full, 0, 32 * (k_tiles + tile));
  }
  /// Each stage has its own columns for scales: copies are not ordered behind earlier products.
  __device__ static void multiply_stage(std::uint32_t d, std::uint32_t at, std::uint32_t scales,
                                        int stage, bool accumulates) {
    const std::uint32_t columns = d + kColumns + 16 * stage;
    for (int c = 0; c < 3; ++c) {
      copy_scales(columns + 4 * c, kChunkSource | (scales + c * kChunk) / 16);
    }
    for (int k = 0; k < kDepth / 32; ++k) {
      multiply_scaled(d, kOperand | (at + 2 * k), kOperand | (at + kPart / 16 + 2 * k), columns, k,
                      accumulates || k != 0);
    }
  }
};

/// Shared memory: the operands of all stages, then their scales.
__device__ std::uint32_t scales_of(std::uint32_t stages, int index, std::uint32_t bytes) {
  return stages + kStages * 2 * kPart + index * bytes;
}

template <class Format>
__device__ void produce(const CUtensorMap& a, const CUtensorMap& b, const Format& format, int4 rows,
                        int k_tiles, std::uint32_t stages, const Barriers& barriers) {
  const int lane = threadIdx.x % 32;
  Stage stage;
#pragma unroll 1
  for (int t = 0; t < kPasses * k_tiles; ++t, stage.next()) {
    const std::uint32_t to = stages + stage.index * 2 * kPart;
    const std::uint32_t full = shared_address(&barriers.full[stage.index]);
    const int column = t % k_tiles * Format::kDepth;
    wait(shared_address(&barriers.empty[stage.index]), stage.parity ^ 1);
    if (cta_rank() == 0 && lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                   "r"(4 * kPart + 2 * Format::kScaleBytes)
                   : "memory");
    }
    gather(to + lane * 512, a, in_leader(full), column, rows);
    if (lane == 0) {
      load(to + kPart, b, in_leader(full), column, cta_rank() * 128);
      format.load_scales(scales_of(stages, stage.index, Format::kScaleBytes), in_leader(full),
                         t % k_tiles);
    }
    __syncwarp();
  }
  // A CTA must not end before the last commits have arrived.
  for (int s = 0; s < kStages; ++s, stage.next()) {
    wait(shared_address(&barriers.empty[stage.index]), stage.parity ^ 1);
  }
}

template <class Format>
__device__ void consume(std::uint32_t d, int k_tiles, std::uint32_t stages,
                        const Barriers& barriers) {
  Stage stage;
#pragma unroll 1
  for (int t = 0; t < kPasses * k_tiles; ++t, stage.next()) {
    if (t == k_tiles) wait(shared_address(&barriers.drained), 0);
    wait(shared_address(&barriers.full[stage.index]), stage.parity);
    fence_after();
    Format::multiply_stage(d, (stages + stage.index * 2 * kPart) / 16,
                           scales_of(stages, stage.index, Format::kScaleBytes), stage.index,
                           t % k_tiles != 0);
    commit(shared_address(&barriers.empty[stage.index]));
    if (t % k_tiles == k_tiles - 1) commit(shared_address(&barriers.done));
  }
}

__device__ void store(std::uint32_t d, float* out, const Barriers& barriers) {
  const int quarter = threadIdx.x / 32 % 4;
  const int row = cta_rank() * 128 + quarter * 32 + threadIdx.x % 32;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    wait(shared_address(&barriers.done), pass % 2);
    fence_after();
#pragma unroll 1
    for (int column = 0; column < kColumns; column += 4) {
      float v[4];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(d + (quarter << 21) + column));
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      for (int i = 0; i < 4; ++i) out[row * kColumns + column + i] = v[i];
    }
    fence_before();
    if (pass + 1 < kPasses && threadIdx.x % 32 == 0) {
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                       in_leader(shared_address(&barriers.drained)))
                   : "memory");
    }
  }
}

template <class Format>
__device__ void run(const CUtensorMap& a, const CUtensorMap& b, const Format& format,
                    const int* index, float* out, int k_tiles) {
  extern __shared__ __align__(1024) std::uint8_t stages[];
  __shared__ Barriers barriers;
  __shared__ std::uint32_t place;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(shared_address(&barriers.full[s]), 1);
      init(shared_address(&barriers.empty[s]), 1);
    }
    init(shared_address(&barriers.done), 1);
    init(shared_address(&barriers.drained), 2 * kEpilogueWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 1) allocate(shared_address(&place), Format::kAllocated);
  meet_cluster();
  const std::uint32_t d = place;
  if (warp == 0) {
    const int first = cta_rank() * 128 + threadIdx.x * 4;
    const int4 rows = make_int4(index[first], index[first + 1], index[first + 2], index[first + 3]);
    produce(a, b, format, rows, k_tiles, shared_address(stages), barriers);
  } else if (warp == 1) {
    if (cta_rank() == 0 && is_elected()) {
      consume<Format>(d, k_tiles, shared_address(stages), barriers);
    }
  } else {
    store(d, out, barriers);
  }
  __syncwarp();
  meet_cluster();
  if (warp == 1) deallocate(d, Format::kAllocated);
}

}  // namespace

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192)
    pair_product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 const int* index, float* out, int k_tiles) {
  run(a, b, Plain{}, index, out, k_tiles);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192)
    scaled_pair_product(const __grid_constant__ CUtensorMap a,
                        const __grid_constant__ CUtensorMap b, const int* index, float* out,
                        int k_tiles, const __grid_constant__ ScaleMaps scales) {
  run(a, b, Scaled{scales, k_tiles}, index, out, k_tiles);
}
