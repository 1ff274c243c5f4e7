// Which registers of a function may lie in the same place, one after the other. nvcc gives each
// value a register of its own, and a warp's file with thousands of them fits no cache.
#pragma once

#include <cstddef>
#include <string_view>
#include <unordered_map>

#include "ptx_text.h"

namespace sonicmoe::emulator {

/// The statements that name a register.
struct Lifetime {
  std::size_t first = 0;
  std::size_t last = 0;
  /// Whether the register needs its place from the first to the last statement only. Then no label
  /// lies between them, the first one writes the register in every lane that runs it, and no
  /// asynchronous instruction names it.
  bool is_short = false;
};

/// Of the registers that are named.
std::unordered_map<std::string_view, Lifetime> lifetimes_of(const Function& function);

}  // namespace sonicmoe::emulator
