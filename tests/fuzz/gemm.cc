// Both grouped GEMMs, with offsets and row indices of any value, against the oracle.
#include "fuzz/world.h"
#include "verify/implementation.h"

namespace sonicmoe::fuzz {
namespace {

// Offsets of any value that do not make ranges overlap, unless `wild`.
void fill_offsets(Random& random, std::int64_t rows, bool wild, Arg& offsets) {
  std::int64_t last = random.in(-3, 3);
  for (std::int64_t& o : offsets.integers) {
    o = wild ? random.pick<std::int64_t>({INT64_MIN, -1, 0, 3, rows, rows + 7, INT64_MAX}) : last;
    last += random.in(0, 4);
  }
}

}  // namespace

void fuzz_gemm(World& w) {
  Random& r = w.random;
  const bool over_k = r.percent(50), gathers = r.percent(60), wild = over_k && r.percent(30);
  const std::int64_t E = r.in(1, 4), R = r.in(0, 12), left = r.in(1, 20), right = r.in(1, 20);
  const std::int64_t source = gathers ? r.in(0, 6) : R;
  const auto dtype = static_cast<std::int32_t>(r.in(0, 3));
  Arg& a = w.tensor("a", Access::kRead, dtype, {source, left});
  Arg& b = over_k ? w.tensor("b", Access::kRead, dtype, {R, right})
                  : w.tensor("b", Access::kRead, dtype, {E, right, left});
  Arg& d = over_k ? w.tensor("d", Access::kWritten, dtype, {E, left, right})
                  : w.tensor("d", Access::kWritten, dtype, {R, right});
  Arg& offsets = w.index("offsets", SMOE_I64, {E + 1}, 0, 0);
  fill_offsets(r, R, wild, offsets);
  offsets.c.tensor.stride[0] = r.pick({1, 2, -1});
  Arg* gather = gathers ? &w.index("gather", SMOE_I32, {R}, -2, source + 1) : nullptr;
  smoe_grouped_gemm_args args{};
  args.size = sizeof(args);
  w.begin_exec();
  w.size_field("args.size", &args.size);
  w.spoil(60);
  w.place();
  args.a = a.pointer();
  args.b = b.pointer();
  args.d = d.pointer();
  args.offsets = offsets.pointer();
  args.gather = gather == nullptr ? nullptr : gather->pointer();
  const Tensor want = w.spoilt() ? Tensor{} : w.expected(d);
  const auto call = over_k ? &smoe_grouped_gemm_k : &smoe_grouped_gemm;
  if (!w.call([&] { return call(&args, w.exec_pointer()); }) || want.data == nullptr) return;
  if (source == 0 && !over_k) return;  // nothing is written, which call() has seen
  const Tensor index = gather == nullptr ? Tensor{} : gather->view();
  const verify::Implementation oracle = verify::oracle_implementation(oracle::Precision::kSame);
  if (over_k && source > 0) {
    oracle.grouped_gemm_k({a.view(), b.view(), want, offsets.view(), index, {}});
    w.compare(d, want);
  } else if (!over_k) {
    // The oracle writes zeros to the rows before the first offset; the library leaves them alone.
    if (offsets.integers.front() > 0) return;
    oracle.grouped_gemm({a.view(), b.view(), want, offsets.view(), index, {}});
    w.compare(d, want);
  }
}

}  // namespace sonicmoe::fuzz
