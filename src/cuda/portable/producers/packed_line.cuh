// Unpacks weights of 4 bits inside a product: global memory has their codes only.
//
// A thread's 32 elements (codes_line.cuh) have only 16 different values. So the thread multiplies
// and rounds 16 times, and keeps the results as two tables, of low and of high bytes. A code
// selects a byte of each by prmt.
#pragma once

#include <cstdint>

#include "core/packed_values.h"
#include "cuda/math/element.cuh"
#include "cuda/portable/engine/architecture.cuh"
#include "cuda/portable/producers/codes_line.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda::portable {

/// A thread's weights.
template <class Shape, Major kMajor, ColumnOrder kOrder, class Element>
class PackedLine : public CodesLine<Shape, kMajor, kOrder, kDigitBytes> {
  using Base = CodesLine<Shape, kMajor, kOrder, kDigitBytes>;
  using Base::kChunks;
  using Base::kFirstChunk;
  using Base::unit_;

 public:
  using Params = PackedTilesParams;
  /// The place after which codes of the next k tile are fetched.
  static constexpr int kFetch = Base::kFirstStore;

  /// Writes the values of the codes to shared memory. The CTA must meet before they are read.
  static __device__ __forceinline__ void prepare(const PackedCodes& p) {
    if (threadIdx.x < 16) ptx::store_float(values() + threadIdx.x * 4, p.values[threadIdx.x]);
  }

  /// Goes to the first codes of a part of K, p.weights[matrix], of the half of the tile that begins
  /// at `first_column`.
  __device__ __forceinline__ void open_codes(const Params& p, int matrix, int expert,
                                             int first_column) {
    Base::open_units(p.weights[matrix], p.codes.codes, expert, first_column);
  }
  /// Goes to the codes of the next k tile.
  __device__ __forceinline__ void advance_codes(const Params& p, int matrix) {
    Base::advance_units(p.weights[matrix]);
  }

  /// Copies codes to the buffer and loads their scale; zeros if they do not exist.
  __device__ __forceinline__ void fetch(const PackedCodes& p, std::uint32_t exists) {
    Base::copy_codes(p.codes, exists);
    const std::uint32_t block = unit_ >> p.block_shift;
    scale_ = p.scale == ScaleKind::kFloat
                 ? ptx::load4(static_cast<const float*>(p.scales) + block, exists)
                 : ptx::load1(static_cast<const std::uint8_t*>(p.scales) + block, exists);
  }

  /// Computes the scale of the codes that were fetched last. Weights that do not exist become
  /// zeros, not NaN. Their nested scale, which may be outside of its array, is not read.
  __device__ __forceinline__ void find_scale(const PackedCodes& p, bool exists) {
    if (p.scale == ScaleKind::kExponent) {
      scale_ = __float_as_uint(packed::e8m0_of(scale_));
    } else if (p.scale == ScaleKind::kNested) {
      const std::uint32_t place = (unit_ >> p.block_shift) / packed::kNestedBlock;
      const std::uint32_t nested = ptx::load4(p.nested_scales + place, exists);
      scale_ = __float_as_uint(
          packed::nested_absmax(p.nested_map[scale_], __uint_as_float(nested), *p.nested_offset));
    }
    if (!exists) scale_ = 0;
  }

  /// Place i of the work on codes that fetch() has copied. `stores`: whether weights are stored.
  template <int i>
  __device__ __forceinline__ void unpack(const PackedCodes& p, std::uint32_t stage, bool stores) {
    if constexpr (i >= 1 && i < 9) tabulate<i - 1>();
    if constexpr (i < 8 && i % 2 == 0) values_ = ptx::load_shared16(values() + i * 8);
    if constexpr (i == kFetch - 1) {
      ptx::groups_wait();
      codes_ = ptx::load_shared16(Base::buffer(0));
    }
    constexpr int kPart = i - kFirstChunk;
    if constexpr (kPart >= 0 && kPart < kParts * kChunks) {
      unpack_chunk<kPart / kParts, kPart % kParts>(p, stage, stores);
    }
  }

  /// In code for 12.x: whether a chunk ends at place i, and zero, which depends on the chunk's last
  /// weights.
  static constexpr bool has_zero(int i) {
    const int part = i - kFirstChunk;
    return kTies && part >= 0 && part < kParts * kChunks && part % kParts == kParts - 1;
  }
  __device__ __forceinline__ std::uint32_t zero(const PackedCodes& p) const {
    return last_ & p.zero;
  }

 private:
  static constexpr bool kTies = kArchitecture >= 120;
  /// Places of a chunk. Chunks end at the end of the products of 16 rows where operands are tied.
  static constexpr int kParts = kTies ? 4 : 5;
  static_assert(!kTies || kFirstChunk % 4 == 0);
  static_assert(kFirstChunk + kParts * kChunks <= Base::kPlaces);

  /// The values of the codes follow the buffer of codes. As kernel arguments they would be kept in
  /// uniform registers, which are not free.
  static __device__ __forceinline__ std::uint32_t values() { return Base::behind_codes(); }

  /// Computes elements 2i and 2i + 1 of the tables of the block.
  template <int i>
  __device__ __forceinline__ void tabulate() {
    const auto product = [this](std::uint32_t value) {
      return key::mul32(__uint_as_float(value), __uint_as_float(scale_));
    };
    const std::uint32_t pair = i % 2 == 0
                                   ? Pair<Element>::pack(product(values_.x), product(values_.y))
                                   : Pair<Element>::pack(product(values_.z), product(values_.w));
    if constexpr (i % 2 == 0) {
      low_[i / 2] = pair;
    } else {
      const std::uint32_t even = low_[i / 2];
      low_[i / 2] = ptx::select_bytes(even, pair, 0x6420u);
      high_[i / 2] = ptx::select_bytes(even, pair, 0x7531u);
    }
  }

  /// Part kPart of kParts of the work on the 8 codes of a chunk.
  template <int kChunk, int kPart>
  __device__ __forceinline__ void unpack_chunk(const PackedCodes& p, std::uint32_t stage,
                                               bool stores) {
    if constexpr (kPart == 0) {
      const std::uint32_t code = kChunk == 0   ? codes_.x
                                 : kChunk == 1 ? codes_.y
                                 : kChunk == 2 ? codes_.z
                                               : codes_.w;
      index_ = code & 0x77777777u;  // in each half of a table
      half_ = (code >> 1 & 0x44444444u) | p.digits;
    }
    if constexpr (kPart == 1) first_ = four(p, index_, half_);
    if constexpr (kPart == 3) {
      const uint2 second = four(p, index_ >> 16, half_ >> 16);
      last_ = second.y;
      ptx::store_shared16_if(stores, Base::target(stage, kChunk),
                             make_uint4(first_.x, first_.y, second.x, second.y));
    }
  }

  /// The elements of the 4 codes of 16 bits.
  __device__ __forceinline__ uint2 four(const PackedCodes& p, std::uint32_t index,
                                        std::uint32_t half) const {
    const std::uint32_t low = ptx::select_bytes(ptx::select_bytes(low_[0], low_[1], index),
                                                ptx::select_bytes(low_[2], low_[3], index), half);
    const std::uint32_t high =
        ptx::select_bytes(ptx::select_bytes(high_[0], high_[1], index),
                          ptx::select_bytes(high_[2], high_[3], index), half);
    return make_uint2(ptx::select_bytes(low, high, p.order[0]),
                      ptx::select_bytes(low, high, p.order[1]));
  }

  std::uint32_t scale_;   ///< fp32; before find_scale() it may be a byte
  std::uint32_t low_[4];  ///< low bytes of the 16 weights of the block
  std::uint32_t high_[4];
  // Between places of a k tile only:
  uint4 values_;
  uint4 codes_;
  std::uint32_t index_, half_;
  uint2 first_;
  std::uint32_t last_;
};

/// Weights of 4 bits for RowProducer.
template <class Element>
struct Digits {
  template <class Shape, Major kMajor, ColumnOrder kOrder>
  using Line = PackedLine<Shape, kMajor, kOrder, Element>;
};

}  // namespace sonicmoe::cuda::portable
