// The format, from bit 0:
//
//   1 bit   | 1: the object is initialised
//   1 bit   | parity of the phase
//   20 bits | missing arrivals
//   20 bits | arrivals of a phase
//   22 bits | missing bytes
#include <cstring>

#include "machine.h"

namespace sonicmoe::emulator::mbarrier {
namespace {

constexpr std::int64_t kMostArrivals = (1 << 20) - 1;
constexpr std::int64_t kMostBytes = (1 << 20) - 1;

struct State {
  bool valid = false;
  std::uint32_t parity = 0;
  std::int64_t missing = 0;
  std::int64_t expected = 0;
  std::int64_t bytes = 0;
};

std::uint64_t word_of(const std::byte* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

State load(const std::byte* at) {
  const std::uint64_t word = word_of(at);
  // Memory that was never initialised is all ones (cta.cc).
  if ((word & 1) == 0 || word == ~std::uint64_t{0}) throw Fault("an mbarrier is not initialised");
  State s;
  s.valid = true;
  s.parity = word >> 1 & 1;
  s.missing = static_cast<std::int64_t>(word >> 2 & kMostArrivals);
  s.expected = static_cast<std::int64_t>(word >> 22 & kMostArrivals);
  s.bytes = static_cast<std::int64_t>(word) >> 42;  // signed
  return s;
}

void store(std::byte* at, const State& s) {
  if (s.missing < 0) throw Fault("an mbarrier has more arrivals than it expects");
  if (s.missing > kMostArrivals) throw Fault("an mbarrier expects too many arrivals");
  if (s.bytes > kMostBytes || s.bytes < -kMostBytes) {
    throw Fault("the bytes of an mbarrier leave their range");
  }
  const std::uint64_t word = (s.valid ? 1 : 0) | std::uint64_t{s.parity} << 1 |
                             static_cast<std::uint64_t>(s.missing) << 2 |
                             static_cast<std::uint64_t>(s.expected) << 22 |
                             static_cast<std::uint64_t>(s.bytes) << 42;
  std::memcpy(at, &word, sizeof word);
}

/// Stores the state, in its next phase if this one is complete.
void settle(Cluster& cluster, std::byte* at, State s) {
  if (s.missing == 0 && s.bytes == 0) {
    s.parity ^= 1;
    s.missing = s.expected;
    cluster.agents.barrier(at).complete_phase();
    cluster.grid().note_progress();
  }
  store(at, s);
}

}  // namespace

void init(std::byte* at, std::uint32_t count) {
  if (count == 0 || count > kMostArrivals) throw Fault("an mbarrier for no arrival or too many");
  store(at, {true, 0, count, count, 0});
}

void invalidate(std::byte* at) {
  load(at);
  std::memset(at, 0, sizeof(std::uint64_t));
}

void expect(std::byte* at, std::uint32_t bytes) {
  State s = load(at);
  s.bytes += bytes;
  store(at, s);
}

void complete(Cluster& cluster, std::byte* at, std::uint32_t bytes) {
  State s = load(at);
  s.bytes -= bytes;
  settle(cluster, at, s);
}

void arrive(Cluster& cluster, std::byte* at, std::uint32_t count) {
  State s = load(at);
  s.missing -= count;
  settle(cluster, at, s);
}

void expect_arrival(std::byte* at) {
  State s = load(at);
  ++s.missing;
  store(at, s);
}

bool is_complete(const std::byte* at, std::uint32_t parity) { return load(at).parity != parity; }

BarrierClock& clock_of(Cluster& cluster, std::byte* at, const VectorClock& known) {
  load(at);
  BarrierClock& clock = cluster.agents.barrier(at);
  if (!known.has(clock.initialised)) {
    throw Fault("an mbarrier is used by a warp that has not waited for its initialisation by " +
                cluster.agents.name(clock.initialised));
  }
  return clock;
}

}  // namespace sonicmoe::emulator::mbarrier
