// Every refusal of the grouped GEMM, word for word.
#include "checks_fixture.h"

namespace sonicmoe::test {
namespace {

struct VarlenM {
  Memory memory;
  GroupedGemm args{memory.tensor(DType::kF16, {7, 4}), memory.tensor(DType::kF16, {3, 5, 4}),
                   memory.tensor(DType::kF16, {6, 5}), memory.tensor(DType::kI64, {4}),
                   memory.tensor(DType::kI32, {6})};
  Exec exec;
  void run() { grouped_gemm(args, exec); }
};

TEST(ChecksGemm, VarlenMRefusals) {
  expect_refusals<VarlenM>({
      {[](VarlenM& g) { g.exec.num_threads = -1; }, "num_threads is -1, must be at least 0"},
      {[](VarlenM& g) { g.args.a.rank = 1; }, "a has rank 1, must be 2: (rows, k)"},
      {[](VarlenM& g) { g.args.b.rank = 2; }, "b has rank 2, must be 3: (E, n, k)"},
      {[](VarlenM& g) { g.args.d = {}; }, "d has rank 0, must be 2: (R, n)"},
      {[](VarlenM& g) { g.args.b.shape[0] = 0; },
       "b has extent 0 in dimension 0, must be at least 1"},
      {[](VarlenM& g) { g.args.a.shape[1] = 3; }, "a has shape (7, 3), must be (rows, k) = (7, 4)"},
      {[](VarlenM& g) { g.args.a.dtype = DType::kI32; },
       "a is i32, must be f32 or bf16 or f16 or f64"},
      {[](VarlenM& g) { g.args.b.dtype = DType::kBF16; }, "b is bf16, must be f16"},
      {[](VarlenM& g) { g.args.d.dtype = DType::kF32; }, "d is f32, must be f16"},
      {[](VarlenM& g) { g.args.d.stride[0] = 4; },
       "d has strides (4, 1) for shape (6, 5), must not overlap itself because it is written"},
      {[](VarlenM& g) { g.args.offsets.shape[0] = 3; },
       "offsets has shape (3), must be (E+1) = (4)"},
      {[](VarlenM& g) { g.args.offsets.dtype = DType::kI32; }, "offsets is i32, must be i64"},
      {[](VarlenM& g) { g.args.gather.shape[0] = 7; }, "gather has shape (7), must be (R) = (6)"},
      {[](VarlenM& g) { g.args.gather.dtype = DType::kI64; }, "gather is i64, must be i32"},
      {[](VarlenM& g) { g.args.gather = {}; },
       "a has 7 rows, must have R = 6 when gather is not given"},
      {[](VarlenM& g) { g.args.d.shape[0] = 1LL << 31; }, "R is 2147483648, must be below 2^31",
       Status::kOutOfRange},
  });
}

TEST(ChecksGemm, VarlenMSizesAndMemory) {
  expect_refusals<VarlenM>({
      {[](VarlenM& g) {  // expanded: a few bytes of memory, 2^60 elements
         g.args.a.shape[1] = g.args.b.shape[2] = 1LL << 30;
         g.args.a.stride[1] = g.args.b.stride[2] = 0;
         g.args.b.shape[1] = g.args.d.shape[1] = 1LL << 30;
         g.args.b.stride[1] = 0;
       },
       "b has shape (3, 1073741824, 1073741824), must have fewer than 2^55 bytes",
       Status::kOutOfRange},
      {[](VarlenM& g) { g.args.d.data = static_cast<std::uint16_t*>(g.args.a.data) + 3; },
       "d overlaps a, must be memory of its own"},
      {[](VarlenM& g) { g.args.d.data = g.args.b.data; },
       "d overlaps b, must be memory of its own"},
      {[](VarlenM& g) { g.args.d.data = g.args.gather.data; },
       "d overlaps gather, must be memory of its own"},
      {[](VarlenM& g) { g.args.scratch = {g.args.offsets.data, 64}; },
       "scratch overlaps offsets, must be memory of its own"},
  });
}

TEST(ChecksGemm, RowsAndTheirProductsMayBeColumnsOfOneMatrix) {
  VarlenM g;
  const Tensor both = g.memory.tensor(DType::kF16, {7, 4 + 5});
  g.args.a.data = both.data;
  g.args.a.stride[0] = g.args.d.stride[0] = 4 + 5;
  g.args.d.data = static_cast<std::uint16_t*>(both.data) + 4;
  backend_calls = 0;
  g.run();
  EXPECT_EQ(backend_calls, 1);
}

TEST(ChecksGemm, AnIndexListWithoutEntriesNeedsNoMemory) {
  VarlenM g;
  g.args.d.shape[0] = 0;
  g.args.gather = tensor1(nullptr, DType::kI32, 0);
  backend_calls = 0;
  g.run();
  EXPECT_EQ(backend_calls, 1);
}

struct VarlenK {
  Memory memory;
  GroupedGemmK args{memory.tensor(DType::kF64, {7, 4}), memory.tensor(DType::kF64, {6, 5}),
                    memory.tensor(DType::kF64, {3, 4, 5}), memory.tensor(DType::kI64, {4}),
                    memory.tensor(DType::kI32, {6})};
  Exec exec;
  void run() { grouped_gemm_k(args, exec); }
};

TEST(ChecksGemm, VarlenKRefusals) {
  expect_refusals<VarlenK>({
      {[](VarlenK& g) { g.args.a.rank = 3; }, "a has rank 3, must be 2: (rows, m)"},
      {[](VarlenK& g) { g.args.b.rank = 3; }, "b has rank 3, must be 2: (R, n)"},
      {[](VarlenK& g) { g.args.d.rank = 2; }, "d has rank 2, must be 3: (E, m, n)"},
      {[](VarlenK& g) { g.args.d.shape[2] = -5; },
       "d has extent -5 in dimension 2, must be at least 1"},
      {[](VarlenK& g) { g.args.a.shape[0] = -1; },
       "a has extent -1 in dimension 0, must be at least 0"},
      {[](VarlenK& g) { g.args.a.shape[1] = 5; }, "a has shape (7, 5), must be (rows, m) = (7, 4)"},
      {[](VarlenK& g) { g.args.b.shape[1] = 4; }, "b has shape (6, 4), must be (R, n) = (6, 5)"},
      {[](VarlenK& g) { g.args.b.data = nullptr; },
       "b is null, must point to (R, n) = (6, 5) elements"},
      {[](VarlenK& g) { g.args.b.dtype = DType::kF32; }, "b is f32, must be f64"},
      {[](VarlenK& g) { g.args.d.stride[0] = 0; },
       "d has strides (0, 5, 1) for shape (3, 4, 5), must not overlap itself because it is "
       "written"},
      {[](VarlenK& g) { g.args.offsets = {}; }, "offsets has rank 0, must be 1: (E+1)"},
      {[](VarlenK& g) { g.args.gather = {}; },
       "a has 7 rows, must have R = 6 when gather is not given"},
      {[](VarlenK& g) { g.args.d.data = g.args.b.data; },
       "d overlaps b, must be memory of its own"},
  });
}

}  // namespace
}  // namespace sonicmoe::test
