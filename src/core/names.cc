// The public names of activations, dtypes and modes, from value to name and back.
#include <array>
#include <cstring>
#include <string>

#include "sonicmoe/moe.h"
#include "sonicmoe/packed.h"
#include "sonicmoe/routing.h"
#include "sonicmoe/types.h"
#include "sonicmoe/version.h"

namespace sonicmoe {
namespace {

constexpr auto kActivations = [] {
  std::array<const char*, kActivationCount> names{};
  for (std::int32_t i = 0; i < kActivationCount; ++i) {
    names[i] = activation_traits(static_cast<ActivationKind>(i)).name;
  }
  return names;
}();
// A kind without a row would have no name.
static_assert(kActivations.back() != nullptr);
constexpr std::array kDTypes = {"f32", "bf16", "f16", "f64", "i32", "i64"};
constexpr std::array kPrecisions = {"tensors", "fp8"};
constexpr std::array kPackedFormats = {"nf4", "mxfp4", "fp8_blocks"};
constexpr std::array kScoreModes = {"softmax_after_topk", "softmax_before_topk", "sigmoid",
                                    "sqrt_softplus"};
constexpr std::array kRoundingModes = {"nearest", "up", "down", "score", "stochastic", "balanced"};

template <std::size_t N>
const char* name_at(const std::array<const char*, N>& table, std::int32_t index) {
  return index >= 0 && index < static_cast<std::int32_t>(N) ? table[index] : "unknown";
}

template <std::size_t N>
std::int32_t index_of(const std::array<const char*, N>& table, const char* what, const char* name) {
  std::string allowed;
  for (std::size_t i = 0; i < N; ++i) {
    if (name != nullptr && std::strcmp(table[i], name) == 0) return static_cast<std::int32_t>(i);
    allowed += (i == 0 ? "" : ", ") + std::string(table[i]);
  }
  throw Error(Status::kInvalidArgument, std::string(what) + " is \"" +
                                            (name == nullptr ? "(null)" : name) +
                                            "\", must be one of: " + allowed);
}

}  // namespace

const char* activation_name(ActivationKind kind) { return activation_traits(kind).name; }
ActivationKind activation_from_name(const char* name) {
  return static_cast<ActivationKind>(index_of(kActivations, "activation", name));
}
const char* dtype_name(DType dtype) { return name_at(kDTypes, static_cast<std::int32_t>(dtype)); }
DType dtype_from_name(const char* name) {
  return static_cast<DType>(index_of(kDTypes, "dtype", name));
}
const char* precision_name(Precision precision) {
  return name_at(kPrecisions, static_cast<std::int32_t>(precision));
}
Precision precision_from_name(const char* name) {
  return static_cast<Precision>(index_of(kPrecisions, "precision", name));
}
const char* packed_format_name(PackedFormat format) {
  return name_at(kPackedFormats, static_cast<std::int32_t>(format));
}
PackedFormat packed_format_from_name(const char* name) {
  return static_cast<PackedFormat>(index_of(kPackedFormats, "format", name));
}
const char* score_mode_name(ScoreMode mode) {
  return name_at(kScoreModes, static_cast<std::int32_t>(mode));
}
ScoreMode score_mode_from_name(const char* name) {
  return static_cast<ScoreMode>(index_of(kScoreModes, "score", name));
}
const char* rounding_mode_name(RoundingMode mode) {
  return name_at(kRoundingModes, static_cast<std::int32_t>(mode));
}
RoundingMode rounding_mode_from_name(const char* name) {
  return static_cast<RoundingMode>(index_of(kRoundingModes, "mode", name));
}
const char* version_string() { return SONICMOE_VERSION_STRING; }

}  // namespace sonicmoe
