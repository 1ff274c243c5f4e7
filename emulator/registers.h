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
  /// From the first to the last there is no label, the first writes the register in every lane
  /// that runs it, and no instruction that writes later names it. So it has no value outside.
  bool is_short = false;
};

/// Of the registers that are named.
std::unordered_map<std::string_view, Lifetime> lifetimes_of(const Function& function);

}  // namespace sonicmoe::emulator
