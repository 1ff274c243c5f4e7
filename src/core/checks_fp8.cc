// Argument checks of Precision::kFp8.
#include <string>

#include "core/check_tensor.h"
#include "core/checks.h"
#include "core/fp8_layout.h"

namespace sonicmoe::checks {
namespace {

constexpr std::int32_t kPrecisionCount = 2;
constexpr std::int32_t kKeptHCount = 2;

void steps_of_64(const char* name, std::int64_t value) {
  if (value % fp8::kStep == 0) return;
  refuse(Status::kUnsupported,
         std::string(name) + " is " + std::to_string(value) + ", must be a multiple of 64 for fp8");
}

}  // namespace

void precision(const Problem& p) {
  known("precision", static_cast<std::int32_t>(p.precision), kPrecisionCount);
  known("kept_h", static_cast<std::int32_t>(p.kept_h), kKeptHCount);
  if (p.precision == Precision::kTensors) return;
  if (p.dtype != DType::kBF16) {
    refuse(Status::kUnsupported,
           std::string("dtype is ") + dtype_name(p.dtype) + ", must be bf16 for fp8");
  }
  steps_of_64("hidden", p.hidden);
  steps_of_64("width", p.width);
}

void fp8_weights(const Problem& p, const Buffer& given, const Exec& exec) {
  if (p.precision == Precision::kFp8) {
    buffer(given, "fp8_weights", fp8::weights_layout(p).bytes, exec);
  } else if (given.data != nullptr) {
    refuse("fp8_weights is given, must be empty: precision is not fp8");
  }
}

}  // namespace sonicmoe::checks
