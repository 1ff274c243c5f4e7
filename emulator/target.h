// The architecture for which PTX is made: which devices run it, and which instructions it has.
#pragma once

#include <compare>
#include <string>
#include <string_view>

#include "ptx_text.h"

namespace sonicmoe::emulator {

/// sm_80 is {80}, sm_90a is {90, true}, sm_100f is {100, false, true}.
struct Target {
  int capability = 90;       ///< major * 10 + minor
  bool is_specific = false;  ///< only devices of this capability run the code
  bool is_family = false;    ///< only devices of this major version run the code
  auto operator<=>(const Target&) const = default;

  std::string name() const;
  /// Whether a device runs the code, if there is no later code that it also runs. Machine code runs
  /// on later minor versions. The library contains PTX of 8.0 only, which all later devices run.
  bool runs_on(int device_capability) const;
  /// Throws Fault if an instruction needs a later architecture or another specific one.
  void check(const Statement& statement) const;
};

/// Of the directive .target in a text of PTX. Throws Fault if it has none.
Target target_of(std::string_view text);

}  // namespace sonicmoe::emulator
