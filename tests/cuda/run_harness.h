// Runs the harness on a device. SONICMOE_FILTER selects the cases whose names contain it, or one of
// its words if it has spaces; SONICMOE_EXTENT=full runs the large ones too. SONICMOE_WITHOUT leaves
// out the cases whose names contain one of its words. SONICMOE_PART=1/3 runs every third case: 1/3,
// 2/3 and 3/3 together run all. SONICMOE_TURN=0, 1 or today: of cases that differ only in dtype and
// data it runs a part, the other part with the other number (for_turn()).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "parts.h"
#include "verify/device.h"
#include "verify/harness.h"

namespace sonicmoe::verify {

/// Calls verify() once for each word of `filter`, or once if `filter` is empty. Fails if a word
/// selects no case.
inline std::vector<CaseResult> verify_words(VerifyOptions options, const std::string& filter,
                                            const Implementation& implementation,
                                            const Progress& progress) {
  std::istringstream words(filter);
  std::vector<CaseResult> results;
  do {
    words >> options.filter;
    auto more = verify(options, implementation, progress);
    EXPECT_FALSE(more.empty()) << "SONICMOE_FILTER: no case's name contains " << options.filter;
    std::move(more.begin(), more.end(), std::back_inserter(results));
  } while (words.good());
  return results;
}

/// The implementation, for the cases of a part such as "2/3".
inline Implementation for_part(Implementation implementation, const std::string& part) {
  std::istringstream text(part);
  std::size_t number = 0, parts = 0;
  char slash = '\0';
  text >> number >> slash >> parts;
  if (slash != '/' || number < 1 || number > parts || !text.eof()) {
    throw std::invalid_argument("SONICMOE_PART is '" + part + "' but must be like 2/3");
  }
  return for_part(std::move(implementation), number, parts);
}

/// The implementation, without the cases whose names contain one of the words.
inline Implementation without(Implementation implementation, const std::string& words) {
  std::istringstream text(words);
  const std::vector<std::string> left_out{std::istream_iterator<std::string>(text), {}};
  implementation.serves = [left_out, serves = implementation.serves](const Case& c) {
    const auto named = [&](const std::string& word) { return c.name.find(word) != c.name.npos; };
    return std::none_of(left_out.begin(), left_out.end(), named) && (!serves || serves(c));
  };
  return implementation;
}

/// The implementation, for the cases of SONICMOE_TURN.
inline Implementation for_turn(Implementation implementation, const std::string& turn,
                               Extent extent) {
  if (turn != "0" && turn != "1" && turn != "today") {
    throw std::invalid_argument("SONICMOE_TURN is '" + turn + "' but must be 0, 1 or today");
  }
  const auto days = std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now());
  const auto today = static_cast<int>(days.time_since_epoch().count() % 2);
  return for_turn(std::move(implementation), turn == "today" ? today : turn == "1" ? 1 : 0, extent);
}

inline void expect_harness_passes(const Exec& exec) {
  constexpr std::size_t kMostLines = 40;
  VerifyOptions options;
  const char* filter = std::getenv("SONICMOE_FILTER");
  const char* extent = std::getenv("SONICMOE_EXTENT");
  if (extent != nullptr && std::string(extent) == "full") options.extent = Extent::kFull;
  std::size_t failed = 0;
  double worst = 0.0;
  const auto progress = [&](const CaseResult& r, std::size_t, std::size_t) {
    worst = std::max(worst, r.worst_ratio());
    if (r.passed()) return;
    if (++failed <= kMostLines) {
      std::cout << r.name << ": " << fault_name(r.fault) << ": " << r.message << std::endl;
    }
  };
  const char* part = std::getenv("SONICMOE_PART");
  const char* left_out = std::getenv("SONICMOE_WITHOUT");
  const char* turn = std::getenv("SONICMOE_TURN");
  Implementation all = without(cuda_implementation(exec), left_out ? left_out : "");
  if (turn != nullptr) all = for_turn(std::move(all), turn, options.extent);
  const auto results = verify_words(options, filter == nullptr ? "" : filter,
                                    for_part(all, part ? part : "1/1"), progress);
  std::cout << results.size() << " cases, " << failed << " failed, worst ratio " << worst
            << std::endl;
  EXPECT_EQ(failed, 0u);
}

}  // namespace sonicmoe::verify
