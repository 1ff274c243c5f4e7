#include "cuda/layer/checks.h"

#include <string>

#include "core/checks.h"
#include "cuda/layer/lora.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kMaxExperts = 1024;
constexpr std::int64_t kMaxRowStride = std::int64_t{1} << 30;
constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - (std::int64_t{1} << 18);
/// The FP8 kernels gather rows of X and of dO, (tokens, hidden) codes of one byte. They address
/// them by 32-bit offsets in units of 16 bytes (Fp8GatherParams), which reach 64 GiB. All other
/// arrays of codes are addressed by 64-bit offsets or by TMA.
constexpr std::int64_t kMaxGatheredCodes = (std::int64_t{1} << 32) * 16;

[[noreturn]] void refuse(const std::string& sentence) {
  checks::refuse(Status::kUnsupported, sentence);
}

std::string too_many_rows(const char* name, std::int64_t rows) {
  if (rows <= kMaxRows) return {};
  return std::string(name) + " is " + std::to_string(rows) + ", must be at most " +
         std::to_string(kMaxRows) + " on CUDA";
}

std::string too_many_codes(const Problem& p) {
  const std::int64_t codes = p.tokens * fp8::whole_blocks(p.hidden);
  if (p.precision != Precision::kFp8 || codes <= kMaxGatheredCodes) return {};
  const char* whole = p.hidden % fp8::kBlock == 0 ? "" : ", rounded up to a multiple of 128,";
  return std::string("tokens * hidden") + whole + " is " + std::to_string(codes) +
         ", must be at most " + std::to_string(kMaxGatheredCodes) + " for fp8 on CUDA";
}

void check_aligned(const char* name, const Tensor& t) {
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(t.data) % 16;
  if (past == 0) return;
  refuse(std::string(name) + " begins " + std::to_string(past) +
         " bytes past a multiple of 16, must be aligned to 16 bytes on CUDA");
}

}  // namespace

void check_matrices(const char* name, const Tensor& t) {
  check_aligned(name, t);
  const bool last = t.stride[2] == 1;
  const bool middle = t.stride[1] == 1;
  const std::int64_t other = last ? t.stride[1] : t.stride[2];
  if (!last && !middle) {
    refuse(std::string(name) + " has strides " + std::to_string(t.stride[1]) + " and " +
           std::to_string(t.stride[2]) + ", one of the two must be 1 on CUDA");
  }
  if (other <= 0 || other % 8 != 0 || (t.shape[0] > 1 && (t.stride[0] <= 0 || t.stride[0] % 8))) {
    refuse(std::string(name) + " has strides " + std::to_string(t.stride[0]) + " and " +
           std::to_string(other) + ", must be positive multiples of 8 on CUDA");
  }
}

// fp32 gradients are stored element by element.
void check_grad(const char* name, const Tensor& t) {
  if (t.data != nullptr && t.dtype != DType::kF32) check_matrices(name, t);
}

namespace {

/// Checks the gradients of interleaved gate and up. The columns of dH alternate, so 16-bit
/// gradients must alternate too.
void check_interleaved_grads(const Weights& grads) {
  const Tensor& gate = grads.gate;
  const Tensor& up = grads.up;
  const bool absent = gate.data == nullptr || up.data == nullptr;
  const bool floats = (gate.data == nullptr || gate.dtype == DType::kF32) &&
                      (up.data == nullptr || up.dtype == DType::kF32);
  if (floats) return;
  if (absent || !is_interleaved(gate, up)) {
    refuse("grads.gate has strides " + std::to_string(gate.stride[1]) + " and " +
           std::to_string(gate.stride[2]) + " and grads.up " + std::to_string(up.stride[1]) +
           " and " + std::to_string(up.stride[2]) +
           ", must alternate along n as the weights do, or be fp32, on CUDA");
  }
  check_matrices("grads.gate", interleaved_rows(gate));
}

}  // namespace

std::string refusal(const Problem& p, const Engine& engine) {
  const Service& service = engine.service;
  if (!service.dtypes.contains(p.dtype)) {
    return std::string("dtype is ") + dtype_name(p.dtype) + ", must be " + service.dtypes.text() +
           " on CUDA";
  }
  if (p.precision == Precision::kFp8 && engine.quantizers == nullptr) {
    return std::string("precision is fp8, must be tensors: the engine ") + engine.name +
           " has no FP8, which needs the engine hopper (H100, H200) or blackwell (B200, B300)";
  }
  const bool has_factors = p.up_rank != 0 || p.down_rank != 0;
  if (p.precision == Precision::kFp8 && has_factors && !engine.adds_factors_to_codes) {
    return std::string("precision is fp8, must be tensors with low-rank factors on the engine ") +
           engine.name;
  }
  if (p.hidden % service.multiple != 0 || p.width % service.multiple != 0) {
    return "hidden is " + std::to_string(p.hidden) + " and width " + std::to_string(p.width) +
           ", must be multiples of " + std::to_string(service.multiple) + " on CUDA";
  }
  if (p.experts > kMaxExperts) {
    return "experts is " + std::to_string(p.experts) + ", must be at most " +
           std::to_string(kMaxExperts) + " on CUDA";
  }
  if (std::string sentence = lora_refusal(p); !sentence.empty()) return sentence;
  const std::string sentence = too_many_rows("row capacity C", checks::rows(p));
  return sentence.empty() ? too_many_codes(p) : sentence;
}

void check_problem(const Problem& problem, const Engine& engine) {
  const std::string sentence = refusal(problem, engine);
  if (!sentence.empty()) refuse(sentence);
}

void check_product(const char* name, DType dtype, std::initializer_list<std::int64_t> extents,
                   const Engine& engine) {
  const Service& service = engine.service;
  if (!service.dtypes.contains(dtype)) {
    refuse(std::string(name) + " is " + dtype_name(dtype) + ", must be " + service.dtypes.text() +
           " on CUDA");
  }
  for (const std::int64_t extent : extents) {
    if (extent % service.multiple == 0) continue;
    refuse("an extent (k, m or n) is " + std::to_string(extent) + ", must be a multiple of " +
           std::to_string(service.multiple) + " on CUDA");
  }
}

void check_experts(const char* name, std::int64_t experts) {
  if (experts <= kMaxExperts) return;
  refuse(std::string(name) + " is " + std::to_string(experts) + ", must be at most " +
         std::to_string(kMaxExperts) + " on CUDA");
}

void check_row_count(const char* name, std::int64_t rows) {
  const std::string sentence = too_many_rows(name, rows);
  if (!sentence.empty()) refuse(sentence);
}

void check_rows(const char* name, const Tensor& rows) {
  check_aligned(name, rows);
  if (rows.stride[1] != 1 ||
      (rows.shape[0] > 1 &&
       (rows.stride[0] <= 0 || rows.stride[0] % 8 != 0 || rows.stride[0] >= kMaxRowStride))) {
    refuse(std::string(name) + " has strides " + std::to_string(rows.stride[0]) + " and " +
           std::to_string(rows.stride[1]) +
           ", must be a positive multiple of 8 below 2^30, and 1, on CUDA");
  }
}

void check_weights(const Problem& p, const Weights& w) {
  const bool gated = is_gated(p.activation.kind);
  check_matrices("down", w.down);
  if (gated && is_interleaved(w.gate, w.up)) {
    check_matrices("gate", interleaved_rows(w.gate));
    return;
  }
  check_matrices("up", w.up);
  if (!gated) return;
  check_matrices("gate", w.gate);
  if ((w.gate.stride[2] == 1) != (w.up.stride[2] == 1)) {
    refuse("gate has strides " + std::to_string(w.gate.stride[1]) + " and " +
           std::to_string(w.gate.stride[2]) + " and up " + std::to_string(w.up.stride[1]) +
           " and " + std::to_string(w.up.stride[2]) +
           ", must have stride 1 in the same dimension on CUDA");
  }
}

void check_grads(const Problem& p, const Weights& weights, const Weights& grads) {
  check_grad("grads.down", grads.down);
  if (is_gated(p.activation.kind) && is_interleaved(weights.gate, weights.up)) {
    check_interleaved_grads(grads);
    return;
  }
  check_grad("grads.gate", grads.gate);
  check_grad("grads.up", grads.up);
}

}  // namespace sonicmoe::cuda
