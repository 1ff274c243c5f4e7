// The launches of build_metadata and sort_pairs. Ids are sorted by expert (expert_sort.cuh). Pairs
// are first put in token order (pairs.cuh), unless they have it (sort_pairs). Grouped rows need no
// sort.
#include <algorithm>

#include "cuda/device/carver.h"
#include "cuda/device/device.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/expert_sort.cuh"
#include "cuda/metadata/metadata.h"
#include "cuda/metadata/pairs.cuh"
#include "cuda/metadata/position_pairs.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kClusterBlocks = 8;
constexpr std::int64_t kClusterPositions = kClusterBlocks * kSpan;  // most for a sort in one launch
constexpr std::int64_t kMostChunk = 61440;                          // counts of a chunk fit 16 bits
constexpr std::int64_t kSortBlocks = 128;                           // about one a multiprocessor
constexpr int kGroupBlocks = 8;                                     // blocks for each group of rows

std::int64_t divided(std::int64_t items, std::int64_t by) { return (items + by - 1) / by; }
unsigned blocks(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>(divided(items, per_block));
}

/// How C positions are divided into chunks, one for each block.
struct SortPlan {
  Counting counting;
  std::int64_t blocks;
  std::int64_t chunk;
};

SortPlan sort_plan(std::int64_t capacity) {
  SortPlan plan{Counting::kInSort, 1, 0};
  if (capacity <= kClusterPositions) {
    while (plan.blocks < kClusterBlocks && plan.blocks * kSpan / 2 < capacity) plan.blocks *= 2;
  } else {
    plan.counting = Counting::kBeforeSort;
    plan.blocks = std::max(kSortBlocks, divided(capacity, kMostChunk));
  }
  plan.chunk = divided(divided(capacity, plan.blocks), 32) * 32;
  return plan;
}

std::int32_t columns_of(const Problem& p) {
  return static_cast<std::int32_t>(divided(p.experts, 4) * 4);
}

/// The number of tokens in a token span. One sum counts the slots of all tokens of a span
/// (PairCounters::span_sums).
std::int64_t span_of(const Problem& p) {
  return divided(p.tokens, std::int64_t{kTokenSpan} * kMostSpans) * kTokenSpan;
}

/// The number of slots for which a token's bin has room: twice the mean, so that few tokens have
/// more slots.
std::int32_t bin_of(const Problem& p) {
  const std::int64_t most = std::max<std::int64_t>(p.tokens, 1);
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(
      divided(2 * row_capacity(p), most * kOrderLanes) * kOrderLanes, kOrderLanes, kMostBin));
}

struct Groups {
  SlotView row_begin;  // (E)
  SlotView row_count;  // (E)
  std::int64_t capacity;
  std::int32_t experts;
};

/// For grouped rows: writes the caller's ranges, clamped to the buffer.
__global__ void __launch_bounds__(kMetadataThreads)
    take_groups(Groups groups, Counters counters, Metadata out) {
  take_ranges(out, groups.experts, counters, [&](int e) {
    std::int64_t begin = groups.row_begin.integer(groups.row_begin.offset(e));
    std::int64_t rows = max(std::int64_t{0}, groups.row_count.integer(groups.row_count.offset(e)));
    if (begin < 0) {  // keeps the rows from 0 on; summands of opposite signs cannot overflow
      rows = max(std::int64_t{0}, begin + rows);
      begin = 0;
    }
    begin = min(begin, groups.capacity);
    rows = min(rows, groups.capacity - begin);
    return rows > 0 ? RowRange{static_cast<int>(begin), static_cast<int>(rows)} : RowRange{0, 0};
  });
}

/// For grouped rows: the token, the slot and the position of a row have the row's number.
__global__ void __launch_bounds__(kMetadataThreads) mark_groups(Metadata out) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int32_t begin = out.expert_begin[blockIdx.x];
  const std::int32_t rows = out.expert_rows[blockIdx.x];
  for (int i = blockIdx.y * kMetadataThreads + threadIdx.x; i < rows;
       i += gridDim.y * kMetadataThreads) {
    const std::int32_t row = begin + i;
    out.row_token[row] = out.row_slot[row] = out.position_row[row] = row;
  }
}

/// Aligns arrays to 16 bytes only: with more padding, the saved memory of one token and one expert
/// would exceed the promised bound.
using TightCarver = Carver<16>;

/// The counters that pairs.cuh needs, as words without gaps from `base` on, so that one launch sets
/// them to zero.
PairCounters pair_counters(const Problem& p, void* base) {
  Carver<sizeof(std::int32_t)> carver(base);
  PairCounters zero{};
  zero.per_token = carver.take<std::int32_t>(p.tokens);
  zero.overflow = carver.take<std::int32_t>(p.tokens);
  zero.span_sums = carver.take<std::int32_t>(kMostSpans);
  zero.ranges.begin = carver.take<std::int32_t>(p.experts);
  zero.ranges.end = carver.take<std::int32_t>(p.experts);
  zero.ranges.unsorted = carver.take<std::int32_t>(1);
  zero.words = carver.used() / static_cast<std::int64_t>(sizeof(std::int32_t));
  return zero;
}

struct MetadataScratch {
  std::uint16_t* table;  // (blocks, columns)
  PairArrays pairs;      // kPairs
  std::int64_t bytes;
};

MetadataScratch scratch_layout(const Problem& p, void* base) {
  const std::int64_t capacity = row_capacity(p);
  TightCarver carver(base);
  MetadataScratch s{};
  const SortPlan plan = sort_plan(capacity);
  const bool counts_before = plan.counting == Counting::kBeforeSort;
  s.table = carver.take<std::uint16_t>(counts_before ? plan.blocks * columns_of(p) : 0);
  if (p.form == RoutingForm::kPairs) {
    s.pairs.zero = pair_counters(p, carver.take<std::int32_t>(pair_counters(p, nullptr).words));
    s.pairs.bins = carver.take<std::int32_t>(p.tokens * bin_of(p));
    s.pairs.link = carver.take<std::int32_t>(capacity);
    s.pairs.unordered = carver.take<std::int32_t>(capacity);
    s.pairs.position_expert = carver.take<std::int32_t>(capacity);
    s.pairs.position_token = carver.take<std::int32_t>(capacity);
  }
  s.bytes = carver.used();
  return s;
}

/// For pairs: finds their positions in token order, and writes the rows if the pairs are sorted.
void order_by_token(const Device& device, const Problem& p, const Routing& routing,
                    const Metadata& out, const PairArrays& arrays, cudaStream_t stream) {
  PairParams params{};
  params.arrays = arrays;
  params.expert = slot_view(routing.expert);
  params.token = slot_view(routing.token);
  params.count = row_capacity(p);
  params.tokens = p.tokens;
  params.experts = static_cast<std::int32_t>(p.experts);
  params.span = static_cast<std::int32_t>(std::max<std::int64_t>(span_of(p), 1));
  params.spans = static_cast<std::int32_t>(divided(p.tokens, params.span));
  params.bin = bin_of(p);
  params.out = out;
  const char* what = "launching the order by token";
  const std::int64_t clearing = std::min(kSortBlocks, divided(arrays.zero.words, kMetadataThreads));
  launch_dependent(device, what, clear_words, {static_cast<unsigned>(clearing), kMetadataThreads},
                   stream, arrays.zero.per_token, arrays.zero.words);
  launch_dependent(device, what, collect_slots,
                   {blocks(params.count, kMetadataThreads), kMetadataThreads}, stream, params);
  launch_dependent(device, what, order_tokens,
                   {blocks(p.tokens + 1, kOrderTokens), kMetadataThreads}, stream, params);
}

void build_grouped(const Device& device, const Problem& p, const Routing& routing,
                   const Metadata& out, const MetadataWork& work, cudaStream_t stream) {
  const std::int64_t capacity = row_capacity(p);
  check_cuda(cudaMemsetAsync(out.position_row, 0xff, capacity * sizeof(std::int32_t), stream),
             "clearing rows");
  const auto experts = static_cast<unsigned>(p.experts);
  const char* what = "launching the metadata of groups";
  launch_dependent(device, what, take_groups, {1, kMetadataThreads}, stream,
                   Groups{slot_view(routing.row_begin), slot_view(routing.row_count), capacity,
                          static_cast<std::int32_t>(experts)},
                   Counters{work.counters, work.counter_words}, out);
  launch_dependent(device, what, mark_groups, {dim3(experts, kGroupBlocks), kMetadataThreads},
                   stream, out);
}

/// Without `positions`, except for their number.
SortParams sort_params(const Problem& p, const SortPlan& plan, const MetadataScratch& scratch,
                       const Metadata& out, const MetadataWork& work) {
  SortParams params{};
  params.table = scratch.table;
  params.columns = columns_of(p);
  params.chunk = static_cast<std::int32_t>(plan.chunk);
  params.counters = {work.counters, work.counter_words};
  params.out = out;
  params.positions.count = row_capacity(p);
  params.positions.experts = static_cast<std::int32_t>(p.experts);
  return params;
}

void take_pairs(const Problem& p, const PositionPairs& pairs, const Metadata& out,
                Positions* positions) {
  auto* expert = const_cast<std::int32_t*>(pairs.expert);  // a view can also be written to
  positions->expert = slot_view(tensor1(expert, DType::kI32, row_capacity(p)));
  positions->token = pairs.token;
  positions->valid = out.token_offsets + p.tokens;
}

void sort_by_expert(const Device& device, const SortParams& params, const SortPlan& plan,
                    cudaStream_t stream) {
  const char* what = "launching the routing metadata";
  LaunchShape shape{static_cast<unsigned>(plan.blocks), kMetadataThreads,
                    SortShared::bytes(static_cast<std::size_t>(params.columns))};
  if (plan.counting == Counting::kInSort) {
    shape.cluster = shape.grid.x;
    launch_dependent(device, what, sort_positions<Counting::kInSort>, shape, stream, params);
    return;
  }
  launch_dependent(device, what, count_positions, {shape.grid, kCountThreads}, stream, params);
  launch_dependent(device, what, sort_positions<Counting::kBeforeSort>, shape, stream, params);
}

}  // namespace

Metadata metadata_layout(const Problem& p, void* base) {
  const std::int64_t capacity = row_capacity(p);
  TightCarver carver(base);
  Metadata m{};
  m.row_token = carver.take<std::int32_t>(capacity);
  m.row_slot = carver.take<std::int32_t>(capacity);
  m.position_row = carver.take<std::int32_t>(capacity);
  if (p.form == RoutingForm::kPairs) {
    m.position_slot = carver.take<std::int32_t>(capacity);
    m.token_offsets = carver.take<std::int32_t>(p.tokens + 1);
  }
  m.expert_begin = carver.take<std::int32_t>(p.experts);
  m.expert_rows = carver.take<std::int32_t>(p.experts);
  m.most_records = static_cast<std::int32_t>(capacity / kRecordRows + p.experts);
  m.records = carver.take<TileRecord>(m.most_records);
  m.record_count = carver.take<std::int32_t>(1);
  m.bytes = carver.used();
  return m;
}

std::size_t sort_shared_bytes(const Problem& p) {
  return SortShared::bytes(static_cast<std::size_t>(columns_of(p)));
}

std::int64_t metadata_scratch(const Problem& p) { return scratch_layout(p, nullptr).bytes; }

void build_metadata(const Device& device, const Problem& p, const Routing& routing,
                    const Metadata& out, const MetadataWork& work, cudaStream_t stream) {
  if (p.form == RoutingForm::kGrouped) {
    build_grouped(device, p, routing, out, work, stream);
    return;
  }
  const MetadataScratch s = scratch_layout(p, work.scratch);
  const SortPlan plan = sort_plan(row_capacity(p));
  SortParams params = sort_params(p, plan, s, out, work);
  if (p.form == RoutingForm::kIds) {
    params.positions.expert = slot_view(routing.ids);
    params.positions.top_k = static_cast<std::int32_t>(p.top_k);
  } else {
    order_by_token(device, p, routing, out, s.pairs, stream);
    params.ranges = s.pairs.zero.ranges;
    take_pairs(p, {s.pairs.position_expert, s.pairs.position_token}, out, &params.positions);
    params.positions.slot = out.position_slot;
  }
  sort_by_expert(device, params, plan, stream);
}

void sort_pairs(const Device& device, const Problem& p, const PositionPairs& pairs,
                const Metadata& out, const MetadataWork& work, cudaStream_t stream) {
  const SortPlan plan = sort_plan(row_capacity(p));
  SortParams params = sort_params(p, plan, scratch_layout(p, work.scratch), out, work);
  take_pairs(p, pairs, out, &params.positions);
  sort_by_expert(device, params, plan, stream);
}

}  // namespace sonicmoe::cuda
