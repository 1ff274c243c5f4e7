// Sums over a token's rows against a plain loop on the host. Data are small integers, so that every
// sum is exact and the check is equality.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/sums/sum_rows.h"
#include "device_array.h"
#include "test_device.h"

namespace sonicmoe::cuda {
namespace {

using testing::DeviceArray;

struct Shape {
  std::int64_t tokens, top_k, hidden;
};
// Shapes for one block, for a few tokens, and with enough tokens for the rings; narrow rows, and
// rows of several parts.
constexpr Shape kShapes[] = {{1, 1, 8},      {5, 3, 72},      {64, 8, 2056},  {3, 40, 264},
                             {3001, 8, 512}, {20000, 2, 200}, {9000, 33, 64}, {700, 9, 4104}};

/// Positions of tokens and the rows that they name, -1 for some.
struct Lists {
  std::vector<std::int32_t> token_offsets, position_row, position_slot;
};

Lists make_lists(const Shape& s, RoutingForm form, std::mt19937& random) {
  Lists lists;
  lists.token_offsets.push_back(0);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const std::int64_t most = 2 * s.top_k + 1;
    const std::int64_t count =
        form == RoutingForm::kIds ? s.top_k : static_cast<std::int64_t>(random() % most);
    lists.token_offsets.push_back(lists.token_offsets.back() + static_cast<std::int32_t>(count));
  }
  lists.position_row.resize(static_cast<std::size_t>(std::max(1, lists.token_offsets.back())));
  std::iota(lists.position_row.begin(), lists.position_row.end(), 0);
  lists.position_slot = lists.position_row;
  std::shuffle(lists.position_row.begin(), lists.position_row.end(), random);
  std::shuffle(lists.position_slot.begin(), lists.position_slot.end(), random);
  for (auto& row : lists.position_row) {
    if (form == RoutingForm::kIds && random() % 9 == 0) row = -1;
  }
  return lists;
}

template <class T>
T* upload(DeviceArray& array, const std::vector<T>& values) {
  array.set(values);
  return static_cast<T*>(array.data());
}

std::uint16_t bits(float v) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(v) >> 16);
}
float value(std::uint16_t b) { return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16); }

/// The partial sums of other ranks; this rank is the second of four. Not every rank has a partial
/// sum of every token.
class OtherRanks {
 public:
  OtherRanks(const Shape& s, std::mt19937& random)
      : rows_(kRanks * s.tokens * s.hidden),
        masks_(s.tokens),
        d_rows_(static_cast<std::int64_t>(rows_.size()) * 2),
        d_masks_(s.tokens * 8),
        d_fault_(4, 0),
        shape_(s) {
    for (auto& v : rows_) v = bits(static_cast<float>(static_cast<int>(random() % 3) - 1));
    for (auto& m : masks_) m = random() % (1 << kRanks);
    d_rows_.set(rows_);
    d_masks_.set(masks_);
  }
  RankSums sums() const {
    return {static_cast<std::uint8_t*>(d_rows_.data()), shape_.tokens * shape_.hidden * 2,
            static_cast<std::uint64_t*>(d_masks_.data()),
            static_cast<std::uint32_t*>(d_fault_.data()), kOwn};
  }
  void fail() { d_fault_.set(std::vector<std::uint32_t>{7}); }
  /// The sum over ranks at element i of (T, d); `own` is this rank's partial sum.
  float total(std::int64_t i, float own) const {
    float sum = 0.0f;
    for (int r = 0; r < kRanks; ++r) {
      if ((masks_[i / shape_.hidden] >> r & 1) == 0) continue;
      sum += r == kOwn ? own : value(rows_[r * shape_.tokens * shape_.hidden + i]);
    }
    return sum;
  }

 private:
  static constexpr int kRanks = 4, kOwn = 1;
  std::vector<std::uint16_t> rows_;
  std::vector<std::uint64_t> masks_;
  DeviceArray d_rows_, d_masks_, d_fault_;
  Shape shape_;
};

struct SumCall {
  const Device& device;
  const Problem& problem;
  const Metadata& metadata;
  const void* rows;
  Tensor weights;
  Tensor out;
  TokenRange range;

  void run(const RankSums& ranks) const {
    sum_rows(device, problem, metadata, rows, weights, {out, &ranks}, range, nullptr);
  }
  void run_beside(const RankSums& ranks) const {
    sum_rows_beside(device, problem, metadata, rows, {out, &ranks}, range, BesideWhat::kOtherStream,
                    nullptr);
  }
};

/// `own` are the sums of this rank; `memory` is the memory of the output.
void check_over_ranks(const SumCall& call, const Shape& s, const std::vector<std::uint16_t>& own,
                      DeviceArray& memory, std::mt19937& random) {
  OtherRanks others(s, random);
  const RankSums ranks = others.sums();
  for (const bool fault : {false, true}) {
    if (fault) others.fail();
    for (const bool beside : {false, true}) {
      if (beside && call.weights.data != nullptr) continue;
      memory.fill(0x7e);
      if (beside) {
        call.run_beside(ranks);
      } else {
        call.run(ranks);
      }
      testing::must(cudaDeviceSynchronize());
      const auto got = memory.get<std::uint16_t>();
      for (std::int64_t i = call.range.first * s.hidden; i < s.tokens * s.hidden; ++i) {
        const float sum = others.total(i, value(own[i]));
        ASSERT_TRUE(fault ? std::isnan(value(got[i])) : value(got[i]) == sum)
            << "token " << i / s.hidden << ": " << value(got[i]) << ", expected " << sum;
      }
    }
  }
}

void check(const Shape& s, RoutingForm form, bool weighted, std::uint32_t seed) {
  std::mt19937 random(seed);
  const Lists lists = make_lists(s, form, random);
  const auto positions = static_cast<std::int64_t>(lists.position_row.size());
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(positions * s.hidden));
  for (auto& v : rows) v = bits(static_cast<float>(static_cast<int>(random() % 3) - 1));
  constexpr std::int64_t kGap = 3;  // weights between two that count
  std::vector<float> weights(static_cast<std::size_t>(positions * kGap));
  for (auto& w : weights) w = static_cast<float>(1 + random() % 2);
  DeviceArray d_rows(static_cast<std::int64_t>(rows.size()) * 2);
  DeviceArray d_weights(static_cast<std::int64_t>(weights.size()) * 4);
  DeviceArray d_row(positions * 4), d_slot(positions * 4), d_offsets((s.tokens + 1) * 4);
  DeviceArray d_out(s.tokens * s.hidden * 2);
  Metadata m{};
  m.position_row = upload(d_row, lists.position_row);
  Problem p;
  p.form = form;
  p.tokens = s.tokens;
  p.top_k = s.top_k;
  p.hidden = s.hidden;
  p.capacity = positions;
  d_rows.set(rows);
  d_weights.set(weights);
  Tensor w;
  if (form == RoutingForm::kPairs) {
    m.position_slot = upload(d_slot, lists.position_slot);
    m.token_offsets = upload(d_offsets, lists.token_offsets);
    w = tensor1(d_weights.data(), DType::kF32, positions);
    w.stride[0] = kGap;
  } else {
    w = tensor2(d_weights.data(), DType::kF32, s.tokens, s.top_k);
    w.stride[0] = s.top_k * kGap;
    w.stride[1] = kGap;
  }
  if (!weighted) w = Tensor{};
  const Tensor out = tensor2(d_out.data(), DType::kBF16, s.tokens, s.hidden);
  std::vector<std::uint16_t> expected(static_cast<std::size_t>(s.tokens * s.hidden));
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    std::vector<float> sum(static_cast<std::size_t>(s.hidden), 0.0f);
    for (std::int32_t i = lists.token_offsets[t]; i < lists.token_offsets[t + 1]; ++i) {
      const std::int32_t row = lists.position_row[i];
      if (row < 0) continue;
      const std::int64_t slot = form == RoutingForm::kPairs ? lists.position_slot[i] : i;
      const float weight = weighted ? weights[slot * kGap] : 1.0f;
      for (std::int64_t c = 0; c < s.hidden; ++c) {
        sum[c] += weight * value(rows[row * s.hidden + c]);
      }
    }
    for (std::int64_t c = 0; c < s.hidden; ++c) expected[t * s.hidden + c] = bits(sum[c] + 0.0f);
  }
  const auto equal = [&](std::int64_t first, std::int64_t count) {
    const auto got = d_out.get<std::uint16_t>();
    for (std::int64_t i = first * s.hidden; i < (first + count) * s.hidden; ++i) {
      ASSERT_EQ(value(got[i]), value(expected[i])) << "token " << i / s.hidden;
    }
  };
  const Device& device = testing::test_device();
  sum_rows(device, p, m, d_rows.data(), w, out, {0, s.tokens}, nullptr);
  testing::must(cudaDeviceSynchronize());
  equal(0, s.tokens);
  const TokenRange range{s.tokens / 3, s.tokens - s.tokens / 3};
  d_out.fill(0xff);
  sum_rows(device, p, m, d_rows.data(), w, out, range, nullptr);
  testing::must(cudaDeviceSynchronize());
  equal(range.first, range.count);
  if (!weighted) {
    for (const BesideWhat beside : {BesideWhat::kPrevious, BesideWhat::kOtherStream}) {
      d_out.fill(0xff);
      sum_rows_beside(device, p, m, d_rows.data(), out, range, beside, nullptr);
      testing::must(cudaDeviceSynchronize());
      equal(range.first, range.count);
    }
  }
  check_over_ranks({device, p, m, d_rows.data(), w, out, range}, s, expected, d_out, random);
}

TEST(CudaSums, EqualAPlainLoop) {
  std::uint32_t seed = 1;
  for (const Shape& s : kShapes) {
    for (const RoutingForm form : {RoutingForm::kIds, RoutingForm::kPairs}) {
      for (const bool weighted : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "T " << s.tokens << " K " << s.top_k << " d " << s.hidden << " form "
                     << static_cast<int>(form) << " weighted " << weighted);
        check(s, form, weighted, seed++);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe::cuda
