// Metadata: pairs are put in token order first (metadata_pairs.cuh); ids and pairs are then placed
// by expert (metadata_place.cuh); groups of rows are taken as they are.
#include <algorithm>

#include "cuda/device/carver.h"
#include "cuda/device/device.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/metadata.h"
#include "cuda/metadata/pairs.cuh"
#include "cuda/metadata/place.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kClusterPositions = 8 * kSpan;  // what one cluster places
constexpr std::int64_t kMostChunk = 61440;             // counts of a chunk fit 16 bits
constexpr std::int64_t kPlaceBlocks = 128;             // about one a multiprocessor
constexpr int kGroupBlocks = 8;                        // blocks of a group of rows

std::int64_t divided(std::int64_t items, std::int64_t by) { return (items + by - 1) / by; }
unsigned blocks(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>(divided(items, per_block));
}

/// How C positions are cut into chunks.
struct PlacePlan {
  std::int64_t blocks;
  std::int64_t chunk;
  bool whole;  // in one launch
};

PlacePlan place_plan(std::int64_t capacity) {
  PlacePlan plan{1, 0, capacity <= kClusterPositions};
  if (plan.whole) {
    while (plan.blocks < 8 && plan.blocks * kSpan / 2 < capacity) plan.blocks *= 2;
  } else {
    plan.blocks = std::max(kPlaceBlocks, divided(capacity, kMostChunk));
  }
  plan.chunk = divided(divided(capacity, plan.blocks), 32) * 32;
  return plan;
}

std::int32_t columns_of(const Problem& p) {
  return static_cast<std::int32_t>(divided(p.experts, 4) * 4);
}

/// Tokens whose slots are counted together.
std::int64_t span_of(const Problem& p) {
  return divided(p.tokens, std::int64_t{kTokenSpan} * kMostSpans) * kTokenSpan;
}

/// Slots of a token's bin: twice the mean, so that few tokens have more.
std::int32_t bin_of(const Problem& p) {
  const std::int64_t most = std::max<std::int64_t>(p.tokens, 1);
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(
      divided(2 * row_capacity(p), most * kOrderLanes) * kOrderLanes, kOrderLanes, kMostBin));
}

struct Groups {
  Ids row_begin;
  Ids row_count;
  std::int64_t capacity;
  std::int32_t experts;
};

/// kGrouped: ranges clamped to the buffer.
__global__ void __launch_bounds__(kPlaceThreads)
    take_groups(Groups groups, Counters counters, Metadata out) {
  take_ranges(out, groups.experts, counters, [&](int e) {
    std::int64_t begin = groups.row_begin.at(e);
    std::int64_t rows = max(std::int64_t{0}, groups.row_count.at(e));
    if (begin < 0) {  // what reaches into the buffer is kept; the sum of opposite signs is safe
      rows = max(std::int64_t{0}, begin + rows);
      begin = 0;
    }
    begin = min(begin, groups.capacity);
    rows = min(rows, groups.capacity - begin);
    return rows > 0 ? RowRange{static_cast<int>(begin), static_cast<int>(rows)} : RowRange{0, 0};
  });
}

/// kGrouped: rows of a group are their own token, slot and position.
__global__ void __launch_bounds__(kPlaceThreads) mark_groups(Metadata out) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int32_t begin = out.expert_begin[blockIdx.x];
  const std::int32_t rows = out.expert_rows[blockIdx.x];
  for (int i = blockIdx.y * kPlaceThreads + threadIdx.x; i < rows; i += gridDim.y * kPlaceThreads) {
    const std::int32_t row = begin + i;
    out.row_token[row] = out.row_slot[row] = out.position_row[row] = row;
  }
}

/// Only 16 bytes apart: saved memory has a promised bound that holds for one token and one expert
/// too.
using TightCarver = Carver<16>;

struct Scratch {
  std::uint16_t* table;  // (blocks, columns)
  PairParams pairs;      // kPairs: where its memory is
  std::int32_t* zero;    // what of it is zero at the start
  std::int64_t zero_words;
  std::int64_t bytes;
};

Scratch scratch_layout(const Problem& p, void* base) {
  const std::int64_t capacity = row_capacity(p);
  TightCarver carver(base);
  Scratch s{};
  const PlacePlan plan = place_plan(capacity);
  s.table = carver.take<std::uint16_t>(plan.whole ? 0 : plan.blocks * columns_of(p));
  if (p.form == RoutingForm::kPairs) {
    s.zero_words = 2 * (p.tokens + p.experts) + kMostSpans + 1;
    s.zero = carver.take<std::int32_t>(s.zero_words);
    PairCounters& zero = s.pairs.zero;
    zero.per_token = s.zero;
    zero.overflow = zero.per_token + p.tokens;
    zero.span_sums = zero.overflow + p.tokens;
    zero.ranges.begin = zero.span_sums + kMostSpans;
    zero.ranges.end = zero.ranges.begin + p.experts;
    zero.ranges.unsorted = zero.ranges.end + p.experts;
    s.pairs.bins = carver.take<std::int32_t>(p.tokens * bin_of(p));
    s.pairs.link = carver.take<std::int32_t>(capacity);
    s.pairs.unordered = carver.take<std::int32_t>(capacity);
    s.pairs.position_expert = carver.take<std::int32_t>(capacity);
    s.pairs.position_token = carver.take<std::int32_t>(capacity);
  }
  s.bytes = carver.used();
  return s;
}

/// kPairs: positions in token order, and rows where the pairs are sorted.
void order_by_token(const Problem& p, const Routing& routing, const Metadata& out, const Scratch& s,
                    cudaStream_t stream) {
  PairParams params = s.pairs;
  params.expert = ids_of(routing.expert);
  params.token = ids_of(routing.token);
  params.count = row_capacity(p);
  params.tokens = p.tokens;
  params.experts = static_cast<std::int32_t>(p.experts);
  params.span = static_cast<std::int32_t>(std::max<std::int64_t>(span_of(p), 1));
  params.spans = static_cast<std::int32_t>(divided(p.tokens, params.span));
  params.bin = bin_of(p);
  params.out = out;
  const char* what = "launching the order by token";
  const std::int64_t clearing = std::min(kPlaceBlocks, divided(s.zero_words, kPlaceThreads));
  launch_dependent(what, clear_counters, {static_cast<unsigned>(clearing), kPlaceThreads}, stream,
                   s.zero, s.zero_words);
  launch_dependent(what, collect_slots, {blocks(params.count, kPlaceThreads), kPlaceThreads},
                   stream, params);
  launch_dependent(what, order_tokens, {blocks(p.tokens + 1, kOrderTokens), kPlaceThreads}, stream,
                   params);
}

void build_grouped(const Problem& p, const Routing& routing, const Metadata& out,
                   const MetadataWork& work, cudaStream_t stream) {
  const std::int64_t capacity = row_capacity(p);
  check_cuda(cudaMemsetAsync(out.position_row, 0xff, capacity * sizeof(std::int32_t), stream),
             "clearing rows");
  const auto experts = static_cast<unsigned>(p.experts);
  const char* what = "launching the metadata of groups";
  launch_dependent(what, take_groups, {1, kPlaceThreads}, stream,
                   Groups{ids_of(routing.row_begin), ids_of(routing.row_count), capacity,
                          static_cast<std::int32_t>(experts)},
                   Counters{work.counters, work.counter_words}, out);
  launch_dependent(what, mark_groups, {dim3(experts, kGroupBlocks), kPlaceThreads}, stream, out);
}

void place(const PlaceParams& params, const PlacePlan& plan, cudaStream_t stream) {
  const char* what = "launching the routing metadata";
  LaunchShape shape{static_cast<unsigned>(plan.blocks), kPlaceThreads,
                    PlaceShared::bytes(params.columns)};
  if (plan.whole) {
    shape.cluster = shape.grid.x;
    launch_dependent(what, place_positions<Placing::kWhole>, shape, stream, params);
    return;
  }
  launch_dependent(what, count_positions, {shape.grid, kCountThreads}, stream, params);
  launch_dependent(what, place_positions<Placing::kAfterCount>, shape, stream, params);
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

std::int64_t metadata_scratch(const Problem& p) { return scratch_layout(p, nullptr).bytes; }

void build_metadata(const Problem& p, const Routing& routing, const Metadata& out,
                    const MetadataWork& work, cudaStream_t stream) {
  if (p.form == RoutingForm::kGrouped) {
    build_grouped(p, routing, out, work, stream);
    return;
  }
  const Scratch s = scratch_layout(p, work.scratch);
  const std::int64_t capacity = row_capacity(p);
  const PlacePlan plan = place_plan(capacity);
  PlaceParams params{};
  params.table = s.table;
  params.columns = columns_of(p);
  params.chunk = static_cast<std::int32_t>(plan.chunk);
  params.counters = {work.counters, work.counter_words};
  params.out = out;
  Positions& positions = params.positions;
  positions.count = capacity;
  positions.experts = static_cast<std::int32_t>(p.experts);
  if (p.form == RoutingForm::kIds) {
    positions.expert = ids_of(routing.ids);
    positions.top_k = static_cast<std::int32_t>(p.top_k);
  } else {
    order_by_token(p, routing, out, s, stream);
    params.ranges = s.pairs.zero.ranges;
    positions.expert = ids_of(tensor1(s.pairs.position_expert, DType::kI32, capacity));
    positions.token = s.pairs.position_token;
    positions.slot = out.position_slot;
    positions.valid = out.token_offsets + p.tokens;
  }
  place(params, plan, stream);
}

}  // namespace sonicmoe::cuda
