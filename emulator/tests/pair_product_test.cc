// ptx/pair_product.cu as nvcc compiles it. It is right for every seed, and each wait, fence and
// commit that is left out is noticed.
#include <cuda.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <sstream>

#include "matrix_fixture.h"

namespace sonicmoe::emulator {
namespace {

constexpr int kRows = 256, kColumns = 256;
constexpr int kTiles = 3;  // more than the kernel has stages
constexpr int kDepth = 64 * kTiles;
constexpr int kTokens = 100;
constexpr std::size_t kDynamicShared = 2 * 2 * 128 * 64 * 2 + 1024;

CUtensorMap map_of(void* base, int rows, cuuint32_t box_rows) {
  alignas(64) CUtensorMap map;
  const cuuint64_t sizes[] = {kDepth, static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {2 * kDepth};
  const cuuint32_t box[] = {64, box_rows};
  const cuuint32_t steps[] = {1, 1};
  EXPECT_EQ(
      cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, sizes, strides, box,
                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      CUDA_SUCCESS);
  return map;
}

std::vector<std::uint16_t> to_bits(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits;
  for (const float v : values) bits.push_back(to_brain(v).bits);
  return bits;
}

class PairProduct : public testing::Test {
 protected:
  PairProduct() {
    std::ifstream file(PAIR_PRODUCT_PTX);
    std::stringstream text;
    text << file.rdbuf();
    target_ = target_of(text.str());
    kernel_ = parse_module(text.str()).kernels.at(0);
    std::mt19937 random(3);
    const std::vector<float> a = random_matrix(kTokens, kDepth, random);
    const std::vector<float> b = random_matrix(kColumns, kDepth, random);
    for (int r = 0; r < kRows; ++r) {
      index_.push_back(random() % 8 == 0 ? -1 : static_cast<int>(random() % kTokens));
    }
    std::vector<float> gathered(std::size_t{kRows} * kDepth);
    for (int r = 0; r < kRows; ++r) {
      if (index_[r] == -1) continue;
      std::copy_n(a.begin() + index_[r] * kDepth, kDepth, gathered.begin() + r * kDepth);
    }
    expected_ = reference(gathered, b, kColumns, kDepth, 1,
                          std::vector<float>(std::size_t{kRows} * kColumns));
    a_ = memory_.add(to_bits(a));
    b_ = memory_.add(to_bits(b));
    index_at_ = memory_.add(index_);
  }

  /// Whether D is right. Throws Fault.
  bool is_right(const Function& kernel, std::uint64_t seed, double patience_s) {
    auto* out = memory_.add(std::vector<float>(expected_.size()));
    const Program program = Builder(kernel, {}, target_).build();
    Launch launch;
    launch.program = &program;
    launch.grid = launch.cluster = {2, 1, 1};
    launch.block = {192, 1, 1};
    launch.dynamic_shared = kDynamicShared;
    launch.parameters.resize(program.parameter_bytes);
    const auto set = [&](std::size_t i, const auto& value) {
      std::memcpy(launch.parameters.data() + program.parameter_offsets.at(i), &value, sizeof value);
    };
    set(0, map_of(a_, kTokens, 1));
    set(1, map_of(b_, kColumns, 128));
    set(2, index_at_);
    set(3, out);
    set(4, kTiles);
    Settings settings;
    settings.seed = seed;
    settings.patience_s = patience_s;
    Grid(launch, settings, memory_).run();
    return std::equal(expected_.begin(), expected_.end(), out);
  }

  Target target_;
  Function kernel_;

 private:
  Arrays memory_;
  void* a_;
  void* b_;
  int* index_at_;
  std::vector<int> index_;
  std::vector<float> expected_;
};

TEST_F(PairProduct, IsRight) {
  EXPECT_EQ(target_.name(), "sm_100f");
  for (std::uint64_t seed = 1; seed <= 5; ++seed) EXPECT_TRUE(is_right(kernel_, seed, 60));
}

/// An instruction that orders others.
bool synchronises(const Statement& s) {
  const std::string& what = s.parts.size() > 1 ? s.parts[1] : s.parts[0];
  if (s.opcode() == "tcgen05") {
    return what.starts_with("fence") || what.starts_with("wait") || what == "commit" ||
           what == "dealloc" || what == "relinquish_alloc_permit";
  }
  if (s.opcode() == "barrier") return s.has("cluster") && !s.has("arrive");
  return s.opcode() == "mbarrier" && (what == "try_wait" || what == "arrive");
}

TEST_F(PairProduct, EachWaitAndFenceIsNeeded) {
  int left_out = 0;
  std::string unnoticed;
  for (std::size_t i = 0; i < kernel_.statements.size(); ++i) {
    if (!synchronises(kernel_.statements[i])) continue;
    ++left_out;
    Function broken = kernel_;
    broken.statements[i].leave_out();
    try {
      if (is_right(broken, 1, 0.5)) {
        unnoticed +=
            "\n" + std::to_string(kernel_.statements[i].line) + " " + kernel_.statements[i].text();
      }
    } catch (const Fault&) {
    }
  }
  EXPECT_GE(left_out, 16);
  EXPECT_EQ(unnoticed, "");
}

}  // namespace
}  // namespace sonicmoe::emulator
