// Errors. A call with a wrong argument is refused: it throws an Error before any work. The message
// is one sentence with the wrong argument, its value and the allowed values.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace sonicmoe {

/// The kind of an error. The values are part of the C ABI and never change.
enum class Status : std::int32_t {
  kOk = 0,
  kInvalidArgument = 1,    ///< a shape, stride, dtype, name or pointer that no backend accepts
  kUnsupported = 2,        ///< a valid request that this build or device cannot serve
  kOutOfRange = 3,         ///< a count or size at or above its limit, for example 2^31 rows
  kWorkspaceTooSmall = 4,  ///< a buffer of the caller is missing or too small
  kCuda = 5,               ///< the CUDA runtime reported an error
  kInternal = 6,           ///< a defect of this library
};

/// Every public C++ function may throw an Error, or std::bad_alloc if host memory is exhausted.
/// After kCuda and kInternal, a part of the work may have been launched: outputs are then
/// undefined. With any other status the call was refused: it has launched no work and written no
/// output.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& sentence)
      : std::runtime_error(sentence), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

}  // namespace sonicmoe
