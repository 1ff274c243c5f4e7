// Parts of the harness's cases.
#pragma once

#include <cstddef>
#include <functional>
#include <set>
#include <sstream>
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

/// The name of a case without its dtype and data.
inline std::string without_variant(const Case& c) {
  static const std::set<std::string> kVariants{"bf16",     "f16",       "f32",   "f64",
                                               "integers", "roundings", "random"};
  std::istringstream name(c.name);
  std::string rest;
  for (std::string word; std::getline(name, word, '/');) {
    if (!kVariants.contains(word)) rest += "/" + word;
  }
  return rest;
}

/// 1, a turn on odd days: random data, but in fp16 integers and roundings. 0, on even days: the
/// others.
inline int turn_of(const Case& c) {
  return (c.data == Data::kRandom) != (c.problem.dtype == DType::kF16) ? 1 : 0;
}

/// The implementation, for the cases of `turn`, and for a case of the other turn if no case of
/// `turn` differs from it only in dtype and data. So each shape runs each day.
inline Implementation for_turn(Implementation implementation, int turn, Extent extent) {
  std::set<std::string> runs;
  for (const Case& c : all_cases(extent, "")) {
    if (turn_of(c) == turn && serves(implementation, c)) runs.insert(without_variant(c));
  }
  implementation.serves = [=, serves = implementation.serves](const Case& c) {
    return (turn_of(c) == turn || !runs.contains(without_variant(c))) && (!serves || serves(c));
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
