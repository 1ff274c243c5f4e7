// One case of a grouped GEMM: two calls, with other bytes in the output before the second one.
#include <algorithm>
#include <limits>

#include "verify/caller.h"
#include "verify/convert.h"
#include "verify/inputs.h"
#include "verify/oracle_gemm.h"

namespace sonicmoe::verify {
namespace {

using oracle::Matrix;
using oracle::Precision;

// Sizes of a case. With a gather index, the R rows come from R/3 rows of a, so that each is read
// about three times.
struct Shape {
  std::int64_t experts, rows, source_rows, left, right;
  std::vector<std::int64_t> offsets;
};

Shape shape_of(const Case& c) {
  const Problem& p = c.problem;
  Shape s{p.experts, p.tokens, p.tokens, p.hidden, p.width, {0}};
  for (const std::int64_t count : c.counts) s.offsets.push_back(s.offsets.back() + count);
  if (c.gather) s.source_rows = std::max<std::int64_t>(1, s.rows / 3);
  if (c.out_of_range) {
    s.offsets.front() = std::numeric_limits<std::int64_t>::min();
    s.offsets.back() = std::numeric_limits<std::int64_t>::max();
  }
  return s;
}

std::vector<std::int64_t> gathered_rows(const Case& c, const Shape& s) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(s.rows));
  for (std::int64_t p = 0; p < s.rows; ++p) {
    order[p] = p * 7919 % s.source_rows;
    if (c.out_of_range && p % 5 == 1) order[p] = -1 - p;
    if (c.out_of_range && p % 5 == 3) order[p] = s.source_rows + p;
  }
  return order;
}

Expected expect(const BlockView& d, std::int64_t group_rows, Matrix<double> exact,
                Matrix<double> same) {
  oracle::round_all(d.view.dtype, same.values);
  return {"d", d, std::move(exact), std::move(same), group_rows};
}

void run_twice(Caller& caller, const Expected& expected, Block* scratch,
               const std::function<void()>& run) {
  const std::vector<Expected> outputs = {expected};
  std::vector<Block*> buffers;
  if (scratch != nullptr) buffers.push_back(scratch);
  caller.call({"the grouped GEMM", kPoison, buffers, {}}, outputs, run);
  caller.judge(outputs, kPoison);
  const Caller::Bits bits = Caller::bits(outputs);
  caller.call({"the grouped GEMM", kOtherPoison, buffers, {}}, outputs, run);
  Caller::require_same(bits, outputs, "a call on other bytes");
}

}  // namespace

void run_grouped_gemm(const Case& c, const Implementation& implementation, CaseResult& result) {
  const Shape s = shape_of(c);
  const DType dtype = c.problem.dtype;
  Caller caller(c, implementation, result);
  Blocks& blocks = caller.blocks();
  const bool over_k = c.subject == Subject::kGroupedGemmK;
  const auto rows = [&](const char* what, std::int64_t count, std::int64_t cols) {
    return blocks.add_view(what, laid_out(c.layout, dtype, {count, cols}));
  };
  const auto experts = [&](const char* what, std::int64_t m, std::int64_t n) {
    return add_expert_matrices(c, what, dtype, {s.experts, m, n}, blocks);
  };
  const BlockView a = rows("a", s.source_rows, s.left);
  const BlockView b = over_k ? rows("b", s.rows, s.right) : experts("b", s.right, s.left);
  BlockView d = over_k ? experts("d", s.left, s.right) : rows("d", s.rows, s.right);
  const BlockView offsets =
      add_integers("offsets", tensor1(nullptr, DType::kI64, s.experts + 1), s.offsets, blocks);
  BlockView gather;
  if (c.gather) {
    gather =
        add_integers("gather", tensor1(nullptr, DType::kI32, s.rows), gathered_rows(c, s), blocks);
  }
  fill_operands(c, a, b);
  Block* scratch = nullptr;
  if (implementation.grouped_gemm_scratch) {
    const std::int64_t bytes = implementation.grouped_gemm_scratch(s.rows, s.experts);
    if (bytes > 0) scratch = &blocks.add("scratch of the grouped GEMM", bytes);
  }
  const auto bound = [&]<class Args>(Tensor (BlockView::*where)() const) {
    Args args{(a.*where)(), (b.*where)(), (d.*where)(), (offsets.*where)(), (gather.*where)(), {}};
    if (scratch != nullptr) args.scratch = {scratch->device(), scratch->bytes()};
    return args;
  };
  if (over_k) {
    const auto host = bound.template operator()<GroupedGemmK>(&BlockView::on_host);
    const auto device = bound.template operator()<GroupedGemmK>(&BlockView::on_device);
    run_twice(caller,
              expect(d, s.left, oracle::grouped_gemm_k(host, Precision::kExact),
                     oracle::grouped_gemm_k(host, Precision::kSame)),
              scratch, [&] { implementation.grouped_gemm_k(device); });
  } else {
    const auto host = bound.template operator()<GroupedGemm>(&BlockView::on_host);
    const auto device = bound.template operator()<GroupedGemm>(&BlockView::on_device);
    d.view.shape[0] =
        std::min(s.offsets.back(), s.rows);  // rows past offsets[E] must stay unchanged
    run_twice(caller,
              expect(d, d.view.shape[0], oracle::grouped_gemm(host, Precision::kExact),
                     oracle::grouped_gemm(host, Precision::kSame)),
              scratch, [&] { implementation.grouped_gemm(device); });
  }
}

}  // namespace sonicmoe::verify
