#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/sums/factors.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kTogether = 8;  // elements of a line that a thread copies

/// A copy of `lines` lines of `length` elements each; the matrix of an expert has `matrix_lines`
/// lines. Strides count elements: from one expert's matrix to the next, from line to line, and from
/// one element of a line to the next.
struct Lines {
  const void* from;
  void* to;
  std::int64_t from_stride[3];
  std::int64_t to_stride[3];
  std::int64_t lines;
  std::int64_t matrix_lines;
  std::int64_t from_lines;  ///< of a matrix; the lines after them become 0
  std::int64_t length;
  bool from_f32;
};
struct AllLines {
  Lines copy[CopyFactors::kMost];
};

/// Block row y copies copy[y].
template <class Element>
__global__ void copy_factors_kernel(const __grid_constant__ AllLines all) {
  const Lines& c = all.copy[blockIdx.y];
  const std::int64_t parts = (c.length + kTogether - 1) / kTogether;
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < c.lines * parts;
       i += step) {
    const std::int64_t line = i / parts;
    const bool is_zero = line % c.matrix_lines >= c.from_lines;
    const std::int64_t first = i % parts * kTogether;
    const auto offset = [&](const std::int64_t(&stride)[3]) {
      return line / c.matrix_lines * stride[0] + line % c.matrix_lines * stride[1] +
             first * stride[2];
    };
    const std::int64_t from = offset(c.from_stride);
    auto* to = static_cast<Element*>(c.to) + offset(c.to_stride);
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (first + j >= c.length) break;
      const std::int64_t at = from + j * c.from_stride[2];
      Element value(0.0f);
      if (!is_zero) {
        value = c.from_f32 ? Element(static_cast<const float*>(c.from)[at])
                           : static_cast<const Element*>(c.from)[at];
      }
      to[j * c.to_stride[2]] = value;
    }
  }
}

/// A line runs along the last or the middle dimension of `to`: the one with the smaller stride, so
/// that a thread writes neighbouring elements.
Lines lines_of(const CopyFactors::Copy& copy) {
  const Tensor& to = copy.to;
  const int along = to.stride[2] <= to.stride[1] ? 2 : 1;
  const int across = 3 - along;
  Lines c{};
  c.from = copy.from.data;
  c.to = to.data;
  const int dims[3] = {0, across, along};
  for (int i = 0; i < 3; i++) {
    c.from_stride[i] = copy.from.stride[dims[i]];
    c.to_stride[i] = to.stride[dims[i]];
  }
  c.lines = to.shape[0] * to.shape[across];
  c.matrix_lines = to.shape[across];
  c.from_lines = copy.from.shape[across];
  c.length = to.shape[along];
  c.from_f32 = copy.from.dtype == DType::kF32;
  return c;
}

}  // namespace

void copy_factors(const CopyFactors& copies, cudaStream_t stream) {
  AllLines all{};
  std::int64_t most = 1;
  for (int i = 0; i < copies.count; i++) {
    all.copy[i] = lines_of(copies.copy[i]);
    most = std::max(most, all.copy[i].lines * ((all.copy[i].length + kTogether - 1) / kTogether));
  }
  constexpr std::int64_t kMostBlocks = 2048;  // enough for every GPU
  const dim3 grid(static_cast<unsigned>(std::min((most + kBlock - 1) / kBlock, kMostBlocks)),
                  static_cast<unsigned>(copies.count));
  const auto kernel = copies.copy[0].to.dtype == DType::kBF16 ? &copy_factors_kernel<__nv_bfloat16>
                                                              : &copy_factors_kernel<__half>;
  launch("copying low-rank factors", kernel, grid, dim3(kBlock), stream, all);
}

}  // namespace sonicmoe::cuda
