// Errors. The message of a refused call is one sentence: which argument is wrong, its value, and
// what it must be.
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
  kOutOfRange = 3,         ///< a count or a size that overflows its type
  kWorkspaceTooSmall = 4,  ///< a buffer of the caller is missing or too small
  kCuda = 5,               ///< the CUDA runtime reported an error
  kInternal = 6,           ///< a defect of this library
};

/// Every public C++ function may throw an Error. A refused call has done no work and written no
/// output. kCuda and kInternal may also occur after a part of the work was launched: outputs are
/// then undefined.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& sentence)
      : std::runtime_error(sentence), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

}  // namespace sonicmoe
