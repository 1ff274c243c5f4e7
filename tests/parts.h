// Parts of the harness's cases.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

/// What a case tests apart from its variant: its name without dtype and data, and for routing
/// without options and rounding mode, too.
inline std::string shape_of(const Case& c) {
  static const std::set<std::string> kVariants{"bf16",     "f16",       "f32",   "f64",
                                               "integers", "roundings", "random"};
  std::istringstream name(c.name);
  std::string shape;
  for (std::string word; std::getline(name, word, '/');) {
    const bool is_mode = word.find("_tile") != word.npos;
    if (!is_mode && !kVariants.contains(word)) shape += "/" + word.substr(0, word.find("_options"));
  }
  return shape;
}

/// Days after which for_day() has run every case.
constexpr std::int64_t kDaysForAllCases = 4;

/// The implementation, for the cases of a day: of each shape a quarter of the variants, rounded up.
/// The next day has the variants that follow. The shape and the implementation's name choose the
/// first variant, so that each day has some cases in each dtype with each kind of data.
inline Implementation for_day(Implementation implementation, std::int64_t day, Extent extent) {
  std::map<std::string, std::vector<std::string>> variants;
  for (const Case& c : all_cases(extent, "")) {
    if (serves(implementation, c)) variants[shape_of(c)].push_back(c.name);
  }
  std::set<std::string> today;
  for (const auto& [shape, names] : variants) {
    const std::size_t count = (names.size() + kDaysForAllCases - 1) / kDaysForAllCases;
    const std::size_t first = std::hash<std::string>()(implementation.name + shape) % names.size();
    for (std::size_t i = 0; i < count; i++) {
      today.insert(names[(first + day * count + i) % names.size()]);
    }
  }
  implementation.serves = [=, serves = implementation.serves](const Case& c) {
    return today.contains(c.name) && (!serves || serves(c));
  };
  return implementation;
}

/// The number of the day SONICMOE_DAY, which is `today` or a number; none without this variable.
inline std::optional<std::int64_t> day_asked() {
  const char* asked = std::getenv("SONICMOE_DAY");
  if (asked == nullptr) return std::nullopt;
  const std::string day(asked);
  if (day == "today") {
    const auto days = std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now());
    return days.time_since_epoch().count();
  }
  if (day.empty() || day.size() > 9 || day.find_first_not_of("0123456789") != day.npos) {
    throw std::invalid_argument("SONICMOE_DAY is '" + day + "' but must be today or a number");
  }
  return std::stoll(day);
}

/// The implementation, for the cases of the day that is asked for; without a day for all cases.
inline Implementation for_day_asked(Implementation implementation, Extent extent) {
  const std::optional<std::int64_t> day = day_asked();
  return day ? for_day(std::move(implementation), *day, extent) : implementation;
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
