// Unpacks FP8 weights with scales of 128 x 128 elements inside a product: global memory has their
// e4m3 codes only. As unpack_weights(), it multiplies value and scale in fp32 and rounds the
// product once more.
#pragma once

#include <cstdint>

#include "core/fp8_quantize.h"
#include "core/packed_values.h"
#include "cuda/math/element.cuh"
#include "cuda/portable/engine/architecture.cuh"
#include "cuda/portable/producers/codes_line.cuh"
#include "cuda/portable/ptx/e4m3.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda::portable {

/// A thread's weights. Its elements (codes_line.cuh) share a scale because 32 divides 128.
template <class Shape, Major kMajor, ColumnOrder kOrder, class Element>
class Fp8Line : public CodesLine<Shape, kMajor, kOrder, kFp8Bytes> {
  using Base = CodesLine<Shape, kMajor, kOrder, kFp8Bytes>;
  using Base::kChunks;
  using Base::kFirstChunk;

  /// Whether the architecture converts e4m3. Without it some weights are unpacked a second time
  /// from their codes, after the last place for the others, so that the next codes must come later.
  static constexpr bool kConverts = kArchitecture >= 89;

 public:
  using Params = Fp8TilesParams;
  /// The place after which codes of the next k tile are fetched.
  static constexpr int kFetch = kConverts ? Base::kFirstStore : Base::kPlaces - 1;

  static __device__ __forceinline__ void prepare(const Fp8Codes&) {}

  /// Goes to the first codes of a part of K, p.weights[matrix], of the half of the tile that begins
  /// at `first_column`.
  __device__ __forceinline__ void open_codes(const Params& p, int matrix, int expert,
                                             int first_column) {
    Base::open_units(p.weights[matrix], p.codes.codes, expert, first_column);
    const Fp8View& view = p.codes.views[matrix];
    const int along = first_column + Base::column();
    const std::uint32_t first = static_cast<std::uint32_t>(expert) * p.codes.expert_scales;
    if constexpr (kMajor == Major::kK) {
      const std::uint32_t row = view.row + along * view.row_step;
      place_ = (first + row / kBlock * p.codes.across) * kBlock + view.column;
    } else {
      place_ = view.row + Base::k() * view.row_step;
      first_scale_ = first + static_cast<std::uint32_t>(view.column + along) / kBlock;
    }
  }
  /// Goes to the codes of the next k tile.
  __device__ __forceinline__ void advance_codes(const Params& p, int matrix) {
    Base::advance_units(p.weights[matrix]);
    place_ += kMajor == Major::kK ? Shape::kDepth : Shape::kDepth * p.codes.views[matrix].row_step;
  }

  /// Copies codes to the buffer and loads their scale; zeros if they do not exist.
  __device__ __forceinline__ void fetch(const Fp8Codes& p, std::uint32_t exists) {
    Base::copy_codes(p.codes, exists);
    const std::uint32_t block =
        kMajor == Major::kK ? place_ / kBlock : first_scale_ + place_ / kBlock * p.across;
    next_scale_ = ptx::load4(p.scales + block, exists);
  }

  /// Takes the scale of the codes that were fetched last. Weights that do not exist have codes and
  /// a scale of zero, so they become zeros.
  __device__ __forceinline__ void find_scale(const Fp8Codes&, bool) {
    scale_ = __uint_as_float(next_scale_);
  }

  /// Place i of the work on codes that fetch() has copied. `stores`: whether weights are stored.
  template <int i>
  __device__ __forceinline__ void unpack(const Fp8Codes&, std::uint32_t stage, bool stores) {
    if constexpr (i == Base::kFirstStore - 1) {
      ptx::groups_wait();
      codes_[0] = ptx::load_shared16(Base::buffer(0));
      codes_[1] = ptx::load_shared16(Base::buffer(1));
      if constexpr (!kConverts) is_plain_ = has_plain_products();
    }
    constexpr int kPart = i - kFirstChunk;
    if constexpr (kPart >= 0) unpack_chunk<kPart / kParts, kPart % kParts>(stage, stores);
    if constexpr (!kConverts && i == Base::kPlaces - 1) {
      if (stores && !is_plain_) store_any(stage);
    }
  }

  static constexpr bool has_zero(int) { return false; }
  __device__ __forceinline__ std::uint32_t zero(const Fp8Codes&) const { return 0; }

 private:
  static constexpr std::uint32_t kBlock = packed::kFP8Block;
  static constexpr int kParts = 5;  ///< places of a chunk
  static_assert(kFirstChunk + kParts * kChunks == Base::kPlaces);

  /// Whether four() unpacks the codes. Without instructions for e4m3 it gives a code to a half with
  /// the same exponent field, whose bias is larger by 8: the value times 2^-8, exactly, also if it
  /// is subnormal. That is wrong for NaN, and the scale times 2^8 must not overflow.
  __device__ __forceinline__ bool has_plain_products() const {
    // If and only if a byte's low 7 bits are ones, adding 1 carries into its bit 7. Only 0xff,
    // which is NaN, also carries into the next byte.
    const auto carries = [](const uint4& v) {
      const auto of = [](std::uint32_t word) { return (word + 0x01010101u) ^ word; };
      return of(v.x) | of(v.y) | of(v.z) | of(v.w);
    };
    return ((carries(codes_[0]) | carries(codes_[1])) & 0x80808080u) == 0 &&
           fabsf(scale_) < 0x1p120f;
  }

  /// Two values times 2^-8, of the codes in bytes 1 and 3.
  static __device__ __forceinline__ float2 small_values(std::uint32_t codes) {
    const std::uint32_t halves = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
    return {Pair<__half>::low(halves), Pair<__half>::high(halves)};
  }

  static __device__ __forceinline__ std::uint32_t two(float first, float second, float scale) {
    return Pair<Element>::pack(key::mul32(first, scale), key::mul32(second, scale));
  }
  /// The elements of 4 codes.
  __device__ __forceinline__ uint2 four(std::uint32_t codes) const {
    if constexpr (kConverts) {
      const std::uint32_t low = ptx::halves_of_e4m3(codes), high = ptx::halves_of_e4m3(codes >> 16);
      using Halves = Pair<__half>;
      return {two(Halves::low(low), Halves::high(low), scale_),
              two(Halves::low(high), Halves::high(high), scale_)};
    } else {
      const float large = key::mul32(scale_, 256.0f);
      const float2 even = small_values(codes << 8), odd = small_values(codes);
      return {two(even.x, odd.x, large), two(even.y, odd.y, large)};
    }
  }

  /// Part kPart of kParts of the work on the 8 codes of a chunk.
  template <int kChunk, int kPart>
  __device__ __forceinline__ void unpack_chunk(std::uint32_t stage, bool stores) {
    const uint4& codes = codes_[kChunk / 2];
    if constexpr (kPart == 1) first_ = four(kChunk % 2 == 0 ? codes.x : codes.z);
    if constexpr (kPart == 3) {
      const uint2 second = four(kChunk % 2 == 0 ? codes.y : codes.w);
      ptx::store_shared16_if(stores, Base::target(stage, kChunk),
                             make_uint4(first_.x, first_.y, second.x, second.y));
    }
  }

  /// Unpacks all elements again, one by one.
  __device__ __forceinline__ void store_any(std::uint32_t stage) const {
#pragma unroll 1
    for (int i = 0; i < Base::kElements; i++) {
      const std::uint8_t code = ptx::load_byte(Base::buffer(i / 16) + i % 16);
      ptx::store_half_word(Base::target(stage, i / 8) + i % 8 * kElementBytes,
                           static_cast<std::uint16_t>(two(fp8::value_of(code), 0.0f, scale_)));
    }
  }

  std::uint32_t place_;        ///< K-major: of the scale, times 128, plus k in its block; else the
                               ///< row of the packed tensor
  std::uint32_t first_scale_;  ///< unless K-major: place of row 0's scale in the thread's columns
  std::uint32_t next_scale_;   ///< of the codes that were fetched last, fp32
  float scale_;
  // Between places of a k tile only:
  uint4 codes_[2];
  uint2 first_;
  bool is_plain_;
};

/// FP8 weights for RowProducer.
template <class Element>
struct Fp8 {
  template <class Shape, Major kMajor, ColumnOrder kOrder>
  using Line = Fp8Line<Shape, kMajor, kOrder, Element>;
};

}  // namespace sonicmoe::cuda::portable
