// Replaces operator new and pthread_create of this program, so that one chosen call of either
// fails.
#pragma once

#include <cstdint>

namespace sonicmoe::faults {

/// What fails while a call is under test. Numbers count from 0; -1: none.
struct Fault {
  std::int64_t allocation = -1;        ///< this allocation fails
  std::int64_t allocations_from = -1;  ///< this allocation and all later ones fail
  std::int64_t thread = -1;            ///< this thread start fails
  std::int64_t threads_from = -1;      ///< this thread start and all later ones fail
};

/// Allocations and thread starts that were asked for, failed ones included.
struct Demand {
  std::int64_t allocations = 0;
  std::int64_t threads = 0;
  std::int64_t worker_allocations = 0;  ///< allocations on other threads than the caller's
};

/// From here on faults are injected and counted: on the calling thread, and on threads that it
/// starts.
void arm(const Fault& fault);
/// Back to normal.
Demand disarm();

}  // namespace sonicmoe::faults
