// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (SC 2011), for host
// and device: equal (counter, key) give equal words everywhere, in any order of evaluation.
#pragma once

#include <cstdint>

#include "core/selection_key.h"

namespace sonicmoe {

struct PhiloxWords {
  std::uint32_t word[4];
};

SONICMOE_HD PhiloxWords philox4x32_10(PhiloxWords counter, std::uint64_t seed) {
  std::uint32_t key0 = static_cast<std::uint32_t>(seed);
  std::uint32_t key1 = static_cast<std::uint32_t>(seed >> 32);
  PhiloxWords c = counter;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c.word[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c.word[2];
    c = {{static_cast<std::uint32_t>(b >> 32) ^ c.word[1] ^ key0, static_cast<std::uint32_t>(b),
          static_cast<std::uint32_t>(a >> 32) ^ c.word[3] ^ key1, static_cast<std::uint32_t>(a)}};
    key0 += 0x9E3779B9u;  // the golden ratio
    key1 += 0xBB67AE85u;  // sqrt(3) - 1
  }
  return c;
}

/// The draw of one expert: 32 uniform bits, from counter (expert, 0, 0, 0).
SONICMOE_HD std::uint32_t expert_draw(std::uint64_t seed, std::uint32_t expert) {
  return philox4x32_10({{expert, 0, 0, 0}}, seed).word[0];
}

}  // namespace sonicmoe
