#include "soak.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "calls.h"

namespace sonicmoe::faults {
namespace {

// A leak of 100 bytes a call exceeds this in 20,000 steps; what the allocator keeps does not.
constexpr std::int64_t kAllowedGrowth = 4 << 20;

std::int64_t resident_bytes() {
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

int soak(std::int64_t steps) {
  const std::int64_t warm = std::max<std::int64_t>(steps / 4, 100);
  Random random(4);
  std::int64_t before = 0;
  std::int64_t most = 0;
  for (std::int64_t i = 0; i < warm + steps; ++i) {
    if (!step(random)) return 1;
    if (i % 50 != 49) continue;
    const std::int64_t now = resident_bytes();
    (i < warm ? before : most) = std::max(i < warm ? before : most, now);
    if (i % 1000 == 999) {
      std::printf("step %lld: %.1f MiB resident\n", static_cast<long long>(i + 1),
                  static_cast<double>(now) / (1 << 20));
      std::fflush(stdout);
    }
  }
  std::printf("%lld steps after %lld: %.1f MiB resident at most, %.1f before\n",
              static_cast<long long>(steps), static_cast<long long>(warm),
              static_cast<double>(most) / (1 << 20), static_cast<double>(before) / (1 << 20));
  if (most <= before + kAllowedGrowth) return 0;
  std::puts("FAILED: resident memory grew");
  return 1;
}

}  // namespace sonicmoe::faults
