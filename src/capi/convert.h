// From the C structs to the C++ ones. Every struct is copied into the current version first, so the
// rest of the code never sees a caller's size.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "sonicmoe/c_api.h"
#include "sonicmoe/grouped_gemm.h"
#include "sonicmoe/moe.h"
#include "sonicmoe/routing.h"
#include "sonicmoe/version.h"

namespace sonicmoe::capi {

inline constexpr const char* kNoMemory = "memory is exhausted, nothing was computed";

/// Obtains this thread's storage for exceptions and for the last error. False if it cannot be had.
bool can_report_errors() noexcept;
void set_last_error(const char* sentence) noexcept;

/// Runs a call; whatever it throws becomes a status and a sentence.
template <class F>
smoe_status guarded(F&& call) noexcept {
  if (!can_report_errors()) return SMOE_INTERNAL;
  try {
    call();
    return SMOE_OK;
  } catch (const Error& e) {
    set_last_error(e.what());
    return static_cast<smoe_status>(e.status());
  } catch (const std::bad_alloc&) {
    set_last_error(kNoMemory);
    return SMOE_INTERNAL;
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return SMOE_INTERNAL;
  } catch (...) {
    set_last_error("an unknown exception reached the C interface");
    return SMOE_INTERNAL;
  }
}

void refuse_null(const void* pointer, const char* name);
/// The rule of struct sizes: at least that of the first version, `first`, and no byte past this
/// version's, `known`, in use. Returns how many bytes the caller's struct and this version share.
std::size_t check_size(const void* data, const char* name, std::size_t first, std::size_t known);

/// The caller's struct as this version knows it; fields it does not have are zero. `first` is its
/// size in the version that brought it.
template <class T>
T read(const T* given, const char* name, std::size_t first = sizeof(T)) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, size) == 0);
  refuse_null(given, name);
  T result{};
  std::memcpy(&result, given, check_size(given, name, first, sizeof(T)));
  return result;
}

/// Refuses null. An absent optional tensor goes through `optional` and becomes an empty one.
Tensor required(const smoe_tensor* given, const char* name);
Tensor optional(const smoe_tensor* given, const char* name);

Exec exec(const smoe_exec* given);
Problem problem(const smoe_problem* given);
Routing routing(const smoe_routing* given);
Weights weights(const smoe_weights* given, const char* name);
RouteOptions route_options(const smoe_route_options* given);
RoundOptions round_options(const smoe_round_options* given);
Pairs pairs(const smoe_pairs* given);

}  // namespace sonicmoe::capi
