// Times the kernels of a pass one by one: the layer calls begin and end around each launch.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// The thread that called the layer calls begin and end. On CUDA the kernels between them may still
/// run on Exec::stream when end is called. A kernel may be launched several times in a pass: its
/// time is the sum.
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
