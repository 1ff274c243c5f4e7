#include "core/backend_table.h"

namespace sonicmoe {

const CudaBackend* cuda_backend() { return nullptr; }

}  // namespace sonicmoe
