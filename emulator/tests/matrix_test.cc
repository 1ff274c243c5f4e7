// mma, ldmatrix and stmatrix of the emulator, by small kernels.
#include <gtest/gtest.h>

#include <bit>

#include "matrix_fixture.h"

namespace sonicmoe::emulator {
namespace {

// mma.sync: the registers of a lane come from global memory, register i of lane t from word
// 32 i + t: those of A, of B, then those of the sums.

constexpr int kMmaRows = 16;
constexpr int kMmaColumns = 8;
constexpr int kMmaSums = 4;

struct Mma {
  Type type;
  int depth;

  int steps() const { return depth / 8; }
  int operands() const { return 3 * steps(); }  ///< registers of A and B
};

std::string mma_kernel(const Mma& mma) {
  std::string text = R"(.visible .entry test(.param .u64 words, .param .u64 out) {
.reg .b32 %r<30>;
.reg .f32 %f<30>;
.reg .b64 %rd<10>;
ld.param.u64 %rd1, [words];
ld.param.u64 %rd2, [out];
mov.u32 %r29, %tid.x;
mul.wide.u32 %rd3, %r29, 4;
add.s64 %rd1, %rd1, %rd3;
add.s64 %rd2, %rd2, %rd3;
)";
  for (int i = 0; i < mma.operands() + kMmaSums; ++i) {
    const bool is_sum = i >= mma.operands();
    text += "ld.global.b32 " + std::string(is_sum ? "%f" : "%r") + std::to_string(i) + ", [%rd1+" +
            std::to_string(128 * i) + "];\n";
  }
  const std::string sums = registers("%f", mma.operands(), kMmaSums);
  const std::string type = mma.type.name;
  text += "mma.sync.aligned.m16n8k" + std::to_string(mma.depth) + ".row.col.f32." + type + "." +
          type + ".f32 " + sums + ", " + registers("%r", 0, 2 * mma.steps()) + ", " +
          registers("%r", 2 * mma.steps(), mma.steps()) + ", " + sums + ";\n";
  for (int i = 0; i < kMmaSums; ++i) {
    text += "st.global.f32 [%rd2+" + std::to_string(128 * i) + "], %f" +
            std::to_string(mma.operands() + i) + ";\n";
  }
  return text + "ret;\n}\n";
}

/// Adds element k of row `row` of A or of column `row` of B to the words of its fragment.
void add_element(const Mma& mma, int first_register, int row, int k, float value,
                 std::vector<std::uint32_t>* words) {
  const int lane = row % 8 * 4 + k % 8 / 2;
  (*words)[first_register * kLanes + lane] |= bits_of(mma.type.type, value) << (16 * (k % 2));
}

/// The element of the sums that register i of a lane has.
int index_of_sum(int i, int lane) {
  return (i / 2 * 8 + lane / 4) * kMmaColumns + lane % 4 * 2 + i % 2;
}

void expect_mma(const Mma& mma) {
  std::mt19937 random(3);
  const std::vector<float> a = random_matrix(kMmaRows, mma.depth, random);
  const std::vector<float> b = random_matrix(kMmaColumns, mma.depth, random);
  const std::vector<float> c = random_matrix(kMmaRows, kMmaColumns, random);
  const std::vector<float> expected = reference(a, b, kMmaColumns, mma.depth, 1, c);
  std::vector<std::uint32_t> words((mma.operands() + kMmaSums) * kLanes, 0);
  for (int k = 0; k < mma.depth; ++k) {
    for (int r = 0; r < kMmaRows; ++r) {
      add_element(mma, k / 8 * 2 + r / 8, r, k, a[r * mma.depth + k], &words);
    }
    for (int n = 0; n < kMmaColumns; ++n) {
      add_element(mma, 2 * mma.steps() + k / 8, n, k, b[n * mma.depth + k], &words);
    }
  }
  std::vector<float> wanted(kMmaSums * kLanes);
  for (int i = 0; i < kMmaSums * kLanes; ++i) {
    const int at = index_of_sum(i / kLanes, i % kLanes);
    words[mma.operands() * kLanes + i] = std::bit_cast<std::uint32_t>(c[at]);
    wanted[i] = expected[at];
  }
  Arrays memory;
  const std::uint32_t* in = memory.add(words);
  float* out = memory.add(std::vector<float>(wanted.size()));
  run_kernel(mma_kernel(mma), {}, memory, {word_of(in), word_of(out)});
  EXPECT_EQ(std::vector<float>(out, out + wanted.size()), wanted) << mma.type.name << mma.depth;
}

TEST(Mma, MatchesItsDefinition) {
  for (const Type& type : {kBF16, kF16}) {
    for (const int depth : {8, 16}) expect_mma({type, depth});
  }
}

// ldmatrix and stmatrix. Element (row, column) of matrix m is 100 m + 8 row + column.

int element_of(int matrix, int row, int column) { return 100 * matrix + 8 * row + column; }

/// What lane `lane` holds of matrix `matrix`.
std::uint32_t fragment_word(int matrix, int lane, bool transposed) {
  const int row = lane / 4;
  const int column = lane % 4 * 2;
  const int low = transposed ? element_of(matrix, column, row) : element_of(matrix, row, column);
  const int high =
      transposed ? element_of(matrix, column + 1, row) : element_of(matrix, row, column + 1);
  return static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
}

std::uint32_t word_in_memory(int matrix, int row, int word) {
  return static_cast<std::uint32_t>(element_of(matrix, row, 2 * word)) |
         static_cast<std::uint32_t>(element_of(matrix, row, 2 * word + 1)) << 16;
}

/// Copies 512 bytes of `in` to shared memory, sets %r3 to the address of the lane's matrix row and
/// %r10 to %r13 to words 32 i + lane of `in`; after `body` the same registers, then shared memory,
/// go to `out`.
std::string matrix_kernel(const std::string& body) {
  std::string text = R"(.visible .entry test(.param .u64 out, .param .u64 in) {
.reg .b32 %r<30>;
.reg .b64 %rd<10>;
.shared .align 16 .b8 box[512];
ld.param.u64 %rd1, [out];
ld.param.u64 %rd2, [in];
mov.u32 %r1, %tid.x;
mov.u32 %r2, box;
shl.b32 %r4, %r1, 4;
add.s32 %r3, %r2, %r4;
shl.b32 %r5, %r1, 2;
add.s32 %r5, %r5, %r2;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd1, %rd1, %rd3;
add.s64 %rd2, %rd2, %rd3;
)";
  const auto at = [](int i) { return std::to_string(128 * i); };
  for (int i = 0; i < 4; ++i) {
    const std::string name = "%r" + std::to_string(10 + i);
    text += "ld.global.u32 " + name + ", [%rd2+" + at(i) + "];\nst.shared.u32 [%r5+" + at(i) +
            "], " + name + ";\n";
  }
  text += "bar.sync 0;\n" + body + "bar.sync 0;\n";
  for (int i = 0; i < 4; ++i) {
    text += "st.global.u32 [%rd1+" + at(i) + "], %r" + std::to_string(10 + i) + ";\n";
    text +=
        "ld.shared.u32 %r20, [%r5+" + at(i) + "];\nst.global.u32 [%rd1+" + at(4 + i) + "], %r20;\n";
  }
  return text + "ret;\n}\n";
}

using Words = std::vector<std::uint32_t>;

Words run_matrices(const std::string& body, const Words& in) {
  Arrays memory;
  const std::uint32_t* source = memory.add(in);
  std::uint32_t* out = memory.add(Words(256));
  run_kernel(matrix_kernel(body), {}, memory, {word_of(out), word_of(source)});
  return {out, out + 256};
}

TEST(Matrices, Loads) {
  Words in;
  for (int i = 0; i < 128; ++i) in.push_back(word_in_memory(i / 32, i / 4 % 8, i % 4));
  for (const int count : {1, 2, 4}) {
    for (const bool transposed : {false, true}) {
      const std::string name = "ldmatrix.sync.aligned.m8n8.x" + std::to_string(count) +
                               (transposed ? ".trans" : "") + ".shared.b16 ";
      const Words out = run_matrices(name + registers("%r", 10, count) + ", [%r3];\n", in);
      for (int m = 0; m < 4; ++m) {
        for (int lane = 0; lane < kLanes; ++lane) {
          const int i = 32 * m + lane;
          EXPECT_EQ(out[i], m < count ? fragment_word(m, lane, transposed) : in[i]) << name << i;
        }
      }
    }
  }
}

TEST(Matrices, Stores) {
  for (const int count : {1, 2, 4}) {
    for (const bool transposed : {false, true}) {
      Words in;
      for (int i = 0; i < 128; ++i) in.push_back(fragment_word(i / 32, i % 32, transposed));
      const std::string name = "stmatrix.sync.aligned.m8n8.x" + std::to_string(count) +
                               (transposed ? ".trans" : "") + ".shared.b16 ";
      const Words out = run_matrices(name + "[%r3], " + registers("%r", 10, count) + ";\n", in);
      for (int i = 0; i < 128; ++i) {
        const std::uint32_t stored = word_in_memory(i / 32, i / 4 % 8, i % 4);
        EXPECT_EQ(out[128 + i], i / 32 < count ? stored : in[i]) << name << i;
      }
    }
  }
}

/// A load may replace its own address.
TEST(Matrices, TheAddressMayBeATarget) {
  Words in;
  for (int i = 0; i < 128; ++i) in.push_back(word_in_memory(i / 32, i / 4 % 8, i % 4));
  const Words out = run_matrices(
      "mov.u32 %r10, %r3;\n"
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r10];\n",
      in);
  for (int i = 0; i < 128; ++i) EXPECT_EQ(out[i], fragment_word(i / 32, i % 32, false));
}

}  // namespace
}  // namespace sonicmoe::emulator
