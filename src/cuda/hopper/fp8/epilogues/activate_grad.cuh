// Epilogue of dH. The accumulator has dA' = dO W2, which is never rounded. From dA', the kept H and
// the row's score s the epilogue computes dH = r(act'(H) s dA') and its codes, A' = r(s act(H)),
// and dS = sum of dA' r(act(H)).
//
// A tile has two units of 128 columns, which are computed one after the other. TMA loads the H of
// each warp's 16 rows into the box that the warp has in shared memory, so that a warp waits for no
// other warp. The box holds H as codes of both units, or H in bf16 of one unit. The H of the first
// unit is loaded while the tile's products run. A', dH and its codes go from registers to global
// memory.
//
// In a last block of 64 columns dA' and H are 0 from column n on: the weights' codes are, and TMA
// reads zeros outside of H. So dH and the terms of dS are 0 there. The codes of dH have whole
// blocks, all of which are stored; the elements of dH and A' end at column n.
#pragma once

#include "cuda/hopper/fp8/epilogues/codes.cuh"
#include "cuda/hopper/ptx/thread.cuh"
#include "cuda/math/activation_words.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

template <ActivationKind kKind, Fp8KeptH kKept>
struct Fp8ActivateGrad {
  using Params = Fp8ActivateGradParams;
  using Act = ActivationGradientWords<__nv_bfloat16, kKind, GateLayout::kConcatenated>;
  static constexpr bool kCodes = kKept == Fp8KeptH::kCodes;
  /// Whether the words of a unit are computed one after the other. Without this order ptxas
  /// computes several words at once, and many of these kernels spill registers. The kernel of
  /// SwiGLU with H kept as codes does not need it.
  static constexpr bool kOrdered = !kCodes || kKind != ActivationKind::kSwiGLU;
  static constexpr int kParts = is_gated(kKind) ? 2 : 1;
  static __device__ __forceinline__ void init(const Fp8Cta& cta) {
    for (int warp = 0; warp < kConsumers * 4; warp++) input(cta, warp).init(1);
  }

  /// Starts the loads of the scores, of the first unit's H, and of the scales of both units' H.
  static __device__ __forceinline__ void begin(const Params& p, const ConsumerTiles& tiles,
                                               const Fp8Cta& cta, const Fp8Staging& staging,
                                               Rows rows) {
    const CtaTile tile = tiles.current();
    const int lane = threadIdx.x & 31;
    const int own = warp() * 16 + (lane & 15);
    const int row = rows.offset + own;
    const bool present = row < tile.valid_rows;
    if (p.row_weight != nullptr && lane < 16 && present) {
      staging.copy_scale(own, p.row_weight + tile.row + row);
    }
    const int part = lane >> 4;
#pragma unroll
    for (int unit = 0; kCodes && unit < kFp8Units; unit++) {
      const bool exists = tile.column + unit * kFp8Block < p.width;
      if (part < kParts && exists && present) {
        const float* at =
            p.h_scales +
            static_cast<std::int64_t>(block_of(p, tile, unit, part)) * p.dh_codes.scale_rows +
            tile.row + row;
        ptx::copy4(scale_address(cta, unit, part) + own * 4, at);
      }
    }
    if (lane == 0) load_h(Source{p, tiles, cta, staging, rows, 0});
  }

  static __device__ __forceinline__ void run(const Params& p, float (&sums)[128],
                                             const ConsumerTiles& tiles, const Fp8Cta& cta,
                                             const Fp8Staging& staging, Rows rows) {
    ptx::copies_wait();  // the copies that begin() has started
    __syncwarp();
    float score[2] = {0.0f, 0.0f};
    const int units = units_of(p, tiles);
    // Not unrolled, because the code of two units would not fit the instruction cache.
#pragma unroll 1
    for (int unit = 0; unit < units; unit++) {
      const Source source{p, tiles, cta, staging, rows, unit};
      if (!kCodes || unit == 0) input(cta, consumer_warp()).wait(tiles.next_input_parity());
      const LanePlace place(tiles.current(), rows, p.width - source.column());
      BlockWords first, second;
      differentiate(source, place, sums, score, first, second);
      if (!kCodes && unit + 1 < units) {
        __syncwarp();  // all lanes have read their H
        if (ptx::lane() == 0) load_h(Source{p, tiles, cta, staging, rows, unit + 1});
      }
      const LanePlace whole(tiles.current(), rows, kFp8Block);
      store_quantized(p.dh_codes, source.code_block(0), first, whole);
      if constexpr (kParts == 2) {
        store_quantized(p.dh_codes, source.code_block(1), second, whole);
      }
#pragma unroll
      for (int i = 0; i < 64; i++) sums[i] = sums[64 + i];
    }
    store_scores(p, tiles.current(), rows, score);
    __syncwarp();  // all lanes have read H and the scales, which the next tile's begin() overwrites
  }

 private:
  static __device__ __forceinline__ int warp() { return (static_cast<int>(threadIdx.x) >> 5) & 3; }
  static __device__ __forceinline__ int consumer_warp() {
    return (static_cast<int>(threadIdx.x) - kWarpgroup) >> 5;
  }
  static __device__ __forceinline__ ptx::Mbarrier input(const Fp8Cta& cta, int consumer_warp) {
    return ptx::Mbarrier(cta.base + Fp8SharedLayout::kInputFull + consumer_warp * 8);
  }
  static __device__ __forceinline__ std::uint32_t scale_address(const Fp8Cta& cta, int unit,
                                                                int part) {
    return cta.base + Fp8SharedLayout::kInputScales +
           consumer_warp() / 4 * Fp8SharedLayout::kInputScaleBytes + (unit * 2 + part) * 64 * 4;
  }
  static __device__ __forceinline__ int units_of(const Params& p, const ConsumerTiles& tiles) {
    return tiles.current().column + kFp8Block < p.width ? 2 : 1;
  }
  static __device__ __forceinline__ bool interleaved(const Params& p) {
    return kParts == 2 && p.interleaved != 0;
  }
  /// The block of 128 columns of H and of dH; the blocks of up follow those of gate.
  static __device__ __forceinline__ int block_of(const Params& p, const CtaTile& tile, int unit,
                                                 int part) {
    return part * p.blocks + tile.column / kFp8Block + unit;
  }

  // A warp's box has pieces of 16 rows of 128 bytes, with the TMA's swizzle:
  //
  //   H kept as | piece
  //   codes     | 2 unit + part: the unit's 128 codes
  //   bf16      | 2 part + i: columns 64i .. 64i + 63 of the unit
  static_assert(kFp8Tile.boxes == 4, "one box for each warp of a warpgroup");
  static constexpr int kPieceBytes = kBoxBytes / 4;
  static constexpr int kPieces = 2 * kParts;

  /// One unit of the tile, and functions that read its H.
  struct Source {
    const Params& p;
    const ConsumerTiles& tiles;
    const Fp8Cta& cta;
    const Fp8Staging& staging;
    Rows rows;
    int unit;

    __device__ __forceinline__ int column() const {
      return tiles.current().column + unit * kFp8Block;
    }
    __device__ __forceinline__ CodeBlock code_block(int part) const {
      const int block = block_of(p, tiles.current(), unit, part);
      return {block, block * kFp8Block};
    }
    __device__ __forceinline__ std::uint32_t piece(int i) const {
      return staging.box(warp()) + i * kPieceBytes;
    }

    /// Reads the lane's eight codes of columns 32 * group .. + 31 in one of its two rows. `after`
    /// is always 0 (differentiate()).
    __device__ __forceinline__ void read_codes(std::uint32_t (&to)[2], int part, int group,
                                               int which, std::uint32_t after) const {
      const int lane = ptx::lane();
      const int swizzle = lane >> 2;
      const int chunk = group * 2 + (lane >> 1 & 1);
      ptx::load_words(to[0], to[1],
                      piece(unit * 2 + part) + (which * 8 + swizzle) * 128 +
                          ((chunk ^ swizzle) << 4) + (lane & 1) * 8 + after);
    }
    /// Dequantises eight codes. The results are exact in bf16 and are returned as fp32.
    static __device__ __forceinline__ void decode(float2 (&to)[4], const std::uint32_t (&codes)[2],
                                                  float scale) {
      ptx::from_e4m3(to[0], to[1], codes[0]);
      ptx::from_e4m3(to[2], to[3], codes[1]);
#pragma unroll
      for (int i = 0; i < 4; i++) to[i] = {to[i].x * scale, to[i].y * scale};
    }
    /// Reads the lane's eight elements of an H in bf16.
    __device__ __forceinline__ uint4 read_elements(int part, int group, int which,
                                                   std::uint32_t after) const {
      const int lane = ptx::lane();
      const int swizzle = lane >> 2;
      const int chunk = group % 2 * 4 + (lane & 3);
      return ptx::load_shared16(piece(part * 2 + group / 2) + (which * 8 + swizzle) * 128 +
                                ((chunk ^ swizzle) << 4) + after);
    }
    /// The scale of the unit's H in one of the lane's two rows.
    __device__ __forceinline__ float scale(int part, int which) const {
      return ptx::load_float(scale_address(cta, unit, part) +
                             (warp() * 16 + which * 8 + (ptx::lane() >> 2)) * 4);
    }
  };

  /// Starts the load of H into the warp's box: of both units if H is kept as codes, else of the
  /// unit. One lane calls it, after all lanes have read the previous H in the box.
  static __device__ __forceinline__ void load_h(const Source& s) {
    const ptx::Mbarrier full = input(s.cta, consumer_warp());
    const CtaTile tile = s.tiles.current();
    full.arrive_expecting(kPieces * kPieceBytes);
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      // kCodes: i counts units and parts; else parts and halves of the unit.
      const int part = kCodes ? i % kParts : i / 2;
      const int other = kCodes ? i / kParts : i % 2;
      const int column = (kCodes ? tile.column / 2 : s.column()) + other * 64;
      ptx::tma_load(s.piece(kCodes ? other * 2 + part : i), &s.p.h, full,
                    {column, part, tile.row + s.rows.offset + warp() * 16});
    }
  }

  /// Computes and stores A' and dH of a unit, keeps dH (`first`: gate, `second`: up) and adds to dS
  /// (`score`).
  static __device__ __forceinline__ void differentiate(const Source& h, const LanePlace& place,
                                                       const float* sums, float (&score)[2],
                                                       BlockWords& first, BlockWords& second) {
    const Params& p = h.p;
    const LaneElements to_a(p.a, place, h.column() + place.column);
    const bool interleave = interleaved(p);
    const LaneElements to_dh(p.dh, place, (h.column() + place.column) * (interleave ? 2 : 1));
    const float scores[2] = {h.staging.row_scale(0, 0), h.staging.row_scale(0, 1)};
    float scale[2][2] = {};
#pragma unroll
    for (int i = 0; kCodes && i < 2 * kParts; i++) scale[i / 2][i % 2] = h.scale(i / 2, i % 2);
    // Always 0, but ptxas does not know it. If kOrdered, `after` is computed from the previous
    // word's part of dS. Addresses and the row's score are computed from `after`, so ptxas cannot
    // begin a word before the previous word is finished.
    std::uint32_t after = 0;
    std::uint32_t codes[2][2] = {};  // of gate and of up, read one run ahead
#pragma unroll
    for (int part = 0; kCodes && part < kParts; part++) h.read_codes(codes[part], part, 0, 0, 0);
#pragma unroll
    for (int run = 0; run < 8; run++) {
      const int group = run / 2;
      const int which = run % 2;
      float2 decoded[2][4] = {};  // H of gate and of up
      uint4 elements[2] = {};
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        if constexpr (kCodes) {
          h.decode(decoded[part], codes[part], scale[part][which]);
          if (run < 7) h.read_codes(codes[part], part, (run + 1) / 2, (run + 1) % 2, after);
        } else {
          elements[part] = h.read_elements(part, group, which, after);
        }
      }
      std::uint32_t a[4], gate[4], up[4];
      const std::uint32_t words[2][4] = {
          {elements[0].x, elements[0].y, elements[0].z, elements[0].w},
          {elements[1].x, elements[1].y, elements[1].z, elements[1].w}};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // Each word has its own sum of its terms of dS. With one long chain of additions ptxas
        // would execute the chain late, and its terms would occupy registers until then.
        float part = 0.0f;
        const float s = __uint_as_float(__float_as_uint(scores[which]) + after);
        const float* grad = sums + (group * 4 + i) * 4 + which * 2;
        if constexpr (kCodes) {
          const float2 both[2] = {decoded[0][i], decoded[1][i]};
          a[i] = Act::run_values(p.scalars, both, gate[i], up[i], grad, s, part);
        } else {
          gate[i] = words[0][i];
          up[i] = words[1][i];
          a[i] = Act::run(p.scalars, gate[i], up[i], grad, s, part);
        }
        score[which] += part;
        if constexpr (kOrdered) after = __float_as_uint(part) & p.zero;
        first[group * 8 + i * 2 + which] = gate[i];
        if constexpr (kParts == 2) second[group * 8 + i * 2 + which] = up[i];
      }
      const bool present = place.has(which, group);
      to_a.store(present, which, group * 32, make_uint4(a[0], a[1], a[2], a[3]));
      if (interleave) {
        to_dh.store(present, which, group * 64, interleaved(gate, up, 0));
        to_dh.store(present, which, group * 64 + 8, interleaved(gate, up, 2));
      } else {
        to_dh.store(present, which, group * 32, make_uint4(gate[0], gate[1], gate[2], gate[3]));
        if constexpr (kParts == 2) {
          to_dh.store(present, which, p.dh.part_stride + group * 32,
                      make_uint4(up[0], up[1], up[2], up[3]));
        }
      }
    }
  }

  /// Words i and i + 1 of gate and of up as eight elements in which gate and up alternate.
  static __device__ __forceinline__ uint4 interleaved(const std::uint32_t (&gate)[4],
                                                      const std::uint32_t (&up)[4], int i) {
    return make_uint4(__byte_perm(gate[i], up[i], 0x5410), __byte_perm(gate[i], up[i], 0x7632),
                      __byte_perm(gate[i + 1], up[i + 1], 0x5410),
                      __byte_perm(gate[i + 1], up[i + 1], 0x7632));
  }

  /// Sums the parts of dS that the four lanes of a row have, in a fixed order, and writes the sum
  /// over the tile's columns to score_parts.
  static __device__ __forceinline__ void store_scores(const Params& p, const CtaTile& tile,
                                                      Rows rows, const float (&score)[2]) {
    const int thread = ptx::thread();
#pragma unroll
    for (int which = 0; which < 2; which++) {
      float sum = score[which];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = rows.offset + (thread >> 5 & 3) * 16 + which * 8 + (thread >> 2 & 7);
      if ((thread & 3) == 0 && row < tile.valid_rows) {
        const std::int64_t at = static_cast<std::int64_t>(tile.row + row) * p.score_tiles;
        p.score_parts[at + tile.column / kFp8Tile.n] = sum;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
