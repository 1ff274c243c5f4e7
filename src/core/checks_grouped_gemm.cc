// The checks of the grouped GEMM.
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe::checks {
namespace {

void extent(const Tensor& t, const char* name, std::int32_t dim, std::int64_t least) {
  if (t.shape[dim] < least) {
    refuse(std::string(name) + " has extent " + std::to_string(t.shape[dim]) + " in dimension " +
           std::to_string(dim) + ", must be at least " + std::to_string(least));
  }
}

void rows_and_gather(const Tensor& a, std::int64_t rows, const Tensor& gather) {
  below_2_31("R", rows);
  below_2_31("the number of rows of a", a.shape[0]);
  // An index list without entries may come without memory.
  const bool empty = gather.rank == 1 && gather.shape[0] == 0;
  if (given(gather) || empty) {
    input(gather, "gather", {{"R", rows}}, DType::kI32);
  } else if (a.shape[0] != rows) {
    refuse("a has " + std::to_string(a.shape[0]) + " rows, must have R = " + std::to_string(rows) +
           " when gather is not given");
  }
}

}  // namespace

void grouped_gemm_sizes(std::int64_t rows, std::int64_t experts, const Exec& e) {
  exec(e);
  at_least("rows", rows, 0);
  at_least("experts", experts, 1);
  below_2_31("rows", rows);
  below_2_31("experts", experts);
}

void grouped_gemm(const GroupedGemm& args, const Exec& e) {
  exec(e);
  rank(args.a, "a", "(rows, k)", 2);
  rank(args.b, "b", "(E, n, k)", 3);
  rank(args.d, "d", "(R, n)", 2);
  extent(args.a, "a", 0, 0);
  extent(args.d, "d", 0, 0);
  for (std::int32_t dim = 0; dim < 3; ++dim) extent(args.b, "b", dim, 1);
  const Dim E{"E", args.b.shape[0]}, n{"n", args.b.shape[1]}, k{"k", args.b.shape[2]};
  below_2_31("E", E.size);
  input(args.a, "a", {{"rows", args.a.shape[0]}, k}, kFloats);
  input(args.b, "b", {E, n, k}, args.a.dtype);
  input(args.offsets, "offsets", {{"E+1", E.size + 1}}, DType::kI64);
  rows_and_gather(args.a, args.d.shape[0], args.gather);
  output(args.d, "d", {{"R", args.d.shape[0]}, n}, args.a.dtype);
}

void grouped_gemm_k(const GroupedGemmK& args, const Exec& e) {
  exec(e);
  rank(args.a, "a", "(rows, m)", 2);
  rank(args.b, "b", "(R, n)", 2);
  rank(args.d, "d", "(E, m, n)", 3);
  extent(args.a, "a", 0, 0);
  extent(args.b, "b", 0, 0);
  for (std::int32_t dim = 0; dim < 3; ++dim) extent(args.d, "d", dim, 1);
  const Dim E{"E", args.d.shape[0]}, m{"m", args.d.shape[1]}, n{"n", args.d.shape[2]};
  below_2_31("E", E.size);
  input(args.a, "a", {{"rows", args.a.shape[0]}, m}, kFloats);
  input(args.b, "b", {{"R", args.b.shape[0]}, n}, args.a.dtype);
  input(args.offsets, "offsets", {{"E+1", E.size + 1}}, DType::kI64);
  rows_and_gather(args.a, args.b.shape[0], args.gather);
  output(args.d, "d", {E, m, n}, args.a.dtype);
}

}  // namespace sonicmoe::checks
