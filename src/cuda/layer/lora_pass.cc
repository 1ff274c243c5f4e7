// The factors that a pass reads: the caller's, or copies that products can load.
#include <utility>

#include "cuda/layer/lora.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {
namespace {

bool has(const Tensor& t) { return t.data != nullptr; }
bool is_coded(const Problem& p) { return p.precision == Precision::kFp8; }

/// Whether a product can load the factor (E, rows, columns) by TMA without a copy. With `last` its
/// columns must be contiguous, without it its rows.
bool is_usable(const Tensor& t, DType dtype, bool last) {
  const std::int64_t other = last ? t.stride[1] : t.stride[2];
  return t.dtype == dtype && t.stride[last ? 2 : 1] == 1 && other > 0 && other % 8 == 0 &&
         t.stride[0] % 8 == 0 && (t.stride[0] > 0 || t.shape[0] == 1) &&
         reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
}

/// (E, rows, columns) at `data`, in the order of is_usable().
Tensor factor_at(void* data, DType dtype, const Tensor& like, bool last) {
  if (last) return tensor3(data, dtype, like.shape[0], like.shape[1], like.shape[2]);
  return transposed(tensor3(data, dtype, like.shape[0], like.shape[2], like.shape[1]));
}

/// Replaces a factor by a copy at `data` unless products can read it.
void make_usable(Tensor& factor, DType dtype, bool last, void* data, CopyFactors& copies) {
  if (!has(factor) || is_usable(factor, dtype, last)) return;
  const Tensor to = factor_at(data, dtype, factor, last);
  copies.add(factor, to);
  factor = to;
}

/// The same for both parts of B of the up-projection: in a copy they lie as gate and up in H.
void make_usable(LowRank& up, DType dtype, GateLayout layout, bool last, void* data,
                 CopyFactors& copies) {
  const bool interleaved = layout == GateLayout::kInterleaved;
  if (layout == GateLayout::kNone) {
    make_usable(up.b, dtype, last, data, copies);
    return;
  }
  if (interleaved
          ? is_interleaved(up.gate_b, up.b) && is_usable(interleaved_rows(up.gate_b), dtype, last)
          : is_usable(up.gate_b, dtype, last) && is_usable(up.b, dtype, last)) {
    return;
  }
  Tensor both = up.b;
  both.shape[1] *= 2;
  Tensor gate = factor_at(data, dtype, both, last);
  const std::int64_t apart = interleaved ? gate.stride[1] : gate.stride[1] * up.b.shape[1];
  if (interleaved) gate.stride[1] *= 2;
  gate.shape[1] /= 2;
  Tensor next = gate;
  next.data = static_cast<std::byte*>(data) + apart * dtype_bytes(dtype);
  copies.add(up.gate_b, gate);
  copies.add(up.b, next);
  up.gate_b = gate;
  up.b = next;
}

/// The same for the factor (E, columns, r) of a term of codes whose columns are those of H or A: in
/// a copy each expert has whole blocks of columns, and those past the true ones are 0.
void make_whole(Tensor& factor, DType dtype, void* data, CopyFactors& copies) {
  if (!has(factor)) return;
  const std::int64_t columns = factor.shape[1];
  const std::int64_t whole = fp8::whole_blocks(columns);
  if (is_usable(factor, dtype, true) && columns == whole &&
      factor.stride[0] % (kScaleBlock * factor.stride[1]) == 0) {
    return;
  }
  Tensor to = tensor3(data, dtype, factor.shape[0], whole, factor.shape[2]);
  copies.add(factor, to);
  to.shape[1] = columns;
  factor = to;
}

/// n in the copies of factors.
std::int64_t copied_width(const Problem& p) {
  return is_coded(p) ? fp8::whole_blocks(p.width) : p.width;
}

/// The memory of the copies (LoraScratch::factors).
struct CopyMemory {
  std::byte* up_a;
  std::byte* down_a;
  std::byte* down_b;
  std::byte* up_gate_b;  ///< where gate and up are one copy, of both
  std::byte* up_b;

  CopyMemory(const Problem& p, void* data) {
    auto* at = static_cast<std::byte*>(data);
    const auto take = [&](std::int64_t rank, std::int64_t width) {
      return std::exchange(at, at + p.experts * rank * width * dtype_bytes(p.dtype));
    };
    up_a = take(p.up_rank, p.hidden);
    down_a = take(p.down_rank, copied_width(p));
    down_b = take(p.down_rank, p.hidden);
    up_gate_b = take(p.up_rank, is_gated(p.activation.kind) ? copied_width(p) : 0);
    up_b = at;
  }
};

/// For products of elements. A term has the order of the weights, and so has the factor of the
/// narrow product beside it.
void make_usable(const Problem& p, const Weights& weights, const CopyMemory& memory,
                 LoraPass& pass) {
  LowRank& up = pass.factors.up;
  LowRank& down = pass.factors.down;
  const bool up_last = weights.up.stride[2] == 1;
  const bool down_last = weights.down.stride[2] == 1;
  make_usable(up.a, p.dtype, up_last, memory.up_a, pass.copies);
  make_usable(down.a, p.dtype, down_last, memory.down_a, pass.copies);
  make_usable(down.b, p.dtype, down_last, memory.down_b, pass.copies);
  if (p.up_rank == 0) return;
  make_usable(up, p.dtype, gate_layout(p, weights), up_last, memory.up_gate_b, pass.copies);
}

/// For products of codes: r is contiguous in a factor of a term, and a factor of a narrow product
/// alone keeps its order.
void make_usable_for_codes(const Problem& p, const Weights& weights, Pass of,
                           const CopyMemory& memory, LoraPass& pass) {
  LowRank& up = pass.factors.up;
  LowRank& down = pass.factors.down;
  CopyFactors& copies = pass.copies;
  const auto last = [](const Tensor& t) { return t.stride[2] == 1; };
  if (of != Pass::kBackward) {
    make_usable(up.a, p.dtype, last(up.a), memory.up_a, copies);
    make_usable(down.a, p.dtype, last(down.a), memory.down_a, copies);
    make_usable(down.b, p.dtype, true, memory.down_b, copies);
    make_whole(up.gate_b, p.dtype, memory.up_gate_b, copies);
    make_whole(up.b, p.dtype, memory.up_b, copies);
    return;
  }
  make_usable(up.a, p.dtype, false, memory.up_a, copies);
  make_usable(down.b, p.dtype, last(down.b), memory.down_b, copies);
  Tensor outer = transposed(down.a);
  make_whole(outer, p.dtype, memory.down_a, copies);
  down.a = transposed(outer);
  if (p.up_rank == 0) return;
  make_usable(up, p.dtype, gate_layout(p, weights), last(up.b), memory.up_gate_b, copies);
}

Tensor rows_at(const Problem& p, void* data, std::int64_t rank) {
  return rank == 0 ? Tensor{} : tensor2(data, p.dtype, row_capacity(p), rank);
}

std::optional<LowRankTerm> term_of(const Tensor& inner, const Tensor& outer) {
  if (!has(inner)) return {};
  return LowRankTerm{inner, {outer, {}}};
}

}  // namespace

LoraScratch take_lora_scratch(const Problem& p, Pass pass, Carver<256>& carver) {
  const std::int64_t element = dtype_bytes(p.dtype);
  const auto rows = [&](std::int64_t rank) {
    return carver.take<std::byte>(row_capacity(p) * rank * element);
  };
  LoraScratch s{};
  s.pass = pass;
  if (p.up_rank == 0 && p.down_rank == 0) return s;
  if (pass == Pass::kInference) s.p = rows(p.up_rank);
  s.u = rows(p.down_rank);
  if (pass == Pass::kBackward) {
    s.q = rows(p.down_rank);
    s.v = rows(p.up_rank);
  }
  const std::int64_t up = p.hidden + gate_factor(p.activation.kind) * copied_width(p);
  s.factors = carver.take<std::byte>(p.experts * element *
                                     (p.up_rank * up + p.down_rank * (p.hidden + copied_width(p))));
  return s;
}

std::int64_t saved_bytes(const Problem& p) {
  const std::int64_t metadata = metadata_layout(p, nullptr).bytes;
  if (p.up_rank == 0) return metadata;
  return (metadata + 255) / 256 * 256 + row_capacity(p) * p.up_rank * dtype_bytes(p.dtype);
}

void* saved_p(const Problem& p, void* saved) {
  return static_cast<std::byte*>(saved) + (metadata_layout(p, nullptr).bytes + 255) / 256 * 256;
}

LoraPass lora_pass(const Problem& p, const Weights& weights, const Lora& lora,
                   const LoraScratch& scratch, void* kept, unsigned* counters) {
  LoraPass out{};
  out.counters = counters;
  if (p.up_rank == 0 && p.down_rank == 0) return out;
  out.factors = lora;
  out.p = rows_at(p, kept, p.up_rank);
  out.u = rows_at(p, scratch.u, p.down_rank);
  out.q = rows_at(p, scratch.q, p.down_rank);
  out.v = rows_at(p, scratch.v, p.up_rank);
  const CopyMemory memory(p, scratch.factors);
  if (is_coded(p)) {
    make_usable_for_codes(p, weights, scratch.pass, memory, out);
  } else {
    make_usable(p, weights, memory, out);
  }
  return out;
}

std::optional<LowRankTerm> up_term(const Problem& p, const LoraPass& lora) {
  if (!has(lora.p)) return {};
  const LowRank& up = lora.factors.up;
  if (is_coded(p)) {
    return is_gated(p.activation.kind) ? LowRankTerm{lora.p, {up.gate_b, up.b}}
                                       : LowRankTerm{lora.p, {up.b, {}}};
  }
  const WeightOperand outer = up_operand(p, {.gate = up.gate_b, .up = up.b});
  return LowRankTerm{lora.p, {outer.first, outer.second}};
}

std::optional<LowRankTerm> down_term(const LoraPass& lora) {
  return term_of(lora.u, lora.factors.down.b);
}
std::optional<LowRankTerm> hidden_grad_term(const LoraPass& lora) {
  return term_of(lora.q, transposed(lora.factors.down.a));
}
std::optional<LowRankTerm> input_grad_term(const LoraPass& lora) {
  return term_of(lora.v, transposed(lora.factors.up.a));
}

}  // namespace sonicmoe::cuda
