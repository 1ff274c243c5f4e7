// The backend "cuda".
#pragma once

#include "core/backend_table.h"

namespace sonicmoe {

const BackendTable* cuda_backend();

}  // namespace sonicmoe
