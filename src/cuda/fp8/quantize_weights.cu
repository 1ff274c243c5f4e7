// Quantises weight matrices: reads the bf16 weights once and writes the codes of each matrix and of
// its transpose. A CTA quantises one block of 128 x 128; outside of the matrix it has zeros. It
// reads along the contiguous dimension of the weights (16 bytes a thread) and writes the codes in
// this orientation from registers. It transposes the codes in shared memory.
#include "core/fp8_layout.h"
#include "core/fp8_quantize.h"
#include "cuda/device/launch.h"
#include "cuda/fp8/codes.cuh"
#include "cuda/fp8/quantizers.h"
#include "cuda/ptx/dependent.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = static_cast<int>(fp8::kBlock);
constexpr int kEach = 8;                              // columns that a thread reads of one row
constexpr int kAcross = kBlock / kEach;               // threads that read one row
constexpr int kRows = kBlock / (kThreads / kAcross);  // rows of which a thread reads columns

/// Here a weight matrix has the dimensions (down, across), whatever they are in the layer: `across`
/// is the contiguous one, or has the stride 2 if gate and up alternate. The arrays of codes have
/// both dimensions rounded up to whole blocks.
struct Args {
  const std::uint16_t* weights;
  std::int32_t down, across;
  std::int64_t expert_stride;
  std::int64_t down_stride;
  std::int32_t step;  ///< elements from a column to the next one: 1, or 2 if gate and up alternate
  std::uint8_t* codes;  ///< (down, across)
  std::int64_t codes_expert;
  std::int64_t codes_row;
  std::uint8_t* transposed;  ///< (across, down)
  std::int64_t transposed_expert;
  std::int64_t transposed_row;
  float* scales;
  std::int64_t scales_expert;
  std::int64_t scales_down;
  std::int64_t scales_across;
};

/// Eight elements `step` apart, from `from` on, as four words.
__device__ __forceinline__ uint4 load_eight(const std::uint16_t* from, int step) {
  const uint4 first = __ldg(reinterpret_cast<const uint4*>(from));
  if (step == 1) return first;
  // Every second element, from the first one on.
  const uint4 second = __ldg(reinterpret_cast<const uint4*>(from) + 1);
  return {__byte_perm(first.x, first.y, 0x5410), __byte_perm(first.z, first.w, 0x5410),
          __byte_perm(second.x, second.y, 0x5410), __byte_perm(second.z, second.w, 0x5410)};
}
/// Every second element, from the second element of `from` on, as four words.
__device__ __forceinline__ uint4 load_eight_odd(const std::uint16_t* from) {
  const uint4 first = __ldg(reinterpret_cast<const uint4*>(from));
  const uint4 second = __ldg(reinterpret_cast<const uint4*>(from) + 1);
  return {__byte_perm(first.x, first.y, 0x7632), __byte_perm(first.z, first.w, 0x7632),
          __byte_perm(second.x, second.y, 0x7632), __byte_perm(second.z, second.w, 0x7632)};
}

__device__ __forceinline__ std::uint32_t largest_of(const uint4& v) {
  std::uint32_t most = 0;
  for (const std::uint32_t word : {v.x, v.y, v.z, v.w}) {
    most = larger_magnitude(most, word);
  }
  return most;
}

/// The largest value of all threads of the CTA.
__device__ __forceinline__ std::uint32_t largest_of_block(std::uint32_t own) {
  __shared__ std::uint32_t of_warp[kThreads / 32];
  own = __reduce_max_sync(~0u, own);
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; i++) most = max(most, of_warp[i]);
  return most;
}

/// The index in the tile of codes of word `word` of a row, which has columns 4 * word to 4 * word +
/// 3. Each group of sixteen rows permutes the words of its rows in another way, so that neither
/// writes along rows nor reads along columns have bank conflicts.
__device__ __forceinline__ int tile_word(int row, int word) {
  return row * (kBlock / 4) + (word ^ (row / 16) * 4);
}

/// Transposes four words of four codes: word j of the result has byte j of each input word.
__device__ __forceinline__ uint4 transpose(const std::uint32_t (&w)[4]) {
  const std::uint32_t low01 = __byte_perm(w[0], w[1], 0x5140);
  const std::uint32_t low23 = __byte_perm(w[2], w[3], 0x5140);
  const std::uint32_t high01 = __byte_perm(w[0], w[1], 0x7362);
  const std::uint32_t high23 = __byte_perm(w[2], w[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
          __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
}

/// Writes the transposed block: each thread writes 16 codes in each of four rows of the transpose.
__device__ __forceinline__ void write_transposed(const std::uint32_t* tile, std::uint8_t* to,
                                                 std::int64_t row_bytes) {
  const int group = threadIdx.x & 7;  // a group is sixteen rows of the tile
  const int word = threadIdx.x >> 3;
  uint4 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    std::uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = tile[tile_word(group * 16 + i * 4 + j, word)];
    const uint4 t = transpose(w);
    reinterpret_cast<std::uint32_t*>(&out[0])[i] = t.x;
    reinterpret_cast<std::uint32_t*>(&out[1])[i] = t.y;
    reinterpret_cast<std::uint32_t*>(&out[2])[i] = t.z;
    reinterpret_cast<std::uint32_t*>(&out[3])[i] = t.w;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    *reinterpret_cast<uint4*>(to + (word * 4 + i) * row_bytes + group * 16) = out[i];
  }
}

__global__ void __launch_bounds__(kThreads) quantize_weights_kernel(const Args p) {
  __shared__ std::uint32_t tile[kBlock * kBlock / 4];
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t across = static_cast<std::int64_t>(blockIdx.x) * kBlock;
  const std::int64_t down = static_cast<std::int64_t>(blockIdx.y) * kBlock;
  const int lane = threadIdx.x % kAcross;
  const int first = threadIdx.x / kAcross;
  // Outside of the matrix a thread loads other elements of it and replaces them by zeros, because
  // a branch around each load would delay the next one.
  const bool inside = across + lane * kEach < p.across;
  const int rows = static_cast<int>(min(p.down - down, std::int64_t{kBlock}));
  const std::uint16_t* from = p.weights + blockIdx.z * p.expert_stride + down * p.down_stride +
                              (across + (inside ? lane * kEach : 0)) * p.step;
  // If gate and up alternate, up begins one element after gate. Its loads begin one element before
  // up, because 16-byte loads must be aligned; then load_eight_odd() takes every second element.
  const bool odd = (reinterpret_cast<std::uintptr_t>(p.weights) & 2) != 0;
  uint4 words[kRows];
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    const int index = first + i * (kThreads / kAcross);
    const std::uint16_t* row = from + min(index, rows - 1) * p.down_stride;
    words[i] = odd ? load_eight_odd(row - 1) : load_eight(row, p.step);
    if (!inside || index >= rows) words[i] = uint4{};
    most = max(most, largest_of(words[i]));
  }
  const float scale = fp8::scale_of(largest_of_block(most));
  const float inverse = fp8::inverse_of(scale);
  std::uint8_t* codes =
      p.codes + blockIdx.z * p.codes_expert + down * p.codes_row + across + lane * kEach;
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    const int row = first + i * (kThreads / kAcross);
    const uint2 eight = {code_pair(words[i].x, inverse) | code_pair(words[i].y, inverse) << 16,
                         code_pair(words[i].z, inverse) | code_pair(words[i].w, inverse) << 16};
    *reinterpret_cast<uint2*>(codes + row * p.codes_row) = eight;
    *reinterpret_cast<uint2*>(&tile[tile_word(row, lane * 2)]) = eight;
  }
  if (threadIdx.x == 0) {
    p.scales[blockIdx.z * p.scales_expert + blockIdx.y * p.scales_down +
             blockIdx.x * p.scales_across] = scale;
  }
  __syncthreads();
  write_transposed(
      tile, p.transposed + blockIdx.z * p.transposed_expert + across * p.transposed_row + down,
      p.transposed_row);
}

/// Where the results for the matrices (rows, columns) of all experts are written: the codes, the
/// codes of the transposes, and the scales by block of rows and block of columns. Rows and columns
/// are rounded up to whole blocks.
struct Target {
  std::uint8_t* codes;
  std::int64_t codes_expert;
  std::uint8_t* transposed;
  std::int64_t transposed_expert;
  std::int64_t transposed_row;
  float* scales;
  std::int64_t scales_expert;
};

void quantize(const Device& device, const Tensor& w, const Target& to, cudaStream_t stream) {
  const std::int64_t columns = fp8::whole_blocks(w.shape[2]);
  const std::int64_t column_blocks = fp8::blocks_of(w.shape[2]);
  const std::int64_t row_blocks = fp8::blocks_of(w.shape[1]);
  Args args{};
  args.weights = static_cast<const std::uint16_t*>(w.data);
  args.expert_stride = w.stride[0];
  args.scales = to.scales;
  args.scales_expert = to.scales_expert;
  dim3 grid;
  grid.z = static_cast<unsigned>(w.shape[0]);
  const bool by_rows = w.stride[2] == 1;
  args.down = static_cast<std::int32_t>(w.shape[by_rows ? 1 : 2]);
  args.across = static_cast<std::int32_t>(w.shape[by_rows ? 2 : 1]);
  args.down_stride = w.stride[by_rows ? 1 : 2];
  args.step = static_cast<std::int32_t>(w.stride[by_rows ? 2 : 1]);
  if (by_rows) {
    args.codes = to.codes;
    args.codes_expert = to.codes_expert;
    args.codes_row = columns;
    args.transposed = to.transposed;
    args.transposed_expert = to.transposed_expert;
    args.transposed_row = to.transposed_row;
    args.scales_down = column_blocks;
    args.scales_across = 1;
    grid.x = static_cast<unsigned>(column_blocks);
    grid.y = static_cast<unsigned>(row_blocks);
  } else {
    args.codes = to.transposed;
    args.codes_expert = to.transposed_expert;
    args.codes_row = to.transposed_row;
    args.transposed = to.codes;
    args.transposed_expert = to.codes_expert;
    args.transposed_row = columns;
    args.scales_down = 1;
    args.scales_across = column_blocks;
    grid.x = static_cast<unsigned>(row_blocks);
    grid.y = static_cast<unsigned>(column_blocks);
  }
  launch_dependent(device, "launching the quantiser of weights", &quantize_weights_kernel,
                   {.grid = grid, .block = dim3(kThreads)}, stream, args);
}

}  // namespace

void fp8_quantize_weights(const Device& device, const Problem& p, const Weights& weights,
                          const Buffer& out, cudaStream_t stream) {
  const fp8::WeightsLayout at = fp8::weights_layout(p);
  auto* bytes = static_cast<std::uint8_t*>(out.data);
  const auto scales = [&](std::int64_t offset) { return reinterpret_cast<float*>(bytes + offset); };
  const std::int64_t hidden = fp8::whole_blocks(p.hidden), width = fp8::whole_blocks(p.width);
  const std::int64_t matrix = hidden * width;
  const std::int64_t blocks = matrix / (fp8::kBlock * fp8::kBlock);
  const std::int64_t parts = gate_factor(p.activation.kind);
  for (std::int64_t part = 0; part < parts; ++part) {
    const Tensor& w = parts == 2 && part == 0 ? weights.gate : weights.up;
    quantize(device, w,
             {bytes + at.up + part * matrix, parts * matrix, bytes + at.up_t + part * width,
              parts * matrix, parts * width, scales(at.up_s) + part * blocks, parts * blocks},
             stream);
  }
  quantize(device, weights.down,
           {bytes + at.down, matrix, bytes + at.down_t, matrix, hidden, scales(at.down_s), blocks},
           stream);
}

}  // namespace sonicmoe::cuda
