// The version of these headers, and of the library that is linked.
#pragma once

#include "sonicmoe/types.h"

#define SONICMOE_VERSION_MAJOR 0
#define SONICMOE_VERSION_MINOR 1
#define SONICMOE_VERSION_PATCH 0
#define SONICMOE_VERSION_STRING "0.1.0"

namespace sonicmoe {

/// The version of the linked library, for example "0.1.0".
SONICMOE_API const char* version_string();

}  // namespace sonicmoe
