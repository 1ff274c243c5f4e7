#include "core/backend_table.h"

namespace sonicmoe {

const BackendTable* cuda_backend() { return nullptr; }

}  // namespace sonicmoe
