// Parts of the harness's cases.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "verify/harness.h"

namespace sonicmoe::verify {

/// The implementation, for the cases of part `number` of 1 to `parts`. A case's part depends on its
/// name alone.
inline Implementation for_part(Implementation implementation, std::size_t number,
                               std::size_t parts) {
  implementation.serves = [=, serves = implementation.serves](const Case& c) {
    return std::hash<std::string>()(c.name) % parts + 1 == number && (!serves || serves(c));
  };
  return implementation;
}

/// The implementation, in builds with sanitizers for a part of the cases: there all would take ten
/// minutes.
inline Implementation for_part_if_sanitized(Implementation implementation, std::size_t number,
                                            std::size_t parts) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return for_part(std::move(implementation), number, parts);
#else
  static_cast<void>(number), static_cast<void>(parts);
  return implementation;
#endif
}

}  // namespace sonicmoe::verify
