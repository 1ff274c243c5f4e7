// Conversion from the structs of the C interface to the structs of C++. A caller's struct may have
// the size of another version: read() copies it into a struct of this version, so no other function
// deals with sizes.
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
#include "sonicmoe/packed.h"
#include "sonicmoe/routing.h"
#include "sonicmoe/version.h"

namespace sonicmoe::capi {

inline constexpr const char* kNoMemory = "memory is exhausted, nothing was computed";

/// Allocates this thread's storage for exceptions and for the last error. False if that fails.
bool can_report_errors() noexcept;
void set_last_error(const char* sentence) noexcept;

/// Runs a call. Turns an exception into a status, and into the sentence of smoe_last_error().
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
/// Refuses the value of a field `reserved` other than 0; `name` is that of the struct.
void refuse_reserved(std::int64_t value, const char* name);
/// Checks the size field of a struct: it is at least `first`, the size in the version that
/// introduced the struct, and bytes past `known`, its size in this version, are zero. Returns the
/// number of bytes that the caller's struct and this version's have in common.
std::size_t check_size(const void* data, const char* name, std::size_t first, std::size_t known);

/// A copy of the caller's struct in this version's layout; fields that the caller's version does
/// not have are zero. `first` is as in check_size.
template <class T>
T read(const T* given, const char* name, std::size_t first = sizeof(T)) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, size) == 0);
  refuse_null(given, name);
  T result{};
  std::memcpy(&result, given, check_size(given, name, first, sizeof(T)));
  return result;
}

/// Checks `sizes`, then writes the result of compute() to it. The size field keeps its value.
template <class F>
void write_sizes(smoe_sizes* sizes, const F& compute) {
  smoe_sizes result = read(static_cast<const smoe_sizes*>(sizes), "sizes");
  refuse_reserved(result.reserved, "sizes");
  const Sizes s = compute();
  result.h_bytes = s.h_bytes;
  result.saved_bytes = s.saved_bytes;
  result.scratch_bytes = s.scratch_bytes;
  *sizes = result;
}

/// A tensor that must be given: null is refused.
Tensor required(const smoe_tensor* given, const char* name);
/// A tensor that may be absent: null becomes an empty tensor.
Tensor optional(const smoe_tensor* given, const char* name);

Exec exec(const smoe_exec* given);
Problem problem(const smoe_problem* given);
Routing routing(const smoe_routing* given);
Weights weights(const smoe_weights* given, const char* name);
PackedWeights packed_weights(const smoe_packed_weights* given);
/// Null becomes no factors.
Lora lora(const smoe_lora* given, const char* name);
ForwardArgs forward_args(const smoe_forward_args* given);
BackwardArgs backward_args(const smoe_backward_args* given);
/// The field kept_x of the arguments of a step over ranks.
Buffer kept_rows(const smoe_forward_args* given);
Buffer kept_rows(const smoe_backward_args* given);
/// Refuses kept rows in a call of the layer of one process.
void refuse_kept_rows(const Buffer& kept_x);
RouteOptions route_options(const smoe_route_options* given);
RoundOptions round_options(const smoe_round_options* given);
Pairs pairs(const smoe_pairs* given);

}  // namespace sonicmoe::capi
