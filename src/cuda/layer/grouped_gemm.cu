// Grouped GEMMs on CUDA: offsets become the engine's tile list, then one product.
#include <algorithm>
#include <string>

#include "cuda/device/launch.h"
#include "cuda/layer/grouped_gemm.h"
#include "cuda/layer/moe.h"
#include "cuda/metadata/records.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kIndexBlocks = 64;

/// Where scratch goes: a part of Metadata, the indices as the producers take them, a counter.
struct GemmScratch {
  Metadata groups;
  std::int32_t* index;  // (R)
  unsigned* counter;
  std::int64_t bytes;
};

GemmScratch scratch_at(void* base, std::int64_t rows, std::int64_t experts) {
  std::int64_t used = 0;
  const auto take = [&](std::int64_t bytes) {
    void* at = static_cast<std::uint8_t*>(base) + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  };
  GemmScratch s{};
  s.groups.most_records = static_cast<std::int32_t>(rows / kRecordRows + experts);
  s.groups.records = static_cast<TileRecord*>(
      take(s.groups.most_records * static_cast<std::int64_t>(sizeof(TileRecord))));
  s.groups.record_count = static_cast<std::int32_t*>(take(4));
  s.groups.expert_begin = static_cast<std::int32_t*>(take(experts * 4));
  s.groups.expert_rows = static_cast<std::int32_t*>(take(experts * 4));
  s.index = static_cast<std::int32_t*>(take(rows * 4));
  s.counter = static_cast<unsigned*>(take(kCounterBytes));
  s.bytes = used;
  return s;
}

struct Groups {
  const std::int64_t* offsets;
  const std::int32_t* gather;  // null: none
  std::int64_t offset_stride;
  std::int64_t gather_stride;
  std::int64_t rows;         // R; 0 where nothing can be gathered
  std::int64_t source_rows;  // of a
  std::int32_t experts;
};

/// Offsets to experts and records, indices to what the producers take. Values are clamped.
__global__ void __launch_bounds__(kMetadataThreads)
    take_offsets(Groups g, Counters counters, GemmScratch s) {
  take_ranges(s.groups, g.experts, counters, [&](int e) {
    const auto offset = [&](int i) {
      return static_cast<int>(min(max(g.offsets[i * g.offset_stride], std::int64_t{0}), g.rows));
    };
    return RowRange{offset(e), max(0, offset(e + 1) - offset(e))};
  });
  if (g.gather == nullptr) return;
  for (std::int64_t i = blockIdx.x * kMetadataThreads + threadIdx.x; i < g.rows;
       i += gridDim.x * kMetadataThreads) {
    const std::int64_t row = g.gather[i * g.gather_stride];
    s.index[i] = static_cast<std::int32_t>(min(max(row, std::int64_t{0}), g.source_rows - 1));
  }
}

struct Sizes64 {
  std::int64_t rows, experts;
};

GemmScratch take_groups(const Device& device, const Tensor& offsets, const Tensor& gather,
                        const Tensor& a, Sizes64 sizes, const Buffer& scratch,
                        cudaStream_t stream) {
  const GemmScratch s = scratch_at(scratch.data, sizes.rows, sizes.experts);
  const Groups groups{static_cast<const std::int64_t*>(offsets.data),
                      static_cast<const std::int32_t*>(gather.data),
                      offsets.stride[0],
                      gather.stride[0],
                      a.shape[0] > 0 ? sizes.rows : 0,
                      a.shape[0],
                      static_cast<std::int32_t>(sizes.experts)};
  const unsigned blocks = gather.data == nullptr ? 1 : kIndexBlocks;
  launch_dependent(device, "launching the tile list", take_offsets, {blocks, kMetadataThreads},
                   stream, groups, Counters{s.counter, kCounterBytes / 4}, s);
  return s;
}

void check_sizes(const Tensor& a, std::int64_t experts,
                 std::initializer_list<std::int64_t> widths) {
  if (a.dtype != DType::kBF16 && a.dtype != DType::kF16) {
    throw Error(Status::kUnsupported,
                std::string("a is ") + dtype_name(a.dtype) + " but CUDA takes bf16 or f16.");
  }
  for (const std::int64_t width : widths) {
    if (width % 8 == 0) continue;
    throw Error(Status::kUnsupported, "an extent is " + std::to_string(width) +
                                          " but CUDA needs multiples of 8 for k, m and n.");
  }
  if (experts > kMaxMetadataExperts) {
    throw Error(Status::kUnsupported, "E is " + std::to_string(experts) +
                                          " but CUDA takes at most " +
                                          std::to_string(kMaxMetadataExperts) + ".");
  }
}

/// Upper bound of a product's tiles.
std::int64_t most_tiles(Sizes64 sizes, const RowTiles::Params& tiles) {
  const std::int64_t records = std::min(sizes.rows, sizes.rows / kRecordRows + sizes.experts);
  return std::max<std::int64_t>(1, records * tiles.column_tiles);
}

StoreRowsParams store_params(const Device& device, const Tensor& d) {
  StoreRowsParams params{};
  params.out = ragged_map(device, d);
  params.width = static_cast<std::int32_t>(d.shape[1]);
  return params;
}

void clear_matrices(const Tensor& d, cudaStream_t stream) {
  const bool last = d.stride[2] == 1;
  const std::int64_t lines = last ? d.shape[1] : d.shape[2];
  const std::int64_t width = last ? d.shape[2] : d.shape[1];
  const std::int64_t pitch = last ? d.stride[1] : d.stride[2];
  for (std::int64_t e = 0; e < d.shape[0]; ++e) {
    auto* at = static_cast<std::uint8_t*>(d.data) + e * d.stride[0] * kElementBytes;
    check_cuda(
        cudaMemset2DAsync(at, pitch * kElementBytes, 0, width * kElementBytes, lines, stream),
        "clearing d");
  }
}

}  // namespace

std::int64_t grouped_gemm_scratch_bytes(std::int64_t rows, std::int64_t experts) {
  return scratch_at(nullptr, rows, experts).bytes;
}

void grouped_gemm(const GroupedGemm& args, const Exec& exec) {
  const Device& device = device_of(exec);
  const auto [a, b, d, offsets, gather, scratch] = args;
  const Sizes64 sizes{d.shape[0], b.shape[0]};
  check_sizes(a, sizes.experts, {b.shape[1], b.shape[2]});
  check_rows("a", a);
  check_rows("d", d);
  check_weight("b", b);
  if (sizes.rows == 0 || a.shape[0] == 0) return;
  const cudaStream_t stream = stream_of(exec);
  const GemmScratch s = take_groups(device, offsets, gather, a, sizes, scratch, stream);
  const std::int64_t n = b.shape[1];
  const std::int64_t k = b.shape[2];
  const bool gathers = gather.data != nullptr;
  const Tiling tiling = gathers ? Tiling{TileId::kCoop128x256, Order::kStatic}
                                : row_tiling(n, k, sizes.rows / sizes.experts);
  const TileShape shape = tiling.shape();
  RowTiles::Params tiles = row_tiles(s.groups, n, shape.n, k, tiling.counter(s.counter));
  tiles.band = row_band(n, k);
  const KernelEntry& kernel = find_kernel({gathers ? Role::kGather : Role::kDown, a.dtype,
                                           tiling.tile, major_of(b), ActivationKind::kSwiGLU});
  if (gathers) {
    GatherStoreParams params{};
    params.producer = {a.data, s.index, static_cast<std::int32_t>(a.stride[0] * kElementBytes),
                       static_cast<std::int32_t>(k)};
    params.b.map[0] = weight_map(device, b, shape);
    params.tiles = tiles;
    params.epilogue = store_params(device, d);
    launch_gemm(device, kernel, &params, most_tiles(sizes, tiles), stream);
    return;
  }
  DownParams params{};
  params.producer.rows = rows_map(device, a, shape.m);
  params.b.map[0] = weight_map(device, b, shape);
  params.tiles = tiles;
  params.epilogue = store_params(device, d);
  launch_gemm(device, kernel, &params, most_tiles(sizes, tiles), stream);
}

void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec) {
  const Device& device = device_of(exec);
  const auto [a, b, d, offsets, gather, scratch] = args;
  const Sizes64 sizes{b.shape[0], d.shape[0]};
  check_sizes(a, sizes.experts, {d.shape[1], d.shape[2]});
  check_rows("a", a);
  check_rows("b", b);
  check_weight("d", d);
  const cudaStream_t stream = stream_of(exec);
  if (sizes.rows == 0 || a.shape[0] == 0) {
    clear_matrices(d, stream);
    return;
  }
  const GemmScratch s = take_groups(device, offsets, gather, a, sizes, scratch, stream);
  const TileId tile = TileId::kCoop128x256;
  const TileShape shape = tile_shape(tile);
  const Major order = major_of(d);
  WeightGradParams params{};
  params.producer = {a.data, gather.data != nullptr ? s.index : nullptr,
                     static_cast<std::int32_t>(a.stride[0] * kElementBytes),
                     static_cast<std::int32_t>(d.shape[1])};
  params.b.map[0] = rows_map(device, b, kDepth);
  params.tiles = expert_tiles(s.groups, d, shape);
  params.epilogue.rows = static_cast<std::int32_t>(d.shape[1]);
  params.epilogue.columns = static_cast<std::int32_t>(d.shape[2]);
  params.epilogue.border = params.tiles.column_tiles * shape.n;
  params.epilogue.map[0] = matrices_map(device, d);
  const KernelEntry& kernel =
      find_kernel({Role::kWeightGrad, a.dtype, tile, order, ActivationKind::kSwiGLU});
  launch_gemm(device, kernel, &params, sizes.experts * params.tiles.each.by, stream);
}

}  // namespace sonicmoe::cuda
