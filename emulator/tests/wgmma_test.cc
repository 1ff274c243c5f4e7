// wgmma of the emulator, by small kernels. A kernel with a missing wait must give a wrong result
// for some seed.
#include <gtest/gtest.h>

#include <algorithm>

#include "operand_image.h"

namespace sonicmoe::emulator {
namespace {

constexpr int kRows = 64;
constexpr int kThreads = 128;
constexpr int kSeeds = 10;

constexpr int kImageA = 0;
constexpr int kImageB = 16 * 1024;
constexpr int kImageBytes = 64 * 1024;

/// 128 threads copy the images of A and B to shared memory, set the accumulators to what `in` has,
/// run `body` and store the accumulators: register i of thread t is word 128 i + t.
std::string wgmma_kernel(int columns, const std::string& body) {
  std::string text = R"(.visible .entry test(.param .u64 image, .param .u64 sums, .param .u64 a,
                     .param .u64 b) {
.reg .pred %p<10>;
.reg .b32 %r<30>;
.reg .f32 %f<130>;
.reg .b64 %rd<20>;
.shared .align 1024 .b8 operands[65536];
ld.param.u64 %rd1, [image];
ld.param.u64 %rd2, [sums];
ld.param.u64 %rd3, [a];
ld.param.u64 %rd4, [b];
mov.u32 %r1, %tid.x;
mov.u32 %r2, operands;
mul.wide.u32 %rd5, %r1, 4;
add.s64 %rd1, %rd1, %rd5;
add.s64 %rd2, %rd2, %rd5;
shl.b32 %r3, %r1, 2;
add.s32 %r3, %r3, %r2;
mov.u32 %r4, 0;
$copy:
ld.global.u32 %r5, [%rd1];
st.shared.u32 [%r3], %r5;
add.s64 %rd1, %rd1, 512;
add.s32 %r3, %r3, 512;
add.s32 %r4, %r4, 512;
setp.lt.u32 %p1, %r4, 65536;
@%p1 bra $copy;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.eq.u32 %p2, %r1, %r1;
setp.ne.u32 %p3, %r1, %r1;
)";
  for (int i = 0; i < columns / 2; ++i) {
    text += "ld.global.f32 %f" + std::to_string(i) + ", [%rd2+" + std::to_string(512 * i) + "];\n";
  }
  text += "wgmma.fence.sync.aligned;\n" + body;
  for (int i = 0; i < columns / 2; ++i) {
    text += "st.global.f32 [%rd2+" + std::to_string(512 * i) + "], %f" + std::to_string(i) + ";\n";
  }
  return text + "ret;\n}\n";
}

/// The word of row r and column n in the output of that kernel.
int word_of_sum(int row, int column) {
  const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  const int index = column / 8 * 4 + row / 8 % 2 * 2 + column % 2;
  return index * kThreads + thread;
}

/// One instruction.
struct Product {
  Type type;
  int columns;
  Layout a{Major::kK, 128};
  Layout b{Major::kK, 128};
  float scale = 1;

  std::string shape() const {
    return "m64n" + std::to_string(columns) + "k" + std::to_string(type.depth()) + ".f32." +
           type.name + "." + type.name;
  }
  /// wgmma.mma_async with A as given.
  std::string instruction(const std::string& from, const char* scale_d) const {
    std::string text = "wgmma.mma_async.sync.aligned." + shape() + " " +
                       registers("%f", 0, columns / 2) + ", " + from + ", %rd4, " + scale_d + ", " +
                       (scale < 0 ? "-1" : "1") + ", 1";
    if (type.bytes() == 2) {
      if (from[0] != '{') text += a.major == Major::kMN ? ", 1" : ", 0";
      text += b.major == Major::kMN ? ", 1" : ", 0";
    }
    return text + ";\n";
  }
};

constexpr const char* kCommitAndWait = R"(
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
)";

/// Operands and results of one test.
struct Operands {
  std::vector<float> a, b, c;

  Operands(const Product& p, unsigned seed = 5) {
    std::mt19937 random(seed);
    a = random_matrix(kRows, p.type.depth(), random);
    b = random_matrix(p.columns, p.type.depth(), random);
    c = random_matrix(kRows, p.columns, random);
  }

  std::vector<float> sums(const Product& p, const std::string& body, std::uint64_t seed = 1) const {
    Arrays memory;
    const Image image_a(a, kRows, p.type, p.a);
    const Image image_b(b, p.columns, p.type, p.b);
    std::byte* image = memory.add(kImageBytes);
    std::memcpy(image + kImageA, image_a.bytes().data(), image_a.bytes().size());
    std::memcpy(image + kImageB, image_b.bytes().data(), image_b.bytes().size());
    std::vector<float> words(c.size());
    for_each_sum(p, [&](int row, int column, int i) { words[word_of_sum(row, column)] = c[i]; });
    float* at = memory.add(words);
    run_kernel(
        wgmma_kernel(p.columns, body), {.block = {kThreads, 1, 1}}, memory,
        {word_of(image), word_of(at), image_a.descriptor(kImageA), image_b.descriptor(kImageB)},
        seed);
    std::vector<float> d(c.size());
    for_each_sum(p, [&](int row, int column, int i) { d[i] = at[word_of_sum(row, column)]; });
    return d;
  }
  std::vector<float> expected(const Product& p, const std::vector<float>& start) const {
    return reference(a, b, p.columns, p.type.depth(), p.scale, start);
  }

 private:
  template <class F>
  static void for_each_sum(const Product& p, const F& f) {
    for (int i = 0; i < kRows * p.columns; ++i) f(i / p.columns, i % p.columns, i);
  }
};

void expect_product(const Product& p) {
  SCOPED_TRACE(p.shape() + ", A " + (p.a.major == Major::kK ? "K" : "MN") +
               std::to_string(p.a.span) + ", B " + (p.b.major == Major::kK ? "K" : "MN") +
               std::to_string(p.b.span));
  const Operands operands(p);
  const std::string body = p.instruction("%rd3", "%p2") + kCommitAndWait;
  EXPECT_EQ(operands.sums(p, body), operands.expected(p, operands.c));
}

TEST(Wgmma, Columns) {
  for (const Type& type : {kBF16, kF16, kE4M3, kE5M2}) {
    for (const int columns : {8, 16, 24, 64, 96, 128, 192, 256}) expect_product({type, columns});
  }
}

/// Of row 0 and column 0, if the products there are those of `left` and `right`.
float sum_of_e4m3(std::vector<float> left, std::vector<float> right, float start) {
  const Product p{kE4M3, 8};
  Operands operands(p);
  left.resize(p.type.depth());
  right.resize(p.type.depth());
  std::copy(left.begin(), left.end(), operands.a.begin());
  std::copy(right.begin(), right.end(), operands.b.begin());
  operands.c[0] = start;
  return operands.sums(p, p.instruction("%rd3", "%p2") + kCommitAndWait)[0];
}

TEST(Wgmma, SumsOfE4M3Have14Bits) {
  EXPECT_EQ(sum_of_e4m3({256}, {256}, 0), 65536);
  // The last bit beside 2^16 is worth 8. Each term is truncated, not their sum.
  EXPECT_EQ(sum_of_e4m3({256, 3}, {256, 3}, 0), 65544);
  EXPECT_EQ(sum_of_e4m3({256, -3}, {256, 3}, 0), 65528);
  EXPECT_EQ(sum_of_e4m3({256, 2, 2}, {256, 3, 3}, 0), 65536);
  EXPECT_EQ(sum_of_e4m3({256}, {256}, 7), 65536);
  EXPECT_EQ(sum_of_e4m3({2, 2}, {3, 3}, 65536), 65536);
  // A sum that grows beyond 2^17 has 14 bits again.
  EXPECT_EQ(sum_of_e4m3({256, 256, 2}, {256, 256, 4}, 0), 131072);
  EXPECT_EQ(sum_of_e4m3({0.001953125f}, {0.001953125f}, 0), 0x1p-18f);
}

TEST(Wgmma, Layouts) {
  for (const int span_a : {0, 32, 64, 128}) {
    for (const int span_b : {0, 32, 64, 128}) {
      expect_product({kE4M3, 64, {Major::kK, span_a}, {Major::kK, span_b}});
      for (const Major major_a : {Major::kK, Major::kMN}) {
        for (const Major major_b : {Major::kK, Major::kMN}) {
          expect_product({kBF16, 128, {major_a, span_a}, {major_b, span_b}});
        }
      }
    }
  }
}

TEST(Wgmma, ScalesOfOperandsAndSums) {
  Product p{kBF16, 64};
  p.scale = -1;
  const Operands operands(p);
  const std::vector<float> zeros(operands.c.size());
  const auto sums = [&](const char* scale_d) {
    return operands.sums(p, p.instruction("%rd3", scale_d) + kCommitAndWait);
  };
  EXPECT_EQ(sums("%p2"), operands.expected(p, operands.c));
  EXPECT_EQ(sums("%p3"), operands.expected(p, zeros));
  EXPECT_EQ(sums("!%p3"), operands.expected(p, operands.c));
  EXPECT_EQ(sums("0"), operands.expected(p, zeros));
}

TEST(Wgmma, ProductsOfAWarpKeepTheirOrder) {
  const Product p{kF16, 64};
  const Operands operands(p);
  const std::vector<float> zeros(operands.c.size());
  const std::string clear = p.instruction("%rd3", "%p3");
  const std::string add = p.instruction("%rd3", "%p2");
  const std::string commit = "wgmma.commit_group.sync.aligned;\n";
  for (int seed = 1; seed <= kSeeds; ++seed) {
    EXPECT_EQ(operands.sums(p, add + clear + commit + add + kCommitAndWait, seed),
              operands.expected(p, operands.expected(p, zeros)));
  }
}

/// Registers of A by the definition of the fragment.
TEST(Wgmma, AFromRegisters) {
  for (const Type& type : {kBF16, kE4M3}) {
    const Product p{type, 64};
    const Operands operands(p);
    const int side = 4 / type.bytes();  // elements of a register
    // A's elements again, as registers: word i of thread t at image byte 32768 + 512 i + 4 t.
    std::string load;
    for (int i = 0; i < 4; ++i) {
      load += "ld.shared.u32 %r" + std::to_string(10 + i) + ", [%r6+" + std::to_string(512 * i) +
              "];\n";
    }
    std::vector<std::uint32_t> words(4 * kThreads, 0);
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < type.depth(); ++k) {
        const int thread = r / 16 * 32 + r % 8 * 4 + k % (4 * side) / side;
        const int index = k / (4 * side) * 2 + r / 8 % 2;
        words[index * kThreads + thread] |= bits_of(type.type, operands.a[r * type.depth() + k])
                                            << (8 * type.bytes() * (k % side));
      }
    }
    // The words take the place of an image of A.
    std::string body = "shl.b32 %r6, %r1, 2;\nadd.s32 %r6, %r6, %r2;\n" + load +
                       p.instruction("{%r10, %r11, %r12, %r13}", "%p2") + kCommitAndWait;
    Arrays memory;
    const Image image_b(operands.b, p.columns, type, p.b);
    std::byte* image = memory.add(kImageBytes);
    std::memcpy(image, words.data(), words.size() * 4);
    std::memcpy(image + kImageB, image_b.bytes().data(), image_b.bytes().size());
    float* at = memory.add(std::vector<float>(operands.c.size()));
    run_kernel(wgmma_kernel(p.columns, body), {.block = {kThreads, 1, 1}}, memory,
               {word_of(image), word_of(at), 0, image_b.descriptor(kImageB)});
    const std::vector<float> expected = operands.expected(p, std::vector<float>(operands.c.size()));
    for (int i = 0; i < kRows * p.columns; ++i) {
      ASSERT_EQ(at[word_of_sum(i / p.columns, i % p.columns)], expected[i]) << type.name << i;
    }
  }
}

/// Whether the product is right, and no fault is found, for every seed.
bool is_always_right(const Product& p, const std::string& body) {
  const Operands operands(p);
  const std::vector<float> expected = operands.expected(p, operands.c);
  for (int seed = 1; seed <= kSeeds; ++seed) {
    try {
      if (operands.sums(p, body, seed) != expected) return false;
    } catch (const Fault&) {
      return false;
    }
  }
  return true;
}

TEST(Wgmma, MissingWaitsAreNoticed) {
  const Product p{kBF16, 64};
  const std::string issue = p.instruction("%rd3", "%p2") + "wgmma.commit_group.sync.aligned;\n";
  const std::string wait = "wgmma.wait_group.sync.aligned 0;\n";
  // Each thread overwrites a part of B.
  const std::string overwrite = R"(
bar.sync 0;
mov.u32 %r8, 0;
shl.b32 %r7, %r1, 2;
add.s32 %r7, %r7, %r2;
st.shared.u32 [%r7+16384], %r8;
bar.sync 0;
)";
  EXPECT_TRUE(is_always_right(p, issue + wait + overwrite));
  EXPECT_FALSE(is_always_right(p, issue + overwrite + wait));
  EXPECT_FALSE(is_always_right(p, issue));
  EXPECT_FALSE(is_always_right(p, issue + "wgmma.wait_group.sync.aligned 1;\n"));
}

/// Each thread writes a word of shared memory again, with the same value.
std::string rewrite(int offset, const char* fence) {
  return "bar.sync 0;\nshl.b32 %r7, %r1, 2;\nadd.s32 %r7, %r7, %r2;\nld.shared.u32 %r8, [%r7+" +
         std::to_string(offset) + "];\nst.shared.u32 [%r7+" + std::to_string(offset) + "], %r8;\n" +
         fence + "bar.sync 0;\n";
}

TEST(Wgmma, AWriteNeedsAProxyFence) {
  const Product p{kBF16, 64};
  const std::string product = p.instruction("%rd3", "%p2") + kCommitAndWait;
  EXPECT_TRUE(is_always_right(p, rewrite(kImageB, "fence.proxy.async.shared::cta;\n") + product));
  EXPECT_FALSE(is_always_right(p, rewrite(kImageB, "") + product));
  EXPECT_FALSE(is_always_right(p, rewrite(kImageB, "fence.acq_rel.cta;\n") + product));
  EXPECT_TRUE(is_always_right(p, rewrite(48 * 1024, "") + product));
}

TEST(Wgmma, Faults) {
  const Product p{kBF16, 64};
  const Operands operands(p);
  const auto fault_of = [&](const std::string& body) {
    try {
      operands.sums(p, body);
    } catch (const Fault& fault) {
      return std::string(fault.what());
    }
    return std::string();
  };
  const auto expect = [&](const std::string& body, const char* sentence) {
    const std::string fault = fault_of(body);
    EXPECT_NE(fault.find(sentence), std::string::npos) << fault;
  };
  const std::string product = p.instruction("%rd3", "%p2");
  expect("or.b64 %rd4, %rd4, 0x0002000000000000;\n" + product, "base offsets");
  expect("or.b64 %rd4, %rd4, 0x3fff;\n" + product + kCommitAndWait, "reads shared memory");
  expect("cvt.u64.u32 %rd6, %r1;\nadd.s64 %rd4, %rd4, %rd6;\n" + product, "different matrix");
  expect("setp.lt.u32 %p4, %r1, 16;\n@%p4 " + product, "a part of its warp");
}

}  // namespace
}  // namespace sonicmoe::emulator
