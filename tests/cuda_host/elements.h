// Elements of host tensors of any dtype, as doubles.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/metadata/metadata.h"
#include "verify/convert.h"

namespace sonicmoe::testing {

inline std::int64_t offset_of(const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t k = 0) {
  return i * t.stride[0] + j * t.stride[1] + (t.rank == 3 ? k * t.stride[2] : 0);
}
inline double get(const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t k = 0) {
  return oracle::load(t.data, t.dtype, offset_of(t, i, j, k));
}
/// Rounds to the tensor's dtype.
inline void put(const Tensor& t, double value, std::int64_t i, std::int64_t j, std::int64_t k = 0) {
  oracle::store(t.data, t.dtype, offset_of(t, i, j, k), value);
}

/// Element `slot` of the caller's routing weights (T, K) or (C), or of their gradient.
inline std::int64_t slot_offset(const Tensor& t, std::int64_t slot) {
  return oracle::element_offset(t, slot);
}

/// Calls visit(expert, row) for every grouped row.
template <class F>
void for_rows(const cuda::Metadata& lists, std::int64_t experts, F visit) {
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int32_t i = 0; i < lists.expert_rows[e]; ++i) visit(e, lists.expert_begin[e] + i);
  }
}

inline void require(bool condition, const std::string& sentence) {
  if (!condition) throw std::runtime_error(sentence);
}

}  // namespace sonicmoe::testing
