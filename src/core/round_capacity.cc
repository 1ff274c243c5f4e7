// C of token_round, from what the host knows.
#include <algorithm>
#include <string>

#include "sonicmoe/routing.h"

namespace sonicmoe {
namespace {

std::int64_t product(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    throw Error(Status::kOutOfRange, std::string(what) + " is " + std::to_string(a) + " * " +
                                         std::to_string(b) + ", must be below 2^63");
  }
  return result;
}

std::int64_t sum(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) {
    throw Error(Status::kOutOfRange, "the capacity of the rounded pairs is " + std::to_string(a) +
                                         " + " + std::to_string(b) + ", must be below 2^63");
  }
  return result;
}

}  // namespace

std::int64_t round_capacity(const RoundOptions& options, std::int64_t tokens,
                            std::int64_t experts) {
  const std::int64_t chosen = product(tokens, options.route.top_k, "tokens * top_k");
  switch (options.mode) {
    case RoundingMode::kDown:
      return chosen;
    case RoundingMode::kNearest:
      return sum(chosen, product(experts, options.tile, "experts * tile") / 2);
    default:
      return std::min(product(tokens, experts, "tokens * experts"),
                      sum(chosen, product(experts, options.tile, "experts * tile")));
  }
}

}  // namespace sonicmoe
