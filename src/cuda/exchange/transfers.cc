// Transfers of rows, partial sums and flags, by kernels (kPush) or by the copy engines (kCopy).
#include "cuda/exchange/exchange.h"

namespace sonicmoe::cuda {
namespace {

void copy_bytes(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream),
             "copying to another rank");
}

void copy_rows(void* to, const Tensor& from, cudaStream_t stream) {
  const std::int64_t count = from.shape[0];
  const std::int64_t width = from.shape[1] * dtype_bytes(from.dtype);
  const std::int64_t step = from.stride[0] * dtype_bytes(from.dtype);  // not used if count is 1
  if (count == 0) return;
  if (count == 1 || step == width) {
    copy_bytes(to, from.data, width * count, stream);
    return;
  }
  if (step < width) {  // rows overlap, which cudaMemcpy2DAsync refuses
    for (std::int64_t t = 0; t < count; ++t) {
      copy_bytes(static_cast<std::uint8_t*>(to) + t * width,
                 static_cast<const std::uint8_t*>(from.data) + t * step, width, stream);
    }
    return;
  }
  check_cuda(cudaMemcpy2DAsync(to, width, from.data, step, width, count, cudaMemcpyDefault, stream),
             "copying rows to another rank");
}

Control* control(const Exchange& e, std::int32_t rank) {
  return reinterpret_cast<Control*>(e.peers.base[rank]);
}

std::int32_t rank_at(const Exchange& e, std::int32_t place) {
  return (e.peers.rank + place) % e.peers.ranks;
}

/// Announces the phase to rank `to` by a copy engine. On the stream of the rows: a copy engine
/// works in the order in which copies of all streams were enqueued, so that a flag on another
/// stream would be copied behind rows that follow it.
void copy_flag(const Exchange& e, Phase phase, std::int32_t to, cudaStream_t stream) {
  copy_bytes(&control(e, to)->flags[phase][e.peers.rank],
             &control(e, e.peers.rank)->announced[phase], sizeof(std::uint32_t), stream);
}

/// The byte offset of this rank's rows in an array of rank `at` whose rows have the width and dtype
/// of `rows`.
std::int64_t place_at(const Exchange& e, std::int32_t at, const Tensor& rows) {
  return e.peers.place(e.peers.rank, at) * e.shape.max_tokens * rows.shape[1] *
         dtype_bytes(rows.dtype);
}

}  // namespace

void follow(const Exchange& e, cudaStream_t stream, cudaStream_t earlier) {
  check_cuda(cudaEventRecord(e.reached, earlier), "recording an event");
  check_cuda(cudaStreamWaitEvent(stream, e.reached), "waiting for an event");
}

void announce(const Exchange& e, Phase phase, cudaStream_t stream) {
  if (e.transport == ExchangeTransport::kPush) {
    announce_by_kernel(*e.device, e.peers, phase, stream);
    return;
  }
  for (std::int32_t i = 1; i < e.peers.ranks; ++i) copy_flag(e, phase, rank_at(e, i), stream);
}

void send_rows(const Exchange& e, const Tensor& rows, const RowTarget& target) {
  if (e.transport == ExchangeTransport::kPush) {
    push_rows(e.peers, e.shape, {rows.data, rows.stride[0], rows.shape[0], rows.shape[1]}, target,
              e.multiprocessors, e.sending);
    return;
  }
  // Each rank sends to the rank before it first, so that at any time each rank receives from one
  // other rank: a link that two ranks share is half as fast for both.
  for (std::int32_t i = e.peers.ranks - 1; i > 0; --i) {
    const std::int32_t to = rank_at(e, i);
    copy_rows(e.peers.base[to] + target.offset + place_at(e, to, rows), rows, e.sending);
    copy_flag(e, target.phase, to, e.sending);
  }
}

void send_partials(const Exchange& e, const PartialSource& source) {
  if (e.transport == ExchangeTransport::kPush) {
    push_partials(e.peers, e.shape, source, e.multiprocessors, e.sending);
    return;
  }
  const std::int64_t row = source.hidden * dtype_bytes(e.shape.dtype);
  const auto offset = [&](std::int32_t block) {
    return (block * e.shape.max_tokens + source.part.first) * row;
  };
  const std::int32_t to = rank_at(e, source.place);
  copy_bytes(e.peers.base[to] + e.layout.partials + offset(e.peers.rank),
             static_cast<const std::uint8_t*>(source.data) + offset(source.place),
             source.part.count * row, e.sending);
  copy_flag(e, source.part.phase, to, e.sending);
}

}  // namespace sonicmoe::cuda
