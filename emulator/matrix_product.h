// Products of small matrices in fp32, in an order that suits the fragments that warps hold.
//
// One register of a lane has an even column of eight neighbouring columns, the next register the
// odd column after it. So rows and columns are in the order 0 2 4 ... 1 3 5 ... here: the values
// that four lanes hold of one row in one register are then four contiguous floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine.h"

namespace sonicmoe::emulator {

inline constexpr int kProductRows = 16;  // of a warp
inline constexpr int kMostColumns = 256;
inline constexpr int kMostDepth = 32;

/// The place of row or column `index` of `count`.
constexpr int position_of(int index, int count) { return (index & 1) * (count / 2) + index / 2; }

/// sums += a * b. a is (depth, 16), the transpose of A; b is (depth, columns), sums is
/// (16, columns). All have an alignment of 64 bytes; columns is a multiple of 8.
void multiply_add(const float* a, const float* b, float* sums, int depth, int columns);

/// Like multiply_add(), for products of 8-bit elements, whose sums have 14 significant bits on
/// Hopper. Let 2^e be the largest power of two that is at most the largest magnitude of a term; the
/// old sum is a term too. Each term is truncated toward zero to a multiple of 2^(e - 13), and the
/// new sum to 14 bits. If a term is infinite or NaN, the sum is computed as by multiply_add().
/// Sources: arXiv 2511.10909 and 2512.07004. It is not known here whether hardware takes e before
/// or after it normalises a product; the emulator takes it after, which is less exact.
void multiply_add_14_bits(const float* a, const float* b, float* sums, int depth, int columns);

/// Copy between fp32 registers and 16 rows of sums. Four registers have eight columns: the even and
/// the odd columns of rows 0 to 7, then the even and the odd columns of rows 8 to 15.
void load_sums(Warp& warp, const Slot* registers, int columns, float* sums);
void store_sums(Warp& warp, const Slot* registers, int columns, const float* sums);

enum class ElementType : std::uint32_t { kBF16, kF16, kE4M3, kE5M2 };
constexpr int bytes_of(ElementType type) { return type <= ElementType::kF16 ? 2 : 1; }
constexpr int per_word(ElementType type) { return 4 / bytes_of(type); }

/// The elements of `count` words as floats: the e-th of word i, lowest first, is out[e * stride +
/// i].
void widen_words(ElementType type, const std::uint32_t* words, int count, int stride, float* out);

}  // namespace sonicmoe::emulator
