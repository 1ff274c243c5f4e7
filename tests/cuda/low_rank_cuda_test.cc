// Products with a low-rank term, computed by the engines and element by element. All data are small
// integers, so that every sum is exact.
#include <algorithm>
#include <random>
#include <utility>

#include "core/numeric.h"
#include "cuda/layer/views.h"
#include "cuda/metadata/offsets.h"
#include "device_array.h"
#include "each_engine.h"

namespace sonicmoe {
namespace {

using cuda::LowRankTerm;
using cuda::RowProduct;
using cuda::WeightParts;
using testing::DeviceArray;
using testing::must;

constexpr std::int64_t kColumns = 264, kDepth = 200;
/// Tiles with and without a partner, of more and of at most 64 rows.
constexpr std::int64_t kCounts[] = {1, 300, 0, 64, 129, 65};
constexpr std::int64_t kExperts = std::size(kCounts);

/// A matrix or one matrix for each expert, on the host and on the device.
struct Values {
  Values(std::int64_t experts_, std::int64_t rows_, std::int64_t columns_, unsigned seed)
      : experts(experts_), rows(rows_), columns(columns_), device(experts * rows * columns * 2) {
    std::mt19937 random(seed);
    std::vector<std::uint16_t> bits;
    for (std::int64_t i = 0; i < experts * rows * columns; ++i) {
      at.push_back(static_cast<int>(random() % 7) - 3);
      bits.push_back(to_bf16(static_cast<float>(at.back())).bits);
    }
    device.set(bits);
  }
  int get(std::int64_t e, std::int64_t i, std::int64_t j) const {
    return at[(e * rows + i) * columns + j];
  }
  Tensor matrix() const { return tensor2(device.data(), DType::kBF16, rows, columns); }
  Tensor matrices() const { return tensor3(device.data(), DType::kBF16, experts, rows, columns); }

  std::int64_t experts, rows, columns;
  std::vector<int> at;
  DeviceArray device;
};

struct Form {
  const char* name;
  bool gathers;
  bool k_major;    ///< the depth of the weights is contiguous
  bool two_parts;  ///< K runs through two matrices
};
constexpr Form kForms[] = {{"ordered", false, true, false},
                           {"ordered, across", false, false, false},
                           {"two parts", false, false, true},
                           {"gathered", true, true, false},
                           {"gathered, across", true, false, false}};

/// The offsets of kCounts, and the rows that a product gathers.
struct Groups {
  Groups() {
    for (const std::int64_t count : kCounts) offsets.push_back(offsets.back() + count);
    std::mt19937 random(5);
    for (std::int64_t p = 0; p < rows(); ++p) index.push_back(static_cast<int>(random() % rows()));
  }
  std::int64_t rows() const { return offsets.back(); }
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int32_t> index;
};

class CudaLowRank : public testing::EachEngine {
 protected:
  void expect_sums(const Form& form, std::int64_t rank) const {
    SCOPED_TRACE(std::string(form.name) + ", rank " + std::to_string(rank));
    const Groups groups;
    const std::int64_t rows = groups.rows(), parts = form.two_parts ? 2 : 1;
    const auto weights = [&](std::int64_t depth, unsigned seed) {
      return form.k_major ? Values(kExperts, kColumns, depth, seed)
                          : Values(kExperts, depth, kColumns, seed);
    };
    const auto view = [&](const Values& w) {
      return form.k_major ? w.matrices() : cuda::transposed(w.matrices());
    };
    const auto weight = [&](const Values& w, std::int64_t e, std::int64_t j, std::int64_t k) {
      return form.k_major ? w.get(e, j, k) : w.get(e, k, j);
    };
    const Values a(1, rows, parts * kDepth, 1), inner(1, rows, rank, 2);
    const Values first = weights(kDepth, 3), second = weights(kDepth, 4), outer = weights(rank, 6);
    DeviceArray offsets((kExperts + 1) * 8), index(rows * 4), out(rows * kColumns * 2);
    offsets.set(groups.offsets);
    index.set(groups.index);
    DeviceArray memory(cuda::offset_lists(nullptr, rows, kExperts).bytes);
    const cuda::OffsetLists lists = cuda::offset_lists(memory.data(), rows, kExperts);
    cuda::build_offset_lists(*device_,
                             {tensor1(offsets.data(), DType::kI64, kExperts + 1),
                              tensor1(index.data(), DType::kI32, rows), rows, kExperts, rows},
                             lists, nullptr);
    RowProduct product{
        .dtype = DType::kBF16,
        .groups = {&lists.groups, nullptr, kExperts, rows},
        .rows = {a.matrix(), form.gathers ? lists.index : nullptr},
        .weights = {view(first), {}, WeightParts::kOne},
        .low_rank = LowRankTerm{inner.matrix(), {view(outer), {}}},
        .epilogue = cuda::StoreOutput{.out = tensor2(out.data(), DType::kBF16, rows, kColumns)},
        .hints = {.tile_counter = lists.counters}};
    if (form.two_parts) {
      product.rows.rows = tensor3(a.device.data(), DType::kBF16, rows, 2, kDepth);
      product.weights = {view(first), view(second), WeightParts::kOneAfterOther};
    }
    device_->engine->multiply_rows(*device_, product, nullptr);
    must(cudaDeviceSynchronize());
    const auto got = out.get<std::uint16_t>();
    for (std::int64_t e = 0; e < kExperts; ++e) {
      for (std::int64_t p = groups.offsets[e]; p < groups.offsets[e + 1]; ++p) {
        const std::int64_t row = form.gathers ? groups.index[p] : p;
        for (std::int64_t j = 0; j < kColumns; ++j) {
          int sum = 0;
          for (std::int64_t k = 0; k < kDepth; ++k) {
            sum += a.get(0, row, k) * weight(first, e, j, k);
            if (form.two_parts) sum += a.get(0, row, kDepth + k) * weight(second, e, j, k);
          }
          for (std::int64_t k = 0; k < rank; ++k) {
            sum += inner.get(0, p, k) * weight(outer, e, j, k);
          }
          ASSERT_EQ(got[p * kColumns + j], to_bf16(static_cast<float>(sum)).bits)
              << "row " << p << ", column " << j;
        }
      }
    }
  }
};
SONICMOE_FOR_EACH_ENGINE(CudaLowRank);

/// Ranks of part of a k tile, of one and of more.
TEST_P(CudaLowRank, IsAddedToTheProduct) {
  for (const Form& form : kForms) {
    for (const std::int64_t rank : {8, 64, 72}) expect_sums(form, rank);
  }
}

}  // namespace
}  // namespace sonicmoe
