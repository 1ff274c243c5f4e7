// How the functions of the runtime's interface return errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <new>

namespace sonicmoe::emulator {

/// Thrown inside the runtime; its interface returns the status.
struct ApiError {
  cudaError_t status;
};

inline void require(bool holds, cudaError_t otherwise) {
  if (!holds) throw ApiError{otherwise};
}

/// Keeps the status for cudaGetLastError of this thread, and returns it.
cudaError_t note_error(cudaError_t status);

/// The status of `f`, which throws ApiError where CUDA returns an error.
template <class F>
cudaError_t status_of(F f) noexcept {
  try {
    f();
    return cudaSuccess;
  } catch (const ApiError& error) {
    return note_error(error.status);
  } catch (const std::bad_alloc&) {
    return note_error(cudaErrorMemoryAllocation);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "emulator: %s\n", error.what());
    return note_error(cudaErrorUnknown);
  }
}

}  // namespace sonicmoe::emulator
