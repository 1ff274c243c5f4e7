// Several ranks in one process: each has its own stream, exchange and symmetric buffer, on one GPU
// or divided among several GPUs. Everything except the link between GPUs is as with one process for
// each rank.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda/device_array.h"
#include "cuda/engines.h"
#include "cuda/exchange/exchange.h"
#include "cuda/rank_layer.h"

namespace sonicmoe::testing {

/// Ranks of one GPU must not share a hardware queue: a waiting rank would block the rank that it
/// waits for. CUDA reads the variables when it starts.
inline const bool kManyQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0 &&
                                setenv("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "32", 1) == 0;

struct GroupOptions {
  ExchangeShape shape{};
  ExchangeTransport transport = ExchangeTransport::kPush;
  /// On the emulator a step can take 15 seconds of a busy machine.
  std::int64_t time_limit_ms = 60'000;
  int devices = 1;
  const char* engine = nullptr;  ///< null: the device's first engine
};

class PretendedRanks {
 public:
  explicit PretendedRanks(const GroupOptions& options) : shape_(options.shape) {
    std::vector<void*> addresses;
    for (std::int32_t r = 0; r < size(); ++r) {
      ranks_.push_back(std::make_unique<Rank>(r % options.devices));
      Rank& rank = *ranks_.back();
      must(cudaSetDevice(rank.ordinal));
      for (int other = 0; other < options.devices; ++other) {
        if (other == rank.ordinal) continue;
        const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
        if (status != cudaErrorPeerAccessAlreadyEnabled) must(status);
        cudaGetLastError();
      }
      must(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      rank.device = cuda::open_device(rank.ordinal, options.engine);
      rank.buffer = std::make_unique<DeviceArray>(exchange_bytes(shape_, exec(r)));
      addresses.push_back(rank.buffer->data());
    }
    for (std::int32_t r = 0; r < size(); ++r) {
      ExchangeOptions o;
      o.shape = shape_;
      o.rank = r;
      o.buffers = addresses.data();
      o.buffer_bytes = ranks_[r]->buffer->bytes();
      o.time_limit_ms = options.time_limit_ms;
      o.transport = options.transport;
      ranks_[r]->exchange = exchange_open(o, exec(r));
    }
    must(cudaSetDevice(0));
  }
  ~PretendedRanks() {
    wait_quietly();
    for (std::int32_t r = 0; r < size(); ++r) {
      exchange_close(ranks_[r]->exchange, exec(r));
      ranks_[r]->buffer.reset();
      cudaStreamDestroy(ranks_[r]->stream);
      cuda::close_device(ranks_[r]->device);
    }
    cudaSetDevice(0);
  }
  PretendedRanks(const PretendedRanks&) = delete;
  PretendedRanks& operator=(const PretendedRanks&) = delete;

  std::int32_t size() const { return shape_.ranks; }
  const ExchangeShape& shape() const { return shape_; }
  Exchange& exchange(std::int32_t r) const { return *ranks_[r]->exchange; }
  DeviceArray& buffer(std::int32_t r) const { return *ranks_[r]->buffer; }
  cudaStream_t stream(std::int32_t r) const { return ranks_[r]->stream; }
  int ordinal(std::int32_t r) const { return ranks_[r]->ordinal; }
  Exec exec(std::int32_t r) const {
    Exec e;
    e.backend = Backend::kCuda;
    e.device = ranks_[r]->device;
    e.stream = ranks_[r]->stream;
    return e;
  }

  RankHandle handle(std::int32_t r) const { return {&exchange(r), exec(r), ordinal(r), r, size()}; }

  /// An array in a rank's symmetric buffer.
  template <class T>
  T* at(std::int32_t r, std::int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::uint8_t*>(buffer(r).data()) + offset);
  }

  /// Waits for all GPUs; throws the first rank's fault.
  void wait() const {
    wait_quietly();
    for (std::int32_t r = 0; r < size(); ++r) exchange_check(exchange(r), exec(r));
  }
  void wait_quietly() const {
    for (std::int32_t r = 0; r < size(); ++r) {
      must(cudaSetDevice(ordinal(r)));
      must(cudaDeviceSynchronize());
    }
    must(cudaSetDevice(0));
  }
  void reset() const {
    wait_quietly();
    for (std::int32_t r = 0; r < size(); ++r) exchange_reset(exchange(r), exec(r));
  }

 private:
  struct Rank {
    explicit Rank(int o) : ordinal(o) {}
    int ordinal;
    cudaStream_t stream = nullptr;
    const cuda::Device* device = nullptr;
    std::unique_ptr<DeviceArray> buffer;
    Exchange* exchange = nullptr;
  };

  ExchangeShape shape_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace sonicmoe::testing
