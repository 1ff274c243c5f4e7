// Products of small matrices in fp32, in an order that suits the fragments that warps hold.
//
// A lane's registers have every second column of eight neighbouring ones. So rows and columns stand
// in the order 0 2 4 ... 1 3 5 ... here: the four lanes of a register that hold one row are then
// four floats side by side.
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

/// The same for products of 8-bit elements, whose sums have 14 significant bits on Hopper. Let 2^e
/// be the largest power of two that is at most the largest magnitude of a term; the old sum is a
/// term too. Each term is truncated toward zero to a multiple of 2^(e - 13), and the new sum to 14
/// bits. A sum with an infinity or NaN among its terms is that of multiply_add(). Sources: arXiv
/// 2511.10909 and 2512.07004. It is not known here whether hardware takes e before or after it
/// normalises a product; after is the less exact of the two.
void multiply_add_14_bits(const float* a, const float* b, float* sums, int depth, int columns);

/// Between registers of fp32 and 16 rows of sums. Four registers have eight columns: even and odd
/// columns of rows 0 to 7, then those of rows 8 to 15.
void load_sums(Warp& warp, const Slot* registers, int columns, float* sums);
void store_sums(Warp& warp, const Slot* registers, int columns, const float* sums);

enum class ElementType : std::uint32_t { kBF16, kF16, kE4M3, kE5M2 };
constexpr int bytes_of(ElementType type) { return type <= ElementType::kF16 ? 2 : 1; }
constexpr int per_word(ElementType type) { return 4 / bytes_of(type); }

/// The elements of `count` words as floats: the e-th of word i, lowest first, is out[e * stride +
/// i].
void widen_words(ElementType type, const std::uint32_t* words, int count, int stride, float* out);

}  // namespace sonicmoe::emulator
