// Compares every element of the metadata with a plain sort on the host: ids and pairs, uniform and
// skewed, with invalid ids and poisoned memory.
#include <algorithm>
#include <random>
#include <tuple>

#include "cuda/metadata/metadata.h"
#include "device_array.h"
#include "test_device.h"

namespace sonicmoe::cuda {
namespace {

using testing::DeviceArray;

/// The expected lists.
struct Expected {
  std::vector<std::int32_t> row_token, row_slot, position_row, position_slot, token_offsets;
  std::vector<std::int32_t> expert_begin, expert_rows;
  std::vector<std::int32_t> records;  // four words each
};

struct Slot {
  std::int64_t expert, token;
};

Expected expect(const Problem& p, const std::vector<Slot>& slots) {
  const bool pairs = p.form == RoutingForm::kPairs;
  Expected x;
  // The slot of each position: sorted by (token, expert, slot) for pairs, in slot order for ids.
  std::vector<std::int32_t> position_slot;
  for (std::size_t s = 0; s < slots.size(); ++s) {
    const auto [e, t] = slots[s];
    const bool usable = e >= 0 && e < p.experts && t >= 0 && t < p.tokens;
    if (!pairs || usable) position_slot.push_back(static_cast<std::int32_t>(s));
  }
  if (pairs) {
    std::stable_sort(position_slot.begin(), position_slot.end(), [&](int a, int b) {
      return std::tie(slots[a].token, slots[a].expert) < std::tie(slots[b].token, slots[b].expert);
    });
    x.position_slot = position_slot;
    x.token_offsets.assign(static_cast<std::size_t>(p.tokens) + 1, 0);
    for (const int s : position_slot) ++x.token_offsets[slots[s].token + 1];
    for (std::int64_t t = 0; t < p.tokens; ++t) x.token_offsets[t + 1] += x.token_offsets[t];
  }
  std::vector<int> order;  // positions that have a row
  for (std::size_t i = 0; i < position_slot.size(); ++i) {
    const std::int64_t e = slots[position_slot[i]].expert;
    if (e >= 0 && e < p.experts) order.push_back(static_cast<int>(i));
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return slots[position_slot[a]].expert < slots[position_slot[b]].expert;
  });
  x.position_row.assign(slots.size(), -1);
  x.expert_rows.assign(static_cast<std::size_t>(p.experts), 0);
  for (const int i : order) {
    const int s = position_slot[i];
    x.position_row[i] = static_cast<std::int32_t>(x.row_slot.size());
    x.row_slot.push_back(s);
    x.row_token.push_back(static_cast<std::int32_t>(slots[s].token));
    ++x.expert_rows[slots[s].expert];
  }
  std::int32_t begin = 0;
  for (int e = 0; e < p.experts; ++e) {
    x.expert_begin.push_back(begin);
    const int rows = x.expert_rows[e];
    const auto first = static_cast<std::int32_t>(x.records.size() / 4);
    for (int r = 0; r < rows; r += kRecordRows) {
      x.records.insert(x.records.end(), {e, begin, rows, first});
    }
    begin += rows;
  }
  return x;
}

/// Copies the first elements of a device array.
template <class T>
std::vector<std::int32_t> words(const T* device, std::size_t bytes_each, std::size_t count) {
  std::vector<std::int32_t> out(count * bytes_each / 4);
  if (!out.empty()) {
    testing::must(cudaMemcpy(out.data(), device, out.size() * 4, cudaMemcpyDeviceToHost));
  }
  return out;
}

void check(const Problem& p, const Routing& routing, const std::vector<Slot>& slots) {
  const Expected x = expect(p, slots);
  for (const int poison : {0xff, 0x55}) {
    DeviceArray saved(metadata_layout(p, nullptr).bytes, poison);
    DeviceArray scratch(metadata_scratch(p), poison);
    DeviceArray counters(64, poison);
    const Metadata m = metadata_layout(p, saved.data());
    build_metadata(testing::test_device(), p, routing, m,
                   {scratch.data(), static_cast<unsigned*>(counters.data()), 16}, nullptr);
    testing::must(cudaDeviceSynchronize());
    const auto get = [](const std::int32_t* a, std::size_t n) { return words(a, 4, n); };
    ASSERT_EQ(counters.get<std::uint32_t>(), std::vector<std::uint32_t>(16, 0));
    ASSERT_EQ(get(m.expert_rows, x.expert_rows.size()), x.expert_rows);
    ASSERT_EQ(get(m.expert_begin, x.expert_begin.size()), x.expert_begin);
    if (p.form == RoutingForm::kPairs) {
      ASSERT_EQ(get(m.token_offsets, x.token_offsets.size()), x.token_offsets);
      ASSERT_EQ(get(m.position_slot, x.position_slot.size()), x.position_slot);
    }
    ASSERT_EQ(get(m.row_slot, x.row_slot.size()), x.row_slot);
    ASSERT_EQ(get(m.row_token, x.row_token.size()), x.row_token);
    ASSERT_EQ(get(m.position_row, x.position_row.size()), x.position_row);
    ASSERT_EQ(get(m.record_count, 1)[0], static_cast<int>(x.records.size() / 4));
    ASSERT_EQ(words(m.records, sizeof(TileRecord), x.records.size() / 4), x.records);
  }
}

enum class Skew { kUniform, kOneHot, kSteep, kGarbage, kNothing };

std::int64_t draw(Skew skew, std::int64_t experts, std::mt19937_64& random) {
  const auto any = [&] { return static_cast<std::int64_t>(random() % experts); };
  switch (skew) {
    case Skew::kOneHot:
      return experts / 2;
    case Skew::kSteep:  // half of all rows to the first expert, a quarter to the second, ...
      return std::min<std::int64_t>(__builtin_ctzll(random() | 1ull << 40), experts - 1);
    case Skew::kGarbage: {
      const std::int64_t bad[] = {-1, experts, std::int64_t{1} << 32, INT64_MIN};
      return random() % 3 == 0 ? bad[random() % 4] : any();
    }
    case Skew::kNothing:
      return -1;
    default:
      return any();
  }
}

constexpr Skew kSkews[] = {Skew::kUniform, Skew::kOneHot, Skew::kSteep, Skew::kGarbage,
                           Skew::kNothing};

struct Shape {
  std::int64_t tokens, experts, top_k;
};

TEST(CudaMetadata, IdsEqualASort) {
  // One block, one cluster up to its last position and one past it, many blocks, several spans.
  constexpr Shape kShapes[] = {{1, 1, 1},       {5, 3, 3},        {64, 64, 8},      {301, 9, 3},
                               {300, 7, 7},     {2048, 128, 8},   {4096, 128, 8},   {4097, 65, 8},
                               {40960, 128, 8}, {32768, 512, 10}, {9001, 1000, 17}, {5000, 1024, 2},
                               {130001, 6, 5}};
  std::mt19937_64 random(3);
  for (const Shape& s : kShapes) {
    for (const Skew skew : kSkews) {
      for (const DType dtype : {DType::kI32, DType::kI64}) {
        SCOPED_TRACE(::testing::Message() << "T " << s.tokens << " E " << s.experts << " K "
                                          << s.top_k << " skew " << static_cast<int>(skew));
        Problem p;
        p.tokens = s.tokens;
        p.experts = s.experts;
        p.top_k = s.top_k;
        p.hidden = p.width = 8;
        const bool wide = dtype == DType::kI64;
        // The int32 form has padding between its rows.
        const std::int64_t stride = wide ? s.top_k : s.top_k + 3;
        std::vector<Slot> slots;
        std::vector<std::int64_t> ids(static_cast<std::size_t>(s.tokens * stride), 0);
        for (std::int64_t t = 0; t < s.tokens; ++t) {
          for (std::int64_t k = 0; k < s.top_k; ++k) {
            std::int64_t e = draw(skew, s.experts, random);
            if (!wide) e = std::clamp<std::int64_t>(e, INT32_MIN, INT32_MAX);
            slots.push_back({e, t});
            ids[t * stride + k] = e;
          }
        }
        DeviceArray device(static_cast<std::int64_t>(ids.size()) * dtype_bytes(dtype));
        if (wide) {
          device.set(ids);
        } else {
          device.set(std::vector<std::int32_t>(ids.begin(), ids.end()));
        }
        Routing routing;
        routing.ids = tensor2(device.data(), dtype, s.tokens, s.top_k);
        routing.ids.stride[0] = stride;
        check(p, routing, slots);
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// kSorted: by expert and token, invalid pairs last. kUnique: the same without repetitions, as from
/// token rounding. kNearly: as kUnique, with one pair out of order.
enum class Order { kAny, kSorted, kUnique, kNearly };

void put_in_order(const Problem& p, Order order, std::mt19937_64& random,
                  std::vector<Slot>* slots) {
  if (order == Order::kAny) return;
  const auto unusable = [&](const Slot& s) {
    return s.expert < 0 || s.expert >= p.experts || s.token < 0 || s.token >= p.tokens;
  };
  const auto before = [&](const Slot& a, const Slot& b) {
    return std::make_tuple(unusable(a), a.expert, a.token) <
           std::make_tuple(unusable(b), b.expert, b.token);
  };
  std::sort(slots->begin(), slots->end(), before);
  if (order != Order::kSorted) {
    for (std::size_t i = slots->size() - 1; i > 0; --i) {
      Slot& own = (*slots)[i];
      if (!before((*slots)[i - 1], own)) own = {p.experts, -1};
    }
    std::sort(slots->begin(), slots->end(), before);
  }
  if (order == Order::kNearly) {
    const std::size_t i = random() % slots->size();
    slots->push_back((*slots)[i]);
    slots->erase(slots->begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void check_pairs(const Problem& p, const std::vector<Slot>& slots) {
  std::vector<std::int64_t> token, expert;
  for (const Slot& slot : slots) {
    token.push_back(slot.token);
    expert.push_back(slot.expert);
  }
  DeviceArray tokens(p.capacity * 8), experts(p.capacity * 8);
  tokens.set(token);
  experts.set(expert);
  Routing routing;
  routing.token = tensor1(tokens.data(), DType::kI64, p.capacity);
  routing.expert = tensor1(experts.data(), DType::kI64, p.capacity);
  check(p, routing, slots);
}

TEST(CudaMetadata, PairsEqualASort) {
  constexpr Shape kShapes[] = {{1, 1, 1},       {7, 3, 20},     {64, 64, 8},  {300, 9, 3},
                               {2500, 128, 14}, {4095, 8, 9},   {4096, 8, 8}, {33000, 256, 9},
                               {3, 40, 700},    {9000, 1024, 1}};
  std::mt19937_64 random(4);
  for (const Shape& s : kShapes) {
    for (const Skew skew : kSkews) {
      for (const Order order : {Order::kAny, Order::kSorted, Order::kUnique, Order::kNearly}) {
        SCOPED_TRACE(::testing::Message()
                     << "T " << s.tokens << " E " << s.experts << " K " << s.top_k << " skew "
                     << static_cast<int>(skew) << " order " << static_cast<int>(order));
        Problem p;
        p.form = RoutingForm::kPairs;
        p.tokens = s.tokens;
        p.experts = s.experts;
        p.capacity = s.tokens * s.top_k + 5;
        p.hidden = p.width = 8;
        std::vector<Slot> slots;
        for (std::int64_t i = 0; i < p.capacity; ++i) {
          // A token may have many pairs, but not thousands.
          const std::int64_t token = draw(i % 256 == 0 ? skew : Skew::kUniform, s.tokens, random);
          slots.push_back({draw(skew, s.experts, random), token});
        }
        put_in_order(p, order, random, &slots);
        check_pairs(p, slots);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe::cuda
