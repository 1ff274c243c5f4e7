// The emulator's content of a CUtensorMap, whose format CUDA does not define for users.
#pragma once

#include <cstdint>

namespace sonicmoe::emulator {

struct TensorMap {
  static constexpr std::uint64_t kMagic = 0x70616d726f736e65;
  std::uint64_t magic = kMagic;
  std::uint64_t base = 0;
  std::uint64_t strides[4] = {};  ///< bytes; of dimensions 1 to rank - 1
  std::uint32_t sizes[5] = {};    ///< elements, fastest first
  std::uint16_t boxes[5] = {};
  std::uint8_t rank = 0;
  std::uint8_t element_bytes = 0;
  std::uint8_t swizzle_bytes = 0;  ///< 0, 32, 64 or 128
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace sonicmoe::emulator
