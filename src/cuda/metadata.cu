// Metadata in four steps, each a kernel: (pairs only: order slots by token), count experts by chunk
// of slots, scan the chunks, place every slot at its row. Placing is a stable counting sort: ranks
// come from warp votes and prefix sums, never from the order in which atomics land.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/metadata.h"
#include "cuda/tiles.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kChunk = 2048;  // slots of a block
constexpr int kBlock = 1024;
constexpr int kWarps = kBlock / 32;
constexpr int kMaxExperts = 1024;
constexpr int kTokenSpan = 4096;  // tokens whose counts one block scans

std::int64_t chunks_of(const Problem& p) { return (row_capacity(p) + kChunk - 1) / kChunk; }
std::int64_t spans_of(const Problem& p) { return p.tokens / kTokenSpan + 1; }

/// A caller's integer array, int32 or int64, by element stride.
struct Ids {
  const void* data;
  std::int64_t stride0;  // of a token (ids) or of a pair
  std::int64_t stride1;  // of k
  std::int32_t wide;     // int64
  std::int32_t columns;  // K; 1 for a list

  __device__ std::int64_t at(std::int64_t slot) const {
    // Slots number less than 2^31; a 64-bit division costs ten times a 32-bit one.
    const auto s = static_cast<unsigned>(slot);
    const unsigned row = columns == 1 ? s : s / static_cast<unsigned>(columns);
    const std::int64_t i = row * stride0 + (s - row * static_cast<unsigned>(columns)) * stride1;
    return wide != 0 ? static_cast<const std::int64_t*>(data)[i]
                     : static_cast<const std::int32_t*>(data)[i];
  }
};

Ids ids_of(const Tensor& t) {
  const bool matrix = t.rank == 2;
  return {t.data, t.stride[0], matrix ? t.stride[1] : 0, t.dtype == DType::kI64 ? 1 : 0,
          matrix ? static_cast<std::int32_t>(t.shape[1]) : 1};
}

/// What the sorting kernels see of the routing.
struct Slots {
  Ids expert;
  Ids token;                  // kPairs; data null: token = slot / columns of expert
  const std::int32_t* order;  // kPairs: slot of a position; else null
  const std::int32_t* valid;  // kPairs: how many positions are in use; else null
  std::int64_t count;         // C
  std::int32_t experts;
  std::int64_t tokens;

  __device__ std::int64_t slot(std::int64_t position) const {
    return order != nullptr ? order[position] : position;
  }
  /// kPairs: whether both ids of a slot are in range.
  __device__ bool usable(std::int64_t slot) const {
    const std::int64_t e = expert.at(slot);
    const std::int64_t t = token.at(slot);
    return e >= 0 && e < experts && t >= 0 && t < tokens;
  }
  /// The expert of a position, or -1.
  __device__ int expert_at(std::int64_t position) const {
    if (position >= count || (valid != nullptr && position >= *valid)) return -1;
    const std::int64_t e = expert.at(slot(position));
    return e < 0 || e >= experts ? -1 : static_cast<int>(e);
  }
};

__global__ void count_experts(Slots slots, std::int32_t* counts) {
  __shared__ std::int32_t seen[kMaxExperts];
  for (int e = threadIdx.x; e < slots.experts; e += kBlock) seen[e] = 0;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kChunk;
  for (int i = threadIdx.x; i < kChunk; i += kBlock) {
    const int e = slots.expert_at(first + i);
    if (e >= 0) atomicAdd(&seen[e], 1);
  }
  __syncthreads();
  std::int32_t* out = counts + static_cast<std::int64_t>(blockIdx.x) * slots.experts;
  for (int e = threadIdx.x; e < slots.experts; e += kBlock) out[e] = seen[e];
}

/// counts[chunk][e] becomes the number of slots of e in the chunks before; totals[e] that in all.
/// A block takes 32 experts; each of its 32 rows of threads a run of chunks.
__global__ void scan_chunks(std::int32_t* counts, std::int32_t* totals, int chunks, int experts) {
  __shared__ std::int32_t runs[32][33];
  const int lane = threadIdx.x;
  const int e = blockIdx.x * 32 + lane;
  const int per_run = (chunks + 31) / 32;
  const int begin = min(chunks, static_cast<int>(threadIdx.y) * per_run);
  const int end = min(chunks, begin + per_run);
  std::int32_t sum = 0;
  if (e < experts) {
    for (int c = begin; c < end; c++) sum += counts[static_cast<std::int64_t>(c) * experts + e];
  }
  runs[threadIdx.y][lane] = sum;
  __syncthreads();
  if (e >= experts) return;
  std::int32_t before = 0;
  for (int r = 0; r < static_cast<int>(threadIdx.y); r++) before += runs[r][lane];
  for (int c = begin; c < end; c++) {
    std::int32_t& count = counts[static_cast<std::int64_t>(c) * experts + e];
    const std::int32_t own = count;
    count = before;
    before += own;
  }
  if (threadIdx.y == 31) totals[e] = before;
}

/// Exclusive prefix sum over a block of kBlock threads; `total` receives the sum.
__device__ std::int32_t block_prefix(std::int32_t value, std::int32_t* total) {
  __shared__ std::int32_t warps[kWarps];
  const int lane = threadIdx.x & 31;
  std::int32_t sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const std::int32_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  std::int32_t before = 0;
  std::int32_t all = 0;
  for (int w = 0; w < kWarps; w++) {
    if (w < static_cast<int>(threadIdx.x) / 32) before += warps[w];
    all += warps[w];
  }
  *total = all;
  return before + sum - value;
}

__device__ int records_of(int rows) { return (rows + kRecordRows - 1) / kRecordRows; }

/// Thread e of one block: the expert's rows and its tile records.
__device__ void write_expert(const Metadata& out, int e, int experts, int begin, int rows) {
  std::int32_t count = 0;
  const int first = block_prefix(e < experts ? records_of(rows) : 0, &count);
  if (threadIdx.x == 0) *out.record_count = min(count, out.most_records);
  if (e >= experts) return;
  out.expert_begin[e] = begin;
  out.expert_rows[e] = rows;
  // Overlapping groups could ask for more records than there is room for.
  const int last = min(first + records_of(rows), out.most_records);
  for (int i = first; i < last; i++) out.records[i] = {e, begin, rows, first};
}

/// Position -> row: the expert's offset, plus its slots in earlier chunks, warps and lanes.
__global__ void __launch_bounds__(kBlock)
    place_rows(Slots slots, const std::int32_t* counts, const std::int32_t* totals, Metadata out) {
  __shared__ std::int32_t start[kMaxExperts];  // row of the chunk's first slot of an expert
  extern __shared__ std::uint16_t in_warp[];   // [warp][expert], then slots in earlier warps
  const int experts = slots.experts;
  const int e = threadIdx.x;
  const std::int32_t rows = e < experts ? totals[e] : 0;
  std::int32_t all = 0;
  const std::int32_t begin = block_prefix(rows, &all);
  if (blockIdx.x == 0) write_expert(out, e, experts, begin, rows);
  if (e < experts) {
    start[e] = begin + counts[static_cast<std::int64_t>(blockIdx.x) * experts + e];
  }
  const int warp = threadIdx.x / 32;
  const unsigned below = (1u << (threadIdx.x & 31)) - 1;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kChunk;
  for (int i = 0; i < kChunk; i += kBlock) {
    for (int j = threadIdx.x; j < kWarps * experts; j += kBlock) in_warp[j] = 0;
    __syncthreads();
    const std::int64_t position = first + i + threadIdx.x;
    const int mine = slots.expert_at(position);
    const unsigned peers = __match_any_sync(~0u, mine);
    const int rank = __popc(peers & below);
    if (mine >= 0 && rank == 0) in_warp[warp * experts + mine] = __popc(peers);
    __syncthreads();
    int before = 0;
    for (int w = 0; e < experts && w < kWarps; w++) {
      const int own = in_warp[w * experts + e];
      in_warp[w * experts + e] = static_cast<std::uint16_t>(before);
      before += own;
    }
    __syncthreads();
    if (position < slots.count) {
      std::int32_t row = -1;
      if (mine >= 0) {
        row = start[mine] + in_warp[warp * experts + mine] + rank;
        const std::int64_t slot = slots.slot(position);
        const std::int64_t token =
            slots.token.data != nullptr
                ? slots.token.at(slot)
                : static_cast<unsigned>(slot) / static_cast<unsigned>(slots.expert.columns);
        out.row_token[row] = static_cast<std::int32_t>(token);
        out.row_slot[row] = static_cast<std::int32_t>(slot);
      }
      out.position_row[position] = row;
    }
    __syncthreads();
    if (e < experts) start[e] += before;
  }
}

/// kPairs: counts[t] = usable slots of token t.
__global__ void count_tokens(Slots slots, std::int32_t* counts) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (slot >= slots.count || !slots.usable(slot)) return;
  atomicAdd(&counts[slots.token.at(slot)], 1);
}

__global__ void sum_spans(const std::int32_t* counts, std::int32_t* sums, std::int64_t tokens) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kTokenSpan;
  std::int32_t sum = 0;
  for (int i = threadIdx.x; i < kTokenSpan; i += kBlock) {
    if (first + i < tokens) sum += counts[first + i];
  }
  std::int32_t all = 0;
  block_prefix(sum, &all);
  if (threadIdx.x == 0) sums[blockIdx.x] = all;
}

/// offsets[t] = first position of token t, for t <= T; cursors the same, to be counted up.
__global__ void scan_tokens(const std::int32_t* counts, const std::int32_t* sums,
                            std::int32_t* offsets, std::int32_t* cursors, std::int64_t tokens) {
  constexpr int kPerThread = kTokenSpan / kBlock;
  std::int32_t earlier = 0;
  for (int s = threadIdx.x; s < static_cast<int>(blockIdx.x); s += kBlock) earlier += sums[s];
  std::int32_t base = 0;
  block_prefix(earlier, &base);
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * kTokenSpan + threadIdx.x * kPerThread;
  std::int32_t own[kPerThread];
  std::int32_t sum = 0;
  for (int i = 0; i < kPerThread; i++) {
    own[i] = first + i < tokens ? counts[first + i] : 0;
    sum += own[i];
  }
  std::int32_t all = 0;
  std::int32_t at = base + block_prefix(sum, &all);
  for (int i = 0; i < kPerThread; i++) {
    if (first + i <= tokens) offsets[first + i] = cursors[first + i] = at;
    at += own[i];
  }
}

/// Slots to their token's positions, in whatever order they come.
__global__ void scatter_slots(Slots slots, std::int32_t* cursors, std::int32_t* unordered) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (slot >= slots.count || !slots.usable(slot)) return;
  unordered[atomicAdd(&cursors[slots.token.at(slot)], 1)] = static_cast<std::int32_t>(slot);
}

/// A warp orders the slots of one token by (expert, slot), each element counting those before it.
__global__ void order_token(Slots slots, const std::int32_t* offsets, const std::int32_t* unordered,
                            std::int32_t* ordered) {
  const std::int64_t token =
      (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (token >= slots.tokens) return;
  const std::int32_t begin = offsets[token];
  const std::int32_t end = offsets[token + 1];
  for (std::int32_t i = begin + (threadIdx.x & 31); i < end; i += 32) {
    const std::int32_t slot = unordered[i];
    const std::int64_t expert = slots.expert.at(slot);
    std::int32_t rank = 0;
    for (std::int32_t j = begin; j < end; j++) {
      const std::int32_t other = unordered[j];
      const std::int64_t its = slots.expert.at(other);
      rank += its < expert || (its == expert && other < slot) ? 1 : 0;
    }
    ordered[begin + rank] = slot;
  }
}

/// kGrouped: ranges clamped to the buffer.
__global__ void __launch_bounds__(kBlock)
    take_groups(Ids row_begin, Ids row_count, std::int64_t capacity, int experts, Metadata out) {
  const int e = threadIdx.x;
  std::int64_t begin = 0;
  std::int64_t rows = 0;
  if (e < experts && row_count.at(e) > 0) {
    begin = row_begin.at(e);
    rows = row_count.at(e);
    if (begin < 0) {  // what reaches into the buffer is kept; the sum of opposite signs is safe
      rows = max(std::int64_t{0}, begin + rows);
      begin = 0;
    }
    begin = min(begin, capacity);
    rows = min(rows, capacity - begin);
  }
  write_expert(out, e, experts, static_cast<int>(begin), static_cast<int>(rows));
}

/// kGrouped: rows of a group are their own token, slot and position.
__global__ void mark_groups(Metadata out) {
  const std::int32_t begin = out.expert_begin[blockIdx.x];
  const std::int32_t rows = out.expert_rows[blockIdx.x];
  for (int i = blockIdx.y * kBlock + threadIdx.x; i < rows; i += gridDim.y * kBlock) {
    const std::int32_t row = begin + i;
    out.row_token[row] = out.row_slot[row] = out.position_row[row] = row;
  }
}

/// Carves arrays out of one block of memory. Only 16 bytes apart: saved memory has a promised bound
/// that holds for one token and one expert too.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::uint8_t*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    T* array = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<std::int64_t>(sizeof(T)) + 15) / 16 * 16;
    return array;
  }
  std::int64_t used() const { return used_; }

 private:
  std::uint8_t* base_;
  std::int64_t used_ = 0;
};

struct Scratch {
  std::int32_t* counts;     // (chunks, E)
  std::int32_t* totals;     // (E)
  std::int32_t* per_token;  // (T)      kPairs, as are the rest
  std::int32_t* spans;      // (spans)
  std::int32_t* cursors;    // (T+1)
  std::int32_t* unordered;  // (C)
  std::int64_t bytes;
};

Scratch scratch_layout(const Problem& p, void* base) {
  Carver carver(base);
  Scratch s{};
  s.counts = carver.take<std::int32_t>(chunks_of(p) * p.experts);
  s.totals = carver.take<std::int32_t>(p.experts);
  if (p.form == RoutingForm::kPairs) {
    s.per_token = carver.take<std::int32_t>(p.tokens);
    s.spans = carver.take<std::int32_t>(spans_of(p));
    s.cursors = carver.take<std::int32_t>(p.tokens + 1);
    s.unordered = carver.take<std::int32_t>(row_capacity(p));
  }
  s.bytes = carver.used();
  return s;
}

unsigned blocks(std::int64_t items, int per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

/// kPairs: positions in token order.
void order_by_token(const Problem& p, const Slots& slots, const Metadata& out, const Scratch& s,
                    cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(s.per_token, 0, p.tokens * sizeof(std::int32_t), stream),
             "clearing counts");
  const unsigned grid = blocks(slots.count, kBlock);
  const auto spans = static_cast<unsigned>(spans_of(p));
  count_tokens<<<grid, kBlock, 0, stream>>>(slots, s.per_token);
  sum_spans<<<spans, kBlock, 0, stream>>>(s.per_token, s.spans, p.tokens);
  scan_tokens<<<spans, kBlock, 0, stream>>>(s.per_token, s.spans, out.token_offsets, s.cursors,
                                            p.tokens);
  scatter_slots<<<grid, kBlock, 0, stream>>>(slots, s.cursors, s.unordered);
  order_token<<<blocks(p.tokens * 32, 256), 256, 0, stream>>>(slots, out.token_offsets, s.unordered,
                                                              out.position_slot);
}

void build_grouped(const Problem& p, const Routing& routing, const Metadata& out,
                   cudaStream_t stream) {
  const std::int64_t capacity = row_capacity(p);
  check_cuda(cudaMemsetAsync(out.position_row, 0xff, capacity * sizeof(std::int32_t), stream),
             "clearing rows");
  const auto experts = static_cast<int>(p.experts);
  take_groups<<<1, kBlock, 0, stream>>>(ids_of(routing.row_begin), ids_of(routing.row_count),
                                        capacity, experts, out);
  mark_groups<<<dim3(experts, 8), kBlock, 0, stream>>>(out);
}

}  // namespace

Metadata metadata_layout(const Problem& p, void* base) {
  const std::int64_t capacity = row_capacity(p);
  Carver carver(base);
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

void build_metadata(const Problem& p, const Routing& routing, const Metadata& out, void* scratch,
                    cudaStream_t stream) {
  if (p.form == RoutingForm::kGrouped) {
    build_grouped(p, routing, out, stream);
  } else {
    const Scratch s = scratch_layout(p, scratch);
    const bool pairs = p.form == RoutingForm::kPairs;
    const auto experts = static_cast<std::int32_t>(p.experts);
    Slots slots{ids_of(pairs ? routing.expert : routing.ids),
                {},
                nullptr,
                nullptr,
                row_capacity(p),
                experts,
                p.tokens};
    if (pairs) {
      slots.token = ids_of(routing.token);
      order_by_token(p, slots, out, s, stream);
      slots.order = out.position_slot;
      slots.valid = out.token_offsets + p.tokens;
    }
    const auto chunks = static_cast<unsigned>(chunks_of(p));
    const std::size_t shared = kWarps * p.experts * sizeof(std::uint16_t);
    check_cuda(cudaFuncSetAttribute(place_rows, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)),
               "setting a kernel's shared memory");
    count_experts<<<chunks, kBlock, 0, stream>>>(slots, s.counts);
    scan_chunks<<<blocks(experts, 32), dim3(32, 32), 0, stream>>>(
        s.counts, s.totals, static_cast<int>(chunks), experts);
    place_rows<<<chunks, kBlock, shared, stream>>>(slots, s.counts, s.totals, out);
  }
  check_cuda(cudaGetLastError(), "launching the routing metadata");
}

}  // namespace sonicmoe::cuda
