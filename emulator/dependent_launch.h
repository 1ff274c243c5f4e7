// Programmatic dependent launch: how a grid overlaps with the kernels before and after it in its
// stream.
#pragma once

#include <functional>

namespace sonicmoe::emulator {

struct Neighbours {
  /// Whether griddepcontrol.wait may return. Empty: the grid does not overlap with the previous
  /// one.
  std::function<bool()> previous_is_complete;
  /// Called once, when every CTA has run griddepcontrol.launch_dependents or has ended.
  std::function<void()> launch_next;
};

}  // namespace sonicmoe::emulator
