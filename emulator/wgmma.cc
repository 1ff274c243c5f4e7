#include "wgmma.h"

#include <bit>
#include <cstring>
#include <string>

#include "tensor_copy.h"

namespace sonicmoe::emulator {
namespace {

constexpr std::uint32_t kChunk = 16;  // bytes that lie together in every layout
constexpr int kChunkWords = kChunk / 4;
constexpr int kDepthWords = kDepthBytes / 4;
constexpr int kGroup = 8;  // rows, or k, of a core matrix

void read_chunk(const SharedMatrix& m, SharedPass& pass, std::uint32_t address,
                std::uint32_t (&words)[kChunkWords]) {
  const std::uint32_t at = swizzled(address, m.descriptor.span);
  if (at + kChunk > m.memory_bytes) {
    throw Fault("a product reads shared memory at byte " + std::to_string(at) + " of " +
                std::to_string(m.memory_bytes));
  }
  pass.read(at, kChunk);
  m.cta->check_async_read(at, kChunk, m.warp);
  std::memcpy(words, m.memory + at, kChunk);
}

/// The address of 16 bytes of a K-major row, before the swizzle.
std::uint32_t address_in_k(const MatrixDescriptor& d, std::uint32_t row, std::uint32_t chunk) {
  const std::uint32_t at = d.start + row / kGroup * d.stride;
  if (d.span == 0) return at + row % kGroup * kChunk + chunk * d.leading;
  return at + row % kGroup * d.span + chunk * kChunk;
}

/// The address of the 16 bytes that begin at byte `byte` of the rows of an MN-major operand, before
/// the swizzle.
std::uint32_t address_in_mn(const MatrixDescriptor& d, std::uint32_t byte, std::uint32_t k) {
  if (d.span == 0) {
    return d.start + byte / kChunk * d.stride + k / kGroup * d.leading + k % kGroup * kChunk;
  }
  return d.start + (byte >> std::countr_zero(d.span)) * d.leading + (byte & (d.span - 1)) +
         k / kGroup * d.stride + k % kGroup * d.span;
}

void read_k_major(const SharedMatrix& m, SharedPass& pass, int first, int count, float* out) {
  std::uint32_t words[kDepthWords][kMostColumns];
  for (int i = 0; i < count; ++i) {
    const int at = position_of(i, count);
    for (int chunk = 0; chunk < kDepthWords / kChunkWords; ++chunk) {
      std::uint32_t read[kChunkWords];
      read_chunk(m, pass, address_in_k(m.descriptor, first + i, chunk), read);
      for (int w = 0; w < kChunkWords; ++w) words[chunk * kChunkWords + w][at] = read[w];
    }
  }
  for (int w = 0; w < kDepthWords; ++w) {
    widen_words(m.type, words[w], count, count, out + w * per_word(m.type) * count);
  }
}

/// A word has two or four neighbouring rows.
void read_mn_major(const SharedMatrix& m, SharedPass& pass, int first, int count, float* out) {
  const int in_word = per_word(m.type);
  const int words_of_k = count / in_word;
  std::uint32_t words[kMostColumns / 2];
  float values[kMostColumns];
  for (int k = 0; k < kDepthBytes / bytes_of(m.type); ++k, out += count) {
    for (int i = 0; i < words_of_k; i += kChunkWords) {
      std::uint32_t read[kChunkWords];
      const int byte = (first + in_word * i) * bytes_of(m.type);
      read_chunk(m, pass, address_in_mn(m.descriptor, static_cast<std::uint32_t>(byte), k), read);
      std::memcpy(words + i, read, kChunk);
    }
    widen_words(m.type, words, words_of_k, words_of_k, values);
    for (int row = 0; row < count; ++row) {
      out[position_of(row, count)] = values[row % in_word * words_of_k + row / in_word];
    }
  }
}

}  // namespace

MatrixDescriptor MatrixDescriptor::decode(std::uint64_t bits) {
  // Offsets have 14 bits and count 16 bytes.
  const auto field = [bits](int shift) {
    return static_cast<std::uint32_t>(bits >> shift & 0x3fff) * kChunk;
  };
  if ((bits >> 49 & 7) != 0) throw Fault("base offsets of matrix descriptors are not emulated");
  constexpr std::uint32_t kSpans[] = {0, 128, 64, 32};
  return {field(0), field(16), field(32), kSpans[bits >> 62]};
}

void read_row_begin(const SharedMatrix& matrix, SharedPass& pass, int row, std::uint32_t* words) {
  std::uint32_t read[kChunkWords];
  read_chunk(matrix, pass, address_in_k(matrix.descriptor, static_cast<std::uint32_t>(row), 0),
             read);
  std::memcpy(words, read, kChunk);
}

void read_matrix(const SharedMatrix& matrix, SharedPass& pass, int first, int count, float* out) {
  if (matrix.major == Major::kK) {
    read_k_major(matrix, pass, first, count, out);
  } else {
    read_mn_major(matrix, pass, first, count, out);
  }
}

}  // namespace sonicmoe::emulator
