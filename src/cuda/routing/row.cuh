// One token's logits over the lanes of a warp: values, sums, selection, weights.
//
// kLanes lanes hold a row (32 / kLanes rows a warp), each kValues consecutive experts. So the sum
// tree of core/selection_key.h is: pairs within a lane, then shuffles over 1, 2, 4, ... lanes. All
// 32 lanes take part in every call. Warps past the last row repeat it and write nothing.
#pragma once

#include "cuda/ptx/bits.cuh"
#include "cuda/routing/row_values.cuh"

namespace sonicmoe::cuda {

/// A warp reads 32 / kLanes rows at once, and kPasses times as many in all. After the selection
/// kWidth lanes hold the K slots of a row. The dtype of the logits is a run-time branch of the
/// load: a template parameter would triple the kernels and save no time.
template <int kLaneCount, int kValueCount, int kSlotWidth>
struct Row {
  static constexpr int kLanes = kLaneCount;
  static constexpr int kValues = kValueCount;
  static constexpr int kWidth = kSlotWidth;
  static constexpr int kPasses = kLanes / kWidth;
  static constexpr int kRowsPerWarp = 32 / kWidth;

  float x[kValues];

  /// This lane's index among the lanes of its row, and its first expert.
  static __device__ int lane() { return threadIdx.x % kLanes; }
  static __device__ int first() { return lane() * kValues; }
  /// The row of the warp that this lane reads in a pass, and the row whose slot it holds.
  static __device__ int read_row(int pass) {
    return pass * (32 / kLanes) + threadIdx.x % 32 / kLanes;
  }
  static __device__ int slot_row() { return threadIdx.x % 32 / kWidth; }
  static __device__ int slot() { return threadIdx.x % kWidth; }
  /// Whether this lane's slot belongs to the row that it reads in this pass.
  static __device__ bool in_pass(int pass) { return lane() / kWidth == pass; }
  /// The value of the lane that holds slot k of the row being read.
  template <class T>
  static __device__ T from_slot(T v, int k) {
    static_assert(kPasses == 1);
    return __shfl_sync(kAllLanes, v, k, kLanes);
  }

  /// The logits as they lie in memory, two 16-bit values a word; NaN past the last expert.
  using Words = std::uint32_t[kValues / 2];

  static __device__ void load_words(const RouteParams& p, std::int64_t token, Words& words) {
    const auto* row =
        static_cast<const std::uint16_t*>(p.logits.data) + token * p.logits.row_stride;
    if (p.logits.vectors != 0) {
#pragma unroll
      for (int v = 0; v < kValues; v += 8) {
        uint4 four = {kTwoNaN, kTwoNaN, kTwoNaN, kTwoNaN};
        if (first() + v < p.experts) four = *reinterpret_cast<const uint4*>(row + first() + v);
        words[v / 2] = four.x;
        words[v / 2 + 1] = four.y;
        words[v / 2 + 2] = four.z;
        words[v / 2 + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; v += 2) {
      const int e = first() + v;
      const std::uint32_t low = e < p.experts ? row[e * p.logits.column_stride] : kTwoNaN >> 16;
      const std::uint32_t high =
          e + 1 < p.experts ? row[(e + 1) * p.logits.column_stride] : kTwoNaN >> 16;
      words[v / 2] = high << 16 | low;
    }
  }

  /// Cleans two logits of a word at once: -0 becomes +0, +inf the largest finite value, every NaN
  /// 0x7fff, whose order bits are all ones.
  static __device__ std::uint32_t clean_words(std::uint32_t word) {
    const __nv_bfloat162 largest = __float2bfloat162_rn(key::kLargestBF16);
    const __nv_bfloat162 zero = __float2bfloat162_rn(0.0f);
    __nv_bfloat162 two = *reinterpret_cast<const __nv_bfloat162*>(&word);
    two = __hmin2_nan(__hadd2(two, zero), largest);
    return *reinterpret_cast<const std::uint32_t*>(&two);
  }

  static __device__ void clean_all(Words& words) {
#pragma unroll
    for (int i = 0; i < kValues / 2; i++) words[i] = clean_words(words[i]);
  }
  __device__ void widen_cleaned(const Words& words) {
    const __nv_bfloat162 lowest = __float2bfloat162_rn(key::minus_infinity());
#pragma unroll
    for (int v = 0; v < kValues; v += 2) {
      const __nv_bfloat162 two =  // the maximum drops a NaN
          __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&words[v / 2]), lowest);
      const float2 wide = two_floats(*reinterpret_cast<const std::uint32_t*>(&two));
      x[v] = wide.x;
      x[v + 1] = wide.y;
    }
  }

  __device__ void load(const RouteParams& p, std::int64_t token) {
    if (p.logits.dtype == DType::kF32) {
      load_floats(p, token);
      return;
    }
    Words words;
    load_words(p, token, words);
    if (p.logits.dtype == DType::kF16) {
      widen_words<__half>(words);
    } else {
      widen_words<__nv_bfloat16>(words);
    }
  }
  template <class Logit>
  __device__ void widen_words(const Words& words) {
#pragma unroll
    for (int v = 0; v < kValues; v += 2) {
      const float2 two = clean_two<Logit>(words[v / 2]);
      x[v] = two.x;
      x[v + 1] = two.y;
    }
  }

  __device__ Softmax softmax() const {
    float e[kValues];
    return softmax(e);
  }
  /// The softmax, and the exponentials e of which p = e * inverse.
  __device__ Softmax softmax(float (&e)[kValues]) const {
    float top = x[0];
#pragma unroll
    for (int v = 1; v < kValues; v++) top = fmaxf(top, x[v]);
    return softmax(lanes_max<kLanes>(top), e);
  }
  /// As softmax() above, where the row's largest logit is known.
  __device__ Softmax softmax(float top, float (&e)[kValues]) const {
    if (!(top > key::minus_infinity())) top = 0.0f;  // every exponential is then 0
    float part[kValues];
#pragma unroll
    for (int v = 0; v < kValues; v++) part[v] = e[v] = key::exp32(x[v] - top);
#pragma unroll
    for (int d = 1; d < kValues; d *= 2) {
#pragma unroll
      for (int v = 0; v < kValues; v += 2 * d) part[v] = key::add32(part[v], part[v + d]);
    }
    const float sum = lanes_sum<kLanes>(part[0]);
    return {top, sum > 0.0f ? key::div32(1.0f, sum) : 0.0f};
  }

  /// The rank (key::rank_of) of every expert of this lane, and the softmax (unused for pointwise
  /// scores). `chosen` has the chosen items of the row, best first. Items of 32 bits contain the
  /// bf16 logits, so the first one has the largest logit of the row.
  template <class Item>
  __device__ void ranks(const RouteParams& p, const Item* chosen, float* out, Softmax* own) const {
    float e[kValues];
    *own = {0.0f, 1.0f};
    if constexpr (sizeof(Item) == 4) {
      *own = softmax(item_logit(chosen[0]), e);
    } else if (key::pointwise(p.score)) {
      pointwise_scores(p.score, out);
#pragma unroll
      for (int v = 0; v < kValues; v++) out[v] = key::rank_of(p.score, out[v]);
      return;
    } else {
      *own = softmax(e);
    }
#pragma unroll
    for (int v = 0; v < kValues; v++) out[v] = key::mul32(e[v], own->inverse);
  }
  /// p of every expert of this lane: softmax, or the pointwise score.
  __device__ void probabilities(const RouteParams& p, const Softmax& s, float* out) const {
    if (key::pointwise(p.score)) {
      pointwise_scores(p.score, out);
      return;
    }
#pragma unroll
    for (int v = 0; v < kValues; v++) out[v] = s(x[v]);
  }
  __device__ void pointwise_scores(ScoreMode score, float* out) const {
#pragma unroll
    for (int v = 0; v < kValues; v++) out[v] = key::pointwise_score(score, x[v]);
  }

  /// Chooses K experts: slot k's lane of the row being read keeps the k-th best in `mine`. `smem`
  /// is shared memory of the row, smem_words<Item>() words.
  __device__ void select(const RouteParams& p, std::uint32_t* smem, int pass,
                         std::uint64_t* mine) const {
    float value[kValues];
#pragma unroll
    for (int v = 0; v < kValues; v++) value[v] = x[v];
    if (key::pointwise(p.score)) {
#pragma unroll
      for (int v = 0; v < kValues; v++) {
        const int e = first() + v;
        const float bias = p.bias != nullptr && e < p.experts ? p.bias[e * p.bias_stride] : 0.0f;
        value[v] = key::biased(x[v], key::pointwise_score(p.score, x[v]), bias);
      }
    }
    if (p.n_group > 0) keep_best_groups(p, smem, value);
    std::uint64_t item[kValues];
#pragma unroll
    for (int v = 0; v < kValues; v++) {
      item[v] = static_cast<std::uint64_t>(key::order_bits(value[v])) << 32 |
                ~static_cast<std::uint32_t>(first() + v);
    }
    take_best(item, {p.top_k, pass}, reinterpret_cast<std::uint64_t*>(smem), mine);
  }

  /// As select() above, from cleaned words, for bf16 logits that are themselves the selection
  /// value.
  static __device__ void select(const RouteParams& p, const Words& words, std::uint32_t* smem,
                                int pass, std::uint32_t* mine) {
    const std::uint32_t tie = 0x1ffffu - static_cast<std::uint32_t>(first());
    std::uint32_t item[kValues];
#pragma unroll
    for (int v = 0; v < kValues; v += 2) {
      const std::uint32_t word = words[v / 2];
      const std::uint32_t order = word ^ (ptx::signs_of_halves(word) | 0x80008000u);
      item[v] = order * 0x10000u + (tie - v);
      item[v + 1] = (order & 0xffff0000u) + (tie - v - 1);
    }
    take_best(item, {p.top_k, pass}, smem, mine);
  }

  /// The softmax that scores the slots.
  static __device__ Softmax score_softmax(const RouteParams& p, const Softmax& all, float slot_x) {
    return p.score == ScoreMode::kSoftmaxAfterTopK ? slots_softmax(slot_x) : all;
  }
  /// Score of a slot before renormalisation and scale; 0 for an empty one.
  static __device__ float raw_score(const RouteParams& p, const Softmax& s, int id, float slot_x) {
    const float score = score_of(p.score, s, slot_x);
    return id < 0 ? 0.0f : score;
  }

  /// Sum over the K slots, by the tree.
  static __device__ float slots_sum(float v) { return lanes_sum<kWidth>(v); }

  static __device__ Softmax slots_softmax(float slot_x) {
    float top = lanes_max<kWidth>(slot_x);
    if (!(top > key::minus_infinity())) top = 0.0f;
    const float sum = slots_sum(key::exp32(slot_x - top));
    return {top, sum > 0.0f ? key::div32(1.0f, sum) : 0.0f};
  }

  static __device__ float weigh(const RouteParams& p, int id, float raw) {
    float normalized = raw;
    if (p.renormalize != 0) normalized = key::div32(raw, divisor(raw));
    return id < 0 ? 0.0f : key::mul32(normalized, p.scale);
  }
  /// The divisor of renormalisation.
  static __device__ float divisor(float raw) { return key::add32(slots_sum(raw), 1e-20f); }

  /// The best items of the last selected row, in select()'s shared memory.
  template <class Item>
  static __device__ const Item* chosen_in(const std::uint32_t* smem) {
    return reinterpret_cast<const Item*>(smem) + kItems;
  }

  /// Words of shared memory that select() needs for the lanes of a row, an even number.
  template <class Item>
  static __host__ __device__ constexpr int smem_words(int n_group) {
    return (kItems + kWidth) * static_cast<int>(sizeof(Item)) / 4 + 2 * group_words(n_group);
  }
  /// The part of a block's shared memory that belongs to this thread's row.
  template <class Item>
  static __device__ std::uint32_t* smem_of(std::uint32_t* shared, int n_group) {
    return shared + threadIdx.x / kLanes * smem_words<Item>(n_group);
  }
  /// Bytes of shared memory that a block's rows need.
  template <class Item>
  static constexpr std::size_t smem_bytes(int threads, int n_group) {
    return static_cast<std::size_t>(threads / kLanes * smem_words<Item>(n_group)) * 4;
  }

 private:
  static constexpr std::uint32_t kTwoNaN = 0x7fff7fffu;

  /// Words of an array by group, an even number: the compiler reads two entries at once, and the
  /// second one of the last pair must not be an entry that another lane writes.
  static __host__ __device__ constexpr int group_words(int n_group) {
    return n_group + (n_group & 1);
  }
  static constexpr int kItems = kLanes * kValues;

  __device__ void load_floats(const RouteParams& p, std::int64_t token) {
    const float* row = static_cast<const float*>(p.logits.data) + token * p.logits.row_stride;
#pragma unroll
    for (int v = 0; v < kValues; v += 4) {
      float4 four{};
      const int e = first() + v;
      if (p.logits.vectors != 0) {
        if (e < p.experts) four = *reinterpret_cast<const float4*>(row + e);
      } else {
        const std::int64_t step = p.logits.column_stride;
        if (e < p.experts) four.x = row[e * step];
        if (e + 1 < p.experts) four.y = row[(e + 1) * step];
        if (e + 2 < p.experts) four.z = row[(e + 2) * step];
        if (e + 3 < p.experts) four.w = row[(e + 3) * step];
      }
      x[v] = four.x;
      x[v + 1] = four.y;
      x[v + 2] = four.z;
      x[v + 3] = four.w;
    }
#pragma unroll
    for (int v = 0; v < kValues; v++) {
      x[v] = first() + v < p.experts ? key::clean(x[v], key::kLargestF32) : key::minus_infinity();
    }
  }

  struct Selection {
    int top_k;
    int pass;
  };

  // Takes the K best items of a row. Each lane sorts its items. Then, K times, the lanes compare
  // their first items; the lane with the best one writes it to `chosen` and continues with its next
  // item. The other items and the chosen ones are in shared memory: as register moves they would
  // fill the slower half of the integer pipe.
  template <class Item>
  static __device__ void take_best(Item (&item)[kValues], Selection selection, Item* smem,
                                   Item* mine) {
    sort_descending(item);
    Item* next = smem + lane();
    Item* chosen = smem + kItems;
#pragma unroll
    for (int v = 1; v < kValues; v++) next[(v - 1) * kLanes] = item[v];
    next[(kValues - 1) * kLanes] = 0;  // items differ and are not 0: no lane reads past this
    Item head = item[0];
    __syncwarp();  // all lanes have read the row before
#pragma unroll 4
    for (int k = 0; k < selection.top_k; k++) {
      const Item best = lanes_max<kLanes>(head);
      if (head == best) {
        chosen[k] = best;
        head = *next;
        next += kLanes;
      }
    }
    __syncwarp();
    if (in_pass(selection.pass) && slot() < selection.top_k) *mine = chosen[slot()];
  }

  // Sets the values of all experts outside of the best groups to -inf. The values go through shared
  // memory, because several lanes may hold the experts of one group.
  static __device__ void keep_best_groups(const RouteParams& p, std::uint32_t* smem,
                                          float (&value)[kValues]) {
    auto* values = reinterpret_cast<float*>(smem);  // select() stores items here afterwards
    std::uint32_t* order = smem + smem_words<std::uint64_t>(0);
    std::uint32_t* keep = order + group_words(p.n_group);
    const int size = p.experts / p.n_group;
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kValues; v++) values[first() + v] = value[v];
    __syncwarp();
    for (int g = lane(); g < p.n_group; g += kLanes) {
      float best = key::minus_infinity();
      float second = best;
      for (int e = g * size; e < (g + 1) * size; e++) {
        const float v = values[e];
        second = v > best ? best : fmaxf(second, v);
        best = fmaxf(best, v);
      }
      order[g] = key::order_bits(size == 1 ? best : key::group_value(best, second));
    }
    __syncwarp();
    for (int g = lane(); g < p.n_group; g += kLanes) {
      int before = 0;
      for (int h = 0; h < p.n_group; h++) {
        before += order[h] > order[g] || (order[h] == order[g] && h < g) ? 1 : 0;
      }
      keep[g] = before < p.topk_group ? 1 : 0;
    }
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kValues; v++) {
      const int e = first() + v;
      if (e < p.experts && keep[e / size] == 0) value[v] = key::minus_infinity();
    }
  }

  // Batcher's odd-even merge sort: its indices are compile-time constants, so the items stay in
  // registers.
  template <int kRun = 1, int kStep = 1, class Item>
  static __device__ void sort_descending(Item (&item)[kValues]) {
#pragma unroll
    for (int v = 0; v + kStep < kValues; v++) {
      constexpr int kSkip = kStep % kRun;
      if (v < kSkip || (v - kSkip) / kStep % 2 != 0) continue;
      if (v / (2 * kRun) != (v + kStep) / (2 * kRun)) continue;
      const Item a = item[v];
      const Item b = item[v + kStep];
      item[v] = max(a, b);
      item[v + kStep] = min(a, b);
    }
    if constexpr (kStep > 1) {
      sort_descending<kRun, kStep / 2>(item);
    } else if constexpr (2 * kRun < kValues) {
      sort_descending<2 * kRun, 2 * kRun>(item);
    }
  }
};

/// A row as it is loaded for selection: bf16 logits as packed words, or floats.
template <class R, class Item>
struct RowSource {
  static constexpr bool kSmall = false;
  R row;

  __device__ void load(const RouteParams& p, std::int64_t token) { row.load(p, token); }
  __device__ void clean() {}
  __device__ void select(const RouteParams& p, std::uint32_t* smem, int pass, Item* mine) const {
    row.select(p, smem, pass, mine);
  }
  __device__ const R& widened() const { return row; }
};
template <class R>
struct RowSource<R, std::uint32_t> {
  static constexpr bool kSmall = true;  // enough registers to load a second row ahead
  typename R::Words words;

  __device__ void load(const RouteParams& p, std::int64_t token) { R::load_words(p, token, words); }
  /// Must be called before select() and widened(). It is not a part of load(), so that other work
  /// can run before the loaded words arrive.
  __device__ void clean() { R::clean_all(words); }
  __device__ void select(const RouteParams& p, std::uint32_t* smem, int pass,
                         std::uint32_t* mine) const {
    R::select(p, words, smem, pass, mine);
  }
  __device__ R widened() const {
    R r;
    r.widen_cleaned(words);
    return r;
  }
};

/// One pass over a row. `visit` gets a function that returns the row in fp32; if Item is u32, the
/// row is widened only if `visit` calls this function. The lanes that hold the row's slots keep its
/// selection.
template <class R, class Item, class Visit>
__device__ void read_row(const RouteParams& p, std::int64_t token, std::uint32_t* smem, int pass,
                         Item* mine, const Visit& visit) {
  RowSource<R, Item> source;
  source.load(p, token);
  source.clean();
  visit([&]() -> decltype(auto) { return source.widened(); });
  source.select(p, smem, pass, mine);
}

/// The gradient of a slot's logit, and the part that softmax over all E subtracts from every logit.
struct SlotGradient {
  float slot;
  /// kSoftmaxBeforeTopK: the sum of d(raw) * raw; mean * p is subtracted from every logit's
  /// gradient. Other modes: 0.
  float mean;
};

/// Computes the gradient of a slot's logit x from the gradient of the slot's weight.
template <class R>
__device__ SlotGradient slot_gradient(const RouteParams& p, int id, float x, float raw,
                                      float dweight) {
  float d = id < 0 ? 0.0f : dweight * p.scale;
  if (p.renormalize != 0) {
    const float sum = R::slots_sum(raw) + 1e-20f;
    d = (d - R::slots_sum(d * (raw / sum))) / sum;
  }
  if (id < 0) d = 0.0f;
  const float mean = R::slots_sum(d * raw);
  if (p.score == ScoreMode::kSigmoid) d *= 1.0f - raw;
  if (p.score == ScoreMode::kSqrtSoftplus) raw *= key::sqrt_softplus_slope32(x);  // d may be tiny
  if (p.score == ScoreMode::kSoftmaxAfterTopK) d -= mean;
  return {id < 0 ? 0.0f : raw * d, p.score == ScoreMode::kSoftmaxBeforeTopK ? mean : 0.0f};
}

/// Stores one logit's gradient.
__device__ inline void store_logit(const LogitsView& out, std::int64_t token, int expert, float d) {
  const std::int64_t at = token * out.row_stride + expert * out.column_stride;
  if (out.dtype == DType::kF32) {
    static_cast<float*>(out.data)[at] = d;
  } else if (out.dtype == DType::kF16) {
    static_cast<__half*>(out.data)[at] = narrow<__half>(d);
  } else {
    static_cast<__nv_bfloat16*>(out.data)[at] = narrow<__nv_bfloat16>(d);
  }
}

/// Writes a lane's part of a row of gradients.
template <class R, class Logit>
__device__ void store_gradient_as(const LogitsView& out, std::int64_t token, int experts,
                                  const float (&d)[R::kValues]) {
  Logit* row = static_cast<Logit*>(out.data) + token * out.row_stride;
  if (out.vectors != 0) {
    constexpr int kPerVector = 16 / sizeof(Logit);
#pragma unroll
    for (int v = 0; v < R::kValues; v += kPerVector) {
      uint4 bytes;
      Logit* values = reinterpret_cast<Logit*>(&bytes);
#pragma unroll
      for (int i = 0; i < kPerVector; i++) values[i] = narrow<Logit>(d[v + i]);
      if (R::first() + v < experts) *reinterpret_cast<uint4*>(row + R::first() + v) = bytes;
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    const int e = R::first() + v;
    if (e < experts) row[e * out.column_stride] = narrow<Logit>(d[v]);
  }
}
template <class R>
__device__ void store_gradient(const LogitsView& out, std::int64_t token, int experts,
                               const float (&d)[R::kValues]) {
  if (out.dtype == DType::kF32) {
    store_gradient_as<R, float>(out, token, experts, d);
  } else if (out.dtype == DType::kF16) {
    store_gradient_as<R, __half>(out, token, experts, d);
  } else {
    store_gradient_as<R, __nv_bfloat16>(out, token, experts, d);
  }
}

}  // namespace sonicmoe::cuda
