// How the kernels of a pass are timed one by one: the layer says where each begins and ends.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// Called by the thread that called the layer. On CUDA the work between begin and end has been put
/// on Exec::stream, not done. A kernel may come several times in a pass: its time is the sum.
class KernelObserver {
 public:
  virtual ~KernelObserver() = default;
  virtual void begin(const char* kernel) = 0;
  virtual void end() = 0;
};

template <class F>
void observed(const Exec& exec, const char* kernel, F work) {
  if (exec.observer != nullptr) exec.observer->begin(kernel);
  work();
  if (exec.observer != nullptr) exec.observer->end();
}

}  // namespace sonicmoe
