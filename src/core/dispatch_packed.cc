#include "core/backend_table.h"
#include "core/checks.h"

namespace sonicmoe {

void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec) {
  checks::unpack_weights(packed, out, exec);
  checks::unpack_weights_overlap(packed, out);
  serve(exec, "unpack_weights", &BackendTable::unpack_weights)(packed, out, exec);
}

}  // namespace sonicmoe
