// Unpacks weights. Memory bandwidth limits the kernel: for an element of bf16 it writes 2 bytes,
// and reads half a byte or one byte.
//
// A thread unpacks units of 8 elements: it loads their codes (4 or 8 bytes) and writes 16 bytes, or
// 32 bytes of fp32. So each store of a warp is one contiguous range, and so is each load. A block
// unpacks chunks of kUnits units a thread, whose loads are issued before the first is used. The
// grid has the blocks that the device runs at once, and each takes every gridDim.x-th chunk.
//
// The launches here are ordinary ones: a kernel begins after all earlier work of the stream, which
// may still read `out`, and later kernels begin after it.
#include <algorithm>

#include "core/packed_values.h"
#include "cuda/device/launch.h"
#include "cuda/math/element.cuh"
#include "cuda/packed/unpack.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;
constexpr int kElements = 8;  // of a unit
constexpr int kChunk = kThreads * kUnits;
constexpr int kBlocks = 6;  // of a multiprocessor: 1536 threads, which every architecture runs

/// Division of numbers below 2^31 by a number from 2 on, in two instructions. With s the bits of
/// the divisor and m = 2^(31 + s) / d, rounded up, n * m / 2^(31 + s) is too large by less than
/// n / 2^31 / d, so by less than 1 / d.
struct Division {
  explicit Division(std::uint32_t divisor) {
    while ((std::uint64_t{1} << shift) < divisor) ++shift;
    multiplier =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }
  __device__ __forceinline__ std::uint32_t quotient(std::uint32_t n) const {
    return __umulhi(n, multiplier) >> (shift - 1);
  }
  std::uint32_t multiplier = 0;
  std::uint32_t shift = 0;
};

enum class Source { kNF4, kNestedNF4, kMXFP4, kFP8Blocks };

struct Args {
  const std::uint8_t* codes;
  const void* scales;
  const float* nested_map;
  const float* nested_scales;
  const float* nested_offset;
  void* out;
  std::uint32_t first;          ///< expert of the packed tensor that is the first one of `out`
  std::uint32_t chunks;         ///< of all experts of `out`
  std::uint32_t expert_chunks;  ///< of one expert; the last may have fewer units
  std::uint32_t expert_units;
  std::uint32_t row_units;
  Division row_of;             ///< by row_units
  std::uint32_t down, across;  ///< kFP8Blocks: scales of an expert
  int unit_shift;              ///< kNF4: log2 of the units of a block
};

/// The tables of a block.
struct Tables {
  float values[16];  ///< of 4-bit codes
  float map[256];    ///< nested_map
};

template <Source kSource>
__device__ __forceinline__ void fill(Tables& tables, const Args& p) {
#pragma unroll
  for (std::uint32_t i = 0; i < 16; i++) {
    const float value = kSource == Source::kMXFP4 ? packed::e2m1_of(i) : packed::nf4_of(i);
    if (threadIdx.x == i) tables.values[i] = value;
  }
  if constexpr (kSource == Source::kNestedNF4) tables.map[threadIdx.x] = p.nested_map[threadIdx.x];
  __syncthreads();
}

template <Source kSource>
__device__ __forceinline__ uint2 codes_of(const Args& p, std::int64_t unit) {
  if constexpr (kSource == Source::kFP8Blocks) return reinterpret_cast<const uint2*>(p.codes)[unit];
  return make_uint2(reinterpret_cast<const std::uint32_t*>(p.codes)[unit], 0u);
}

/// The scale of a unit; `local` is its number in its expert.
template <Source kSource>
__device__ __forceinline__ float scale_of(const Tables& tables, const Args& p, std::int64_t unit,
                                          std::uint32_t expert, std::uint32_t local) {
  if constexpr (kSource == Source::kNF4) {
    return static_cast<const float*>(p.scales)[unit >> p.unit_shift];
  } else if constexpr (kSource == Source::kNestedNF4) {
    const std::int64_t block = unit >> p.unit_shift;
    const std::uint8_t code = static_cast<const std::uint8_t*>(p.scales)[block];
    return packed::nested_absmax(tables.map[code], p.nested_scales[block / packed::kNestedBlock],
                                 *p.nested_offset);
  } else if constexpr (kSource == Source::kMXFP4) {
    constexpr int kUnitsOfScale = packed::kMXBlock / kElements;
    return packed::e8m0_of(static_cast<const std::uint8_t*>(p.scales)[unit / kUnitsOfScale]);
  } else {
    constexpr std::uint32_t kUnitsOfScale = packed::kFP8Block / kElements;
    const std::uint32_t row = p.row_of.quotient(local);
    const std::uint32_t across = (local - row * p.row_units) / kUnitsOfScale;
    const std::int64_t band = static_cast<std::int64_t>(expert) * p.down + row / packed::kFP8Block;
    return static_cast<const float*>(p.scales)[band * p.across + across];
  }
}

/// Two e4m3 codes as halves: `codes` has them in its bytes 1 and 3, `nans` has bit 7 of these bytes
/// set if the code is NaN. The bits of a code become those of a half with the same exponent field,
/// whose bias is larger by 8: the value times 2^-8, exactly, also if it is subnormal.
__device__ __forceinline__ float2 e4m3_pair(std::uint32_t codes, std::uint32_t nans) {
  std::uint32_t halves = (codes & 0x80008000u) | ((codes >> 1) & 0x3f803f80u);
  halves |= nans - (nans >> 7);  // 0x8000 becomes 0x7f00: NaN
  const float low = Pair<__half>::low(halves), high = Pair<__half>::high(halves);
  return make_float2(key::mul32(low, 256.0f), key::mul32(high, 256.0f));
}

/// The values of the e4m3 codes of a word.
__device__ __forceinline__ void e4m3_values(std::uint32_t word, float* values) {
  // A code is NaN if its low 7 bits are ones, so that adding 1 to them carries into bit 7.
  const std::uint32_t nans = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  const float2 even = e4m3_pair(word << 8, (nans << 8) & 0x80008000u);
  const float2 odd = e4m3_pair(word, nans & 0x80008000u);
  values[0] = even.x;
  values[1] = odd.x;
  values[2] = even.y;
  values[3] = odd.y;
}

/// The elements of a unit, without their scale.
template <Source kSource>
__device__ __forceinline__ void values_of(const Tables& tables, uint2 codes,
                                          float (&values)[kElements]) {
  if constexpr (kSource == Source::kFP8Blocks) {
    e4m3_values(codes.x, values);
    e4m3_values(codes.y, values + 4);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      // Of the two codes of a byte, that of the even element is the high one in NF4.
      const int half = kSource == Source::kMXFP4 ? i % 2 : 1 - i % 2;
      values[i] = tables.values[codes.x >> (i / 2 * 8 + half * 4) & 15u];
    }
  }
}

__device__ __forceinline__ void store(float* out, const float (&v)[kElements]) {
  auto* to = reinterpret_cast<float4*>(out);
  to[0] = make_float4(v[0], v[1], v[2], v[3]);
  to[1] = make_float4(v[4], v[5], v[6], v[7]);
}

template <class Out>
__device__ __forceinline__ void store(Out* out, const float (&v)[kElements]) {
  using Two = Pair<Out>;
  *reinterpret_cast<uint4*>(out) = make_uint4(Two::pack(v[0], v[1]), Two::pack(v[2], v[3]),
                                              Two::pack(v[4], v[5]), Two::pack(v[6], v[7]));
}

template <Source kSource, class Out>
__global__ void __launch_bounds__(kThreads, kBlocks) unpack_kernel(const Args p) {
  __shared__ Tables tables;
  if constexpr (kSource != Source::kFP8Blocks) fill<kSource>(tables, p);
  for (std::uint32_t chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x) {
    const std::uint32_t place = chunk / p.expert_chunks;  // of the expert in `out`
    const std::uint32_t expert = p.first + place;
    const std::uint32_t local = (chunk - place * p.expert_chunks) * kChunk + threadIdx.x;
    const std::int64_t unit = static_cast<std::int64_t>(expert) * p.expert_units + local;
    const std::int64_t to = static_cast<std::int64_t>(place) * p.expert_units + local;
    uint2 codes[kUnits];
    float scales[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      if (local + i * kThreads < p.expert_units) {
        codes[i] = codes_of<kSource>(p, unit + i * kThreads);
        scales[i] = scale_of<kSource>(tables, p, unit + i * kThreads, expert, local + i * kThreads);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      if (local + i * kThreads >= p.expert_units) break;
      float values[kElements];
      values_of<kSource>(tables, codes[i], values);
#pragma unroll
      for (float& value : values) value = key::mul32(value, scales[i]);
      store(static_cast<Out*>(p.out) + (to + i * kThreads) * kElements, values);
    }
  }
}

template <Source kSource>
void launch_unpack(const Args& args, DType dtype, dim3 grid, cudaStream_t stream) {
  constexpr const char* kWhat = "launching the kernel that unpacks weights";
  if (dtype == DType::kBF16) {
    launch(kWhat, &unpack_kernel<kSource, __nv_bfloat16>, grid, dim3(kThreads), stream, args);
  } else if (dtype == DType::kF16) {
    launch(kWhat, &unpack_kernel<kSource, __half>, grid, dim3(kThreads), stream, args);
  } else {
    launch(kWhat, &unpack_kernel<kSource, float>, grid, dim3(kThreads), stream, args);
  }
}

void refuse(const std::string& sentence) { throw Error(Status::kUnsupported, sentence); }

void check_aligned(const char* name, const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
    refuse(std::string(name) + " must be aligned to 16 bytes on CUDA");
  }
}

Args args_of(const PackedWeights& packed, const ExpertRange& range, void* out) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  check_aligned("codes", packed.codes.data);
  check_aligned("out", out);
  if (packed.columns % 16 != 0) {
    refuse("columns is " + std::to_string(packed.columns) + ", must be a multiple of 16 on CUDA");
  }
  const std::int64_t units = packed.rows * packed.columns / kElements;
  const std::int64_t chunks = packed.experts * packed::divide_up(units, kChunk);
  if (units >= kMost || chunks >= kMost) {
    refuse("E*rows*columns is " + std::to_string(packed.experts) + " * " +
           std::to_string(packed.rows) + " * " + std::to_string(packed.columns) +
           ", must be below 2^34 for an expert and 2^44 for all on CUDA");
  }
  const auto row_units = static_cast<std::uint32_t>(packed.columns / kElements);
  Args args{.row_units = row_units, .row_of = Division(row_units)};
  args.codes = static_cast<const std::uint8_t*>(packed.codes.data);
  args.scales = packed.scales.data;
  args.nested_map = static_cast<const float*>(packed.nested_map.data);
  args.nested_scales = static_cast<const float*>(packed.nested_scales.data);
  args.nested_offset = static_cast<const float*>(packed.nested_offset.data);
  args.out = out;
  args.first = static_cast<std::uint32_t>(range.first);
  args.chunks = static_cast<std::uint32_t>(chunks / packed.experts * range.count);
  args.expert_chunks = static_cast<std::uint32_t>(chunks / packed.experts);
  args.expert_units = static_cast<std::uint32_t>(units);
  args.down = static_cast<std::uint32_t>(packed::divide_up(packed.rows, packed::kFP8Block));
  args.across = static_cast<std::uint32_t>(packed::divide_up(packed.columns, packed::kFP8Block));
  for (std::int64_t block = packed.block / kElements; block > 1; block /= 2) ++args.unit_shift;
  return args;
}

/// The index of the first of `count` records whose expert is not below `expert`.
__device__ __forceinline__ int first_record(const TileRecord* records, int count, int expert) {
  int low = 0;
  for (int high = count; low < high;) {
    const int middle = (low + high) / 2;
    if (records[middle].expert < expert) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads)
    take_records_kernel(const TileRecord* records, const std::int32_t* record_count, int first,
                        int past, const RangeLists out, unsigned* counter) {
  const int count = *record_count;
  const int begin = first_record(records, count, first);
  const int end = first_record(records, count, past);
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const TileRecord r = records[i];
    out.records[i - begin] = {r.expert - first, r.begin, r.rows, r.first - begin};
  }
  if (threadIdx.x == 0) {
    *out.record_count = end - begin;
    if (counter != nullptr) *counter = 0;
  }
}

}  // namespace

void take_records(const Metadata& all, const ExpertRange& range, const RangeLists& out,
                  unsigned* counter, cudaStream_t stream) {
  launch("launching the kernel that takes the tile records of some experts", &take_records_kernel,
         dim3(1), dim3(kThreads), stream, all.records, all.record_count,
         static_cast<int>(range.first), static_cast<int>(range.first + range.count), out, counter);
}

void unpack_experts(const Device& device, const PackedWeights& packed, const ExpertRange& range,
                    const UnpackedExperts& out, cudaStream_t stream) {
  const Args args = args_of(packed, range, out.data);
  const unsigned most = static_cast<unsigned>(device.multiprocessors) * kBlocks;
  const dim3 grid(std::min<unsigned>(args.chunks, most));
  if (packed.format == PackedFormat::kMXFP4) {
    launch_unpack<Source::kMXFP4>(args, out.dtype, grid, stream);
  } else if (packed.format == PackedFormat::kFP8Blocks) {
    launch_unpack<Source::kFP8Blocks>(args, out.dtype, grid, stream);
  } else if (packed.nested_map.data != nullptr) {
    launch_unpack<Source::kNestedNF4>(args, out.dtype, grid, stream);
  } else {
    launch_unpack<Source::kNF4>(args, out.dtype, grid, stream);
  }
}

void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec) {
  unpack_experts(device_of(exec), packed, {0, packed.experts}, {out.data, out.dtype},
                 stream_of(exec));
}

}  // namespace sonicmoe::cuda
