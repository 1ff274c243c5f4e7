// Quantises bf16 rows to codes and scales. A block of 128 columns of a row has one scale; past the
// last column codes are 0. A thread quantises 16 elements, and eight neighbouring lanes compute the
// scale of their block. Memory bandwidth limits the kernel: it reads 2 bytes and writes 1 byte for
// each element.
#include "core/fp8_layout.h"
#include "core/fp8_quantize.h"
#include "cuda/device/launch.h"
#include "cuda/fp8/codes.cuh"
#include "cuda/fp8/quantizers.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 16;                    // elements that a thread quantises
constexpr int kLanes = fp8::kBlock / kEach;  // lanes of a block

struct Args {
  const std::uint16_t* rows;
  std::int64_t row_stride;
  std::uint8_t* codes;
  float* scales;
  std::int64_t threads;  ///< rows * columns of codes / kEach
  std::uint32_t row_threads;
  std::uint32_t columns;  ///< of `rows`
};

__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const Args p) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.threads) return;  // all eight lanes of a block, because p.threads is a multiple of 8
  const std::uint32_t row = static_cast<std::uint32_t>(at / p.row_threads);
  const std::uint32_t column = static_cast<std::uint32_t>(at % p.row_threads) * kEach;
  const uint4* from = reinterpret_cast<const uint4*>(p.rows + row * p.row_stride + column);
  uint4 first{}, second{};
  if (column < p.columns) {
    first = ptx::load_constant16(from);
    second = ptx::load_constant16(from + 1);
  }
  const std::uint32_t words[8] = {first.x,  first.y,  first.z,  first.w,
                                  second.x, second.y, second.z, second.w};
  std::uint32_t most = 0;
#pragma unroll
  for (const std::uint32_t word : words) {
    most = larger_magnitude(most, word);
  }
  const unsigned lanes = 0xffu << (threadIdx.x & 24);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    most = max(most, __shfl_xor_sync(lanes, most, step));
  }
  const float scale = fp8::scale_of(most);
  const float inverse = fp8::inverse_of(scale);
  std::uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    codes[i] = code_pair(words[2 * i], inverse) | code_pair(words[2 * i + 1], inverse) << 16;
  }
  *reinterpret_cast<uint4*>(p.codes + at * kEach) =
      make_uint4(codes[0], codes[1], codes[2], codes[3]);
  if (threadIdx.x % kLanes == 0) p.scales[at / kLanes] = scale;
}

}  // namespace

void fp8_quantize_rows(const Device& device, const QuantizeRows& work, cudaStream_t stream) {
  Args args{};
  args.rows = static_cast<const std::uint16_t*>(work.rows.data);
  args.row_stride = work.rows.stride[0];
  const Tensor& codes = work.out.codes;
  args.codes = static_cast<std::uint8_t*>(codes.data);
  args.scales = work.out.scales.data;
  args.threads = codes.shape[0] * codes.shape[1] / kEach;
  args.row_threads = static_cast<std::uint32_t>(codes.shape[1] / kEach);
  args.columns = static_cast<std::uint32_t>(work.rows.shape[1]);
  const std::int64_t blocks = (args.threads + kThreads - 1) / kThreads;
  launch_dependent(device, "launching the quantiser of rows", &quantize_rows_kernel,
                   {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads)}, stream,
                   args);
}

}  // namespace sonicmoe::cuda
