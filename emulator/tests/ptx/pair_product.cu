// D = A * B^T by a pair of CTAs with tcgen05: a small kernel for the tests of the emulator, which
// nvcc compiles for sm_100f. A is (any number of rows, K), B is (256, K), D is (256, 256): row r of
// D belongs to row index[r] of A, and is zero if that is -1.
//
//   warp 0      both CTAs   gathers 128 rows of A and loads 128 rows of B into a stage
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
constexpr int kDepth = 64;                         // K of a stage
constexpr std::uint32_t kPart = 128 * kDepth * 2;  // bytes of A, or of B, in a stage of a CTA
constexpr int kColumns = 256;
constexpr int kPasses = 2;
constexpr int kEpilogueWarps = 4;
// D in fp32, A and B in bf16, 256 columns, 256 rows.
constexpr std::uint32_t kShape = 1u << 4 | 1u << 7 | 1u << 10 | kColumns / 8 << 17 | 256 / 16 << 24;
// Eight rows further: 1024 bytes. The version, and the swizzle of 128 bytes.
constexpr std::uint64_t kOperand =
    std::uint64_t{1024 / 16} << 32 | std::uint64_t{1} << 46 | std::uint64_t{2} << 61;

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

__device__ void allocate(std::uint32_t place) {
  asm volatile(
      "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;\n"
      "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::"r"(place),
      "r"(kColumns)
      : "memory");
}

__device__ void deallocate(std::uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(columns), "r"(kColumns)
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

__device__ void produce(const CUtensorMap& a, const CUtensorMap& b, int4 rows, int k_tiles,
                        std::uint32_t stages, const Barriers& barriers) {
  const int lane = threadIdx.x % 32;
  Stage stage;
#pragma unroll 1
  for (int t = 0; t < kPasses * k_tiles; ++t, stage.next()) {
    const std::uint32_t to = stages + stage.index * 2 * kPart;
    const std::uint32_t full = shared_address(&barriers.full[stage.index]);
    const int column = t % k_tiles * kDepth;
    wait(shared_address(&barriers.empty[stage.index]), stage.parity ^ 1);
    if (cta_rank() == 0 && lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                   "r"(4 * kPart)
                   : "memory");
    }
    gather(to + lane * 512, a, in_leader(full), column, rows);
    if (lane == 0) load(to + kPart, b, in_leader(full), column, cta_rank() * 128);
    __syncwarp();
  }
  // A CTA must not end before the last commits have arrived.
  for (int s = 0; s < kStages; ++s, stage.next()) {
    wait(shared_address(&barriers.empty[stage.index]), stage.parity ^ 1);
  }
}

__device__ void consume(std::uint32_t d, int k_tiles, std::uint32_t stages,
                        const Barriers& barriers) {
  Stage stage;
#pragma unroll 1
  for (int t = 0; t < kPasses * k_tiles; ++t, stage.next()) {
    if (t == k_tiles) wait(shared_address(&barriers.drained), 0);
    wait(shared_address(&barriers.full[stage.index]), stage.parity);
    fence_after();
    const std::uint32_t at = (stages + stage.index * 2 * kPart) / 16;
    for (int k = 0; k < kDepth / 16; ++k) {
      multiply(d, kOperand | (at + 2 * k), kOperand | (at + kPart / 16 + 2 * k),
               t % k_tiles != 0 || k != 0);
    }
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

}  // namespace

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192)
    pair_product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
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
  if (warp == 1) allocate(shared_address(&place));
  meet_cluster();
  const std::uint32_t d = place;
  if (warp == 0) {
    const int first = cta_rank() * 128 + threadIdx.x * 4;
    const int4 rows = make_int4(index[first], index[first + 1], index[first + 2], index[first + 3]);
    produce(a, b, rows, k_tiles, shared_address(stages), barriers);
  } else if (warp == 1) {
    if (cta_rank() == 0 && is_elected()) consume(d, k_tiles, shared_address(stages), barriers);
  } else {
    store(d, out, barriers);
  }
  __syncwarp();
  meet_cluster();
  if (warp == 1) deallocate(d);
}
