// Runs the harness on a device. SONICMOE_FILTER selects the cases whose names contain it, or one of
// its words if it has spaces; SONICMOE_EXTENT=full runs the large ones too. SONICMOE_WITHOUT leaves
// out the cases whose names contain one of its words. SONICMOE_PART=1/3 runs every third case: 1/3,
// 2/3 and 3/3 together run all. SONICMOE_DAY=today or a number: of cases that differ only in dtype
// and data it runs a part, another part with the next number (for_day()).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
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
  const Implementation all =
      for_day_asked(without(cuda_implementation(exec), left_out ? left_out : ""), options.extent);
  const auto results = verify_words(options, filter == nullptr ? "" : filter,
                                    for_part(all, part ? part : "1/1"), progress);
  std::cout << results.size() << " cases, " << failed << " failed, worst ratio " << worst
            << std::endl;
  EXPECT_EQ(failed, 0u);
}

}  // namespace sonicmoe::verify
