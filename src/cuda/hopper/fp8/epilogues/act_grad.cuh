// Epilogue of dH. The accumulator has dA' = dO W2, which is never rounded. From dA', the kept H and
// the row's score s the epilogue computes dH = r(act'(H) s dA') and its codes, A' = r(s act(H)),
// and dS = sum of dA' r(act(H)).
//
// A tile has two units of 128 columns, which are computed one after the other. TMA loads the H of a
// unit into the store boxes. The H of the first unit is loaded while the tile's products run. A
// warp writes A' and dH over the H that it has read. Over time the boxes hold:
//
//   H kept as | boxes 0, 1                       | boxes 2, 3
//   codes     | H (gate, up), A', next unit's H  | first half of dH, second half of dH
//   bf16      | gate, A'                         | up, first half of dH, second half of dH
//
// The first half of dH is dH of gate, the second half is dH of up. If gate and up alternate in dH,
// the first half has the columns of dH that belong to the first 64 columns of A, the second half
// those of the last 64. Without a gate, boxes 2 and 3 hold the whole dH of the unit.
#pragma once

#include "cuda/hopper/fp8/epilogues/codes.cuh"
#include "cuda/hopper/ptx/mbarrier.cuh"
#include "cuda/hopper/ptx/stmatrix.cuh"
#include "cuda/hopper/ptx/thread.cuh"
#include "cuda/hopper/ptx/tma.cuh"
#include "cuda/math/activation_words.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"

namespace sonicmoe::cuda {

template <ActivationKind kKind, Fp8KeptH kKept>
struct Fp8ActGrad {
  using Params = Fp8ActGradParams;
  using Two = Pair<__nv_bfloat16>;
  using Act = ActivationGradientWords<__nv_bfloat16, kKind, HLayout::kSplit>;
  static constexpr bool kCodes = kKept == Fp8KeptH::kCodes;
  /// Whether the words of a unit are computed one after the other. Without this order ptxas
  /// computes several words at once, and many of these kernels spill registers. The kernel of
  /// SwiGLU with H kept as codes does not need it.
  static constexpr bool kOrdered = !kCodes || kKind != ActivationKind::kSwiGLU;
  static constexpr int kParts = is_gated(kKind) ? 2 : 1;
  static __device__ __forceinline__ void init(const Fp8Cta& cta) {
    for (int warpgroup = 0; warpgroup < kConsumers; warpgroup++) input(cta, warpgroup).init(1);
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
    if (staging.elected()) load_h(Source{p, tiles, cta, staging, rows, 0});
  }

  static __device__ __forceinline__ void run(const Params& p, float (&sums)[128],
                                             const ConsumerTiles& tiles, const Fp8Cta& cta,
                                             const Fp8Staging& staging, Rows rows) {
    ptx::copies_wait();  // the copies that begin() has started
    __syncwarp();
    float score[2] = {0.0f, 0.0f};
    // Not unrolled, because the code of two units would not fit the instruction cache.
#pragma unroll 1
    for (int unit = 0; unit < units_of(p, tiles); unit++) {
      const Source source{p, tiles, cta, staging, rows, unit};
      staging.begin();
      if (!kCodes && unit > 0 && staging.elected()) load_h(source);
      input(cta, warpgroup()).wait(tiles.next_input_parity());
      BlockWords first, second;
      differentiate(source, sums, score, first, second);
      store_gradient(source, first, second);
#pragma unroll
      for (int i = 0; i < 64; i++) sums[i] = sums[64 + i];
    }
    store_scores(p, tiles.current(), rows, score);
    __syncwarp();  // all lanes have read the scales, which the next tile's begin() overwrites
  }

 private:
  static __device__ __forceinline__ int warp() { return (static_cast<int>(threadIdx.x) >> 5) & 3; }
  static __device__ __forceinline__ int warpgroup() {
    return static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  }
  static __device__ __forceinline__ ptx::Mbarrier input(const Fp8Cta& cta, int warpgroup) {
    return ptx::Mbarrier(cta.base + Fp8SharedLayout::kInputFull + warpgroup * 8);
  }
  static __device__ __forceinline__ std::uint32_t scale_address(const Fp8Cta& cta, int unit,
                                                                int part) {
    return cta.base + Fp8SharedLayout::kInputScales +
           warpgroup() * Fp8SharedLayout::kInputScaleBytes + (unit * 2 + part) * 64 * 4;
  }
  static __device__ __forceinline__ int units_of(const Params& p, const ConsumerTiles& tiles) {
    return tiles.current().column + kFp8Block < p.width ? 2 : 1;
  }
  static __device__ __forceinline__ bool alternates(const Params& p) {
    return kParts == 2 && p.alternates != 0;
  }
  /// The block of 128 columns of H and of dH; the blocks of up follow those of gate.
  static __device__ __forceinline__ int block_of(const Params& p, const CtaTile& tile, int unit,
                                                 int part) {
    return part * (p.width / kFp8Block) + tile.column / kFp8Block + unit;
  }

  /// One unit of the tile, and functions that read its H from the store boxes.
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

    /// Reads this lane's codes of the 16 columns from 16 * step on: two codes of each eight
    /// columns, in each of the lane's two rows. A word has the two codes of the first row in its
    /// low half and the two codes of the second row in its high half. `after` is always 0
    /// (differentiate()).
    __device__ __forceinline__ void read_codes(std::uint32_t* to, int part, int step,
                                               std::uint32_t after) const {
      const int lane = ptx::lane();
      const int swizzle = lane >> 2;
      const std::uint32_t at = staging.box(part) + (warp() * 16 + swizzle) * 128 +
                               ((step ^ swizzle) << 4) + (lane & 3) * 2 + after;
      to[0] = ptx::load_half_word(at) | ptx::load_half_word(at + 8 * 128) << 16;
      to[1] = ptx::load_half_word(at + 8) | ptx::load_half_word(at + 8 + 8 * 128) << 16;
    }
    /// Dequantises the codes of 16 columns. The results are exact in bf16 and are returned as fp32.
    __device__ __forceinline__ void decode(float2 (&to)[4], const std::uint32_t* codes,
                                           int part) const {
      const std::uint32_t at =
          scale_address(cta, unit, part) + (warp() * 16 + (ptx::lane() >> 2)) * 4;
      const float scale[2] = {ptx::load_float(at), ptx::load_float(at + 8 * 4)};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 v = ptx::from_e4m3((i & 1) == 0 ? codes[i / 2] & 0xffff : codes[i / 2] >> 16);
        to[i] = {v.x * scale[i & 1], v.y * scale[i & 1]};
      }
    }
    /// Reads this lane's words of 16 columns of an H in bf16.
    __device__ __forceinline__ void read_elements(std::uint32_t (&to)[4], int part, int step,
                                                  std::uint32_t offset) const {
      ptx::load_matrices(to, matrix_address(staging, part * 2, offset, step));
    }
  };

  /// Starts the load of a unit's H into the store boxes, after earlier stores have read them. Gate
  /// and up take one box each as codes, two boxes each in bf16.
  static __device__ __forceinline__ void load_h(const Source& s) {
    constexpr int kBoxes = kCodes ? 1 : 2;  // of gate, and of up
    const ptx::Mbarrier full = input(s.cta, warpgroup());
    const CtaTile tile = s.tiles.current();
    ptx::tma_wait_read();
    full.arrive_expecting(kParts * kBoxes * kBoxBytes);
#pragma unroll
    for (int i = 0; i < kParts * kBoxes; i++) {
      const int part = i / kBoxes;
      const int column = kCodes ? block_of(s.p, tile, s.unit, part) * 64 : s.column() + i % 2 * 64;
      ptx::tma_load(s.staging.box(i), &s.p.h, full,
                    {column, kCodes ? 0 : part, tile.row + s.rows.offset});
    }
  }

  /// For ldmatrix and stmatrix of columns 0 .. 15 of a box: the swizzled offset of row lane % 8 of
  /// matrix lane / 8. The thread number is read again in each unit, so that the compiler does not
  /// keep the offset from tile to tile, in a register that the products need.
  static __device__ __forceinline__ std::uint32_t matrix_offset() {
    const int thread = ptx::thread();
    const int row = (thread >> 5 & 3) * 16 + (thread & 15);
    return row * 128 + (((thread >> 4 & 1) ^ (thread & 7)) << 4);
  }
  /// This lane's address for the 16 columns from 16 * step on, in the boxes `box` (columns 0 .. 63)
  /// and `box` + 1. `offset` is matrix_offset().
  static __device__ __forceinline__ std::uint32_t matrix_address(const Fp8Staging& staging, int box,
                                                                 std::uint32_t offset, int step) {
    return staging.box(box + step / 4) + (offset ^ (step % 4 * 2) << 4);
  }

  /// Computes dH of a unit (`first`: gate, `second`: up), writes A' to boxes 0 and 1 and adds to
  /// dS (`score`). Unless gate and up alternate, also writes dH of gate to boxes 2 and 3.
  ///
  /// If H is kept as codes, the 16 columns of A' that step s writes overwrite 32 codes. So step s
  /// first reads 32 codes of gate (`ahead`), from which steps 2s and 2s + 1 compute.
  static __device__ __forceinline__ void differentiate(const Source& h, const float* sums,
                                                       float (&score)[2], BlockWords& first,
                                                       BlockWords& second) {
    const std::uint32_t offset = matrix_offset();
    std::uint32_t ahead[16];
    // Always 0, but ptxas does not know it: if kOrdered, it is computed from the previous word's
    // score. Addresses and the row's score are computed from `after`, so ptxas cannot begin a word
    // before the previous word is finished.
    std::uint32_t after = 0;
#pragma unroll
    for (int step = 0; step < 8; step++) {
      std::uint32_t gate[4], up[4];
      float2 decoded[2][4];  // H of gate and of up
      if constexpr (kCodes) {
        if (step < 4) {
          h.read_codes(&ahead[4 * step], 0, 2 * step, after);
          h.read_codes(&ahead[4 * step + 2], 0, 2 * step + 1, after);
        }
        h.decode(decoded[0], &ahead[2 * step], 0);
        if constexpr (kParts == 2) {
          std::uint32_t of_up[2];
          h.read_codes(of_up, 1, step, after);
          h.decode(decoded[1], of_up, 1);
        }
      } else {
        h.read_elements(gate, 0, step, offset + after);
        if constexpr (kParts == 2) h.read_elements(up, 1, step, offset + after);
      }
      std::uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // Each word sums its part of dS by itself. ptxas would run one long chain of additions
        // late, and the terms would occupy registers until then.
        float part = 0.0f;
        const float s = __uint_as_float(__float_as_uint(h.staging.row_scale(0, i & 1)) + after);
        const float* grad = sums + step * 8 + 2 * i;
        if constexpr (kCodes) {
          const float2 both[2] = {decoded[0][i], kParts == 2 ? decoded[1][i] : float2{}};
          a[i] = Act::run_values(h.p.scalars, both, gate[i], up[i], grad, s, part);
        } else {
          a[i] = Act::run(h.p.scalars, gate[i], up[i], grad, s, part);
        }
        score[i & 1] += part;
        if constexpr (kOrdered) after = __float_as_uint(part) & h.p.zero;
        first[step * 4 + i] = gate[i];
        if constexpr (kParts == 2) second[step * 4 + i] = up[i];
      }
      if (!alternates(h.p)) {
        ptx::store_matrices(matrix_address(h.staging, 2, offset + after, step), gate);
      }
      __syncwarp();  // the codes that A' overwrites have been read
      ptx::store_matrices(matrix_address(h.staging, 0, offset + after, step), a);
    }
  }

  /// Stores A', dH and the codes of dH. The first half of dH is quantised while the TMA reads the
  /// boxes of A' and of this half. If H is kept as codes, the load of the next unit's H begins when
  /// the TMA has read these boxes. run() loads an H in bf16 later, after all stores of this unit
  /// have read their boxes, because up's H takes the boxes of dH.
  static __device__ __forceinline__ void store_gradient(const Source& s, BlockWords& first,
                                                        BlockWords& second) {
    const Params& p = s.p;
    const CtaTile tile = s.tiles.current();
    const auto issue_half = [&](int half) {
      issue_words(p.dh, s.staging, 2, alternates(p) ? 2 * s.column() + half * 128 : s.column(),
                  alternates(p) ? 0 : half, tile, s.rows);
    };
    if constexpr (kParts == 2) {
      if (alternates(p)) write_alternating<0>(s.staging, first, second);
    }
    s.staging.publish();
    if (s.staging.elected()) {
      issue_words(p.a, s.staging, 0, s.column(), 0, tile, s.rows);
      issue_half(0);
      s.staging.commit();
    }
    store_quantized<Words::kDone>(p.dh_codes, block_of(p, tile, s.unit, 0), first, tile, s.rows);
    if (s.staging.elected()) {
      ptx::tma_wait_read();
      if (kCodes && s.unit + 1 < units_of(p, s.tiles)) {
        load_h(Source{p, s.tiles, s.cta, s.staging, s.rows, s.unit + 1});
      }
    }
    if constexpr (kParts == 2) {
      s.staging.sync();
      if (alternates(p)) {
        write_alternating<1>(s.staging, first, second);
      } else {
        write_words(s.staging, 2, second);
      }
      s.staging.publish();
      if (s.staging.elected()) {
        issue_half(1);
        s.staging.commit();
      }
      store_quantized<Words::kDone>(p.dh_codes, block_of(p, tile, s.unit, 1), second, tile, s.rows);
    }
  }

  /// Writes 64 columns of gate and of up as 128 alternating columns, to boxes 2 and 3.
  template <int kHalf>
  static __device__ __forceinline__ void write_alternating(const Fp8Staging& staging,
                                                           const BlockWords& gate,
                                                           const BlockWords& up) {
    const int lane = ptx::lane();
    const int swizzle = lane >> 2;
    const std::uint32_t row = (warp() * 16 + swizzle) * 128 + (lane & 1) * 8;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int group = i / 2;  // of eight columns
      const int chunk = group % 4 * 2 + ((lane & 3) >> 1);
      const std::uint32_t at =
          staging.box(2 + group / 4) + row + (i & 1) * 8 * 128 + ((chunk ^ swizzle) << 4);
      const std::uint32_t g = gate[kHalf * 16 + i];
      const std::uint32_t u = up[kHalf * 16 + i];
      ptx::store_words(at, __byte_perm(g, u, 0x5410), __byte_perm(g, u, 0x7632));
    }
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
