#include "cuda/device/device.h"

#include <algorithm>
#include <memory>
#include <string>

namespace sonicmoe::cuda {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(Status::kCuda, std::string(what) + " failed: " + cudaGetErrorString(status) + ".");
}

const Device* open_device(int ordinal) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess && counted != cudaErrorNoDevice) {
    throw Error(Status::kUnsupported,
                std::string("no CUDA device can be used: ") + cudaGetErrorString(counted) + ".");
  }
  if (ordinal < 0 || ordinal >= count) {
    throw Error(Status::kInvalidArgument, "ordinal is " + std::to_string(ordinal) +
                                              " but this machine has " + std::to_string(count) +
                                              " CUDA devices.");
  }
  int major = 0;
  int minor = 0;
  auto device = std::make_unique<Device>();
  device->ordinal = ordinal;
  const auto attribute = [&](int* value, cudaDeviceAttr which) {
    check_cuda(cudaDeviceGetAttribute(value, which, ordinal), "reading device attributes");
  };
  attribute(&major, cudaDevAttrComputeCapabilityMajor);
  attribute(&minor, cudaDevAttrComputeCapabilityMinor);
  device->capability = 10 * major + minor;
  attribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount);
  if (major != 9 || minor != 0) {
    throw Error(Status::kUnsupported, "device " + std::to_string(ordinal) +
                                          " has compute capability " + std::to_string(major) + "." +
                                          std::to_string(minor) +
                                          " but the kernels of this build need 9.0 (H100, H200).");
  }
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                              cudaEnableDefault, &found),
             "looking up cuTensorMapEncodeTiled");
  device->encode = reinterpret_cast<Device::Encode>(entry);
  device->prepared = std::make_unique<std::atomic<bool>[]>(kernel_list().size());
  return device.release();
}

void close_device(const Device* device) { delete device; }

const Device& device_of(const Exec& exec) {
  if (exec.device == nullptr) {
    throw Error(Status::kInvalidArgument,
                "exec.device is null but the CUDA backend needs the handle of smoe_device_open.");
  }
  return *static_cast<const Device*>(exec.device);
}

CUtensorMap encode_map(const Device& device, DType dtype, const void* base,
                       std::initializer_list<MapDim> dims) {
  constexpr int kMaxRank = 5;
  cuuint64_t sizes[kMaxRank];
  cuuint64_t strides[kMaxRank];
  cuuint32_t boxes[kMaxRank];
  cuuint32_t steps[kMaxRank];
  int rank = 0;
  for (const MapDim& dim : dims) {
    sizes[rank] = static_cast<cuuint64_t>(dim.size);
    boxes[rank] = static_cast<cuuint32_t>(dim.box);
    steps[rank] = 1;
    // A dimension of one element never moves, whatever stride the caller's view gives it.
    const std::int64_t stride = dim.size == 1 ? 8 : dim.stride;
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(stride) * kElementBytes;
    rank++;
  }
  // The swizzle spans a row of the box.
  const bool narrow = boxes[0] * kElementBytes <= 64;
  CUtensorMap map;
  const CUresult result = device.encode(
      &map,
      dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      rank, const_cast<void*>(base), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::kInternal, "the driver refused a tensor map (code " +
                                       std::to_string(static_cast<int>(result)) + ").");
  }
  return map;
}

const KernelEntry& find_kernel(const KernelKey& key) {
  for (const KernelEntry& entry : kernel_list()) {
    if (entry.key == key) return entry;
  }
  throw Error(Status::kInternal, "a kernel is missing from this build.");
}

std::int64_t clusters_of(const Device& device, const TileShape& shape, std::int64_t tiles) {
  return std::min<std::int64_t>(device.multiprocessors / shape.cluster, tiles);
}

void launch_gemm(const Device& device, const KernelEntry& kernel, const void* params,
                 std::int64_t tiles, cudaStream_t stream) {
  const TileShape shape = tile_shape(kernel.key.tile);
  const int bytes = shared_bytes(shape);
  // On first use: asking for every kernel when the device is opened would load them all.
  std::atomic<bool>& prepared = device.prepared[&kernel - kernel_list().data()];
  if (!prepared.load(std::memory_order_relaxed)) {
    check_cuda(
        cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "setting a kernel's shared memory");
    prepared.store(true, std::memory_order_relaxed);
  }
  const std::int64_t clusters = clusters_of(device, shape, tiles);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  // The kernel waits for the one before it itself, so its prologue may overlap that one's end.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * shape.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  void* arguments[] = {const_cast<void*>(params)};
  check_cuda(cudaLaunchKernelExC(&config, kernel.function, arguments), "launching a kernel");
}

}  // namespace sonicmoe::cuda
