#include "soak.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>

#include "calls.h"

namespace sonicmoe::faults {
namespace {

// A leak of 100 bytes a step exceeds this limit in 20,000 steps; memory that the allocator keeps
// for later use does not.
constexpr std::int64_t kAllowedGrowth = 1 << 20;

// 0 where the system does not tell.
std::int64_t resident_bytes() {
#if defined(__GLIBC__)
  malloc_trim(0);  // so that only memory in use is resident
#endif
  long long total = 0;
  long long resident = 0;
  std::FILE* f = std::fopen("/proc/self/statm", "r");
  if (f == nullptr) return 0;
  const int read = std::fscanf(f, "%lld %lld", &total, &resident);
  std::fclose(f);
  return read == 2 ? resident * sysconf(_SC_PAGESIZE) : 0;
}

bool step(Random& random) {
  const LayerSpec layer = random_layer(random);
  const RouterSpec router = random_router(random);
  const CallPtr calls[] = {
      layer_call(layer, SMOE_FORWARD), layer_call(layer, SMOE_BACKWARD),
      router_call(router, static_cast<Router>(random.between(0, kRouterCalls - 1))),
      gemm_call(random_gemm(random),
                random.between(0, 1) == 0 ? Grouped::kRows : Grouped::kColumns)};
  for (const CallPtr& call : calls) {
    if (call->run() == SMOE_OK) continue;
    std::printf("FAILED: %s: %s\n", call->name().c_str(), smoe_last_error());
    return false;
  }
  return true;
}

}  // namespace

// Compares the minimum of many measurements before with the minimum after: a leak raises all later
// measurements.
int soak(std::int64_t steps) {
  constexpr std::int64_t kMeasureEvery = 25;
  const std::int64_t warm = std::max<std::int64_t>(steps / 10, 200);
  Random random(4);
  // Before the second half of the warm-up the allocator still fills its lists.
  std::int64_t least[2] = {std::numeric_limits<std::int64_t>::max(),
                           std::numeric_limits<std::int64_t>::max()};
  for (std::int64_t i = 0; i < warm + steps; ++i) {
    if (!step(random)) return 1;
    if (i % kMeasureEvery != 0) continue;
    const std::int64_t now = resident_bytes();
    if (now == 0) {
      std::puts("FAILED: /proc/self/statm cannot be read");
      return 1;
    }
    const bool early = i >= warm / 2 && i < warm;
    const bool late = i >= warm + steps / 2;
    if (early || late) least[late] = std::min(least[late], now);
    if (i % 1000 == 0) {
      std::printf("step %lld: %.1f MiB resident\n", static_cast<long long>(i),
                  static_cast<double>(now) / (1 << 20));
      std::fflush(stdout);
    }
  }
  std::printf("%lld steps: %.2f MiB resident in the second half, %.2f before step %lld\n",
              static_cast<long long>(warm + steps), static_cast<double>(least[1]) / (1 << 20),
              static_cast<double>(least[0]) / (1 << 20), static_cast<long long>(warm));
  if (least[1] <= least[0] + kAllowedGrowth) return 0;
  std::puts("FAILED: resident memory grew");
  return 1;
}

}  // namespace sonicmoe::faults
