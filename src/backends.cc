// The table of backends. This file alone knows all of them; the core knows none.
#include <iterator>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "cpu/backend.h"
#if defined(SONICMOE_WITH_CUDA)
#include "cuda/backend.h"
#endif

namespace sonicmoe {
namespace {

struct Row {
  const char* name;
  const BackendTable* (*table)();  ///< returns null in a build without the backend
};
// By the value of Backend.
constexpr Row kBackends[] = {
    {"cpu", &cpu_backend},
#if defined(SONICMOE_WITH_CUDA)
    {"cuda", &cuda_backend},
#else
    {"cuda", [] { return static_cast<const BackendTable*>(nullptr); }},
#endif
};
constexpr auto kBackendCount = static_cast<std::int32_t>(std::size(kBackends));

const Row& row_of(Backend backend) {
  const auto index = static_cast<std::int32_t>(backend);
  checks::known("backend", index, kBackendCount);
  return kBackends[index];
}

}  // namespace

const char* backend_name(Backend backend) { return row_of(backend).name; }

Backend backend_from_name(const std::string& name) {
  std::string known;
  for (std::int32_t i = 0; i < kBackendCount; ++i) {
    if (name == kBackends[i].name) return static_cast<Backend>(i);
    known += (i == 0 ? "" : ", ") + std::string(kBackends[i].name);
  }
  checks::refuse("backend is \"" + name + "\", must be one of: " + known);
}

const char* cuda_absence() {
#ifdef SONICMOE_CUDA_ABSENCE  // cmake/cuda.cmake
  return SONICMOE_CUDA_ABSENCE;
#else
  return "";
#endif
}

const BackendTable* find_backend(Backend backend) { return row_of(backend).table(); }

const BackendTable& backend_table(Backend backend) {
  const BackendTable* table = find_backend(backend);
  if (table != nullptr) return *table;
  std::string present;
  for (const Row& row : kBackends) {
    if (row.table() != nullptr) present += (present.empty() ? "" : " or ") + std::string(row.name);
  }
  const std::string name = backend_name(backend);
  checks::refuse(Status::kUnsupported, "backend is " + name + ", must be " + present +
                                           ": this build has no " + name + " backend (" +
                                           cuda_absence() + ")");
}

}  // namespace sonicmoe
