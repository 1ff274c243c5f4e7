#include "cpu/moe_layer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/fp8_layout.h"
#include "cpu/backend.h"
#include "cpu/fp8.h"
#include "cpu/low_rank.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sonicmoe::cpu {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kTokenTask = 64;

/// Divides a buffer into pieces, each at a multiple of kAlignment.
struct Carver {
  std::int64_t used = 0;
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t at = used;
    used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
};

}  // namespace

ForwardScratch forward_scratch(const Problem& p, Pass pass) {
  const std::int64_t element = dtype_bytes(p.dtype);
  const std::int64_t rows = row_capacity(p);
  Carver carver;
  ForwardScratch s;
  s.a = carver.take(rows * p.width * element);
  s.y = carver.take(p.form == RoutingForm::kGrouped ? 0 : rows * p.hidden * element);
  s.metadata = carver.take(pass == Pass::kInference ? metadata_bytes(p) : 0);
  if (p.precision == Precision::kFp8) {
    const bool codes = pass == Pass::kForward && fp8::keeps_codes(p);
    s.x = carver.take(p.tokens * p.hidden * element);
    s.weights = carver.take(restored_weights_elements(p) * element);
    s.h = carver.take(codes ? gate_factor(p.activation.kind) * rows * p.width * element : 0);
  }
  s.p = carver.take(pass == Pass::kInference ? rows * p.up_rank * element : 0);
  s.u = carver.take(rows * p.down_rank * element);
  s.factors = carver.take(rounded_factors_bytes(p));
  s.bytes = carver.used;
  return s;
}

BackwardScratch backward_scratch(const Problem& p) {
  const std::int64_t element = dtype_bytes(p.dtype);
  const std::int64_t rows = row_capacity(p);
  const std::int64_t dx_rows = p.form == RoutingForm::kGrouped ? 0 : rows * p.hidden;
  Carver carver;
  BackwardScratch s;
  s.dh = carver.take(rows * gate_factor(p.activation.kind) * p.width * element);
  s.scaled = carver.take(rows * p.width * element);
  s.dx_rows = carver.take(dx_rows * element);
  if (p.precision == Precision::kFp8) {
    const std::int64_t h = gate_factor(p.activation.kind) * rows * p.width * element;
    s.dout = carver.take(p.tokens * p.hidden * element);
    s.weights = carver.take(restored_weights_elements(p) * element);
    s.h = carver.take(fp8::keeps_codes(p) ? h : 0);
    s.dh_coded = carver.take(h);
  }
  s.q = carver.take(rows * p.down_rank * element);
  s.u = carver.take(rows * p.down_rank * element);
  s.v = carver.take(rows * p.up_rank * element);
  s.factors = carver.take(rounded_factors_bytes(p));
  s.bytes = carver.used;
  return s;
}

std::int64_t saved_p(const Problem& p) {
  Carver carver;
  carver.take(metadata_bytes(p));
  return carver.used;
}

ExpertGroups expert_groups(const Problem& p, std::int64_t most_rows, std::int32_t workers) {
  const std::int64_t row_bytes =
      (gate_factor(p.activation.kind) + 1) * p.width * dtype_bytes(p.dtype);
  return {p.experts, most_rows, row_bytes, workers};
}

RowBuffers::RowBuffers(const Problem& p, const Kernels& kernels)
    : memory_(2 * kTaskRows * std::int64_t{sizeof(double)} +
              std::max(p.hidden, p.width) * kernels.acc_bytes) {}

std::int64_t token_tasks(const Problem& p) { return (p.tokens + kTokenTask - 1) / kTokenTask; }

Sizes moe_sizes(const Problem& problem, Pass pass, const Exec&) {
  Sizes sizes;
  sizes.scratch_bytes = pass == Pass::kBackward ? backward_scratch(problem).bytes
                                                : forward_scratch(problem, pass).bytes;
  if (pass == Pass::kInference) return sizes;
  const std::int64_t rows = row_capacity(problem);
  sizes.h_bytes = fp8::keeps_codes(problem) ? fp8::kept_h_layout(problem, rows).bytes
                                            : gate_factor(problem.activation.kind) * rows *
                                                  problem.width * dtype_bytes(problem.dtype);
  sizes.saved_bytes = metadata_bytes(problem);
  if (problem.up_rank > 0) {
    sizes.saved_bytes = saved_p(problem) + rows * problem.up_rank * dtype_bytes(problem.dtype);
  }
  return sizes;
}

Tensor h_rows(const Problem& p, const Weights&, void* data) {
  return tensor3(data, p.dtype, row_capacity(p), gate_factor(p.activation.kind), p.width);
}

void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec) {
  moe_forward_on(best_isa(), problem, args, exec);
}
void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec) {
  moe_backward_on(best_isa(), problem, args, exec);
}
void grouped_gemm(const GroupedGemm& args, const Exec& exec) {
  grouped_gemm_on(best_isa(), args, exec);
}
void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec) {
  grouped_gemm_k_on(best_isa(), args, exec);
}

void prefer_large_pages(const Buffer& memory) {
#if defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kPage = 2 << 20;
  // Only the pages that lie wholly inside the buffer.
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data);
  const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const std::uintptr_t last = (begin + static_cast<std::uintptr_t>(memory.bytes)) / kPage * kPage;
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory;
#endif
}

void prefer_large_pages(const Tensor& tensor) {
  if (tensor.data == nullptr) return;
  std::int64_t extent = 1;
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0 || tensor.stride[i] < 0) return;
    extent += (tensor.shape[i] - 1) * tensor.stride[i];
  }
  prefer_large_pages(Buffer{tensor.data, extent * dtype_bytes(tensor.dtype)});
}

namespace {

// The sum of a token that has more rows than RowBuffers has scores. The rows are added in parts, in
// the same order and to the same bits as Kernels::sum_rows, with the sum in memory between the
// parts.
void sum_long_token(const TokenSum& sum, std::int64_t t, const RowBuffers& buffers) {
  const Problem& p = *sum.problem;
  const Metadata& m = *sum.metadata;
  const Kernels& k = *sum.kernels;
  std::memset(buffers.sums(), 0, static_cast<std::size_t>(p.hidden * k.acc_bytes));
  for (std::int64_t i = m.token_offsets[t]; i < m.token_offsets[t + 1]; i += kTaskRows) {
    const std::int64_t count = std::min<std::int64_t>(kTaskRows, m.token_offsets[t + 1] - i);
    for (std::int64_t j = 0; j < count; ++j) {
      buffers.scores()[j] = source_weight(p, *sum.weights, m.row_source[m.token_rows[i + j]]);
    }
    const Operand rows{sum.rows, m.token_rows, p.hidden, 1};
    k.column_sum({rows, i, count, p.hidden, buffers.scores(), buffers.sums()});
  }
  StoreTile store{.tile = {buffers.sums(), p.hidden, 1, p.hidden}};
  store.out = at_element(sum.out.data, t * sum.out.stride[0], k.element_bytes);
  store.col_stride = sum.out.stride[1];
  k.store_tile(store);
}

void sum_token(const TokenSum& sum, std::int64_t t, const RowBuffers& buffers) {
  const Problem& p = *sum.problem;
  const Metadata& m = *sum.metadata;
  const std::int32_t* rows = m.token_rows + m.token_offsets[t];
  const std::int64_t count = m.token_offsets[t + 1] - m.token_offsets[t];
  const double* weights = nullptr;
  if (sum.weights != nullptr) {
    if (count > kTaskRows) return sum_long_token(sum, t, buffers);
    for (std::int64_t i = 0; i < count; ++i) {
      buffers.scores()[i] = source_weight(p, *sum.weights, m.row_source[rows[i]]);
    }
    weights = buffers.scores();
  }
  sum.kernels->sum_rows(
      {sum.rows, p.hidden, rows, weights, count, p.hidden,
       at_element(sum.out.data, t * sum.out.stride[0], sum.kernels->element_bytes),
       sum.out.stride[1]});
}

}  // namespace

void sum_tokens(Team& team, PerWorker<RowBuffers>& buffers, const TokenSum& sum) {
  team.run(token_tasks(*sum.problem), [&](std::int64_t task, std::int32_t worker) {
    const std::int64_t end = std::min(sum.problem->tokens, (task + 1) * kTokenTask);
    for (std::int64_t t = task * kTokenTask; t < end; ++t) sum_token(sum, t, buffers[worker]);
  });
}

void zero_unowned(const Problem& problem, const Kernels& kernels, const Metadata& metadata,
                  const Tensor& out) {
  for (std::int64_t t = 0; t < problem.tokens; ++t) {
    if (metadata.token_offsets[t] != metadata.token_offsets[t + 1]) continue;
    kernels.sum_rows({nullptr, 0, nullptr, nullptr, 0, problem.hidden,
                      at_element(out.data, t * out.stride[0], kernels.element_bytes),
                      out.stride[1]});
  }
}

void load_scores(const Problem& problem, const Metadata& metadata, const Tensor& weights,
                 std::int64_t begin, std::int64_t end, double* out) {
  for (std::int64_t p = begin; p < end; ++p) {
    out[p - begin] = source_weight(problem, weights, metadata.row_source[p]);
  }
}

}  // namespace sonicmoe::cpu
