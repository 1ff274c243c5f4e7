// A stand-in backend with the smallest table of functions that a new backend needs, and the results
// of the public functions for the entries that it lacks.
#include "core/backend_table.h"

#include <gtest/gtest.h>

#include "core/plan.h"
#include "cpu/backend.h"

namespace sonicmoe {

// Takes the place of src/cpu/backend.cc, whose object is then not linked from the static library.
const BackendTable* cpu_backend() {
  static constexpr BackendTable kStandIn = [] {
    BackendTable table;
    table.name = "stand-in";
    table.buffer_alignment = 16;
    table.device_open = [](std::int32_t, const char*) -> void* { return nullptr; };
    table.layer_tiles = [](const Problem&, const Exec&) {
      return std::vector<TileChoice>{{"A", "3x5"}};
    };
    table.moe_sizes = [](const Problem&, Pass, const Exec&) { return Sizes{1, 2, 3}; };
    table.grouped_gemm_scratch_bytes = [](std::int64_t rows, std::int64_t) { return rows; };
    return table;
  }();
  return &kStandIn;
}

namespace {

template <class Call>
std::string refusal(Call&& call, Status status) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), status);
    return e.what();
  }
  return "accepted";
}

Exec stand_in(const void* device) {
  Exec exec;
  exec.device = device;
  return exec;
}

TEST(BackendTable, ServesWhatTheTableHasAndRefusesTheRestByName) {
  const int device = 0;
  const Exec exec = stand_in(&device);
  EXPECT_EQ(grouped_gemm_scratch_bytes(7, 2, exec), 7);
  const auto losses = [&] { router_losses_scratch_bytes(4, 2, exec); };
  EXPECT_EQ(refusal(losses, Status::kUnsupported),
            "router_losses is not served by the backend stand-in, must run on another");
}

TEST(BackendTable, SaysWhetherADeviceIsNeeded) {
  const auto call = [] { grouped_gemm_scratch_bytes(7, 2, stand_in(nullptr)); };
  EXPECT_EQ(refusal(call, Status::kInvalidArgument),
            "device is null, must be a handle of smoe_device_open for the stand-in backend");
}

TEST(BackendTable, AnswersThePlan) {
  const Problem p = problem_of({4, 8, 8, 2, 1}, DType::kF32, {});
  EXPECT_EQ(workspace_cost(p, {}).backward, 3);
  EXPECT_EQ(chosen_tiles(p, {}).at("A"), "3x5");
}

TEST(BackendTable, FindsBackendsByNameAndRefusesUnknownOnes) {
  EXPECT_STREQ(backend_name(Backend::kCuda), "cuda");
  EXPECT_EQ(backend_from_name("cpu"), Backend::kCpu);
  EXPECT_EQ(refusal([] { backend_from_name("tpu"); }, Status::kInvalidArgument),
            "backend is \"tpu\", must be one of: cpu, cuda");
  EXPECT_EQ(refusal([] { find_backend(static_cast<Backend>(2)); }, Status::kInvalidArgument),
            "backend is 2, must be in 0 to 1");
}

}  // namespace
}  // namespace sonicmoe
