#include "runtime/launch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "machine.h"
#include "runtime/configuration.h"
#include "runtime/error.h"
#include "runtime/memory.h"

namespace sonicmoe::emulator {
namespace {

constexpr std::uint32_t kMostClusterCtas = 8;

/// A launch and the objects that it refers to.
struct Order {
  std::shared_ptr<const Program> program;
  std::string kernel;  ///< for people
  Launch launch;
};

Dim dim(dim3 d) { return {d.x, d.y, d.z}; }

std::uint64_t count(dim3 d) { return std::uint64_t{d.x} * d.y * d.z; }

/// Dynamic shared memory that a launch may have.
std::size_t most_dynamic_shared(Kernel& kernel, const Device& device) {
  const int allowed = kernel.dynamic_shared(device.ordinal()).load();
  const std::size_t own = kernel.program()->static_shared;
  return allowed > 0 ? allowed : kPlainShared - std::min(kPlainShared, own);
}

void check_shape(Kernel& kernel, const LaunchShape& shape, const Device& device) {
  const dim3 grid = shape.grid, block = shape.block, cluster = shape.cluster;
  constexpr std::uint32_t kMostX = std::numeric_limits<std::int32_t>::max();
  constexpr std::uint32_t kMostYz = std::numeric_limits<std::uint16_t>::max();
  require(count(grid) != 0 && count(block) != 0, cudaErrorInvalidConfiguration);
  require(grid.x <= kMostX && grid.y <= kMostYz && grid.z <= kMostYz,
          cudaErrorInvalidConfiguration);
  require(block.x <= kMostThreads && block.y <= kMostThreads && block.z <= 64 &&
              count(block) <= kMostThreads,
          cudaErrorInvalidConfiguration);
  require(count(block) <= static_cast<std::uint64_t>(kernel.most_threads()), cudaErrorInvalidValue);
  require(shape.shared <= most_dynamic_shared(kernel, device), cudaErrorInvalidValue);
  require(count(cluster) != 0 && count(cluster) <= kMostClusterCtas, cudaErrorInvalidClusterSize);
  require(grid.x % cluster.x == 0 && grid.y % cluster.y == 0 && grid.z % cluster.z == 0,
          cudaErrorInvalidClusterSize);
}

std::vector<std::byte> copy_arguments(const Program& program, void** arguments) {
  std::vector<std::byte> bytes(program.parameter_bytes);
  for (std::size_t i = 0; i < program.parameter_offsets.size(); ++i) {
    std::memcpy(bytes.data() + program.parameter_offsets[i], arguments[i],
                program.parameter_sizes[i]);
  }
  return bytes;
}

/// The seed of a launch's random order: different for each launch, and the same in every run of a
/// program with one thread.
std::uint64_t next_seed() {
  static std::atomic<std::uint64_t> launches{0};
  return configuration().seed + (launches.fetch_add(1) << 32);
}

void run_grid(const Order& order, const Device& device, const Neighbours& neighbours) {
  Settings settings;
  settings.multiprocessors = configuration().multiprocessors;
  settings.shared_bytes = configuration().limits.block_shared;
  settings.multiprocessor_threads = configuration().limits.multiprocessor_threads;
  settings.seed = next_seed();
  settings.patience_s = configuration().patience_s;
  const GridMemory seen(device);
  try {
    Grid(order.launch, settings, seen, neighbours).run();
  } catch (const std::exception& error) {
    throw DeviceFault(seen.is_violated() ? cudaErrorIllegalAddress : cudaErrorLaunchFailure,
                      order.kernel + ": " + error.what());
  }
}

}  // namespace

LaunchShape shape_of(const cudaLaunchConfig_t& config) {
  LaunchShape shape{config.gridDim, config.blockDim, dim3(1, 1, 1), config.dynamicSmemBytes, false};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case cudaLaunchAttributeClusterDimension: {
        require(configuration().limits.has_sm90(), cudaErrorNotSupported);
        const auto& cluster = attribute.val.clusterDim;
        shape.cluster = dim3(cluster.x, cluster.y, cluster.z);
        break;
      }
      case cudaLaunchAttributeIgnore:
      case cudaLaunchAttributePriority:
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        require(configuration().limits.has_sm90(), cudaErrorNotSupported);
        shape.may_overlap = attribute.val.programmaticStreamSerializationAllowed != 0;
        break;
      default:
        throw ApiError{cudaErrorNotSupported};
    }
  }
  return shape;
}

Work launch_work(Kernel& kernel, const LaunchShape& shape, void** arguments, const Device& device) {
  check_shape(kernel, shape, device);
  kernel.note_run();
  auto order = std::make_shared<Order>();
  order->program = kernel.program();
  order->kernel = kernel.readable_name();
  order->launch = {order->program.get(), dim(shape.grid),
                   dim(shape.block),     dim(shape.cluster),
                   shape.shared,         copy_arguments(*order->program, arguments)};
  const auto run = [order = std::shared_ptr<const Order>(std::move(order)), &device](
                       const Neighbours& neighbours) { run_grid(*order, device, neighbours); };
  return {run, shape.may_overlap};
}

void allow_dynamic_shared(Kernel& kernel, const Device& device, int bytes) {
  require(
      bytes >= 0 && kernel.program()->static_shared + bytes <= configuration().limits.block_shared,
      cudaErrorInvalidValue);
  kernel.dynamic_shared(device.ordinal()) = bytes;
}

cudaFuncAttributes attributes_of(Kernel& kernel, const Device& device) {
  constexpr int kMultiprocessorRegisters = 65536, kMostRegisters = 255, kRegisterUnit = 8;
  const auto program = kernel.program();
  cudaFuncAttributes attributes{};
  attributes.sharedSizeBytes = program->static_shared;
  attributes.localSizeBytes = program->local_bytes;
  attributes.maxThreadsPerBlock = kernel.most_threads();
  attributes.numRegs =
      std::min(kMostRegisters, kMultiprocessorRegisters / attributes.maxThreadsPerBlock /
                                   kRegisterUnit * kRegisterUnit);
  // PTX of another major version is compiled for the device.
  const int made_for = program->target.capability, device_is = configuration().limits.capability;
  attributes.ptxVersion = made_for;
  attributes.binaryVersion = made_for / 10 == device_is / 10 ? made_for : device_is;
  attributes.maxDynamicSharedSizeBytes = static_cast<int>(most_dynamic_shared(kernel, device));
  return attributes;
}

}  // namespace sonicmoe::emulator
