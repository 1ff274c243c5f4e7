#include "verify/device.h"

namespace sonicmoe::verify {
namespace {

[[noreturn]] void refuse() {
  throw Error(Status::kUnsupported, "backend is cuda, must be cpu: this build has no cuda backend");
}

}  // namespace

Memory device_memory() { refuse(); }
Implementation cuda_implementation(const Exec&) { refuse(); }
DeviceInfo device_info() { refuse(); }
std::unique_ptr<Clock> stream_clock(void*) { refuse(); }

}  // namespace sonicmoe::verify
