// A fuzzer of the C interface: calls with small valid arguments, of which most have been made
// invalid in one place. A valid call must succeed and agree with a reference. A refused call must
// write nothing and give a reason. No call may access memory that is not among its arguments. Build
// the fuzzer with sanitizers.
//
//   capi_fuzz [--calls N] [--seed S] [--first I]
//
// Call I of seed S is the same in every run: on a failure the program prints both.
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz/world.h"

using namespace sonicmoe::fuzz;

namespace {

struct Subject {
  const char* name;
  void (*run)(World&);
  int share;  ///< of 100 calls
};
constexpr Subject kSubjects[] = {
    {"queries", &fuzz_queries, 12},   {"the layer", &fuzz_layer, 35},
    {"grouped GEMM", &fuzz_gemm, 15}, {"route", &fuzz_route, 12},
    {"rounding", &fuzz_round, 10},    {"expert choice", &fuzz_choice, 6},
    {"losses", &fuzz_losses, 5},      {"packed weights", &fuzz_packed, 5}};

const Subject& subject_of(Random& random) {
  std::int64_t at = random.in(0, 99);
  for (const Subject& s : kSubjects) {
    if (at < s.share) return s;
    at -= s.share;
  }
  return kSubjects[0];
}

struct Options {
  std::uint64_t calls = 20000, seed = 1, first = 0;
};

bool parse(int argc, char** argv, Options& o) {
  for (int i = 1; i < argc; i += 2) {
    std::uint64_t* value = std::strcmp(argv[i], "--calls") == 0   ? &o.calls
                           : std::strcmp(argv[i], "--seed") == 0  ? &o.seed
                           : std::strcmp(argv[i], "--first") == 0 ? &o.first
                                                                  : nullptr;
    if (value == nullptr || i + 1 == argc) return false;
    *value = std::strtoull(argv[i + 1], nullptr, 10);
  }
  return true;
}

// The call under way, for a crash inside it.
std::uint64_t current_call = 0, current_seed = 0;
const World* current_world = nullptr;
extern "C" void __asan_set_death_callback(void (*callback)()) __attribute__((weak));
void report_death() {
  std::fprintf(stderr, "died in --seed %" PRIu64 " --first %" PRIu64 " --calls 1\n%s", current_seed,
               current_call, current_world == nullptr ? "" : current_world->description().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: capi_fuzz [--calls N] [--seed S] [--first I]\n");
    return 2;
  }
  if (__asan_set_death_callback != nullptr) __asan_set_death_callback(&report_death);
  current_seed = options.seed;
  std::uint64_t spoilt = 0;
  auto shown = std::chrono::steady_clock::now();
  for (std::uint64_t i = 0; i < options.calls; ++i) {
    current_call = options.first + i;
    World world(options.seed * 0x9E3779B97F4A7C15u + current_call);
    current_world = &world;
    const Subject& subject = subject_of(world.random);
    try {
      subject.run(world);
    } catch (const std::exception& e) {
      std::printf("FAILED --seed %" PRIu64 " --first %" PRIu64 " --calls 1 (%s): %s\n%s",
                  options.seed, current_call, subject.name, e.what(), world.description().c_str());
      return 1;
    }
    current_world = nullptr;
    spoilt += world.spoilt() ? 1 : 0;
    const auto now = std::chrono::steady_clock::now();
    if (now - shown > std::chrono::seconds(10)) {
      shown = now;
      std::printf("%" PRIu64 " calls\n", i + 1);
      std::fflush(stdout);
    }
  }
  std::printf("%" PRIu64 " calls, %" PRIu64 " of them spoilt, seed %" PRIu64 ": no fault\n",
              options.calls, spoilt, options.seed);
  return 0;
}
