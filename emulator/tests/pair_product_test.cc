// The kernels of ptx/pair_product.cu as nvcc compiles them. They are right for every seed, and each
// wait, fence, commit and copy that is left out is noticed, as are changes of scales.
#include <cuda.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <functional>
#include <regex>
#include <sstream>

#include "matrix_fixture.h"

namespace sonicmoe::emulator {
namespace {

constexpr int kRows = 256, kColumns = 256;
constexpr int kTiles = 3;       // more than the kernel has stages
constexpr int kRowBytes = 128;  // of a k tile
constexpr int kTokens = 100;
constexpr int kChunk = 512;  // the scales of 128 rows and a k tile
constexpr std::size_t kDynamicShared = 2 * (2 * 128 * kRowBytes + 3 * kChunk) + 1024;

CUtensorMap map_of(void* base, CUtensorMapDataType type, const std::array<cuuint64_t, 2>& sizes,
                   cuuint64_t row_bytes, const std::array<cuuint32_t, 2>& box,
                   CUtensorMapSwizzle swizzle) {
  alignas(64) CUtensorMap map;
  const cuuint32_t steps[] = {1, 1};
  EXPECT_EQ(
      cuTensorMapEncodeTiled(&map, type, 2, base, sizes.data(), &row_bytes, box.data(), steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      CUDA_SUCCESS);
  return map;
}

struct Chunks {
  void* at;
  std::size_t bytes;
};

/// 32 rows of 16 bytes each.
CUtensorMap map_of_chunks(const Chunks& chunks) {
  return map_of(chunks.at, CU_TENSOR_MAP_DATA_TYPE_UINT8, {16, chunks.bytes / 16}, 16, {16, 32},
                CU_TENSOR_MAP_SWIZZLE_NONE);
}

std::string text_of_kernels() {
  std::ifstream file(PAIR_PRODUCT_PTX);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

Function kernel_of(const std::string& text, const std::string& name) {
  const Module module = parse_module(text);
  for (const KernelText& kernel : module.kernels) {
    if (kernel.name == name) return parse_kernel(module, kernel);
  }
  throw Fault("no kernel " + name);
}

/// Operands of random integers, and scales that are powers of two.
class PairProduct : public testing::Test {
 protected:
  PairProduct() : PairProduct("pair_product", kBF16) {}
  PairProduct(std::string name, Type type)
      : name_(std::move(name)),
        text_(text_of_kernels()),
        kernel_(kernel_of(text_, name_)),
        type_(type),
        depth_(kRowBytes / type.bytes() * kTiles) {
    std::mt19937 random(3);
    const std::vector<float> a = random_matrix(kTokens, depth_, random);
    const std::vector<float> b = random_matrix(kColumns, depth_, random);
    for (int r = 0; r < kRows; ++r) {
      index_.push_back(random() % 8 == 0 ? -1 : static_cast<int>(random() % kTokens));
    }
    gathered_.resize(std::size_t{kRows} * depth_);
    for (int r = 0; r < kRows; ++r) {
      if (index_[r] == -1) continue;
      std::copy_n(a.begin() + index_[r] * depth_, depth_, gathered_.begin() + r * depth_);
    }
    b_ = b;
    a_at_ = memory_.add(bytes_of_values(a));
    b_at_ = memory_.add(bytes_of_values(b));
    index_at_ = memory_.add(index_);
    multiply();
  }

  void multiply() {
    expected_ = reference(gathered_, b_, kColumns, depth_, 1,
                          std::vector<float>(std::size_t{kRows} * kColumns));
  }
  CUtensorMap map_of_rows(void* base, int rows, cuuint32_t box_rows) const {
    const auto type =
        type_.bytes() == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const auto depth = static_cast<cuuint64_t>(depth_);
    const auto element = static_cast<cuuint32_t>(type_.bytes());
    return map_of(base, type, {depth, static_cast<cuuint64_t>(rows)}, depth * element,
                  {kRowBytes / element, box_rows}, CU_TENSOR_MAP_SWIZZLE_128B);
  }

  /// Whether D is right. Throws Fault.
  bool is_right(const Function& kernel, std::uint64_t seed, double patience_s) {
    auto* out = memory_.add(std::vector<float>(expected_.size()));
    const Program program = Builder(kernel, {}, target_of(text_)).build();
    Launch launch;
    launch.program = &program;
    launch.grid = launch.cluster = {2, 1, 1};
    launch.block = {192, 1, 1};
    launch.dynamic_shared = kDynamicShared;
    launch.parameters.resize(program.parameter_bytes);
    const auto set = [&](std::size_t i, const auto& value) {
      std::memcpy(launch.parameters.data() + program.parameter_offsets.at(i), &value, sizeof value);
    };
    set(0, map_of_rows(a_at_, kTokens, 1));
    set(1, map_of_rows(b_at_, kColumns, 128));
    set(2, index_at_);
    set(3, out);
    set(4, kTiles);
    if (!scales_.empty()) {
      set(5, std::array{map_of_chunks(scales_[0]), map_of_chunks(scales_[1])});
    }
    Settings settings;
    settings.seed = seed;
    settings.patience_s = patience_s;
    Grid(launch, settings, memory_).run();
    return std::equal(expected_.begin(), expected_.end(), out);
  }
  /// Whether the kernel fails.
  bool is_noticed(const Function& kernel) {
    try {
      return !is_right(kernel, 1, 0.5);
    } catch (const Fault&) {
      return true;
    }
  }

  /// Leaves out one of the instructions after another. Returns how many there are.
  template <class Is>
  int expect_needed(const Is& is) {
    int left_out = 0;
    for (std::size_t i = 0; i < kernel_.statements.size(); ++i) {
      if (!is(kernel_.statements[i])) continue;
      ++left_out;
      Function broken = kernel_;
      broken.statements[i].leave_out();
      EXPECT_TRUE(is_noticed(broken))
          << kernel_.statements[i].line << " " << kernel_.statements[i].text();
    }
    return left_out;
  }

  std::string name_, text_;
  Function kernel_;
  Type type_;
  int depth_;
  Arrays memory_;
  std::vector<float> gathered_, b_, expected_;
  std::vector<Chunks> scales_;  // of A and B

 private:
  std::vector<std::byte> bytes_of_values(const std::vector<float>& values) const {
    std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(type_.bytes()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint32_t bits = bits_of(type_.type, values[i]);
      std::memcpy(bytes.data() + i * type_.bytes(), &bits, static_cast<std::size_t>(type_.bytes()));
    }
    return bytes;
  }

  void* a_at_;
  void* b_at_;
  int* index_at_;
  std::vector<int> index_;
};

class ScaledPairProduct : public PairProduct {
 protected:
  ScaledPairProduct() : PairProduct("scaled_pair_product", kE4M3) {
    std::mt19937 random(4);
    for (std::vector<float>* rows : {&gathered_, &b_}) {
      std::vector<std::byte> chunks(std::size_t{2} * kTiles * kChunk);
      for (int r = 0; r < kRows; ++r) {
        for (int block = 0; block < depth_ / 32; ++block) {
          const int scale = 125 + static_cast<int>(random() % 5);
          const int chunk = r / 128 * kTiles + block / 4;
          chunks[chunk * kChunk + r % 32 * 16 + r % 128 / 32 * 4 + block % 4] = std::byte(scale);
          for (int k = 0; k < 32; ++k) {
            float& value = (*rows)[r * depth_ + block * 32 + k];
            value = std::ldexp(value, scale - 127);
          }
        }
      }
      scales_.push_back({memory_.add(chunks), chunks.size()});
    }
    multiply();
  }

  /// The kernel with other text: in each instruction that begins so, register number `operand` is
  /// replaced by what `opcode value` makes of it.
  Function changed(const std::string& begin, int operand, const std::string& opcode, int bits,
                   const std::string& value) {
    std::stringstream in(text_);
    std::string all, line;
    static const std::regex kRegister("%(rd|r)[0-9]+");
    while (std::getline(in, line)) {
      if (line.find(begin) != line.npos) {
        auto found = std::sregex_iterator(line.begin(), line.end(), kRegister);
        std::advance(found, operand);
        const std::string old = found->str(), scratch = "scratch";
        line.replace(static_cast<std::size_t>(found->position()), old.size(), scratch);
        line = "{ .reg .b" + std::to_string(bits) + " scratch; " + opcode + " scratch, " + old +
               ", " + value + ";\n" + line + "\n}";
      }
      all += line + "\n";
    }
    return kernel_of(all, name_);
  }
};

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

TEST_F(PairProduct, IsRight) {
  EXPECT_EQ(target_of(text_).name(), "sm_100f");
  for (std::uint64_t seed = 1; seed <= 5; ++seed) EXPECT_TRUE(is_right(kernel_, seed, 60));
}

TEST_F(PairProduct, EachWaitAndFenceIsNeeded) { EXPECT_GE(expect_needed(&synchronises), 16); }

TEST_F(ScaledPairProduct, IsRight) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) EXPECT_TRUE(is_right(kernel_, seed, 60));
}

TEST_F(ScaledPairProduct, EachWaitAndFenceIsNeeded) { EXPECT_GE(expect_needed(&synchronises), 16); }

TEST_F(ScaledPairProduct, EachCopyAndProductIsNeeded) {
  const auto is = [](const Statement& s) {
    return s.opcode() == "tcgen05" && (s.parts[1] == "cp" || s.parts[1] == "mma");
  };
  EXPECT_EQ(expect_needed(is), 7);
}

TEST_F(ScaledPairProduct, ChangesAreNoticed) {
  const std::string mma = "tcgen05.mma.cta_group::2.kind::mxf8f6f4", cp = "tcgen05.cp";
  struct {
    const char* what;
    std::string begin;
    int operand;
    const char* opcode;
    int bits;
    const char* value;
  } const changes[] = {
      {"nothing", mma, 3, "xor.b32", 32, "0"},
      {"byte of B's scales", mma, 3, "xor.b32", 32, "0x10"},
      {"byte of A's scales", mma, 3, "xor.b32", 32, "0x20000000"},
      {"A in e5m2", mma, 3, "xor.b32", 32, "0x80"},
      {"A's scales in D", mma, 4, "sub.s32", 32, "256"},
      {"B's scales in D", mma, 5, "sub.s32", 32, "256"},
      {"A's scales are B's", mma, 4, "add.s32", 32, "4"},
      {"B's scales one column further", mma, 5, "add.s32", 32, "1"},
      {"D over the scales", mma, 0, "add.s32", 32, "4"},
      {"copies to other columns", cp, 0, "add.s32", 32, "4"},
      {"copies to D", cp, 0, "sub.s32", 32, "256"},
      {"copies of the row behind", cp, 1, "add.s64", 64, "1"},
      {"copies of the chunk behind", cp, 1, "add.s64", 64, "32"},
      {"copies with another stride", cp, 1, "xor.b64", 64, "0x100000000"},
  };
  for (const auto& c : changes) {
    const Function broken = changed(c.begin, c.operand, c.opcode, c.bits, c.value);
    EXPECT_EQ(is_noticed(broken), std::string(c.what) != "nothing") << c.what;
  }
}

TEST_F(ScaledPairProduct, CopiesBehindTheProductAreNoticed) {
  std::vector<Statement>& all = kernel_.statements;
  const auto place = [&](const char* what, std::size_t from) {
    while (all[from].opcode() != "tcgen05" || all[from].parts[1] != what) ++from;
    return from;
  };
  const std::size_t copy = place("cp", 0);
  const std::size_t behind = place("commit", copy);
  std::rotate(all.begin() + static_cast<std::ptrdiff_t>(copy),
              all.begin() + static_cast<std::ptrdiff_t>(copy) + 1,
              all.begin() + static_cast<std::ptrdiff_t>(behind));
  EXPECT_TRUE(is_noticed(kernel_));
}

}  // namespace
}  // namespace sonicmoe::emulator
